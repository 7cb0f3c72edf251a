"""Every communication of tensor-parallel and context-parallel modules, as plain calls and autograd functions.

With ``tp.size == 1`` nothing here communicates. ``f`` and ``g`` are the operators of Shoeybi et al. 2019
(arXiv:1909.08053, section 3); the sequence-parallel pair is that of Korthikanti et al. 2022
(arXiv:2205.05198, section 4.2.2).

| function | forward | backward |
|---|---|---|
| :func:`copy_to` (f) | identity | all-reduce |
| :func:`reduce_from` (g) | all-reduce, or reduce-scatter on the sequence | identity, or all-gather |
| :func:`gather_from` | all-gather | own slice |
| :func:`scatter_to` | own slice | all-gather |
| :func:`gather_sequence` | all-gather on the sequence | reduce-scatter |
| :func:`copy_parameters` | identity | all-reduce |

On a context axis, whose ranks share a row in zigzag (:mod:`dsx.nn.context`), each a sequence of 1/cp:

| function | forward | backward |
|---|---|---|
| :func:`gather_rows` | all-gather, in the rows' order | reduce-scatter |
| :func:`gather_reached` | from rank to rank, as far as windows and documents reach | the way back, summed |
| :func:`heads_for_rows` | all-to-all: own heads of whole rows | :func:`rows_for_heads` |
| :func:`rows_for_heads` | all-to-all: all heads of the own part | :func:`heads_for_rows` |
| :func:`start_messages` | from rank to rank (:mod:`dsx.nn.ring`) | the caller's |
| :func:`sum_over_context` | all-reduce | times cp: all ranks go on alike |

:func:`send` and :func:`receive` are plain calls, of which :mod:`dsx.hub.state_passing` is made.

Shapes: B micro-batch, S sequence, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from dsx.errors import ModelError
from dsx.nn.context import ContextParallel, slices
from dsx.nn.parallel import TensorParallel, uncompiled

Ranks: TypeAlias = "TensorParallel | ContextParallel"

SEQUENCE = 1
"""Dim of [B, S, H] that sequence parallelism cuts."""


@dataclass(frozen=True, slots=True)
class Pending:
    """A collective under way; its inputs and outputs must be left alone until :meth:`wait`."""

    buffer: Tensor
    work: dist.Work | None
    finish: Callable[[Tensor], Tensor]

    def wait(self) -> Tensor:
        """The collective's result. On CUDA the host goes on and the current stream waits."""
        if self.work is not None:
            self.work.wait()
        return self.finish(self.buffer)


def done(x: Tensor) -> Pending:
    """A collective that needs no communication: its result is ``x``."""
    return Pending(x, None, _same)


def _same(x: Tensor) -> Tensor:
    return x


def start_all_reduce(x: Tensor, tp: Ranks, op: Literal["sum", "max"] = "sum") -> Pending:
    """Start reducing ``x`` in place over the ranks; any shape, contiguous."""
    if tp.size == 1:
        return done(x)
    reduce_op = dist.ReduceOp.SUM if op == "sum" else dist.ReduceOp.MAX
    return Pending(x, dist.all_reduce(x, op=reduce_op, group=tp.group, async_op=True), _same)


def start_all_gather(x: Tensor, tp: TensorParallel, dim: int) -> Pending:
    """Start concatenating every rank's ``x`` along ``dim``, contiguous.

    Nothing is copied if all dims before ``dim`` are 1.
    """
    if tp.size == 1:
        return done(x)
    x = x.contiguous()
    dim %= x.dim()
    buffer = x.new_empty(tp.size, *x.shape)
    work = _all_gather(buffer.flatten(0, 1), x, tp)
    return Pending(buffer, work, lambda ranks: ranks.movedim(0, dim).flatten(dim, dim + 1).contiguous())


