"""A measured step beside its simulation: what trace, picture, page, table and JSON say of it."""

from __future__ import annotations

import json
import random
import re
import xml.etree.ElementTree as ET
from collections import Counter
from html.parser import HTMLParser

import pytest

from dsx.errors import ScheduleError
from dsx.schedules.builders import build
from dsx.schedules.schedule import TRANSFERS, Action
from dsx.schedules.simulate import Costs
from dsx.schedules.tables import facts_json, step_table, summary
from dsx.schedules.timeline import comparison_page, comparison_svg, comparison_trace, milliseconds
from dsx.schedules.trace import RankTrace, Trace, compare
from traced import BY_HAND, by_hand, on_paper

SVG = "{http://www.w3.org/2000/svg}"


def _noisy(name, ranks, chunks, micro_batches):
    """A step whose actions take up to a fifth longer than on paper, in an order that still holds."""
    paper = on_paper(
        build(name, ranks, chunks, micro_batches), Costs(forward_seconds=0.01, backward_seconds=0.02)
    )
    draw = random.Random(0)
    slow = 1.2  # everything later by one factor keeps what needs what; each action may then end earlier
    spans = tuple(
        tuple((a, s * slow, s * slow + (e - s) * draw.uniform(1.0, slow)) for a, s, e in row)
        for row in paper.spans
    )
    return Trace(
        schedule=paper.schedule,
        spans=spans,
        step=5,
        tail_seconds=(0.004,) * ranks,
        clock_error_seconds=(0.0,) * ranks,
        device="CPU",
    )


TRACES = [by_hand(), _noisy("interleaved_zb", 4, 2, 8), _noisy("zbv", 2, 2, 4), _noisy("1f1b", 1, 1, 2)]


@pytest.mark.parametrize("trace", TRACES, ids=lambda trace: f"{trace.schedule.name}-{len(trace.spans)}")
def test_one_trace_with_measured_and_simulated_rows(trace):
    comparison = compare(trace)
    events = json.loads(comparison_trace(comparison))["traceEvents"]
    names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    title = f"{trace.schedule.name}, step {trace.step}"
    assert names == [f"{title}, measured", f"{title}, simulated"]
    threads = Counter(e["pid"] for e in events if e["name"] == "thread_name")
    assert threads == {0: len(trace.spans), 1: len(trace.spans)}
    simulated = {a: (s, e) for row in comparison.simulated.spans for a, s, e in row}
    slices = [e for e in events if e["ph"] == "X"]
    for rank, row in enumerate(trace.spans):
        *mine, last = [e for e in slices if e["pid"] == 0 and e["tid"] == rank]
        assert [e["name"] for e in mine] == [str(action) for action, _, _ in row]  # transfers too, once each
        assert (last["name"], last["dur"]) == ("end of step", pytest.approx(1e6 * trace.tail_seconds[rank]))
        for e, (action, start, end) in zip(mine, row, strict=True):
            assert (e["ts"], e["ts"] + e["dur"]) == pytest.approx((1e6 * start, 1e6 * end))
            if action not in simulated:
                assert "simulated_start_ms" not in e["args"]
                continue
            began, ended = simulated[action]
            assert e["args"]["simulated_start_ms"] == pytest.approx(1e3 * began, abs=1e-5)
            assert e["args"]["simulated_duration_ms"] == pytest.approx(1e3 * (ended - began), abs=1e-5)
            assert e["args"]["start_error_ms"] == pytest.approx(1e3 * (start - began), abs=1e-5)
        on_paper = [e["name"] for e in slices if e["pid"] == 1 and e["tid"] == rank]
        assert on_paper == [str(a) for a, _, _ in comparison.simulated.spans[rank]]
    arrows = Counter((e["pid"], e["ph"]) for e in events if e["ph"] in "sf")
    sends = sum(a.op.startswith("SEND") for row in trace.schedule.rows for a in row)
    assert arrows == ({(p, ph): sends for p in (0, 1) for ph in "sf"} if sends else {})


