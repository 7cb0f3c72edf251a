"""The memory picture: its scale and unit are those of what the ranks hold, whatever a GPU has."""

from __future__ import annotations

import pytest

from dsx.memory.estimate import Estimate, Phase, Role, RunMemory
from dsx.memory.ledger import Label
from dsx.memory.table import draw

pytest.importorskip("matplotlib")
KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
TITLE = "a family with a long name, 1.00B parameters on 8 ranks: " + "tensor 1 x pipeline 2 x data 4, " * 9


def _held(num_ranks, num_bytes):
    lines = (
        (Label("parameters", "w", "", ""), num_bytes // 2),
        (Label("logits", "l", "", ""), num_bytes // 2),
    )
    phases = tuple(Phase(name=f"step {step}", peak_bytes=num_bytes, lines=lines, place="") for step in (1, 2))
    return RunMemory(
        roles=tuple(
            Role(pp_rank=rank, ranks=(rank,), estimate=Estimate(rank=rank, phases=phases, steady_bytes=0))
            for rank in range(num_ranks)
        )
    )


@pytest.mark.parametrize(
    ("num_bytes", "unit", "value"), [(12 * KIB, "KiB", 12), (12 * MIB, "MiB", 12), (3 * GIB, "GiB", 3)]
)
@pytest.mark.parametrize("num_ranks", [1, 2, 64])
@pytest.mark.parametrize("capacity", [None, 80 * GIB, 10**15])
def test_bars_fill_the_picture(num_bytes, unit, value, num_ranks, capacity):
    figure = draw(_held(num_ranks, num_bytes), title=TITLE, capacity_bytes=capacity)
    (axes,) = figure.axes
    assert axes.get_ylabel() == f"{unit} per rank"
    assert value < axes.get_ylim()[1] < 1.5 * value
    said = [text.get_text() for text in axes.texts if "usable" in text.get_text()]
    assert len(said) == (capacity is not None)
    assert all("above this scale" in text for text in said)
    assert figure.get_figwidth() * 96 <= 1280  # pixels of an SVG's inch
    figure.canvas.draw()
    edge = figure.bbox.width
    titles = (axes.title, axes._left_title)
    assert max(title.get_window_extent().x1 for title in titles) <= edge
    if num_ranks == 64:
        low, high = axes.get_xlim()
        assert all(tick == int(tick) for tick in axes.get_xticks() if low <= tick <= high)
        assert high < 64


@pytest.mark.parametrize("capacity", [2 * GIB, 4 * GIB, 8 * GIB])
def test_a_limit_that_is_near_is_a_line_in_the_unit_of_the_bars(capacity):
    figure = draw(_held(2, 3 * GIB), title="t", capacity_bytes=capacity)
    (axes,) = figure.axes
    assert [line.get_ydata()[0] for line in axes.lines] == [capacity / GIB]
    assert axes.get_ylim()[1] > max(3, capacity / GIB)
