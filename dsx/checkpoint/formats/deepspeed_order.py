"""Names for the numbered optimizer state of a stock checkpoint without ZeRO.

torch's optimizers number parameters group by group. A model's state dict has them by name, in the model's
order. A group is taken to list its parameters in the model's order, as every known way to make groups does;
which of several groups a parameter is in, and which parameters are frozen, the file does not say. So the
names are those of the one assignment in which all shapes agree. If there are several, that is an error:
the user says which tensors are in which group.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence

from dsx.errors import CheckpointError

Shape = tuple[int, ...]
_Taken = tuple[int, ...]
"""How many parameters of each group have their names."""


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
    items = list(names.items())
    start = (0,) * len(groups)

    def choices(at: int, taken: _Taken) -> Iterator[tuple[int | None, _Taken]]:
        """What candidate ``at`` may be, after ``taken`` parameters of each group; None: frozen."""
        name, shape = items[at]
        yield None, taken
        for home, group in enumerate(groups):
            fits = taken[home] < len(group) and group[taken[home]] in (None, shape)
            if fits and (not patterns or any(re.fullmatch(pattern, name) for pattern in patterns[home])):
                yield home, (*taken[:home], taken[home] + 1, *taken[home + 1 :])

    spare = len(items) - sum(map(len, groups))
    reached: list[set[_Taken]] = [{start}]
    for at in range(len(items)):
        after = {taken for before in reached[at] for _, taken in choices(at, before)}
        reached.append({taken for taken in after if at + 1 - sum(taken) <= spare})
    alive = reached[len(items)] & {tuple(map(len, groups))}
    living = [alive]
    for at in reversed(range(len(items))):
        alive = {taken for taken in reached[at] if any(t in alive for _, t in choices(at, taken))}
        living.insert(0, alive)
    if not living[0]:
        return None
    return _only_way(items, choices, living, where)


def _only_way(
    items: Sequence[tuple[str, Shape]],
    choices: Callable[[int, _Taken], Iterator[tuple[int | None, _Taken]]],
    living: Sequence[set[_Taken]],
    where: str,
) -> list[list[str]]:
    (taken,) = living[0]
    found: list[list[str]] = [[] for _ in taken]
    for at, (name, _) in enumerate(items):
        ways = [(home, after) for home, after in choices(at, taken) if after in living[at + 1]]
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


def stage_names(
    names: Mapping[str, Shape],
    stages: Sequence[Sequence[Sequence[Shape | None]]],
    where: str,
    patterns: Sequence[Sequence[str]] = (),
) -> list[list[list[str]]]:
    """As :func:`assign`, of every stage of a DeepSpeed pipeline.

    A stage has some of the layers, one after another; before them its copy of a tied module, which is one of
    the layers, anywhere (PipelineModule registers ``tied_modules`` first). Where stages end and which layer
    is tied is not written. Every possibility is tried; models with several tied modules are not.

    Args:
        names: Of all layers, ``<layer>.<path>``, in order, with shapes.
        stages: Shapes of each stage's groups.
        where: The checkpoint, for messages.
        patterns: As in :func:`assign`.

    Raises:
        CheckpointError: No way to name them, or more than one.
    """
    layers: dict[str, dict[str, Shape]] = {}
    for name, shape in names.items():
        layers.setdefault(name.split(".", 1)[0], {})[name] = shape
    found: list[list[list[list[str]]]] = []
    for tied in (None, *layers):
        for way in _ways(list(layers), layers, stages, tied, where, patterns):
            if way not in found:
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


def _ways(
    rest: list[str],
    layers: Mapping[str, Mapping[str, Shape]],
    stages: Sequence[Sequence[Sequence[Shape | None]]],
    tied: str | None,
    where: str,
    patterns: Sequence[Sequence[str]],
) -> Iterator[list[list[list[str]]]]:
    """Namings of ``stages``, the first of which begins with the first layer of ``rest``."""
    if not stages:
        if not rest:
            yield []
        return
    wanted = sum(map(len, stages[0]))
    needed = sum(len(group) for stage in stages[1:] for group in stage)
    for count in range(len(rest) + 1):
        mine, others = rest[:count], rest[count:]
        if sum(len(layers[layer]) for layer in others) < needed - len(layers.get(tied or "", ())) * len(
            stages
        ):
            break
        for copy in {False, tied is not None} if tied not in mine else {True}:
            first = layers[tied] if copy and tied is not None else {}
            candidates = {**first, **{n: s for layer in mine for n, s in layers[layer].items()}}
            if len(candidates) < wanted:
                continue
            named = assign(candidates, stages[0], where, patterns)
            if named is None or not set(first) <= {name for group in named for name in group}:
                continue
            for after in _ways(others, layers, stages[1:], tied, where, patterns):
                yield [named, *after]
