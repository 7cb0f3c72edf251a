"""``dsx schedule`` and ``dsx schedule auto``."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import typer

from dsx.cli.options import OUTPUT, drawn
from dsx.cli.output import deliver, judging, say, style_of, text_of, write
from dsx.cli.plot import picture_of
from dsx.errors import ConfigError, LayoutError, ScheduleError
from dsx.models.config_values import MOST_LAYERS
from dsx.planner.choose import Choice, choose
from dsx.planner.layout import Space
from dsx.planner.profile import Profile
from dsx.schedules import timeline as pictures
from dsx.schedules.builders import NAMES, Options, build, default_chunks
from dsx.schedules.interleaved import MOST_FORWARDS
from dsx.schedules.program import load
from dsx.schedules.schedule import Schedule
from dsx.schedules.simulate import Costs, Seconds, Timeline, peak_activations, simulate
from dsx.schedules.tables import schedule_table
from dsx.terminal import NARROWEST, aligned, amount, columns, wrapped

if TYPE_CHECKING:
    from dsx.planner.order_search import Searched


_MOST_ROWS = 12
_Style = Literal["table", "csv", "json", "svg", "html", "png", "perfetto"]
_PICTURES = ("svg", "html", "png")
_GIB = 1 << 30
_NO_GAIN = 0.0005
_EFFORT = 10.0


def _ranked_text(
    profile: Profile, sizes: tuple[int, int], space: Space, style: str, draw: Callable[..., str | bytes]
) -> str | bytes:
    """The ranking as a table or JSON; in other styles the chosen schedule, drawn with its measured costs."""
    space = replace(space, recompute=tuple(profile.layers))
    ranking = choose(profile, num_ranks=sizes[0], num_micro_batches=sizes[1], space=space)
    if style == "table":
        rows = [("", "step", "bubble", "activations", "layers per virtual stage")]
        rows.append((ranking.chosen.label, *_figures(ranking.chosen), _layers(ranking.chosen, " ")))
        rows += [(c.label, *_figures(c), ranking.reason(c)) for c in ranking.next_best(_MOST_ROWS)]
        lines = aligned(rows, left=(0, 4), width=columns())
        left = len(ranking.others) - (len(rows) - 2)
        if left:
            lines.append(f"and {left} more (--format json)")
        how = profile.conditions
        said = f"measured on {how.device}, {how.precision}, micro-batches of {how.micro_batch_size}"
        said += "; transfers were not, and count as free" if profile.bytes_per_second is None else ""
        lines.append(wrapped(said, columns(), indent="  "))
        return "\n".join(lines) + "\n"
    if style == "json":
        others = [_choice(c) | {"reason": ranking.reason(c)} for c in ranking.others]
        return json.dumps({"chosen": _choice(ranking.chosen), "others": others}, indent=2) + "\n"
    costs = ranking.chosen.cut.program.options.costs
    assert costs is not None
    return draw(ranking.chosen.cut.schedule, in_milliseconds(costs) if style in _PICTURES else costs)


def _check_choice(
    name: str, profile: Path | None, stages: int | None, micro_batches: int | None, wire: float
) -> tuple[Profile, tuple[int, int]]:
    """The profile and the sizes, without which nothing can be ranked."""
    if profile is None:
        where = "dsx schedule auto" if name == "auto" else "--activation-gib"
        raise ConfigError(
            where,
            "nothing is measured to choose by",
            "give --profile: a run with dsx.profile = measure writes profile.json to its output",
        )
    if stages is None or micro_batches is None:
        missing = "--stages" if stages is None else "--micro-batches"
        raise ConfigError(missing, "it is needed with --profile", f"give {missing} N")
    if wire:
        raise ConfigError(f"--wire {wire:g}", "the profile says what transfers take", "leave one of them out")
    if name not in ("auto", *NAMES):
        raise ConfigError(
            f"schedule {name!r}", "not a schedule to choose", f"use auto or one of {', '.join(NAMES)}"
        )
    text = text_of(profile, f"--profile {profile}", "give a profile.json")
    return Profile.from_json(text, name=str(profile)), (stages, micro_batches)


def _to_search(
    profile: Path | None, times: str | None, stages: int | None, micro_batches: int | None, wire: float
) -> tuple[Profile, tuple[int, int]]:
    from dsx.planner.order_search import made_up

    if (profile is None) == (times is None):
        raise ConfigError(
            "dsx schedule search",
            "it needs the layers' times once",
            "give --profile FILE or --times 31x1,4.8",
        )
    if profile is not None:
        return _check_choice("auto", profile, stages, micro_batches, wire)
    if stages is None or micro_batches is None:
        raise ConfigError("dsx schedule search", "it needs --stages and --micro-batches", "give both")
    forwards: list[float] = []
    for word in str(times).split(","):
        count, _, length = word.rpartition("x")
        try:
            number, each = int(count or 1), float(length)
            good = number > 0 and 0 < each < float("inf")
        except ValueError:
            good = False
        if not good:
            raise ConfigError(
                f"--times {times}", f"{word!r} is no time", "write 31x1,4.8: 31 of 1, one of 4.8"
            )
        if len(forwards) + number > MOST_LAYERS:
            raise ConfigError(f"--times {times}", f"more than {MOST_LAYERS:,} layers", "write fewer")
        forwards += [each] * number
    return made_up(forwards, wire), (stages, micro_batches)


def _check_size(name: str, stages: int | None, chunks: int | None, micro_batches: int | None) -> None:
    """Raise ConfigError for a step that would take for ever to lay out."""
    each = chunks or (default_chunks(name) if name in NAMES else 1)
    forwards = (stages or 1) * each * (micro_batches or 1)
    if forwards > MOST_FORWARDS:
        where = f"--stages {stages} --micro-batches {micro_batches}"
        what = f"a step of {forwards:,} forwards, of which at most {MOST_FORWARDS:,} are laid out"
        raise ConfigError(f"{where} --chunks {each}" if each > 1 else where, what, "use smaller numbers")


def _cap(profile: Profile, stages: int, activation_gib: float | None, most_live: float | None) -> int | None:
    """Bytes of activations that a rank may keep; ``most_live`` counts in a rank's share of all layers."""
    if most_live is None:
        return None if activation_gib is None else int(activation_gib * _GIB)
    if activation_gib is not None:
        raise ConfigError("--most-live, --activation-gib", "both bound the same memory", "give one of them")
    whole = sum(layer.kept_bytes for layer in next(iter(profile.layers.values())))
    return int(most_live * whole / stages)


