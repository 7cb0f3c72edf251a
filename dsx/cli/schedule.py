"""``dsx schedule``."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

if TYPE_CHECKING:
    from dsx.spec.schedule import Schedule


def schedule(
    name: Annotated[
        Literal["gpipe", "1f1b", "interleaved"],
        typer.Argument(metavar="NAME", help="gpipe, 1f1b or interleaved."),
    ],
    stages: Annotated[int, typer.Option(help="Pipeline ranks.", min=1)],
    micro_batches: Annotated[int, typer.Option(help="Micro-batches per step.", min=1)],
    chunks: Annotated[int, typer.Option(help="Virtual stages per rank.", min=1)] = 1,
    style: Annotated[
        Literal["table", "csv", "json"],
        typer.Option("--format", help="A drawing, the actions as torch writes them, or everything as JSON."),
    ] = "table",
) -> None:
    """Print a pipeline schedule and its bubble.

    For equal stages, a backward of twice a forward and free transfers. Also the activations that it keeps.
    """
    from dsx.plan.builders import build

    built = build(name, stages, chunks, micro_batches)
    if style == "csv":
        typer.echo(built.to_csv(), nl=False)
    elif style == "json":
        typer.echo(json.dumps(_facts(built), indent=2))
    else:
        typer.echo(_table(built))


def _facts(built: Schedule) -> dict[str, Any]:
    from dsx.plan.simulate import simulate
    from dsx.plan.validate import peak_activations

    return {
        "name": built.name,
        "pipeline_ranks": built.num_ranks,
        "chunks": built.num_chunks,
        "micro_batches": built.num_micro_batches,
        "bubble_over_ideal": simulate(built).bubble,
        "peak_activations": list(peak_activations(built)),
        "rows": [[str(action) for action in row] for row in built.rows],
    }


def _table(built: Schedule) -> str:
    from dsx.report.schedule_table import render

    facts = _facts(built)
    peaks = ", ".join(map(str, facts["peak_activations"]))
    share = f", each of 1/{built.num_chunks} of a rank's layers" if built.num_chunks > 1 else ""
    return "\n".join(
        (
            render(built, width=shutil.get_terminal_size(fallback=(110, 0)).columns),
            f"bubble: {facts['bubble_over_ideal']:.1%} of the ideal time",
            f"peak activations per rank, in micro-batches{share}: {peaks}",
        )
    )