def start_reduce_scatter(x: Tensor, tp: TensorParallel, dim: int) -> Pending:
    """Start summing ``x`` over the ranks, each keeping its slice of ``dim``; copies as the all-gather does.

    Raises:
        ModelError: ``dim`` does not divide by the tensor-parallel size.
    """
    if tp.size == 1:
        return done(x)
    _check_divides(x, tp, dim)
    ranks = x.unflatten(dim, (tp.size, -1)).movedim(dim, 0).contiguous()
    buffer = torch.empty_like(ranks[0])
    return Pending(buffer, _reduce_scatter(buffer, ranks.flatten(0, 1), tp), _same)


def all_reduce(x: Tensor, tp: Ranks, op: Literal["sum", "max"] = "sum") -> Tensor:
    """``x`` reduced in place over the ranks."""
    return start_all_reduce(x, tp, op).wait()


def all_gather(x: Tensor, tp: TensorParallel, dim: int) -> Tensor:
    """Every rank's ``x``, concatenated along ``dim``."""
    return start_all_gather(x, tp, dim).wait()


def own_slice(x: Tensor, tp: TensorParallel, dim: int) -> Tensor:
    """This rank's equal part of ``x`` along ``dim``, as a view. Raises ModelError unless it divides."""
    if tp.size == 1:
        return x
    _check_divides(x, tp, dim)
    return x.chunk(tp.size, dim)[tp.rank]


def _check_divides(x: Tensor, tp: TensorParallel, dim: int) -> None:
    if x.shape[dim] % tp.size:
        raise ModelError(
            f"dim {dim} of a tensor of shape {tuple(x.shape)}",
            f"{x.shape[dim]} does not divide by the tensor-parallel size {tp.size}",
            f"use a multiple of {tp.size} (the sequence length, under sequence parallelism)",
        )


def start_exchange(
    found: Tensor,
    x: Tensor,
    group: dist.ProcessGroup | None,
    received: list[int] | None,
    sent: list[int] | None,
) -> Pending:
    """Start an all-to-all of the rows of ``x``, ``sent`` to each rank, into ``found``; None: as many to each.

    Of ranks that hold experts together (:mod:`dsx.nn.experts`).
    """
    work = dist.all_to_all_single(found, x, received, sent, group=group, async_op=True)
    return Pending(found, work, _same)


def _all_gather(output: Tensor, x: Tensor, tp: Ranks) -> dist.Work | None:
    # torch 2.13 renamed all_gather_into_tensor and warns at the old name; 2.11 has only that one.
    call = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    work: dist.Work | None = call(output, x, group=tp.group, async_op=True)
    return work


def _reduce_scatter(output: Tensor, x: Tensor, tp: Ranks) -> dist.Work | None:
    call = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    work: dist.Work | None = call(output, x, group=tp.group, async_op=True)
    return work


def _all_to_all(output: Tensor, x: Tensor, cp: ContextParallel) -> dist.Work | None:
    work: dist.Work | None = dist.all_to_all_single(output, x, group=cp.group, async_op=True)
    return work


def send(x: Tensor, cp: ContextParallel, to: int, what: Literal["edge", "state"]) -> Any:
    """Begin to send ``x``, contiguous, to a rank of the axis; ``what`` it is, estimates want to know."""
    del what
    return dist.isend(x, group=cp.group, group_dst=to)


def receive(room: Tensor, cp: ContextParallel, source: int, what: Literal["edge", "state"]) -> Any:
    """Begin to receive what a rank of the axis sends into ``room``, contiguous."""
    del what
    return dist.irecv(room, group=cp.group, group_src=source)


class _CopyTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: TensorParallel) -> Tensor:
        ctx.tp = tp
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        # Copied, because autograd may hand the same gradient to others.
        return all_reduce(dy.clone(memory_format=torch.contiguous_format), ctx.tp), None