def _search(
    profile: Profile, sizes: tuple[int, int], space: Space, effort: int, style: str, output: Path | None
) -> None:
    """Search, print what came of it, and write the order to the output."""
    from dsx.planner.order_search import search_order
    from dsx.waiting import Waiting

    if output is not None and not output.parent.is_dir():  # not after a minute's search
        raise ConfigError(f"--output {output}", "no such folder", "name a file in a folder that exists")
    with (
        judging(ScheduleError, LayoutError),
        Waiting("searching an order", total=effort, unit="actions timed") as waiting,
    ):
        searched = search_order(
            profile,
            num_ranks=sizes[0],
            num_micro_batches=sizes[1],
            space=space,
            most_actions=effort,
            progress=waiting.advance,
        )
    found = searched.found.cut
    if style == "json":
        facts = {
            "found": _choice(searched.found),
            "bound_seconds": searched.bound_seconds,
            "gain": searched.gain,
            "named": [_choice(each) for each in (searched.ranking.chosen, *searched.ranking.others)],
        }
        deliver(json.dumps(facts, indent=2) + "\n", output)
    elif style == "table":
        if output is not None and output.suffix == ".txt":
            deliver(_searched_table(searched, None), output)
            return
        if output is not None:
            write(found.schedule.to_csv(), output)
        say(_searched_table(searched, output), end="")
    else:
        costs = in_milliseconds(searched.costs) if style in _PICTURES else searched.costs
        deliver(render(found.schedule, costs, style, to_file=output is not None, unit="ms"), output)


