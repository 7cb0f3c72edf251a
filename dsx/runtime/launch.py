"""From a launched process to process groups and back: start, seeds, errors, a clean end."""

from __future__ import annotations

import logging
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from dsx.errors import DsxError
from dsx.runtime.groups import Groups, make_groups
from dsx.spec.mesh import Mesh

T = TypeVar("T")


def rank() -> int:
    """This process's rank as the launcher set it; 0 without a launcher."""
    return int(os.environ.get("RANK", "0"))


def local_rank() -> int:
    """This process's index on its machine as the launcher set it; 0 without a launcher."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def world_size() -> int:
    """How many ranks the launcher started; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


@contextmanager
def distributed(
    mesh: Mesh, *, sequence_parallel: bool = False, seed: int = 0, timeout_seconds: float = 1800
) -> Iterator[Groups]:
    """Process groups of ``mesh`` for the duration of a ``with`` block.

    Works under ``deepspeed``, ``torchrun`` and, for one rank, plain ``python``; NCCL on GPUs, gloo on CPUs.
    Random generators are seeded from ``seed`` and the pipeline and data-parallel coordinates, equal over tensor
    parallelism, as dsx's dropout wants them.

    Args:
        mesh: Axes over all ranks that the launcher started.
        sequence_parallel: Split activations between tensor-parallel blocks along the sequence.
        seed: Base of every generator's seed.
        timeout_seconds: How long a collective may wait for a peer.

    Raises:
        LayoutError: The mesh does not have as many ranks as were started.
    """
    _quiet()
    # Imported late: it takes seconds, and errors of the config should not wait for it.
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    cpu = accelerator.device_name() == "cpu"
    if cpu:
        # Its C++ build takes a minute, needs a compiler, and gloo does the same without it.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    os.environ.setdefault("LOCAL_RANK", "0")  # DeepSpeedEngine reads it
    accelerator.set_device(local_rank())
    backend, timeout = ("gloo" if cpu else "nccl"), timedelta(seconds=timeout_seconds)
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    deepspeed.init_distributed(dist_backend=backend, verbose=False)
    groups = make_groups(mesh, sequence_parallel=sequence_parallel)
    torch.manual_seed(seed + 1 + groups.pp_rank * mesh.dp + groups.dp_rank)
    yield groups
    # Without this, ranks that end early tear down connections that others still use. An exception skips it:
    # the others would not come.
    dist.barrier()
    dist.destroy_process_group()


def agree(action: Callable[[], T]) -> T:
    """Run ``action`` on rank 0 and give its result, or its DsxError, to every rank."""
    outcome: list[T | DsxError | None] = [None]
    if dist.get_rank() == 0:
        try:
            outcome[0] = action()
        except DsxError as error:
            outcome[0] = error
    dist.broadcast_object_list(outcome, src=0)
    result = outcome[0]
    if isinstance(result, DsxError):
        result.add_note("agreed")
        raise result
    return result  # type: ignore[return-value]


def run(main: Callable[[], None]) -> None:
    """Run a recipe's ``main`` and end the process with the right exit code.

    A :class:`~dsx.DsxError` becomes one message and exit code 2. While no process group exists every rank finds
    the same error, and rank 0 alone reports it; afterwards a rank reports its own. Whatever else goes wrong is
    a traceback with the rank, and exit code 1. Either way the process ends at once, so that a peer in a
    collective sees the connection close, and the launcher ends the rest.
    """
    try:
        main()
    except DsxError as error:
        together = not dist.is_initialized() or "agreed" in getattr(error, "__notes__", ())
        if rank() == 0 or not together:
            prefix = "" if rank() == 0 else f"[rank {rank()}] "
            print(f"{prefix}error: {error}", file=sys.stderr)
        _leave(2)
    except KeyboardInterrupt:
        _leave(130)
    except Exception:  # noqa: BLE001 - the last line of defence reports everything
        print(f"[rank {rank()}] {traceback.format_exc()}", file=sys.stderr)
        _leave(1)


def _leave(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    if dist.is_initialized():
        os._exit(code)  # a normal exit would wait for peers in NCCL's and gloo's destructors
    sys.exit(code)


def _quiet() -> None:
    """One rank speaks: DeepSpeed and its neighbours report problems only."""
    for name in ("DeepSpeed", "torch.distributed", "transformers", "datasets", "filelock"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=UserWarning, module=r"torch(\.|$)")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"(torch|deepspeed)(\.|$)")
