"""Runs that are killed at any action, frozen, slowed down, or told to end at a bad moment or twice."""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ranks
from dsx.checkpoint import store
from dsx.checkpoint.run import saver, state
from dsx.engine.executor import StepRun
from dsx.errors import RunError
from dsx.train.run_folder import RunLock
from fault_tolerance import crew
from fault_tolerance.guarded import PIPELINE, Run
from parity import dsx_run
from parity.dsx_run import Case
from said import own_words

# ------------------------------------------------------------------------------- SIGKILL at random actions

SAVE_EVERY, EVALUATE_EVERY, STEPS = 2, 3, 40
KILLS = {
    "transfer": (StepRun, "_send_output", 5, 9),
    "backward": (StepRun, "_backward", 5, 8),
    "optimizer step": (torch.optim.AdamW, "step", 3, 4),
    "evaluation": (Run, "evaluate", 1, 2),
    "load": (state, "load_stored", 1, 1),
    "share of a save": (saver, "write_share", 3, 4),
    "part of a share": (saver, "write_from", 3, 3),
    "commit": (store, "commit", 3, 4),
    "commit over the same tag": (store, "commit", 4, 4),
    "naming of the latest": (store, "point_latest", 3, 4),
}
"""What a rank dies in, at which of its calls of this start, from and to.

Every operation on files of a save is in tests/checkpoint/test_store.py, forwards in test_fault_detection.
"""
FIRST_RANKS = {"_send_output", "commit", "point_latest"}  # the last stage sends none, and one rank commits


def train_on(rank: int, world_size: int, folder: Path, name: str, victim: int, nth: int) -> int:
    """Continue the run in ``folder``; rank ``victim`` dies in the ``nth`` call of something."""
    if rank == victim:
        owner, call, *_ = KILLS[name]
        setattr(owner, call, dying(getattr(owner, call), nth))
    run = Run(PIPELINE, folder)
    with run.guard:
        run.resume()
        go_on(run, STEPS)
    return 0


def dying(original: Callable[..., Any], nth: int) -> Callable[..., Any]:
    """Half of the times before the call, else behind it."""
    calls = itertools.count(1)

    def call(*args: Any, **named: Any) -> Any:
        last = next(calls) == nth
        if last and nth % 2:
            os.kill(os.getpid(), signal.SIGKILL)
        done = original(*args, **named)
        if last:
            os.kill(os.getpid(), signal.SIGKILL)
        return done

    return call


def go_on(run: Run, last: int) -> list[float]:
    """Train to step ``last``; every loss also goes to a file at once."""
    losses = []
    with (run.folder / f"losses-{run.engine.groups.rank}").open("a") as file:
        while run.engine.global_steps < last:
            losses.append(run.step())
            file.write(json.dumps([int(run.engine.global_steps), losses[-1]]) + "\n")
            file.flush()
            if run.engine.global_steps % EVALUATE_EVERY == 0:
                run.evaluate()
            if run.engine.global_steps % SAVE_EVERY == 0:
                run.save()
                run.save()  # over the same tag
    return losses


def rest_and_whole(rank: int, world_size: int, folder: str) -> tuple[int, list[float], list[float]]:
    """Step resumed from, the losses from there on, and those of a run that nobody disturbs."""
    run = Run(PIPELINE, Path(folder))
    run.resume()
    resumed = int(run.engine.global_steps)
    rest = go_on(run, resumed + 2)
    return resumed, rest, undisturbed(PIPELINE, resumed + 2)


