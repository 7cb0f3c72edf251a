"""Run a function on several ranks of this machine, in processes that start in milliseconds.

Ranks fork from one server process that has already imported torch and DeepSpeed, so that only the first run
of a session pays for the imports. A rank that raises, dies or misses the deadline ends the run, and no
process is left behind, whatever becomes of the caller.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import connection, forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, Literal

PRELOAD = (
    "torch",
    "torch.distributed",
    "torch._dynamo",  # DeepSpeed's and torch's optimizers import it at first use: 0.9 s in every rank
    "deepspeed",
    "deepspeed.runtime.zero.muon.muon_optimizer",  # first use of ZeRO-3: another 0.9 s
)
"""What every rank needs."""

GPU_PRELOAD = ("torch", "torch.distributed")
"""The part of it for ranks with a GPU: DeepSpeed counts the GPUs when it is imported, and a process that is
forked after that cannot use them (torch.cuda.is_available, "poison fork")."""

_DUMP_SIGNAL = signal.SIGUSR1
_GRACE_SECONDS = 240.0  # a save that goes on beside a run ends with its process, on however slow a disk
_NOTICE_SECONDS = 2.0

Failure = Literal["raised", "died", "late"]


class RankError(Exception):
    """A rank raised, died or missed the deadline.

    Attributes:
        rank: The first rank that failed; the lowest unfinished one after a missed deadline.
        said: Its traceback, its last output, or the stacks of all unfinished ranks.
        error: What it raised; None if it raised nothing that can be pickled.
    """

    def __init__(
        self, message: str, kind: Failure, rank: int, *, said: str = "", error: BaseException | None = None
    ) -> None:
        super().__init__(f"{message}\n{said}" if said else message)
        self.kind, self.rank, self.said, self.error = kind, rank, said, error


@dataclass(frozen=True)
class RankJob:
    """What one rank is told to do."""

    rank: int
    world_size: int
    call: bytes
    folder: Path
    timeout_seconds: float
    environ: Mapping[str, str]

    @property
    def log(self) -> Path:
        return self.folder / f"rank{self.rank}.log"

    def read_log(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def work(self) -> Any:
        """Join the other ranks in a process group, call the function, and leave the group together."""
        os.environ.clear()
        os.environ.update({**self.environ, **self.launched()})
        import torch
        import torch.distributed as dist

        from dsx.launch.spared import without_builds

        on_cpu = "CUDA_VISIBLE_DEVICES" in self.environ and not self.environ["CUDA_VISIBLE_DEVICES"]
        if on_cpu:
            without_builds()
            torch.set_num_threads(int(self.environ.get("OMP_NUM_THREADS", "1")))
        else:
            torch.cuda.set_device(self.rank)
        dist.init_process_group(
            "gloo" if on_cpu else "nccl",
            init_method=f"file://{self.folder}/rendezvous",
            rank=self.rank,
            world_size=self.world_size,
            timeout=dt.timedelta(seconds=self.timeout_seconds + 600),  # the deadline comes first, with stacks
        )
        dist.barrier()  # gloo's ranks fail when one leaves before all the others have connected
        function, args = pickle.loads(self.call)  # noqa: S301 (made by this process's parent)
        result = function(self.rank, self.world_size, *args)
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()
        return result

    def launched(self) -> dict[str, str]:
        """What DeepSpeed's launcher sets (deepspeed/launcher/launch.py), and gloo kept on the loopback."""
        loopback = [name for _, name in socket.if_nameindex() if name in {"lo", "lo0"}]
        ranks = dict.fromkeys(("RANK", "LOCAL_RANK"), str(self.rank))
        sizes = dict.fromkeys(("WORLD_SIZE", "LOCAL_SIZE", "LOCAL_WORLD_SIZE"), str(self.world_size))
        # DeepSpeed reads the port, and nobody uses it: ranks meet in a file.
        place = {"CROSS_RANK": "0", "CROSS_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
        return {**ranks, **sizes, **place, **({"GLOO_SOCKET_IFNAME": loopback[0]} if loopback else {})}


_Reply = tuple[bytes, str, bytes]
"""What a rank sends back: a pickled value, or a traceback and (if it pickles) the pickled exception."""


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_seconds: float,
    use_gpus: bool = False,
    threads: int = 1,
    preload: Sequence[str] = (),
    ended: Callable[[RankJob], None] | None = None,
) -> list[Any]:
    """Results of ``function(rank, world_size, *args)``, by rank.

    Every rank has an initialised default process group and the environment of a launcher (RANK, LOCAL_RANK,
    WORLD_SIZE, ...) over that of the caller.

    Args:
        function: Of a module; it, its arguments and its results are pickled.
        world_size: Number of ranks.
        args: Passed on.
        timeout_seconds: Until every unfinished rank dumps its stacks and all are killed.
        use_gpus: NCCL with a GPU for each rank; otherwise gloo, and no rank sees a GPU.
        threads: Of each rank without a GPU.
        preload: Modules to import once for all ranks without a GPU, besides :data:`PRELOAD`.
        ended: Called for every rank when all have ended, with its output still there.

    Raises:
        RankError: With the traceback of the first rank that failed (the others are killed at once), or
            every unfinished rank's stacks after the deadline.
    """
    call = pickle.dumps((function, args))
    start_server(preload, use_gpus=use_gpus)
    with tempfile.TemporaryDirectory(prefix="ranks-", ignore_cleanup_errors=True) as folder:
        environ = environment(use_gpus=use_gpus, threads=threads)
        jobs = [
            RankJob(rank, world_size, call, Path(folder), timeout_seconds, environ)
            for rank in range(world_size)
        ]
        try:
            with _started(jobs) as (processes, replies):
                return _collect(jobs, processes, replies)
        finally:
            if ended is not None:
                for job in jobs:
                    ended(job)