class _ReduceFrom(torch.autograd.Function):
    """``sum over ranks (x) + bias``. Saves nothing, so that recompute stops before its collective."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, tp: TensorParallel) -> Tensor:
        ctx.tp = tp
        if tp.sequence:
            y = start_reduce_scatter(x, tp, SEQUENCE).wait()
        else:
            ctx.mark_dirty(x)
            y = all_reduce(x, tp)
        return y if bias is None else y.add_(bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor | None, None]:
        if ctx.tp.sequence:
            dy = all_gather(dy, ctx.tp, SEQUENCE)
        # Taken from the whole sequence's gradient: the replicated bias needs no all-reduce of its own.
        dbias = dy.flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None
        return dy, dbias, None


class _GatherFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: TensorParallel, dim: int) -> Tensor:
        ctx.tp, ctx.dim = tp, dim
        return all_gather(x, tp, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        return own_slice(dy, ctx.tp, ctx.dim).contiguous(), None, None


class _ScatterTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: TensorParallel, dim: int) -> Tensor:
        ctx.tp, ctx.dim = tp, dim
        return own_slice(x, tp, dim).clone(memory_format=torch.contiguous_format)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        return all_gather(dy, ctx.tp, ctx.dim), None, None


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: TensorParallel) -> Tensor:
        ctx.tp = tp
        return all_gather(x, tp, SEQUENCE)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return start_reduce_scatter(dy, ctx.tp, SEQUENCE).wait(), None


class _CopyParameters(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tp: TensorParallel, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.tp = tp
        return tuple(p.view_as(p) for p in parameters)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # One collective sums them all, in float32: they are small, and a bfloat16 sum would lose bits.
        flat = all_reduce(torch.cat([g.flatten().float() for g in grads]), ctx.tp)
        parts = flat.split([g.numel() for g in grads])
        return None, *(part.view_as(g).to(g.dtype) for part, g in zip(parts, grads, strict=True))


def copy_to(x: Tensor, tp: TensorParallel) -> Tensor:
    """``x``, whose gradient is summed over the ranks: the input of a column-parallel region."""
    return x if tp.size == 1 else uncompiled(_CopyTo.apply, x, tp)


def reduce_from(x: Tensor, tp: TensorParallel, bias: Tensor | None = None) -> Tensor:
    """The sum of ``x`` over the ranks, plus ``bias`` once: the end of a row-parallel region.

    Args:
        x: Partial sums [..., H]; [B, S, H] under sequence parallelism. Overwritten without it.
        tp: Under sequence parallelism each rank keeps its slice of the sequence, [B, S/tp, H].
        bias: Replicated, [H]. Its gradient comes out equal on all ranks.
    """
    if tp.size == 1:
        return x if bias is None else x + bias
    y: Tensor = uncompiled(_ReduceFrom.apply, x, bias, tp)
    return y


def gather_from(x: Tensor, tp: TensorParallel, dim: int = -1) -> Tensor:
    """Every rank's ``x`` concatenated along ``dim``; all ranks must go on alike with the result."""
    return x if tp.size == 1 else uncompiled(_GatherFrom.apply, x, tp, dim)


def scatter_to(x: Tensor, tp: TensorParallel, dim: int = -1) -> Tensor:
    """This rank's slice along ``dim`` of an ``x`` that all hold. Raises ModelError unless it divides."""
    return x if tp.size == 1 else uncompiled(_ScatterTo.apply, x, tp, dim)


def gather_sequence(x_BsH: Tensor, tp: TensorParallel) -> Tensor:
    """Every rank's [B, S/tp, H] as [B, S, H]; in backward the gradients are summed and scattered again."""
    return x_BsH if tp.size == 1 else uncompiled(_GatherSequence.apply, x_BsH, tp)


def copy_parameters(tp: TensorParallel, *parameters: Tensor, cut: bool = False) -> tuple[Tensor, ...]:
    """Replicated parameters that each rank applies to its slice of the sequence: their gradients are summed.

    Without sequence parallelism each rank's gradient is already whole, and this is the identity, unless
    ``cut`` says that each rank applies the parameters to a part of its own in any case, such as its heads.
    """
    parts = tp.sequence or (cut and tp.size > 1)
    return uncompiled(_CopyParameters.apply, tp, *parameters) if parts else parameters


