"""``dsx plan``."""

from __future__ import annotations

import gc
import json
import sys
from contextlib import redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from dsx.cli import options
from dsx.cli.output import judging, say, style_of, write
from dsx.cli.plot import as_file
from dsx.cli.schedule import in_milliseconds, render
from dsx.errors import ConfigError, DsxError
from dsx.terminal import aligned, amount, columns, wrapped

if TYPE_CHECKING:
    from dsx.planner.cluster import Cluster
    from dsx.planner.inputs import BestLayout, Calibration, PlanInputs
    from dsx.planner.plan import Plan, Ranked
    from dsx.planner.sites import SiteComparison
    from dsx.planner.what_is_left import KnownFigure
    from dsx.waiting import Waiting

_MOST_TOO_LARGE = 3
_PICTURES = ("svg", "png", "html", "pdf")
_DRAWN = ("svg", "png", "html")


def plan(
    config: Annotated[Path | None, options.CONFIG] = None,
    *,
    cluster: Annotated[str, options.CLUSTER],
    gpus: Annotated[int, options.GPUS],
    model: Annotated[str | None, options.MODEL] = None,
    global_batch: Annotated[
        int | None,
        options.count("--global-batch", "Sequences per step over all GPUs. Default: CONFIG's."),
    ] = None,
    sequence_length: Annotated[
        int | None, options.count("--sequence-length", "Tokens of a sequence. Default: CONFIG's.")
    ] = None,
    tensor: Annotated[int | None, options.TENSOR] = None,
    pipeline: Annotated[int | None, options.PIPELINE] = None,
    context: Annotated[int | None, options.CONTEXT] = None,
    expert: Annotated[int | None, options.EXPERT] = None,
    imbalance: Annotated[float, options.IMBALANCE] = 1.0,
    zero: Annotated[int | None, options.ZERO] = None,
    micro_batch: Annotated[int | None, options.MICRO_BATCH] = None,
    gpu_memory: Annotated[float | None, options.GPU_MEMORY] = None,
    overrides: Annotated[list[str] | None, options.SET] = None,
    layers: Annotated[str | None, options.LAYERS] = None,
    top: Annotated[int, typer.Option(help="Meshes (degrees of all axes) to show.", min=1)] = 5,
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure a layer of the model on this machine, and go by that.")
    ] = False,
    goodput: Annotated[
        bool, typer.Option("--goodput", help="Say how often to save, and what failures leave of the time.")
    ] = False,
    saves_of: Annotated[
        Path | None,
        typer.Option(
            "--saves-of", metavar="RUN", help="Folder of a run that has timed saves, for --goodput."
        ),
    ] = None,
    style: Annotated[Literal["table", "json"], options.FORMAT] = "table",
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            metavar="FILE",
            help="File to write: the best layout's config, .json, or a picture of its step, .svg, .png or "
            ".html; with --goodput of what is left, also .pdf.",
        ),
    ] = None,
) -> None:
    """Find the layout that trains a model fastest.

    It ranks tensor, pipeline and (of long sequences) context degree, chunks, schedule, ZeRO stage,
    micro-batch, recompute and sequence parallelism by predicted step time, within the memory of a GPU; what
    an option gives is kept. All but the layout comes from CONFIG, or, without one, from usual settings. Exit
    code 1: nothing fits.

    Ranks that share sequences are tried from 32,768 tokens on, or where CONFIG or --set has
    dsx.parallel.context: a number is kept, "auto" tries all. Experts are shared out over as many ranks as is
    best, or as dsx.parallel.expert says.

    With --layers the model is your own list of layers and CONFIG an ordinary DeepSpeed JSON: pipeline degree,
    schedule, chunks and ZeRO stage are searched for the micro-batch that the list shows.

    A cluster with several sites is planned as islands (dsx.outer) of the best layout of a site, beside the
    best layout of one job over all of them; GPUs and batch are those of all sites.

    With --goodput, or "failures" in the cluster's file, failures are simulated, and spare nodes compared.
    """
    from dsx.planner.cluster import read_cluster
    from dsx.planner.inputs import (
        BestLayout,
        PinnedChoices,
        plan_inputs,
        plan_search,
        site_inputs,
    )
    from dsx.planner.sites import compare
    from dsx.planner.what_is_left import time_left, time_left_of_sites
    from dsx.waiting import Waiting

    pinned = PinnedChoices(
        tensor=tensor,
        pipeline=pipeline,
        context=context,
        expert=expert,
        zero=zero,
        micro_batch=micro_batch,
        gpu_memory=gpu_memory,
    )
    where, measured = read_cluster(cluster), None
    _is_picture(output, told=goodput or saves_of is not None or where.failures is not None)
    waiting = _comparing()
    inputs: PlanInputs
    if layers is None:
        several = where.sites > 1
        if several:
            where.site(gpus)
        inputs = joined = plan_inputs(
            model=model,
            config=config,
            cluster=where.joined(gpus) if several else where,
            gpus=gpus,
            global_batch=global_batch,
            sequence_length=sequence_length,
            overrides=overrides or (),
            imbalance=imbalance,
        )
        site = site_inputs(joined, where) if several else joined
        known = _rests_on(site, where, saves_of, asked=goodput)
        if measure:
            from dsx.planner.profiler import measure_compute

            with Waiting("measuring this machine"):
                measured = measure_compute(site.run, site.cluster)
        if several:
            with judging(DsxError), waiting:
                sites = compare(joined, site, where, pinned, measured, top=top, looked=waiting.stands)
                kept = None if known is None else time_left_of_sites(sites, known)
            _tell(sites.taken, measured, sites.config(joined), style, output, kept, sites)
            return
    else:
        from dsx.planner.own_layers import OwnInputs

        given = {
            "--model": model,
            "--sequence-length": sequence_length,
            "--tensor": tensor,
            "--context": context,
            "--expert": expert,
            "--imbalance": imbalance if imbalance > 1 else None,
            "--micro-batch": micro_batch,
            "--measure": measure or None,
        }
        own = options.own_layers(layers, config, given, overrides or ())
        inputs = OwnInputs.of(*own, cluster=where, gpus=gpus, global_batch=global_batch)
        known = _rests_on(inputs, where, saves_of, asked=goodput)
    with redirect_stdout(sys.stderr), Waiting("looking at the layers"):  # which may print
        search = plan_search(inputs, pinned, measured, looked=waiting.stands)
    with judging(DsxError), redirect_stdout(sys.stderr), waiting:
        found = BestLayout(inputs, search.predictor, search.run(top))
        content = found.config()
        kept = None if known is None else time_left(found, known)
    _tell(found, measured, content, style, output, kept)


