"""Steps whose figures are wrong: skipped, rolled back or the end of the run, alike on every rank."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import ranks
from dsx.errors import RunError
from fault_tolerance.guarded import Run
from parity import dsx_run
from parity.dsx_run import Case

STEPS = 7
SPOILED = {4: 1e6, 5: math.inf}
"""Step, from 0 -> what its gradients are multiplied with."""

SKIP = {"grad_norm_spike": "skip", "nonfinite": "skip", "spike_window": 8, "spike_sigmas": 50.0}

ALL_ZERO = [
    *(Case(family="gpt2", dp=2, zero=stage, accumulation=2) for stage in (0, 1, 2, 3)),
    Case(family="gpt2", dp=2, zero=0, accumulation=2, bf16=True),
    Case(family="gpt2", dp=2, zero=1, accumulation=2, bf16=True),
    Case(
        family="gpt2",
        dp=2,
        zero=1,
        accumulation=2,
        bf16=True,
        extra=(("data_types", {"grad_accum_dtype": "fp32"}),),
    ),
    Case(family="gpt2", pp=2, zero=0, accumulation=2),
]


def spoiled_step(run: Run, factor: float) -> float:
    """A training step in which one parameter's gradient comes with a factor."""
    parameter = next(p for p in run.engine.pipeline.chunks.parameters() if p.requires_grad)
    handle = parameter.register_hook(lambda gradient: gradient * factor)
    loss = run.step()
    handle.remove()
    return loss


def train(rank: int, world_size: int, folder: str) -> list[dict[str, Any]]:
    """What came of a guarded run of every case."""
    found = []
    for number, case in enumerate(ALL_ZERO):
        run = Run(case, Path(folder) / str(number), **SKIP)
        run.resume()
        losses, unchanged = [], []
        for step in range(STEPS):
            before = run.weights()
            losses.append(spoiled_step(run, SPOILED[step]) if step in SPOILED else run.step())
            assert not run.rolled_back()
            unchanged.append(torch.equal(before, run.weights()))
            assert run.engine.step_applied != unchanged[-1]
        counts = (int(run.engine.skipped_steps), int(run.engine.global_steps))
        found.append(
            {
                "losses": losses,
                "unchanged": unchanged,
                "counts": counts,
                "warnings": run.messages.warnings,
                "without": without(case),
            }
        )
    return found


def without(case: Case) -> list[float]:
    """Losses of a run that nobody guards, whose data leaves the spoiled steps' out."""
    engine, _ = dsx_run.build(case, None)
    steps = [step for step in range(STEPS) if step not in SPOILED]
    return [float(engine.train_batch(dsx_run.batches(case, step, engine.groups.dp_rank))) for step in steps]


def test_a_skipped_step_is_as_if_it_had_not_been(tmp_path: Path) -> None:
    """Weights stay bit for bit, and the run goes on exactly like one that has not seen that data."""
    for per_rank in ranks.run(train, 2, str(tmp_path)):
        for case, found in zip(ALL_ZERO, per_rank, strict=True):
            assert found["unchanged"] == [step in SPOILED for step in range(STEPS)], case
            assert found["counts"] == (len(SPOILED), STEPS), case
            spike, nonfinite = found["warnings"]
            assert spike.startswith("step 5 is skipped: grad norm "), case
            assert spike.endswith(" healthy steps before have it"), case
            assert nonfinite.startswith("step 6 is skipped: grad norm is "), case
            losses = [loss for step, loss in enumerate(found["losses"]) if step not in SPOILED]
            assert losses == found["without"], case


ROLL_BACK = {"grad_norm_spike": "roll_back", "spike_window": 8, "spike_sigmas": 50.0, "most_roll_backs": 1}
SAVED, BAD = 4, 5
"""Steps done at the save, and the step, from 0, that is spoiled."""


def refused(run: Run) -> RunError:
    """The error that ends the run."""
    with pytest.raises(RunError) as caught:
        run.rolled_back()
    assert "every rank raises this error" in caught.value.__notes__
    return caught.value


def roll_back(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """A run that is taken back, then one too often."""
    case = Case(family="gpt2", dp=2, zero=1, accumulation=2)
    run = Run(case, Path(folder), **ROLL_BACK)
    run.resume()
    for step in range(BAD):
        run.step()
        assert not run.rolled_back()
        if step + 1 == SAVED:
            run.save()
    spoiled_step(run, 1e6)
    assert run.rolled_back()
    steps, cursor = int(run.engine.global_steps), run.guard.data_cursor
    after = [run.step()]
    assert not run.rolled_back()
    after.append(run.step())
    # The same from the checkpoint itself, by hand.
    fresh, _ = dsx_run.build(case, None)
    fresh.load_checkpoint(run.root)
    by_hand = [float(fresh.train_batch(dsx_run.batches(case, step, rank))) for step in (BAD + 1, BAD + 2)]
    run.save()
    again = Run(case, Path(folder), **ROLL_BACK)
    again.resume()
    resumed_cursor = again.guard.data_cursor
    spoiled_step(again, 1e6)
    return {
        "steps": steps,
        "cursor": cursor // run.config.global_batch_size,
        "after": after,
        "by_hand": by_hand,
        "resumed_cursor": resumed_cursor // run.config.global_batch_size,
        "returns": run.messages.returns,
        "warnings": run.messages.warnings,
        "error": str(refused(again)),
    }


def test_a_run_that_is_rolled_back_goes_on_behind_the_bad_batch(tmp_path: Path) -> None:
    """The number of times and the place in the data are in the checkpoint."""
    for found in ranks.run(roll_back, 2, str(tmp_path)):
        assert (found["steps"], found["cursor"], found["returns"]) == (SAVED, BAD + 1, 1)
        assert found["after"] == found["by_hand"]
        assert found["resumed_cursor"] == BAD + 3
        (warning,) = found["warnings"]
        assert warning.startswith(f"step {BAD + 1}: grad norm ")
        assert "rolled back to step 4 (1 of at most 1 times)" in warning
        assert "the run has been rolled back 1 times already" in found["error"]


def stop(rank: int, world_size: int, folder: str) -> list[str]:
    """What runs say that have to end."""
    case, errors = Case(family="gpt2", pp=2, accumulation=2), []
    for number, faults in enumerate(({}, {"nonfinite": "roll_back"}, {"nonfinite": "skip", "most_skips": 1})):
        run = Run(case, Path(folder) / str(number), **faults)
        run.resume()
        run.step()
        assert not run.rolled_back()
        spoiled_step(run, math.nan)
        if number == 2:
            assert not run.rolled_back()
            spoiled_step(run, math.nan)
        errors.append(str(refused(run)))
    return errors


def test_what_cannot_be_mended_ends_the_run(tmp_path: Path) -> None:
    """NaN by default; nothing to roll back to; skipped too often. Every rank raises the same."""
    first, second = ranks.run(stop, 2, str(tmp_path))
    assert first == second
    default, no_checkpoint, too_often = first
    assert default.startswith("step 2: grad norm is nan. Fix: ")
    assert "there is no checkpoint in" in no_checkpoint
    assert "the 2th step in a row to be skipped" in too_often
