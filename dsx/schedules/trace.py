"""A training step as it ran on every pipeline rank, by one clock, and beside its simulation.

Collectives that every rank timed tell how far the ranks' clocks are apart. No rank leaves a collective that
gathers from all before every rank has entered it. So, in true time, what one rank saw before is earlier than
what any other saw after: each round bounds each pair's offset from both sides, whatever the network does, and
the bounds of all rounds hold together.

The simulation gets its costs from the step itself: for every op and virtual stage the median over
micro-batches, for transfers the median of those that somebody was waiting for. What remains are differences
that a schedule on paper does not have: actions that take longer than usual, and gaps where everything that an
action needs was there.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from dsx.errors import ScheduleError
from dsx.schedules.schedule import TRANSFERS, Action, Op, Schedule
from dsx.schedules.simulate import Costs, Dependencies, Span, Timeline, simulate, validate

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
        rounds: The times that each rank took, of the same collectives on all.
        machines: The machine that each rank's clock belongs to, because ranks of one machine read one clock;
            empty if unknown.

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


_FORMAT, _VERSION = "dsx.trace", 1
_DIGITS = 9  # nanoseconds


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTrace:
    """One rank's step, by its own clock.

    Attributes:
        spans: Every action with its start and end in seconds, in the order in which they ran.
        end: When the whole step had ended, the optimizer's part included.
        rounds: The rounds for :func:`dsx.schedules.trace.offsets`.
        machine: The machine that the clock belongs to; empty if unknown.
        error_seconds: How far the times can be from the clock of ``rounds``: 0 unless a device took them.
    """

    spans: tuple[Span, ...]
    end: float
    rounds: Rounds
    machine: str = ""
    error_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """A training step of one pipeline.

    Attributes:
        schedule: The actions of every rank that ran, transfers included.
        spans: Every action of each rank's row with start and end, in seconds from the start of the first
            computation.
        step: Number of the step, from 1.
        tail_seconds: Time of each rank from its last action to the end of the step, for pending sends,
            reductions of gradients and the update.
        clock_error_seconds: How far each rank's times can be from rank 0's.
    """

    schedule: Schedule
    spans: tuple[tuple[Span, ...], ...]
    step: int
    tail_seconds: tuple[float, ...]
    clock_error_seconds: tuple[float, ...]
    device: str = ""

    @classmethod
    def of(cls, schedule: Schedule, records: Sequence[RankTrace], *, step: int, device: str = "") -> Trace:
        """The ranks' records by rank 0's clock.

        A wait for a first message that began before the first computation counts from that computation.
        """
        apart = offsets([record.rounds for record in records], [record.machine for record in records])
        ahead = [offset.seconds for offset in apart]
        origin = min(
            start - by
            for record, by in zip(records, ahead, strict=True)
            for action, start, _ in record.spans
            if action.op not in TRANSFERS
        )
        spans, tails = [], []
        for record, by in zip(records, ahead, strict=True):
            zero = origin + by
            row = tuple((a, max(0.0, start - zero), max(0.0, end - zero)) for a, start, end in record.spans)
            spans.append(row)
            tails.append(record.end - zero - row[-1][2])
        errors = (
            offset.error_seconds + record.error_seconds for offset, record in zip(apart, records, strict=True)
        )
        return cls(
            schedule=schedule,
            spans=tuple(spans),
            step=step,
            tail_seconds=tuple(tails),
            clock_error_seconds=tuple(errors),
            device=device,
        )

    def __post_init__(self) -> None:
        where = f"trace of step {self.step}"
        for rank, (row, spans) in enumerate(zip(self.schedule.rows, self.spans, strict=True)):
            ran = tuple(action for action, _, _ in spans)
            if ran != row:
                at = next((i for i, pair in enumerate(zip(ran, row, strict=False)) if pair[0] != pair[1]), -1)
                what = f"{ran[at]} in place of {row[at]}" if at >= 0 else f"{len(ran)} actions of {len(row)}"
                raise ScheduleError(f"{where}, rank {rank}", f"it has {what}", "record the step again")
            time = 0.0
            for action, start, end in spans:
                # Written so that it also fails on NaN; the slack is what rounding in files takes.
                if not time - 1e-8 <= start <= end < math.inf:
                    raise ScheduleError(
                        f"{where}, rank {rank}",
                        f"{action} from {start:g} to {end:g} s overlaps what came before it, at {time:g} s",
                        "record the step again",
                    )
                time = end

    @property
    def timeline(self) -> Timeline:
        return Timeline(tuple(tuple(s for s in row if s[0].op not in TRANSFERS) for row in self.spans))

    @property
    def after_seconds(self) -> float:
        """From the last computation of all to the end of the step on the last rank."""
        ends = (row[-1][2] + tail for row, tail in zip(self.spans, self.tail_seconds, strict=True))
        return max(ends) - self.timeline.seconds

    def to_json(self) -> str:
        """One JSON object, a line per rank; times in seconds."""
        schedule = self.schedule
        ranks = (
            {
                "tail_seconds": round(tail, _DIGITS),
                "clock_error_seconds": round(error, _DIGITS),
                "actions": [[str(a), round(start, _DIGITS), round(end, _DIGITS)] for a, start, end in row],
            }
            for row, tail, error in zip(self.spans, self.tail_seconds, self.clock_error_seconds, strict=True)
        )
        head = {
            "format": _FORMAT,
            "version": _VERSION,
            "step": self.step,
            "device": self.device,
            "schedule": schedule.name,
            "chunks": schedule.num_chunks,
            "micro_batches": schedule.num_micro_batches,
            "placement": schedule.placement,
        }
        opening = json.dumps(head)[:-1]
        return f'{opening}, "ranks": [\n' + ",\n".join(map(json.dumps, ranks)) + "\n]}\n"

    @classmethod
    def from_json(cls, text: str, *, where: str) -> Trace:
        """Read what :meth:`to_json` wrote; ``where`` is the name for it in errors, such as its file."""
        fix = "give a step*.json that dsx.train.trace_steps or Trace.to_json wrote"
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ScheduleError(where, f"not JSON ({error})", fix) from None
        if not isinstance(data, dict) or data.get("format") != _FORMAT:
            raise ScheduleError(where, f'not a trace: it has no "format": "{_FORMAT}"', fix)
        if data.get("version") != _VERSION:
            raise ScheduleError(
                where,
                f"version {data.get('version')!r} of the format; this dsx reads version {_VERSION}",
                "use the dsx that wrote it, or record the step again",
            )
        try:
            trace = cls(**_fields(data))
            validate(trace.schedule)
        except ScheduleError as error:
            raise ScheduleError(where, f"{error.where}: {error.what}", fix) from None
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise ScheduleError(where, f"damaged: {type(error).__name__} {error}", fix) from None
        return trace


def computation(schedule: Schedule) -> Schedule:
    """The schedule without its transfers."""
    rows = tuple(tuple(action for action in row if action.op not in TRANSFERS) for row in schedule.rows)
    return replace(schedule, rows=rows)


def _fields(data: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of :class:`Trace`; KeyError, TypeError or ValueError for a damaged file."""
    spans = tuple(
        tuple((Action.parse(name), float(start), float(end)) for name, start, end in rank["actions"])
        for rank in data["ranks"]
    ) or ((),)
    if data["placement"] not in ("loop", "v") or not all(spans):
        raise ValueError("its placement or a row of actions")
    # Each virtual stage runs each micro-batch at least once.
    if len(spans) * int(data["chunks"]) * int(data["micro_batches"]) > sum(map(len, spans)):
        raise ValueError("it has fewer actions than its chunks and micro-batches take")
    return {
        "schedule": Schedule(
            name=str(data["schedule"]),
            num_ranks=len(spans),
            num_chunks=int(data["chunks"]),
            num_micro_batches=int(data["micro_batches"]),
            rows=tuple(tuple(action for action, _, _ in row) for row in spans),
            placement=data["placement"],
        ),
        "spans": spans,
        "step": int(data["step"]),
        "tail_seconds": tuple(float(rank["tail_seconds"]) for rank in data["ranks"]),
        "clock_error_seconds": tuple(float(rank["clock_error_seconds"]) for rank in data["ranks"]),
        "device": str(data["device"]),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Executed:
    """One computation of a step, measured and simulated. All times in seconds.

    Attributes:
        ready: Measured time at which all that it needs was there: the end of the rank's action before it, or
            of what another rank sends it, plus a transfer.
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
        """Time from when it could have started to when it did; a little below 0 after a quick transfer."""
        return self.start - self.ready

    @property
    def lost(self) -> float:
        """The delay that this action added for those that wait for it: its gap and its longer duration."""
        return self.gap + self.duration_error


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A measured step and its simulation.

    Attributes:
        costs: The costs fitted from it, which the simulation uses.
        num_transfers: Number of transfers behind their median; with none, transfers are free.
        simulated: Timeline of the computations with these costs.
        ideal_seconds: Length of the simulated step if transfers were free.
    """

    trace: Trace
    costs: Costs
    num_transfers: int
    simulated: Timeline
    ideal_seconds: float
    actions: tuple[tuple[Executed, ...], ...]

    @property
    def measured(self) -> Timeline:
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

    A backward that a stage never runs costs what its others suggest: a whole one its two parts together, a
    part half of a whole one.
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
    """Times from the end of what was sent to the end of the receive, if the receive had waited before."""
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
