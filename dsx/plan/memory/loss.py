"""The cross entropy of :mod:`dsx.nn.loss` as :mod:`.tape` sees it: float32 of 2^23 logits at a time.

Shapes: N tokens of a micro-batch, V this rank's rows of the padded vocabulary, n = 2^23 / V tokens; w bytes
of a logit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dsx.plan.memory.ops import Ops, label
from dsx.plan.memory.tape import Label, Tensor

LOGITS_AT_ONCE = 1 << 23
"""nn/loss.py, _ELEMENTS_AT_ONCE."""

_SOURCE = "nn/loss.py _CrossEntropy"


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """nn/loss.py _CrossEntropy, overwriting the logits.

    Attributes:
        ops: Records.
    """

    ops: Ops

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Logits [B, S, V] and labels [B, S] to a scalar."""
        ops = self.ops
        check_ids(ops, labels, ignored=True)
        tokens = labels.numel
        column, mine = self._own(tokens)
        statistics = self._statistics(logits, tokens)
        log_sum, target = self._per_token("log-sum-exp", 4, tokens), self._per_token("target", 4, tokens)
        self._per_token("mask", 1, tokens)
        if ops.tp > 1:
            log_sum, target = self._combined(tokens)
        valid, count = self._per_token("mask", 1, tokens), ops.tape.scratch(_label("count", "8"), 8)
        share = self._per_token("share", 4, tokens)
        loss = self._mean(tokens)
        self._record(logits, loss, (logits, log_sum, column, mine, share))
        del statistics, target, valid, count
        return loss

    def _record(self, logits: Tensor, loss: Tensor, saved: tuple[Tensor, ...]) -> None:
        tokens = saved[1].numel

        def backward(saved: tuple[Tensor, ...], _: Tensor) -> list[Tensor | None]:
            scale = self._per_token("scale", 4, tokens)
            wide: Tensor | None = None
            chances: Tensor | None = None
            for rows, columns in _chunks(saved[0], tokens):
                # Python keeps the chunk before until this one is there.
                wide = self._wide(saved[0], rows, columns) or wide
                what = _label("probabilities", "4 n V, n = 2^23 / V")
                chances = self.ops.tape.new(what, 4, rows, columns)
                signs = [self._per_token("signs", 4, rows) for _ in range(2)]
                signs.clear()
            del scale, wide, chances
            return [saved[0].detach()]

        self.ops.tape.record((logits,), (loss,), backward, saved=saved)

    def _own(self, tokens: int) -> tuple[Tensor, Tensor]:
        """Labels as columns of this rank, and which of them are its own."""
        shifted = self._per_token("columns", 8, tokens)
        masks = [self._per_token("mask", 1, tokens) for _ in range(3)]
        mine = masks.pop()
        masks.clear()
        column = self._per_token("columns", 8, tokens)
        del shifted
        return column, mine

    def _statistics(self, logits: Tensor, tokens: int) -> list[Tensor]:
        """Two numbers a token, and a chunk of the logits in float32 at a time."""
        kept: list[Tensor] = []
        wide: Tensor | None = None
        for rows, columns in _chunks(logits, tokens):
            wide = self._wide(logits, rows, columns) or wide
            kept += [self._per_token("statistics", 4, rows) for _ in range(2)]
        del wide
        return kept

    def _combined(self, tokens: int) -> tuple[Tensor, Tensor]:
        """nn/loss.py _combine: log-sum-exp and targets over the tensor-parallel ranks."""
        highest, lower = self._per_token("highest", 4, tokens), self._per_token("differences", 4, tokens)
        sums = self._per_token("sums", 8, tokens)
        del lower
        logarithm, total = self._per_token("logarithm", 4, tokens), self._per_token("log-sum-exp", 4, tokens)
        del highest, logarithm
        return total, sums

    def _mean(self, tokens: int) -> Tensor:
        each, mask = self._per_token("losses", 4, tokens), self._per_token("mask", 1, tokens)
        del mask
        total = self.ops.tape.scratch(_label("loss", "4"), 4)
        del each
        loss = self.ops.tape.new(_label("loss", "4"), 4)
        del total
        return loss

    def _wide(self, logits: Tensor, rows: int, columns: int) -> Tensor | None:
        if logits.width >= 4:
            return None
        return self.ops.tape.new(_label("logits in float32", "4 n V, n = 2^23 / V"), 4, rows, columns)

    def _per_token(self, name: str, width: int, tokens: int) -> Tensor:
        return self.ops.tape.new(_label(name, f"{width} N"), width, tokens)


def _label(name: str, formula: str) -> Label:
    return label(name, formula, _SOURCE, "logits")


def _chunks(logits: Tensor, tokens: int) -> Iterator[tuple[int, int]]:
    """Rows and columns of each chunk."""
    columns = logits.shape[-1]
    step = max(1, LOGITS_AT_ONCE // columns)
    for start in range(0, tokens, step):
        yield min(step, tokens - start), columns


def check_ids(ops: Ops, ids: Tensor, *, ignored: bool = False) -> None:
    """nn/embedding.py check_ids: three masks at once."""
    what = label("id checks", "B S", "nn/embedding.py check_ids")
    masks = [ops.tape.new(what, 1, *ids.shape) for _ in range(3)]
    del masks[:2]
    if ignored:
        ops.tape.new(what, 1, *ids.shape)
    ops.tape.scratch(what, 1)
