"""A run's output folder: where things are in it, how a checkpoint is found from any place, and its lock."""

from __future__ import annotations

import json
import os
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from dsx.checkpoint import store
from dsx.config.run import RunConfig
from dsx.errors import CheckpointError, RunError

CONFIG = "config.json"
LOCK = ".running"
_LOOK_SECONDS = 0.2
_SAME_MACHINE_SECONDS = 5.0  # an earlier start may still be ending
_OTHER_MACHINE_SECONDS = 120.0  # NFS forgets a machine that is lost after 90 s

_ABOVE = 2  # folders between a checkpoint, or a model in hf/, and its run's folder


def find_checkpoint(path: Path, step: int | None = None) -> Path:
    """The checkpoint that ``path`` stands for: itself, or the latest in a run or a folder of checkpoints.

    Args:
        path: A run's output folder, a folder of checkpoints, or one checkpoint or model folder.
        step: Optimizer step whose checkpoint is wanted, in a folder of several; the latest by default.

    Raises:
        CheckpointError: None there, or none of that step; with the ones there are.
    """
    for root in (path / store.CHECKPOINTS, path):
        if (root / store.LATEST).is_file():
            return store.find(root, None if step is None else f"global_step{step}")
    if step is not None:
        raise CheckpointError(
            f"step {step} of {path}",
            "the folder is none of several checkpoints: it has no file latest",
            "leave the step out, or give the folder of the run",
        )
    return path


def tokenizer_of_run(folder: Path) -> str | None:
    """The tokenizer of the run in whose output ``folder`` lies; None if it lies in none."""
    for place in (folder, *folder.absolute().parents[:_ABOVE]):
        try:
            config: Any = json.loads((place / CONFIG).read_text(encoding="utf-8"))
            return str(config["dsx"]["data"]["tokenizer"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError):  # of another program, or none
            continue
    return None


def own_checkpoint(config: RunConfig) -> tuple[Path, str | None] | None:
    """Folder and tag of the newest checkpoint that this run itself has saved; None if there is none."""
    root = config.output / store.CHECKPOINTS
    if config.dsx.train.resume == "never":
        return None
    if (root / store.LATEST).exists():
        return root, None
    found = store.tags(root)
    if len(found) > 1:
        store.find(root)  # says that latest is missing, and what there is
    # A kill between the first checkpoint's last rename and its name in latest leaves one alone.
    return (root, found[0]) if found else None


def start_of(config: RunConfig) -> tuple[Path, str | None] | None:
    """Folder and tag to continue from; None for a fresh start."""
    named = config.dsx.train.resume
    own = own_checkpoint(config)
    if own is not None:
        return own
    if named in ("auto", "never"):
        return None
    root, tag = store.place(Path(named))
    if tag is not None or (root / store.LATEST).is_file():
        return root, tag
    raise CheckpointError(
        f"dsx.train.resume = {named}",
        "there is no checkpoint of dsx",
        'give the output folder of a run, or a checkpoint in it; or "auto" or "never"',
    )


def standing(config: RunConfig, step: int) -> str:
    """One line for a run that ends before its last step: how far it came, and how to continue."""
    root, train = config.output / store.CHECKPOINTS, config.dsx.train
    came = f"stopped after step {step} of {train.steps}"
    try:
        tag = (root / store.LATEST).read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return f"{came}; nothing is saved: the same command begins anew"
    if train.resume == "never":
        return f'{came}; saved as {root / tag}: dsx.train.resume = "auto" goes on from there'
    return f"{came}; saved as {root / tag}: the same command goes on from there"


class RunLock:
    """One run at a time in an output folder: a lock that the kernel releases when its process ends.

    Two runs there would delete each other's half-written checkpoints and mix their metrics. The lock is
    filelock's, by flock(2): nothing is left to be cleaned up after SIGKILL, and a worker that outlives the
    run does not keep it. On NFS it holds between machines that mount it with locks, as Linux does by default;
    where a file system has none there is no protection.

    Raises:
        RunError: Another process has it; the message says which, and where.
    """

    def __init__(self, output: Path) -> None:
        self._path = output / LOCK
        self._lock = FileLock(self._path, thread_local=False, fallback_to_soft=False, on_acquired=_sign)
        self._began = time.monotonic()
        try:
            self._lock.acquire(
                _OTHER_MACHINE_SECONDS, poll_interval=_LOOK_SECONDS, cancel_check=self._has_waited
            )
        except Timeout:
            raise RunError(
                f"dsx.train.output = {output}",
                f"another run is at work there{self._holder()[1]}",
                "wait for its end or stop it, or choose another dsx.train.output",
            ) from None
        except OSError:
            pass  # there are no locks, or nothing can be written, of which saving will say why

    def release(self) -> None:
        """Let another run have the folder. Safe to call twice."""
        if self._lock.is_locked:
            with suppress(OSError):
                self._path.unlink()
            self._lock.release()

    def _has_waited(self) -> bool:
        """Whether the holder has had the time that it may need to end."""
        known = self._holder()[0] in ("", socket.gethostname())
        return time.monotonic() - self._began >= (_SAME_MACHINE_SECONDS if known else _OTHER_MACHINE_SECONDS)

    def _holder(self) -> tuple[str, str]:
        """Host of the process that has the lock, and words about it; empty if it has not signed."""
        with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
            signed = json.loads(self._path.read_text())
            return str(signed["host"]), f": process {signed['pid']} on {signed['host']}"
        return "", ""


def _sign(descriptor: int) -> None:
    """Say who has it. A disk that is full takes nothing from the lock."""
    text = json.dumps({"host": socket.gethostname(), "pid": os.getpid()})
    with suppress(OSError):
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, text.encode(), 0)
