"""Traces from records of different clocks, and to JSON and back."""

from __future__ import annotations

import json

import pytest

from dsx.errors import ScheduleError
from dsx.schedules.schedule import TRANSFERS, Action
from dsx.schedules.trace import RankTrace, Trace
from traced import BY_HAND, by_hand


def _records(ahead):
    """BY_HAND as two ranks of two machines saw it, the second's clock ``ahead``; the step began at 50 s."""
    records = []
    for rank, (row, by) in enumerate(zip(BY_HAND, (0.0, ahead), strict=True)):
        shift = 50.0 + by
        # The waits for first messages begin 4 ms before the first forward.
        early = -0.004 if rank else 0.0
        spans = [(Action.parse(a), shift + s / 1000, shift + e / 1000) for a, s, e in row]
        spans[0] = (spans[0][0], spans[0][1] + early, spans[0][2])
        records.append(
            RankTrace(
                spans=tuple(spans),
                end=shift + (0.105, 0.099)[rank],
                rounds=((shift - 0.010, shift - 0.009),),
                machine=f"machine {rank}",
                error_seconds=0.0002,
            )
        )
    return records


def test_ranks_by_one_clock():
    known = by_hand()
    trace = Trace.of(known.schedule, _records(-1234.5), step=7, device="CPU")
    for row, expected in zip(trace.spans, known.spans, strict=True):
        for (action, start, end), (same, begun, ended) in zip(row, expected, strict=True):
            assert action == same
            assert (start, end) == pytest.approx((begun, ended), abs=1e-9)
    assert trace.tail_seconds == pytest.approx((0.005, 0.020))
    assert trace.after_seconds == pytest.approx(0.005)
    # A millisecond for the round, either way; and what the device's clock adds.
    assert trace.clock_error_seconds == pytest.approx((0.0002, 0.0012))
    assert all(action.op not in TRANSFERS for row in trace.timeline.spans for action, _, _ in row)


def test_there_and_back():
    trace = by_hand()
    text = trace.to_json()
    assert Trace.from_json(text, where="x.json") == trace
    assert json.loads(text)["version"] == 1
    assert text.count("\n") == 4  # a line per rank


def _changed(**changes):
    data = json.loads(by_hand().to_json())
    data.update(changes)
    return json.dumps(data)


def _edited(edit):
    data = json.loads(by_hand().to_json())
    edit(data["ranks"][0]["actions"])
    return json.dumps(data)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "not JSON"),
        ("[1]", "not a trace"),
        ('{"format": "other"}', "not a trace"),
        (_changed(version=2), "version 2 of the format; this dsx reads version 1"),
        (_changed(placement="ring"), "damaged"),
        (_changed(ranks=[]), "damaged"),
        (_changed(ranks=[{}]), "damaged: KeyError"),
        (_changed(chunks="two"), "damaged: ValueError"),
        (_changed(chunks=2), "lacks"),
        (_changed(micro_batches=3), "lacks 0F2"),
        (_edited(lambda rows: rows.pop(2)), "lacks 0F1"),
        (_edited(lambda rows: rows.append(rows[-1])), "overlaps"),
        (_edited(lambda rows: rows[0].__setitem__(2, float("nan"))), "0F0"),
        (_edited(lambda rows: rows[0].__setitem__(2, 5.0)), "0SEND_F0"),
        (_edited(lambda rows: rows[0].__setitem__(0, "0G0")), "0G0"),
    ],
)
def test_anything_else_is_refused_with_a_reason(text, says):
    with pytest.raises(ScheduleError) as refused:
        Trace.from_json(text, where="runs/x/trace/step5.json")
    assert says in str(refused.value)
    assert str(refused.value).startswith("runs/x/trace/step5.json: ")


def test_a_row_that_did_not_run_as_scheduled_is_no_trace():
    known = by_hand()
    swapped = (known.spans[0][:-1], known.spans[1])
    with pytest.raises(ScheduleError, match=r"rank 0: it has 7 actions of 8"):
        by_hand(spans=swapped, schedule=known.schedule)
