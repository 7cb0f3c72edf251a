"""All code of dsx that touches DeepSpeed's private state, a module for each kind of optimizer.

An adapter makes a plain DeepSpeedEngine right for a rank that holds a part of a pipeline: it keeps gradient
accumulation right when chunks take turns, sums the gradients of tied weights once, and computes the
gradient norm over the whole model, each logical element counted once. Checked against the DeepSpeed versions
of :data:`SUPPORTED_DEEPSPEED`; others are refused, because none of this is a public interface.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import nn

from dsx.config.resolve import zero_problems
from dsx.config.schema import ZeroConfig
from dsx.engine.chunks import Tie
from dsx.engine.zero.calls import changed
from dsx.engine.zero.master_shards import owners
from dsx.engine.zero.norm import LossScale, NormScope
from dsx.engine.zero.partitioned import PartitionedAdapter
from dsx.engine.zero.reduction import (
    GradientStore,
    GradientTransport,
    LeftToDeepSpeed,
    Reduction,
    Scale,
    ZeroAdapter,
    reducible,
)
from dsx.engine.zero.replicated import Bf16Adapter, ReplicatedAdapter, WidenedAdapter
from dsx.engine.zero.stage3 import Stage3Adapter, StepGathers, share_groups
from dsx.errors import ConfigError, ModelError, VersionError
from dsx.nn.parameters import stays_float32
from dsx.parallel.groups import Groups, of_experts
from dsx.parallel.reduction import ChunkReduction, reduces_micro_batches

SUPPORTED_DEEPSPEED = ("0.19.8",)

_ZERO_OPTIMIZERS = ("BF16_Optimizer", "DeepSpeedZeroOptimizer", "DeepSpeedZeroOptimizer_Stage3")


def require_supported() -> None:
    """Refuse a DeepSpeed whose internals have not been checked. Raises VersionError."""
    version = deepspeed.__version__.split("+")[0]
    if version not in SUPPORTED_DEEPSPEED:
        raise VersionError(
            f"deepspeed {deepspeed.__version__}",
            "dsx touches DeepSpeed's internals and has not been checked against this version",
            f"install one of: {', '.join(SUPPORTED_DEEPSPEED)}",
        )


@contextmanager
def given_optimizer_kept() -> Iterator[None]:
    """Inside the block, ZeRO steps the optimizer that it is given.

    ZeRO-1 to 3 make torch's Adagrad anew, over their fp32 partitions, in one parameter group with the
    defaults (stage_1_and_2.py:947, stage3.py:1358). Schedules and users hold on to the first one, so that its
    learning rate would never reach a weight; the settings of each group would be lost, and with a second
    group the step fails. The groups of the first one have their fp32 partitions by then; all that it lacks
    are the states of those.
    """
    kinds, name = (DeepSpeedZeroOptimizer, DeepSpeedZeroOptimizer_Stage3), "initialize_optimizer_states"
    with changed((kind, name, _keeping(getattr(kind, name))) for kind in kinds):
        yield


def _keeping(initialize_states: Callable[[Any], None]) -> Callable[[Any], None]:
    def initialize(wrapper: Any) -> None:
        given = wrapper.optimizer
        initialize_states(wrapper)
        made = wrapper.optimizer
        if made is not given:
            given.state, wrapper.optimizer = made.state, given

    return initialize


def count_samples(engine: Any, micro_batches: int) -> None:
    """Have DeepSpeed count a step's samples once; called before the step.

    Without managed accumulation DeepSpeed counts backwards, of which each chunk has one (engine.py:3561).
    """
    if not engine.managed_gradient_accumulation():
        engine._unmanaged_backward_count = micro_batches  # noqa: SLF001


def adapt(
    engine: Any,
    groups: Groups,
    ties: Sequence[Tie],
    clipping: float,
    *,
    uses: Mapping[int, Iterable[nn.Parameter]],
    replicas: Mapping[nn.Parameter, str],
    zero: ZeroConfig,
) -> ZeroAdapter:
    """The adapter for the optimizer that DeepSpeed chose.

    Args:
        engine: The DeepSpeedEngine.
        groups: This rank's process groups.
        ties: Tied weights with copies on other pipeline ranks.
        clipping: Largest gradient norm; 0 leaves gradients as they are.
        uses: Virtual stage of this rank -> parameters that its layers use.
        replicas: Parameters whose gradients must be the same on all tensor-parallel ranks, with their names.
        zero: What to communicate when.

    Raises:
        ConfigError: An optimizer that dsx has not been checked with, or that cannot have tied weights; a
            setting of ``zero`` that has no effect.
        ModelError: The model has MoE layers.
    """
    scope, optimizer = NormScope(groups, replicas), type(engine.optimizer).__name__
    stage = engine.zero_optimization_stage()
    if engine.has_moe_layers:
        raise ModelError("the model", "it has MoE layers, whose gradients dsx does not follow", "remove them")
    if stage > 0 and optimizer not in _ZERO_OPTIMIZERS:
        raise ConfigError(
            f"zero_optimization (DeepSpeed chose {optimizer})",
            "dsx has not been checked with this optimizer",
            f"choose settings that lead to one of {', '.join(_ZERO_OPTIMIZERS)}",
        )
    for problem in zero_problems(zero, stage, groups.mesh.ep):
        raise problem
    # What is frozen has no gradient to sum, and no place in ZeRO's groups.
    ties = [tie for tie in ties if any(p.requires_grad for p in tie.parameters)]
    given = engine, scope, ties, LossScale(engine), clipping
    if stage == 3:
        share_groups(engine.optimizer)
        varies = not all(hasattr(parameter, "dsx_spec") for parameter in engine.module.parameters())
        adapter: ZeroAdapter = Stage3Adapter(*given)
        adapter.hooks = StepGathers(engine.optimizer, uses, groups, zero.keep_gathered_bytes, varies=varies)
    else:
        whole = WidenedAdapter if hasattr(engine.optimizer, "unscale_and_clip_grads") else ReplicatedAdapter
        kind = Bf16Adapter if optimizer == "BF16_Optimizer" else PartitionedAdapter if stage else whole
        adapter = store = kind(*given)
        adapter.hooks = _reduction(engine, groups, uses, zero, store)
    adapter.attach()
    return adapter


def _reduction(
    engine: Any,
    groups: Groups,
    uses: Mapping[int, Iterable[nn.Parameter]],
    zero: ZeroConfig,
    store: GradientStore,
) -> Reduction:
    """Make dsx reduce gradients in DeepSpeed's place, where that is possible."""
    optimizer, stage = engine.optimizer, engine.zero_optimization_stage()
    offloads, count = getattr(optimizer, "cpu_offload", False), engine.gradient_accumulation_steps()
    low, _ = engine.get_data_types()
    each = reduces_micro_batches(zero.reduce, stage, offloads=offloads, micro_batches=count)
    if each or not reducible(engine):
        wide = any(stays_float32(p, low) for p in engine.module.parameters() if p.requires_grad)
        if groups.expert_data is not None or wide:
            raise ConfigError(
                "gradients that DeepSpeed reduces",
                "it sums those of parameters that the family has in fp32 in the run's precision"
                if wide
                else "it sums those of experts over ranks that have others",
                'set dsx.zero.reduce to "step", and leave out ZenFlow, Muon and sparse embeddings',
            )
        return LeftToDeepSpeed()
    partitioned = type(optimizer).__name__ == "DeepSpeedZeroOptimizer"
    parameters = {name: p for name, p in engine.module.named_parameters() if p.requires_grad}
    if stage > 0:
        owned = {id(p) for g in (optimizer.bit16_groups if partitioned else optimizer.bf16_groups) for p in g}
        parameters = {name: p for name, p in parameters.items() if id(p) in owned}
    engine.enable_backward_allreduce = False
    engine._config.managed_gradient_accumulation = True  # noqa: SLF001 (dsx says when to step, as ever)

    def wire_dtype(parameter: nn.Parameter) -> torch.dtype:  # a program may assign the engine's later
        if stays_float32(parameter, low):
            return torch.float32  # what stays so is summed so
        dtype: torch.dtype = (
            optimizer.get_param_comm_dtype(parameter) if partitioned else engine.communication_data_type
        )
        return dtype

    transport = GradientTransport(
        store,
        names={parameter: name for name, parameter in parameters.items()},
        group=groups.data,
        # Sums of experts' are of the tokens of all that hold them together.
        scale=Scale.of(
            engine, groups.mesh.num_replicas, always_before=partitioned and optimizer.reduce_scatter
        ),
        wire_dtype=wire_dtype,
        among=groups.replicas_of,
        owners=owners(engine) if stage else None,
    )
    return ChunkReduction(
        transport,
        sizes={parameter: parameter.numel() for parameter in parameters.values()},
        uses=uses,
        kinds={
            parameter: (wire_dtype(parameter), of_experts(parameter)) for parameter in parameters.values()
        },
        bucket_elements=engine.zero_reduce_bucket_size(),
        rank=groups.pp_rank,
    )
