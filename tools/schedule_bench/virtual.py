"""Layers that sleep in place of computing: many ranks fit on few cores, and what is left is the engine."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from deepspeed.pipe import LayerSpec
from schedule_bench.schedules import Forward, stage_seconds
from schedule_bench.workload import Workload
from torch import nn

from dsx.nn.split import WeightGradients

WIDTH = 32
"""Features of the tensors that travel: next to nothing, so that a message costs what an engine makes it."""

_LATEST = 31
"""Sleeps whose overshoot counts."""


@dataclass(slots=True)
class Sleeper:
    """Sleeps for one rank, and counts how often it was asked to.

    Sleeps last longer than asked, and longer amid other work than on their own. So every sleep is shortened
    by the median overshoot of the latest ones: virtual computation takes its nominal time in the middle, and
    what a busy machine adds now and then stays in the figures.

    Attributes:
        naps: Sleeps so far.
    """

    naps: int = 0
    _overshoots: deque[float] = field(default_factory=lambda: deque([0.0], maxlen=_LATEST))

    @property
    def overshoot_seconds(self) -> float:
        """How much longer than asked this machine sleeps."""
        return statistics.median(self._overshoots)

    def nap(self, seconds: float) -> None:
        """Sleep."""
        deadline = time.perf_counter() + seconds
        self.naps += 1
        overshoot = self.overshoot_seconds
        time.sleep(max(0.0, deadline - overshoot - time.perf_counter()))
        self._overshoots.append(time.perf_counter() - deadline + overshoot)

    def calibrate(self, seconds: float) -> None:
        """Learn the overshoot from a series of sleeps."""
        for _ in range(_LATEST):
            self.nap(seconds)


class _Input(torch.autograd.Function):
    """The layer's path from its input to its output: sleeps forward, and for the gradient of the input."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: SleepLayer) -> torch.Tensor:
        layer.sleeper.nap(layer.seconds)
        ctx.layer = layer
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.layer.sleeper.nap(ctx.layer.seconds)
        return dy, None


class _Weight(torch.autograd.Function):
    """The path from the weight: sleeps for its gradient, unless dsx wants that later.

    A node of its own, because torch's stage_backward_weight runs again whatever node joins the two paths.
    """

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, layer: SleepLayer) -> torch.Tensor:
        ctx.weight, ctx.layer = weight, layer
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, None]:
        layer, weight = ctx.layer, ctx.weight
        if layer.split is not None and layer.split.active:
            layer.split.keep(weight, weight.shape, layer.start_weight_gradient, gradient)
            return None, None
        return layer.start_weight_gradient(gradient)(None), None


class SleepLayer(nn.Module):
    """A layer that takes ``seconds`` for a forward, an input gradient and a weight gradient each.

    Args:
        seconds: Of one nap.
        sleeper: Of this rank.
        split: Takes the weight gradient while it defers.
        first: Its input wants no gradient, and autograd is to run its backward all the same.
    """

    def __init__(
        self,
        seconds: float,
        sleeper: Sleeper,
        split: WeightGradients | None = None,
        *,
        first: bool = False,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(WIDTH))
        self.seconds, self.sleeper, self.split, self.first = seconds, sleeper, split, first

    def start_weight_gradient(self, gradient: torch.Tensor) -> Callable[[torch.Tensor | None], torch.Tensor]:
        """The weight gradient's nap, as WeightGradients wants it."""

        def finish(total: torch.Tensor | None) -> torch.Tensor:
            self.sleeper.nap(self.seconds)
            return gradient.clone() if total is None else total.add_(gradient)

        return finish

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, WIDTH] to the same."""
        if self.first:
            x = x.detach().requires_grad_(torch.is_grad_enabled())
        y: torch.Tensor = _Input.apply(x, self) + _Weight.apply(self.weight, self)
        return y


def squared_error(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Anything that depends on all outputs."""
    return (outputs - labels).square().mean()


def workload(num_ranks: int, num_micro_batches: int, forward: Forward, sleeper: Sleeper) -> Workload:
    """One sleeping layer per virtual stage, which takes its part of ``forward``."""

    def layers(num_chunks: int, split: WeightGradients | None) -> list[LayerSpec]:
        parts = stage_seconds(num_ranks * num_chunks, num_ranks, forward)
        return [
            LayerSpec(SleepLayer, seconds, sleeper, split, first=stage == 0)
            for stage, seconds in enumerate(parts)
        ]

    def module(stage: int, num_stages: int) -> nn.Module:
        return SleepLayer(stage_seconds(num_stages, num_ranks, forward)[stage], sleeper, first=stage == 0)

    return Workload(
        layers=layers,
        loss_fn=squared_error,
        partition_method="uniform",
        module=module,
        inputs=torch.zeros(num_micro_batches, WIDTH),
        labels=torch.ones(num_micro_batches, WIDTH),
        num_micro_batches=num_micro_batches,
    )
