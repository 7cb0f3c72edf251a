"""The tape reproduces the published activation formulas of Korthikanti et al. 2022 (arXiv:2205.05198).

Their layer is not dsx's (no flash attention, masks kept as bytes), so its operations are written here, from
the text of section 4.1: what each saves, at two bytes an element and one byte a dropout mask.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from dsx.memory.ledger import Label, Leaf, Ledger, Tape, Tensor
from dsx.schedules.builders import build
from dsx.schedules.simulate import peak_activations

S, B, H, A = 2048, 4, 12288, 96
GIB = 2**30


@dataclass(frozen=True)
class PaperLayer:
    """One transformer layer as in figure 2 of the paper."""

    tape: Tape
    tp: int
    sequence: bool
    selective: bool = False

    def op(self, x: Tensor, *, saves: tuple[Tensor, ...], shape: tuple[int, ...], width: int = 2) -> Tensor:
        y = self.tape.new(Label("activations", "output", "", ""), width, *shape)
        self.tape.record((x,), (y,), lambda _, dy: [dy.detach()], saved=saves)
        return y

    def mask(self, *shape: int) -> Tensor:
        return self.tape.new(Label("activations", "dropout mask", "", ""), 1, *shape)

    @property
    def part(self) -> tuple[int, ...]:
        """Outside of the tensor-parallel regions."""
        return (S // self.tp if self.sequence else S, B, H)

    def dropout(self, x: Tensor, *shape: int) -> Tensor:
        mask = self.mask(*shape)
        return self.op(x, saves=(mask,), shape=shape)

    def norm(self, x: Tensor) -> Tensor:
        return self.op(x, saves=(x,), shape=self.part)

    def core(self, qkv: Tensor) -> Tensor:
        t = self.tp
        q, k, v = (Tensor((S, B, H // t), 2, qkv.storage) for _ in range(3))
        self.tape.record((qkv,), (q, k, v), lambda _, *dy: [dy[0].detach()])
        scores = self.op(q, saves=(q, k), shape=(B, A // t, S, S))
        weights = self.tape.new(Label("activations", "softmax", "", ""), 2, B, A // t, S, S)
        self.tape.record((scores,), (weights,), lambda _, dy: [dy.detach()], saved=(weights,))
        dropped = self.dropout(weights, B, A // t, S, S)
        return self.op(dropped, saves=(dropped, v), shape=(S, B, H // t))

    def __call__(self, x: Tensor) -> Tensor:
        t = self.tp
        y = self.norm(x)
        # The shared input of Q, K and V counts once, and its gathered copy not at all (section 4.2.2).
        qkv = self.op(y, saves=(y,), shape=(S, B, 3 * H // t))
        context = self.tape.checkpoint(self.core, qkv) if self.selective else self.core(qkv)
        y = self.op(context, saves=(context,), shape=self.part)
        x = self.op(self.dropout(y, *self.part), saves=(), shape=self.part)
        y = self.norm(x)
        wide = self.op(y, saves=(y,), shape=(S, B, 4 * H // t))
        active = self.op(wide, saves=(wide,), shape=(S, B, 4 * H // t))
        y = self.op(active, saves=(active,), shape=self.part)
        return self.op(self.dropout(y, *self.part), saves=(), shape=self.part)


def kept(tp: int, sequence: bool, *, recompute: str = "none") -> int:
    """Bytes that one layer keeps for backward: all that is live but its output. Its input counts."""
    tape = Tape(Ledger())
    layer = PaperLayer(tape, tp, sequence, selective=recompute == "selective")
    storage = tape.new(Label("activations", "input", "", ""), 2, *layer.part)
    x: Tensor = Leaf("input", storage.shape, 2, storage=storage.storage)
    del storage
    y = tape.checkpoint(layer, x) if recompute == "full" else layer(x)
    del x
    return tape.ledger.current_bytes - y.numel * y.width


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
