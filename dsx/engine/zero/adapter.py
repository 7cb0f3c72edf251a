"""A step's gradients from the last backward to the update: what is alike for all of DeepSpeed's wrappers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from dsx.engine.chunks import Tie
from dsx.engine.zero.loss_scale import LossScale
from dsx.engine.zero.norm import NormScope, Refuses
from dsx.engine.zero.reduction import LeftToDeepSpeed, Reduction
from dsx.engine.zero.replica_check import Parts


class ZeroAdapter:
    """What the engine asks of DeepSpeed's optimizer wrapper. There is one kind for each of them.

    A kind knows where its wrapper has the gradients, and calls :meth:`sum_ties` and :meth:`take_norm` once a
    step, when they are final and have not been used yet.

    Args:
        ties: Tied weights with copies on other pipeline ranks.
        loss_scale: What the loss is multiplied by, and what has become of the last step.
        clipping: Largest gradient norm where DeepSpeed does not clip; 0 leaves gradients as they are.

    Attributes:
        hooks: What the executor calls as a step proceeds; replaced before :meth:`attach` unless DeepSpeed
            reduces gradients.
        needs_backward: Whether the wrapper has a part in each backward even where dsx reduces gradients.
    """

    in_place = needs_backward = False
    hooks: Reduction

    def __init__(
        self, engine: Any, scope: NormScope, ties: Sequence[Tie], loss_scale: LossScale, clipping: float
    ) -> None:
        self._engine, self._optimizer, self._device = engine, engine.optimizer, engine.device
        self._scope, self._ties, self.loss_scale, self._clipping = scope, ties, loss_scale, clipping
        self.hooks = LeftToDeepSpeed()
        self._refuses: Refuses | None = None
        self._norm = torch.zeros(())
        self._fresh = True  # the next backward is a step's first

    def attach(self) -> None:
        """Replace what the wrapper does wrongly for a part of a pipeline; once, before the first step.

        Raises:
            ConfigError: The optimizer cannot have the tied weights.
        """

    @property
    def reduced_here(self) -> bool:
        """Whether dsx reduces gradients, so that DeepSpeed need not know of them before the step."""
        return self.hooks.by_dsx and not self.needs_backward

    def before_backward(self) -> None:
        """Called before each backward."""

    def forget(self) -> None:
        """Let go of the gradients of a step that an error has cut off; before the next one."""
        self._fresh = True
        for parameter in self._engine.module.parameters():
            parameter.grad = None
            if hasattr(parameter, "grad_accum"):
                parameter.grad_accum = None
        for bucket in getattr(self._optimizer, "ipg_buckets", {}).values():
            getattr(bucket, "clear_params", bucket.clear)()

    def before_step(self, refuses: Refuses | None = None) -> None:
        """Called once all backwards of a step are done, before DeepSpeed's ``step``.

        Args:
            refuses: Asked, alike on every rank, with the gradient norm before the weights are updated; if it
                is true the step is not applied, and DeepSpeed counts it as skipped.
        """
        self._refuses, self._fresh = refuses, True
        self.hooks.finish()

    def complete(self) -> None:
        """Called when all averages of the step have been put."""

    def sum_ties(self, gradients: Iterable[tuple[Tie, torch.Tensor]]) -> None:
        """Sum this rank's (parts of) gradients of tied weights with those of the other copies, in place."""
        for tie, gradient in gradients:
            # By way of the device when they live elsewhere (offload).
            staged = gradient if gradient.device.type == self._device.type else gradient.to(self._device)
            dist.all_reduce(staged, group=tie.group)
            if staged is not gradient:
                gradient.copy_(staged)

    def take_norm(self, parts: Parts, *, partitioned: bool) -> torch.Tensor:
        """The norm of all ranks' gradients as they are, with the loss scale; decides about the step."""
        scaled = self._scope.norm(parts, partitioned=partitioned, device=self._device)
        self._norm = self.loss_scale.judge(scaled, self._refuses)
        return scaled

    @property
    def norm(self) -> torch.Tensor | float:
        """Norm of the last step's gradient over the whole model, before clipping and without the loss scale.

        It is infinite or NaN if a gradient was (every rank then skips the step, except in fp32 without ZeRO,
        where the NaN enters the weights as in torch; in fp16 it is infinite), and NaN if DeepSpeed was told
        not to compute it.
        """
        return self._norm