@pytest.mark.parametrize("trace", TRACES, ids=lambda trace: f"{trace.schedule.name}-{len(trace.spans)}")
def test_measured_row_above_simulated_row(trace):
    comparison = compare(trace)
    root = ET.fromstring(comparison_svg(comparison))
    lanes: dict[float, list[tuple[float, float, str]]] = {}
    boxes = [group for group in root.iter(f"{SVG}g") if group.get("data-m")]
    for group in boxes:
        rect = group.find(f"{SVG}rect")
        left, width, top = (float(rect.get(key)) for key in ("x", "width", "y"))
        name = group.find(f"{SVG}title").text.split(":")[0]
        lanes.setdefault(top, []).append((left, width, name))
    tops = sorted(lanes)
    assert len(tops) == 2 * len(trace.spans)
    seconds = max(comparison.measured.seconds, comparison.simulated.seconds)
    frames = [float(r.get("width")) for r in root.findall(f"{SVG}rect") if r.get("fill") == "url(#idle)"]
    scale = max(frames) / seconds
    origin = min(left for lane in lanes.values() for left, _, _ in lane)
    for i, row in enumerate(zip(comparison.measured.spans, comparison.simulated.spans, strict=True)):
        for top, spans in zip(tops[2 * i : 2 * i + 2], row, strict=True):
            assert [name for _, _, name in lanes[top]] == [str(a) for a, _, _ in spans]
            for (left, width, _), (_, start, end) in zip(lanes[top], spans, strict=True):
                assert left - origin == pytest.approx(start * scale, abs=0.1)
                assert 0.88 * (end - start) * scale <= width <= (end - start) * scale + 0.01
    texts = ["".join(text.itertext()) for text in root.iter(f"{SVG}text")]
    assert texts[0].endswith(f"; step {trace.step} on CPU")
    assert f"simulated {100 * comparison.simulated.bubble:.3g}%" in texts[1]
    assert f"step: {milliseconds(comparison.measured.seconds)}, simulated " in texts[1]
    assert texts.count("measured") == texts.count("simulated") == len(trace.spans)
    assert "ms" in texts
    rows = Counter(group.get("class") for group in root.findall(f"{SVG}g"))
    assert rows == {"measured": len(trace.spans), "simulated": len(trace.spans)}


class _Page(HTMLParser):
    def __init__(self):
        super().__init__()
        self.links, self.choices = [], []

    def handle_starttag(self, tag, attrs):
        self.links += [value for name, value in attrs if name in ("src", "href")]
        self.choices += [dict(attrs)["value"]] if tag == "input" else []


def test_the_page_stands_alone_and_says_each_error():
    text = comparison_page(compare(by_hand()))
    page = _Page()
    page.feed(text)
    assert page.links == []
    assert page.choices == ["measured", "simulated"]
    assert text.startswith("<!doctype html>")
    tip = "1B1: 54.00 to 79.00 ms; simulated 53.50 to 76.00 ms (start +0.50, duration +2.50 ms)"
    assert text.count(tip) == 2  # on both rows


def test_the_table_of_the_step_by_hand():
    comparison = compare(by_hand())
    text = step_table(comparison, worst=2)
    assert text.startswith("1f1b: 2 ranks, 2 micro-batches; step 7 on CPU\n")
    lines = {re.split(r"  +", line.strip())[0]: line for line in text.splitlines() if line.strip()}
    assert "100.0 ms, simulated 97.00 ms (+3.1%)" in lines["step"]
    assert "60.0% of the ideal time, simulated 55.2%" in lines["bubble"]
    assert "5.000 ms to the end of the step" in lines["after it"]
    assert "1.000 ms (median of 3 " in lines["transfers"]
    assert "agree to 0.100 ms" in lines["clocks"]
    rows = [re.split(r"  +", line.strip()) for line in text.splitlines()]
    assert ["1", "1", "10.00 ms", "22.50 ms"] in rows
    worst = [row for row in rows if row[:2] == ["1", "1B1"]]
    assert worst == [["1", "1B1", "5.500 ms", "3.000 ms", "2.500 ms", "1F1 on rank 1"]]
    assert len(rows) - rows.index(["rank", "action", "lost", "late", "longer", "was waiting for"]) == 3
    assert ("lost most", "5.500 ms by 1B1 on rank 1") in summary(comparison)


def test_json_says_the_same():
    comparison = compare(by_hand())
    data = json.loads(facts_json(comparison))
    assert data["excess"] == pytest.approx(3 / 97)
    assert data["costs_seconds"] == {"F": pytest.approx([0.01, 0.01]), "B": pytest.approx([0.02, 0.0225])}
    (late,) = (row for row in data["actions"] if row["action"] == "1B1")
    assert (late["lost"], late["waited_for"]) == (pytest.approx(0.0055), "1F1")
    assert len(data["actions"]) == 8


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
