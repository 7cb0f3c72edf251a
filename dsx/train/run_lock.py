"""One run at a time in an output folder: a lock that the kernel releases when its process ends.

Two runs there would delete each other's half-written checkpoints and mix their metrics. The lock is
filelock's, by flock(2): nothing is left to be cleaned up after SIGKILL, and a worker that outlives the run
does not keep it. On NFS it holds between machines that mount it with locks, as Linux does by default; where a
file system has none there is no protection.
"""

from __future__ import annotations

import json
import os
import socket
import time
from contextlib import suppress
from pathlib import Path

from filelock import FileLock, Timeout

from dsx.errors import RunError

NAME = ".running"
_LOOK_SECONDS = 0.2
_SAME_MACHINE_SECONDS = 5.0  # an earlier start may still be ending
_OTHER_MACHINE_SECONDS = 120.0  # NFS forgets a machine that is lost after 90 s


class RunLock:
    """The lock of an output folder, held.

    Args:
        output: The run's folder.

    Raises:
        RunError: Another process has it; the message says which, and where.
    """

    def __init__(self, output: Path) -> None:
        self._path = output / NAME
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
