"""Timelines as a trace for ui.perfetto.dev (or chrome://tracing): the Trace Event Format, JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from dsx.plan.order import Dependencies
from dsx.plan.simulate import Span, Timeline
from dsx.spec.schedule import TRANSFERS, Action, Schedule

_MICROSECONDS = 1e6


def chrome_trace(schedule: Schedule, timelines: Mapping[str, Timeline]) -> str:
    """Trace of one or more timelines of ``schedule``: a process per timeline, a thread per rank.

    Arrows lead from the action that yields an activation or a gradient to the one on another rank that uses
    it.

    Args:
        schedule: What ran.
        timelines: By name, ``simulated`` and ``measured`` say, in seconds from the start of the step.
    """
    compute = tuple(tuple(a for a in row if a.op not in TRANSFERS) for row in schedule.rows)
    depends = Dependencies(replace(schedule, rows=compute))
    events: list[dict[str, Any]] = []
    for process, (name, timeline) in enumerate(timelines.items()):
        events += _names(process, f"{schedule.name}, {name}", schedule.num_ranks)
        for rank, row in enumerate(timeline.spans):
            events += (_slice(schedule, process, rank, span) for span in row)
        events += _arrows(schedule, depends, process, timeline)
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events}) + "\n"


def _names(process: int, name: str, num_ranks: int) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}}
    yield {"ph": "M", "name": "process_sort_index", "pid": process, "args": {"sort_index": process}}
    for rank in range(num_ranks):
        place = {"ph": "M", "pid": process, "tid": rank}
        yield {**place, "name": "thread_name", "args": {"name": f"rank {rank}"}}
        yield {**place, "name": "thread_sort_index", "args": {"sort_index": rank}}


def _slice(schedule: Schedule, process: int, rank: int, span: Span) -> dict[str, Any]:
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
        },
    }


def _arrows(
    schedule: Schedule, depends: Dependencies, process: int, timeline: Timeline
) -> Iterator[dict[str, Any]]:
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
