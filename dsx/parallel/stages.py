"""Which layers a virtual stage holds, and which pipeline rank holds the stage. Pure data."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import Literal

from dsx.errors import LayoutError

Placement = Literal["loop", "v"]
"""How virtual stages are assigned to ranks: in turn, or there and back."""


def rank_of(stage: int, num_ranks: int, placement: Placement) -> int:
    """Pipeline rank that holds virtual stage ``stage``, as its chunk ``stage // num_ranks``.

    ``loop`` assigns the stages to the ranks in turn (arXiv:2104.04473, section 2.2). ``v`` turns round at
    each end, so that neighbouring stages ``num_ranks - 1`` and ``num_ranks`` share a rank, and with two
    chunks the first rank holds both the first stage and the last (arXiv:2401.10241, section 6).

    >>> [rank_of(stage, 3, "loop") for stage in range(6)], [rank_of(stage, 3, "v") for stage in range(6)]
    ([0, 1, 2, 0, 1, 2], [0, 1, 2, 2, 1, 0])
    """
    chunk, place = divmod(stage, num_ranks)
    return num_ranks - 1 - place if placement == "v" and chunk % 2 else place


def stages_of(rank: int, num_ranks: int, num_chunks: int, placement: Placement) -> tuple[int, ...]:
    """The virtual stages of pipeline rank ``rank``, chunk by chunk, which is in ascending order.

    >>> stages_of(0, 3, 2, "loop"), stages_of(0, 3, 2, "v")
    ((0, 3), (0, 5))
    """
    mirrored = num_ranks - 1 - rank
    return tuple(
        chunk * num_ranks + (mirrored if placement == "v" and chunk % 2 else rank)
        for chunk in range(num_chunks)
    )


@dataclass(frozen=True, slots=True)
class StageMap:
    """Contiguous layers for each virtual stage, and the stages' ranks.

    Virtual stage ``s`` holds layers ``bounds[s]`` to ``bounds[s + 1] - 1`` and is chunk ``s // num_ranks`` of
    the rank that :func:`rank_of` says.

    Raises:
        LayoutError: A stage without layers, or a number of stages that ``num_ranks`` does not divide.

    >>> stages = StageMap((0, 2, 4, 5, 7), num_ranks=2)
    >>> stages.layers(1), stages.stages_of(1), stages.layers_of(1)
    (range(2, 4), (1, 3), (2, 3, 5, 6))
    """

    bounds: tuple[int, ...]
    num_ranks: int
    placement: Placement = "loop"

    def __post_init__(self) -> None:
        steps = [stop - start for start, stop in zip(self.bounds, self.bounds[1:], strict=False)]
        if not steps or self.bounds[0] != 0 or min(steps) < 1:
            raise LayoutError(
                f"stage bounds {self.bounds}",
                "they must start at 0 and give every stage at least one layer",
                "use increasing bounds, or fewer stages",
            )
        if self.num_ranks < 1 or len(steps) % self.num_ranks:
            raise LayoutError(
                f"{len(steps)} virtual stages",
                f"they do not divide over {self.num_ranks} pipeline ranks",
                f"use a multiple of {max(1, self.num_ranks)} stages",
            )

    @classmethod
    def of(cls, counts: tuple[int, ...], num_ranks: int, placement: Placement = "loop") -> StageMap:
        """Stage map from the number of layers of each virtual stage."""
        bounds = [0]
        for count in counts:
            bounds.append(bounds[-1] + count)
        return cls(tuple(bounds), num_ranks, placement)

    @property
    def num_stages(self) -> int:
        return len(self.bounds) - 1

    @property
    def num_chunks(self) -> int:
        """Virtual stages per rank."""
        return self.num_stages // self.num_ranks

    @property
    def num_layers(self) -> int:
        return self.bounds[-1]

    def layers(self, stage: int) -> range:
        return range(self.bounds[stage], self.bounds[stage + 1])

    def stage_of(self, layer: int) -> int:
        if not 0 <= layer < self.num_layers:
            raise LayoutError(
                f"layer {layer}",
                f"the model has {self.num_layers} layers",
                f"use 0 to {self.num_layers - 1}",
            )
        return bisect_right(self.bounds, layer) - 1

    def rank_of(self, stage: int) -> int:
        return rank_of(stage, self.num_ranks, self.placement)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Virtual stages of pipeline rank ``rank``, chunk by chunk: ascending."""
        return stages_of(rank, self.num_ranks, self.num_chunks, self.placement)

    def layers_of(self, rank: int) -> tuple[int, ...]:
        return tuple(layer for stage in self.stages_of(rank) for layer in self.layers(stage))