def _searched_table(searched: Searched, output: Path | None) -> str:
    found, ranking = searched.found.cut, searched.ranking
    rows = [("", "step", "bubble", "activations", "")]
    rows.append(("searched", *_figures(searched.found), ""))
    rows.append(
        ("lower bound", f"{1000 * searched.bound_seconds:.4g} ms", "", "", "of any order of this cut")
    )
    for each in (ranking.chosen, *ranking.next_best(_MOST_ROWS)):
        longer = each.cut.step_seconds / found.step_seconds - 1
        above = ranking.reason(each) if ranking.most_bytes and each.peak_bytes > ranking.most_bytes else ""
        rows.append((each.label, *_figures(each), above or f"{longer:+.1%} step"))
    lines = aligned(rows, left=(0, 4), width=columns())
    if searched.gain < _NO_GAIN:
        said = f"nothing is gained: {ranking.chosen.label} is within {searched.open_gain:.1%} of the bound"
        lines.append(wrapped(said, columns()))
    stages = found.stage_map
    lines.append(
        f"placement {stages.placement}, {stages.num_chunks} chunks, recompute {searched.found.recompute}"
    )
    file = output or "FILE (--output FILE writes it)"
    lines.append(f"to run it: --set dsx.schedule.file={file} --set dsx.schedule.name=auto")
    lines.append(f"           --set dsx.partition.method=[{_layers(searched.found, ',')}]")
    return "\n".join(lines) + "\n"


def in_milliseconds(costs: Costs) -> Costs:
    """Costs in seconds, for pictures."""

    def scaled(value: Seconds | None) -> Seconds | None:
        if isinstance(value, tuple):
            return tuple(1000 * seconds for seconds in value)
        return None if value is None else 1000 * value

    times: dict[str, Any] = {field.name: scaled(getattr(costs, field.name)) for field in fields(costs)}
    return Costs(**times)


def _figures(choice: Choice) -> tuple[str, str, str]:
    return f"{1000 * choice.cut.step_seconds:.4g} ms", f"{choice.cut.bubble:.1%}", amount(choice.peak_bytes)


def _layers(choice: Choice, between: str) -> str:
    stages = choice.cut.stage_map
    return between.join(str(len(stages.layers(stage))) for stage in range(stages.num_stages))


def _choice(choice: Choice) -> dict[str, Any]:
    return {
        "schedule": choice.cut.program.name,
        "chunks": choice.cut.stage_map.num_chunks,
        "group_size": choice.options.group_size,
        "warmup": choice.options.warmup_per_rank,
        "recompute": choice.recompute,
        "stage_bounds": list(choice.cut.stage_map.bounds),
        "step_seconds": choice.cut.step_seconds,
        "bubble_over_ideal": choice.cut.bubble,
        "activation_bytes": list(choice.cut.peak_bytes),
    }


def schedule(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME", help=f"{', '.join(NAMES)}, auto, search, or a CSV file, one row per rank."
        ),
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
    wire: Annotated[
        float, typer.Option(help="Time of a transfer, in forwards; with --times in ms.", min=0)
    ] = 0.0,
    profile: Annotated[
        Path | None,
        typer.Option(help="Measured layers, a run's profile.json: rank what may be chosen by its step."),
    ] = None,
    activation_gib: Annotated[
        float | None, typer.Option(help="Most activations on a rank, in GiB; with --profile.", min=0)
    ] = None,
    times: Annotated[
        str | None, typer.Option(help="search: layers' forwards in ms, in place of a profile: 31x1,4.8.")
    ] = None,
    most_live: Annotated[
        float | None, typer.Option(help="search: most activations of a rank; 1F1B keeps --stages.", min=0)
    ] = None,
    effort: Annotated[
        float | None,
        typer.Option(help="search: actions to time, in millions, of some seconds each. Default: 10.", min=0),
    ] = None,
    offload: Annotated[
        bool,
        typer.Option("--offload", help="Mark in pictures where inputs come back (dsx.recompute=offload)."),
    ] = False,
    style: Annotated[
        _Style | None,
        drawn(
            "A drawing in text, the actions as torch writes them, everything as JSON, a picture (PNG needs "
            "matplotlib), a page, or a trace for ui.perfetto.dev (.perfetto.json; a forward takes 1 s)."
        ),
    ] = None,
    output: Annotated[Path | None, OUTPUT] = None,
) -> None:
    """Print, draw or search a pipeline schedule, with its bubble.

    Stages are equal, and a backward takes two forwards (one for the input's gradient, one for the weights').
    The peak activations are printed, too. Exit code 1: there can be no such schedule, or the file's would not
    run.
    """
    beside = name == "search" and output is not None and output.suffix == ".csv"  # the order, and a table
    in_text = style in (None, "table")
    kind = "table" if beside and in_text else style_of(style, output, get_args(_Style))
    searching = {"--times": times, "--most-live": most_live, "--effort": effort}
    building = {"--group-size": group_size, "--warmup": warmup}
    _check_size(name, stages, chunks, micro_batches)
    if offload and (name in ("auto", "search") or profile is not None or kind not in _PICTURES):
        fix = f"give a schedule or a CSV file, and --style {', '.join(_PICTURES)}; or leave it out"
        raise ConfigError("--offload", f"nothing of {kind} of {name} is drawn with it", fix)
    for option, value in (building if name == "search" else searching).items():
        if value is not None:
            fix = "leave it out" if name == "search" else "use dsx schedule search, or leave it out"
            raise ConfigError(f"{option} {value}", f"it says nothing to dsx schedule {name}", fix)
    if name == "search":
        measured, sizes = _to_search(profile, times, stages, micro_batches, wire)
        space = Space(
            chunks=None if chunks is None else (chunks,),
            recompute=tuple(measured.layers),
            most_bytes=_cap(measured, sizes[0], activation_gib, most_live),
        )
        _search(measured, sizes, space, int((_EFFORT if effort is None else effort) * 1e6), kind, output)
        return
    if name == "auto" or profile is not None or activation_gib is not None:
        measured, sizes = _check_choice(name, profile, stages, micro_batches, wire)
        space = Space(
            names=NAMES if name == "auto" else (name,),
            chunks=None if chunks is None else (chunks,),
            group_size=group_size,
            warmup_per_rank=warmup,
            most_bytes=None if activation_gib is None else int(activation_gib * _GIB),
        )
        draw = partial(render, style=kind, unit="ms", to_file=output is not None)
        with judging(ScheduleError):
            text = _ranked_text(measured, sizes, space, kind, draw)
        deliver(text, output)
        return
    costs = Costs(transfer_seconds=wire)
    with judging(ScheduleError):
        if name.endswith(".csv"):
            built = _read(Path(name), (stages, chunks, micro_batches, group_size, warmup))
        else:
            options = Options(group_size=group_size, warmup_per_rank=warmup, costs=costs)
            built = _build(name, stages, chunks, micro_batches, options)
    deliver(render(built, costs, kind, to_file=output is not None, offloads=offload), output)


