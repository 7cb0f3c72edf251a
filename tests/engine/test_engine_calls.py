"""Which calls a step makes, and that all three ways train alike."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import ranks
from engine import toy_pipeline as toy
from engine.toy_pipeline import Case

CASES = {
    "PlainCalls": [
        Case(pp=2, chunks=2, zero=0),
        Case(pp=2, chunks=2, zero=1, layers="tied"),
        Case(pp=2, chunks=2, zero=2),
        Case(pp=2, chunks=2, zero=1, zero_keys={"offload_optimizer": {"device": "cpu"}}),
        Case(pp=2, chunks=2, zero=1, module={"schedule": "zbv"}),
        Case(pp=2, chunks=2, zero=1, layers="tuples", module={"partition_method": [1, 1, 1, 2]}),
        Case(pp=2, chunks=2, zero=1, bf16=True, keys={"data_types": {"grad_accum_dtype": "fp32"}}),
    ],
    "DirectCalls": [
        Case(pp=2, chunks=2, zero=1, keys={"data_types": {"grad_accum_dtype": "bf16"}}),
        Case(pp=2, chunks=2, zero=0, bf16=True),
    ],
    "EngineCalls": [
        Case(pp=2, chunks=2, zero=3),
        Case(pp=2, chunks=2, zero=1, keys={"wall_clock_breakdown": True}),
        Case(pp=2, chunks=2, zero=2, zero_keys={"offload_optimizer": {"device": "cpu"}}),
    ],
}


def _trained(rank: int, world_size: int, cases: list[Case]) -> list[tuple[str, Any, list[int]]]:
    found = []
    for case in cases:
        made = toy.engine(case)
        hooks = [len(p._post_accumulate_grad_hooks or ()) for p in made.module.parameters()]
        found.append((type(made._calls).__name__, toy.train(case, made), hooks))
    return found


@pytest.mark.parametrize("way", CASES)
def test_the_cheapest_right_way(way: str) -> None:
    cases = CASES[way]
    for case, (name, losses, hooks) in zip(cases, ranks.run(_trained, 2, cases)[0], strict=True):
        assert name == way, case
        if way == "PlainCalls":
            # BF16_Optimizer's gradients are added up by one of dsx's.
            assert set(hooks) == {int(case.bf16)}, "DeepSpeed still counts gradients"
        expected = toy.oracle(case.layers, micro_batches=2)
        exact = not (case.bf16 or case.keys.get("data_types"))
        assert toy.flat(losses) == pytest.approx(toy.flat(expected), rel=1e-5 if exact else 3e-2), case


def _profiled(rank: int, world_size: int, case: Case, file: Path) -> None:
    made = toy.engine(replace(case, keys={"flops_profiler": _profiler(file)}))
    for step in range(3):
        made.train_batch(toy.batches(step, case.micro_batches))


def _profiled_by_stock(rank: int, world_size: int, file: Path) -> None:
    """DeepSpeed's engine without a pipeline, on the same layers."""
    import deepspeed
    from torch import nn

    deepspeed.init_distributed()
    model = nn.Sequential(*(spec.build() for spec in toy.layers("plain")))
    config = toy.config(Case(micro_batches=1, keys={"flops_profiler": _profiler(file)}))
    made, *_ = deepspeed.initialize(model=model, config=config)
    for step in range(3):
        ((inputs, labels),) = toy.batches(step, 1)
        made.backward(toy.loss_fn(made(inputs), labels))
        made.step()


def _profiler(file: Path) -> dict[str, Any]:
    return {"enabled": True, "profile_step": 1, "output_file": str(file), "detailed": False}


COUNTED = ("params per GPU", "fwd MACs per GPU", "fwd flops per GPU")


def _counts(file: Path) -> list[float]:
    """Parameters, multiply-accumulates and FLOPs that the profiler has written."""
    text = file.read_text()
    found = [re.search(rf"^{name}: +([\d.]+) ?(K?)", text, re.MULTILINE) for name in COUNTED]
    assert all(found), text
    return [float(match[1]) * (1000 if match[2] else 1) for match in found if match]


@pytest.mark.parametrize(
    "case",
    [
        Case(micro_batches=1),
        # DeepSpeed's own linear for ZeRO-3 is counted twice, as a linear and as the product inside it.
        Case(chunks=2, zero=3, zero_keys={"memory_efficient_linear": False}),
        Case(pp=2, chunks=2, zero=1, micro_batches=3),
    ],
)
def test_the_flops_profiler_counts_a_whole_step_of_rank_0(case: Case, tmp_path: Path) -> None:
    """A linear of 8 x 8 is as many multiply-accumulates a row; every chunk and micro-batch counts."""
    ranks.run(_profiled, case.pp, case, tmp_path / "ours")
    layers, rows = 4 // case.pp, case.micro_batches * toy.ROWS
    macs = layers * rows * toy.WIDTH**2
    parameters = layers * (toy.WIDTH**2 + toy.WIDTH)
    assert _counts(tmp_path / "ours") == pytest.approx([parameters, macs, 2 * macs], rel=5e-3)
    # Of the whole module too, which DeepSpeed 0.19.8 gives in gigaseconds.
    assert re.search(r"fwd latency - \{'Chunks': '[\d.]+ [mu]?s'\}", (tmp_path / "ours").read_text())
    if case.micro_batches == 1:
        ranks.run(_profiled_by_stock, 1, tmp_path / "stock")
        assert _counts(tmp_path / "ours") == _counts(tmp_path / "stock")
