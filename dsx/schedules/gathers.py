"""Which chunks' parameters stay gathered between their actions, under a budget of memory.

ZeRO-3 gathers a chunk's parameters for every forward and backward and frees them after it. Of two successive
actions of one chunk on a rank, the second needs no gather if the parameters are kept in between, which takes
memory for that long. Which gaps to bridge when not all fit is the caching problem, whose answer for pages of
one size is to give up the page whose next use is farthest away (Belady 1966, "A study of replacement
algorithms for virtual-storage computers").
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Generic, TypeVar

from dsx.schedules.schedule import Action, Op

GATHERED = frozenset({Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT})
"""Actions that need a chunk's parameters. The second part of a split backward needs none."""


@dataclass(frozen=True, slots=True)
class Gap:
    """Two neighbouring actions of one virtual stage that need its parameters, by position in the row."""

    stage: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class GatherPlan:
    """What one rank keeps gathered.

    Attributes:
        kept: For each position of the row, the virtual stages whose parameters stay gathered when the action
            there is done.
        gathers: For each virtual stage, how often its parameters are gathered in the step.
        peak_bytes: Most memory that kept parameters take at once. A chunk that is kept before or after its
            action counts during the action as well.
    """

    kept: tuple[frozenset[int], ...]
    gathers: Mapping[int, int]
    peak_bytes: int


def gather_plan(row: Sequence[Action], stage_bytes: Mapping[int, int], budget_bytes: int) -> GatherPlan:
    """Bridge every gap that fits; where not all fit, give up the one that ends last.

    The plan is optimal when chunks are of one size. It never exceeds the budget, and no gap that it leaves
    would still fit.

    >>> row = [Action.parse(text) for text in "0F0 0F1 1F0 1B0 0B0 0B1".split()]
    >>> plan = gather_plan(row, {0: 100, 1: 100}, 100)
    >>> [sorted(stages) for stages in plan.kept], dict(plan.gathers)
    ([[0], [], [1], [], [0], []], {0: 2, 1: 1})
    """
    ledger = _Ledger(len(row), stage_bytes, budget_bytes)
    left: list[Gap] = []
    for gap in _gaps(row):
        while not ledger.fits(gap):
            last = max([*ledger.at(gap.begin), gap], key=lambda other: (other.end, other.stage))
            left.append(last)
            if last is gap:
                break
            ledger.give_up(last)
        else:
            ledger.bridge(gap)
    # Giving up a large gap can have made room for a smaller one.
    for gap in sorted(left, key=lambda gap: -stage_bytes[gap.stage]):
        if ledger.fits(gap):
            ledger.bridge(gap)
    needs = [action.stage for action in row if action.op in GATHERED]
    bridged = [gap.stage for gap in ledger.held]
    return GatherPlan(
        kept=tuple(
            frozenset(gap.stage for gap in ledger.at(position) if gap.end > position)
            for position in range(len(row))
        ),
        gathers={stage: needs.count(stage) - bridged.count(stage) for stage in sorted(set(needs))},
        peak_bytes=max(map(ledger.bytes_at, range(len(row))), default=0),
    )


class _Ledger:
    """The gaps that are bridged, and the memory that they take at each position, both ends included."""

    def __init__(self, positions: int, stage_bytes: Mapping[int, int], budget_bytes: int) -> None:
        self._stage_bytes, self._budget_bytes = stage_bytes, budget_bytes
        self._open: list[list[Gap]] = [[] for _ in range(positions)]
        self.held: set[Gap] = set()

    def at(self, position: int) -> list[Gap]:
        """The bridged gaps that are open at a position, begin there or end there."""
        return self._open[position]

    def bytes_at(self, position: int, *more: Gap) -> int:
        """The memory at a position; a stage counts once."""
        stages = {gap.stage for gap in (*self._open[position], *more)}
        return sum(self._stage_bytes[stage] for stage in stages)

    def fits(self, gap: Gap) -> bool:
        """Whether ``gap`` can be bridged as well."""
        positions = range(gap.begin, gap.end + 1)
        return all(self.bytes_at(position, gap) <= self._budget_bytes for position in positions)

    def bridge(self, gap: Gap) -> None:
        self.held.add(gap)
        for position in range(gap.begin, gap.end + 1):
            self._open[position].append(gap)

    def give_up(self, gap: Gap) -> None:
        self.held.remove(gap)
        for position in range(gap.begin, gap.end + 1):
            self._open[position].remove(gap)


def _gaps(row: Sequence[Action]) -> list[Gap]:
    found, latest = [], dict[int, int]()
    for position, action in enumerate(row):
        if action.op in GATHERED:
            if action.stage in latest:
                found.append(Gap(action.stage, latest[action.stage], position))
            latest[action.stage] = position
    return sorted(found, key=lambda gap: gap.begin)


P = TypeVar("P", bound=Hashable)


class ChunkHolds(Generic[P]):
    """Which parameters of which chunks are held between actions in steps of one rank.

    The engine holds tensors by this (dsx/engine/zero/stage3.py), and the memory estimate counts them.

    Args:
        uses: Virtual stage -> parameters that its layers use. What is tied counts for every stage.
        persistent: Whether a parameter is small enough to be gathered always, whatever is held.
        budget_bytes: Memory for what is held; 0 holds nothing.

    Attributes:
        parameters: Virtual stage -> its parameters, persistent ones left out.
    """

    def __init__(
        self,
        uses: Mapping[int, Iterable[P]],
        *,
        persistent: Callable[[P], bool],
        size_bytes: Callable[[P], int],
        budget_bytes: int,
    ) -> None:
        self.parameters = {
            stage: tuple(p for p in dict.fromkeys(used) if not persistent(p)) for stage, used in uses.items()
        }
        self.stage_bytes = {stage: sum(map(size_bytes, used)) for stage, used in self.parameters.items()}
        self._budget_bytes = budget_bytes
        self._kept: frozenset[int] = frozenset()

    def plan(self, row: Sequence[Action]) -> GatherPlan:
        """What stays gathered when, in a step with these actions."""
        return gather_plan(row, self.stage_bytes, self._budget_bytes)

    def change(self, kept: frozenset[int]) -> tuple[list[tuple[int, P]], list[tuple[int, P]]]:
        """Hold the chunks ``kept`` and no others: what is no longer held, what is held anew, by stage."""
        gone, fresh = self._kept - kept, kept - self._kept
        self._kept = kept
        return (
            [(stage, parameter) for stage in gone for parameter in self.parameters[stage]],
            [(stage, parameter) for stage in fresh for parameter in self.parameters[stage]],
        )


class StepTrace(Generic[P]):
    """The modules of a step in the order in which they run, and how far it is to a parameter's next use.

    Args:
        modules: For each module its parameters with their numbers of elements.
    """

    def __init__(self, modules: Iterable[Sequence[tuple[P, int]]]) -> None:
        self._uses: dict[P, list[int]] = {}
        sizes = []
        for place, module in enumerate(modules):
            sizes.append(sum(numel for _, numel in module))
            for parameter, _ in module:
                self._uses.setdefault(parameter, []).append(place)
        self._before = list(accumulate(sizes, initial=0))

    def distance(self, parameter: P, step: int) -> float:
        """Elements that modules from ``step`` on use before the next one that uses ``parameter``."""
        uses = self._uses.get(parameter, [])
        following = bisect_left(uses, step)
        return self._before[uses[following]] - self._before[step] if following < len(uses) else float("inf")
