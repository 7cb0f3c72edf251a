"""One rank's steps on paper, from a resolved config."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from itertools import repeat
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.zero import partitioned_param_coordinator
from torch.testing._internal.distributed.fake_pg import FakeStore

from dsx.config.run import RunConfig
from dsx.engine import initialize as initializing
from dsx.engine import optimizers, ready_layers
from dsx.engine.engine import PipelineEngine
from dsx.engine.initialize import initialize
from dsx.engine.p2p import Signature, TensorMeta
from dsx.engine.pipeline_module import PipelineModule
from dsx.hub.tower import Tower
from dsx.memory.device import Device, swapped, without_values
from dsx.memory.meter import CUDA_ROUNDING_BYTES, StorageMeter
from dsx.models.params import layer_kinds
from dsx.models.spec import HubModel
from dsx.nn.parameters import DTYPES
from dsx.parallel.groups import Groups, make_groups
from dsx.parallel.mesh import Mesh
from dsx.train.building import build_layers
from meta_engine import accelerator as paper

STEPS = 2
"""The first step makes the optimizer's state; the second is like all that follow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedPeaks:
    """Peaks of one rank, in bytes.

    Attributes:
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
    device: Device = "paper",
    label: Callable[[], str] | None = None,
    host: bool = False,
    capacity_bytes: int | None = None,
    pictures: Any = None,
) -> TracedPeaks:
    """Build and train rank ``rank`` of ``config`` on paper. Once per process: it changes torch and DeepSpeed.

    Args:
        config: Resolved for the world size.
        rank: Global rank.
        device: ``paper`` takes the paths of a GPU, ``cpu`` those of a CPU run.
        label: As for :class:`StorageMeter`.
        host: Also count what ``paper`` keeps on the host (offload). Takes longer.
        capacity_bytes: What ``paper`` has, if DeepSpeed asks; None for enough.
        pictures: A micro-batch with pictures, and what of it each stage is told; None for one of text.
    """
    config = replace(config, weights=None)  # a folder's take the same memory as fresh ones, and time to read
    return trace_pipeline(
        lambda groups: build_layers(config, groups),
        config,
        rank,
        mesh=config.mesh,
        sequence_parallel=config.dsx.parallel.sequence_parallel,
        inputs=signatures(config, *(pictures or ())[1:]),
        batch=lambda: batch(config) if pictures is None else pictures[0],
        device=device,
        label=label,
        host=host,
        capacity_bytes=capacity_bytes,
        knows=pictures is not None,
    )


def trace_pipeline(
    build: Callable[[Groups], PipelineModule],
    config: RunConfig | dict[str, Any],
    rank: int,
    *,
    mesh: Mesh,
    inputs: Mapping[int, Signature],
    batch: Callable[[], tuple[Any, Any]],
    sequence_parallel: bool = False,
    device: Device = "paper",
    label: Callable[[], str] | None = None,
    host: bool = False,
    capacity_bytes: int | None = None,
    knows: bool = False,
) -> TracedPeaks:
    """:func:`trace` of any pipeline.

    ``inputs`` says what each virtual stage from 1 on is sent; ``batch`` makes a micro-batch on the host.
    """
    deepspeed.utils.logger.setLevel(logging.ERROR)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    accelerator = paper.install() if device == "paper" else None
    dist.init_process_group("fake", rank=rank, world_size=mesh.size, store=FakeStore())
    deepspeed.init_distributed(dist_backend="fake", verbose=False, auto_mpi_discovery=False)
    groups = make_groups(mesh, sequence_parallel=sequence_parallel)
    rounding = CUDA_ROUNDING_BYTES if device == "paper" else 1
    meter = StorageMeter(device, rounding_bytes=rounding, label=label)
    other = StorageMeter("cpu", label=label)
    if accelerator is not None and capacity_bytes is not None:
        accelerator.free_bytes = lambda: capacity_bytes - meter.current_bytes
    with paper.engine_without_storage(knows=knows), meter, other if host else nullcontext():
        # Ranks that are not there agree on everything.
        alike = swapped(ready_layers, "_make_alike", lambda *_: None)
        agreed = swapped(initializing, "_require_same_everywhere", lambda *_: None)
        here = swapped(optimizers, "_pipeline_ranks_where", lambda model, yes: [model.groups.pp_rank] * yes)
        # Values would take a minute of arithmetic and hold no memory afterwards.
        with meter.phase("build"), other.phase("build"), without_values(), alike:
            model = build(groups)
            for tower in (each for each in model.modules() if isinstance(each, Tower)):
                tower.fill_empty()
            model.proof = "not: nothing is trained on paper"
            model.dynamic_shape = False  # shapes of pictures are announced, too
        told = swapped(dist, "broadcast_object_list", lambda *_, **__: None)
        with meter.phase("engine"), other.phase("engine"), agreed, here, told:
            engine = initialize(model=model, config=config)[0]
        partitioned_param_coordinator.assert_ints_same_as_other_ranks = lambda _: None
        announce(inputs, engine)
        _train(batch, engine, meter, other)
        steady = meter.current_bytes
    return TracedPeaks(
        rank=rank,
        steady_bytes=steady,
        phases=meter.peak_bytes,
        contents=meter.at_peak,
        host_phases=other.peak_bytes if host else {},
        host_contents=other.at_peak if host else {},
    )


def measure(config: RunConfig, make: Callable[[RunConfig], tuple[Any, Any]] | None = None) -> TracedPeaks:
    """What :func:`trace` with device ``cpu`` predicts: the same on this process's real rank, same meter.

    A micro-batch is what ``make`` makes, or :func:`batch`.

    The process group must exist (``deepspeed.init_distributed``). Here the model's values are filled in, so
    that the peak of "build" is another.
    """
    torch.autograd.set_multithreading_enabled(False)  # else backwards escape the meter
    groups = make_groups(config.mesh, sequence_parallel=config.dsx.parallel.sequence_parallel)
    meter = StorageMeter("cpu")
    with meter:
        with meter.phase("build"):
            model = build_layers(config, groups)
        with meter.phase("engine"):
            engine = initialize(model=model, config=config)[0]
        announce(signatures(config), engine)
        _train(lambda: (make or batch)(config), engine, meter)
        steady = meter.current_bytes
    return TracedPeaks(rank=groups.rank, steady_bytes=steady, phases=meter.peak_bytes, contents={})


def _train(batch: Callable[[], tuple[Any, Any]], engine: PipelineEngine, *meters: StorageMeter) -> None:
    one = batch()
    for step in range(STEPS):
        with ExitStack() as stack:
            for meter in meters:
                stack.enter_context(meter.phase(f"step {step + 1}"))
            engine.train_batch(repeat(one))


def announce(inputs: Mapping[int, Signature], engine: PipelineEngine) -> None:
    """Tell the rank what its neighbours would send: the one thing that a group without peers cannot."""
    for stage, signature in inputs.items():
        engine._signatures.announce(stage, True, signature)


def signatures(config: RunConfig, told: Mapping[int, Sequence[TensorMeta]] = {}) -> dict[int, Signature]:
    """What every virtual stage from 1 on is sent, with what each is ``told`` of pictures."""
    length = config.sequence_length // config.mesh.cp
    if config.dsx.parallel.sequence_parallel:
        length //= config.mesh.tp
    dtype = DTYPES[config.precision]
    kinds, stages = layer_kinds(config.model), config.stage_map
    first = kinds.index("Block")

    balance = config.model.balance if isinstance(config.model, HubModel) else None
    lowest = min(spec.layer for spec in config.param_specs if spec.trained)

    def received(stage: int) -> Signature:
        layer = next(iter(stages.layers(stage)), 0)
        sizes = config.model.stream if first < layer < len(kinds) - 1 else (config.model.hidden_size,)
        hidden, trains = (config.micro_batch_size, length, *sizes), layer > lowest
        sent = [TensorMeta(hidden, dtype, requires_grad=trains)]
        if balance is not None:
            routed = trains and layer > first
            sent.append(TensorMeta((3, balance.experts), torch.float32, requires_grad=routed))
        if config.dsx.data.keeps_apart:
            tokens = (config.micro_batch_size, config.sequence_length)
            sent += [TensorMeta(tokens, torch.int64, requires_grad=False)] * 2  # positions, documents
        sent += told.get(stage, ())
        return Signature(tuple(sent), is_tuple=len(sent) > 1)

    return {stage: received(stage) for stage in range(1, stages.num_stages)}


def batch(config: RunConfig) -> tuple[Any, Any]:
    """A micro-batch of zeros on the host; of documents apart, each token is one."""
    tokens = torch.zeros(config.micro_batch_size, config.sequence_length, dtype=torch.int64)
    inputs = (tokens, tokens) if config.dsx.data.keeps_apart else tokens
    return inputs, tokens
