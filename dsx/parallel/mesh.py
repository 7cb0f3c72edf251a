"""Where a rank sits: named parallel axes over ``range(world_size)``, outermost first.

This is pure data; :mod:`dsx.parallel.groups` makes process groups from a :class:`Mesh`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Literal

from dsx.errors import LayoutError

Divided = Literal["layers", "experts", "features", "samples", "sequence"]
"""What the ranks of an axis have different parts of. The first three are parts of the model itself."""


@dataclass(frozen=True, slots=True)
class Axis:
    """One kind of parallelism.

    Whatever depends on the kind of an axis follows from what it divides: which ranks hold the same
    parameters, over which of them gradients are averaged and ZeRO partitions, who reads which samples, and
    whose random numbers differ.

    Attributes:
        name: Its short name, in meshes and in checkpoints.
        title: Its name in messages and, where a config chooses its degree, the key in ``dsx.parallel``.
        deepspeed: Its name in DeepSpeed's topologies; None if they have none.
        divides: What its ranks have different parts of.
    """

    name: str
    title: str
    deepspeed: str | None
    divides: Divided

    @property
    def replicates(self) -> bool:
        """Whether its ranks hold the same parameters, so that gradients are summed over them."""
        return self.divides in ("samples", "sequence")

    @property
    def overlaid(self) -> bool:
        """Whether its ranks are replicas of everything else, which it shares out without being more ranks."""
        return self.divides == "experts"


AXES = (
    Axis("pp", "pipeline", "pipe", divides="layers"),
    Axis("dp", "data", "data", divides="samples"),
    Axis("cp", "context", None, divides="sequence"),
    Axis("tp", "tensor", "model", divides="features"),
    Axis("ep", "expert", None, divides="experts"),
)
"""Every axis, outermost first: DeepSpeed's row-major ``pipe, data, model``, tensor varying fastest
(deepspeed/runtime/pipe/topology.py, PipeModelDataParallelTopology). Context stands inside of data, so that
data x context is one axis of that topology. Experts are laid over that axis: every ``ep`` neighbours on it
hold the experts of a layer together, and so as many ranks as without them do."""


@dataclass(frozen=True, slots=True)
class Coordinates:
    """Where a rank stands: the degree of every axis and its index along it, by the axis's name.

    What a rank holds of a tensor follows from it alone (:class:`dsx.models.param.ParamSpec`).

    >>> Mesh.of(pp=2, tp=4).at(3).along("tp")
    (4, 3)
    """

    axes: tuple[tuple[str, int, int], ...] = ()

    def along(self, axis: str) -> tuple[int, int]:
        """Degree of an axis, and the index along it; where it is not named, there is one rank."""
        for name, degree, index in self.axes:
            if name == axis:
                return degree, index
        return 1, 0

    def beside(self, other: Coordinates) -> Coordinates:
        """On these axes and those of ``other``."""
        return Coordinates((*self.axes, *other.axes))


ALONE = Coordinates()
"""Of a rank that holds every tensor whole."""


@dataclass(frozen=True, slots=True, init=False)
class Mesh:
    """Named axes and their degrees, outermost first.

    >>> mesh = Mesh.of(pp=2, dp=2, tp=2)
    >>> mesh.coords(5)
    {'pp': 1, 'dp': 0, 'tp': 1}
    >>> mesh.groups("dp")
    ((0, 2), (1, 3), (4, 6), (5, 7))
    >>> mesh.words
    'tensor 2 x pipeline 2 x data 2'
    """

    axes: tuple[tuple[str, int], ...]

    def __init__(self, axes: tuple[tuple[str, int], ...] | None = None, **degrees: int) -> None:
        if axes is None or degrees:
            said = ", ".join(f"{name}={degree}" for name, degree in degrees.items())
            every = [axis.name for axis in AXES]
            of = ", ".join(
                f"{name}={degrees.get(name, 1)}"
                for name in [name for name in every if name in degrees] or dict(self.of().axes)
            )
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
        if self.num_replicas % self.ep:
            raise LayoutError(
                f"mesh axis ep = {self.ep}",
                f"the {self.num_replicas} ranks of data x context do not divide by it",
                "use a degree that divides data x context",
            )

    @classmethod
    def of(cls, **degrees: int) -> Mesh:
        """Mesh of the degrees given by axis (``pp``, ``dp``, ``cp``, ``tp``, ``ep``); others are 1.

        An axis that DeepSpeed lacks is left out where its degree is 1, so that checkpoints and records of a
        mesh without it are what they were before there was such an axis.

        Raises:
            LayoutError: An axis that does not exist, or a degree below 1.
        """
        known = [axis.name for axis in AXES]
        for name in degrees.keys() - known:
            raise LayoutError(f"mesh axis {name!r}", "there is no such axis", f"use {', '.join(known)}")
        given = [(axis, degrees.get(axis.name, 1)) for axis in AXES]
        return cls(tuple((axis.name, degree) for axis, degree in given if axis.deepspeed or degree != 1))

    @classmethod
    def over(cls, ranks: int, **degrees: int) -> Mesh:
        """Mesh of ``ranks`` ranks: what the degrees given leave of them divides samples.

        Raises:
            LayoutError: They do not divide the ranks, or are none of :meth:`of`.

        >>> Mesh.over(8, pp=2, tp=2).axes
        (('pp', 2), ('dp', 2), ('tp', 2))
        """
        experts = degrees.pop("ep", 1)
        given = cls.of(**degrees)
        if ranks % given.size:
            raise LayoutError(
                f"mesh of {given.words}", f"it does not divide {ranks} ranks", "use other degrees"
            )
        (samples,) = _dividing("samples")
        more = {samples: given.degree(samples) * ranks // given.size, "ep": experts}
        return cls.of(**dict(given.axes) | more)

    @property
    def size(self) -> int:
        return prod(degree for _, degree in self._ranked)

    @property
    def _ranked(self) -> tuple[tuple[str, int], ...]:
        """The axes along which there are more ranks."""
        return tuple((name, degree) for name, degree in self.axes if name not in _OVERLAID)

    @property
    def pp(self) -> int:
        return self.degree("pp")

    @property
    def dp(self) -> int:
        """Data-parallel degree: the number of shares that a batch is divided into."""
        return self.degree("dp")

    @property
    def cp(self) -> int:
        """Context-parallel degree: the number of parts that a sequence is cut into."""
        return self.degree("cp")

    @property
    def tp(self) -> int:
        return self.degree("tp")

    @property
    def ep(self) -> int:
        """Expert-parallel degree: the number of parts that the experts of a layer are shared out in."""
        return self.degree("ep")

    def degree(self, axis: str) -> int:
        """Degree of ``axis``, 1 if the mesh lacks it."""
        return dict(self.axes).get(axis, 1)

    @property
    def named(self) -> tuple[Axis, ...]:
        """The axes that a message about this mesh names: all that it has."""
        return tuple(axis for axis in AXES if axis.name in dict(self.axes))

    @property
    def words(self) -> str:
        """All degrees in words: how the model is cut, innermost first, then how often it is there."""
        named = [(axis, self.degree(axis.name)) for axis in self.named if not axis.overlaid]
        cuts = [(axis, degree) for axis, degree in reversed(named) if not axis.replicates]
        every = (*cuts, *((axis, degree) for axis, degree in named if axis.replicates))
        found = " x ".join(f"{axis.title} {degree}" for axis, degree in every)
        return found if self.ep == 1 else f"{found}, experts over {self.ep} of them"

    @property
    def model_axes(self) -> tuple[str, ...]:
        """Axes whose ranks hold different parameters: together they hold one model."""
        return tuple(axis.name for axis in AXES if not axis.replicates and not axis.overlaid)

    @property
    def replica_axes(self) -> tuple[str, ...]:
        """Axes whose ranks hold the same parameters: gradients are averaged and ZeRO partitions over them."""
        return tuple(axis.name for axis in AXES if axis.replicates)

    @property
    def sample_axes(self) -> tuple[str, ...]:
        """Axes whose ranks read samples of their own."""
        return _dividing("samples")

    @property
    def num_parts(self) -> int:
        """Ranks that hold one model together."""
        return self._count(self.model_axes)

    @property
    def num_replicas(self) -> int:
        """Ranks that hold the same parameters: the number that ZeRO partitions over."""
        return self._count(self.replica_axes)

    @property
    def num_shares(self) -> int:
        """Ranks, or groups of them, that read samples of their own: what a batch is divided by."""
        return self._count(self.sample_axes)

    def part(self, rank: int) -> int:
        """Which part of a model ``rank`` holds; the number in DeepSpeed's ``mp_rank_XX`` files."""
        return self._index(rank, self.model_axes)

    def replica(self, rank: int) -> int:
        """Which of the ranks with the same parameters ``rank`` is."""
        return self._index(rank, self.replica_axes)

    def share(self, rank: int) -> int:
        """Which share of every batch ``rank`` reads."""
        return self._index(rank, self.sample_axes)

    def replicas(self, *, experts: bool = False) -> int:
        """Ranks that hold the same parameters: of experts, or of all else (:attr:`num_replicas`)."""
        return self.num_replicas // self.ep if experts else self.num_replicas

    def replica_of(self, rank: int, *, experts: bool = False) -> int:
        """Which of :meth:`replicas` ``rank`` is."""
        return self.replica(rank) // self.ep if experts else self.replica(rank)

    def same(self, rank: int, *, experts: bool = False) -> tuple[int, ...]:
        """The :meth:`replicas` of a rank, itself among them, in their order."""
        every = self.group_of(rank, *self.replica_axes)
        return every[self.replica(rank) % self.ep :: self.ep] if experts else every

    def together(self, rank: int) -> tuple[int, ...]:
        """The ranks that hold the experts of a layer together with ``rank``, itself among them, in order."""
        first = self.replica(rank) // self.ep * self.ep
        return self.group_of(rank, *self.replica_axes)[first : first + self.ep]

    def copies(self, rank: int, *, cut: bool, divided: bool, experts: bool = False) -> tuple[int, int]:
        """Which of the ranks with the same elements of a parameter ``rank`` is, and how many they are.

        Axes that divide features divide the parameter if it is ``cut``, and ZeRO divides it, or its state,
        over replicas if it is ``divided``; ``experts``: it is of experts.
        """
        axes = () if cut else _dividing("features")
        index, count = self._index(rank, axes), self._count(axes)
        if divided:
            return index, count
        replica, replicas = self.replica_of(rank, experts=experts), self.replicas(experts=experts)
        return replica * count + index, replicas * count

    def random_stream(self, rank: int) -> int:
        """Number of the stream of random numbers that ``rank`` draws, outside of what features divide.

        Ranks along an axis that divides features compute the same activations there and must drop the same
        ones; all other ranks have layers, samples or positions of their own.
        """
        return self._index(rank, tuple(name for name, _ in self._ranked if name not in _dividing("features")))

    def is_first(self, rank: int, *axes: str) -> bool:
        """Whether ``rank`` is the first along each of ``axes``."""
        at = self.coords(rank)
        return not any(at.get(axis, 0) for axis in axes)

    def at(self, rank: int = 0) -> Coordinates:
        """Where ``rank`` stands. Raises LayoutError outside ``range(size)``."""
        found = self.coords(rank)
        if self.ep > 1:
            found |= {"ep": self.replica(rank) % self.ep}
        return Coordinates(tuple((name, degree, found[name]) for name, degree in self.axes))

    def coords(self, rank: int) -> dict[str, int]:
        """Coordinate of ``rank`` on every axis. Raises LayoutError outside ``range(size)``."""
        if not 0 <= rank < self.size:
            raise LayoutError(f"rank {rank}", f"the mesh has {self.size} ranks", f"use 0 to {self.size - 1}")
        out: dict[str, int] = {}
        for name, degree in reversed(self._ranked):
            rank, out[name] = divmod(rank, degree)
        return dict(reversed(out.items()))

    def rank(self, **coords: int) -> int:
        """Rank at ``coords``; an axis left out counts as 0."""
        rank = 0
        for name, degree in self._ranked:
            rank = rank * degree + coords.get(name, 0)
        return rank

    def groups(self, *axes: str) -> tuple[tuple[int, ...], ...]:
        """Ranks that differ only on ``axes``, one tuple per group, each in rank order."""
        kept = [(name, range(degree)) for name, degree in self._ranked if name not in axes]
        free = [(name, range(degree)) for name, degree in self._ranked if name in axes]
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

    def _count(self, axes: Iterable[str]) -> int:
        return prod(self.degree(axis) for axis in axes)

    def _index(self, rank: int, axes: tuple[str, ...]) -> int:
        """Place of ``rank`` among those that differ on ``axes`` alone, the innermost varying fastest."""
        at, index = self.coords(rank), 0
        for name, degree in self._ranked:
            if name in axes:
                index = index * degree + at[name]
        return index


_OVERLAID = frozenset(axis.name for axis in AXES if axis.overlaid)


def _dividing(what: Divided) -> tuple[str, ...]:
    return tuple(axis.name for axis in AXES if axis.divides == what)


def _named(spans: list[tuple[str, range]], values: tuple[int, ...]) -> dict[str, int]:
    return dict(zip((name for name, _ in spans), values, strict=True))
