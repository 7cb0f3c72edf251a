"""Ranks that may fail: all their exit codes and all that they say, where tests/ranks.py ends at the first.

with crew.started(fn, 2, folder) as ranks:      # fn(rank, world_size, folder), in a process group
    ranks.wait_for(folder / "ready-1")
    ranks.signal(1, signal.SIGKILL)
    first, second = ranks.end()
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ranks as harness
from dsx.launch.local_ranks import environment

_DEADLINE_SECONDS = 200.0


@dataclass(frozen=True)
class Ended:
    """What came of a rank: its exit code, negative for a signal, and what it printed."""

    code: int | None
    said: str


class Crew:
    """Ranks at work."""

    def __init__(self, processes: list[Any], jobs: list[harness.RankJob]) -> None:
        self._processes, self._jobs = processes, jobs
        self._deadline = time.monotonic() + _DEADLINE_SECONDS

    def signal(self, rank: int, number: int) -> None:
        """Send one rank a signal."""
        os.kill(self._processes[rank].pid, number)

    def wait_for(self, path: Path) -> None:
        """Until a rank has made ``path``."""
        self.wait_until(path.exists)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Until something is so."""
        while not condition():
            assert time.monotonic() < self._deadline, self.said()
            assert any(p.exitcode is None for p in self._processes), self.said()
            time.sleep(0.02)

    def end(self) -> list[Ended]:
        """Wait for every rank."""
        for process in self._processes:
            process.join(max(0.0, self._deadline - time.monotonic()))
        assert all(p.exitcode is not None for p in self._processes), f"ranks are left\n{self.said()}"
        return [
            Ended(process.exitcode, job.read_log())
            for process, job in zip(self._processes, self._jobs, strict=True)
        ]

    def said(self) -> str:
        """What all ranks have printed."""
        return "".join(f"--- rank {job.rank}\n{job.read_log()}" for job in self._jobs)


@contextmanager
def started(fn: Callable[..., Any], world_size: int, *args: Any) -> Iterator[Crew]:
    """Run ``fn(rank, world_size, *args)`` on gloo ranks under :func:`dsx.run`; kills what is left."""
    context = multiprocessing.get_context("forkserver")
    harness.serve()
    call = pickle.dumps((fn, args))
    with tempfile.TemporaryDirectory(prefix="crew-", ignore_cleanup_errors=True) as folder:
        jobs = [
            harness.RankJob(rank, world_size, call, Path(folder), _DEADLINE_SECONDS, environment())
            for rank in range(world_size)
        ]
        processes = [context.Process(target=_main, args=(job,)) for job in jobs]
        try:
            for process in processes:
                process.start()
            yield Crew(processes, jobs)
        finally:
            for process in processes:
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
                process.join()


def _main(job: harness.RankJob) -> None:
    log = job.log.open("w")
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    sys.stdout.reconfigure(line_buffering=True)
    from dsx.launch import entry

    os.environ.update(job.launched())
    entry.run(lambda: job.work() or 0)
