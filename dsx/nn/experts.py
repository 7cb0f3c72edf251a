"""Experts that several ranks hold together: tokens travel to those whose experts they are sent to, and back.

Every rank routes its own tokens, and has E / ep of a layer's E experts. A token that k experts are to see
makes k rows. Rows are sorted by expert, go to the ranks of their experts by an all-to-all of unequal splits,
and come back by another one, where they are weighted and added up (GShard, arXiv:2006.16668, section 3; no
row is dropped, as in MegaBlocks, arXiv:2211.15841). Backward goes the same ways with gradients. So an
expert's gradient is a sum over all tokens that came to it, whosever they were, and is added to those of its
replicas alone. Each rank sends (ep - 1) / ep of its rows if experts are equally busy, four times a layer and
micro-batch: there and back, forward and backward.

Shapes: T tokens, k experts of a token, E experts, R rows that come to a rank, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from dsx.nn import collectives
from dsx.nn.parallel import check_place
from dsx.nn.split import WeightGradients
from dsx.parallel.mesh import ALONE, Coordinates


@dataclass(frozen=True, slots=True)
class ExpertParallel:
    """Expert-parallel degree, rank and process group.

    Attributes:
        size: Number of ranks that hold the experts of a layer together. With 1, no module communicates.
        rank: This rank's index among them.
        group: Their process group; None means the default group, which then must have ``size`` ranks.

    Raises:
        LayoutError: A rank outside ``range(size)``, or a process group of another size.
    """

    size: int = 1
    rank: int = 0
    group: ProcessGroup | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        check_place("expert-parallel", self.size, self.rank, self.group)

    @property
    def at(self) -> Coordinates:
        """Where this rank stands on the axis that shares experts out."""
        return ALONE if self.size == 1 else Coordinates((("ep", self.size, self.rank),))

    def counts_of_all(self, counts: Tensor) -> Tensor:
        """What each rank has for this one: int64 [ep, ...] of [ep, ...], by an all-to-all."""
        received = torch.empty_like(counts)
        return collectives.start_exchange(received, counts, self.group, None, None).wait()

    def splits(self, own: Tensor, theirs: Tensor, rows: int) -> tuple[list[int], list[int]]:
        """How many rows go to each of the ranks, and how many come from it.

        The one moment at which a host waits for its device.

        Args:
            own: How many of this rank's choices each expert gets, int64 [ep, E / ep].
            theirs: How many this rank's experts get from each rank, likewise.
            rows: This rank's choices, T k.
        """
        del rows
        sent, received = torch.stack((own.sum(1), theirs.sum(1))).tolist()
        return sent, received

    def exchange(
        self, rows: Tensor, sent: Sequence[int], received: Sequence[int], split: WeightGradients | None = None
    ) -> Tensor:
        """The rows that the ranks send here, in their order, for those that go to each of them.

        Meanwhile weight gradients are computed that wait in ``split``.
        """
        return self.arrived(self.start(rows, sent, received), split)

    def start(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> collectives.Pending:
        """Begin to exchange rows, which must be left alone meanwhile."""
        found = rows.new_empty((sum(received), *rows.shape[1:]))
        return collectives.start_exchange(found, rows.contiguous(), self.group, [*received], [*sent])

    def arrived(self, pending: collectives.Pending, split: WeightGradients | None) -> Tensor:
        """The rows of an exchange that has begun; meanwhile as in :meth:`exchange`."""
        if split is not None:
            split.meanwhile()
        return pending.wait()

    def __deepcopy__(self, memo: dict[int, Any]) -> ExpertParallel:
        """Itself: it is frozen, and a process group cannot be copied."""
        return self


ALL_EXPERTS = ExpertParallel()
"""Of a rank that has every expert."""


class _Travel(torch.autograd.Function):
    """Rows to other ranks; their gradients back."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        ep: ExpertParallel,
        sent: Sequence[int],
        received: Sequence[int],
        split: WeightGradients | None,
        pending: collectives.Pending | None,
    ) -> Tensor:
        ctx.way = ep, sent, received, split
        return ep.exchange(rows, sent, received, split) if pending is None else ep.arrived(pending, split)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ep, sent, received, split = ctx.way
        return ep.exchange(gradient, received, sent, split), None, None, None, None, None


