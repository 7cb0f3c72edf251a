"""Traces made by hand. Not a test."""

from __future__ import annotations

from dsx.schedules.schedule import TRANSFERS, Action, Op, Schedule, lower
from dsx.schedules.simulate import Costs, Dependencies, simulate
from dsx.schedules.trace import Trace

# 1F1B on two ranks with two micro-batches, in milliseconds. Forwards 10, backwards 20, transfers 1; but 1B1
# starts 3 late and takes 5 longer. So the last backward of rank 0 starts at 80 instead of 72.
BY_HAND = (
    (
        ("0F0", 0, 10),
        ("0SEND_F0", 10, 10),
        ("0F1", 10, 20),
        ("0SEND_F1", 20, 20),
        ("0RECV_B0", 20, 42),
        ("0B0", 42, 62),
        ("0RECV_B1", 62, 80),
        ("0B1", 80, 100),
    ),
    (
        ("1RECV_F0", 0, 11),
        ("1F0", 11, 21),
        ("1B0", 21, 41),
        ("1SEND_B0", 41, 41),
        ("1RECV_F1", 41, 41),
        ("1F1", 41, 51),
        ("1B1", 54, 79),
        ("1SEND_B1", 79, 79),
    ),
)


def by_hand(rows=BY_HAND, **changes) -> Trace:
    spans = tuple(tuple((Action.parse(a), s / 1000, e / 1000) for a, s, e in row) for row in rows)
    actions = tuple(tuple(a for a, _, _ in row) for row in spans)
    known = {
        "schedule": Schedule("1f1b", 2, 1, 2, actions),
        "spans": spans,
        "step": 7,
        "tail_seconds": (0.005, 0.020),
        "clock_error_seconds": (0.0, 0.0001),
        "device": "CPU",
    }
    return Trace(**{**known, **changes})


def on_paper(schedule: Schedule, costs: Costs) -> Trace:
    """A step that ran exactly as the simulation says, with its transfers."""
    lowered = lower(schedule)
    depends = Dependencies(lowered)
    when = {action: (start, end) for row in simulate(schedule, costs).spans for action, start, end in row}
    rows = []
    for row in lowered.rows:
        now, spans = 0.0, []
        for action in row:
            if action.op not in TRANSFERS:
                start, now = when[action]
            elif action.op in (Op.SEND_F, Op.SEND_B):
                start = now
            else:
                made = depends.on(depends.on(action))
                start, now = now, max(now, when[made][1] + costs.transfer_seconds)
            spans.append((action, start, now))
        rows.append(tuple(spans))
    zeros = (0.0,) * schedule.num_ranks
    return Trace(schedule=lowered, spans=tuple(rows), step=1, tail_seconds=zeros, clock_error_seconds=zeros)
