"""Optimizers for which every data-parallel rank holds whole gradients.

At ZeRO-0 they are in ``p.grad``; BF16_Optimizer, which is ZeRO-1, adds them up in fp32 buffers of its own.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from types import MethodType
from typing import Any

import torch
from torch import nn

from dsx.engine.chunks import Tie
from dsx.engine.zero.master_shards import master_shards
from dsx.engine.zero.messages import share_weights, write_sum
from dsx.engine.zero.norm import Refuses
from dsx.engine.zero.reduction import ZeroAdapter
from dsx.engine.zero.replica_check import GradientPart


class ReplicatedAdapter(ZeroAdapter):
    """Gradients in ``p.grad``.

    They are clipped here, and the engine is built with clipping off, because stock DeepSpeed's norm counts
    pipeline stage 0 alone (deepspeed/runtime/utils.py:394).
    """

    def take(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """``p.grad``, which becomes None."""
        gradient, parameter.grad = parameter.grad, None
        return gradient

    def put(self, parameter: nn.Parameter, start: int, *parts: torch.Tensor) -> None:
        """Put the average into ``p.grad``, in the parameter's dtype."""
        (gradient,) = parts
        assert start == 0
        parameter.grad = gradient.view(parameter.shape).to(parameter.dtype)

    def came_late(self, parameter: nn.Parameter) -> bool:
        return parameter.grad is not None

    def attach(self) -> None:
        """Let a plain torch optimizer skip steps that are not applied, as DeepSpeed's own do."""
        optimizer = self._optimizer
        if optimizer is None:  # for evaluations alone, or to come later
            return
        step = optimizer.step

        @functools.wraps(step)  # with the marks that torch's schedulers leave on it
        def unless_refused(_optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            return None if self.loss_scale.refused else step(*args, **kwargs)

        optimizer.overflow, optimizer.step = False, MethodType(unless_refused, optimizer)

    def before_step(self, refuses: Refuses | None = None) -> None:
        super().before_step(refuses)
        parts = self._final()
        # DeepSpeed asks every optimizer that has it.
        self._optimizer.overflow = self.loss_scale.refused
        if self._clipping > 0:
            # torch.nn.utils.clip_grad_norm_'s rule.
            scale = torch.clamp(self._clipping / (self._norm + 1e-6), max=1.0)
            for part in parts:
                part.gradient.mul_(scale)

    def _final(self) -> list[GradientPart]:
        """All gradients, once ties are summed and the norm is taken."""
        self.sum_ties(self._tied())
        parts = [GradientPart(p, p.grad) for p in self._engine.module.parameters() if p.grad is not None]
        self._scaled_norm = self.take_norm(parts, partitioned=False)
        return parts

    def _tied(self) -> Iterator[tuple[Tie, torch.Tensor]]:
        for tie in self._ties:
            for parameter in tie.parameters:
                if parameter.requires_grad:
                    if parameter.grad is None:
                        parameter.grad = torch.zeros_like(parameter)
                    yield tie, parameter.grad


class WidenedAdapter(ReplicatedAdapter):
    """The same for FP16_Optimizer and FP16_UnfusedOptimizer, which clip copies in fp32 by the norm of all."""

    needs_backward = True

    def attach(self) -> None:
        """Its own norm then stays local (and unused) instead of a sum that counts shards wrongly."""
        optimizer = self._optimizer
        optimizer.mpu = None
        optimizer.overflow_checker = self
        _undo_initial_step(optimizer)
        original = optimizer.unscale_and_clip_grads

        def with_norm_of_all(*args: Any, **kwargs: Any) -> Any:
            *leading, _ = args
            return original(*leading, self._scaled_norm, **kwargs)

        optimizer.unscale_and_clip_grads = with_norm_of_all

    def before_step(self, refuses: Refuses | None = None) -> None:
        ZeroAdapter.before_step(self, refuses)
        self._final()

    def check(self, *_args: Any, **_kwargs: Any) -> bool:
        """Whether the step must be skipped (FP16_UnfusedOptimizer asks so, as of a CheckOverflow).

        A gradient that is not finite shows in the norm of the whole model. So every rank decides alike,
        without checking each parameter and without another collective.
        """
        return self.loss_scale.refused or not math.isfinite(self._scaled_norm)

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


class Bf16Adapter(ZeroAdapter):
    """BF16_Optimizer: gradients in its fp32 buffers, which are set to zero after a step.

    Each gradient is added as it comes, and its bf16 tensor is freed. DeepSpeed does so only if asked to
    (``immediate_grad_update``), with a copy in fp32; by default the bf16 gradients of all parameters stay
    until the step, 2 unread bytes a parameter.

    Only this rank's intervals of the sums are averages, and are clipped, counted in the norm and used.
    """

    in_place = True

    def attach(self) -> None:
        """Gradients reach the buffers without DeepSpeed, which is given the norm."""
        optimizer = self._optimizer
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

        def to_clip_or_norm(*, for_clipping: bool = False) -> Any:
            if for_clipping:
                return optimizer.fp32_groups_gradient_flat_partition
            # A norm that is none makes DeepSpeed skip the step (bf16_optimizer.py, step).
            norm = torch.tensor(torch.nan) if self.loss_scale.refused else self._norm
            return [norm.reshape(1)], {}

        optimizer.get_grads_for_norm, optimizer.mpu = to_clip_or_norm, None  # which sums no more
        if self._device.type == "cpu":
            optimizer.update_lp_params = functools.partial(
                share_weights,
                optimizer.fp32_groups_flat_partition,
                optimizer.bf16_partitioned_groups,
                optimizer.real_dp_process_group,
            )
        self._spans = [span for each in master_shards(self._engine) for span in each.spans]

    @torch.no_grad()
    def _accumulate(self, parameter: nn.Parameter) -> None:
        """Add a gradient, if one has come: the input part of a split backward gives weights none."""
        gradient, parameter.grad = parameter.grad, None
        if gradient is None:
            return
        self.of(parameter).add_(gradient.reshape(-1))
        if parameter in self._taken:
            self._late.add(parameter)

    def of(self, parameter: nn.Parameter) -> torch.Tensor:
        """The buffer's part that belongs to ``parameter``, flat."""
        group, index = self._places[id(parameter)]
        buffer: torch.Tensor = self._optimizer.fp32_groups_gradients[group][index]
        return buffer.view(-1)

    def take(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """The buffer's part: zeros if no gradient has come. It stays in place: the caller copies it."""
        self._taken.add(parameter)
        return self.of(parameter)

    def put(self, parameter: nn.Parameter, start: int, *parts: torch.Tensor) -> None:
        write_sum(self.of(parameter).narrow(0, start, parts[0].numel()), *parts)

    def came_late(self, parameter: nn.Parameter) -> bool:
        return parameter in self._late

    def complete(self) -> None:
        self._taken.clear()
        self._late.clear()

    def forget(self) -> None:
        super().forget()
        self.complete()
        self._optimizer.clear_hp_grads()

    def before_step(self, refuses: Refuses | None = None) -> None:
        super().before_step(refuses)
        parts = {
            id(span.parameter): GradientPart(
                span.parameter, self.of(span.parameter)[span.start : span.stop], span.start
            )
            for span in self._spans
        }
        tied = ((tie, id(parameter)) for tie in self._ties for parameter in tie.parameters)
        self.sum_ties((tie, parts[key].gradient) for tie, key in tied if key in parts)
        self.take_norm(parts.values(), partitioned=True)

    @property
    def norm(self) -> torch.Tensor | float:
        """Infinite where there is none, as DeepSpeed has it, which then skips the step."""
        return self._norm if self._norm.isfinite() else math.inf
