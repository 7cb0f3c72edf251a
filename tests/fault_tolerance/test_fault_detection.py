"""Ranks that die, stop, raise or hang: every rank ends, and the report names who it was and where."""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dsx.fault_tolerance import watch
from fault_tolerance import crew
from fault_tolerance.guarded import PIPELINE, Run, forever
from parity.dsx_run import Case
from said import own_words

DATA = Case(family="gpt2", dp=2, accumulation=1)
ONE = Case(family="gpt2", accumulation=1)
HERE = socket.gethostname()
CLOCK = r"\d\d:\d\d:\d\d"


def train_until(
    rank: int, world_size: int, folder: Path, fault: str, at: int, case: Case, hang: float
) -> int:
    """Train; rank ``at`` does ``fault`` in its third step."""
    run = Run(case, folder, hang_seconds=hang)
    with run.guard:
        run.resume()
        for _ in range(10_000):
            batches = run.batches()
            if rank == at and run.engine.global_steps == 2:
                run.touch("ready")
                batches = broken(fault, list(batches))
            try:
                run.step(batches)
            except RuntimeError:
                if fault == "in vain":
                    raise ValueError("what follows from a loss") from None
                raise
    return 0


def broken(fault: str, batches: list[Any]) -> Any:
    """Micro-batches, the last of which does not come."""
    yield from batches[:-1]
    if fault == "raise":
        raise ValueError("the disk is on fire")
    if fault in ("kill", "in vain"):
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if fault == "collective":
        dist.all_reduce(torch.zeros(1))
    forever()


def ended(
    folder: Path, fault: str, *, at: int = 0, case: Case = PIPELINE, hang: float = 600.0
) -> list[crew.Ended]:
    with crew.started(train_until, case.world_size, folder, fault, at, case, hang) as ranks:
        return ranks.end()


def test_a_rank_that_raises_ends_the_others(tmp_path: Path) -> None:
    first, second = ended(tmp_path, "raise", at=1)
    assert (first.code, second.code) == (1, 1)
    assert f"[rank 1 on {HERE}] Traceback" in second.said
    said = rf"\[rank 0 on {HERE}\] ended because rank 1 on {HERE} failed: ValueError: the disk is on fire "
    assert re.fullmatch(rf"{said}\(at {CLOCK}\)\n", own_words(first.said)), first.said


def test_an_error_that_follows_from_a_loss_is_not_the_cause(tmp_path: Path) -> None:
    """Though the rank that was lost cannot say anything, and the one that is left says a lot."""
    _, second = ended(tmp_path, "in vain")
    said = rf"\[rank 1 on {HERE}\] ended because rank 0 on {HERE} is gone since {CLOCK}: its process [^\n]+"
    assert re.match(said, own_words(second.said)), second.said
    assert "Traceback" not in second.said


def train_all_but_one(rank: int, world_size: int, folder: Path, deed: str) -> int:
    """The first rank does something to itself before the first step, or after a save."""
    run = Run(PIPELINE, folder, hang_seconds=600.0)
    with run.guard:
        run.touch("ready")
        if deed == "before the first step" and rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        run.resume()
        run.step()
        run.save()
        if deed == "by Ctrl-C" and rank == 0:
            raise KeyboardInterrupt
        run.step()
    return 0


@pytest.mark.parametrize(
    ("deed", "what", "code"),
    [
        ("before the first step", "is gone since", 1),
        ("by Ctrl-C", "was interrupted (Ctrl-C)", 130),
    ],
)
def test_the_cause_is_named_whenever_it_is_lost(tmp_path: Path, deed: str, what: str, code: int) -> None:
    with crew.started(train_all_but_one, 2, tmp_path, deed) as team:
        _, second = team.end()
    assert second.code == code
    said = own_words(second.said)
    assert said.startswith(f"[rank 1 on {HERE}] ended because rank 0 on {HERE} {what}"), second.said
    assert said.count("\n") == 1


