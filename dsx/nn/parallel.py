"""A rank's place among the tensor-parallel ranks, which is passed to every module and never looked up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from dsx.errors import LayoutError
from dsx.parallel.mesh import Coordinates, Mesh


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """Tensor-parallel degree, rank and process group.

    Attributes:
        size: Number of tensor-parallel ranks. With 1, no module communicates.
        rank: This rank's index among them.
        group: Their process group; None means the default group, which then must have ``size`` ranks.
        sequence_parallel: Between the linears, cut activations along the sequence instead of repeating
            them (Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2). Counts only when ``size`` > 1:
            read :attr:`sequence`.

    Raises:
        LayoutError: A rank outside ``range(size)``, or a process group of another size.

    >>> TensorParallel(2, 2)
    Traceback (most recent call last):
        ...
    dsx.errors.LayoutError: tensor-parallel rank 2: there are 2 ranks. Fix: use 0 to 1.
    """

    size: int = 1
    rank: int = 0
    group: ProcessGroup | None = field(default=None, repr=False)
    sequence_parallel: bool = False

    @property
    def at(self) -> Coordinates:
        """Where this rank stands on the tensor axis, the one that cuts parameters."""
        return Mesh.of(tp=self.size).at(self.rank)

    def __post_init__(self) -> None:
        check_place("tensor-parallel", self.size, self.rank, self.group)

    @property
    def sequence(self) -> bool:
        """Whether activations between the linears are cut along the sequence."""
        return self.sequence_parallel and self.size > 1

    def __deepcopy__(self, memo: dict[int, Any]) -> TensorParallel:
        """Itself: it is frozen, and a process group cannot be copied."""
        return self


def check_place(axis: str, size: int, rank: int, group: ProcessGroup | None) -> None:
    """Refuse a rank that is not on its axis, and a process group that is not the axis's.

    Raises:
        LayoutError: One of both.
    """
    if size < 1:
        raise LayoutError(f"{axis} size {size}", "a degree is at least 1", "use 1 or more")
    if not 0 <= rank < size:
        raise LayoutError(f"{axis} rank {rank}", f"there are {size} ranks", f"use 0 to {size - 1}")
    # Without this, a forgotten group would silently sum over every rank of the run.
    if size > 1 and dist.is_initialized() and dist.get_world_size(group) != size:
        raise LayoutError(
            f"{axis} size {size}",
            f"its process group has {dist.get_world_size(group)} ranks",
            f"pass the group of exactly the {axis} ranks",
        )


def uncompiled(function: Callable[..., Any], *arguments: Any) -> Any:
    """``function(*arguments)``, which in a compiled block runs between two graphs, as it is.

    For what a graph cannot hold or would freeze: communication under way, masks drawn from a generator, a
    backward that asks when it runs whether it is divided.
    """
    if torch.compiler.is_compiling():
        from dsx.nn.compiled import between_graphs  # here: it loads the compiler

        return between_graphs(function, *arguments)
    return function(*arguments)