def environment(*, use_gpus: bool = False, threads: int = 1) -> dict[str, str]:
    """This process's environment for a rank, of so many threads if it is to see no GPU."""
    cpu_only = {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": str(threads)}
    return {**os.environ, **({} if use_gpus else cpu_only)}


def start_server(preload: Sequence[str] = (), *, use_gpus: bool = False) -> None:
    """Start the process that ranks fork from, which imports what they need; returns at once."""
    forkserver.set_forkserver_preload([*GPU_PRELOAD] if use_gpus else [*PRELOAD, *preload])
    before = dict(os.environ)
    os.environ.update(environment(use_gpus=use_gpus))  # what is imported there reads some of it only once
    try:
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def _started(jobs: Sequence[RankJob]) -> Iterator[tuple[list[ForkServerProcess], list[Connection]]]:
    context = multiprocessing.get_context("forkserver")
    processes: list[ForkServerProcess] = []
    replies: list[Connection] = []
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
            if process.exitcode is None:
                raise _late({replies[rank]: jobs[rank]}, [process])  # hangs at its end: its stacks say where
            if process.exitcode != 0:
                message = f"rank {rank} gave its result but ended with {process.exitcode}"
                raise RankError(message, "died", rank)
    finally:
        for process in processes:
            if process.is_alive():
                with suppress(ProcessLookupError):
                    os.killpg(_pid(process), signal.SIGKILL)
                process.kill()
            process.join()
            process.close()
        for receiving in replies:
            receiving.close()


def _collect(
    jobs: Sequence[RankJob], processes: Sequence[ForkServerProcess], replies: Sequence[Connection]
) -> list[Any]:
    """Results by rank. Of several failures a silent death comes first, then whichever arrived first."""
    deadline = time.monotonic() + jobs[0].timeout_seconds
    waiting = {reply: job for job, reply in zip(jobs, replies, strict=True)}
    results: dict[int, Any] = {}
    failed: list[tuple[RankJob, _Reply | None]] = []
    while waiting and not any(reply is None for _, reply in failed):
        ready = connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))
        for receiving in [reply for reply in waiting if reply in ready]:
            job, reply = waiting.pop(receiving), _receive(receiving)
            if reply is None or reply[1]:
                failed.append((job, reply))
            else:
                results[job.rank] = pickle.loads(reply[0])  # noqa: S301 (a rank of ours sent it)
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
    reply: _Reply | None = None
    with suppress(EOFError, ConnectionResetError):
        reply = receiving.recv()
    return reply


def _failure(job: RankJob, reply: _Reply | None) -> RankError:
    name = f"rank {job.rank} of {job.world_size}"
    if reply is None:
        return RankError(f"{name} died without a result", "died", job.rank, said=job.read_log())
    _, trace, pickled = reply
    error = pickle.loads(pickled) if pickled else None  # noqa: S301 (a rank of ours sent it)
    failure = RankError(f"{name} failed", "raised", job.rank, said=trace, error=error)
    failure.__cause__ = error
    return failure


def _late(waiting: Mapping[Connection, RankJob], processes: Sequence[ForkServerProcess]) -> RankError:
    """Have every unfinished rank dump its stacks and die.

    They are stopped first, so that the signal is pending in all before the first one dies: otherwise the
    others would run on into the loss of their peer.
    """
    for number in (signal.SIGSTOP, _DUMP_SIGNAL, signal.SIGCONT):
        for process in processes:
            with suppress(ProcessLookupError):
                os.kill(_pid(process), number)
    for process in processes:
        process.join(_GRACE_SECONDS)
    jobs = sorted(waiting.values(), key=lambda job: job.rank)
    logs = "".join(f"--- rank {job.rank}\n{job.read_log()}" for job in jobs)
    return RankError(
        f"{len(jobs)} of {jobs[0].world_size} ranks did not finish within {jobs[0].timeout_seconds} s: "
        f"{[job.rank for job in jobs]}",
        "late",
        jobs[0].rank,
        said=logs,
    )


def _pid(process: ForkServerProcess) -> int:
    assert process.pid is not None, "it has been started"
    return process.pid


def _rank_main(job: RankJob, sending: Connection) -> None:
    os.setpgid(0, 0)  # so that whatever this rank starts is killed with it
    log = job.log.open("w")
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # a text file
    faulthandler.register(_DUMP_SIGNAL, file=log, all_threads=True, chain=True)  # and then die of it
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        reply = pickle.dumps(job.work()), "", b""
    except BaseException as error:  # noqa: BLE001 (the caller hears of it)
        reply = b"", traceback.format_exc(), _pickled(error)
    with suppress(BrokenPipeError):
        sending.send(reply)
    if reply[1]:  # wait for the kill: peers that saw this rank's sockets close would fail of that
        _end_with_parent()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "ranks are started by a process"
    parent.join()
    os._exit(1)


def _pickled(error: BaseException) -> bytes:
    try:
        data = pickle.dumps(error)
        pickle.loads(data)  # noqa: S301 (made in the line before)
    except Exception:  # noqa: BLE001 (pickling runs any code)
        return b""
    return data
