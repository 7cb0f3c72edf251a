"""One run at a time in an output folder: a lock that the kernel releases when its process ends.

Two runs there would delete each other's half-written checkpoints and mix their metrics. The lock is that of
flock(2), so that nothing is left to be cleaned up after SIGKILL. On NFS it holds between machines that mount
it with locks, as Linux does by default; where a file system has none there is no protection.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import time
from contextlib import suppress
from pathlib import Path

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
        self._descriptor = self._take()
        # Otherwise a worker that outlives this process would keep the lock.
        os.register_at_fork(after_in_child=self._forget)

    def release(self) -> None:
        """Let another run have the folder. Safe to call twice."""
        if self._descriptor is not None:
            with suppress(OSError):
                self._path.unlink()
            os.close(self._descriptor)
        self._descriptor = None

    def _forget(self) -> None:
        """In a forked child: the lock is its parent's alone."""
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor = None

    def _take(self) -> int | None:
        """Descriptor of the locked file; None where there are no locks, or nothing can be written."""
        began = time.monotonic()
        while True:
            try:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            except OSError:
                return None  # saving will say why
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if self._is_still_there(descriptor):
                    self._sign(descriptor)
                    return descriptor
                os.close(descriptor)  # its holder has just ended, and deleted it
            except OSError as error:
                os.close(descriptor)
                if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                    return None
                self._wait(time.monotonic() - began)

    def _wait(self, waited_seconds: float) -> None:
        host, said = self._holder()
        patience = _SAME_MACHINE_SECONDS if host in ("", socket.gethostname()) else _OTHER_MACHINE_SECONDS
        if waited_seconds >= patience:
            raise RunError(
                f"dsx.train.output = {self._path.parent}",
                f"another run is at work there{said}",
                "wait for its end or stop it, or choose another dsx.train.output",
            )
        time.sleep(_LOOK_SECONDS)

    def _is_still_there(self, descriptor: int) -> bool:
        with suppress(OSError):
            return os.path.samestat(os.fstat(descriptor), self._path.stat())
        return False

    def _sign(self, descriptor: int) -> None:
        """Say who has it. The lock holds even if a full disk takes no word of it."""
        text = json.dumps({"host": socket.gethostname(), "pid": os.getpid()})
        with suppress(OSError):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, text.encode(), 0)

    def _holder(self) -> tuple[str, str]:
        """Host of the process that has the lock, and words about it; empty if it has not signed."""
        with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
            signed = json.loads(self._path.read_text())
            return str(signed["host"]), f": process {signed['pid']} on {signed['host']}"
        return "", ""
