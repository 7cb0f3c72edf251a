"""Pictures and traces of timelines: every action once, where and as long as the timeline says."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from dsx.schedules.builders import build, forward_only
from dsx.schedules.schedule import Op, lower
from dsx.schedules.simulate import Costs, simulate
from dsx.schedules.tables import schedule_table
from dsx.schedules.timeline import chrome_trace, html, svg

SVG = "{http://www.w3.org/2000/svg}"
SCHEDULES = [
    build("1f1b", 4, 1, 8),
    build("interleaved_zb", 4, 2, 9),
    build("dualpipev", 3, 2, 12),
    build("looped_bfs", 1, 3, 2),
]
COSTS = Costs(forward_seconds=0.02, backward_seconds=0.05, transfer_seconds=0.003)


def _boxes(text):
    """(class, micro-batch, left, width, top) of every action drawn."""
    for group in ET.fromstring(text).iter(f"{SVG}g"):
        rect = group.find(f"{SVG}rect")
        left, width, top = (float(rect.get(key)) for key in ("x", "width", "y"))
        yield group.get("class"), int(group.get("data-m")), left, width, top


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.name)
@pytest.mark.parametrize("costs", [Costs(), COSTS], ids=["units", "seconds"])
def test_every_action_is_drawn_where_and_as_long_as_it_runs(schedule, costs):
    timeline = simulate(schedule, costs)
    boxes = [*_boxes(svg(schedule, timeline))]
    tops = sorted({top for *_, top in boxes})
    assert len(tops) == schedule.num_ranks
    origin = min(left for _, _, left, _, _ in boxes)
    actions = [(rank, span) for rank, row in enumerate(timeline.spans) for span in row]
    assert len(boxes) == len(actions)
    # Pixels per second, from the action that starts last.
    latest = max(start for _, (_, start, _) in actions)
    scale = (max(left for _, _, left, _, _ in boxes) - origin) / latest
    for (rank, (action, start, end)), (style, micro_batch, left, width, top) in zip(
        actions, boxes, strict=True
    ):
        assert style == f"{action.op}{schedule.chunk_of(action.stage)}"
        assert (micro_batch, top) == (action.micro_batch, tops[rank])
        assert left - origin == pytest.approx(start * scale, abs=0.02)
        assert 0.89 * (end - start) * scale <= width <= (end - start) * scale


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.name)
def test_ops_and_chunks_have_colours_of_their_own_and_numbers_that_contrast(schedule):
    text = svg(schedule, simulate(schedule))
    fills = dict(re.findall(r"\.(\w\d+) rect\{fill:(#\w{6})\}", text))
    inks = dict(re.findall(r"\.(\w\d+) text\{fill:(#\w{6})\}", text))
    used = {f"{a.op}{schedule.chunk_of(a.stage)}" for row in schedule.rows for a in row}
    assert used == set(fills)
    assert len(set(fills.values())) == len(fills)
    for style, fill in fills.items():
        assert _contrast(fill, inks[style]) > 2.2  # WCAG's formula; numbers are bold and large


def _contrast(first, second):
    def luminance(colour):
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(first), luminance(second)))
    return (high + 0.05) / (low + 0.05)


def test_title_bubble_peak_and_legend():
    schedule = build("interleaved_zb", 4, 2, 8)
    root = ET.fromstring(svg(schedule, simulate(schedule), unit="forwards"))
    texts = ["".join(text.itertext()) for text in root.iter(f"{SVG}text")]
    assert texts[0] == "interleaved_zb: 4 ranks, 2 chunks, 8 micro-batches"
    assert texts[1].startswith("bubble 6.25% of the ideal time")
    assert "step: 51 forwards of a chunk; peak activations: 4 micro-batches on every rank" in texts[1]
    for word in ("forward", "backward: input gradient", "backward: weight gradients", "rank 3", "forwards"):
        assert word in texts
    assert any("chunk 0 to 1" in text for text in texts)
    assert "<evil>" in "".join(ET.fromstring(svg(schedule, simulate(schedule), title="<evil>")).itertext())


def test_the_peak_of_each_rank_is_said_where_they_differ():
    """Of 1F1B, rank r of p has p - r micro-batches in flight: Narayanan et al. 2021, section 2.2."""

    def heading(*sizes):
        schedule = build(*sizes)
        texts = ET.fromstring(svg(schedule, simulate(schedule))).iter(f"{SVG}text")
        return ["".join(text.itertext()) for text in texts][1]

    assert "peak activations: 4, 3, 2, 1 micro-batches on ranks 0 to 3" in heading("1f1b", 4, 1, 8)
    assert "peak activations: 64 micro-batches on rank 0 to 1 on rank 63" in heading("1f1b", 64, 1, 64)
    assert "peak activations: 2000 micro-batches on every rank" in heading("gpipe", 2, 1, 2000)
    assert heading("1f1b", 1, 1, 1).endswith("peak activations: 1 micro-batch")


def test_a_picture_is_as_wide_as_a_usual_window_unless_its_numbers_need_more():
    for sizes in (("1f1b", 1, 1, 1), ("1f1b", 4, 1, 8), ("interleaved_zb", 4, 2, 8), ("zbv", 8, 2, 8)):
        schedule = build(*sizes)
        assert float(ET.fromstring(svg(schedule, simulate(schedule))).get("width")) <= 1280


@pytest.mark.parametrize("sizes", [("1f1b", 8, 1, 128), ("gpipe", 2, 1, 1000)])
def test_a_huge_schedule_has_a_heading_that_fits_and_a_legend_of_what_is_drawn(sizes):
    schedule = build(*sizes)
    root = ET.fromstring(svg(schedule, simulate(schedule), title="a very long title " * 99))
    texts = list(root.iter(f"{SVG}text"))
    assert len(texts[0].text) < 200
    named = ET.fromstring(svg(replace(schedule, name="long " * 99), simulate(schedule)))
    assert next(named.iter(f"{SVG}text")).text.endswith(f"{sizes[1]} ranks, {sizes[3]} micro-batches")
    drawn = any(group.find(f"{SVG}text") is not None for group in root.iter(f"{SVG}g"))
    assert drawn == (sizes[0] == "1f1b")
    assert drawn == any("number: micro-batch" in (text.text or "") for text in texts)


def test_a_large_schedule_keeps_its_proportions_and_drops_numbers_that_nobody_can_read():
    schedule = build("interleaved", 4, 2, 512)
    root = ET.fromstring(svg(schedule, simulate(schedule)))
    assert float(root.get("width")) < 8000
    assert 2 < float(root.get("width")) / float(root.get("height")) < 6
    assert not any(group.find(f"{SVG}text") is not None for group in root.iter(f"{SVG}g"))
    assert sum(1 for _ in root.iter(f"{SVG}g")) == 2 * 4 * 2 * 512


class _Page(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.links = Counter(), []

    def handle_starttag(self, tag, attrs):
        self.tags[tag] += 1
        self.links += [value for name, value in attrs if name in ("src", "href")]


def test_the_page_stands_alone():
    schedule = build("zbv", 4, 2, 8)
    text = html(schedule, simulate(schedule), title="a & b")
    page = _Page()
    page.feed(text)
    assert page.links == []
    assert (page.tags["svg"], page.tags["script"], page.tags["g"]) == (1, 1, 3 * 4 * 2 * 8)
    assert "max-width: 100%" in text  # it fits the window, whatever its own width is
    assert "<title>a &amp; b</title>" in text
    assert text.count("http") == 1  # the name of SVG's namespace


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.name)
def test_trace_events(schedule):
    """docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU: the Trace Event Format."""
    simulated, measured = simulate(schedule), simulate(schedule, COSTS)
    # The trace of a lowered schedule has the same arrows: transfers are what they stand for.
    text = chrome_trace(schedule, {"simulated": simulated, "measured": measured})
    assert text == chrome_trace(lower(schedule), {"simulated": simulated, "measured": measured})
    events = json.loads(text)["traceEvents"]
    names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert names == [f"{schedule.name}, simulated", f"{schedule.name}, measured"]
    for process, timeline in enumerate((simulated, measured)):
        slices = [e for e in events if e["ph"] == "X" and e["pid"] == process]
        expected = [(rank, *span) for rank, row in enumerate(timeline.spans) for span in row]
        assert [(e["tid"], e["name"]) for e in slices] == [(rank, str(a)) for rank, a, _, _ in expected]
        for e, (_, _, start, end) in zip(slices, expected, strict=True):
            assert (e["ts"], e["ts"] + e["dur"]) == pytest.approx((start * 1e6, end * 1e6))
        flows = {"s": {}, "f": {}}
        for e in events:
            if e["ph"] in flows and e["pid"] == process:
                flows[e["ph"]][e["id"]] = e
        sends = sum(a.op in (Op.SEND_F, Op.SEND_B) for row in lower(schedule).rows for a in row)
        assert len(flows["s"]) == len(flows["f"]) == sends
        for number, leaves in flows["s"].items():
            arrives = flows["f"][number]
            assert leaves["ts"] < arrives["ts"]
            assert leaves["tid"] != arrives["tid"]
            assert any(_inside(leaves, e) for e in slices)
            assert any(_inside(arrives, e) for e in slices)


def _inside(flow, event):
    return flow["tid"] == event["tid"] and event["ts"] <= flow["ts"] <= event["ts"] + event["dur"]


BY_HAND = """\
        0     2     4     6     8     10
