"""Run a schedule on paper: start and end of every action that computes, and the bubble."""

from __future__ import annotations

from dataclasses import dataclass

from dsx.errors import ScheduleError
from dsx.schedules.schedule import Action, Op, Schedule
from dsx.schedules.validate import execution_order

Seconds = float | tuple[float, ...]
"""The same for every virtual stage, or one per stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What actions take, one micro-batch each.

    Attributes:
        forward_seconds: A forward.
        backward_seconds: A whole backward. By default its two parts together; two forwards are usual without
            recompute.
        backward_input_seconds: The gradient of the input. By default half of the whole backward, 1 without.
        backward_weight_seconds: The gradients of the weights. By default the rest of the whole backward, 1
            without.
        transfer_seconds: From the end of an action to the arrival of its result on another rank. Transfers
            overlap with computation and with each other.

    >>> Costs(backward_seconds=3.0).by_op(2)[Op.BACKWARD_WEIGHT]
    (1.5, 1.5)
    """

    forward_seconds: Seconds = 1.0
    backward_seconds: Seconds | None = None
    backward_input_seconds: Seconds | None = None
    backward_weight_seconds: Seconds | None = None
    transfer_seconds: float = 0.0

    def by_op(self, num_stages: int) -> dict[Op, tuple[float, ...]]:
        """Seconds of every op that computes, per virtual stage.

        Raises:
            ScheduleError: Costs that are not one per virtual stage, or a negative one.
        """
        whole = _per_stage(num_stages, "backward_seconds", self.backward_seconds)
        first = _per_stage(num_stages, "backward_input_seconds", self.backward_input_seconds)
        second = _per_stage(num_stages, "backward_weight_seconds", self.backward_weight_seconds)
        if whole is None:
            first = first or (1.0,) * num_stages
            second = second or (1.0,) * num_stages
            whole = tuple(a + b for a, b in zip(first, second, strict=True))
        if first is None:
            known = second or tuple(total / 2 for total in whole)
            first = tuple(total - part for total, part in zip(whole, known, strict=True))
        second = second or tuple(total - part for total, part in zip(whole, first, strict=True))
        found = {
            Op.FORWARD: _per_stage(num_stages, "forward_seconds", self.forward_seconds) or (),
            Op.BACKWARD: whole,
            Op.BACKWARD_INPUT: first,
            Op.BACKWARD_WEIGHT: second,
        }
        for op, values in found.items():
            if min(values, default=0.0) < 0:
                raise ScheduleError(f"costs of {op}", f"{min(values):g} seconds", "give none below 0")
        return found


Span = tuple[Action, float, float]
"""A compute action with its start and end in seconds."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """``spans[rank]``: that rank's actions that compute, in order."""

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
    seconds = costs.by_op(schedule.num_stages)
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


def _per_stage(num_stages: int, name: str, value: Seconds | None) -> tuple[float, ...] | None:
    if value is None:
        return None
    if isinstance(value, int | float):
        return (float(value),) * num_stages
    if len(value) != num_stages:
        raise ScheduleError(
            f"costs.{name}",
            f"{len(value)} values for {num_stages} virtual stages",
            "give one number, or one per virtual stage",
        )
    return value