def undisturbed(case: Case, steps: int) -> list[float]:
    whole, _ = dsx_run.build(case, None)
    return [float(whole.train_batch(dsx_run.batches(case, step, 0))) for step in range(steps)]


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One run, killed in one thing after the other and started again each time."""
    folder, chance, found = tmp_path_factory.mktemp("killed"), random.Random(7), {}
    for name, (_, call, low, high) in KILLS.items():
        victim = 0 if call in FIRST_RANKS else chance.randrange(2)
        nth = chance.randint(low, high)
        with crew.started(train_on, 2, folder, name, victim, nth) as team:
            ended = team.end()
        seen = [json.loads(line) for line in (folder / f"losses-{1 - victim}").read_text().splitlines()]
        latest = folder / "checkpoints" / "latest"
        saved = int(latest.read_text().removeprefix("global_step")) if latest.exists() else 0
        lost = seen[-1][0] - saved if seen else 0
        found[name] = {"victim": victim, "ended": ended, "lost": lost}
    return {"found": found, "folder": folder}


@pytest.mark.parametrize("name", KILLS)
def test_a_kill_ends_all_and_loses_no_more_than_the_steps_since_the_save(
    killed: dict[str, Any], name: str
) -> None:
    found = killed["found"][name]
    victim, survivor = found["victim"], found["ended"][1 - found["victim"]]
    assert found["ended"][victim].code == -signal.SIGKILL
    assert survivor.code == 1
    here = socket.gethostname()
    gone = rf"ended because rank {victim} on {here} is gone since \d\d:\d\d:\d\d: its process [^\n]+\n"
    assert re.fullmatch(rf"\[rank {1 - victim} on {here}\] {gone}", own_words(survivor.said)), survivor.said
    assert 0 <= found["lost"] <= SAVE_EVERY


def test_a_run_that_was_killed_often_is_the_undisturbed_run(killed: dict[str, Any]) -> None:
    """Every loss that any start has seen, and those behind the last."""
    folder = killed["folder"]
    logged = [(folder / f"losses-{rank}").read_text().splitlines() for rank in range(2)]
    for rank, (resumed, rest, whole) in enumerate(ranks.run(rest_and_whole, 2, str(folder))):
        assert resumed >= 6
        assert rest == whole[resumed:]
        seen = [json.loads(line) for line in logged[rank]]
        assert len(seen) > len({step for step, _ in seen}), "no step was done twice"
        assert all(loss == whole[step - 1] for step, loss in seen)
    assert list((folder / "checkpoints").glob(".*")) == []


# --------------------------------------------------------------------------------------- stopped and told


def train_with_pauses(rank: int, world_size: int, folder: Path, pauses: list[str]) -> int:
    """The loop of the recipes; in its evaluation and its saves it waits for the test's word."""
    run = Run(PIPELINE, folder)

    def pausing(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        counts = itertools.count(1)

        def call(*args: Any) -> Any:
            here = f"{name}{next(counts)}"
            if here in pauses:
                run.touch(here)
                while not (folder / f"on-{here}").exists():
                    time.sleep(0.01)
            return original(*args)

        return call

    run.evaluate = pausing("evaluation", run.evaluate)
    saver.write_share = pausing("save", saver.write_share)
    losses = []
    with run.guard:
        run.resume()
        while not run.guard.must_stop:
            losses.append(run.step())
            if len(losses) == 1:
                run.evaluate()
            if len(losses) == 2 or run.guard.must_stop:
                run.save()
        (folder / f"losses-{rank}").write_text(json.dumps(losses))
    return run.guard.exit_code


def told(folder: Path, signals: dict[str, list[int]]) -> list[crew.Ended]:
    """A run whose ranks get SIGTERM at places; meanwhile its folder is nobody else's."""
    with crew.started(train_with_pauses, 2, folder, list(signals)) as team:
        for place, hearers in signals.items():
            for rank in range(2):
                team.wait_for(folder / f"{place}-{rank}")
            for rank in hearers:
                team.signal(rank, signal.SIGTERM)
            with pytest.raises(RunError, match="another run is at work there: process "):
                RunLock(folder)
            (folder / f"on-{place}").touch()
        ended = team.end()
    RunLock(folder).release()
    return ended


@pytest.mark.parametrize(
    ("signals", "steps"),
    [
        (
            {"evaluation1": [1], "save1": [0, 1]},
            2,
        ),  # the second one comes in the save that the first asked for
        ({"save1": [0]}, 3),  # the save of step 2 ends, and another is made behind the step after it
    ],
    ids=["in an evaluation and in the last save", "in a save"],
)
def test_sigterm_at_a_bad_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, signals: dict[str, list[int]], steps: int
) -> None:
    monkeypatch.setattr("dsx.train.run_folder._SAME_MACHINE_SECONDS", 0.0)
    ended = told(tmp_path, signals)
    assert [rank.code for rank in ended] == [143, 143]
    assert [own_words(rank.said) for rank in ended] == ["", ""]
    assert (tmp_path / "checkpoints" / "latest").read_text() == f"global_step{steps}"
    assert list((tmp_path / "checkpoints").glob(".*")) == []
    losses = [json.loads((tmp_path / f"losses-{rank}").read_text()) for rank in range(2)]
    for rank, (resumed, rest, whole) in enumerate(ranks.run(rest_and_whole, 2, str(tmp_path))):
        assert resumed == len(losses[rank]) == steps
        assert losses[rank] + rest == whole


# ------------------------------------------------------------------------------------- slow, frozen, early

SLOW = Case(family="gpt2", pp=2, accumulation=16)
HANG_SECONDS, ACTION_SECONDS = 8.0, 0.53  # a step takes longer than a rank may stand still


def endure(rank: int, world_size: int, folder: Path) -> int:
    """One step whose data is slow, some in which a rank is frozen for a while."""
    run = Run(SLOW, folder, hang_seconds=HANG_SECONDS)
    with run.guard:
        losses = [float(run.engine.train_batch(dsx_run.batches(SLOW, 0, 0)))]  # before anybody looks
        run.resume()
        losses.append(run.step(slowly(run.batches())))
        (folder / f"seconds-{rank}").write_text(str(run.engine.rank_progress.step_seconds[-1]))
        run.touch("ready")
        losses.append(run.step(late(run.batches(), folder / "thawed") if rank == 0 else None))
        losses.append(run.step())
        (folder / f"losses-{rank}").write_text(json.dumps([losses, undisturbed(SLOW, len(losses))]))
    return 0


def slowly(batches: Iterator[Any]) -> Iterator[Any]:
    for batch in batches:
        time.sleep(ACTION_SECONDS)
        yield batch


def late(batches: Iterator[Any], wanted: Path) -> Iterator[Any]:
    """The first comes when there is a file: the other rank, which is frozen meanwhile, waits for it."""
    while not wanted.exists():
        time.sleep(0.01)
    yield from batches


def test_slow_and_frozen_ranks_do_no_harm(tmp_path: Path) -> None:
    with crew.started(endure, 2, tmp_path) as team:
        team.wait_for(tmp_path / "ready-1")
        team.signal(1, signal.SIGSTOP)
        time.sleep(0.6)
        team.signal(1, signal.SIGCONT)
        (tmp_path / "thawed").touch()
        ended = team.end()
    assert [(rank.code, own_words(rank.said)) for rank in ended] == [(0, ""), (0, "")]
    assert float((tmp_path / "seconds-0").read_text()) > HANG_SECONDS
    for rank in range(2):
        losses, whole = json.loads((tmp_path / f"losses-{rank}").read_text())
        assert losses == whole
    assert not (tmp_path / "faults").exists()
