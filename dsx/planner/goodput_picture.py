"""What saves and failures leave of the time, drawn over the interval between saves and over spare nodes."""

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

_SHOWN = {
    "goodput": ("#009E73", "useful"),
    "saves": ("#0072B2", "saves stop training"),
    "again": ("#D55E00", "trained again"),
    "down": ("#CC79A7", "noticing, starting"),
    "waiting": ("#E69F00", "waiting for repairs"),
    "slower": ("#56B4E9", "a smaller layout"),
    "idle": ("#BBBBBB", "spare nodes, idle"),
}
_SEEN = 0.05  # percent: less is no colour
_REACH, _INTERVALS, _BARS = 16.0, 17, 6
_TICKS = {
    "1 s": 1,
    "5 s": 5,
    "15 s": 15,
    "1 min": 60,
    "5 min": 300,
    "15 min": 900,
    "1 h": 3600,
    "4 h": 14_400,
}
_TICKS |= {"1 d": 86_400, "7 d": 604_800}
_TITLE: dict[str, Any] = {"loc": "left", "fontsize": "medium", "color": INK}


def draw(found: Mapping[str, Any], title: str) -> Figure:
    """The picture of what :func:`dsx.planner.what_is_left.time_left` found, as a matplotlib figure.

    Islands, which lose what no round has had, are drawn over spare nodes alone.

    Raises:
        ConfigError: Nothing fails, or matplotlib is missing.
    """
    if found["mean_seconds_to_failure"] is None:
        raise ConfigError("--output", "nothing fails, so that there is nothing to draw", "give failure rates")
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise no_matplotlib("dsx plan --goodput") from None
    alone = found["islands"] == 1
    figure = Figure(figsize=(10.5 if alone else 7.0, 4.8), layout="constrained")
    grid = figure.subplots(1, 1 + alone, squeeze=False, width_ratios=[3, 2][: 1 + alone])[0]
    if alone:
        _over_intervals(grid[0], found)
    _over_spares(grid[-1], found)
    keys: dict[str, Any] = {}
    for axes in grid:
        axes.grid(visible=True, axis="y", color=GRID, linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(color=FAINT)
        axes.yaxis.set_major_formatter("{x:g} %")
        drawn, names = axes.get_legend_handles_labels()
        keys |= dict(zip(names, drawn, strict=True))
    figure.legend(keys.values(), keys.keys(), loc="outside lower center", ncols=3 + alone, frameon=False)
    figure.suptitle(title, x=0.01, ha="left", color=INK, fontsize="medium", fontweight="bold")
    return figure


def _simulated(found: Mapping[str, Any], spares: int, interval: float, *, shrinks: bool) -> dict[str, float]:
    """Percents of the time of all nodes, the spare ones among them, by the same failures."""
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
    saving = SaveCost(found["pause_seconds"], found["write_seconds"])
    if found["islands"] > 1:
        between_saves = found["save_every_steps"] * found["step_seconds"]
        saving = SaveCost(saving.pause_seconds * interval / between_saves)
    parts, share = simulate(hazards, saving, interval, days=known["days"]), 100 * nodes / (nodes + spares)
    return {name: share * parts[name] for name in PARTS} | {"idle": 100 - share}


def _over_intervals(axes: Axes, found: Mapping[str, Any]) -> None:
    """Over the training between two saves, with what the best answer does while nodes are away."""
    step, every, way = found["step_seconds"], found["interval_seconds"], found["best"]
    first, last = max(step, every / _REACH), every * _REACH
    intervals = [first * (last / first) ** (place / (_INTERVALS - 1)) for place in range(_INTERVALS)]
    spares, shrinks = found["spare_nodes"] * (way == "spare nodes"), way.startswith("shrink")
    all_parts = [_simulated(found, spares, each, shrinks=shrinks) for each in intervals]
    rows = {name: [parts[name] for parts in all_parts] for name in _SHOWN}
    colours, names = zip(*(_SHOWN[name] for name, row in rows.items() if max(row) > _SEEN), strict=True)
    axes.stackplot(
        intervals, *(row for row in rows.values() if max(row) > _SEEN), colors=colours, labels=names
    )
    least = min(rows["goodput"])
    bottom, (few, most) = max(0.0, least - 0.25 * (100 - least)), found["as_good_steps"]
    axes.axvspan(few * step, most * step, color=INK, alpha=0.1, linewidth=0)
    for name, stroke, align in (("young", "--", "left"), ("daly", "-", "right")):
        at = found[f"{name}_seconds"]
        axes.axvline(at, color=INK, linestyle=stroke, linewidth=1.1)
        words = f" {name.title()}: {seconds(at)} "
        axes.text(at, bottom, words, ha=align, va="bottom", color="white", fontsize="small", clip_on=True)
    axes.set(xscale="log", xlim=(first, last), ylim=(bottom, 100))
    ticks = {name: at for name, at in _TICKS.items() if first <= at <= last}
    axes.set_xticks([*ticks.values()], [*ticks])
    axes.minorticks_off()
    axes.set_xlabel(f"training between two saves; shaded, as good: {few:,} to {most:,} steps", color=INK)
    axes.set_title(f"of the time of all nodes, saving every {found['save_every_steps']:,} steps", **_TITLE)


def _over_spares(axes: Axes, found: Mapping[str, Any]) -> None:
    """By what is done while nodes are away."""
    enough, every, way = found["spare_nodes"], found["interval_seconds"], found["best"]
    most = max(2 * enough, 3)
    counts = sorted({round(place * most / _BARS) for place in range(_BARS + 1)} | {enough})
    bars = {f"{count}": _simulated(found, count, every, shrinks=False) for count in counts}
    if found["smaller_layouts"]:
        bars["shrink"] = _simulated(found, 0, every, shrinks=True)
    floor = [0.0] * len(bars)
    for name, (colour, label) in _SHOWN.items():
        heights = [parts[name] for parts in bars.values()]
        if max(heights) > _SEEN:
            axes.bar([*bars], heights, bottom=floor, color=colour, label=label)
        floor = [low + height for low, height in zip(floor, heights, strict=True)]
    useful = [parts["goodput"] for parts in bars.values()]
    axes.set_ylim(max(0.0, min(useful) - 0.15 * (100 - min(useful))), 100)
    chosen = [*bars].index({"spare nodes": f"{enough}", "wait for the repair": "0"}.get(way, "shrink"))
    axes.get_xticklabels()[chosen].set_fontweight("bold")
    for place in {chosen, 0, len(bars) - 1, useful.index(max(useful))}:
        words = f"{useful[place]:.1f}"
        axes.text(place, useful[place], words, ha="center", va="top", color="white", fontsize="small")
    where = " of each island" * (found["islands"] > 1)
    axes.set_xlabel(f"spare nodes{where}, beside {found['nodes']:,}; 0 waits for the repair", color=INK)
    axes.set_title("by what is done while nodes are repaired", **_TITLE)
