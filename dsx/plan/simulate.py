"""Run a schedule on paper: start and end of every forward and backward, and the bubble."""

from __future__ import annotations

from dataclasses import dataclass

from dsx.errors import ScheduleError
from dsx.plan.order import execution_order
from dsx.spec.schedule import Action, Op, Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What actions take.

    Attributes:
        forward_seconds: One forward of one micro-batch: the same for every virtual stage, or one per stage.
        backward_seconds: Likewise for a backward; twice a forward is usual without recompute.
        transfer_seconds: From the end of an action to the arrival of its result on another rank. Transfers
            overlap with computation and with each other.
    """

    forward_seconds: float | tuple[float, ...] = 1.0
    backward_seconds: float | tuple[float, ...] = 2.0
    transfer_seconds: float = 0.0


Span = tuple[Action, float, float]
"""A compute action with its start and end in seconds."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """``spans[rank]``: that rank's forwards and backwards in order."""

    spans: tuple[tuple[Span, ...], ...]

    @property
    def seconds(self) -> float:
        """From the start of the first action to the end of the last."""
        return max(row[-1][2] for row in self.spans)

    @property
    def busy_seconds(self) -> tuple[float, ...]:
        """Time spent computing, per rank."""
        return tuple(sum(end - start for _, start, end in row) for row in self.spans)

    @property
    def idle_share(self) -> float:
        """Part of all ranks' time spent idle, 0 to 1."""
        return 1.0 - sum(self.busy_seconds) / (self.seconds * len(self.spans))

    @property
    def bubble(self) -> float:
        """Idle time over ideal time, where ideal is the computation spread evenly over the ranks.

        (p - 1) / m for GPipe and 1F1B, (p - 1) / (v m) interleaved, with equal stages and free transfers
        (arXiv:2104.04473, section 2.2).
        """
        return self.seconds * len(self.spans) / sum(self.busy_seconds) - 1.0


def simulate(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """Timeline of a schedule, lowered or not: each rank runs its row as early as its inputs allow.

    Raises:
        ScheduleError: It deadlocks, or per-stage costs are not one per virtual stage.
    """
    costs = costs or Costs()
    seconds = {
        Op.FORWARD: _per_stage(schedule, "forward_seconds", costs.forward_seconds),
        Op.BACKWARD: _per_stage(schedule, "backward_seconds", costs.backward_seconds),
    }
    ends: dict[Action, float] = {}
    clocks = [0.0] * schedule.num_ranks
    spans: list[list[Span]] = [[] for _ in clocks]
    for rank, action, need in execution_order(schedule):
        start = clocks[rank]
        if need is not None:
            hop = costs.transfer_seconds if schedule.rank_of(need.stage) != rank else 0.0
            start = max(start, ends[need] + hop)
        end = start
        if action.op in seconds:
            end += seconds[action.op][action.stage]
            spans[rank].append((action, start, end))
        ends[action] = clocks[rank] = end
    return Timeline(tuple(map(tuple, spans)))


def _per_stage(schedule: Schedule, name: str, value: float | tuple[float, ...]) -> tuple[float, ...]:
    if isinstance(value, int | float):
        return (float(value),) * schedule.num_stages
    if len(value) != schedule.num_stages:
        raise ScheduleError(
            f"costs.{name}",
            f"{len(value)} values for {schedule.num_stages} virtual stages",
            "give one number, or one per virtual stage",
        )
    return value
