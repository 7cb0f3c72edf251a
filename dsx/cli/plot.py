"""``dsx plot`` and ``dsx trace``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, get_args

import typer

from dsx.cli.options import FORMAT, OUTPUT, drawn
from dsx.cli.output import deliver, say, say_json, style_of, text_of, write
from dsx.cli.picture import as_file, picture_of
from dsx.errors import ConfigError
from dsx.schedules.tables import facts_json, step_table
from dsx.schedules.timeline import comparison_page, comparison_svg, comparison_trace
from dsx.schedules.trace import Comparison, Trace, compare
from dsx.terminal import columns

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