def _rests_on(
    inputs: PlanInputs, where: Cluster, saves_of: Path | None, *, asked: bool
) -> dict[str, KnownFigure] | None:
    """What the answer to ``--goodput`` rests on; None if nobody asks. A run's own saves are a mean."""
    from math import isfinite
    from statistics import fmean

    from dsx.planner.what_is_left import KnownFigure, figures
    from dsx.train.curves import METRICS_FILE, read_series
    from dsx.train.progress import SAVE_SECONDS

    if not asked and saves_of is None and where.failures is None:
        return None
    saves = None
    if saves_of is not None:
        found = read_series(saves_of if saves_of.is_file() else saves_of / METRICS_FILE).get(SAVE_SECONDS)
        took = [] if found is None else [each for each in found.values if isfinite(each)]
        if not took or not all(0 <= each < 1e9 for each in took):
            what = f"it has no {SAVE_SECONDS} that could be: it saved nothing, or only at its end"
            raise ConfigError(f"--saves-of {saves_of}", what, "name a run that trained on after a save")
        saves = KnownFigure(fmean(took), f"mean of {len(took)} save{'s' * (len(took) > 1)} of {saves_of}")
    return figures(inputs, where.failures, saves)


def _comparing() -> Waiting:
    from dsx.waiting import Waiting

    gc.set_threshold(100_000)  # what layouts are compared by is let go of by itself, but for very little
    return Waiting("comparing", unit="layouts")


