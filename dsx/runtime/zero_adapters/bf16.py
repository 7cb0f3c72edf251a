"""BF16_Optimizer: ZeRO-1 with bf16 parameters and fp32 gradient accumulation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

if TYPE_CHECKING:
    from dsx.runtime.pipeline_module import Tie


class Bf16Adapter:
    """Sums tied gradients.

    Its norm is right as it is: one sum over pipe x tensor of whole fp32 gradients, with tied copies and
    tensor-parallel replicas left out (deepspeed/runtime/bf16_optimizer.py, get_grads_for_norm).
    """

    def __init__(self, engine: Any, ties: Sequence[Tie]) -> None:
        self._engine, self._ties = engine, ties

    def before_backward(self, stage: int) -> None:
        """Gradients accumulate in the fp32 buffers by themselves."""
        del stage

    def before_step(self) -> None:
        """Sum the fp32 gradients of tied weights over their copies."""
        for tie in self._ties:
            for parameter in tie.parameters:
                # The fp32 gradient that belongs to this bf16 parameter, whole on every dp rank.
                dist.all_reduce(parameter._hp_grad, group=tie.group)  # type: ignore[attr-defined] # noqa: SLF001

    def grad_norm(self) -> float:
        """Norm before clipping."""
        return float(self._engine.get_global_grad_norm() or 0.0)
