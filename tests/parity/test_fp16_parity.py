"""fp16 trains as under stock DeepSpeed, step by step: the same scales, skipped steps, losses and weights.

The first scale is so large that the first steps overflow; a window of three steps makes it grow into further
overflows. At ZeRO-0 stock is no yardstick, because it never multiplies the loss and yet divides by the scale.
"""

from __future__ import annotations

import pytest

import ranks
from parity import dsx_run
from parity.fp16_runs import Case, Step, Trained, ours, stock

CPU = {"device": "cpu"}


def beside(rank: int, world_size: int, pairs: list[tuple[Case, Case]]) -> list[tuple[Trained, Trained]]:
    """Stock and dsx in each case, on the same ranks."""
    import deepspeed

    deepspeed.init_distributed()
    return [(stock(theirs, world_size), ours(mine)) for theirs, mine in pairs]


PAIRS = {
    "zero1": (Case(zero=1), Case(zero=1)),
    "zero2": (Case(zero=2), Case(zero=2, reduce="micro_batch")),
    "zero3": (Case(zero=3), Case(zero=3)),
    "pipeline": (Case(zero=1, pp=2), Case(zero=1, pp=2)),
}


def test_equal_to_stock_deepspeed() -> None:
    """Without clipping, whose norm dsx sums in another order: to the last bit."""
    results = ranks.run(beside, 2, list(PAIRS.values()))
    for name, *pairs in zip(PAIRS, *results, strict=True):
        for theirs, mine in pairs:
            assert mine.seen() == theirs.seen(), name
            assert mine.weights == theirs.weights, name
            assert mine.steps[8].skipped == 9, name
            assert 10 < mine.steps[-1].skipped < 20, name
            true = [step.norm for step in mine.steps]
            # On the step on which the scale grows DeepSpeed's ZeRO-3 divides its norm by the new scale.
            halves = [step.norm * (1 + (name == "zero3" and grows)) for step, grows in grown(theirs.steps)]
            assert true == pytest.approx(halves, rel=1e-5), name


def grown(steps: list[Step]) -> list[tuple[Step, bool]]:
    """Each step, and whether the scale grew after it."""
    after = [*(step.scale for step in steps[1:]), 0.0]
    return [(step, scale > step.scale) for step, scale in zip(steps, after, strict=True)]


def all_of_ours(rank: int, world_size: int, cases: list[Case]) -> list[Trained]:
    import deepspeed

    deepspeed.init_distributed()
    return [ours(case) for case in cases]


LAYOUTS = {
    "zero0": Case(zero=0, pp=2),
    "zero1": Case(zero=1, pp=2),
    "zero2": Case(zero=2, pp=2),
    "zero3": Case(zero=3, pp=2),
    "zero1-chunks": Case(zero=1, pp=2, chunks=2),
    "zero3-zbv": Case(zero=3, pp=2, chunks=2, schedule="zbv"),
    "zero1-offload": Case(zero=1, pp=2, chunks=2, zero_keys={"offload_optimizer": CPU}),
    "zero2-offload": Case(zero=2, pp=2, zero_keys={"offload_optimizer": CPU}),
    "zero3-offload": Case(zero=3, pp=2, zero_keys={"offload_optimizer": CPU}),
    "zero0-hooked": Case(zero=0, pp=2, keys={"wall_clock_breakdown": True}),
    "zero1-cast": Case(zero=1, pp=2, fp16={"auto_cast": True}),
}


@pytest.mark.slow
def test_layouts_agree() -> None:
    results = dict(zip(LAYOUTS, ranks.run(all_of_ours, 2, list(LAYOUTS.values()))[0], strict=True))
    known = results["zero1"]
    for name, result in results.items():
        assert [step[:5] for step in result.seen()] == [step[:5] for step in known.seen()], name
        exact = name in ("zero0", "zero2")  # the others add tied or accumulated gradients in another order
        losses = [step.loss for step in known.steps]
        assert [step.loss for step in result.steps] == pytest.approx(losses, rel=0 if exact else 1e-3), name
        assert not exact or result.weights == known.weights, name


LARGE = (("fp16", {"enabled": True, "initial_scale_power": 26, "loss_scale_window": 3}),)
FAMILY_STEPS = 16
FAMILY = {
    "pp2": dsx_run.Case(family="gpt2", pp=2, zero=1, extra=LARGE),
    "tp2": dsx_run.Case(family="gpt2", tp=2, zero=2, extra=LARGE),
    "tp2-whole-sequences": dsx_run.Case(family="gpt2", tp=2, zero=0, sequence_parallel=False, extra=LARGE),
    "interleaved_zb": dsx_run.Case(
        family="gpt2", pp=2, chunks=2, zero=1, schedule="interleaved_zb", extra=LARGE
    ),
    "zbv": dsx_run.Case(family="gpt2", pp=2, chunks=2, zero=3, schedule="zbv", recompute="full", extra=LARGE),
    "zb_h1": dsx_run.Case(family="gpt2", pp=2, zero=0, schedule="zb_h1", extra=LARGE),
}


def family(rank: int, world_size: int) -> list[list[tuple[float, int, float, float]]]:
    """Of each case's steps: scale, skipped steps, loss, norm."""
    found = []
    for case in FAMILY.values():
        engine, _ = dsx_run.build(case, None)
        rows = []
        for step in range(FAMILY_STEPS):
            scale = engine.current_loss_scale
            loss = float(engine.train_batch(dsx_run.batches(case, step, engine.groups.dp_rank)))
            rows.append((scale, int(engine.skipped_steps), loss, engine.get_global_grad_norm()))
        found.append(rows)
    return found


@pytest.mark.slow
def test_a_family_in_every_kind_of_layout() -> None:
    """Tied weights, tensor parallelism, chunks and divided backwards: the same steps overflow everywhere."""
    results = dict(zip(FAMILY, ranks.run(family, 2)[0], strict=True))
    known = results["pp2"]
    assert {row[0] for row in known} > {2.0**26, 2.0**25}
    assert 3 < known[-1][1] < FAMILY_STEPS - 3
    for name, rows in results.items():
        assert [row[:2] for row in rows] == [row[:2] for row in known], name
        for at in (2, 3):
            assert [row[at] for row in rows] == pytest.approx([row[at] for row in known], rel=5e-3), name
