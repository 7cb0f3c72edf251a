"""``dsx plot``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def plot(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN_FOLDER", help="Folders that runs wrote (dsx.train.output).", exists=True),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
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
) -> None:
    """Draw the curves of one or more runs from their metrics.jsonl.

    Needs matplotlib, which the extra "plot" brings.
    """
    from dsx.report.curves import choose, read_runs, save

    read = read_runs(runs)
    if output is None:
        output = (runs[0] if runs[0].is_dir() else runs[0].parent) / "loss.png"
    save(read, choose(read, metrics or []), output)
    typer.echo(str(output))