def train_while_one_is_stopped(rank: int, world_size: int, folder: Path) -> int:
    """Long enough for a line about it; its kernel answers meanwhile, so that nobody takes it for lost.

    Then rank 0 has another parent, as when the launcher was killed.
    """
    watch._STOPPED_SECONDS = 0.5
    run = Run(PIPELINE, folder, hang_seconds=600.0, silent_seconds=1)
    with run.guard:
        run.resume()
        run.step()
        run.touch("ready")
        while not (folder / "on").exists():
            run.step()
        os.getppid = lambda: 1
        while not (folder / "enough").exists():
            run.step()
        run.guard._watch._signalled = signal.SIGTERM, time.monotonic()
        while not run.guard.must_stop:
            run.step()
    return 0


def test_a_stopped_rank_and_a_dead_launcher_are_told_of_and_the_run_goes_on(tmp_path: Path) -> None:
    with crew.started(train_while_one_is_stopped, 2, tmp_path) as team:
        team.wait_for(tmp_path / "ready-1")
        team.signal(1, signal.SIGSTOP)
        name = re.escape(f"rank 1 on {HERE}")
        wanted = (
            rf"warning: {name} is stopped since {CLOCK} \(SIGSTOP, a debugger\?\): the others wait for it\n"
        )
        team.wait_until(lambda: re.search(wanted, team.said()) is not None)
        time.sleep(2.0)  # longer than silent_seconds
        team.signal(1, signal.SIGCONT)
        team.wait_until(lambda: f"rank 1 on {HERE}, which was stopped at" in team.said())
        (tmp_path / "on").touch()
        team.wait_until(lambda: "warning: the launcher of ranks 0, 1 on" in team.said())
        (tmp_path / "enough").touch()
        assert [rank.code for rank in team.end()] == [0, 0]
        assert len(own_words(team.said()).splitlines()) == 2 + 3  # two headings, three lines


def test_a_rank_that_is_stopped_is_found_and_ended(tmp_path: Path) -> None:
    first, second = ended(tmp_path, "stop", hang=2.0)
    assert (first.code, second.code) == (-signal.SIGKILL, 1)
    assert re.match(
        rf"error: the run does not go on since {CLOCK}: rank 0 on {HERE} is stopped", own_words(second.said)
    )
    # Stopped with its threads: what it had sent of 0F0 may not have left it.
    waits = (
        rf"rank 1 on {HERE}: step 3, training step, 1F([01]) waits for 0F\1 from rank 0 on {HERE} \(p2p\.py:"
    )
    assert re.search(waits, second.said), second.said
    assert f"last steps of rank 1 on {HERE} took" in second.said


def test_a_data_loader_that_hangs_is_found(tmp_path: Path) -> None:
    first, second = ended(tmp_path, "hang", hang=2.0)
    assert (first.code, second.code) == (1, 1)
    said = own_words(first.said)
    waits = f"rank 1 on {HERE} waits for rank 0 on {HERE}. rank 0 on {HERE}: step 3, training step, 0F1"
    assert re.match(rf"error: the run does not go on since {CLOCK}: {waits}", said)
    assert "(reading data, guarded.py:" in said
    assert f"rank 1 on {HERE}: step 3, training step, 1F1 waits for 0F1 from rank 0 on {HERE}" in said
    assert "in forever" in said  # its stack
    assert "ended" not in second.said
    (folder,) = (tmp_path / "faults").iterdir()
    assert {"report.txt", "stacks-0.txt", "stacks-1.txt"} <= {path.name for path in folder.iterdir()}


def test_a_hang_ends_where_nothing_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "faults").touch()  # where ranks tell each other
    (alone,) = ended(tmp_path, "hang", case=ONE, hang=1.0)
    assert alone.code == 1
    assert f": nobody waits for another; rank 0 on {HERE}: step 3" in alone.said
    assert "cannot be written: no stacks, no other ranks" in alone.said


def test_a_collective_that_the_others_do_not_enter_is_found(tmp_path: Path) -> None:
    """Rank 0 is in one that rank 1, which waits for the gradients' all-reduce, never makes."""
    first, second = ended(tmp_path, "collective", case=DATA, hang=2.0)
    assert (first.code, second.code) == (1, 1)
    assert "in all_reduce with ranks 0, 1" in first.said
