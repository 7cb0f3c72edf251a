"""BF16_Optimizer: ZeRO-1 with bf16 parameters and fp32 gradient accumulation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from dsx.runtime.pipeline_module import Tie


class Bf16Adapter:
    """Sums tied gradients.

    Its norm is right as it is: one sum over pipe x tensor of whole fp32 gradients, with tied copies and
    tensor-parallel replicas left out (deepspeed/runtime/bf16_optimizer.py, get_grads_for_norm), but for a
    rank on which that leaves nothing, where it fails: there a zero counts.
    """

    def __init__(self, engine: Any, ties: Sequence[Tie]) -> None:
        self._engine, self._ties = engine, ties
        self._optimizer = engine.optimizer
        self._places = {
            id(parameter): (group, index)
            for group, parameters in enumerate(self._optimizer.bf16_groups)
            for index, parameter in enumerate(parameters)
        }
        original = self._optimizer.get_grads_for_norm

        def never_empty(*args: Any, for_clipping: bool = False, **kwargs: Any) -> Any:
            found = original(*args, for_clipping=for_clipping, **kwargs)
            if for_clipping or found[0]:
                return found
            return [torch.zeros(1, device=engine.device)], found[1]

        self._optimizer.get_grads_for_norm = never_empty

    def before_backward(self, stage: int) -> None:
        """Gradients accumulate in the fp32 buffers by themselves."""
        del stage

    def before_step(self) -> None:
        """Sum the fp32 gradients, whole on every dp rank, of tied weights over their copies."""
        optimizer = self._optimizer
        for tie in self._ties:
            for parameter in tie.parameters:
                if parameter.requires_grad:
                    group, index = self._places[id(parameter)]
                    dist.all_reduce(optimizer.fp32_groups_gradients[group][index], group=tie.group)
                    optimizer.fp32_groups_has_gradients[group][index] = True

    def grad_norm(self) -> float:
        """Norm before clipping."""
        return float(self._engine.get_global_grad_norm() or 0.0)
