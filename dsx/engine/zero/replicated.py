"""Optimizers for which every data-parallel rank holds whole gradients.

At ZeRO-0 they are in ``p.grad``; BF16_Optimizer, which is ZeRO-1, adds them up in fp32 buffers of its own.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dsx.engine.chunks import Tie
from dsx.engine.zero.alike import GradientPart
from dsx.engine.zero.loss_scale import LossScale
from dsx.engine.zero.norm import NormScope, Refuses
from dsx.engine.zero.reduction import Reduction


class WholeGradients:
    """Gradients in ``p.grad``."""

    in_place = False

    def take(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """``p.grad``, which becomes None."""
        gradient, parameter.grad = parameter.grad, None
        return gradient

    def put(self, parameter: nn.Parameter, gradient: torch.Tensor, start: int = 0) -> None:
        """Put the average into ``p.grad``, in the parameter's dtype."""
        assert start == 0
        parameter.grad = gradient.view(parameter.shape).to(parameter.dtype)

    def came_late(self, parameter: nn.Parameter) -> bool:
        """Whether ``p.grad`` is there again."""
        return parameter.grad is not None

    def complete(self) -> None:
        """Nothing to do: ``p.grad`` is all there is."""


class ReplicatedAdapter:
    """Sums tied gradients and clips by the norm of the whole model.

    Plain fp32: the engine is built with clipping off and gradients are scaled here, because stock DeepSpeed
    counts pipeline stage 0 alone (deepspeed/runtime/utils.py:394). With bf16 and fp16, DeepSpeed's
    FP16_Optimizer and FP16_UnfusedOptimizer scale fp32 copies of the gradients; they are handed the norm of
    all.
    """

    def __init__(
        self,
        engine: Any,
        scope: NormScope,
        ties: Sequence[Tie],
        clipping: float,
        reduction: Reduction,
        loss_scale: LossScale,
    ) -> None:
        self._engine, self._scope, self._ties, self._clipping = engine, scope, ties, clipping
        self.hooks, self.loss_scale = reduction, loss_scale
        self.norm = self.scaled_norm = torch.zeros(())
        self._wrapped = hasattr(engine.optimizer, "unscale_and_clip_grads")
        # FP16 optimizers around the user's have a part in each backward.
        self.reduced_here = reduction.by_dsx and not self._wrapped
        if engine.optimizer is None:  # for evaluations alone, or to come later
            return
        if not self._wrapped:
            self._let_refuse(engine.optimizer)
        else:
            # Its own norm then stays local (and unused) instead of a sum that counts shards wrongly.
            engine.optimizer.mpu = None
            engine.optimizer.overflow_checker = _NormTells(self)
            _undo_initial_step(engine.optimizer)
            original = engine.optimizer.unscale_and_clip_grads

            def with_norm_of_all(*args: Any, **kwargs: Any) -> Any:
                *leading, _ = args
                return original(*leading, self.scaled_norm, **kwargs)

            engine.optimizer.unscale_and_clip_grads = with_norm_of_all

    def before_backward(self) -> None:
        """Gradients accumulate in ``p.grad`` by themselves."""

    def before_step(self, refuses: Refuses | None = None) -> None:
        """Finish the reductions, sum ties, then compute the norm and clip."""
        self.hooks.finish()
        for tie in self._ties:
            for parameter in tie.parameters:
                if not parameter.requires_grad:
                    continue
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                dist.all_reduce(parameter.grad, group=tie.group)
        parts = [GradientPart(p, p.grad) for p in self._engine.module.parameters() if p.grad is not None]
        self.scaled_norm = self._scope.norm(parts, partitioned=False, device=self._engine.device)
        self.norm = self.loss_scale.judge(self.scaled_norm, refuses)
        if not self._wrapped:
            # DeepSpeed asks every optimizer that has it.
            self._engine.optimizer.overflow = self.loss_scale.refused
        if self._clipping > 0 and not self._wrapped:
            # torch.nn.utils.clip_grad_norm_'s rule.
            scale = torch.clamp(self._clipping / (self.norm + 1e-6), max=1.0)
            for part in parts:
                part.gradient.mul_(scale)

    def _let_refuse(self, optimizer: Any) -> None:
        """Let a plain torch optimizer skip steps that are not applied, as DeepSpeed's own do."""
        step = optimizer.step

        @functools.wraps(step)  # with the marks that torch's schedulers leave on it
        def unless_refused(_optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            return None if self.loss_scale.refused else step(*args, **kwargs)

        optimizer.overflow, optimizer.step = False, MethodType(unless_refused, optimizer)


class _NormTells:
    """Replaces CheckOverflow, because a gradient that is not finite shows in the norm of the whole model.

    So every rank decides alike, without checking each parameter and without another collective.
    """

    def __init__(self, adapter: ReplicatedAdapter) -> None:
        self._adapter = adapter

    def check(self, *_args: Any, **_kwargs: Any) -> bool:
        """Whether the step must be skipped (FP16_UnfusedOptimizer asks so)."""
        return self._adapter.loss_scale.refused or not math.isfinite(self._adapter.scaled_norm)

    has_overflow = check
    """FP16_Optimizer asks so."""

    check_using_norm = check
    """And both so, where the optimizer computes the update from the whole gradient (LAMB)."""


@torch.no_grad()
def _undo_initial_step(optimizer: Any) -> None:
    """Forget the step that FP16_Optimizer and FP16_UnfusedOptimizer take at construction.

    ``initialize_optimizer_states`` steps on zero gradients to allocate the moments. That decays the fp32
    weights once and leaves Adam's step count at 1, so that its first real update is about a quarter too small
    (sqrt(1 - beta2**2) / (1 - beta1**2) against 1 at betas 0.9, 0.95).
    """
    for index, group in enumerate(optimizer.fp16_groups):
        if hasattr(optimizer, "fp32_groups_flat"):
            flat = torch.cat([p.detach().flatten().float() for p in group])
            optimizer.fp32_groups_flat[index].copy_(flat)
        else:
            for high, low in zip(optimizer.fp32_groups[index], group, strict=True):
                high.copy_(low)
    inner = optimizer.optimizer
    if not isinstance(inner, torch.optim.Adagrad):
        inner.state.clear()
        return
    for state in inner.state.values():  # the one optimizer that makes its state at construction
        state["step"].zero_()
        state["sum"].fill_(inner.defaults["initial_accumulator_value"])


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
        loss_scale: LossScale,
    ) -> None:
        self._engine, self._scope, self._ties, self.loss_scale = engine, scope, ties, loss_scale
        self._norm: float | None = None
        self._gradients, self.hooks = gradients, reduction
        self.reduced_here = reduction.by_dsx  # gradients reach the fp32 buffers without DeepSpeed
        self._optimizer = engine.optimizer
        original = self._optimizer.get_grads_for_norm

        def never_empty(*args: Any, for_clipping: bool = False, **kwargs: Any) -> Any:
            if self.loss_scale.refused and not for_clipping:
                # A norm that is none makes DeepSpeed skip the step (bf16_optimizer.py, step).
                return [torch.full((1,), torch.nan, device=engine.device)], {}
            found = original(*args, for_clipping=for_clipping, **kwargs)
            if for_clipping or found[0]:
                return found
            return [torch.zeros(1, device=engine.device)], found[1]

        self._optimizer.get_grads_for_norm = never_empty

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
        if refuses is None and not self._scope.replicas.exist:
            return
        norm = self._scope.norm(self._parts(), partitioned=False, device=self._engine.device)
        norm = self.loss_scale.judge(norm, refuses)
        if refuses is not None:
            self._norm = float(norm)

    @property
    def norm(self) -> float:
        """Norm before clipping."""
        if self._norm is not None:
            return self._norm
        return float(self._engine.get_global_grad_norm() or 0.0)

    def _parts(self) -> Iterator[GradientPart]:
        for parameters in self._optimizer.bf16_groups:
            for parameter in parameters:
                if self._gradients.has(parameter):
                    yield GradientPart(parameter, self._gradients.of(parameter))
