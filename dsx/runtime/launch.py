"""From a launched process to process groups and back: start, seeds, a clean end."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from dsx.config.extension_locks import extension_locks, extensions_folder
from dsx.errors import DsxError
from dsx.runtime.entry import AGREED, local_rank
from dsx.runtime.groups import Groups, make_groups
from dsx.runtime.meeting import dismiss, meet, stand_by
from dsx.spec.mesh import Mesh

T = TypeVar("T")


@contextmanager
def distributed(
    mesh: Mesh,
    *,
    sequence_parallel: bool = False,
    seed: int = 0,
    start_timeout_seconds: float = 86_400,
    timeout_seconds: float = 1800,
    spare_ranks: int = 0,
) -> Iterator[Groups]:
    """Process groups of ``mesh`` for the duration of a ``with`` block.

    Works under ``deepspeed``, ``torchrun`` and, for one rank, plain ``python``; NCCL on GPUs, gloo on CPUs.
    Random generators are seeded from ``seed`` and the pipeline and data-parallel coordinates, equal over
    tensor parallelism, as dsx's dropout wants them.

    Args:
        mesh: Axes over the ranks that the launcher started, the spare ones aside.
        sequence_parallel: Split activations between tensor-parallel blocks along the sequence.
        seed: Base of every generator's seed.
        start_timeout_seconds: How long a rank waits for the others to come here: one of them may be
            tokenising a large corpus meanwhile. Launchers end the others when one fails.
        timeout_seconds: How long a collective may wait for a peer.
        spare_ranks: The last so many ranks take no part: they wait here, and end when the others have
            (:attr:`dsx.RunConfig.spare_ranks`).

    Raises:
        SystemExit: On a spare rank, at the end of the run.
        ConfigError: The launcher's port is taken.
        LayoutError: The mesh does not have as many ranks as were started.
    """
    # Imported late: it takes seconds, and errors of the config should not wait for it.
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    cpu = accelerator.device_name() == "cpu"
    if cpu:
        # Its C++ build takes a minute, needs a compiler, and gloo does the same without it.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        # torch keeps a record of each of the last 2,000 collectives. Between the activations of a pipeline
        # these small blocks fragment the heap: 20 to 50 MiB in a thousand steps of a tiny model.
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "0")
    os.environ.setdefault("LOCAL_RANK", "0")  # DeepSpeedEngine reads it
    for lock in extension_locks(extensions_folder()) if local_rank() == 0 else ():
        # Of an operator that this run waits for, DeepSpeed would say nothing. That one it does without.
        if lock.builder is None and not (cpu and lock.path.parent.name == "deepspeed_shm_comm"):
            sys.stderr.write(f"warning: {lock.text()}\n")
    accelerator.set_device(local_rank())
    backend, timeout = ("gloo" if cpu else "nccl"), timedelta(seconds=timeout_seconds)
    if "WORLD_SIZE" in os.environ:
        store, place, size = meet(timedelta(seconds=start_timeout_seconds))
        if spare_ranks and place >= size - spare_ranks:
            stand_by(store)
        dist.init_process_group(
            backend, store=store, rank=place, world_size=size - spare_ranks, timeout=timeout
        )
    else:
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)
    deepspeed.init_distributed(dist_backend=backend, verbose=False)
    groups = make_groups(mesh, sequence_parallel=sequence_parallel)
    seed_generators(groups, seed)
    yield groups
    # Without this, ranks that end early tear down connections that others still use. An exception skips it:
    # the others would not come.
    dist.barrier()
    if spare_ranks and groups.rank == 0:
        dismiss(store, spare_ranks)
    dist.destroy_process_group()


def seed_generators(groups: Groups, seed: int) -> None:
    """Seed every generator by pipeline and data-parallel place: alike over tensor parallelism."""
    torch.manual_seed(seed + 1 + groups.pp_rank * groups.mesh.dp + groups.dp_rank)


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
        result.add_note(AGREED)
        raise result
    return result  # type: ignore[return-value]
