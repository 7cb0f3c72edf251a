"""What the ranks of an island do together on the host, besides training."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from dsx.errors import DsxError
from dsx.launch.entry import AGREED
from dsx.parallel.groups import Groups
from dsx.parallel.islands import cut

T = TypeVar("T")


class IslandRanks:
    """Groups of an island's ranks over gloo, for what lies on the host. Every rank makes one. Collective.

    They are of this alone, because a thread may use them while training uses others.

    Args:
        replicated: Whether ranks of the data group hold the same masters (ZeRO-0). Each then exchanges a part
            of them with the other islands, and they share what they got.
    """

    def __init__(self, groups: Groups, *, replicated: bool) -> None:
        mesh = groups.mesh
        self.rank, self.size = groups.rank, mesh.size
        self._all = _host_group(range(mesh.size))
        self._replica, self._replicas = groups.replica, mesh.num_replicas if replicated else 1
        self._alike = _host_group(mesh.group_of(groups.rank, *mesh.replica_axes)) if replicated else None

    @property
    def first_replica(self) -> bool:
        """Whether this rank is the first of those with the same masters."""
        return self._replicas == 1 or self._replica == 0

    def agree(self, action: Callable[[], T]) -> T:
        """What rank 0 gets from ``action``, or its DsxError, on every rank."""
        found: list[Any] = [None, None]
        if self.rank == 0:
            try:
                found[0] = action()
            except DsxError as error:
                found[1] = error
        dist.broadcast_object_list(found, src=0, group=self._all)
        if found[1] is not None:
            found[1].add_note(AGREED)
            raise found[1]
        return found[0]  # type: ignore[no-any-return]

    def everybody(self, well: bool) -> bool:
        said = torch.tensor([int(well)])
        dist.all_reduce(said, op=dist.ReduceOp.MIN, group=self._all)
        return bool(said)

    def told(self, mine: T) -> list[T]:
        said: list[Any] = [None] * self.size
        dist.all_gather_object(said, mine, group=self._all)
        return said

    def sums(self, *mine: float) -> list[float]:
        total = torch.tensor(mine, dtype=torch.float64)
        dist.all_reduce(total, group=self._all)
        return [float(value) for value in total]

    def digest(self, text: str) -> str:
        """A short name for what all ranks say, in their order."""
        said = self.told(hashlib.sha256(text.encode()).hexdigest())
        return hashlib.sha256(json.dumps(said).encode()).hexdigest()[:16]

    def mine(self, pieces: Sequence[Tensor]) -> list[Tensor]:
        """This replica's part of each piece: views."""
        return [piece[slice(*cut(0, piece.numel(), *self._place))] for piece in pieces]

    def whole(self, parts: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        """Pieces of these sizes, of which each replica has its part. Collective over replicas."""
        if self._alike is None:
            return list(parts)
        bounds = [[cut(0, size, r, self._replicas) for size in sizes] for r in range(self._replicas)]
        longest = max(sum(high - low for low, high in its) for its in bounds)
        flat = torch.zeros(longest)
        filled = torch.cat([*parts, torch.zeros(0)])
        flat[: filled.numel()] = filled
        gathered = [torch.empty(longest) for _ in bounds]
        dist.all_gather(gathered, flat, group=self._alike)
        pieces = [torch.empty(size) for size in sizes]
        for its, values in zip(bounds, gathered, strict=True):
            at = 0
            for piece, (low, high) in zip(pieces, its, strict=True):
                piece[low:high] = values[at : at + high - low]
                at += high - low
        return pieces

    @property
    def _place(self) -> tuple[int, int]:
        return (self._replica, self._replicas) if self._replicas > 1 else (0, 1)


def _host_group(ranks: Sequence[int]) -> dist.ProcessGroup:
    group: dist.ProcessGroup | None = dist.new_group(
        list(ranks), backend="gloo", use_local_synchronization=True
    )
    assert group is not None, "this rank is one of them"
    return group
