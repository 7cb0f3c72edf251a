"""A schedule's step from dsx's simulator, with a short simulation standing in for a long one.

Once a pipeline is full, each further round of micro-batches takes as long as the one before. So two short
simulations tell the length of a round, and the rest is counting; tests/plan/test_planner_pipeline.py compares
with simulations at full length.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from dsx.plan.program import Program
from dsx.plan.simulate import Costs, Timeline, simulate
from dsx.spec.schedule import Op, Schedule

MOST_ACTIONS = 8_000
"""Computations that are simulated one by one whatever the schedule."""

_ROUNDS = ((4, 6), (3, 4), (2, 3))
"""Micro-batches per rank of the two short simulations: the longest that stay below twice MOST_ACTIONS."""


@dataclass(frozen=True)
class Pipeline:
    """A schedule of some size.

    Attributes:
        program: Which.
        num_ranks: Pipeline degree.
        num_chunks: Virtual stages per rank.
        num_micro_batches: Per step.
    """

    program: Program
    num_ranks: int
    num_chunks: int
    num_micro_batches: int

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Micro-batches to simulate: all of them, or two numbers that leave the same remainder."""
        p, m = self.num_ranks, self.num_micro_batches
        each = p * self.num_chunks * (3 if self.program.divides else 2)
        if each * m <= MOST_ACTIONS or self.program.rows is not None:
            return (m,)
        choices = [tuple(rounds * p + m % p for rounds in pair) for pair in _ROUNDS]
        few = [short for short in choices if each * short[-1] <= 2 * MOST_ACTIONS] or choices[-1:]
        return few[0] if few[0][-1] < m else (m,)

    @cached_property
    def schedules(self) -> tuple[Schedule, ...]:
        """Of these lengths."""
        return tuple(self.program.build(self.num_ranks, self.num_chunks, m) for m in self.lengths)

    @cached_property
    def divided_share(self) -> float:
        """Part of all backwards that are divided, 0 to 1: some schedules leave some of them whole."""
        counts = []
        for schedule in self.schedules:
            ops = [action.op for row in schedule.rows for action in row]
            counts.append((float(ops.count(Op.BACKWARD_INPUT)), float(ops.count(Op.BACKWARD))))
        divided, whole = counts[0] if len(counts) == 1 else self._further(*counts)
        return divided / (divided + whole)

    def run(self, costs: Costs) -> PipelineTime:
        """Simulate with these costs."""
        timelines = [simulate(schedule, costs) for schedule in self.schedules]
        figures = [
            (timeline.seconds, *timeline.busy_seconds, *_left(schedule, timeline))
            for schedule, timeline in zip(self.schedules, timelines, strict=True)
        ]
        seconds, *rest = figures[-1] if len(figures) == 1 else self._further(*figures)
        return PipelineTime(seconds, tuple(rest[: self.num_ranks]), tuple(rest[self.num_ranks :]))

    def _further(self, before: tuple[float, ...], now: tuple[float, ...]) -> tuple[float, ...]:
        """Figures of two simulations, continued in a straight line."""
        first, second = self.lengths
        steps = (self.num_micro_batches - second) / (second - first)
        return tuple(b + steps * (b - a) for a, b in zip(before, now, strict=True))


@dataclass(frozen=True, slots=True)
class PipelineTime:
    """All actions of a step.

    Attributes:
        seconds: From the first to the last.
        busy_seconds: Computing, per rank.
        left_seconds: Per virtual stage, from its last action to the end.
    """

    seconds: float
    busy_seconds: tuple[float, ...]
    left_seconds: tuple[float, ...]

    @property
    def bubble(self) -> float:
        """Idle time over ideal time, as :attr:`dsx.plan.simulate.Timeline.bubble`."""
        return self.seconds * len(self.busy_seconds) / sum(self.busy_seconds) - 1.0


def _left(schedule: Schedule, timeline: Timeline) -> tuple[float, ...]:
    ends = [0.0] * schedule.num_stages
    for row in timeline.spans:
        for action, _, end in row:
            ends[action.stage] = max(ends[action.stage], end)
    return tuple(timeline.seconds - end for end in ends)


def least_seconds(program: Program, num_ranks: int, num_micro_batches: int, costs: Costs) -> float:
    """A bound that no simulation of the schedule is below.

    A rank starts when a first micro-batch has come through the stages before its own, and has all its work
    still to do. If backwards are whole, a last one then goes back through those stages.
    """
    by_op = costs.by_op(num_stages := len(_per_stage(costs)))
    forward, backward = by_op[Op.FORWARD], by_op[Op.BACKWARD]
    if program.divides:  # Some of them leave some backwards whole.
        parts = zip(by_op[Op.BACKWARD_INPUT], by_op[Op.BACKWARD_WEIGHT], strict=True)
        divided = (first + second for first, second in parts)
        backward = tuple(map(min, backward, divided))
    busy = [0.0] * num_ranks
    for stage in range(num_stages):
        chunk, place = divmod(stage, num_ranks)
        mirrored = program.placement == "v" and chunk % 2
        busy[num_ranks - 1 - place if mirrored else place] += forward[stage] + backward[stage]
    least = come = 0.0
    for rank in range(num_ranks):
        least = max(least, come + num_micro_batches * busy[rank])
        come += forward[rank] + (0.0 if program.divides else backward[rank])
    return least


def _per_stage(costs: Costs) -> tuple[float, ...]:
    forward = costs.forward_seconds
    return forward if isinstance(forward, tuple) else (forward,)
