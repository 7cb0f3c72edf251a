"""Dropout that knows the tensor-parallel ranks, keeps no mask and leaves the device's generator alone.

Each call draws one number from the default CPU generator, which the engine seeds alike on all tensor-parallel
ranks, and makes the mask from a generator of its own. So replicated activations get the same mask on every
rank, and cut ones a different mask on each. Recompute replays the CPU generator, and with it the first
forward's mask.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from dsx.nn.parallel import TensorParallel, uncompiled

_RANK_STRIDE = 0x9E3779B97F4A7C15
"""An odd number, so that the ranks' seeds differ in the low 32 bits, all that torch's CPU generator uses."""


def draw_seed(tp: TensorParallel, *, sharded: bool) -> int:
    """A seed from the default CPU generator: another one on each rank if ``sharded``, else the same."""
    seed = int(torch.randint(1 << 62, (), device="cpu"))
    return (seed + tp.rank * _RANK_STRIDE) % (1 << 63) if sharded else seed


@contextmanager
def seeded(device: torch.device, seed: int) -> Iterator[None]:
    """Seed the default generator of a tensor's device inside the block, and restore it after.

    For operators that take no generator (scaled_dot_product_attention).
    """
    cuda = device.type == "cuda"
    generator = torch.cuda.default_generators[device.index] if cuda else torch.default_generator
    state = generator.get_state()
    generator.manual_seed(seed)
    try:
        yield
    finally:
        generator.set_state(state)


class _Dropout(torch.autograd.Function):
    """Saves the seed and makes the mask again in backward: no byte per element is kept between the two."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, probability: float, seed: int) -> Tensor:
        ctx.probability, ctx.seed = probability, seed
        return _scale(x, probability, seed).mul_(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        return _scale(dy, ctx.probability, ctx.seed).mul_(dy), None, None


def _scale(like: Tensor, probability: float, seed: int) -> Tensor:
    """0 with ``probability``, else 1 / (1 - probability), of the shape, dtype and device of ``like``."""
    generator = torch.Generator(like.device).manual_seed(seed)
    keep = torch.empty_like(like, memory_format=torch.contiguous_format)
    return keep.bernoulli_(1 - probability, generator=generator).div_(1 - probability)


def dropped(x: Tensor, probability: float, tp: TensorParallel, *, sharded: bool) -> Tensor:
    """``x`` of any shape with elements left out; see :class:`Dropout` for the arguments."""
    y: Tensor = uncompiled(_dropped, x, probability, tp, sharded)
    return y


def _dropped(x: Tensor, probability: float, tp: TensorParallel, sharded: bool) -> Tensor:
    y: Tensor = _Dropout.apply(x, probability, draw_seed(tp, sharded=sharded))
    return y


class Dropout(nn.Module):
    """Inverted dropout.

    Args:
        probability: Of zeroing an element, 0 <= p < 1.
        tp: The tensor-parallel ranks.
        sharded: Whether the activation is cut over the ranks, so that each needs a mask of its own.
    """

    def __init__(self, probability: float, tp: TensorParallel, *, sharded: bool) -> None:
        super().__init__()
        self.probability, self.tp, self.sharded = probability, tp, sharded

    def forward(self, x: Tensor) -> Tensor:
        """Any shape; identity in evaluation or with probability 0."""
        if not self.training or self.probability == 0.0:
            return x
        return dropped(x, self.probability, self.tp, sharded=self.sharded)

    def extra_repr(self) -> str:
        """What ``repr`` shows."""
        return f"{self.probability}, sharded={self.sharded}"
