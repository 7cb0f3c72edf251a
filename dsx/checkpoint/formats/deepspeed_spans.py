"""Where the parameters of an optimizer group lie in its flat order, and what of it a rank has. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

Places = Mapping[str, tuple[int, int]]
"""Two numbers for every name."""


def in_turns_undone(group: Mapping[str, tuple[int, ...]], turns: int) -> Mapping[str, tuple[int, ...]]:
    """The optimizer's order of a group whose flat order takes every ``turns``-th parameter first."""
    numbers = [number for first in range(turns) for number in range(first, len(group), turns)]
    placed = sorted(zip(numbers, group.items(), strict=True))
    return dict(item for _, item in placed)


def spans(shapes: Mapping[str, tuple[int, ...]], gaps: Sequence[int]) -> Places:
    """(first element, the one after the last) of every parameter of a group."""
    found, end = {}, 0
    for (name, shape), gap in zip(shapes.items(), gaps, strict=True):
        found[name] = (end, end + prod(shape))
        end += prod(shape) + gap
    return found


def held(spans: Places, low: int, high: int) -> Places:
    """(start, elements) in a rank's part, from ``low`` to ``high``, of every parameter that is in it."""
    inside = {name: (max(low, start), min(high, stop)) for name, (start, stop) in spans.items()}
    return {name: (start - low, stop - start) for name, (start, stop) in inside.items() if start < stop}
