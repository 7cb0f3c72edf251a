"""``dsx plot`` and ``dsx trace``, and every command's pictures as files.

These are what matplotlib has drawn in each format, and a timeline's SVG as PNG. They need matplotlib (the
extra ``plot``), which is imported when it is first needed.
"""

from __future__ import annotations

import io
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, get_args

import typer

from dsx.cli.options import FORMAT, OUTPUT, drawn
from dsx.cli.output import deliver, say, say_json, style_of, text_of, write
from dsx.errors import ConfigError, no_matplotlib
from dsx.schedules.tables import facts_json, step_table
from dsx.schedules.timeline import comparison_page, comparison_svg, comparison_trace, page
from dsx.schedules.trace import Comparison, Trace, compare
from dsx.terminal import columns, printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


_SVG = "{http://www.w3.org/2000/svg}"
_WIDEST_PIXELS = 1280
_DOTS_PER_INCH = 150
_UNITS_PER_INCH = 100.0
_MOST_PIXELS = 1 << 15  # a side, as matplotlib's renderer takes


def as_file(figure: Figure, style: str, *, title: str) -> str | bytes:
    """A figure as ``svg``, ``html``, ``png`` or ``pdf``: the same bytes for the same figure."""
    from matplotlib import rc_context
    from matplotlib.axis import Axis
    from matplotlib.text import Text

    ticks = {text for axis in figure.findobj(Axis) for text in axis.findobj(Text)}
    for text in set(figure.findobj(Text)) - ticks:  # names of files, which are no formulas
        text.set_text(printable(text.get_text()))
        text.set_parse_math(False)
    kind = "svg" if style == "html" else style
    file = io.BytesIO()
    dots = min(_DOTS_PER_INCH, _WIDEST_PIXELS / figure.get_figwidth())
    undated = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}
    with rc_context({"svg.hashsalt": "dsx"}):
        figure.savefig(file, format=kind, dpi=dots, metadata=undated.get(kind))
    if kind != "svg":
        return file.getvalue()
    written = file.getvalue().decode("utf-8")
    return page(title, written[written.index("<svg") :]) if style == "html" else written


def picture_of(svg: str, style: str) -> str | bytes:
    """The picture of a timeline (:mod:`dsx.schedules.timeline`) as ``svg`` or ``png``.

    Raises:
        ConfigError: matplotlib is missing.
    """
    if style == "svg":
        return svg
    try:
        from matplotlib.collections import PolyCollection
        from matplotlib.figure import Figure
    except ImportError:
        raise no_matplotlib("png") from None
    root = ET.fromstring(svg)  # noqa: S314 - dsx has just written it
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    figure = Figure(figsize=(width / _UNITS_PER_INCH, height / _UNITS_PER_INCH))
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(height, 0))
    axes.set_axis_off()
    styles = root.findtext(f"{_SVG}style") or ""
    fills, inks = (dict(re.findall(rf"\.(\w+) {kind}{{fill:(#\w+)}}", styles)) for kind in ("rect", "text"))
    boxes: list[tuple[list[tuple[float, float]], str]] = []
    for group in (root, *root.iter(f"{_SVG}g")):
        named = group.get("class", "")
        boxes += (_box(rect, fills.get(named, "")) for rect in group.findall(f"{_SVG}rect"))
        for line in group.findall(f"{_SVG}path"):
            x, y, below = map(float, re.findall(r"[\d.]+", line.attrib["d"]))
            axes.plot((x, x), (y, below), color=line.get("stroke"), linewidth=0.7, zorder=2)
        for text in group.findall(f"{_SVG}text"):
            _write(axes, text, inks.get(named))
    for order, idle in ((1, False), (3, True), (4, False)):  # the page, what is idle, actions
        drawn = [(corners, fill) for corners, fill in boxes if _order(fill) == order]
        axes.add_collection(
            PolyCollection(
                [corners for corners, _ in drawn],
                facecolors=["#f6f7f9" if idle else fill for _, fill in drawn],
                hatch="////" if idle else None,
                edgecolors="#dde1e7" if idle else "none",
                linewidths=0,
                zorder=order,
            )
        )
    file = io.BytesIO()
    shown = float(root.attrib["width"]) / width * _UNITS_PER_INCH
    figure.savefig(file, format="png", dpi=min(shown, _UNITS_PER_INCH * _MOST_PIXELS / max(width, height)))
    return file.getvalue()


def _order(fill: str) -> int:
    return 1 if fill == "white" else 3 if fill.startswith("url") else 4


