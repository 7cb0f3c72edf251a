"""How far the clocks of ranks are apart, from collectives that every rank timed.

No rank leaves a collective that gathers from all before every rank has entered it. So, in true time, what one
rank saw before is earlier than what any other saw after: each round bounds each pair's offset from both
sides, whatever the network does, and the bounds of all rounds hold together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Rounds = tuple[tuple[float, float], ...]
"""One rank's clock in seconds before and after each collective."""


@dataclass(frozen=True, slots=True)
class Offset:
    """Seconds that a clock is ahead of rank 0's, and how far from the truth that can be."""

    seconds: float
    error_seconds: float


def offsets(rounds: Sequence[Rounds], machines: Sequence[str]) -> tuple[Offset, ...]:
    """Offset of every rank's clock from rank 0's.

    Args:
        rounds: Per rank, what it timed; the same collectives on all.
        machines: Per rank, the machine that its clock belongs to: ranks of one machine read one clock. Empty
            where that is unknown.

    >>> offsets([((0.0, 0.4),), ((10.1, 10.3),)], ["a", "b"])[1]
    Offset(seconds=10.0, error_seconds=0.3...)
    """
    names = [machine or f"rank {rank}" for rank, machine in enumerate(machines)]
    found = {names[0]: Offset(0.0, 0.0)}
    for name in names:
        if name not in found:
            found[name] = _between(_of(rounds, names, name), _of(rounds, names, names[0]))
    return tuple(found[name] for name in names)


def _of(rounds: Sequence[Rounds], names: Sequence[str], name: str) -> list[Rounds]:
    return [own for own, its in zip(rounds, names, strict=True) if its == name]


def _between(there: list[Rounds], here: list[Rounds]) -> Offset:
    """How far ``there`` is ahead: no less than its befores minus our afters, no more than the reverse."""
    pairs = [pair for theirs in there for ours in here for pair in zip(theirs, ours, strict=True)]
    least = max(before - our_after for (before, _), (_, our_after) in pairs)
    most = min(after - our_before for (_, after), (our_before, _) in pairs)
    return Offset((least + most) / 2, abs(most - least) / 2)
