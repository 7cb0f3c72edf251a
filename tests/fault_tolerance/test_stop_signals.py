"""SIGTERM and its like: one rank hears it, all save after the same step, the next run goes on exactly."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ranks
from fault_tolerance import crew
from fault_tolerance.guarded import PIPELINE, Run, forever
from parity import dsx_run
from said import own_words

MORE = 2
"""Steps of the second run."""


def train_until_told(rank: int, world_size: int, folder: Path, faults: dict[str, Any]) -> int:
    """The loop of the recipes, with no last step."""
    run = Run(PIPELINE, folder, **faults)
    with run.guard:
        run.resume()
        losses = []
        while not run.guard.must_stop:
            losses.append(run.step())
            run.touch(f"step{len(losses)}")
        run.save()
        (folder / f"losses-{rank}").write_text(json.dumps(losses))
    return run.guard.exit_code


def resumed_and_uninterrupted(
    rank: int, world_size: int, folder: str
) -> tuple[int, list[float], list[float]]:
    run = Run(PIPELINE, Path(folder))
    run.resume()
    stopped_after = int(run.engine.global_steps)
    resumed = [run.step() for _ in range(MORE)]
    whole, _ = dsx_run.build(PIPELINE, None)
    return stopped_after, resumed, dsx_run.losses_of(whole, PIPELINE, range(stopped_after + MORE))


@pytest.mark.parametrize(("name", "told"), [("SIGTERM", 1), ("SIGUSR2", 0)])
def test_one_rank_hears_and_all_save_and_end(tmp_path: Path, name: str, told: int) -> None:
    number = signal.Signals[name]
    faults = {"stop_signals": [name]}
    with crew.started(train_until_told, 2, tmp_path, faults) as team:
        team.wait_for(tmp_path / f"step2-{told}")
        team.signal(told, number)
        ended = team.end()
    # The other rank knows that there was a signal, not which.
    assert [rank.code for rank in ended] == [128 + (number if rank == told else 15) for rank in range(2)]
    assert [own_words(rank.said) for rank in ended] == ["", ""]
    assert not (tmp_path / "faults").exists()
    first = [json.loads((tmp_path / f"losses-{rank}").read_text()) for rank in range(2)]
    assert first[0] == first[1]
    if name == "SIGTERM":
        stopped_after, resumed, whole = ranks.run(resumed_and_uninterrupted, 2, str(tmp_path))[0]
        assert stopped_after == len(first[0]) >= 2
        assert first[0] + resumed == whole


def hang_when_told(rank: int, world_size: int, folder: Path) -> int:
    """Rank 0 never gets its data."""
    run = Run(PIPELINE, folder, grace_seconds=1.0)
    with run.guard:
        run.resume()
        run.step()
        run.step(never(run) if rank == 0 else None)
    return 0


def never(run: Run) -> Iterator[Any]:
    run.touch("hung")
    forever()
    yield


def test_what_cannot_save_in_time_ends_unsaved(tmp_path: Path) -> None:
    with crew.started(hang_when_told, 2, tmp_path) as team:
        team.wait_for(tmp_path / "hung-0")
        for rank in range(2):
            team.signal(rank, signal.SIGTERM)
        first, second = team.end()
    assert (first.code, second.code) == (143, 143), first.said + second.said
    said = first.said + second.said  # the second to end may say that it is because of the first
    assert "s ago, dsx.faults.grace_seconds = 1: ended without saving (rank " in said
    assert "1F0 waits for 0F0 from rank 0" in said or "reading data" in said


def fork_and_wait(rank: int, world_size: int, folder: Path) -> int:
    """A child process that is told to end, as data loaders' workers are; the run has not heard that."""
    run = Run(PIPELINE, folder)
    with run.guard:
        run.resume()
        child = os.fork()
        if child == 0:
            try:
                forever()
            finally:
                os._exit(0)
        os.kill(child, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
        run.step()
        assert not run.guard.must_stop
    return run.guard.exit_code


def test_a_signal_to_a_forked_child_is_the_childs_alone(tmp_path: Path) -> None:
    with crew.started(fork_and_wait, 2, tmp_path) as team:
        assert [rank.code for rank in team.end()] == [0, 0], team.said()
