"""The part of every parameter that each data-parallel rank keeps under ZeRO, as DeepSpeed 0.19.8 cuts it.

Stages 1 and 2 (deepspeed/runtime/zero/stage_1_and_2.py, ``__init__``): the parameters of an optimizer group
are laid end to end, the whole is padded to a multiple of 2 * dp elements, and rank d keeps the d-th of dp
equal parts. BF16_Optimizer (bf16_optimizer.py) does the same.

Stage 3 (partition_parameters.py, ``_partition_param``; stage3.py, ``_create_fp16_sub_groups``): every
parameter is padded to a multiple of dp and cut by itself; a rank's parts lie end to end in sub-groups, a
sub-group being closed by the parameter that brings it to ``sub_group_size`` or more of this rank's elements.

Stage 0: every rank keeps everything.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from dsx.errors import LayoutError


class ZeroPiece(NamedTuple):
    """Elements ``start`` to ``stop`` of a flattened (tp-local) parameter, at ``offset`` in a flat buffer."""

    name: str
    start: int
    stop: int
    offset: int


def part_numel(numel: int, ranks: int) -> int:
    """Elements of each rank's part of a parameter at stage 3, padding included."""
    return -(-numel // ranks)


def part_of(numel: int, ranks: int, rank: int) -> tuple[int, int]:
    """The first element of a rank's part of a parameter at stage 3, and the one after the last."""
    size = part_numel(numel, ranks)
    return min(rank * size, numel), min((rank + 1) * size, numel)


@dataclass(frozen=True, slots=True)
class Buffer:
    """One flat tensor of an optimizer: its optimizer group, its size and the pieces in it.

    What no piece covers is padding.
    """

    group: int
    numel: int
    pieces: tuple[ZeroPiece, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroPlan:
    """ZeRO's cut of the parameters of one (pipeline, tensor) coordinate over its data-parallel ranks.

    Attributes:
        groups: Optimizer groups; each lists (name, elements of the local tensor) in the optimizer's order.
        experts_over: Neighbours among the data-parallel ranks that hold the experts of a layer together.
        experts: Indices of the groups of experts. Each of those is cut over every ``experts_over``-th rank.
        sub_group_size: ``zero_optimization.sub_group_size`` (stage 3).
        alignment: Elements that each parameter's start is aligned to (stages 1 and 2): 1, or 16 bytes' worth
            with ``zero_optimization.parameter_alignment``.
        round_robin: ``zero_optimization.round_robin_gradients`` (stages 1 and 2).
    """

    stage: int
    dp: int
    groups: tuple[tuple[tuple[str, int], ...], ...]
    experts_over: int = 1
    experts: frozenset[int] = frozenset()
    sub_group_size: int = 1_000_000_000
    alignment: int = 1
    round_robin: bool = False

    def __post_init__(self) -> None:
        if self.stage not in range(4):
            raise LayoutError(f"ZeRO stage {self.stage}", "no such stage", "use 0, 1, 2 or 3")
        if self.dp < 1:
            raise LayoutError(f"data-parallel degree {self.dp}", "not at least 1", "use 1 or more")
        if self.dp % self.experts_over:
            raise LayoutError(
                f"experts over {self.experts_over} ranks",
                f"there are {self.dp}",
                "use a degree that divides them",
            )
        names = [name for group in self.groups for name, _ in group]
        if len(set(names)) < len(names):
            twice = sorted({name for name in names if names.count(name) > 1})
            raise LayoutError(f"optimizer groups with {twice}", "named twice", "list each parameter once")

    def ranks(self, group: int) -> int:
        """Ranks that a group is cut over."""
        return self.dp // self.experts_over if group in self.experts else self.dp

    def place(self, group: int, dp_rank: int) -> int:
        """Which of :meth:`ranks` a data-parallel rank is."""
        return dp_rank // self.experts_over if group in self.experts else dp_rank

    def buffers(self, dp_rank: int) -> tuple[Buffer, ...]:
        """The flat tensors whose optimizer state data-parallel rank ``dp_rank`` keeps.

        Stages 1 and 2: one per group. Stage 3: one per sub-group. Stage 0: one per parameter.
        """
        if not 0 <= dp_rank < self.dp:
            raise LayoutError(f"dp rank {dp_rank}", f"there are {self.dp}", f"use 0 to {self.dp - 1}")
        if self.stage == 3:
            return tuple(self._per_parameter(dp_rank))
        make = self._per_group if self.stage else self._whole
        return tuple(
            buffer for index, group in enumerate(self.groups) for buffer in make(index, group, dp_rank)
        )

    def state(self, dp_rank: int) -> dict[str, tuple[int, int]]:
        """Interval of every flattened parameter whose optimizer state ``dp_rank`` keeps; empty: (0, 0)."""
        held = {name: (0, 0) for group in self.groups for name, _ in group}
        for buffer in self.buffers(dp_rank):
            held.update({piece.name: (piece.start, piece.stop) for piece in buffer.pieces})
        return held

    def weights(self, dp_rank: int) -> dict[str, tuple[int, int]]:
        """Interval of every flattened parameter that ``dp_rank`` keeps between uses; all below stage 3."""
        if self.stage == 3:
            return self.state(dp_rank)
        return {name: (0, numel) for group in self.groups for name, numel in group}

    def owners(self) -> dict[str, list[tuple[int, int, int]]]:
        """Ranks that keep optimizer state of each parameter, in order, each with its interval of elements.

        A rank is its place among those that the parameter's group is cut over.
        """
        found: dict[str, list[tuple[int, int, int]]] = {}
        for rank in range(self.dp):
            for buffer in self.buffers(rank):
                its = self.place(buffer.group, rank), self.ranks(buffer.group)
                for piece in buffer.pieces:
                    if its[0] * self.dp // its[1] == rank:  # of neighbours, which are alike, the first
                        found.setdefault(piece.name, []).append((its[0], piece.start, piece.stop))
        return found

    def sub_groups(self) -> list[tuple[int, tuple[tuple[str, int], ...]]]:
        """Stage 3: optimizer group of each sub-group, and the parameters in it."""
        found: list[tuple[int, tuple[tuple[str, int], ...]]] = []
        for index, group in enumerate(self.groups):
            held: list[tuple[str, int]] = []
            size = 0
            for name, numel in group:
                held.append((name, numel))
                size += part_numel(numel, self.ranks(index))
                if size >= self.sub_group_size:
                    found.append((index, tuple(held)))
                    held, size = [], 0
            if held:
                found.append((index, tuple(held)))
        return found

    def _whole(self, index: int, group: Sequence[tuple[str, int]], _: int) -> list[Buffer]:
        return [Buffer(index, numel, (ZeroPiece(name, 0, numel, 0),)) for name, numel in group]

    def _per_group(self, index: int, group: Sequence[tuple[str, int]], dp_rank: int) -> list[Buffer]:
        spans, end = [], 0
        for name, numel in self.in_flat_order(index, group):
            start = -(-end // self.alignment) * self.alignment
            end = start + numel
            spans.append((name, start, end))
        size, place = 2 * -(-end // (2 * self.ranks(index))), self.place(index, dp_rank)
        low, high = place * size, (place + 1) * size
        pieces = tuple(
            ZeroPiece(name, max(low, start) - start, min(high, end) - start, max(low, start) - low)
            for name, start, end in spans
            if max(low, start) < min(high, end)
        )
        return [Buffer(index, size, pieces)]

    def in_flat_order(self, index: int, group: Sequence[tuple[str, int]]) -> Sequence[tuple[str, int]]:
        """A group's parameters as they lie in its buffer: round-robin, every ``dp``-th first."""
        ranks = self.ranks(index)
        return [item for at in range(ranks) for item in group[at::ranks]] if self.round_robin else group

    def _per_parameter(self, dp_rank: int) -> Iterator[Buffer]:
        for index, sub_group in self.sub_groups():
            pieces, offset = [], 0
            for name, numel in sub_group:
                start, stop = part_of(numel, self.ranks(index), self.place(index, dp_rank))
                if start < stop:
                    pieces.append(ZeroPiece(name, start, stop, offset))
                offset += part_numel(numel, self.ranks(index))
            yield Buffer(index, offset, tuple(pieces))
