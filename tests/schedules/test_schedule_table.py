"""Drawings of schedules: every action is drawn once, where and as long as the timeline says."""

from __future__ import annotations

import re

import pytest

from dsx.schedules.builders import build, forward_only
from dsx.schedules.simulate import Costs, simulate
from dsx.schedules.tables import schedule_table

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
