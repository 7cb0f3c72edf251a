"""``dsx trace``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from dsx.cli.options import OUTPUT, drawn
from dsx.cli.output import deliver
from dsx.errors import ConfigError

if TYPE_CHECKING:
    from dsx.plan.compare import Comparison


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
        Literal["table", "json", "svg", "html", "perfetto"],
        drawn(
            "Step, bubble, costs and the actions that lost most; all of it as JSON; a picture; a page; "
            "or a trace for ui.perfetto.dev, measured and simulated."
        ),
    ] = "table",
    output: Annotated[Path | None, OUTPUT] = None,
) -> None:
    """Compare a recorded training step with its simulation.

    The simulation runs the same schedule with what the step's own actions and transfers took, median over
    micro-batches. Steps are recorded by dsx.train.trace_steps or engine.trace.
    """
    from dsx.plan.compare import compare
    from dsx.plan.trace import Trace

    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text"
        raise ConfigError(str(file), reason or str(error), "give a trace/step*.json of a run") from None
    deliver(_render(compare(Trace.from_json(text, where=str(file))), style), output)


def _render(comparison: Comparison, style: str) -> str:
    if style == "perfetto":
        from dsx.report.perfetto import comparison_trace

        return comparison_trace(comparison)
    if style in ("svg", "html"):
        from dsx.report.timeline import comparison_page, comparison_svg

        return comparison_svg(comparison) if style == "svg" else comparison_page(comparison)
    from dsx.report.trace_table import facts_json, render

    return facts_json(comparison) if style == "json" else render(comparison)
