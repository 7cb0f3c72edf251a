"""The attention core of dsx as the ledger sees it: rotation, fused kernel, and the way back.

Shapes as in :mod:`dsx.memory.ops`.

torch's fused kernel for CPUs has no dropout (sdp_utils_cpp.cpp), so that it composes attention of other
operators, S x S scores included, in float32 (aten/src/ATen/native/transformers/attention.cpp,
_scaled_dot_product_attention_math). Shapes as in :mod:`dsx.memory.ops`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dsx.memory.ledger import Label, Tensor
from dsx.memory.ops import Ops, label

if TYPE_CHECKING:
    from dsx.memory.ops import Ops


_CORE = "nn/attention.py _core"
_ROTARY = "nn/attention.py __call__"

MASK_ALIGNMENT = 8
"""Elements to whose multiple a mask's rows are stored (nn/attention.py)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Core:
    """nn/attention.py Attention._core, for heads of this rank.

    Attributes:
        ops: Records.
        heads: Query heads.
        kv_heads: Key/value heads.
        head_dim: Size of a head.
        rotary_size: Elements of it that are rotated; 0 without rotation.
        dropout: Whether attention drops weights.
        masked: Whether a window is shorter than the sequence. All blocks share its mask, which is not counted
            here.
        norms: Of query and key heads, if any.
    """

    ops: Ops
    heads: int
    kv_heads: int
    head_dim: int
    rotary_size: int
    dropout: bool = False
    masked: bool = False
    norms: tuple[Callable[[Tensor], Tensor], ...] = ()

    def __call__(self, qkv: Tensor) -> Tensor:
        """Fused projection [B, S, P] to context [B, S, N D]."""
        if self.norms:
            return self._normed(qkv)
        if self.rotary_size:
            turned, value = self._split(qkv)
            qk = self._rotate(turned)
            del turned
            value = self._contiguous(value)
            return self._attend((qk,), value)
        return self._attend((qkv,), None)

    def _normed(self, qkv: Tensor) -> Tensor:
        """Norms of queries and keys, then rotation; values stay a view of the projection."""
        counts = (self.heads, self.kv_heads, self.kv_heads)
        query, key, value = (Tensor(self._part(qkv, n), qkv.width, qkv.storage) for n in counts)
        what = label("gradient of the projection", "B S P w", _CORE)
        shape, width, tape = qkv.shape, qkv.width, self.ops.tape
        tape.record((qkv,), (query, key, value), lambda *_: [tape.new(what, width, *shape)])
        norm_query, norm_key = self.norms
        query = self._rotate(norm_query(query))
        key = self._rotate(norm_key(key))
        return self._kernel(query, *self._expanded(key, value))

    def _part(self, qkv: Tensor, heads: int) -> tuple[int, ...]:
        return (*qkv.shape[:2], heads, self.head_dim)

    def _split(self, qkv: Tensor) -> tuple[Tensor, Tensor]:
        """Views on queries with keys, and on values; backward joins their gradients in new memory."""
        ops = self.ops
        qk = Tensor(self._part(qkv, self.heads + self.kv_heads), qkv.width, qkv.storage)
        value = Tensor(self._part(qkv, self.kv_heads), qkv.width, qkv.storage)
        what = label("gradient of the projection", "B S P w", _CORE)
        shape, width = qkv.shape, qkv.width
        ops.tape.record((qkv,), (qk, value), lambda *_: [ops.tape.new(what, width, *shape)])
        return qk, value

    def _contiguous(self, value: Tensor) -> Tensor:
        copy = self.ops.like(label("values", "B S K D w", _CORE), value)
        self.ops.tape.record((value,), (copy,), lambda _, dy: [dy.detach()])
        return copy

    def _rotate(self, x: Tensor) -> Tensor:
        """nn/attention.py __call__: all of each head, or its first elements beside the rest."""
        if self.rotary_size == self.head_dim:
            return self._turn(x)
        ops, tape, width = self.ops, self.ops.tape, x.width
        sizes = (self.rotary_size, self.head_dim - self.rotary_size)
        turning, rest = (Tensor((*x.shape[:-1], size), width, x.storage) for size in sizes)
        joined = label("gradient of the parts", "B S (N+K) D w", _ROTARY)
        shape = x.shape
        tape.record((x,), (turning, rest), lambda *_: [tape.new(joined, width, *shape)])
        turned = self._turn(turning)
        y = ops.like(label("rotated queries and keys", "B S (N+K) D w", _ROTARY), x)
        shapes = (turned.shape, rest.shape)
        tape.record((turned, rest), (y,), lambda _, dy: [dy.view(*one).detach() for one in shapes])
        return y

    def _turn(self, x: Tensor) -> Tensor:
        """``x cos + (-right, left) sin``; tables are shared and counted once."""
        ops, tape = self.ops, self.ops.tape
        half = (*x.shape[:-1], x.shape[-1] // 2)
        left, right = Tensor(half, x.width, x.storage), Tensor(half, x.width, x.storage)
        joined = label("gradient of the halves", "B S (N+K) D w", _ROTARY)
        tape.record((x,), (left, right), lambda *_: [tape.new(joined, self.ops.width, *x_shape)])
        x_shape = x.shape
        negated = label("negated half", "B S (N+K) D/2 w", _ROTARY)
        negative = tape.new(negated, x.width, *half)
        tape.record((right,), (negative,), lambda *_: [tape.new(negated, ops.width, *half)])
        turned = ops.like(label("half turned", "B S (N+K) D w", _ROTARY), x)
        tape.record(
            (negative, left), (turned,), lambda _, dy: [dy.view(*half).detach(), dy.view(*half).detach()]
        )
        del negative, left, right
        product = label("times the table", "B S (N+K) D w", _ROTARY)
        by_cosine = ops.like(product, x)
        tape.record((x,), (by_cosine,), lambda _, dy: [ops.like(product, dy)])
        by_sine = ops.like(product, x)
        tape.record((turned,), (by_sine,), lambda _, dy: [ops.like(product, dy)])
        rotated = ops.like(label("rotated queries and keys", "B S (N+K) D w", _ROTARY), x)
        tape.record((by_cosine, by_sine), (rotated,), lambda _, dy: [dy.detach(), dy.detach()])
        return rotated

    def _attend(self, projected: tuple[Tensor], value: Tensor | None) -> Tensor:
        """The kernel, with heads brought to it (torch sdp_utils.cpp)."""
        tape = self.ops.tape
        (source,) = projected
        counts = (
            (self.heads, self.kv_heads) if value is not None else (self.heads, self.kv_heads, self.kv_heads)
        )
        parts = [Tensor(self._part(source, heads), source.width, source.storage) for heads in counts]
        joined = label("gradient of queries, keys, values", "B S P w, or B S (N+K) D w if rotated", _CORE)
        shape, width = source.shape, source.width
        tape.record((source,), parts, lambda *_: [tape.new(joined, width, *shape)])
        if value is not None:
            parts.append(value)
        query, key, value = parts
        return self._kernel(query, *self._expanded(key, value))

    @property
    def _efficient(self) -> bool:
        """Whether the kernel is the memory-efficient one, not flash."""
        return self.ops.device == "cuda" and (self.ops.width == 4 or self.masked)

    def _expanded(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values as the kernel takes them: the memory-efficient one for each query head."""
        if not self._efficient or self.heads == self.kv_heads:
            return key, value
        return self._repeated(key), self._repeated(value)

    def _repeated(self, x: Tensor) -> Tensor:
        ops = self.ops
        y = ops.tape.new(
            label("repeated keys, values", "B S N D w", "nn/attention.py _attend"),
            x.width,
            *self._part(x, self.heads),
        )
        what = label("gradient of keys, values", "B S K D w", "nn/attention.py _attend")
        shape, width = x.shape, x.width
        ops.tape.record((x,), (y,), lambda *_: [ops.tape.new(what, width, *shape)])
        return y

    def _kernel(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        ops, tape = self.ops, self.ops.tape
        if self.dropout and ops.device == "cpu":
            return attention(ops, query, key, value, masked=self.masked)
        batch, length = query.shape[:2]
        context = tape.new(label("context", "B S N D w", _CORE), query.width, *query.shape)
        efficient = self._efficient
        rows = -(-length // 32) * 32 if efficient else length
        what = label("log-sum-exp", "4 B N S", _CORE)
        log_sum = tape.new(what, 4, batch, self.heads, rows)
        # Flash: two numbers and a placeholder (flash_api.cpp, rng_state); the other kernel: one and one.
        # A CPU's draws nothing.
        sizes = () if ops.device == "cpu" else (1, 1) if efficient else (2, 1)
        seeds = [tape.new(label("generator state", "8", _CORE), 8, size) for size in sizes]

        def backward(saved: tuple[Tensor, ...], _: Tensor) -> list[Tensor | None]:
            names = ("gradient of queries", "gradient of keys", "gradient of values")
            return [ops.like(label(n, "B S N D w", _CORE), t) for n, t in zip(names, saved[:3], strict=True)]

        tape.record(
            (query, key, value), (context,), backward, saved=(query, key, value, context, log_sum, *seeds)
        )
        return context.view(batch, length, -1)


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
