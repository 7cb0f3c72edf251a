"""Traces of several ranks, each in a process of its own: a trace changes torch and DeepSpeed for good."""

from __future__ import annotations

import multiprocessing
import os
import warnings
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import TYPE_CHECKING

from dsx.config.run import RunConfig
from dsx.errors import DsxError
from dsx.launch.entry import quiet, usable_cores
from dsx.waiting import Waiting

if TYPE_CHECKING:
    from dsx.memory.paper.device import Device
    from dsx.memory.paper.run import TracedPeaks


def trace_ranks(
    config: RunConfig, ranks: Sequence[int], *, device: Device = "paper", capacity_bytes: int | None = None
) -> dict[int, TracedPeaks]:
    """:func:`~dsx.memory.paper.run.trace` of ``ranks``, as many at once as there are cores.

    Raises:
        DsxError: A trace's own error, or a process was killed (for lack of memory).
    """
    quiet()
    at_once = max(1, min(len(ranks), usable_cores()))
    spawn = multiprocessing.get_context("spawn")
    with (
        ProcessPoolExecutor(at_once, mp_context=spawn, max_tasks_per_child=1) as pool,
        Waiting("tracing the engine", total=len(ranks), unit="ranks") as waiting,
    ):
        traces = {rank: pool.submit(_trace, config, rank, device, capacity_bytes) for rank in ranks}
        for future in traces.values():
            future.add_done_callback(lambda _: waiting.advance())
        try:
            return {rank: future.result() for rank, future in traces.items()}
        except BrokenProcessPool:
            where = f"trace of ranks {', '.join(map(str, ranks))}"
            raise DsxError(where, "a process was killed", "free memory, or leave --trace out") from None


def _trace(config: RunConfig, rank: int, device: Device, capacity_bytes: int | None) -> TracedPeaks:
    quiet()
    warnings.filterwarnings("ignore")  # torch's, of addresses of tensors that have none
    # What a launcher would tell DeepSpeed.
    os.environ.update(RANK=str(rank), LOCAL_RANK="0", WORLD_SIZE=str(config.mesh.size))
    import torch

    from dsx.memory.paper.run import trace

    torch.set_num_threads(1)
    return trace(config, rank, device=device, capacity_bytes=capacity_bytes)
