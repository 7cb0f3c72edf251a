"""A measured step beside its simulation: what of the difference each action caused.

The simulation gets its costs from the step itself: for every op and virtual stage the median over
micro-batches, for transfers the median of those that somebody was waiting for. So what remains is what a
schedule on paper does not have: actions that take longer than usual, and gaps where everything that an action
needs was there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from statistics import median

from dsx.plan.order import Dependencies
from dsx.plan.simulate import Costs, Span, Timeline, simulate
from dsx.plan.trace import Trace, computation
from dsx.spec.schedule import TRANSFERS, Action, Op, Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class Executed:
    """One computation of a step, measured and simulated. All times in seconds.

    Attributes:
        rank: Pipeline rank.
        action: What ran.
        start: Measured.
        end: Measured.
        simulated_start: In the simulation of the whole step.
        simulated_end: In the simulation of the whole step.
        ready: When, as measured, all was there that it needs: the end of the action before it on the rank,
            or of what another rank sends it, plus a transfer.
        waited_for: Whichever of the two was last; None for a first action.
        held_up_by: The transfer on its own rank that took most of the time from ``ready`` to ``start``.
    """

    rank: int
    action: Action
    start: float
    end: float
    simulated_start: float
    simulated_end: float
    ready: float
    waited_for: Action | None
    held_up_by: Action | None

    @property
    def start_error(self) -> float:
        """Measured less simulated start."""
        return self.start - self.simulated_start

    @property
    def duration_error(self) -> float:
        """Measured less simulated duration."""
        return (self.end - self.start) - (self.simulated_end - self.simulated_start)

    @property
    def gap(self) -> float:
        """From when it could have started to when it did. A little below 0 after a quick transfer."""
        return self.start - self.ready

    @property
    def lost(self) -> float:
        """What this action added to the delay of those that wait for it: the gap and its longer duration."""
        return self.gap + self.duration_error


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A measured step and its simulation.

    Attributes:
        trace: The step.
        costs: Fitted from it; the simulation's.
        num_transfers: How many transfers their median comes from; with none, transfers are free.
        simulated: Timeline of the computations with these costs.
        ideal_seconds: Of the simulated step if transfers were free.
        actions: Per rank, its computations in order.
    """

    trace: Trace
    costs: Costs
    num_transfers: int
    simulated: Timeline
    ideal_seconds: float
    actions: tuple[tuple[Executed, ...], ...]

    @property
    def measured(self) -> Timeline:
        """The computations as they ran."""
        return self.trace.timeline

    @property
    def excess(self) -> float:
        """Measured over simulated step, less 1."""
        return self.measured.seconds / self.simulated.seconds - 1.0 if self.simulated.seconds else 0.0

    def worst(self, count: int = 5) -> tuple[Executed, ...]:
        """The actions that lost most, most first."""
        every = (action for row in self.actions for action in row)
        return tuple(sorted(every, key=lambda action: action.lost, reverse=True)[:count])


def compare(trace: Trace) -> Comparison:
    """Simulate a measured step with its own costs and set the two side by side."""
    schedule, measured = computation(trace.schedule), trace.timeline
    transfers = list(_transfer_seconds(trace))
    wire = max(0.0, median(transfers)) if transfers else 0.0
    costs = replace(fit(schedule, measured), transfer_seconds=wire)
    simulated = simulate(schedule, costs)
    return Comparison(
        trace=trace,
        costs=costs,
        num_transfers=len(transfers),
        simulated=simulated,
        ideal_seconds=simulate(schedule, replace(costs, transfer_seconds=0.0)).seconds,
        actions=_executed(trace, simulated, wire),
    )


def fit(schedule: Schedule, measured: Timeline) -> Costs:
    """Costs of ``measured``: per op and virtual stage the median of its durations.

    What a stage never runs costs what its other backwards suggest: a whole one its two parts together, a part
    half of a whole one.
    """
    taken: dict[tuple[Op, int], list[float]] = {}
    for row in measured.spans:
        for action, start, end in row:
            taken.setdefault((action.op, action.stage), []).append(end - start)
    usual = {key: median(durations) for key, durations in taken.items()}
    stages = range(schedule.num_stages)
    whole = tuple(_whole(usual, stage) for stage in stages)
    return Costs(
        forward_seconds=tuple(usual[Op.FORWARD, stage] for stage in stages),
        backward_seconds=whole,
        backward_input_seconds=tuple(
            usual.get((Op.BACKWARD_INPUT, stage), whole[stage] / 2) for stage in stages
        ),
        backward_weight_seconds=tuple(
            usual.get((Op.BACKWARD_WEIGHT, stage), whole[stage] / 2) for stage in stages
        ),
    )


def _whole(usual: Mapping[tuple[Op, int], float], stage: int) -> float:
    parts = (usual.get((op, stage), 0.0) for op in (Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT))
    return usual.get((Op.BACKWARD, stage), sum(parts))


def _transfer_seconds(trace: Trace) -> Iterator[float]:
    """From the end of what was sent to the end of the receive, where that had begun to wait before."""
    depends = Dependencies(trace.schedule)
    spans = {span[0]: span for row in trace.spans for span in row}
    for action, start, end in spans.values():
        if action.op in (Op.RECV_F, Op.RECV_B):
            send = depends.on(action)
            made = None if send is None else depends.on(send)
            if made is not None and start <= spans[made][2]:
                yield end - spans[made][2]


def _executed(trace: Trace, simulated: Timeline, wire: float) -> tuple[tuple[Executed, ...], ...]:
    schedule = computation(trace.schedule)
    depends = Dependencies(schedule)
    ends = {action: end for row in trace.spans for action, _, end in row}
    rows = []
    for rank, (spans, planned) in enumerate(zip(trace.spans, simulated.spans, strict=True)):
        on_paper = {action: (start, end) for action, start, end in planned}
        row: list[Executed] = []
        moved: list[Span] = []  # transfers since the last computation
        before: Action | None = None
        for action, start, end in spans:
            if action.op in TRANSFERS:
                moved.append((action, start, end))
                continue
            need = depends.on(action)
            ready = ends[before] if before else 0.0
            waited_for = before
            if need is not None and schedule.rank_of(need.stage) != rank and ends[need] + wire > ready:
                ready, waited_for = ends[need] + wire, need
            row.append(
                Executed(
                    rank=rank,
                    action=action,
                    start=start,
                    end=end,
                    simulated_start=on_paper[action][0],
                    simulated_end=on_paper[action][1],
                    ready=ready,
                    waited_for=waited_for,
                    held_up_by=_longest(moved, ready, start),
                )
            )
            moved, before = [], action
        rows.append(tuple(row))
    return tuple(rows)


def _longest(moved: list[Span], since: float, until: float) -> Action | None:
    """The transfer that took most of a gap of a microsecond or more, if any took half of it."""
    parts = [(min(end, until) - max(start, since), action) for action, start, end in moved]
    part, action = max(parts, key=lambda pair: pair[0], default=(0.0, None))
    return action if part >= max((until - since) / 2, 1e-6) else None
