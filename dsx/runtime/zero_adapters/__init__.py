"""Everywhere that dsx touches DeepSpeed's private state, one small module per kind of optimizer.

An adapter makes a plain DeepSpeedEngine right for a rank that holds a part of a pipeline: it keeps gradient
accumulation straight when chunks take turns, sums the gradients of tied weights once, and computes the
gradient norm over the whole model, each logical element counted once. Checked against the DeepSpeed versions
of :data:`SUPPORTED_DEEPSPEED`; others are refused, because none of this is a public interface.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import deepspeed
import torch

from dsx.errors import ConfigError, ModelError, VersionError
from dsx.runtime.zero_adapters.bf16 import Bf16Adapter
from dsx.runtime.zero_adapters.norm import NormScope
from dsx.runtime.zero_adapters.partitioned import PartitionedAdapter
from dsx.runtime.zero_adapters.replicated import ReplicatedAdapter
from dsx.runtime.zero_adapters.stage3 import Stage3Adapter, scope_consistency_checks

if TYPE_CHECKING:
    from dsx.runtime.groups import Groups
    from dsx.runtime.pipeline_module import Tie

SUPPORTED_DEEPSPEED = ("0.19.8",)

_ZERO_OPTIMIZERS = ("BF16_Optimizer", "DeepSpeedZeroOptimizer", "DeepSpeedZeroOptimizer_Stage3")

__all__ = [
    "SUPPORTED_DEEPSPEED",
    "ZeroAdapter",
    "adapt",
    "announce_backward",
    "count_samples",
    "require_supported",
    "scope_consistency_checks",
]


class ZeroAdapter(Protocol):
    """What the engine asks of an adapter."""

    def before_backward(self, stage: int) -> None:
        """Called before each backward of virtual stage ``stage``."""

    def before_step(self) -> None:
        """Called once all backwards of a step are done, before DeepSpeed's ``step``."""

    def grad_norm(self) -> float:
        """Norm of the last step's gradient over the whole model, before clipping.

        Infinite or NaN if a gradient was (every rank then skips the step, but in fp32 without ZeRO, where
        as in torch the NaN enters the weights); NaN if DeepSpeed was told not to compute it.
        """


def require_supported() -> None:
    """Refuse a DeepSpeed whose internals have not been checked. Raises VersionError."""
    version = deepspeed.__version__.split("+")[0]
    if version not in SUPPORTED_DEEPSPEED:
        raise VersionError(
            f"deepspeed {deepspeed.__version__}",
            "dsx touches DeepSpeed's internals and has not been checked against this version",
            f"install one of: {', '.join(SUPPORTED_DEEPSPEED)}",
        )


def announce_backward(engine: Any, loss: torch.Tensor) -> None:
    """Have DeepSpeed notice the start of the backward of a ``loss`` that its forward did not return.

    It hooks the outputs of its own forward alone (runtime/engine.py, register_output_backward_hooks). Without
    this, ZeRO would see gradients outside of any backward, and BF16_Optimizer without immediate updates would
    add the previous backward's gradients once more.
    """
    loss.register_hook(lambda _: engine._backward_prologue())  # noqa: SLF001


def count_samples(engine: Any, micro_batches: int) -> None:
    """Before a step: have DeepSpeed count its samples once.

    Without managed accumulation it counts backwards, of which there is one per chunk (engine.py:3561).
    """
    if not engine.managed_gradient_accumulation():
        engine._unmanaged_backward_count = micro_batches  # noqa: SLF001


def adapt(engine: Any, groups: Groups, ties: Sequence[Tie], clipping: float) -> ZeroAdapter:
    """The adapter for the optimizer that DeepSpeed chose.

    Args:
        engine: The DeepSpeedEngine.
        groups: This rank's process groups.
        ties: Tied weights with copies on other pipeline ranks.
        clipping: Largest gradient norm; 0 leaves gradients as they are.

    Raises:
        ConfigError: An optimizer that dsx has not been checked with, or that cannot have tied weights.
        ModelError: The model has MoE layers.
    """
    scope, optimizer = NormScope(groups), type(engine.optimizer).__name__
    stage = engine.zero_optimization_stage()
    if engine.has_moe_layers:
        raise ModelError("the model", "it has MoE layers, whose gradients dsx does not follow", "remove them")
    if stage > 0 and optimizer not in _ZERO_OPTIMIZERS:
        raise ConfigError(
            f"zero_optimization (DeepSpeed chose {optimizer})",
            "dsx has not been checked with this optimizer",
            f"choose settings that lead to one of {', '.join(_ZERO_OPTIMIZERS)}",
        )
    # What is frozen has no gradient to sum, and no place in ZeRO's groups.
    ties = [tie for tie in ties if any(p.requires_grad for p in tie.parameters)]
    if optimizer == "BF16_Optimizer":
        return Bf16Adapter(engine, ties)
    if stage == 0:
        return ReplicatedAdapter(engine, scope, ties, clipping)
    if stage == 3:
        return Stage3Adapter(engine, scope, ties)
    return PartitionedAdapter(engine, scope, ties)
