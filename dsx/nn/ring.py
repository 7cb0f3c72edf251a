"""Ring attention: the keys and values of a row's parts come to a rank one after the other.

As Liu et al. 2023 (arXiv:2310.01889) have it, over the zigzag chunks of :mod:`dsx.nn.context`: a rank attends
to its own keys while those of one other rank are under way, and so on around the axis. Partial results are
merged by the logarithms of their sums of exponentials (online softmax, arXiv:2112.05682), in float32.
Backward lets all come again, and sends what it finds for them home, where it is summed.

In step d rank r is sent what rank r - d has, by that rank itself and not by way of others, so that nothing is
sent to where nobody looks at it: of the ranks before it a rank is sent the first chunk alone, which is three
quarters of what goes round a ring of neighbours; in a window, or under documents apart, what these reach.
A rank holds its own keys and values and those of two others, and no scores but a kernel's.

Shapes: B micro-batch, N query heads, K key/value heads, T a whole row, S this rank's part of it, n tokens
that a step brings, D the size of a head, V that of its values.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dsx.nn import collectives
from dsx.nn.context import ContextParallel, slices
from dsx.nn.parallel import uncompiled

_aten = torch.ops.aten


class Sight(NamedTuple):
    """What a chunk's queries see up to themselves: any of them from ``first`` on, all from ``common`` on."""

    first: int
    common: int


class KernelCall(NamedTuple):
    """Which of a rank's queries (``rows``) attend to which of the keys that it holds (``keys``).

    ``queries`` and ``stretches`` say where they stand in the row; ``masked``, whether a mask must say which
    sees which; ``causal``, whether both are the same tokens, of which each sees those before it.
    """

    rows: slice
    keys: slice
    queries: range
    stretches: tuple[range, ...]
    masked: bool
    causal: bool

    def by_blocks(self) -> Iterator[KernelCall]:
        """Calls of some queries each, with the keys up to the last of them, so that masks are no larger."""
        for at in range(0, len(self.queries), _MASKED):
            queries = self.queries[at : at + _MASKED]
            seen = tuple(
                filter(len, (range(each.start, min(each.stop, queries.stop)) for each in self.stretches))
            )
            rows = slice(self.rows.start + at, self.rows.start + at + len(queries))
            keys = slice(self.keys.start, self.keys.start + sum(map(len, seen)))
            yield KernelCall(rows, keys, queries, seen, self.masked, self.causal)


_MASKED = 1024
"""Queries of a mask at most."""


Held: TypeAlias = "tuple[tuple[range, ...], Tensor, Tensor]"
"""Where keys stand in the row, ascending; the keys [B, K, n, D] and values [B, K, n, V]."""


def unseen(dtype: torch.dtype) -> float:
    """What makes a score nothing, and a row of nothing else still a number, which merging then drops."""
    return torch.finfo(dtype).min / 2  # kernels multiply it by log2(e)


