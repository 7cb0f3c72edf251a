"""Which part of every sequence a rank has on the context axis, passed to every module and never looked up.

A row of S tokens is cut into 2 cp chunks, and rank r has chunks r and 2 cp - 1 - r: under a causal mask an
early token attends to few others and a late one to many, and so all ranks have as much to do (the zigzag of
Llama 3, arXiv:2407.21783, section 3.3.2). What is inside a rank is in the row's order.

Hidden states, ids and labels are a rank's part, [B, S/cp]. Places (:mod:`dsx.nn.documents`) are always those
of whole rows, [B, S]: attention needs to know where every key stands.
"""

from __future__ import annotations

from dataclasses import dataclass, field
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


class DetachedContextParallel(ContextParallel):
    """One context-parallel rank without its peers."""

    @classmethod
    def last(cls, size: int, method: ContextMethod) -> DetachedContextParallel:
        """The last of ``size`` ranks, whose masks are as large as any's."""
        return cls(size, size - 1, method=method)

    def __post_init__(self) -> None:
        """Do nothing, because there is no group to check."""


WHOLE = ContextParallel()
"""Of a rank that has whole sequences."""