def start_messages(
    incoming: Sequence[tuple[int, Tensor]], outgoing: Sequence[tuple[int, Tensor]], cp: ContextParallel
) -> Sequence[Any]:
    """Start receiving from ranks of the axis, and sending to them; gives what is to be waited for.

    Both ends know the sizes, which may be zero. Messages of a pair of ranks match by their order.
    """
    given, taken = ([each for each in way if each[1].numel()] for way in (outgoing, incoming))
    return _messages(taken, given, cp) if given or taken else ()


def _messages(
    incoming: Sequence[tuple[int, Tensor]], outgoing: Sequence[tuple[int, Tensor]], cp: ContextParallel
) -> Sequence[Any]:
    # Together, because gloo's sends wait for their receives, and NCCL's messages for those before them.
    batch = [dist.P2POp(dist.irecv, each, group=cp.group, group_peer=rank) for rank, each in incoming]
    batch += [dist.P2POp(dist.isend, each, group=cp.group, group_peer=rank) for rank, each in outgoing]
    works: Sequence[Any] = dist.batch_isend_irecv(batch)
    return works


def _by_rank(row: Tensor, cp: ContextParallel, dim: int) -> Tensor:
    """The chunks of whole rows in the order of the ranks that have them: [2 cp, ...]."""
    chunks = row.chunk(2 * cp.size, dim)
    return torch.stack([chunks[at] for rank in range(cp.size) for at in (rank, 2 * cp.size - 1 - rank)])


def _in_order(ranks: Tensor, dim: int) -> Tensor:
    """The inverse of :func:`_by_rank`: every rank's chunks, [2 cp, ...], as whole rows."""
    chunks = list(ranks)
    return torch.cat(chunks[::2] + chunks[::-2], dim)


def _gather_rows(x: Tensor, cp: ContextParallel, dim: int) -> Tensor:
    chunks = torch.stack(x.chunk(2, dim))
    ranks = chunks.new_empty(2 * cp.size, *chunks.shape[1:])
    Pending(ranks, _all_gather(ranks, chunks, cp), _same).wait()
    return _in_order(ranks, dim)


def _swapped(x: Tensor, give: Sequence[list[slice]], take: Sequence[int], cp: ContextParallel) -> Tensor:
    """So many rows of each rank's, in their order, for those of ``x`` that it is given."""
    room = x.new_empty(sum(take), *x.shape[1:])
    outgoing = [(rank, torch.cat([x[at] for at in each])) for rank, each in enumerate(give) if each]
    for work in start_messages([*enumerate(room.split(list(take)))], outgoing, cp):
        work.wait()
    return room


class _Swap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *how: Any) -> Tensor:
        ctx.how, ctx.shape = how, x.shape
        return _swapped(x, *how)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        given, taken, cp = ctx.how
        back = [
            [slice(end - size, end)] * (size > 0) for size, end in zip(taken, accumulate(taken), strict=True)
        ]
        sizes = [[at.stop - at.start for at in each] for each in given]
        came, dx = _swapped(dy, back, [*map(sum, sizes)], cp), dy.new_zeros(ctx.shape)
        for at, part in zip(chain(*given), came.split([*chain(*sizes)]), strict=True):
            dx[at] += part
        return dx, None, None, None


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cp: ContextParallel, dim: int) -> Tensor:
        ctx.cp, ctx.dim = cp, dim
        return _gather_rows(x, cp, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        ranks = _by_rank(dy, ctx.cp, ctx.dim)
        own = torch.empty_like(ranks[:2])
        Pending(own, _reduce_scatter(own, ranks, ctx.cp), _same).wait()
        return torch.cat(tuple(own), ctx.dim), None, None


def _heads_for_rows(x: Tensor, cp: ContextParallel, heads: int, dim: int) -> Tensor:
    # Two chunks of the sequence for each rank, and in them the heads of that rank.
    given = torch.stack([half for part in x.chunk(cp.size, heads) for half in part.chunk(2, dim)])
    ranks = torch.empty_like(given)
    Pending(ranks, _all_to_all(ranks, given, cp), _same).wait()
    return _in_order(ranks, dim)


def _rows_for_heads(x: Tensor, cp: ContextParallel, heads: int, dim: int) -> Tensor:
    given = _by_rank(x, cp, dim)
    ranks = torch.empty_like(given)
    Pending(ranks, _all_to_all(ranks, given, cp), _same).wait()
    return torch.cat([torch.cat(tuple(ranks[half::2]), heads) for half in (0, 1)], dim)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Any, back: Any, *how: Any) -> Tensor:
        ctx.way, ctx.how = (back, there), how
        y: Tensor = there(x, *how)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        back, _ = ctx.way
        return back(dy, *ctx.how), None, None, None, None, None