def _build(
    name: str, stages: int | None, chunks: int | None, micro_batches: int | None, options: Options
) -> Schedule:
    if name not in NAMES:
        fix = f"use one of {', '.join(NAMES)}, auto, search, or a .csv file"
        raise ConfigError(f"NAME {name}", "there is no such schedule", fix)
    if stages is None or micro_batches is None:
        raise ConfigError(f"schedule {name}", "it needs --stages and --micro-batches", "give both")
    return build(name, stages, default_chunks(name) if chunks is None else chunks, micro_batches, options)


def _read(path: Path, given: tuple[int | None, ...]) -> Schedule:
    """The schedule in a file, proved to run."""
    if any(number is not None for number in given):
        raise ConfigError(str(path), "the file says its size and order itself", "drop the other numbers")
    text = text_of(path, str(path), "give a CSV file, one row per rank")
    return load(text, name=path.name)


def render(
    built: Schedule,
    costs: Costs,
    style: str,
    *,
    to_file: bool,
    unit: str = "forwards",
    offloads: bool = False,
) -> str | bytes:
    """A schedule with its costs in one of the command's styles, for a file or not."""
    timeline = simulate(built, costs)
    if style == "csv":
        return built.to_csv()
    if style == "json":
        return json.dumps(_facts(built, timeline), indent=2) + "\n"
    if style == "perfetto":
        return pictures.chrome_trace(built, {"simulated": timeline})
    if style in _PICTURES:
        if style == "html":
            return pictures.html(built, timeline, unit=unit, offloads=offloads, costs=costs)
        return picture_of(pictures.svg(built, timeline, unit=unit, offloads=offloads, costs=costs), style)
    width = NARROWEST if to_file else columns()
    facts = _facts(built, timeline)
    peaks = ", ".join(map(str, facts["peak_activations"]))
    share = f", each of 1/{built.num_chunks} of a rank's layers" if built.num_chunks > 1 else ""
    lines = (
        wrapped(schedule_table(built, timeline, width=width, unit="forward"), width),
        f"bubble: {facts['bubble_over_ideal']:.1%} of the ideal time",
        wrapped(f"peak activations per rank, in micro-batches{share}: {peaks}", width, indent="  "),
    )
    return "\n".join(lines) + "\n"


def _facts(built: Schedule, timeline: Timeline) -> dict[str, Any]:
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
