"""``dsx schedule``."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from dsx.cli.options import OUTPUT, drawn
from dsx.cli.output import deliver, judging
from dsx.errors import ConfigError, ScheduleError
from dsx.plan.builders import NAMES, Options, build, default_chunks
from dsx.plan.simulate import Costs, simulate

if TYPE_CHECKING:
    from dsx.plan.simulate import Timeline
    from dsx.spec.schedule import Schedule


def schedule(
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", help=f"{', '.join(NAMES)}, auto, or a CSV file, one row per rank."),
    ],
    *,
    stages: Annotated[int | None, typer.Option(help="Pipeline ranks; a file says so itself.", min=1)] = None,
    micro_batches: Annotated[
        int | None, typer.Option(help="Micro-batches per step; a file says so itself.", min=1)
    ] = None,
    chunks: Annotated[
        int | None,
        typer.Option(help="Virtual stages per rank. Default: 2 where the schedule can have them.", min=1),
    ] = None,
    group_size: Annotated[
        int | None,
        typer.Option(
            help="Least micro-batches per group of an interleaved schedule. Default: the ranks.", min=1
        ),
    ] = None,
    warmup: Annotated[
        int | None,
        typer.Option(help="Forwards that a rank of an interleaved schedule starts ahead of the next.", min=0),
    ] = None,
    wire: Annotated[float, typer.Option(help="Time of a transfer, in forwards.", min=0)] = 0.0,
    profile: Annotated[
        Path | None,
        typer.Option(help="Measured layers, a run's profile.json: rank what may be chosen by its step."),
    ] = None,
    activation_gib: Annotated[
        float | None, typer.Option(help="Most activations on a rank, in GiB; with --profile.", min=0)
    ] = None,
    style: Annotated[
        Literal["table", "csv", "json", "svg", "html", "perfetto"],
        drawn(
            "A drawing in text, the actions as torch writes them, everything as JSON, a picture, "
            "a page, or a trace for ui.perfetto.dev (a forward takes 1 s)."
        ),
    ] = "table",
    output: Annotated[Path | None, OUTPUT] = None,
) -> None:
    """Print or draw a pipeline schedule and its bubble.

    For equal stages, a backward of twice a forward (half of it the input's gradient, half the weights'). Also
    the activations that it keeps. Exit code 1: there can be no such schedule, or the file's would not run.
    """
    if name == "auto" or profile is not None or activation_gib is not None:
        from dsx.cli.schedule_auto import Wanted, ranking_text

        wanted = Wanted(
            name=name,
            profile=profile,
            stages=stages,
            micro_batches=micro_batches,
            chunks=chunks,
            group_size=group_size,
            warmup=warmup,
            activation_gib=activation_gib,
            wire=wire,
        )
        draw = partial(_render, style=style, unit="ms", to_file=output is not None)
        with judging(ScheduleError):
            text = ranking_text(wanted, style, draw)
        deliver(text, output)
        return
    costs = Costs(transfer_seconds=wire)
    with judging(ScheduleError):
        if name.endswith(".csv"):
            built = _read(Path(name), (stages, chunks, micro_batches, group_size, warmup))
        else:
            options = Options(group_size=group_size, warmup_per_rank=warmup, costs=costs)
            built = _build(name, stages, chunks, micro_batches, options)
    deliver(_render(built, costs, style, to_file=output is not None), output)


def _build(
    name: str, stages: int | None, chunks: int | None, micro_batches: int | None, options: Options
) -> Schedule:
    if name not in NAMES:
        raise typer.BadParameter(f"{name!r} is not one of {', '.join(NAMES)}, auto, or a .csv file")
    if stages is None or micro_batches is None:
        raise typer.BadParameter(f"schedule {name} needs --stages and --micro-batches")
    return build(name, stages, default_chunks(name) if chunks is None else chunks, micro_batches, options)


def _read(path: Path, given: tuple[int | None, ...]) -> Schedule:
    """The schedule in a file, proved to run."""
    from dsx.plan.schedule_csv import load

    if any(number is not None for number in given):
        raise ConfigError(str(path), "the file says its size and order itself", "drop the other numbers")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(str(path), reason, "give a CSV file, one row per rank") from None
    return load(text, name=path.name)


def _render(built: Schedule, costs: Costs, style: str, *, to_file: bool, unit: str = "forwards") -> str:
    timeline = simulate(built, costs)
    if style == "csv":
        return built.to_csv()
    if style == "json":
        return json.dumps(_facts(built, timeline), indent=2) + "\n"
    if style == "perfetto":
        from dsx.report.perfetto import chrome_trace

        return chrome_trace(built, {"simulated": timeline})
    if style in ("svg", "html"):
        from dsx.report import timeline as pictures

        draw = pictures.svg if style == "svg" else pictures.html
        return draw(built, timeline, unit=unit)
    width = 110 if to_file else shutil.get_terminal_size(fallback=(110, 0)).columns
    return _table(built, timeline, width)


def _facts(built: Schedule, timeline: Timeline) -> dict[str, Any]:
    from dsx.plan.validate import peak_activations

    return {
        "name": built.name,
        "pipeline_ranks": built.num_ranks,
        "chunks": built.num_chunks,
        "micro_batches": built.num_micro_batches,
        "placement": built.placement,
        "bubble_over_ideal": timeline.bubble,
        "peak_activations": list(peak_activations(built)),
        "rows": [[str(action) for action in row] for row in built.rows],
    }


def _table(built: Schedule, timeline: Timeline, width: int) -> str:
    from dsx.report.schedule_table import render

    facts = _facts(built, timeline)
    peaks = ", ".join(map(str, facts["peak_activations"]))
    share = f", each of 1/{built.num_chunks} of a rank's layers" if built.num_chunks > 1 else ""
    lines = (
        render(built, timeline, width=width, unit="forward"),
        f"bubble: {facts['bubble_over_ideal']:.1%} of the ideal time",
        f"peak activations per rank, in micro-batches{share}: {peaks}",
    )
    return "\n".join(lines) + "\n"
