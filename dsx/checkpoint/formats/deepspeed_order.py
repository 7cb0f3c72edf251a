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

Shape = tuple[int, ...]
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
            reached.append({taken for taken in after if at + 1 - sum(taken) <= spare})
        alive = reached[-1] & {tuple(map(len, groups))}
        self._living = [alive]
        for at in reversed(range(len(self.items))):
            alive = {taken for taken in reached[at] if any(t in alive for _, t in self._choices(at, taken))}
            self._living.insert(0, alive)

    @property
    def some(self) -> bool:
        """Whether there is a way."""
        return bool(self._living[0])

    @property
    def start(self) -> _Taken:
        """Nothing named yet."""
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

    Raises:
        CheckpointError: More than one fits.
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
) -> list[list[list[str]]]:
    """As :func:`assign`, of every stage of a DeepSpeed pipeline.

    A stage has some of the layers, one after another; before them its copy of a tied module, which is one of
    the layers, anywhere (PipelineModule registers ``tied_modules`` first). Where stages end and which layer
    is tied is not written. Every possibility is tried, but not of several tied modules. Copies of a tied
    module have the same states, which rules out what only looks like one.

    Args:
        names: Of all layers, ``<layer>.<path>``, in order, with shapes.
        stages: Shapes of each stage's groups.
        where: The checkpoint, for messages.
        patterns: As in :func:`assign`.
        prints: For every parameter of ``stages``, a value that equal states have alike; None if unknown.

    Raises:
        CheckpointError: No way to name them, or more than one.
    """
    layers: dict[str, dict[str, Shape]] = {}
    for name, shape in names.items():
        layers.setdefault(name.split(".", 1)[0], {})[name] = shape
    found: list[list[list[list[str]]]] = []
    for tied in (None, *layers):
        search = _Search(layers, tied, patterns)
        for way in search.ways(list(layers), stages):
            if way not in found and _copies_agree(way, prints):
                found.append(way)
            if len(found) > 1:
                break
    if len(found) != 1:
        what = "no order of the layers' parameters has" if not found else "more than one order of layers has"
        raise CheckpointError(
            f"{where}: optimizer",
            f"its states have shapes that {what}, and without ZeRO a pipeline's states have no names",
            'train it on for one step with "zero_optimization": {"stage": 1}, which writes names',
        )
    return found[0]


def _copies_agree(way: list[list[list[str]]], prints: Sequence[Sequence[Sequence[Any]]]) -> bool:
    known: dict[str, Any] = {}
    for stage, states in zip(way, prints, strict=bool(prints)):
        for group, values in zip(stage, states, strict=True):
            for name, value in zip(group, values, strict=True):
                if value is not None and known.setdefault(name, value) != value:
                    return False
    return True


@dataclass(frozen=True, slots=True)
class _Search:
    """For namings of a pipeline's stages, one layer of which may be a tied module."""

    layers: Mapping[str, Mapping[str, Shape]]
    tied: str | None
    patterns: Sequence[Sequence[str]]

    def ways(
        self, rest: list[str], stages: Sequence[Sequence[Sequence[Shape | None]]]
    ) -> Iterator[list[list[list[str]]]]:
        """Namings of ``stages``, the first of which begins with the first layer of ``rest``."""
        if not stages:
            if not rest:
                yield []
            return
        for count in range(len(rest) + 1):
            mine, others = rest[:count], rest[count:]
            if not self._enough(others, stages[1:]):
                return
            for named in self._stage(mine, stages[0]):
                for after in self.ways(others, stages[1:]):
                    yield [named, *after]

    def _enough(self, layers: list[str], stages: Sequence[Sequence[Sequence[Shape | None]]]) -> bool:
        """Whether layers, with a copy of the tied one on every stage, have names for all states."""
        copies = len(self.layers[self.tied]) * len(stages) if self.tied is not None else 0
        wanted = sum(len(group) for stage in stages for group in stage)
        return sum(len(self.layers[layer]) for layer in layers) + copies >= wanted

    def _stage(self, mine: list[str], groups: Sequence[Sequence[Shape | None]]) -> Iterator[list[list[str]]]:
        """Namings of one stage that has the layers ``mine``, and may have a copy of the tied one."""
        wanted = sum(map(len, groups))
        own = {name: shape for layer in mine for name, shape in self.layers[layer].items()}
        copies = [{}] if self.tied in mine or self.tied is None else [{}, self.layers[self.tied]]
        for copy in copies if self.tied not in mine else [self.layers[str(self.tied)]]:
            candidates = {**copy, **own}
            if len(candidates) < wanted:
                continue
            possible = _Possible(candidates, groups, self.patterns)
            for named in _namings(possible, 0, possible.start) if possible.some else ():
                if set(copy) <= {name for group in named for name in group}:
                    yield named