rank 0  F0 F1 F2 .  .  .  B0 -- B1 -- B2 --
rank 1  .  F0 F1 F2 B0 -- B1 -- B2 -- .  .

F1: forward of micro-batch 1, B1: its backward, . idle; one column is the time of one forward
"""


def test_a_drawing_by_hand():
    assert schedule_table(build("gpipe", 2, 1, 3)) == BY_HAND


def _rows(text: str, num_ranks: int) -> list[list[str]]:
    """Cells of every rank, panels put together again."""
    rows: list[list[str]] = [[] for _ in range(num_ranks)]
    for rank, cells in re.findall(r"^rank (\d+) +(.*)$", text, re.MULTILINE):
        rows[int(rank)] += cells.split()
    return rows


@pytest.mark.parametrize("width", [30, 80, 10_000])
@pytest.mark.parametrize(
    "schedule",
    [
        build("1f1b", 4, 1, 8),
        build("interleaved", 4, 2, 9),
        build("interleaved", 1, 3, 2),
        forward_only(3, 2, 4),
    ],
)
def test_every_action_and_every_idle_column_is_drawn(schedule, width):
    timeline = simulate(schedule)
    text = schedule_table(schedule, width=width)
    lines = text.splitlines()[:-1]  # the last one is the legend
    assert max(map(len, lines)) <= width
    for rank, cells in enumerate(_rows(text, schedule.num_ranks)):
        assert len(cells) == timeline.seconds
        for action, start, end in timeline.spans[rank]:
            label = str(action) if schedule.num_chunks > 1 else f"{action.op}{action.micro_batch}"
            assert cells[int(start)] == label
            assert all(set(cell) == {"-"} for cell in cells[int(start) + 1 : int(end)])
        idle = timeline.seconds - timeline.busy_seconds[rank]
        assert cells.count(".") == idle


def test_measured_times_choose_the_column():
    schedule = build("1f1b", 2, 1, 2)
    costs = Costs(forward_seconds=(0.5, 1.0), backward_seconds=1.5, transfer_seconds=0.25)
    text = schedule_table(schedule, simulate(schedule, costs))
    assert "one column is 0.5 s" in text
    assert _rows(text, 2)[0][:2] == ["F0", "F1"]
    # Rank 1: half a column after the arrival at 0.75 s rounds up to column 2; F and B last 2 and 3 columns.
    assert _rows(text, 2)[1][:7] == [".", ".", "F0", "--", "B0", "--", "--"]


def test_a_tiny_action_among_long_ones_does_not_flood_the_terminal():
    schedule = build("1f1b", 2, 1, 2)
    timeline = simulate(schedule, Costs(forward_seconds=(1e-6, 100.0)))
    assert len(_rows(schedule_table(schedule, timeline), 2)[1]) <= 4096
