"""One rank's steps on paper, from a resolved config."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.zero import partitioned_param_coordinator
from torch.testing._internal.distributed.fake_pg import FakeStore

from dsx.config.run import RunConfig
from dsx.engine.engine import PipelineEngine
from dsx.engine.initialize import initialize
from dsx.engine.p2p import Signature, TensorMeta
from dsx.memory.paper import device as paper
from dsx.memory.paper.meter import CUDA_ROUNDING_BYTES, StorageMeter
from dsx.parallel.groups import Groups, make_groups
from dsx.train import recipe

STEPS = 2
"""The first step makes the optimizer's state; the second is like all that follow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedPeaks:
    """Peaks of one rank, in bytes.

    Attributes:
        rank: Global rank.
        steady_bytes: Held between steps.
        phases: Phase ("build", "engine", "step 1", "step 2") -> peak.
        contents: Phase -> label -> bytes at that peak; empty without labels.
        host_phases: The same of the host's memory; empty unless asked for.
        host_contents: And of what it holds.
    """

    rank: int
    steady_bytes: int
    phases: dict[str, int]
    contents: dict[str, dict[str, int]]
    host_phases: dict[str, int] = field(default_factory=dict)
    host_contents: dict[str, dict[str, int]] = field(default_factory=dict)

    @property
    def peak_bytes(self) -> int:
        """The highest of all phases."""
        return max(self.phases.values())


def trace(
    config: RunConfig,
    rank: int,
    *,
    device: paper.Device = "paper",
    label: Callable[[], str] | None = None,
    host: bool = False,
    capacity_bytes: int | None = None,
) -> TracedPeaks:
    """Build and train rank ``rank`` of ``config`` on paper. Once per process: it changes torch and DeepSpeed.

    Args:
        config: Resolved for the world size.
        rank: Global rank.
        device: ``paper`` takes the paths of a GPU, ``cpu`` those of a CPU run.
        label: As for :class:`StorageMeter`.
        host: Also count what ``paper`` keeps on the host (offload). Takes longer.
        capacity_bytes: What ``paper`` has, if DeepSpeed asks; None for enough.
    """
    deepspeed.utils.logger.setLevel(logging.ERROR)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    accelerator = paper.install() if device == "paper" else None
    dist.init_process_group("fake", rank=rank, world_size=config.mesh.size, store=FakeStore())
    deepspeed.init_distributed(dist_backend="fake", verbose=False, auto_mpi_discovery=False)
    groups = make_groups(config.mesh, sequence_parallel=config.dsx.parallel.sequence_parallel)
    config = replace(config, weights=None)  # a folder's take the same memory as fresh ones, and time to read
    rounding = CUDA_ROUNDING_BYTES if device == "paper" else 1
    meter = StorageMeter(device, rounding_bytes=rounding, label=label)
    other = StorageMeter("cpu", label=label)
    if accelerator is not None and capacity_bytes is not None:
        accelerator.free_bytes = lambda: capacity_bytes - meter.current_bytes
    with paper.without_storage(), meter, other if host else nullcontext():
        # Values would take a minute of arithmetic and hold no memory afterwards.
        with meter.phase("build"), other.phase("build"), mock.patch("dsx.nn.parameters.fill"):
            model = recipe.build_model(config, groups)
        with meter.phase("engine"), other.phase("engine"):
            engine = initialize(model=model, config=config)[0]
        # Ranks that are not there agree on everything.
        partitioned_param_coordinator.assert_ints_same_as_other_ranks = lambda _: None
        announce(config, engine, groups)
        _train(config, engine, meter, other)
        steady = meter.current_bytes
    return TracedPeaks(
        rank=rank,
        steady_bytes=steady,
        phases=meter.peak_bytes,
        contents=meter.at_peak,
        host_phases=other.peak_bytes if host else {},
        host_contents=other.at_peak if host else {},
    )


def measure(config: RunConfig) -> TracedPeaks:
    """What :func:`trace` with device ``cpu`` predicts: the same on this process's real rank, same meter.

    The process group must exist (``deepspeed.init_distributed``). Here the model's values are filled in, so
    that the peak of "build" is another.
    """
    torch.autograd.set_multithreading_enabled(False)  # else backwards escape the meter
    groups = make_groups(config.mesh, sequence_parallel=config.dsx.parallel.sequence_parallel)
    meter = StorageMeter("cpu")
    with meter:
        with meter.phase("build"):
            model = recipe.build_model(config, groups)
        with meter.phase("engine"):
            engine = initialize(model=model, config=config)[0]
        announce(config, engine, groups)
        _train(config, engine, meter)
        steady = meter.current_bytes
    return TracedPeaks(rank=groups.rank, steady_bytes=steady, phases=meter.peak_bytes, contents={})


def _train(config: RunConfig, engine: PipelineEngine, *meters: StorageMeter) -> None:
    source = batches(config)
    for step in range(STEPS):
        with ExitStack() as stack:
            for meter in meters:
                stack.enter_context(meter.phase(f"step {step + 1}"))
            engine.train_batch(source)


def announce(config: RunConfig, engine: PipelineEngine, groups: Groups) -> None:
    """Tell the rank what its neighbours would send: the one thing that a group without peers cannot."""
    length = config.sequence_length
    if groups.tensor_parallel.sequence:
        length //= config.mesh.tp
    dtype = torch.bfloat16 if config.precision == "bf16" else torch.float32
    shape = (config.micro_batch_size, length, config.model.hidden_size)
    signature = Signature((TensorMeta(shape, dtype, requires_grad=True),), is_tuple=False)
    for stage in range(1, config.stage_map.num_stages):
        engine._signatures.announce(stage, True, signature)  # noqa: SLF001


def batches(config: RunConfig) -> Iterator[tuple[Any, Any]]:
    """Micro-batches of zeros on the host."""
    tokens = torch.zeros(config.micro_batch_size, config.sequence_length, dtype=torch.int64)
    while True:
        yield tokens, tokens
