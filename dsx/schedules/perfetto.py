"""Timelines as a trace for ui.perfetto.dev (or chrome://tracing): the Trace Event Format, JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from dsx.schedules.schedule import TRANSFERS, Action, Schedule
from dsx.schedules.simulate import Span, Timeline
from dsx.schedules.trace import Comparison, Executed, computation
from dsx.schedules.validate import Dependencies

_MICROSECONDS, _MILLISECONDS = 1e6, 1e3

Event = dict[str, Any]


def chrome_trace(schedule: Schedule, timelines: Mapping[str, Timeline]) -> str:
    """Trace of one or more timelines of ``schedule``: a process per timeline, a thread per rank.

    Arrows lead from the action that yields an activation or a gradient to the one on another rank that uses
    it.

    Args:
        schedule: What ran.
        timelines: By name, ``simulated`` and ``measured`` say, in seconds from the start of the step.
    """
    depends = Dependencies(computation(schedule))
    events: list[Event] = []
    for process, (name, timeline) in enumerate(timelines.items()):
        events += _names(process, f"{schedule.name}, {name}", schedule.num_ranks)
        for rank, row in enumerate(timeline.spans):
            events += (_slice(schedule, process, rank, span) for span in row)
        events += _arrows(schedule, depends, process, timeline)
    return _document(events)


def comparison_trace(comparison: Comparison) -> str:
    """Trace of a measured step, transfers and the step's end included, above its simulation.

    The arguments of each measured computation say when the simulation has it, how far off that is, and what
    it waited for.
    """
    trace = comparison.trace
    schedule = computation(trace.schedule)
    depends = Dependencies(schedule)
    found = {executed.action: executed for row in comparison.actions for executed in row}
    title = f"{schedule.name}, step {trace.step}"
    events: list[Event] = [*_names(0, f"{title}, measured", schedule.num_ranks)]
    for rank, row in enumerate(trace.spans):
        for span in row:
            more = {} if span[0].op in TRANSFERS else _errors(schedule, found[span[0]])
            events.append(_slice(schedule, 0, rank, span, more))
        events.append(_tail(rank, row[-1][2], trace.tail_seconds[rank]))
    events += _arrows(schedule, depends, 0, comparison.measured)
    events += _names(1, f"{title}, simulated", schedule.num_ranks)
    for rank, row in enumerate(comparison.simulated.spans):
        events += (_slice(schedule, 1, rank, span) for span in row)
    events += _arrows(schedule, depends, 1, comparison.simulated)
    return _document(events)


def _document(events: list[Event]) -> str:
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events}) + "\n"


def _names(process: int, name: str, num_ranks: int) -> Iterator[Event]:
    yield {"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}}
    yield {"ph": "M", "name": "process_sort_index", "pid": process, "args": {"sort_index": process}}
    for rank in range(num_ranks):
        place = {"ph": "M", "pid": process, "tid": rank}
        yield {**place, "name": "thread_name", "args": {"name": f"rank {rank}"}}
        yield {**place, "name": "thread_sort_index", "args": {"sort_index": rank}}


def _slice(
    schedule: Schedule, process: int, rank: int, span: Span, more: Mapping[str, Any] | None = None
) -> Event:
    action, start, end = span
    return {
        "ph": "X",
        "name": str(action),
        "cat": action.op.value,
        "pid": process,
        "tid": rank,
        "ts": start * _MICROSECONDS,
        "dur": (end - start) * _MICROSECONDS,
        "args": {
            "stage": action.stage,
            "chunk": schedule.chunk_of(action.stage),
            "micro_batch": action.micro_batch,
            **(more or {}),
        },
    }


def _errors(schedule: Schedule, ran: Executed) -> dict[str, Any]:
    """What the simulation says of a measured action."""
    times = {
        "simulated_start_ms": ran.simulated_start,
        "simulated_duration_ms": ran.simulated_end - ran.simulated_start,
        "start_error_ms": ran.start_error,
        "duration_error_ms": ran.duration_error,
        "gap_ms": ran.gap,
        "lost_ms": ran.lost,
    }
    values: dict[str, Any] = {name: round(_MILLISECONDS * value, 6) for name, value in times.items()}
    if ran.waited_for is not None:
        values["waited_for"] = f"{ran.waited_for} on rank {schedule.rank_of(ran.waited_for.stage)}"
    if ran.held_up_by is not None:
        values["held_up_by"] = str(ran.held_up_by)
    return values


def _tail(rank: int, start: float, seconds: float) -> Event:
    place = {"ph": "X", "name": "end of step", "cat": "step", "pid": 0, "tid": rank}
    return {**place, "ts": start * _MICROSECONDS, "dur": seconds * _MICROSECONDS}


def _arrows(schedule: Schedule, depends: Dependencies, process: int, timeline: Timeline) -> Iterator[Event]:
    spans: dict[Action, Span] = {span[0]: span for row in timeline.spans for span in row}
    for number, (action, start, _) in enumerate(spans.values()):
        need = depends.on(action)
        if need is None or need not in spans:
            continue
        source, rank = schedule.rank_of(need.stage), schedule.rank_of(action.stage)
        if source == rank:
            continue
        _, began, ended = spans[need]
        # An arrow belongs to the slice around its time, so it must leave just before that slice ends.
        leaves = ended - (ended - began) * 1e-3
        ends = {"name": "transfer", "cat": "transfer", "pid": process, "id": f"{process}.{number}"}
        yield {**ends, "ph": "s", "tid": source, "ts": leaves * _MICROSECONDS}
        yield {**ends, "ph": "f", "bp": "e", "tid": rank, "ts": start * _MICROSECONDS}
