"""A picture of what saves and failures leave of the time: over the interval between saves, over spare nodes.

It goes by what :func:`dsx.planner.what_is_left.time_left` found, and simulates the same failures.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dsx.errors import ConfigError, no_matplotlib
from dsx.planner.goodput import PARTS, Hazards, Rung, SaveCost, simulate
from dsx.schedules.timeline import FAINT, GRID, INK
from dsx.terminal import seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LOSSES = {
    "saves": ("#0072B2", "saves stop training"),
    "again": ("#D55E00", "trained again"),
    "down": ("#CC79A7", "noticing, starting"),
    "waiting": ("#E69F00", "waiting for repairs"),
    "slower": ("#56B4E9", "a smaller layout"),
    "idle": ("#BBBBBB", "spare nodes, idle"),
}
_USEFUL = "#009E73"
_REACH, _POINTS, _MOST_BARS = 16.0, 17, 6
_SEEN = 0.05  # percent: less is no colour
_TITLE: dict[str, Any] = {"loc": "left", "fontsize": "medium", "color": INK}
_TICKS = (1, 5, 15, 60, 300, 900, 3600, 4 * 3600, 86_400, 7 * 86_400)


def draw(found: Mapping[str, Any], title: str) -> Figure:
    """The picture as a matplotlib figure.

    Raises:
        ConfigError: Nothing fails, or matplotlib is missing.
    """
    if found["mean_seconds_to_failure"] is None:
        raise ConfigError("--output", "nothing fails, so that there is nothing to draw", "give failure rates")
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise no_matplotlib("dsx plan --goodput") from None
    alone = found["islands"] == 1  # islands lose what no round has had, however often they save
    figure = Figure(figsize=(10.5 if alone else 7.0, 4.8), layout="constrained")
    grid = figure.subplots(1, 2 if alone else 1, squeeze=False, width_ratios=[3, 2] if alone else None)[0]
    if alone:
        _over_intervals(grid[0], found)
    _over_spares(grid[-1], found)
    for axes in grid:
        axes.grid(visible=True, axis="y", color=GRID, linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(color=FAINT)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g} %")
    handles = {
        label: each for axes in grid for each, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(
        handles.values(), handles.keys(), loc="outside lower center", ncols=4 if alone else 3, frameon=False
    )
    figure.suptitle(title, x=0.01, ha="left", color=INK, fontsize="medium", fontweight="bold")
    return figure


def _simulated(found: Mapping[str, Any], spares: int, interval: float, *, shrinks: bool) -> dict[str, float]:
    """Percents of the time of all nodes, the spare ones among them."""
    known = {key: each["value"] for key, each in found["figures"].items()}
    nodes, smaller = found["nodes"], found["smaller_layouts"] if shrinks else ()
    hazards = Hazards(
        rungs=(Rung(nodes), *(Rung(**rung) for rung in smaller)),
        failures_per_second=1 / found["mean_seconds_to_failure"],
        start_seconds=found["down_seconds"] - known["notice_seconds"],
        repair_seconds=3600 * known["repair_hours"],
        spares=spares,
        **{key: known[key] for key in ("notice_seconds", "other_layout_seconds", "lost_share")},
    )
    saving, pause = SaveCost(found["pause_seconds"], found["write_seconds"]), found["pause_seconds"]
    if found["islands"] > 1:
        saving = SaveCost(pause * interval / (found["save_every_steps"] * found["step_seconds"]))
    parts = simulate(hazards, saving, interval, days=known["days"])
    share = 100 * nodes / (nodes + spares)
    return {name: share * parts[name] for name in PARTS} | {"idle": 100 - share}


def _over_intervals(axes: Axes, found: Mapping[str, Any]) -> None:
    """Losses, one on the other, over the training between two saves, as the best answer has it else."""
    step, every = found["step_seconds"], found["interval_seconds"]
    spares = found["spare_nodes"] * (found["best"] == "spare nodes")
    shrinks = found["best"].startswith("shrink")
    ends = max(step, every / _REACH), every * _REACH
    intervals = [ends[0] * (ends[1] / ends[0]) ** (place / (_POINTS - 1)) for place in range(_POINTS)]
    all_parts = [_simulated(found, spares, each, shrinks=shrinks) for each in intervals]
    useful = [parts["goodput"] for parts in all_parts]
    floor = list(useful)
    for name in _LOSSES:
        top = [low + parts[name] for low, parts in zip(floor, all_parts, strict=True)]
        if max(parts[name] for parts in all_parts) > _SEEN:
            axes.fill_between(
                intervals, floor, top, color=_LOSSES[name][0], label=_LOSSES[name][1], linewidth=0
            )
        floor = top
    axes.plot(intervals, useful, color=_USEFUL, linewidth=2.4, marker=".", label="useful")
    low, high = (steps * step for steps in found["as_good_steps"])
    axes.axvspan(low, high, color=INK, alpha=0.08, linewidth=0)
    bottom = max(0.0, min(useful) - 0.25 * (100 - min(useful)))
    for name, stroke, align in (("young", "--", "left"), ("daly", "-", "right")):
        at = found[f"{name}_seconds"]
        axes.axvline(at, color=INK, linestyle=stroke, linewidth=1.1)
        words = f" {name.title()}: {seconds(at)} "
        axes.text(at, bottom, words, ha=align, va="bottom", color=INK, fontsize="small", clip_on=True)
    axes.set_xscale("log")
    ticks = [each for each in _TICKS if ends[0] <= each <= ends[1]]
    axes.set_xticks(ticks, [_time(each) for each in ticks])
    axes.minorticks_off()
    axes.set(xlim=ends, ylim=(bottom, 100))
    few, most = found["as_good_steps"]
    axes.set_xlabel(f"training between two saves; shaded, as good: {few:,} to {most:,} steps", color=INK)
    axes.set_title(f"of the time of all nodes, saving every {found['save_every_steps']:,} steps", **_TITLE)


def _over_spares(axes: Axes, found: Mapping[str, Any]) -> None:
    """The same as bars, by what is done while nodes are away."""
    enough, every = found["spare_nodes"], found["interval_seconds"]
    most = max(2 * enough, 3)
    counts = sorted({round(place * most / _MOST_BARS) for place in range(_MOST_BARS + 1)} | {enough})
    bars = [(f"{count}", _simulated(found, count, every, shrinks=False)) for count in counts]
    chosen = counts.index(enough if found["best"] == "spare nodes" else 0)
    if found["smaller_layouts"]:
        bars.append(("shrink", _simulated(found, 0, every, shrinks=True)))
        chosen = len(bars) - 1 if found["best"].startswith("shrink") else chosen
    places, floor = range(len(bars)), [0.0] * len(bars)
    for name, (colour, label) in {"goodput": (_USEFUL, "useful"), **_LOSSES}.items():
        heights = [parts[name] for _, parts in bars]
        if max(heights) > _SEEN:
            axes.bar(places, heights, bottom=floor, color=colour, width=0.8, label=label)
        floor = [low + height for low, height in zip(floor, heights, strict=True)]
    useful = [parts["goodput"] for _, parts in bars]
    bottom = max(0.0, min(useful) - 0.15 * (100 - min(useful)))
    axes.set_ylim(bottom, 100)
    axes.set_xticks(places, [name for name, _ in bars])
    axes.get_xticklabels()[chosen].set_fontweight("bold")
    for place in {chosen, 0, len(bars) - 1, useful.index(max(useful))}:
        axes.text(
            place,
            useful[place],
            f"{useful[place]:.1f}",
            ha="center",
            va="top",
            color="white",
            fontsize="small",
        )
    where = " of each island" if found["islands"] > 1 else ""
    axes.set_xlabel(f"spare nodes{where}, beside {found['nodes']:,}; 0 waits for the repair", color=INK)
    axes.set_title("by what is done while nodes are repaired", **_TITLE)


def _time(duration: float) -> str:
    """As a mark of an axis: its unit alone."""
    units = ((86_400, "d"), (3600, "h"), (60, "min"), (1, "s"))
    size, unit = next((size, unit) for size, unit in units if duration >= size)
    return f"{duration / size:g} {unit}"
