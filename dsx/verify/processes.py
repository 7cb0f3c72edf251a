"""Ranks on this machine: forked from a process that has imported everything, watched, never left behind."""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import pickle
import re
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.spawn import ProcessContext, ProcessExitedException, start_processes

from dsx.errors import DsxError

_PRELOAD = [
    "torch",
    "torch._dynamo",  # the optimizers import it at first use, a second in every rank
    "deepspeed",
    "deepspeed.runtime.zero.muon.muon_optimizer",  # the same of ZeRO-3
    "dsx.verify.subject",
]
_GRACE_SECONDS = 5.0
_LATE = "Timeout ("  # what faulthandler writes before the stacks
_PEER_GONE = re.compile(r"Connection (closed|reset) by peer|Broken pipe", re.DOTALL)
_SHOWN_LINES = 40


def run_ranks(
    function: Callable[..., Any], world_size: int, *args: Any, timeout_seconds: float, use_gpus: bool
) -> Any:
    """Run ``function(rank, *args)`` in ``world_size`` processes with a process group; gives rank 0's result.

    Args:
        function: A module-level function; it, its arguments and its result are pickled.
        world_size: Number of ranks.
        args: Its further arguments.
        timeout_seconds: Time after which every rank must have ended.
        use_gpus: NCCL with a GPU per rank; else gloo, and no rank sees a GPU.

    Raises:
        DsxError: A rank raised it, failed otherwise (with its traceback), or missed the deadline (with its
            stack). No process is left.
    """
    with tempfile.TemporaryDirectory(prefix="dsx-verify-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        start_server(world_size, use_gpus=use_gpus)
        environment = _environment(world_size, use_gpus=use_gpus)
        context = start_processes(
            _rank,
            (world_size, folder, timeout_seconds, environment, function, args),
            nprocs=world_size,
            join=False,
            daemon=True,
            start_method="forkserver",
        )
        assert context is not None
        try:
            while not context.join(timeout=1.0, grace_period=_GRACE_SECONDS):
                pass
        except ProcessExitedException as error:
            raise _failure(folder, world_size, error, timeout_seconds) from None
        finally:
            _end(context)
        with (folder / "result").open("rb") as file:
            return pickle.load(file)  # noqa: S301 (rank 0 of ours wrote it, into a folder of ours)


def start_server(world_size: int, *, use_gpus: bool) -> None:
    """Start the process that ranks fork from, which imports what they need; returns at once."""
    multiprocessing.set_forkserver_preload(_PRELOAD)
    before = dict(os.environ)
    os.environ.update(_environment(world_size, use_gpus=use_gpus))  # some of it is read at import
    try:
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)


def _environment(world_size: int, *, use_gpus: bool) -> dict[str, str]:
    """The variables that a launcher would set for all ranks."""
    own = {
        "WORLD_SIZE": str(world_size),
        "LOCAL_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "CROSS_RANK": "0",
        "CROSS_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",  # read by DeepSpeed, used by nobody: ranks meet in a file
    }
    if not use_gpus:
        threads = max(1, len(os.sched_getaffinity(0)) // world_size)
        own |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": str(threads)}
    return own


def _rank(
    rank: int,
    world_size: int,
    folder: Path,
    timeout_seconds: float,
    environment: dict[str, str],
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    # Python 3.11 fails with a KeyError when a collection amid an import runs a finalizer that imports.
    gc.freeze()
    gc.disable()
    log = (folder / f"rank{rank}.log").open("w")
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    faulthandler.dump_traceback_later(timeout_seconds, exit=True, file=log)
    os.environ.update(environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
    try:
        result = _work(rank, world_size, folder, function, args)
    except BaseException as error:  # noqa: BLE001 - the parent reports it
        _report(folder / f"rank{rank}.error", error)
        sys.stdout.flush()
        os._exit(1)  # a normal exit would wait for peers in the destructors of their connections
    if rank == 0:
        partial = folder / "result.partial"
        with partial.open("wb") as file:
            pickle.dump(result, file, protocol=pickle.HIGHEST_PROTOCOL)
        partial.rename(folder / "result")
    faulthandler.cancel_dump_traceback_later()


def _end_with_parent() -> None:
    """Let no rank survive a command that is killed."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _work(
    rank: int, world_size: int, folder: Path, function: Callable[..., Any], args: tuple[Any, ...]
) -> Any:
    import deepspeed
    import torch.distributed as dist
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    cpu = accelerator.device_name() == "cpu"
    if cpu:
        vars(deepspeed.ops).setdefault("__compatible_ops__", {})["deepspeed_shm_comm"] = False
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    accelerator.set_device(rank)
    backend = "gloo" if cpu else "nccl"
    dist.init_process_group(
        backend,
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(days=1),  # the deadline ends a rank that waits, with its stack
    )
    deepspeed.init_distributed(dist_backend=backend, verbose=False)
    result = function(rank, *args)
    dist.barrier()
    dist.destroy_process_group()
    return result


def _report(file: Path, error: BaseException) -> None:
    try:
        pickled = pickle.dumps(error)
        pickle.loads(pickled)  # noqa: S301 (made in the line before)
    except Exception:  # noqa: BLE001 - pickling runs any code
        pickled = b""
    file.write_bytes(pickle.dumps((traceback.format_exc(), pickled if isinstance(error, DsxError) else b"")))


def _failure(
    folder: Path, world_size: int, ended: ProcessExitedException, timeout_seconds: float
) -> DsxError:
    """The error of the rank that failed first, not of one that only lost its peer."""
    told = []
    for rank in range(world_size):
        file = folder / f"rank{rank}.error"
        if file.exists():
            trace, pickled = pickle.loads(file.read_bytes())  # noqa: S301 (a rank of ours wrote it)
            told.append((bool(_PEER_GONE.search(trace)), rank, trace, pickled))
    own = [item for item in sorted(told) if not item[0]]
    if own:
        _, rank, trace, pickled = own[0]
        if pickled:
            found: DsxError = pickle.loads(pickled)  # noqa: S301 (as above)
            return found
        fix = "mend what it names; the other ranks were ended"
        return DsxError(f"rank {rank} of {world_size}", f"it failed\n{trace.rstrip()}\n", fix)
    logs = {rank: _log(folder, rank) for rank in range(world_size)}
    late = {rank: text[text.index(_LATE) :].rstrip() for rank, text in logs.items() if _LATE in text}
    if late:
        stacks = "\n".join(f"--- rank {rank}\n{stack}" for rank, stack in late.items())
        return DsxError(
            f"ranks {', '.join(map(str, late))} of {world_size}",
            f"they had not ended after {timeout_seconds:g} s; where each was\n{stacks}\n",
            "ranks may wait for each other in different orders; or give more time: --timeout",
        )
    rank = int(ended.error_index)
    last = "\n".join(logs[rank].splitlines()[-_SHOWN_LINES:])
    return DsxError(
        f"rank {rank} of {world_size}",
        f"it ended without a word ({ended})\n{last}\n",
        "free memory, or verify a smaller model",
    )


def _log(folder: Path, rank: int) -> str:
    file = folder / f"rank{rank}.log"
    return file.read_text(errors="replace") if file.exists() else ""


def _end(context: ProcessContext) -> None:
    """Kill whatever is left, after a failure or Ctrl-C."""
    for process in context.processes:
        if process.is_alive():
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        process.join()
