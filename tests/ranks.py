"""Run a function on several gloo ranks of this machine, in processes that start in milliseconds.

    import ranks

    def total(rank, world_size, base):          # a module-level function of the test module
        x = torch.tensor([base + rank])
        torch.distributed.all_reduce(x)
        return x.item()

    def test_total():
        assert ranks.run(total, 4, 10) == [46, 46, 46, 46]

Ranks fork from one server process that has already imported torch, DeepSpeed and transformers' models, so
that only the first run of a test session pays for those imports. They never see a GPU.
"""

from __future__ import annotations

import datetime as dt
import faulthandler
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import connection, forkserver
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess as Process
from pathlib import Path
from typing import Any

_PRELOAD = [
    "torch",
    "torch.distributed",
    "torch._dynamo",  # DeepSpeed's and torch's optimizers import it at first use: 0.9 s in every rank
    "deepspeed",
    "deepspeed.runtime.zero.muon.muon_optimizer",  # first use of ZeRO-3: another 0.9 s
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
]
_CPU_ONLY = {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
_DUMP_SIGNAL = signal.SIGUSR1
_GRACE_SECONDS = 20.0
_NOTICE_SECONDS = 2.0


class RankError(Exception):
    """A rank raised, died or missed the deadline.

    Attributes:
        rank: The first rank that failed; the lowest unfinished one after a missed deadline.
        error: What it raised; None if it died, missed the deadline or raised something unpicklable.
    """

    def __init__(self, message: str, rank: int, error: BaseException | None = None) -> None:
        super().__init__(message)
        self.rank = rank
        self.error = error


@dataclass(frozen=True)
class _Job:
    """What one rank is told to do. ``call`` is the pickled function and its arguments."""

    rank: int
    world_size: int
    call: bytes
    folder: Path
    timeout_seconds: float
    environ: dict[str, str]

    @property
    def log(self) -> Path:
        return self.folder / f"rank{self.rank}.log"

    def read_log(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""


@dataclass(frozen=True)
class _Reply:
    """What a rank sends back: a pickled value, or a traceback and (if it pickles) the exception."""

    value: bytes = b""
    trace: str = ""
    error: bytes = b""


def run(fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 300) -> list[Any]:
    """Results of ``fn(rank, world_size, *args)``, by rank, from ``world_size`` gloo processes.

    Every rank has an initialised default process group, the environment of a launcher (RANK, LOCAL_RANK,
    WORLD_SIZE, ...) over that of the caller, one thread, and DeepSpeed's builds switched off. What ranks
    print is printed again here when they have ended.

    Args:
        fn: Module-level function; it, its arguments and its results are pickled.
        world_size: Number of ranks.
        args: Passed on to ``fn``.
        timeout: Seconds until every unfinished rank dumps its stacks and all are killed.

    Raises:
        RankError: With the traceback of the first rank that failed (the others are killed at once), or
            every unfinished rank's stacks after ``timeout``.
    """
    call = pickle.dumps((fn, args))
    with tempfile.TemporaryDirectory(prefix="ranks-", ignore_cleanup_errors=True) as folder:
        jobs = [
            _Job(rank, world_size, call, Path(folder), timeout, dict(os.environ))
            for rank in range(world_size)
        ]
        try:
            with _started(jobs) as (processes, replies):
                return _collect(jobs, processes, replies)
        finally:
            for job in jobs:
                if text := job.read_log():
                    print(f"--- output of rank {job.rank} of {world_size}\n{text}", end="")


def without_builds() -> None:
    """Keep DeepSpeed from compiling its shared-memory collectives at start; :func:`run` calls this.

    Filling the table (deepspeed/ops/__init__.py, __getattr__) also saves probing the compilers.
    """
    import deepspeed.ops

    vars(deepspeed.ops).setdefault("__compatible_ops__", {})["deepspeed_shm_comm"] = False


@contextmanager
def _started(jobs: list[_Job]) -> Iterator[tuple[list[Process], list[Connection]]]:
    context = multiprocessing.get_context("forkserver")
    _start_server()
    processes, replies = [], []
    try:
        for job in jobs:
            receiving, sending = context.Pipe(duplex=False)
            process = context.Process(target=_rank_main, args=(job, sending), name=f"rank {job.rank}")
            process.start()
            sending.close()
            processes.append(process)
            replies.append(receiving)
        yield processes, replies
        for rank, process in enumerate(processes):  # all have sent their results: leave them time to end
            process.join(_GRACE_SECONDS)
            if process.exitcode != 0:
                raise RankError(f"rank {rank} gave its result but ended with {process.exitcode}", rank)
    finally:
        for process in processes:
            if process.is_alive():
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.kill()
            process.join()
            process.close()
        for receiving in replies:
            receiving.close()


def _start_server() -> None:
    """Start the fork server with the ranks' environment: what it imports reads some of it only once."""
    forkserver.set_forkserver_preload(_PRELOAD)
    before = dict(os.environ)
    os.environ.update(_CPU_ONLY)
    try:
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)


def _collect(jobs: list[_Job], processes: list[Process], replies: list[Connection]) -> list[Any]:
    """Results by rank. Of several failures a silent death comes first, then whichever arrived first."""
    deadline = time.monotonic() + jobs[0].timeout_seconds
    waiting, results = {reply: job for job, reply in zip(jobs, replies, strict=True)}, {}
    failed: list[tuple[_Job, _Reply | None]] = []
    while waiting and not any(reply is None for _, reply in failed):
        ready = connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))
        for receiving in ready:
            job, reply = waiting.pop(receiving), _receive(receiving)
            if reply is None or reply.trace:
                failed.append((job, reply))
            else:
                results[job.rank] = pickle.loads(reply.value)
        if failed:
            if not ready:
                break
            # A killed rank's peer may notice before that rank's own pipe is closed.
            deadline = min(deadline, time.monotonic() + _NOTICE_SECONDS)
        elif not ready:
            raise _late(waiting, [processes[job.rank] for job in waiting.values()])
    if failed:
        raise _failure(*min(failed, key=lambda failure: failure[1] is not None))
    return [results[job.rank] for job in jobs]


