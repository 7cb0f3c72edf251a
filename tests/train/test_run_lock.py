"""The lock of an output folder: whose it is, when it is let go of, and what happens without locks."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import socket
from pathlib import Path

import pytest

from dsx.errors import RunError
from dsx.train import run_folder
from dsx.train.run_folder import LOCK, RunLock


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_folder, "_SAME_MACHINE_SECONDS", 0.0)
    monkeypatch.setattr(run_folder, "_OTHER_MACHINE_SECONDS", 1e9)
    monkeypatch.setattr(run_folder, "_LOOK_SECONDS", 0.01)


def test_the_holder_is_named_and_leaves_nothing(tmp_path: Path) -> None:
    held = RunLock(tmp_path / "new" / "run")
    assert json.loads((tmp_path / "new" / "run" / LOCK).read_text()) == {
        "host": socket.gethostname(),
        "pid": os.getpid(),
    }
    with pytest.raises(RunError, match=f"process {os.getpid()} on {socket.gethostname()}. Fix: wait for its"):
        RunLock(tmp_path / "new" / "run")
    held.release()
    held.release()
    assert list((tmp_path / "new" / "run").iterdir()) == []
    RunLock(tmp_path / "new" / "run").release()


def test_a_holder_that_is_killed_lets_go(tmp_path: Path) -> None:
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        lock = RunLock(tmp_path)
        assert lock._lock.is_locked
        if os.fork() == 0:  # a worker, which outlives it, and lets go of what it inherits as it begins
            os.write(write, b"%-12d" % os.getpid())
        signal.pause()
    worker = int(os.read(read, 12))
    with pytest.raises(RunError, match=f"process {child} on "):
        RunLock(tmp_path)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    try:
        RunLock(tmp_path).release()
    finally:
        os.kill(worker, signal.SIGKILL)
    assert list(tmp_path.iterdir()) == []


def test_a_lost_machine_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A network file system keeps its lock for a while."""
    held = RunLock(tmp_path)
    (tmp_path / LOCK).write_text('{"host": "elsewhere", "pid": 7}')
    looks = []

    def wait(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 3:
            held.release()

    monkeypatch.setattr(run_folder.time, "sleep", wait)
    RunLock(tmp_path).release()
    assert len(looks) == 3
    monkeypatch.setattr(run_folder, "_OTHER_MACHINE_SECONDS", 0.0)
    held = RunLock(tmp_path)
    (tmp_path / LOCK).write_text('{"host": "elsewhere", "pid": 7}')
    with pytest.raises(RunError, match="process 7 on elsewhere"):
        RunLock(tmp_path)
    held.release()


def test_a_file_that_its_holder_deletes_meanwhile_is_no_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, deleted = fcntl.flock, []

    def late(descriptor: int, how: int) -> None:
        if not deleted:
            deleted.append((tmp_path / LOCK).unlink())
        lock(descriptor, how)

    monkeypatch.setattr(run_folder, "_SAME_MACHINE_SECONDS", 0.1)  # the file is made and locked once more
    monkeypatch.setattr(fcntl, "flock", late)
    held = RunLock(tmp_path)
    assert (tmp_path / LOCK).is_file()
    with pytest.raises(RunError):
        RunLock(tmp_path)
    held.release()


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_protects_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(descriptor: int, how: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    held = [RunLock(tmp_path), RunLock(tmp_path)]
    for one in held:
        one.release()


def test_a_folder_that_cannot_be_is_left_to_those_who_write_there(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    RunLock(tmp_path / "run").release()
