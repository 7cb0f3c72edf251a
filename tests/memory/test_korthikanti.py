"""Records reproduce the published activation formulas of Korthikanti et al. 2022 (arXiv:2205.05198).

Their layer is not dsx's (no flash attention, masks kept as bytes), so its operations are written here, from
the text of section 4.1: what each saves, at two bytes an element and one byte a dropout mask.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dsx.memory.device import fake_build
from dsx.memory.layer_record import TensorForm
from dsx.memory.layer_recorder import record_layer
from dsx.schedules.builders import build
from dsx.schedules.simulate import peak_activations

S, B, H, A = 2048, 4, 12288, 96
GIB = 2**30


class Op(torch.autograd.Function):
    """``result`` as if it had been computed from ``x``, with ``saved`` kept for backward."""

    @staticmethod
    def forward(ctx, x, shape, *saved):
        ctx.save_for_backward(*saved)
        ctx.x = x.shape, x.dtype, x.device
        ctx.needs = len(saved)
        return x.new_empty(shape)

    @staticmethod
    def backward(ctx, dy):
        shape, dtype, device = ctx.x
        return torch.empty(shape, dtype=dtype, device=device), None, *(None,) * ctx.needs


@dataclass(frozen=True)
class PaperLayer:
    """One transformer layer as in figure 2 of the paper."""

    tp: int
    sequence: bool
    selective: bool = False

    def op(self, x: Tensor, *, saves: tuple[Tensor, ...], shape: tuple[int, ...]) -> Tensor:
        y: Tensor = Op.apply(x, shape, *saves)
        return y

    @property
    def part(self) -> tuple[int, ...]:
        """Outside of the tensor-parallel regions."""
        return (S // self.tp if self.sequence else S, B, H)

    def dropout(self, x: Tensor, *shape: int) -> Tensor:
        mask = x.new_empty(shape, dtype=torch.bool)
        return self.op(x, saves=(mask,), shape=shape)

    def norm(self, x: Tensor) -> Tensor:
        return self.op(x, saves=(x,), shape=self.part)

    def core(self, qkv: Tensor) -> Tensor:
        t = self.tp
        q, k, v = qkv.chunk(3, dim=-1)
        scores = self.op(q, saves=(q, k), shape=(B, A // t, S, S))
        weights = Softmax.apply(scores)
        dropped = self.dropout(weights, B, A // t, S, S)
        return self.op(dropped, saves=(dropped, v), shape=(S, B, H // t))

    def __call__(self, x: Tensor) -> Tensor:
        t = self.tp
        y = self.norm(x)
        # The shared input of Q, K and V counts once, and its gathered copy not at all (section 4.2.2).
        qkv = self.op(y, saves=(y,), shape=(S, B, 3 * H // t))
        context = checkpoint(self.core, qkv, use_reentrant=False) if self.selective else self.core(qkv)
        y = self.op(context, saves=(context,), shape=self.part)
        x = self.op(self.dropout(y, *self.part), saves=(), shape=self.part)
        y = self.norm(x)
        wide = self.op(y, saves=(y,), shape=(S, B, 4 * H // t))
        active = self.op(wide, saves=(wide,), shape=(S, B, 4 * H // t))
        y = self.op(active, saves=(active,), shape=self.part)
        return self.op(self.dropout(y, *self.part), saves=(), shape=self.part)


class Softmax(torch.autograd.Function):
    """Saves its result."""

    @staticmethod
    def forward(ctx, scores):
        weights = torch.empty_like(scores)
        ctx.save_for_backward(weights)
        return weights

    @staticmethod
    def backward(ctx, dy):
        return dy


def kept(tp: int, sequence: bool, *, recompute: str = "none") -> int:
    """Bytes that one layer keeps for backward: all that is live but its output. Its input counts."""
    layer = PaperLayer(tp, sequence, selective=recompute == "selective")
    form = TensorForm(layer.part, "bfloat16", 2, differentiable=True)

    def run(x: Tensor) -> Tensor:
        return checkpoint(layer, x, use_reentrant=False) if recompute == "full" else layer(x)

    with fake_build("meta"):
        return record_layer(run, [form], device="meta").kept_bytes


SBH = S * B * H
SCORES = 5 * A * S / H


@pytest.mark.parametrize(
    ("tp", "sequence", "recompute", "expected"),
    [
        (1, False, "none", SBH * (34 + SCORES)),
        (8, False, "none", SBH * (10 + 24 / 8 + SCORES / 8)),
        (8, True, "none", SBH / 8 * (34 + SCORES)),
        (8, False, "selective", SBH * (10 + 24 / 8)),
        (8, True, "selective", SBH * 34 / 8),
        (8, False, "full", SBH * 2),
    ],
)
def test_table_2(tp: int, sequence: bool, recompute: str, expected: float) -> None:
    """Each row of table 2, byte for byte."""
    assert kept(tp, sequence, recompute=recompute) == expected


def test_175_billion() -> None:
    """66.84375 GiB on the first rank: eq. 2 with t = p = 8, interleaved with 3 chunks (figure 1's GPT-3)."""
    schedule = build("interleaved", 8, 3, 16)
    chunks = peak_activations(schedule)[0]
    layers = chunks * 96 // (8 * 3)
    assert layers == 96 * (1 + (8 - 1) / (8 * 3))
    assert layers * kept(8, False) / B / GIB == pytest.approx(66.84375, abs=1e-6)
