"""Where a rank sits: named parallel axes over ``range(world_size)``, outermost first.

Pure data. No torch, no process groups: :mod:`dsx.parallel.groups` makes those from a :class:`Mesh`.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from math import prod

from dsx.errors import LayoutError


@dataclass(frozen=True, slots=True, init=False)
class Mesh:
    """Named axes and their degrees, outermost first.

    ``Mesh.of`` uses the order pipeline, data, tensor: DeepSpeed's row-major ``pipe, data, model``
    (deepspeed/runtime/pipe/topology.py, PipeModelDataParallelTopology), tensor varying fastest.

    >>> mesh = Mesh.of(pp=2, dp=2, tp=2)
    >>> mesh.coords(5)
    {'pp': 1, 'dp': 0, 'tp': 1}
    >>> mesh.groups("dp")
    ((0, 2), (1, 3), (4, 6), (5, 7))
    """

    axes: tuple[tuple[str, int], ...]

    def __init__(self, axes: tuple[tuple[str, int], ...] | None = None, **degrees: int) -> None:
        if axes is None or degrees:
            said = ", ".join(f"{name}={degree}" for name, degree in degrees.items())
            known = [name for name in ("pp", "dp", "tp") if name in degrees] or ["pp", "dp", "tp"]
            of = ", ".join(f"{name}={degrees.get(name, 1)}" for name in known)
            raise LayoutError(
                f"dsx.Mesh({said})", "it takes its axes in their order, as pairs", f"write dsx.Mesh.of({of})"
            )
        object.__setattr__(self, "axes", axes)
        names = [name for name, _ in self.axes]
        if len(set(names)) != len(names):
            raise LayoutError("mesh", f"axes repeat: {names}", "name each axis once")
        for name, degree in self.axes:
            if degree < 1:
                raise LayoutError(f"mesh axis {name} = {degree}", "a degree is at least 1", "use 1 or more")

    @classmethod
    def of(cls, *, pp: int = 1, dp: int = 1, tp: int = 1) -> Mesh:
        """Mesh of ``pp`` pipeline stages x ``dp`` data-parallel replicas x ``tp`` tensor-parallel ranks."""
        return cls((("pp", pp), ("dp", dp), ("tp", tp)))

    @property
    def size(self) -> int:
        """Number of ranks."""
        return prod(degree for _, degree in self.axes)

    @property
    def pp(self) -> int:
        """Pipeline-parallel degree."""
        return self.degree("pp")

    @property
    def dp(self) -> int:
        """Data-parallel degree: the number of ranks that ZeRO partitions over."""
        return self.degree("dp")

    @property
    def tp(self) -> int:
        """Tensor-parallel degree."""
        return self.degree("tp")

    def degree(self, axis: str) -> int:
        """Degree of ``axis``, 1 if the mesh lacks it."""
        return dict(self.axes).get(axis, 1)

    def coords(self, rank: int) -> dict[str, int]:
        """Coordinate of ``rank`` on every axis. Raises LayoutError outside ``range(size)``."""
        if not 0 <= rank < self.size:
            raise LayoutError(f"rank {rank}", f"the mesh has {self.size} ranks", f"use 0 to {self.size - 1}")
        out: dict[str, int] = {}
        for name, degree in reversed(self.axes):
            rank, out[name] = divmod(rank, degree)
        return dict(reversed(out.items()))

    def rank(self, **coords: int) -> int:
        """Rank at ``coords``; an axis left out counts as 0."""
        rank = 0
        for name, degree in self.axes:
            rank = rank * degree + coords.get(name, 0)
        return rank

    def groups(self, *axes: str) -> tuple[tuple[int, ...], ...]:
        """Ranks that differ only on ``axes``, one tuple per group, each in rank order."""
        kept = [(name, range(degree)) for name, degree in self.axes if name not in axes]
        free = [(name, range(degree)) for name, degree in self.axes if name in axes]
        return tuple(
            tuple(
                self.rank(**_named(kept, at), **_named(free, offset))
                for offset in product(*(span for _, span in free))
            )
            for at in product(*(span for _, span in kept))
        )

    def group_of(self, rank: int, *axes: str) -> tuple[int, ...]:
        """The group of :meth:`groups` that holds ``rank``."""
        return next(group for group in self.groups(*axes) if rank in group)


def _named(spans: list[tuple[str, range]], values: tuple[int, ...]) -> dict[str, int]:
    return dict(zip((name for name, _ in spans), values, strict=True))