def _tell(
    found: BestLayout,
    measured: Calibration | None,
    content: dict[str, Any],
    style: str,
    output: Path | None,
    kept: dict[str, Any] | None,
    sites: SiteComparison | None = None,
) -> None:
    """Print the plan and write the best layout's config."""
    from dsx.planner.what_is_left import words

    inputs, plan, module = found.inputs, found.plan, found.module_words()
    if output is not None:  # with JSON, standard output is JSON alone
        drawn = _is_picture(output, told=kept is not None)
        write(_picture(found, kept, output) if drawn else json.dumps(content, indent=2) + "\n", output)
    if style == "json":
        facts = _facts(inputs, plan) | {"measured": measured and measured.text, "config": content}
        facts |= {} if sites is None else {"sites": sites.facts()}
        facts |= {} if kept is None else {"goodput": kept}
        say(json.dumps(facts | ({"module": module} if module else {}), indent=2))
        return
    if sites is not None:
        say("\n".join([*sites.text(), ""]))
    say(_text(inputs, plan, measured, module))
    if kept is not None:
        say("\n".join(wrapped(line, columns(), indent="    ") for line in words(kept)))
    if output is not None:
        say(f"wrote {output}")


def _is_picture(output: Path | None, *, told: bool) -> bool:
    """Whether ``--output`` names one, of what ``--goodput`` tells or of a step."""
    return style_of(None, output, ("json", *(_PICTURES if told else _DRAWN))) != "json"


def _picture(found: BestLayout, kept: dict[str, Any] | None, output: Path) -> str | bytes:
    from dsx.planner.what_is_left import draw

    if kept is None:
        layout = found.best.layout
        count = layout.micro_batches(found.plan.task.global_batch)
        built = layout.program.build(layout.pipeline, layout.chunks, count)
        costs = in_milliseconds(found.predictor.costs(layout))
        return render(built, costs, style_of(None, output, _DRAWN), to_file=True, unit="ms")
    cluster, label = found.plan.task.machine.network.cluster, found.best.layout.label
    title = f"{found.inputs.name} on {found.inputs.gpus:,} x {cluster.name}: {label}"
    return as_file(draw(kept, title), style_of(None, output, _PICTURES), title=title)


def _text(inputs: PlanInputs, found: Plan, measured: Calibration | None, module: str) -> str:
    from dsx.planner.plan import reason
    from dsx.train.progress import compact

    cluster = found.task.machine.network.cluster
    title = (
        f"{inputs.name}, {compact(inputs.num_parameters)} parameters on {inputs.gpus} x {cluster.name}, "
        f"{inputs.batch_words} per step, {inputs.precision}"
    )
    lines = [title]
    if measured is not None:
        lines.append(measured.text)
    table = ["", *_table(inputs, found), ""]
    head = [wrapped(line, columns(), indent="  ") for line in lines]
    lines = [f"best: {found.best[0].layout.label}"]
    parts = found.best[0].time.parts()
    shares = ((name, seconds / found.best[0].time.seconds) for name, seconds in parts.items())
    lines.append("its step: " + ", ".join(f"{name} {share:.1%}" for name, share in shares if share >= 0.001))
    if found.best[0].time.hidden:
        share = found.best[0].time.hidden / found.best[0].time.seconds
        lines[-1] += f"; beside that, {share:.1%} of expert communication behind weight gradients"
    lines += [module] if module else []
    lines += ["", "one thing changed"]
    lines += [f"  {_change(found.best[0], each)}: {reason(found, each)}" for each in found.others]
    if found.too_large:
        lines += ["", "faster, but too large"]
        lines += [
            f"  {each.layout.label}: {reason(found, each)}" for each in found.too_large[:_MOST_TOO_LARGE]
        ]
    usable = f"{amount(found.cap_bytes)} of a GPU's memory count as usable"
    effort = f"{found.predicted} layouts simulated, {found.estimated} memories estimated"
    lines += ["", f"predicted, not measured; {usable}; {effort}"]
    known = str(found.task.evidence(found.best[0].layout))
    hint = "" if measured is not None or module else "; --measure goes by this machine's rates"
    lines.append(known + hint)
    if found.best[0].layout.mesh.ep > 1:
        lines.append(options.how_busy(inputs.imbalance))
    if inputs.offloads:
        lines.append("offload: its memory counts, but what the host and the copies take of the time does not")
    told = (line if line == module else wrapped(line, columns(), indent="    ") for line in lines)
    return "\n".join([*head, *table, *told])  # the module's line is to be pasted


