"""Curves of training runs from their ``metrics.jsonl``: read, choose, draw.

One panel per quantity, steps on x, a colour per run. Drawing needs matplotlib (the extra ``plot``), which is
imported when it is first needed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsx.errors import ConfigError, DataError, no_matplotlib
from dsx.terminal import shortened

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

METRICS_FILE = "metrics.jsonl"
STEP = "train/step"
IMBALANCE = "moe/imbalance/"
"""What the metrics of layers' imbalance begin with; a layer's name follows."""

# Colours that differ in print and for the colour-blind (Okabe and Ito 2008, without yellow).
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
_GREY = "#6B6B6B"
_LOG_SCALE_FROM = 20.0  # A panel of positive values is logarithmic from this ratio of largest to smallest on.


@dataclass(frozen=True, slots=True)
class Series:
    """One metric of one run: a value per recorded step; NaN where the run had one."""

    steps: tuple[int, ...]
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Run:
    """The records of one run."""

    name: str
    series: Mapping[str, Series]


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One set of axes.

    Attributes:
        metric: Drawn as a line.
        points: A second metric, recorded at fewer steps and drawn as joined points, or None.
        from_zero: Whether the y axis starts at 0.
    """

    title: str
    metric: str
    points: str | None = None
    from_zero: bool = False


PANELS = (
    Panel(title="loss, nats per token", metric="train/loss", points="eval/loss"),
    Panel(title="gradient norm before clipping", metric="train/grad_norm_preclip"),
    Panel(title="tokens per second, all ranks", metric="perf/tokens_per_second_global", from_zero=True),
)
"""What is drawn when nothing is asked for by name."""


def read_runs(places: Sequence[Path]) -> list[Run]:
    """Runs from their folders or metrics files, under names that tell them apart.

    Raises:
        DataError: No metrics there, unreadable ones, or none yet.
    """
    files = [place if place.is_file() else place / METRICS_FILE for place in places]
    names = _names([file.absolute().parent for file in files])
    return [Run(name, read_series(file)) for name, file in zip(names, files, strict=True)]


def read_series(file: Path) -> dict[str, Series]:
    """Every metric of a ``metrics.jsonl``, as :class:`dsx.train.tracking.Tracker` writes it.

    A last line that a kill has torn is passed over.

    Raises:
        DataError: Missing, unreadable, empty, or a line that is no record.
    """
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise DataError(str(file), "there is no such file", _other_folders(file.parent)) from None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(str(file), f"cannot be read ({error})", "name a run's folder") from None
    columns: dict[str, tuple[list[int], list[float]]] = {}
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            step = int(record[STEP])
            values = {name: float(value) for name, value in record.items() if name != STEP}
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
            if number == len(lines):
                break
            raise DataError(
                f"{file}, line {number}", f"not a record with {STEP} and numbers", "remove the line"
            ) from None
        for name, value in values.items():
            steps, column = columns.setdefault(name, ([], []))
            steps.append(step)
            column.append(value)
    if not columns:
        raise DataError(str(file), "it holds no records yet", "wait for the first step of the run")
    return {name: Series(tuple(steps), tuple(column)) for name, (steps, column) in columns.items()}


def choose(runs: Sequence[Run], metrics: Sequence[str]) -> list[Panel]:
    """A panel per metric asked for; without any, those of :data:`PANELS` that some run has.

    Raises:
        ConfigError: A metric that no run has.
    """
    known = {name for run in runs for name in run.series}
    for metric in metrics:
        if metric not in known:
            raise ConfigError(
                f"--metric {metric}", "no run has it", f"use one of: {', '.join(sorted(known))}"
            )
    if metrics:
        return [_panel(metric) for metric in dict.fromkeys(metrics)]
    usual = [panel for panel in PANELS if known & {panel.metric, panel.points}]
    return usual or [_panel(metric) for metric in sorted(known)]