def _gathered(x_TH: Tensor, order: Tensor, each: int) -> Tensor:
    return x_TH.index_select(0, order.div(each, rounding_mode="floor"))


def _summed(rows: Tensor, order: Tensor, tokens: int, each: int) -> Tensor:
    """[T, H]: the sum of each token's rows, in one order whatever the device; zeros where it has none."""
    slots = rows.new_zeros((tokens * each, *rows.shape[1:])).index_copy_(0, order, rows)
    return slots.view(tokens, each, *rows.shape[1:]).sum(1)


class _Spread(torch.autograd.Function):
    """Tokens [T, H] to rows, of which ``order`` says the place among the T k choices."""

    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, order: Tensor, each: int) -> Tensor:
        ctx.save_for_backward(order)
        ctx.sizes = len(x_TH), each
        return _gathered(x_TH, order, each)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (order,) = ctx.saved_tensors
        return _summed(gradient, order, *ctx.sizes), None, None


class _Collect(torch.autograd.Function):
    """Rows to tokens [T, H], the sum of each one's; the inverse of :class:`_Spread`."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, tokens: int, each: int) -> Tensor:
        ctx.save_for_backward(order)
        ctx.each = each
        return _summed(rows, order, tokens, each)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (order,) = ctx.saved_tensors
        return _gathered(gradient, order, ctx.each), None, None, None


def add_counts(counts: Tensor, chosen: Tensor) -> None:
    """Add how often each expert is chosen to int64 [E + 1]; choice E stands for none.

    The host would wait for ``bincount``. The ones are one element, so that they take no memory.
    """
    counts.scatter_add_(0, chosen, chosen.new_ones(1).expand(len(chosen)))


def over_ranks(
    hidden_TH: Tensor,
    index_Tk: Tensor,
    weights_Tk: Tensor,
    *,
    ep: ExpertParallel,
    experts: int,
    compute: Callable[[Tensor, Tensor], Tensor],
    split: WeightGradients | None = None,
    beside: Callable[[], None] | None = None,
) -> Tensor:
    """What the experts of all ranks make of this rank's tokens. A collective call over the ranks.

    Args:
        hidden_TH: The tokens [T, H].
        index_Tk: Which experts each of them goes to, int64 [T, k]; E and more stand for none.
        weights_Tk: How much each one's output counts, [T, k].
        ep: The ranks.
        experts: E, of all ranks.
        compute: This rank's experts: gives [R, H] for rows [R, H] and the number of each one's expert among
            this rank's, int64 [R]. Where R is 0 it must still pass gradients to rows and parameters.
        split: Has weight gradients to compute while rows travel; None if no backward is divided.
        beside: Computes what needs no experts while rows travel to them.

    Returns:
        [T, H], in the dtype of ``hidden_TH``.
    """
    tokens, each = index_Tk.shape
    own = experts // ep.size
    chosen, order = index_Tk.flatten().sort(stable=True)
    counts = torch.zeros(experts + 1, dtype=torch.int64, device=chosen.device)
    add_counts(counts, chosen.clamp(max=experts))
    counts = counts[:experts].view(ep.size, own)
    there = ep.counts_of_all(counts)
    sent, received = ep.splits(counts, there, len(chosen))
    order = order[: sum(sent)]
    spread, pending = _Spread.apply(hidden_TH, order, each), None
    if beside is not None:  # after the spread, so that gradients of tokens are summed in the usual order
        pending = ep.start(spread.detach(), sent, received)
        beside()
    rows = _Travel.apply(spread, ep, sent, received, split, pending)
    numbers = torch.arange(own, device=there.device).repeat(ep.size)
    which = numbers.repeat_interleave(there.flatten(), output_size=sum(received))
    back = _Travel.apply(compute(rows, which), ep, received, sent, split, None)
    weighted = back * weights_Tk.flatten()[order].unsqueeze(-1)
    summed: Tensor = _Collect.apply(weighted, order, tokens, each)
    return summed.to(hidden_TH.dtype)
