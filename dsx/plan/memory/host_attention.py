"""Attention with dropout on a CPU, as :mod:`.tape` sees it.

torch's fused kernel for CPUs has no dropout (sdp_utils_cpp.cpp), so that it composes attention of other
operators, S x S scores included, in float32 (aten/src/ATen/native/transformers/attention.cpp,
_scaled_dot_product_attention_math). Shapes as in :mod:`.ops`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dsx.plan.memory.tape import Label, Tensor

if TYPE_CHECKING:
    from dsx.plan.memory.ops import Ops

_SOURCE = "torch attention.cpp, _scaled_dot_product_attention_math"


@dataclass(frozen=True, slots=True)
class _Steps:
    """Its operators. What the C++ function has in a variable lives until it returns; so here."""

    ops: Ops
    batch: int
    length: int
    heads: int
    head_dim: int

    def run(self, query: Tensor, key: Tensor, value: Tensor, *, masked: bool) -> Tensor:
        """[B, S, N, D] and twice [B, S, K, D] to the same as queries."""
        upcast = [self._widened(x) for x in (query, key, value)]
        scaled = self._scaled(upcast[0])
        mask = None if masked else self._causal_mask()
        whole_key, whole_value = self._repeated(upcast[1]), self._repeated(upcast[2])
        grouped = key.shape[2] != self.heads
        weights = self._dropped(self._softmax(self._masked(self._scores(scaled, whole_key, is_so=grouped))))
        unused = self._narrow_weights(weights)
        context = self._context(weights, whole_value, is_so=grouped)
        result = self._narrowed(context)
        del upcast, scaled, mask, whole_key, whole_value, unused
        return result

    def joined(self, context: Tensor) -> Tensor:
        """[B, N, S, D] to [B, S, N D], a copy where heads are several."""
        if self.heads == 1:
            return context
        y = self.ops.like(Label("activations", "context, in order", "B S N D w", _SOURCE), context)
        self.ops.tape.record((context,), (y,), lambda _, dy: [dy.detach()])
        return y

    def _area(self, name: str) -> Tensor:
        sizes = (self.batch, self.heads, self.length, self.length)
        return self.ops.tape.new(Label("activations", name, "4 B N S S", _SOURCE), 4, *sizes)

    def _wide(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return self.ops.tape.new(Label("activations", name, "4 B S N D", _SOURCE), 4, *shape)

    def _own(self, name: str, shape: tuple[int, ...]) -> Tensor:
        what = Label("activations", name, "B S N D w", _SOURCE)
        return self.ops.tape.new(what, self.ops.width, *shape)

    def _widened(self, x: Tensor) -> Tensor:
        if self.ops.width == 4:
            return x
        y = self._wide("in float32", x.shape)
        self.ops.tape.record((x,), (y,), lambda _, dy: [self._own("gradient", dy.shape)])
        return y

    def _scaled(self, x: Tensor) -> Tensor:
        """Times the root of the scale."""
        y = self._wide("scaled", x.shape)
        self.ops.tape.record((x,), (y,), lambda _, dy: [self._wide("gradient of the unscaled", dy.shape)])
        return y

    def _causal_mask(self) -> Tensor:
        """By way of truth values, and of two numbers."""
        area, new = self.length * self.length, self.ops.tape.new
        what = Label("activations", "causal mask, as truth values", "S S", _SOURCE)
        ones = new(what, 1, area)
        lower = new(what, 1, area)
        del ones
        numbers = new(Label("activations", "numbers of the causal mask", "8", _SOURCE), 4, 2)
        mask = new(Label("activations", "causal mask", "4 S S", _SOURCE), 4, area)
        del lower, numbers
        return mask

    def _repeated(self, x: Tensor) -> Tensor:
        """Keys or values for each query head."""
        if x.shape[2] == self.heads:
            return x
        shape = x.shape
        y = self._wide("repeated keys, values", (*shape[:2], self.heads, self.head_dim))
        self.ops.tape.record((x,), (y,), lambda *_: [self._wide("gradient of keys, values", shape)])
        return y

    def _matrices(self, x: Tensor, *, is_so: bool = False) -> Tensor:
        """One for each sample and head: a copy where both are several."""
        if is_so or self.batch == 1 or self.heads == 1:
            return x
        y = self._wide("as matrices", x.shape)
        self.ops.tape.record((x,), (y,), lambda _, dy: [dy.detach()])
        return y

    def _scores(self, query: Tensor, key: Tensor, *, is_so: bool) -> Tensor:
        scaled = self._scaled(key)
        left, right = self._matrices(query), self._matrices(scaled, is_so=is_so)
        y = self._area("scores")

        def backward(saved: tuple[Tensor, ...], _: Tensor) -> list[Tensor | None]:
            of_keys = self._wide("gradient of keys", saved[1].shape)
            return [self._wide("gradient of queries", saved[0].shape), of_keys]

        self.ops.tape.record((left, right), (y,), backward, saved=(left, right))
        return y

    def _masked(self, scores: Tensor) -> Tensor:
        """In place only where nobody looks on: under a dispatch mode, which counts, a new tensor."""
        y = self._area("scores, masked")
        self.ops.tape.record((scores,), (y,), lambda _, dy: [dy.detach()])
        return y

    def _softmax(self, scores: Tensor) -> Tensor:
        y = self._area("probabilities")
        self.ops.tape.record((scores,), (y,), lambda *_: [self._area("gradient of scores")], saved=(y,))
        return y

    def _dropped(self, probabilities: Tensor) -> Tensor:
        keep, y = self._area("what dropout keeps"), self._area("probabilities after dropout")
        gradient = "gradient of probabilities"
        self.ops.tape.record((probabilities,), (y,), lambda *_: [self._area(gradient)], saved=(keep,))
        return y

    def _narrow_weights(self, weights: Tensor) -> Tensor | None:
        """The function's second result, which nobody takes."""
        if self.ops.width == 4:
            return None
        what = Label("activations", "probabilities, as narrow as parameters", "B N S S w", _SOURCE)
        return self.ops.tape.new(what, self.ops.width, *weights.shape)

    def _context(self, weights: Tensor, value: Tensor, *, is_so: bool) -> Tensor:
        """The product with values; its memory comes after the inputs have been saved."""
        right = self._matrices(value, is_so=is_so)
        y = Tensor((self.batch, self.length, self.heads, self.head_dim), 4, None)

        def backward(saved: tuple[Tensor, ...], dy: Tensor) -> list[Tensor | None]:
            del dy
            of_values = self._wide("gradient of values", saved[1].shape)
            return [self._area("gradient of probabilities"), of_values]

        self.ops.tape.record((weights, right), (y,), backward, saved=(weights, right))
        y.hold(self._wide("context in float32", y.shape))
        return self._from_matrices(y)

    def _from_matrices(self, context: Tensor) -> Tensor:
        """A view, whose gradient is made :meth:`_matrices`."""
        if self.batch == 1 or self.heads == 1:
            return context
        y = context.detach()
        self.ops.tape.record((context,), (y,), lambda _, dy: [self._wide("gradient as matrices", dy.shape)])
        return y

    def _narrowed(self, context: Tensor) -> Tensor:
        if self.ops.width == 4:
            return context
        y = self._own("context", context.shape)
        self.ops.tape.record(
            (context,), (y,), lambda _, dy: [self._wide("gradient of the context", dy.shape)]
        )
        return y


def attention(ops: Ops, query: Tensor, key: Tensor, value: Tensor, *, masked: bool) -> Tensor:
    """With dropout: [B, S, N, D] and twice [B, S, K, D] to [B, S, N D].

    Args:
        ops: Records.
        query: Queries.
        key: Keys.
        value: Values.
        masked: Whether a mask of its own comes in place of the causal one.
    """
    batch, length, heads, head_dim = query.shape
    steps = _Steps(ops, batch, length, heads, head_dim)
    context = steps.run(query, key, value, masked=masked)
    return steps.joined(context).view(batch, length, -1)
