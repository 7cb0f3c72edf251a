"""Which part of every sequence a rank has on the context axis, passed to every module and never looked up.

A row of S tokens is cut into 2 cp chunks, and rank r has chunks r and 2 cp - 1 - r: under a causal mask an
early token attends to few others and a late one to many, and so all ranks have as much to do (the zigzag of
Llama 3, arXiv:2407.21783, section 3.3.2). What is inside a rank is in the row's order.

Hidden states, ids and labels are a rank's part, [B, S/cp]. Places (:mod:`dsx.nn.documents`) are always those
of whole rows, [B, S]: attention needs to know where every key stands.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, product
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from dsx.errors import LayoutError
from dsx.models.spec import ContextMethod
from dsx.nn.parallel import check_place


@dataclass(frozen=True, slots=True)
class ContextParallel:
    """Context-parallel degree, rank and process group.

    Attributes:
        size: Number of ranks that share a sequence. With 1, no module communicates.
        rank: This rank's index among them.
        group: Their process group; None means the default group, which then must have ``size`` ranks.
        method: How attention sees the whole sequence.

    Raises:
        LayoutError: A rank outside ``range(size)``, or a process group of another size.

    >>> ContextParallel(2, 1).indices(8).tolist()
    [2, 3, 4, 5]
    """

    size: int = 1
    rank: int = 0
    group: ProcessGroup | None = field(default=None, repr=False)
    method: ContextMethod = "all_gather"

    def __post_init__(self) -> None:
        check_place("context-parallel", self.size, self.rank, self.group)

    def indices(self, length: int, device: torch.device | str | None = None) -> Tensor:
        """Which tokens of a row of ``length`` this rank has: int64 [length/size], ascending."""
        return self.cut(torch.arange(length, device=device), dim=0)

    def cut(self, x: Tensor, dim: int = 1) -> Tensor:
        """This rank's part of what belongs to whole rows, which ``dim`` of ``x`` goes along; differentiable.

        Raises:
            LayoutError: The rows do not divide into two chunks for each rank.
        """
        if self.size == 1:
            return x
        return torch.cat([x.narrow(dim, part.start, len(part)) for part in self.chunks(x.shape[dim])], dim)

    def chunks(self, length: int, rank: int | None = None) -> tuple[range, ...]:
        """The two stretches of a row of ``length`` tokens that this rank, or another, has, in order."""
        self.check_length(length)
        chunk, rank = length // (2 * self.size), self.rank if rank is None else rank
        return tuple(range(at * chunk, (at + 1) * chunk) for at in (rank, 2 * self.size - 1 - rank))

    def reached(self, length: int, firsts: Sequence[int], rank: int | None = None) -> tuple[range, ...]:
        """The keys of a row that the queries of this rank, or another, see any of: stretches in order.

        Args:
            length: Of the row.
            firsts: The first key that each of its 2 cp chunks sees any of, alike on all ranks.
            rank: Whose queries; None for this rank's.
        """
        chunks = self.chunks(length, rank)
        early, late = (range(firsts[each.start // len(each)], each.stop) for each in chunks)
        return (early, late) if early.stop < late.start else (range(min(early.start, late.start), late.stop),)

    def sent(self, length: int, firsts: Sequence[int], to: int, of: int) -> tuple[range, ...]:
        """The stretches of :meth:`reached` keys of rank ``to`` that rank ``of``, another one, has."""
        pairs = product(self.chunks(length, of), self.reached(length, firsts, to)) if to != of else ()
        both = (range(max(one.start, two.start), min(one.stop, two.stop)) for one, two in pairs)
        return tuple(filter(len, both))

    def check_length(self, length: int) -> None:
        """Raise LayoutError unless rows of ``length`` tokens divide into two chunks for each rank."""
        if self.size > 1 and length % (2 * self.size):
            raise LayoutError(
                f"rows of {length} tokens on {self.size} context-parallel ranks",
                "each rank has two equal chunks of a row",
                f"pad rows to a multiple of {2 * self.size}, or use another dsx.parallel.context",
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> ContextParallel:
        """Itself: it is frozen, and a process group cannot be copied."""
        return self


def slices(held: Sequence[range], wanted: Iterable[range]) -> list[slice]:
    """Where ``wanted`` stretches of a row are in what is made of the stretches ``held``, ascending.

    >>> slices([range(4), range(8, 12)], [range(1, 3), range(9, 12)])
    [slice(1, 3, None), slice(5, 8, None)]
    """
    before = list(accumulate(map(len, held), initial=0))
    within = [(each, bisect_right(held, each.start, key=attrgetter("start")) - 1) for each in wanted]
    moved = [(each, before[at] - held[at].start) for each, at in within]
    return [slice(each.start + by, each.stop + by) for each, by in moved]


class DetachedContextParallel(ContextParallel):
    """One context-parallel rank without its peers."""

    @classmethod
    def largest(cls, size: int, method: ContextMethod, *, in_turn: bool) -> DetachedContextParallel:
        """The rank of ``size`` that has as much to hold and to receive as any.

        By ``all_gather`` two others send to the second one what windows reach, and one to the last.

        Args:
            size: Ranks.
            method: How attention sees whole rows.
            in_turn: Whether mixers hand states on, which the last rank does for both its chunks at once.
        """
        second = method == "all_gather" and not in_turn and size > 1
        return cls(size, 1 if second else size - 1, method=method)

    def __post_init__(self) -> None:
        """Do nothing, because there is no group to check."""


WHOLE = ContextParallel()
"""Of a rank that has whole sequences."""
