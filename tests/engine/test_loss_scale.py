"""fp16's loss scale beside what else skips steps (its control, faults), in checkpoints, and beside fp32."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import ranks
from dsx.checkpoint.execute import ConversionOptions
from dsx.checkpoint.layouts import TargetDegrees
from dsx.checkpoint.open import open_checkpoint
from dsx.checkpoint.reshard import WantedTarget, prepare
from dsx.errors import CheckpointError, RunError
from fault_tolerance.guarded import Run
from parity import dsx_run
from parity.fp16_runs import Case, batches, made, ours

CASES = [Case(zero=zero, pp=2) for zero in (0, 1, 2, 3)]
REFUSED = 13
"""A step that does not overflow, in the middle of a window."""


def begin() -> None:
    import deepspeed

    deepspeed.init_distributed()


def steered(rank: int, world_size: int) -> list[dict[str, Any]]:
    begin()
    return [steered_run(made(case)) for case in CASES]


def steered_run(engine: Any) -> dict[str, Any]:
    asked: list[tuple[int, float]] = []
    scaler, scales, overflowed = engine.optimizer.loss_scaler, [], []

    def refuses(loss: float, norm: float) -> bool:
        asked.append((int(engine.global_steps), norm))
        return engine.global_steps == REFUSED

    engine.step_control.refuses = refuses
    for step in range(18):
        state = scaler.cur_scale, scaler.cur_iter, scaler.cur_hysteresis, scaler.last_overflow_iter
        scales.append(state)
        engine.train_batch(batches(engine, step))
        overflowed.append((engine.overflowed, engine.step_applied, engine.get_global_grad_norm()))
    return {"asked": asked, "scales": scales, "overflowed": overflowed, "lr": engine.get_lr()}


def test_a_refused_step_is_no_overflow_and_an_overflow_is_not_asked_about() -> None:
    for result in ranks.run(steered, 2)[0]:
        overflowed = [each[0] for each in result["overflowed"]]
        assert sum(overflowed) >= 9
        assert [step for step, _ in result["asked"]] == [at for at, each in enumerate(overflowed) if not each]
        assert all(0 < norm < 100 for _, norm in result["asked"])  # without the scale
        assert result["overflowed"][REFUSED][:2] == (False, False)
        assert result["scales"][REFUSED + 1] == result["scales"][REFUSED]
        assert result["scales"][REFUSED][1] == REFUSED  # every other step counts
        assert [norm == float("inf") for _, _, norm in result["overflowed"]] == overflowed
        applied = sum(each[1] for each in result["overflowed"])
        assert result["lr"][0] == pytest.approx((applied - 1) * 1e-2 / 20)  # the first is at 0


def guarded(rank: int, world_size: int, folder: str) -> list[tuple[list[str], int, list[float]]]:
    """Runs whose first steps overflow, under the strictest policy."""
    found = []
    for number, zero in enumerate((1, 3)):
        extra = (("fp16", {"enabled": True, "initial_scale_power": 28, "hysteresis": 1}),)
        case = dsx_run.Case(family="gpt2", dp=2, zero=zero, accumulation=2, extra=extra)
        run = Run(case, Path(folder) / str(number), nonfinite="stop")
        run.resume()
        norms = []
        for _ in range(14):
            run.step()
            assert not run.rolled_back()
            norms.append(run.engine.get_global_grad_norm())
        found.append((run.messages.warnings, int(run.engine.skipped_steps), norms))
    return found


def test_an_overflow_is_no_bad_step(tmp_path: Path) -> None:
    for warnings, skipped, norms in ranks.run(guarded, 2, str(tmp_path))[0]:
        assert warnings == []
        assert 3 < skipped < 14
        assert [norm == float("inf") for norm in norms] == [step < skipped for step in range(14)]


def at_minimum(rank: int, world_size: int) -> list[str]:
    begin()
    said = []
    for zero in (0, 1, 3):
        engine = made(Case(zero=zero, pp=2, fp16={"min_loss_scale": 2**24, "hysteresis": 1}))
        with pytest.raises(RunError) as caught:
            engine.train_batch(batches(engine, 0))
        said.append(str(caught.value))
    return said


def test_an_overflow_at_the_least_scale_ends_the_run_on_every_rank() -> None:
    for said in ranks.run(at_minimum, 2):
        assert all("the loss scale 1.67772e+07: gradients overflow in fp16" in each for each in said)


def fixed(rank: int, world_size: int) -> list[list[float]]:
    """Losses and norms in fp32, and in fp16 with a scale that is never changed."""
    begin()
    losses = []
    for case in [Case(zero=0, pp=2, fp16={"enabled": False}), *CASES]:
        steps = ours(replace(case, fp16={**case.fp16, "loss_scale": 512}), 6).steps
        losses.append([value for step in steps for value in (step.loss, step.norm)])
    return losses


def test_beside_fp32() -> None:
    exact, *halves = ranks.run(fixed, 2)[0]
    for half in halves:
        assert half == pytest.approx(exact, rel=5e-3)
        assert half != exact


SAVED, LAST = 15, 24
"""Steps at the save, in the middle of a window, and at the end."""


def resumed(rank: int, world_size: int, folder: str) -> list[dict[str, Any]]:
    begin()
    found = []

    def go_on(engine: Any) -> dict[str, Any]:
        scaler, scales, losses = engine.optimizer.loss_scaler, [], []
        for step in range(int(engine.global_steps), LAST):
            losses.append(float(engine.train_batch(batches(engine, step))))
            scales.append((scaler.cur_scale, scaler.cur_iter, scaler.cur_hysteresis, engine.skipped_steps))
        return {"scales": scales, "losses": losses}

    for case in CASES:
        engine = made(case)
        for step in range(SAVED):
            engine.train_batch(batches(engine, step))
        engine.save_checkpoint(Path(folder) / f"zero{case.zero}", "middle")
        found.append(go_on(engine))
        again = made(case)
        again.load_checkpoint(Path(folder) / f"zero{case.zero}", "middle")
        found.append(go_on(again))
    other = made(Case(zero=2, pp=2, chunks=2))
    other.load_checkpoint(Path(folder) / "zero0", "middle")
    return [*found, go_on(other)]


def test_a_resume_in_the_middle_of_a_window_is_exact(tmp_path: Path) -> None:
    *pairs, other = ranks.run(resumed, 2, str(tmp_path))[0]
    for straight, again in zip(pairs[::2], pairs[1::2], strict=True):
        assert again == straight
    assert other["scales"] == pairs[0]["scales"]
    assert other["losses"] == pytest.approx(pairs[0]["losses"], rel=1e-3)
    source = open_checkpoint(tmp_path / "zero1" / "middle")
    assert source.facts["precision"] == "fp16"
    state = source.facts["loss_scale"]
    assert state["cur_iter"] == SAVED
    assert SAVED - state["last_overflow_iter"] in (2, 3)
    for name, wanted in WAYS.items():
        prepare(source, tmp_path / name, wanted).run(ConversionOptions(workers=1))
        there = open_checkpoint(tmp_path / name).facts["loss_scale"]
        assert {key: there.get(key) for key in KEPT} == {key: state[key] for key in KEPT}, name


KEPT = ("scale", "cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis", "scale_window")
WAYS = {
    "deepspeed": WantedTarget(format="deepspeed", degrees=TargetDegrees(data=2, pipeline=1, zero=1)),
    "universal": WantedTarget(format="universal"),
    "dcp": WantedTarget(format="dcp"),
    "dsx": WantedTarget(degrees=TargetDegrees(data=2, pipeline=1, zero=3)),
}


@pytest.mark.parametrize(
    ("key", "value"), [("cur_scale", 0), ("cur_scale", "65536"), ("cur_hysteresis", -1), ("cur_iter", True)]
)
def test_a_saved_state_that_no_scaler_has_is_refused(key: str, value: Any) -> None:
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

    from dsx.checkpoint.run.state import _restore_loss_scale

    scaler = DynamicLossScaler(2**16, 1000, 1, 2, False)
    optimizer = SimpleNamespace(loss_scaler=scaler)
    engine = SimpleNamespace(fp16_enabled=lambda: True, optimizer=optimizer)
    run: Any = SimpleNamespace(deepspeed_engine=engine)
    saved = {"dynamic": True, "cur_scale": 8.0, "cur_iter": 5, "last_overflow_iter": 3, "cur_hysteresis": 9}
    with pytest.raises(CheckpointError, match=rf"here: loss_scale\.{key}"):
        _restore_loss_scale(run, saved | {key: value}, "here")
    _restore_loss_scale(run, saved, "here")
    assert (scaler.cur_scale, scaler.cur_iter, scaler.last_overflow_iter) == (8.0, 5, 3)
    assert scaler.cur_hysteresis == 2  # no more than the config's