@dataclass(frozen=True, slots=True)
class Ring:
    """How this rank's queries attend to keys of whole rows, causally.

    Attributes:
        cp: The ranks.
        length: T.
        sights: Of each of the row's 2 cp chunks, alike on all ranks.
        mask: What is to be added to scores, [B or 1, N or 1, queries, keys], without a gradient: 0, or
            :func:`unseen`. None if no call is masked.
        scale: Of the scores; None is 1 / sqrt(D).
        cap: Scores are cap tanh(score / cap) (Gemma 2, arXiv:2408.00118, section 2); None leaves them.
    """

    cp: ContextParallel
    length: int
    sights: tuple[Sight, ...]
    mask: Callable[[KernelCall], Tensor] | None = None
    scale: float | None = None
    cap: float | None = None

    def _sight(self, queries: range) -> Sight:
        return self.sights[queries.start // len(queries)]

    def sent(self, to: int, of: int) -> tuple[range, ...]:
        """The stretches of the row that rank ``to`` needs of the keys that rank ``of`` has."""
        return self.cp.sent(self.length, [each.first for each in self.sights], to, of)

    def calls(self, held: tuple[range, ...]) -> list[KernelCall]:
        """What this rank's queries do with the keys of these stretches."""
        chunks, found, clear = self.cp.chunks(self.length), list[KernelCall](), True
        for queries, row in zip(chunks, (0, len(chunks[0])), strict=True):
            sight = self._sight(queries)
            keys = tuple(filter(len, (_both(each, range(sight.first, queries.stop)) for each in held)))
            if keys:
                skipped = sum(len(_both(each, range(keys[0].start))) for each in held)
                columns = slice(skipped, skipped + sum(map(len, keys)))
                causal, some = keys[-1] == queries, keys[0].start < sight.common
                masked, clear = some or (causal and len(keys) > 1), clear and not some
                rows = slice(row, row + len(queries))
                found.append(KernelCall(rows, columns, queries, keys, masked, causal))
        if clear and len(found) > 1 and found[0].causal == found[1].causal:
            both = chunks if found[0].causal else found[0].stretches
            if found[1].stretches == both:  # all queries see all keys, or all keys up to themselves
                return [found[1]._replace(rows=slice(None), masked=False)]
        return [each for call in found for each in (call.by_blocks() if call.masked else [call])]

    def turns(self, k: Tensor, v: Tensor) -> Generator[Held, Tensor | None, Tensor | None]:
        """Keys and values of all ranks, this one's first, the next ones under way while one is looked at.

        A backward sends the gradient of what it was given, float32 [B, K, n, D + V], and this returns that of
        the rank's own. All ranks must go through it alike: what one sends in a step another receives.
        """
        size, rank = self.cp.size, self.cp.rank
        total = found = coming = home = None
        works, outgoing = collectives.start_messages((), (), self.cp), list[tuple[int, Tensor]]()
        held: Held = self.cp.chunks(self.length), k, v
        for step in range(size + 2):
            for work in works:
                work.wait()
            if coming is not None:
                held = (coming[0], *coming[1].split((k.shape[-1], v.shape[-1]), -1))
            if home is not None and total is not None:
                rows = self._rows(home[0])
                parts = home[1].split([at.stop - at.start for at in rows], 2)
                for at, part in zip(rows, parts, strict=True):
                    total[:, :, at] += part
            incoming, outgoing, coming, home = list[tuple[int, Tensor]](), [], None, None
            if step + 1 < size:
                to, of = (rank + step + 1) % size, (rank - step - 1) % size
                rows = [*self._rows(self.sent(to, rank)), slice(0, 0)]
                given = (torch.cat([x[:, :, at] for at in rows], 2) for x in (k, v))
                outgoing.append((to, torch.cat(list(given), -1)))
                coming = self._empty(self.sent(rank, of), k, v)
                incoming.append((of, coming[1]))
            if step == 1:
                total = found
            elif found is not None:
                to, of = (rank - step + 1) % size, (rank + step - 1) % size
                outgoing.append((to, found.to(k.dtype)))
                home = self._empty(self.sent(of, rank), k, v)
                incoming.append((of, home[1]))
            works = collectives.start_messages(incoming, outgoing, self.cp)
            found = (yield held) if step < size else None
        return total

    def _rows(self, stretches: Iterable[range]) -> list[slice]:
        """Where in this rank's part of the row stretches of it are."""
        return slices(self.cp.chunks(self.length), stretches)

    def _empty(self, stretches: tuple[range, ...], k: Tensor, v: Tensor) -> tuple[tuple[range, ...], Tensor]:
        size = sum(map(len, stretches)), k.shape[-1] + v.shape[-1]
        return stretches, k.new_empty(*k.shape[:2], *size)

    def attend(self, q: Tensor, turns: Iterable[Held], sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        """The context [B, N, S, V], and the logarithms of the sums of exponentials, float32 [B, N, S]."""
        y: Tensor | None = None
        lse = q.new_full(q.shape[:-1], -torch.inf, dtype=torch.float32)
        for held, k, v in turns:
            y = _zeros(q, v.shape[-1]) if y is None else y
            for call in self.calls(held):
                part, more = _forward(*self._given(call, q, k, v))
                old = lse[:, :, call.rows]
                # In place of weights exp(old - new) and exp(more - new), for new = log(e^old + e^more).
                y[:, :, call.rows].lerp_(part.float(), (more - old).sigmoid_().unsqueeze(-1))
                old.copy_(torch.logaddexp(old, more))
        assert y is not None, "a rank has keys of its own"
        if sinks is not None:
            new = torch.logaddexp(lse, sinks.float()[:, None])
            y.mul_((lse - new).exp_().unsqueeze(-1))
            lse = new
        return y.to(q.dtype), lse

    def gradient(self, dy: Tensor, y: Tensor, lse: Tensor, q: Tensor, held: Held, dq: Tensor) -> Tensor:
        """Adds to that of the queries; gives that of keys beside that of values, float32 [B, K, n, D + V]."""
        stretches, k, v = held
        found = q.new_zeros(*k.shape[:-1], k.shape[-1] + v.shape[-1], dtype=torch.float32)
        for call in self.calls(stretches):
            dy_, y_, lse_ = (each[:, :, call.rows].contiguous() for each in (dy, y, lse))
            part, dk, dv = _backward(dy_, y_, lse_, *self._given(call, q, k, v))
            dq[:, :, call.rows] += part
            found[:, :, call.keys, : k.shape[-1]] += dk
            found[:, :, call.keys, k.shape[-1] :] += dv
        return found

    def _given(self, call: KernelCall, q: Tensor, k: Tensor, v: Tensor) -> tuple[Any, ...]:
        mask = self.mask(call) if self.mask is not None and call.masked else None
        parts = q[:, :, call.rows], k[:, :, call.keys], v[:, :, call.keys]
        return *parts, mask, call.causal and mask is None, self.scale, self.cap


def _both(one: range, other: range) -> range:
    return range(max(one.start, other.start), min(one.stop, other.stop))


class LowerRight(Ring):
    """Causal attention of the last tokens to all that a rank has, by two calls without a mask."""

    def calls(self, held: tuple[range, ...]) -> list[KernelCall]:
        """All keys before the queries, and these tokens' own."""
        (keys,), queries = held, range(self.length, held[0].stop)
        before, own = range(self.length), slice(self.length, keys.stop)
        return [
            KernelCall(slice(None), slice(0, self.length), queries, (before,), masked=False, causal=False),
            KernelCall(slice(None), own, queries, (queries,), masked=False, causal=True),
        ]

    def turns(self, k: Tensor, v: Tensor) -> Generator[Held, Tensor | None, Tensor | None]:
        """All at once."""
        return (yield (range(k.shape[2]),), k, v)


def ring_attention(q: Tensor, k: Tensor, v: Tensor, ring: Ring, sinks: Tensor | None = None) -> Tensor:
    """Attention of queries [B, N, S, D] to keys [B, K, S, D] with values [B, K, S, V]: [B, N, S, V].

    A collective call. K divides N. Sinks [N] are scores that each query has besides those of keys, and that
    have no value (arXiv:2309.17453).
    """
    y: Tensor = uncompiled(_Ring.apply, q, k, v, sinks, ring)
    return y


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, ring: Ring) -> Tensor:
        y, lse = ring.attend(q, ring.turns(k, v), sinks)
        ctx.ring = ring
        ctx.save_for_backward(q, k, v, sinks, y, lse)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, y, lse = ctx.saved_tensors
        dq, turns, found = _zeros(q, q.shape[-1]), ctx.ring.turns(k, v), None
        try:
            while True:
                found = ctx.ring.gradient(dy, y, lse, q, turns.send(found), dq)
        except StopIteration as end:
            dk, dv = end.value.split((k.shape[-1], v.shape[-1]), -1)
        dsinks = None
        if sinks is not None:
            weight = (sinks.float()[:, None] - lse).exp_()
            dsinks = -(weight * (dy.float() * y.float()).sum(-1)).sum((0, 2)).to(sinks.dtype)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dsinks, None


def _zeros(q: Tensor, size: int) -> Tensor:
    """Float32 [B, N, S, size] in the order of [B, S, N, size], as whoever projects them wants them."""
    batch, heads, rows, _ = q.shape
    return q.new_zeros(batch, rows, heads, size, dtype=torch.float32).transpose(1, 2)


_LARGEST_HEAD, _MULTIPLE = 256, 8
"""What sizes of heads the flash kernel of GPUs takes as they are (sdp_utils.cpp, attention.cpp)."""


def _flashes(q: Tensor, v: Tensor, mask: Tensor | None, cap: float | None) -> bool:
    """Whether a flash kernel of torch does this."""
    size = q.shape[-1]
    if cap is not None or size != v.shape[-1] or q.device.type == "cpu":
        return cap is None and size == v.shape[-1]
    return q.dtype != torch.float32 and mask is None and size <= _LARGEST_HEAD and size % _MULTIPLE == 0


def _forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: Any, cap: Any
) -> tuple[Tensor, Tensor]:
    """The context of some keys, and the logarithms of these keys' sums, float32 [B, N, queries]."""
    if not _flashes(q, v, mask, cap):
        found = []
        for rows, part in _blocks(q, mask):
            scores = _scores(q[:, :, rows], k, part, rows.start if causal else None, scale, cap)
            lse = scores.logsumexp(-1)
            found.append((_weighted((scores - lse.unsqueeze(-1)).exp(), v), lse))
        y, lse = (torch.cat(each, 2) for each in zip(*found, strict=True))
    elif q.device.type == "cpu":
        flash = _aten._scaled_dot_product_flash_attention_for_cpu  # noqa: SLF001 (an operator)
        y, lse = flash(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)
    else:
        y, lse, *_ = _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)  # noqa: SLF001
    return y, lse