def _receive(receiving: Connection) -> _Reply | None:
    """What the rank sent; None if it ended without a word."""
    try:
        return pickle.loads(receiving.recv_bytes())
    except (EOFError, ConnectionResetError):
        return None


def _failure(job: _Job, reply: _Reply | None) -> RankError:
    name = f"rank {job.rank} of {job.world_size}"
    if reply is None:
        return RankError(f"{name} died without a result\n{job.read_log()}", job.rank)
    error = pickle.loads(reply.error) if reply.error else None
    failure = RankError(f"{name} failed\n{reply.trace}", job.rank, error)
    failure.__cause__ = error
    return failure


def _late(waiting: dict[Connection, _Job], processes: list[Process]) -> RankError:
    """Have every unfinished rank dump its stacks and die.

    They are stopped first, so that the signal is pending in all before the first one dies: else the others
    would run on into the loss of their peer.
    """
    for number in (signal.SIGSTOP, _DUMP_SIGNAL, signal.SIGCONT):
        for process in processes:
            with suppress(ProcessLookupError):
                os.kill(process.pid, number)
    for process in processes:
        process.join(_GRACE_SECONDS)
    jobs = sorted(waiting.values(), key=lambda job: job.rank)
    logs = "".join(f"--- rank {job.rank}\n{job.read_log()}" for job in jobs)
    return RankError(
        f"{len(jobs)} of {jobs[0].world_size} ranks did not finish within {jobs[0].timeout_seconds} s: "
        f"{[job.rank for job in jobs]}\n{logs}",
        jobs[0].rank,
    )


def _rank_main(job: _Job, sending: Connection) -> None:
    os.setpgid(0, 0)  # so that whatever this rank starts is killed with it
    log = job.log.open("w")
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    sys.stdout.reconfigure(line_buffering=True)
    faulthandler.register(_DUMP_SIGNAL, file=log, all_threads=True, chain=True)  # and then die of it
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        reply = _Reply(value=pickle.dumps(_work(job)))
    except BaseException as error:  # noqa: BLE001 (the caller hears of it)
        reply = _Reply(trace=traceback.format_exc(), error=_pickled(error))
    with suppress(BrokenPipeError):
        sending.send_bytes(pickle.dumps(reply))
    if reply.trace:  # wait for the kill: peers that saw this rank's sockets close would fail of that
        _end_with_parent()


def _end_with_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)


def _pickled(error: BaseException) -> bytes:
    try:
        data = pickle.dumps(error)
        pickle.loads(data)
    except Exception:  # noqa: BLE001 (pickling runs any code)
        return b""
    return data


def _work(job: _Job) -> Any:
    os.environ.clear()
    os.environ.update(job.environ | _CPU_ONLY | _launcher_environ(job))
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    without_builds()
    dist.init_process_group(
        "gloo",
        init_method=f"file://{job.folder}/rendezvous",
        rank=job.rank,
        world_size=job.world_size,
        timeout=dt.timedelta(seconds=job.timeout_seconds + 600),  # the deadline comes first, with stacks
    )
    fn, args = pickle.loads(job.call)
    result = fn(job.rank, job.world_size, *args)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    return result


def _launcher_environ(job: _Job) -> dict[str, str]:
    """What deepspeed's launcher sets (deepspeed/launcher/launch.py), and gloo kept on the loopback."""
    loopback = [name for _, name in socket.if_nameindex() if name in {"lo", "lo0"}]
    return {
        "RANK": str(job.rank),
        "LOCAL_RANK": str(job.rank),
        "WORLD_SIZE": str(job.world_size),
        "LOCAL_SIZE": str(job.world_size),
        "LOCAL_WORLD_SIZE": str(job.world_size),
        "CROSS_RANK": "0",
        "CROSS_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
        **({"GLOO_SOCKET_IFNAME": loopback[0]} if loopback else {}),
    }