def _box(rect: ET.Element, fill: str) -> tuple[list[tuple[float, float]], str]:
    x, y, width, height = (float(rect.get(key, 0)) for key in ("x", "y", "width", "height"))
    corners = [(x, y), (x + width, y), (x + width, y + height), (x, y + height)]
    return corners, rect.get("fill", fill)


def _write(axes: Axes, text: ET.Element, ink: str | None) -> None:
    """A text, or its stretches one after the other; an action's number if it has the ``ink`` of its group."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import TextPath

    x, y, size = (float(text.attrib[key]) for key in ("x", "y", "font-size"))
    anchor = text.get("text-anchor", "middle" if ink else "start")
    align = {"start": "left", "middle": "center", "end": "right"}[anchor]
    for part in [*text] or [text]:
        bold = ink is not None or "700" in (part.get("font-weight"), text.get("font-weight"))
        font = FontProperties(weight="bold" if bold else "normal", size=size * 72 / _UNITS_PER_INCH)
        x += float(part.get("dx", 0))
        axes.text(
            x,
            y,
            (part.text or "").replace("$", r"\$"),
            fontproperties=font,
            color=part.get("fill") or text.get("fill") or ink,
            ha=align,
            va="baseline",
            zorder=5,
        )
        if part is not text:
            x += float(TextPath((0, 0), part.text or "", size=size, prop=font).get_extents().x1)


_Style = Literal["table", "json", "svg", "html", "png", "perfetto"]
_PICTURES = ("html", "png", "svg", "pdf")


def plot(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN_FOLDER", help="Folders that runs wrote (dsx.train.output).", exists=True),
    ],
    *,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            metavar="FILE",
            help="Picture to write: .html, .png, .svg or .pdf.",
            show_default="loss.png (experts.png) in the first run's folder",
        ),
    ] = None,
    metrics: Annotated[
        list[str] | None,
        typer.Option(
            "--metric",
            metavar="NAME",
            help="A metric to draw, e.g. train/lr; repeatable.",
            show_default="loss, gradient norm and tokens per second",
        ),
    ] = None,
    experts: Annotated[
        bool,
        typer.Option("--experts", help="Draw how unevenly experts are busy instead, layers x steps."),
    ] = False,
    style: Annotated[Literal["table", "json"], FORMAT] = "table",
) -> None:
    """Draw the curves of one or more runs from their metrics.jsonl.

    It needs matplotlib, which the extra "plot" installs.
    """
    from dsx.train.curves import IMBALANCE, choose, draw, draw_experts, read_runs

    read = read_runs(runs)
    if output is None:
        output = (runs[0] if runs[0].is_dir() else runs[0].parent) / (
            "experts.png" if experts else "loss.png"
        )
    kind = style_of(None, output, _PICTURES, needs_ending=True)
    if experts and metrics:
        raise ConfigError("--experts and --metric", "each is a picture of its own", "leave one of them out")
    panels = [] if experts else choose(read, metrics or [])
    figure = draw_experts(read) if experts else draw(read, panels)
    write(as_file(figure, kind, title=", ".join(run.name for run in read)), output)
    if style == "json":
        drawn = [metric for panel in panels for metric in (panel.metric, panel.points) if metric]
        drawn += [f"{IMBALANCE}*"] * experts
        say_json({"wrote": str(output), "runs": [run.name for run in read], "metrics": drawn})
        return
    say(f"wrote {output}")


def trace(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="A recorded step: trace/step*.json in the folder of a run.",
            show_default=False,
        ),
    ],
    *,
    style: Annotated[
        _Style | None,
        drawn(
            "Step, bubble, costs and the actions that lost most; all of it as JSON; a picture (PNG needs "
            "matplotlib); a page; or a trace for ui.perfetto.dev (.perfetto.json), measured and simulated."
        ),
    ] = None,
    output: Annotated[Path | None, OUTPUT] = None,
) -> None:
    """Compare a recorded training step with its simulation.

    The simulation runs the same schedule with the durations of the step's own actions and transfers, as
    medians over micro-batches. Steps are recorded by dsx.train.trace_steps or engine.trace.
    """
    kind = style_of(style, output, get_args(_Style))
    text = text_of(file, str(file), "give a trace/step*.json of a run")
    deliver(_render(compare(Trace.from_json(text, where=str(file))), kind), output)


def _render(comparison: Comparison, style: str) -> str | bytes:
    if style == "perfetto":
        return comparison_trace(comparison)
    if style in ("svg", "html", "png"):
        if style == "html":
            return comparison_page(comparison)
        return picture_of(comparison_svg(comparison), style)
    return facts_json(comparison) if style == "json" else step_table(comparison, width=columns())