def _backward(
    dy: Tensor, y: Tensor, lse: Tensor,
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: Any, cap: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Gradients of queries, keys and values: of these keys, for context and logarithms of all."""
    if not _flashes(q, v, mask, cap):
        given = [each.detach().requires_grad_() for each in (q, k, v)]
        found = [torch.zeros_like(each, dtype=torch.float32) for each in given]
        for rows, part in _blocks(q, mask):
            with torch.enable_grad():
                scores = _scores(
                    given[0][:, :, rows], given[1], part, rows.start if causal else None, scale, cap
                )
                weights = (scores - lse[:, :, rows, None]).exp()
                context = _weighted(weights, given[2])
            less = (dy[:, :, rows].float() * y[:, :, rows].float()).sum(-1, keepdim=True)
            # That of a weight is dy v, less what the weights' sum is divided by takes of it.
            back = torch.autograd.grad((context, weights), given, (dy[:, :, rows], -less.expand_as(weights)))
            for total, each in zip(found, back, strict=True):
                total.add_(each)
        return tuple(found)
    if q.device.type == "cpu":
        flash = _aten._scaled_dot_product_flash_attention_for_cpu_backward  # noqa: SLF001
        return tuple(flash(dy, q, k, v, y, lse, 0.0, causal, attn_mask=mask, scale=scale))
    seeds = (q.new_empty(shape, dtype=torch.uint64) for shape in (2, ()))  # of dropout, which there is not
    sizes = None, None, q.shape[2], k.shape[2], 0.0, causal
    flash = _aten._scaled_dot_product_flash_attention_backward  # noqa: SLF001
    return tuple(flash(dy, q, k, v, y, lse, *sizes, *seeds, scale=scale))


_BLOCK = 256
"""Queries whose scores are there at a time where no kernel of torch's has them."""


def _blocks(q: Tensor, mask: Tensor | None) -> Iterator[tuple[slice, Tensor | None]]:
    for at in range(0, q.shape[2], _BLOCK):
        rows = slice(at, at + _BLOCK)
        yield rows, None if mask is None else mask[:, :, rows]


def _scores(
    q: Tensor, k: Tensor, mask: Tensor | None, first: int | None, scale: float | None, cap: float | None
) -> Tensor:
    """Float32 [B, N, queries, keys]; of causal ones ``first`` is the first query's place."""
    scores = (q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT).float()
    scores = scores * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores if cap is None else (scores / cap).tanh() * cap
    if first is not None:
        after = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(first + 1)
        scores = scores.masked_fill(after, unseen(torch.float32))
    return scores if mask is None else scores + mask


def _weighted(weights: Tensor, v: Tensor) -> Tensor:
    return weights.to(v.dtype) @ v.repeat_interleave(weights.shape[1] // v.shape[1], 1)