def gather_rows(x: Tensor, cp: ContextParallel, dim: int = SEQUENCE) -> Tensor:
    """Every rank's part along ``dim`` as whole rows; in backward the gradients are summed and cut again.

    ``x`` is all of the part: what sequence parallelism has cut goes through :func:`gather_from` first.
    """
    return x if cp.size == 1 else uncompiled(_GatherRows.apply, x, cp, dim)


def gather_reached(
    x: Tensor, cp: ContextParallel, firsts: Sequence[int], dim: int = SEQUENCE
) -> tuple[Tensor, tuple[range, ...]]:
    """As :func:`gather_rows` of the keys that this rank's queries reach, and which stretches these are.

    Each is sent by the rank that has it to those that look at it; where the row's last chunk looks at all of
    it, all are gathered. In backward gradients go back in the same way.

    Args:
        x: This rank's part along ``dim``.
        cp: The ranks.
        firsts: As of :meth:`dsx.nn.context.ContextParallel.reached`.
        dim: Which of ``x`` goes along the row.
    """
    length, ranks = x.shape[dim] * cp.size, range(cp.size)
    if cp.reached(length, firsts, 0) == (range(length),):
        return gather_rows(x, cp, dim), (range(length),)
    own, x = cp.chunks(length), x.movedim(dim, 0)
    give = [slices(own, cp.sent(length, firsts, to, cp.rank)) for to in ranks]
    take = [cp.sent(length, firsts, cp.rank, of) for of in ranks]
    came = uncompiled(_Swap.apply, x, give, [sum(map(len, each)) for each in take], cp)
    parts = zip((*own, *chain(*take)), (*x.chunk(2), *came.split([*map(len, chain(*take))])), strict=True)
    ordered = [part for _, part in sorted(parts, key=lambda each: each[0].start)]
    ordered += [] if len(came) else [came]  # whose backward brings home what this rank has sent
    return torch.cat(ordered).movedim(0, dim), cp.reached(length, firsts)


def heads_for_rows(x: Tensor, cp: ContextParallel, *, heads: int, dim: int = SEQUENCE) -> Tensor:
    """All heads of this rank's part of the rows, along ``dim``, to its share of the heads of whole rows."""
    how = _heads_for_rows, _rows_for_heads, cp, heads, dim
    return x if cp.size == 1 else uncompiled(_Exchange.apply, x, *how)


def rows_for_heads(x: Tensor, cp: ContextParallel, *, heads: int, dim: int = SEQUENCE) -> Tensor:
    """The inverse of :func:`heads_for_rows`."""
    how = _rows_for_heads, _heads_for_rows, cp, heads, dim
    return x if cp.size == 1 else uncompiled(_Exchange.apply, x, *how)


def sum_over_context(x: Tensor, cp: ContextParallel) -> Tensor:
    """The sum of ``x`` over the ranks, which all go on alike with it, so that each adds its gradient."""
    if cp.size == 1:
        return x
    own = x.detach()
    return all_reduce(own.clone(memory_format=torch.contiguous_format), cp) + cp.size * (x - own)