def _table(inputs: PlanInputs, found: Plan) -> list[str]:
    from dsx.planner.plan import reason

    unit = "tokens" if found.task.layers.sequence_length else "samples"
    titles = ("", "step", f"{unit}/s", "MFU", "bubble", "commun.", "memory", "layout", "against the best")
    rows = [titles]
    error = _error(found)
    about = "" if error is None else f" ± {error:.0%}"
    for place, ranked in enumerate(found.best, 1):
        facts = _figures(inputs, found, ranked)
        rows.append(
            (
                str(place),
                f"{facts['step_seconds']:.4g} s{about}",
                f"{facts[f'{unit}_per_second']:,.0f}",
                f"{facts['mfu']:.1%}",
                f"{facts['bubble_over_ideal']:.1%}",
                f"{facts['communication_share']:.1%}",
                amount(ranked.peak_bytes),
                ranked.layout.label,
                "" if place == 1 else reason(found, ranked),
            )
        )
    return aligned(rows, left=(7, 8), width=columns())


def _error(found: Plan) -> float | None:
    """The share within which nine of ten predicted steps lie; None if nothing of the kind was compared."""
    evidence = found.task.evidence(found.best[0].layout)
    return None if isinstance(evidence, str) or evidence.stands_in else evidence.error


def _change(best: Ranked, other: Ranked) -> str:
    """How a layout differs from the best one, in a few words."""
    have, want = best.layout.label.split(", "), other.layout.label.split(", ")
    new = [word for word in want if word not in have]
    gone = [f"no {word}" for word in have if word not in want] if not new else []
    return ", ".join(new or gone)


def _figures(inputs: PlanInputs, found: Plan, ranked: Ranked) -> dict[str, Any]:
    seconds, task = ranked.time.seconds, found.task
    peak = task.machine.network.cluster.peak(task.machine.precision)
    length = task.layers.sequence_length
    return {
        "step_seconds": seconds,
        "step_error": _error(found),
        "samples_per_second": task.global_batch / seconds,
        **({"tokens_per_second": task.global_batch * length / seconds} if length else {}),
        "mfu": task.flops / (seconds * inputs.gpus * peak),
        "bubble_over_ideal": ranked.time.bubble_over_ideal,
        "communication_share": ranked.time.communication_share,
        "peak_bytes": ranked.peak_bytes,
    }


def _facts(inputs: PlanInputs, found: Plan) -> dict[str, Any]:
    from dsx.planner.plan import reason

    def facts(ranked: Ranked) -> dict[str, Any]:
        layout = asdict(ranked.layout)
        del layout["mesh"], layout["bounds"]
        mesh = ranked.layout.mesh
        if mesh.cp == 1:
            del layout["context_method"]
        degrees = {axis.title: mesh.degree(axis.name) for axis in mesh.named}
        figures = _figures(inputs, found, ranked) | {"parts_seconds": ranked.time.parts()}
        figures |= {"expert_hidden_seconds": ranked.time.hidden} if mesh.ep > 1 else {}
        return (
            degrees
            | layout
            | figures
            | {"fits": ranked.fits, "peak_is_bound": ranked.is_bound, "reason": reason(found, ranked)}
        )

    return {
        "cap_bytes": found.cap_bytes,
        "best": [facts(each) for each in found.best],
        "one_thing_changed": [facts(each) for each in found.others],
        "faster_but_too_large": [facts(each) for each in found.too_large],
    }
