"""BF16_Optimizer: ZeRO-1 with bf16 parameters and fp32 gradient accumulation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dsx.engine.chunks import Tie
from dsx.engine.zero.alike import GradientPart
from dsx.engine.zero.norm import NormScope, Refuses
from dsx.engine.zero.reduction import Reduction


class HighPrecisionGradients:
    """The gradients in BF16_Optimizer's fp32 buffers, which are set to zero after a step.

    Each gradient is added as it comes, and its bf16 tensor is freed. DeepSpeed does so only if asked to
    (``immediate_grad_update``), with a copy in fp32; by default the bf16 gradients of all parameters stay
    until the step, 2 unread bytes a parameter.
    """

    in_place = True

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._places = {
            id(parameter): (group, index)
            for group, parameters in enumerate(optimizer.bf16_groups)
            for index, parameter in enumerate(parameters)
        }
        self._taken: set[nn.Parameter] = set()
        self._late: set[nn.Parameter] = set()
        while optimizer._grad_acc_hooks:  # noqa: SLF001 (its own, if it was asked to)
            optimizer._grad_acc_hooks.pop().remove()  # noqa: SLF001
        optimizer.immediate_grad_update = True  # its epilogue then looks for no gradients
        for parameters in optimizer.bf16_groups:
            for parameter in parameters:
                parameter.register_post_accumulate_grad_hook(self._accumulate)

    @torch.no_grad()
    def _accumulate(self, parameter: nn.Parameter) -> None:
        """Add a gradient, if one has come: the input part of a split backward gives weights none."""
        gradient, parameter.grad = parameter.grad, None
        if gradient is None:
            return
        self.of(parameter).add_(gradient.reshape(-1))
        self.mark(parameter)
        if parameter in self._taken:
            self._late.add(parameter)

    def of(self, parameter: nn.Parameter) -> torch.Tensor:
        """The buffer's part that belongs to ``parameter``, flat."""
        group, index = self._places[id(parameter)]
        buffer: torch.Tensor = self._optimizer.fp32_groups_gradients[group][index]
        return buffer.view(-1)

    def mark(self, parameter: nn.Parameter) -> None:
        """Make a gradient count in the norm."""
        group, index = self._places[id(parameter)]
        self._optimizer.fp32_groups_has_gradients[group][index] = True

    def has(self, parameter: nn.Parameter) -> bool:
        """Whether a gradient has come since the last step."""
        group, index = self._places[id(parameter)]
        return bool(self._optimizer.fp32_groups_has_gradients[group][index])

    def take(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """The buffer's part: zeros if no gradient has come. It stays in place: the caller copies it."""
        self._taken.add(parameter)
        return self.of(parameter)

    def put(self, parameter: nn.Parameter, gradient: torch.Tensor, start: int = 0) -> None:
        """Overwrite the buffer's part."""
        self.of(parameter).narrow(0, start, gradient.numel()).copy_(gradient)
        self.mark(parameter)

    def came_late(self, parameter: nn.Parameter) -> bool:
        """Whether the buffer has been added to since."""
        return parameter in self._late

    def complete(self) -> None:
        """Forget what was taken in this step."""
        self._taken.clear()
        self._late.clear()


class Bf16Adapter:
    """Sums tied gradients.

    DeepSpeed's norm is right as it is: one sum over pipe x tensor of whole fp32 gradients, with tied copies
    and tensor-parallel replicas left out (deepspeed/runtime/bf16_optimizer.py, get_grads_for_norm), but for a
    rank on which that leaves nothing, where it fails: there a zero counts.
    """

    def __init__(
        self,
        engine: Any,
        scope: NormScope,
        ties: Sequence[Tie],
        gradients: HighPrecisionGradients,
        reduction: Reduction,
    ) -> None:
        self._engine, self._scope, self._ties = engine, scope, ties
        self._norm: float | None = None
        self._refused = False
        self._gradients, self.hooks = gradients, reduction
        self._optimizer = engine.optimizer
        original = self._optimizer.get_grads_for_norm

        def never_empty(*args: Any, for_clipping: bool = False, **kwargs: Any) -> Any:
            if self._refused and not for_clipping:
                # A norm that is none makes DeepSpeed skip the step (bf16_optimizer.py, step).
                return [torch.full((1,), torch.nan, device=engine.device)], {}
            found = original(*args, for_clipping=for_clipping, **kwargs)
            if for_clipping or found[0]:
                return found
            return [torch.zeros(1, device=engine.device)], found[1]

        self._optimizer.get_grads_for_norm = never_empty

    @property
    def reduced_here(self) -> bool:
        """Gradients reach the fp32 buffers without DeepSpeed."""
        return self.hooks.by_dsx

    def before_backward(self) -> None:
        """Gradients accumulate in the fp32 buffers by themselves."""

    def before_step(self, refuses: Refuses | None = None) -> None:
        """Finish the reductions; sum the fp32 gradients, whole on every dp rank, of tied weights."""
        self.hooks.finish()
        for tie in self._ties:
            for parameter in tie.parameters:
                if parameter.requires_grad:
                    dist.all_reduce(self._gradients.of(parameter), group=tie.group)
                    self._gradients.mark(parameter)
        self._norm = None
        if refuses is None and not self._scope.compares:
            return
        norm = self._scope.norm(self._parts(), partitioned=False, device=self._engine.device)
        if refuses is not None:
            self._refused, self._norm = refuses(norm), float(norm)

    def grad_norm(self) -> float:
        """Norm before clipping."""
        if self._norm is not None:
            return self._norm
        return float(self._engine.get_global_grad_norm() or 0.0)

    def _parts(self) -> Iterator[GradientPart]:
        for parameters in self._optimizer.bf16_groups:
            for parameter in parameters:
                if self._gradients.has(parameter):
                    yield GradientPart(parameter, self._gradients.of(parameter))
