"""The files of a stock checkpoint that is to be written, and what of which tensor lies where in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from dsx.checkpoint.catalog import Entry, Piece
from dsx.checkpoint.formats.deepspeed_plan import StockPlan
from dsx.checkpoint.formats.torch_target import Hole, torch_skeleton
from dsx.checkpoint.target import Skeleton


class Files:
    """The files so far, and what lies where in them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.skeletons: list[Skeleton] = []
        self._pieces: dict[tuple[str, str], list[Piece]] = {}
        self._blanks: dict[tuple[str, str], Entry] = {}
        self._copies: dict[str, list[int]] = {}

    def begin(self, plan: StockPlan) -> None:
        """What follows is of another rank. Copies of what earlier ranks have are replicas."""
        for name in plan.modules:
            stages = self._copies.setdefault(name, [])
            if plan.stage not in stages:
                stages.append(plan.stage)

    def add(self, name: str, content: Any, held: Sequence[Share]) -> None:
        """A file, and what the holes in it are for."""
        self.skeletons.append(torch_skeleton(name, content))
        for share in held:
            key = share.entry.key
            self._blanks[key] = share.entry
            pieces = self._pieces.setdefault(key, [])
            origin = share.hole.offset + (share.offset - share.start) * share.entry.item_bytes
            for part in share.plan.parts(key[0], share.start, share.stop):
                pieces.append(part.at(name, origin, share.entry.item_bytes, self._replica(share)))

    def _replica(self, share: Share) -> int:
        """Number of a copy: of a tensor that is cut, all tensor-parallel ranks' parts make one."""
        plan, name = share.plan, share.entry.name
        copy = self._copies[name].index(plan.stage) if share.copy is None else share.copy
        return copy if plan.is_cut(name) else copy * plan.layout.tp + plan.tensor

    def entries(self) -> tuple[Entry, ...]:
        """Every entry with its pieces."""
        return tuple(replace(blank, pieces=tuple(self._pieces[key])) for key, blank in self._blanks.items())


@dataclass(frozen=True, slots=True)
class Share:
    """Elements ``start`` to ``stop`` of a rank's flattened local tensor at element ``offset`` of a hole.

    ``copy`` numbers the copies that one tensor-parallel rank has; by default one per stage.
    """

    plan: StockPlan
    entry: Entry
    hole: Hole
    start: int
    stop: int
    offset: int
    copy: int | None = None


def whole_share(plan: StockPlan, entry: Entry, copy: int | None = None) -> Share:
    """A rank's part of a tensor, in a hole of its own."""
    shape = plan.shape(entry.name)
    return Share(plan, entry, Hole(entry.dtype, shape), 0, prod(shape), 0, copy)