def draw(runs: Sequence[Run], panels: Sequence[Panel]) -> Figure:
    """The picture as a matplotlib figure. Raises ConfigError if matplotlib is missing."""
    heights = [1.6 if panel.points else 1.0 for panel in panels]
    figure = _figure(0.9 + 1.75 * sum(heights))
    grid = figure.subplots(len(panels), 1, sharex=True, squeeze=False, height_ratios=heights)
    for panel, axes in zip(panels, grid[:, 0], strict=True):
        for index, run in enumerate(runs):
            # Earlier runs are wider, to show under a later one: layouts that train alike lie on each other.
            width = 1.2 + 1.4 * min(len(runs) - 1 - index, 3)
            look = _look(index)
            line, points = run.series.get(panel.metric), run.series.get(panel.points or "")
            if line is not None:
                marker = "." if len(line.steps) < 20 else None  # one value alone would not show
                axes.plot(line.steps, line.values, **look, linewidth=width, marker=marker)
            if points is not None:
                axes.plot(points.steps, points.values, **look | _points_style(width))
        _finish(axes, panel, runs)
    grid[-1, 0].set_xlabel("optimizer step")
    names = {name for panel in panels for name in (panel.metric, panel.points) if name}
    steps = [step for run in runs for name in names & {*run.series} for step in run.series[name].steps]
    first, last = min(steps), max(steps)  # of values that are not finite, too
    room = max(0.5, 0.04 * (last - first))
    grid[-1, 0].set_xlim(first - room, last + room)
    grid[-1, 0].locator_params(axis="x", integer=True, min_n_ticks=1)
    if len(runs) == 1:
        figure.suptitle(shortened(runs[0].name, 90), x=0.01, ha="left", fontweight="bold")
    else:
        handles = [_handle(shortened(run.name, 90), linewidth=2.5, **_look(i)) for i, run in enumerate(runs)]
        longest = max(len(str(handle.get_label())) for handle in handles)
        columns = max(1, min(len(runs), 100 // (longest + 8)))
        figure.legend(handles=handles, loc="outside upper left", ncols=columns, frameon=False)
    return figure


def draw_experts(runs: Sequence[Run]) -> Figure:
    """Heat maps of how unevenly experts were busy, one per run: layers from below, steps on x.

    The colour is the busiest expert's load over the mean, on one scale from 1 for all runs. Raises
    ConfigError if no run has experts, or matplotlib is missing.
    """
    kept = []
    for run in runs:
        names = [name for name in run.series if name.startswith(IMBALANCE)]
        names.sort(key=lambda name: int(name.rpartition("layer")[2]))
        kept += [(run, names)] if names else []
    if not kept:
        fix = "name the folder of a run with experts, of whose steps metrics were logged"
        raise ConfigError("--experts", f"no run has a metric {IMBALANCE}*", fix)
    sizes = [max(2.0, min(7.0, 0.28 * len(names))) for _, names in kept]
    figure = _figure(0.9 * len(kept) + sum(sizes))
    grid = figure.subplots(len(kept), 1, squeeze=False, height_ratios=sizes)
    most = max(value for run, names in kept for name in names for value in run.series[name].values)
    for (run, names), axes in zip(kept, grid[:, 0], strict=True):
        steps = sorted({step for name in names for step in run.series[name].steps})
        rows = [dict(zip(run.series[name].steps, run.series[name].values, strict=True)) for name in names]
        values = [[row.get(step, math.nan) for step in steps] for row in rows]
        edges = [steps[0] - 0.5, *((a + b) / 2 for a, b in pairwise(steps)), steps[-1] + 0.5]
        mesh = axes.pcolormesh(edges, range(len(names) + 1), values, vmin=1, vmax=max(most, 1.01))
        shown = range(0, len(names), -(-len(names) // 20))
        axes.set_yticks([row + 0.5 for row in shown], [names[row][len(IMBALANCE) :] for row in shown])
        axes.set_title(shortened(run.name, 90), loc="left", fontsize="medium", fontweight="bold")
        axes.locator_params(axis="x", integer=True, min_n_ticks=1)
    grid[-1, 0].set_xlabel("optimizer step")
    figure.colorbar(mesh, ax=list(grid[:, 0]), label="busiest expert / mean")
    return figure


def _figure(inches: float) -> Figure:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise no_matplotlib("dsx plot") from None
    return Figure(figsize=(8.0, inches), layout="constrained")


def _look(index: int) -> dict[str, Any]:
    """Colour and stroke of a run, which no other of the first 21 has."""
    strokes = ("-", "--", ":")
    return {
        "color": _COLOURS[index % len(_COLOURS)],
        "linestyle": strokes[index // len(_COLOURS) % len(strokes)],
    }


def _points_style(width: float) -> dict[str, Any]:
    """Joined points with a white rim, over the lines."""
    return {
        "linestyle": (0, (2, 2)),
        "linewidth": 1.0,
        "marker": "o",
        "markersize": 4.8 + width,
        "markeredgecolor": "white",
        "zorder": 3,
    }


def _finish(axes: Axes, panel: Panel, runs: Sequence[Run]) -> None:
    axes.grid(visible=True, color="#E3E3E3", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(color=_GREY)
    names = {panel.metric, panel.points or panel.metric}
    shown = [run.series[name] for run in runs for name in names if name in run.series]
    finite = [value for series in shown for value in series.values if math.isfinite(value)]
    missing = sum(len(series.values) for series in shown) - len(finite)
    said = f" ({missing} value{'s' * (missing > 1)} not finite)" if missing else ""
    axes.set_title(shortened(panel.title, 90) + said, loc="left", fontsize="medium")
    if not finite:
        axes.set_yticks([])
    if panel.from_zero:
        axes.set_ylim(0, 1.1 * max(finite) if finite and max(finite) > 0 else 1)
    elif finite and 0 < min(finite) < max(finite) / _LOG_SCALE_FROM:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
    else:
        axes.ticklabel_format(axis="y", useOffset=False)
    if any(value >= 10_000 for value in finite) and axes.get_yscale() == "linear":
        axes.yaxis.set_major_formatter(_thousands)
    if panel.points is not None and any(panel.points in run.series for run in runs):
        handles = [
            _handle("train", color=_GREY, linewidth=1.2),
            _handle("held out", color=_GREY, **_points_style(1.2)),
        ]
        axes.legend(handles=handles, frameon=False, labelcolor=_GREY)


def _handle(label: str, **style: Any) -> Line2D:
    from matplotlib.lines import Line2D

    return Line2D([], [], label=label, **style)


def _thousands(value: float, _position: float) -> str:
    return f"{value / 1e6:g}M" if abs(value) >= 1e6 else f"{value / 1000:g}k" if value else "0"


def _panel(metric: str) -> Panel:
    usual = {panel.metric: panel for panel in PANELS}
    return usual.get(metric, Panel(title=metric, metric=metric))


def _names(folders: Sequence[Path]) -> list[str]:
    """Each folder's last parts, as many as are needed to tell all of them apart.

    >>> _names([Path("/a/zero1"), Path("/a/zero3")]), _names([Path("/a/run"), Path("/b/run")])
    (['zero1', 'zero3'], ['a/run', 'b/run'])
    """
    deepest = max(len(folder.parts) for folder in folders)
    for count in range(1, deepest + 1):
        names = ["/".join(folder.parts[-count:]) for folder in folders]
        if len(set(names)) == len(set(folders)):
            break
    return names


def _other_folders(folder: Path) -> str:
    below = sorted(str(file.parent) for file in folder.glob(f"*/{METRICS_FILE}")) if folder.is_dir() else []
    if below:
        return f"name one of the runs below it: {', '.join(below)}"
    return "name the folder that a run wrote (dsx.train.output)"
