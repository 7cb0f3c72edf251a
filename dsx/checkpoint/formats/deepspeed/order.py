"""Names for the numbered optimizer state of a stock checkpoint without ZeRO.

torch's optimizers number parameters group by group. A model's state dict has them by name, in the model's
order. A group is taken to list its parameters in the model's order, as every known way to make groups does;
which of several groups a parameter is in, and which parameters are frozen, the file does not say. So the
names are those of the one assignment in which all shapes agree. If there are several, that is an error:
the user says which tensors are in which group.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dsx.errors import CheckpointError

TIED = "tied_modules"
ZEROS = "zeros"
Shape = tuple[int, ...]
Ties = tuple[tuple[str, tuple[int, ...]], ...]
"""(key, layers that use it) of every TiedLayerSpec."""
_MOST_WAYS = 50_000
_Taken = tuple[int, ...]
"""How many parameters of each group have their names."""


class _Possible:
    """Every way to name a group list, as a graph of how far each group has got after each candidate."""

    def __init__(
        self,
        names: Mapping[str, Shape],
        groups: Sequence[Sequence[Shape | None]],
        patterns: Sequence[Sequence[str]],
    ) -> None:
        self.items = list(names.items())
        self._groups, self._patterns = groups, patterns
        spare = len(self.items) - sum(map(len, groups))
        reached: list[set[_Taken]] = [{(0,) * len(groups)}]
        for at in range(len(self.items)):
            after = {taken for before in reached[at] for _, taken in self._choices(at, before)}
            if len(after) > _MOST_WAYS:
                raise CheckpointError(
                    f"tensor {self.items[at][0]}",
                    f"the optimizer's states have no names, and by the shapes there are over {_MOST_WAYS:,} "
                    "ways to give it and those before it to groups",
                    'say in a rules file which tensors each group has: {"groups": [["regex", ...], ...]}',
                )
            reached.append({taken for taken in after if at + 1 - sum(taken) <= spare})
        alive = reached[-1] & {tuple(map(len, groups))}
        self._living = [alive]
        for at in reversed(range(len(self.items))):
            alive = {taken for taken in reached[at] if any(t in alive for _, t in self._choices(at, taken))}
            self._living.insert(0, alive)

    @property
    def some(self) -> bool:
        return bool(self._living[0])

    @property
    def start(self) -> _Taken:
        return (0,) * len(self._groups)

    def ways(self, at: int, taken: _Taken) -> list[tuple[int | None, _Taken]]:
        """What candidate ``at`` may be (None: frozen) so that the rest can be named."""
        return [(home, after) for home, after in self._choices(at, taken) if after in self._living[at + 1]]

    def _choices(self, at: int, taken: _Taken) -> Iterator[tuple[int | None, _Taken]]:
        name, shape = self.items[at]
        yield None, taken
        for home, group in enumerate(self._groups):
            if taken[home] == len(group) or group[taken[home]] not in (None, shape):
                continue
            if not self._patterns or any(re.fullmatch(one, name) for one in self._patterns[home]):
                yield home, (*taken[:home], taken[home] + 1, *taken[home + 1 :])


def assign(
    names: Mapping[str, Shape],
    groups: Sequence[Sequence[Shape | None]],
    where: str,
    patterns: Sequence[Sequence[str]] = (),
) -> list[list[str]] | None:
    """Name of every parameter of every group; None if no order of the candidates fits.

    Args:
        names: Candidates in the model's order, with their shapes.
        groups: Shape of each parameter, None where it has no state.
        where: The file, for messages.
        patterns: For each group, regular expressions of which one matches all of a name; from the user.
    """
    possible = _Possible(names, groups, patterns)
    if not possible.some:
        return None
    found: list[list[str]] = [[] for _ in groups]
    taken = possible.start
    for at, name in enumerate(names):
        ways = possible.ways(at, taken)
        if len(ways) > 1:
            homes = ["none, frozen" if home is None else f"group {home}" for home, _ in ways]
            raise CheckpointError(
                f"{where}: tensor {name}",
                f"the optimizer's states have no names, and by the shapes it may be of {' or '.join(homes)}",
                'say in a rules file which tensors each group has: {"groups": [["regex", ...], ...]}',
            )
        home, taken = ways[0]
        if home is not None:
            found[home].append(name)
    return found


def _namings(possible: _Possible, at: int, taken: _Taken) -> Iterator[list[list[str]]]:
    """Every naming of the candidates from ``at`` on, one after another."""
    if at == len(possible.items):
        yield [[] for _ in taken]
        return
    for home, after in possible.ways(at, taken):
        for rest in _namings(possible, at + 1, after):
            if home is None:
                yield rest
            else:
                yield [[possible.items[at][0], *one] if g == home else one for g, one in enumerate(rest)]


def stage_names(
    names: Mapping[str, Shape],
    stages: Sequence[Sequence[Sequence[Shape | None]]],
    where: str,
    patterns: Sequence[Sequence[str]] = (),
    prints: Sequence[Sequence[Sequence[Any]]] = (),
    ties: Ties | None = None,
    twins: frozenset[int] = frozenset(),
) -> list[list[list[str]]]:
    """As :func:`assign`, of every stage of a DeepSpeed pipeline.

    A stage has some of the layers, one after another; before them the tied modules that it uses
    (PipelineModule registers ``tied_modules`` first). Where stages end is not written, nor, unless the user
    says so, which layers are tied: then every possibility is tried, but not of several tied ones. Copies of
    a tied module on several stages have the same states. One that a single stage uses twice has two layers'
    files with the same bytes, or is a table whose head has no file of its own: a layer that the numbers leave
    out, or one after the last.

    Args:
        names: Of all layers, ``<layer>.<path>``, in order, with shapes; of those that ``ties`` names
            ``tied_modules.<key>.<path>``.
        stages: Shapes of each stage's groups.
        where: The checkpoint, for messages.
        patterns: As in :func:`assign`.
        prints: For every parameter of ``stages``, a value that equal states have alike; None if unknown, and
            :data:`ZEROS` for states that never moved, which are equal by themselves.
        ties: Every tied module and the layers that use it, where the user says so.
        twins: Layers that have the same bytes as another layer.
    """
    layers = _layers(names, dict(ties or ()))
    found: list[list[list[list[str]]]] = []
    shared = _shared(stages, prints)
    guesses = [
        layer
        for layer, tensors in layers.items()
        if shared & {None, *tensors.values()} or layer in twins or _is_table(tensors)
    ]
    for guess in (None, *(guesses if ties is None else ())):
        search = _Search(layers, dict(ties or ()), guess, patterns)
        for bounds, way in search.ways(list(layers), stages):
            fits = way not in found and _copies_agree(way, prints)
            if fits and search.ties_agree(bounds, way) and search.is_plausible(bounds, way, twins):
                found.append(way)
            if len(found) > 1:
                break
    if len(found) != 1:
        what = "no order of the layers' parameters has" if not found else "more than one order of layers has"
        raise CheckpointError(
            f"{where}: optimizer",
            f"its states have shapes that {what}, and without ZeRO a pipeline's states have no names",
            "say which layers use each tied module, --tied KEY=LAYERS, or that there is none, --tied none; "
            'or train it on for one step with "zero_optimization": {"stage": 1}, which writes names',
        )
    return found[0]


def _layers(names: Mapping[str, Shape], ties: Mapping[str, Sequence[int]]) -> dict[int, dict[str, Shape]]:
    """Tensors of every layer by its number, those of a tied module with every layer that uses it."""
    found: dict[int, dict[str, Shape]] = {}
    for name, shape in names.items():
        first, _, rest = name.partition(".")
        key = rest.partition(".")[0]
        for layer in ties.get(key, ()) if first == TIED else (int(first),):
            found.setdefault(layer, {})[name] = shape
    return dict(sorted(found.items()))


def _copies_agree(way: list[list[list[str]]], prints: Sequence[Sequence[Sequence[Any]]]) -> bool:
    """Whether equal names have equal states, and equal states equal names."""
    known: dict[str, Any] = {}
    owners: dict[Any, str] = {}
    for stage, states in zip(way, prints, strict=bool(prints)):
        for group, values in zip(stage, states, strict=True):
            for name, value in zip(group, values, strict=True):
                if value is None:
                    continue
                if known.setdefault(name, value) != value:
                    return False
                if value != ZEROS and owners.setdefault(value, name) != name:
                    return False
    return True


@dataclass(frozen=True, slots=True)
class _Search:
    """For namings of a pipeline's stages: known ties by key, and a layer that is taken for a tied module."""

    layers: Mapping[int, Mapping[str, Shape]]
    ties: Mapping[str, Sequence[int]]
    guess: int | None
    patterns: Sequence[Sequence[str]]

    def ways(
        self, rest: list[int], stages: Sequence[Sequence[Sequence[Shape | None]]]
    ) -> Iterator[tuple[list[list[int]], list[list[list[str]]]]]:
        """(layers, names) of every stage, the first of which begins with the first layer of ``rest``."""
        if not stages:
            if not rest:
                yield [], []
            return
        for count in range(len(rest) + 1):
            mine, others = rest[:count], rest[count:]
            if not self._enough(others, stages[1:]):
                return
            for named in self._stage(mine, stages[0]):
                for more, after in self.ways(others, stages[1:]):
                    yield [mine, *more], [named, *after]

    def _enough(self, layers: list[int], stages: Sequence[Sequence[Sequence[Shape | None]]]) -> bool:
        """Whether layers, with a copy of the tied one on every stage, have names for all states."""
        copies = len(self.layers[self.guess]) * len(stages) if self.guess is not None else 0
        wanted = sum(len(group) for stage in stages for group in stage)
        return sum(len(self.layers[layer]) for layer in layers) + copies >= wanted

    def _stage(self, mine: list[int], groups: Sequence[Sequence[Shape | None]]) -> Iterator[list[list[str]]]:
        """Namings of one stage that has the layers ``mine``, and may have a copy of the tied one."""
        wanted = sum(map(len, groups))
        tied = {layer for layers in self.ties.values() for layer in layers}
        own: dict[str, Shape] = {}
        for layer in (*(one for one in mine if one in tied), *(one for one in mine if one not in tied)):
            own |= self.layers[layer]
        copies: list[Mapping[str, Shape]] = [{}]
        if self.guess is not None:
            copies = [self.layers[self.guess]] if self.guess in mine else [{}, self.layers[self.guess]]
        for copy in copies:
            candidates = {**copy, **own}
            if len(candidates) < wanted:
                continue
            possible = _Possible(candidates, groups, self.patterns)
            for named in _namings(possible, 0, possible.start) if possible.some else ():
                if set(copy) <= {name for group in named for name in group}:
                    yield named

    def ties_agree(self, bounds: list[list[int]], way: list[list[list[str]]]) -> bool:
        """Whether every stage that uses a tied module has states of the same tensors of it."""
        for layers in self.ties.values():
            names = set(self.layers.get(layers[0], ()))
            users = [stage for mine, stage in zip(bounds, way, strict=True) if {*layers} & {*mine}]
            if len({frozenset(names & {one for group in stage for one in group}) for stage in users}) > 1:
                return False
        return True

    def is_plausible(
        self, bounds: list[list[int]], way: list[list[list[str]]], twins: frozenset[int]
    ) -> bool:
        """Whether what is taken for tied is used on several stages, or could be used twice on one."""
        if self.guess is None or self.guess in twins:
            return True
        names = set(self.layers[self.guess])
        if sum(any(names & set(group) for group in stage) for stage in way) > 1:
            return True
        home = next(at for at, mine in enumerate(bounds) if self.guess in mine)
        before = [layer for mine in bounds[:home] for layer in mine]
        after = [layer for mine in bounds[home + 1 :] for layer in mine]
        room = after[0] - (before[-1] + 1 if before else 0) - len(bounds[home]) if after else 1
        return room > 0 and _is_table(self.layers[self.guess])


def _is_table(layer: Mapping[str, Shape]) -> bool:
    """Whether a layer has nothing but a matrix, as an embedding that is used again as the head."""
    return [len(shape) for shape in layer.values()] == [2]


def _shared(
    stages: Sequence[Sequence[Sequence[Shape | None]]], prints: Sequence[Sequence[Sequence[Any]]]
) -> set[Shape | None]:
    """Shapes of the states that may be copies of others, on another stage; None if any may be one."""
    if not prints:
        return {None}
    found: set[Shape | None] = set()
    first: dict[Any, int] = {}
    for stage, (groups, values) in enumerate(zip(stages, prints, strict=True)):
        for group, told in zip(groups, values, strict=True):
            for shape, value in zip(group, told, strict=True):
                if value is None:
                    found.add(None)
                elif first.setdefault(value, stage) != stage:
                    found.add(shape)
    return found
