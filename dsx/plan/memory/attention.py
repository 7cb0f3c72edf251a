"""The attention core of dsx as :mod:`.tape` sees it: rotation, fused kernel, and the way back.

Shapes as in :mod:`.ops`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dsx.plan.memory import host_attention
from dsx.plan.memory.ops import Ops, label
from dsx.plan.memory.tape import Tensor

_CORE = "nn/attention.py _core"
_ROTARY = "nn/rotary.py __call__"

MASK_ALIGNMENT = 8
"""Elements to whose multiple a mask's rows are stored (nn/window.py)."""


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
        """nn/rotary.py __call__: all of each head, or its first elements beside the rest."""
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
            return host_attention.attention(ops, query, key, value, masked=self.masked)
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
