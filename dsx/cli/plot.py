"""``dsx plot``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from dsx.cli.options import FORMAT
from dsx.cli.output import say


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
            help="Picture to write: .png, .svg or .pdf.",
            show_default="loss.png in the first run's folder",
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
    style: Annotated[Literal["table", "json"], FORMAT] = "table",
) -> None:
    """Draw the curves of one or more runs from their metrics.jsonl.

    Needs matplotlib, which the extra "plot" brings.
    """
    from dsx.report.curves import choose, read_runs, save

    read = read_runs(runs)
    if output is None:
        output = (runs[0] if runs[0].is_dir() else runs[0].parent) / "loss.png"
    panels = choose(read, metrics or [])
    save(read, panels, output)
    if style == "json":
        drawn = [metric for panel in panels for metric in (panel.metric, panel.points) if metric]
        say(
            json.dumps({"wrote": str(output), "runs": [run.name for run in read], "metrics": drawn}, indent=2)
        )
        return
    say(str(output))
