"""``dsx estimate``."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, get_args

import typer

from dsx.cli import options
from dsx.cli.output import BAD, deliver, say, style_of
from dsx.cli.plot import as_file
from dsx.config.deepspeed import precision
from dsx.errors import ConfigError
from dsx.terminal import amount, columns, unit_of, wrapped

if TYPE_CHECKING:
    from dsx.config.run import RunConfig
    from dsx.memory.estimate import RunMemory
    from dsx.memory.layer_list import LayerList
    from dsx.memory.layer_record import DeviceKind
    from dsx.memory.ledger import Label
    from dsx.planner.cluster import Cluster, GpuMemory

_GIB = 1 << 30
_LOOKING = "looking at the layers"
_WEIGHTLESS = ("optimizer.params.", "scheduler.")  # whatever their values, memory is the same

_Style = Literal["table", "json", "svg", "html", "png", "pdf"]
_PICTURES = ("svg", "html", "png", "pdf")


def estimate(
    config: Annotated[Path | None, options.CONFIG] = None,
    *,
    gpus: Annotated[int, options.GPUS] = 1,
    model: Annotated[str | None, options.MODEL] = None,
    gpu_memory: Annotated[float | None, options.GPU_MEMORY] = None,
    cluster: Annotated[str | None, options.CLUSTER] = None,
    tensor: Annotated[int | None, options.TENSOR] = None,
    pipeline: Annotated[int | None, options.PIPELINE] = None,
    context: Annotated[int | None, options.CONTEXT] = None,
    expert: Annotated[int | None, options.EXPERT] = None,
    imbalance: Annotated[float, options.IMBALANCE] = 1.0,
    zero: Annotated[int | None, options.ZERO] = None,
    micro_batch: Annotated[int | None, options.MICRO_BATCH] = None,
    overrides: Annotated[list[str] | None, options.SET] = None,
    layers: Annotated[str | None, options.LAYERS] = None,
    chunks: Annotated[int | None, options.CHUNKS] = None,
    schedule: Annotated[str | None, typer.Option("--schedule", help="The schedule, by name.")] = None,
    style: Annotated[
        _Style | None, options.drawn("A table, everything as JSON, or a chart (needs matplotlib).")
    ] = None,
    output: Annotated[Path | None, options.OUTPUT] = None,
) -> None:
    """Print what each rank's memory will hold, before a run.

    It takes a CONFIG with a dsx block; an ordinary DeepSpeed JSON, the Trainer's too, with --model; or
    --model alone, for bf16 with AdamW and ZeRO-1. What is assumed is printed. With --layers the model is
    your own list of layers, and CONFIG an ordinary DeepSpeed JSON.

    Per pipeline rank it prints parameters, gradients, optimizer states, buckets, activations of the
    schedule's micro-batches, logits, transfers and temporaries at the highest moment. With --gpu-memory, exit
    code 1 says that a rank does not fit, and three changes that would help are printed.
    """
    from dsx.planner import cluster as clusters

    if config is None and model is None and layers is None:
        raise ConfigError("CONFIG", "no model is named", "give CONFIG, or --model, or both")
    kind = style_of(style, output, get_args(_Style))
    gpu = None if cluster is None else clusters.read_cluster(cluster)
    if gpu is not None:
        gpu.check_gpus(gpus)
    room = None
    if gpu_memory is not None:
        room = clusters.gpu_memory(gpu_memory, gpu)
    elif gpu is not None:
        room = clusters.GpuMemory(gpu.memory_bytes, gpu.reserved_bytes)
    short = {
        "dsx.parallel.tensor": tensor,
        "dsx.parallel.pipeline": pipeline,
        "dsx.parallel.context": context,
        "dsx.parallel.expert": expert,
        "dsx.parallel.chunks": chunks,
        "dsx.schedule.name": schedule,
        "zero_optimization.stage": zero,
        "train_micro_batch_size_per_gpu": micro_batch,
    }
    given = {key: value for key, value in short.items() if value is not None}
    items = [f"{key}={value}" for key, value in given.items() if layers is None or not key.startswith("dsx.")]
    items += overrides or []
    if layers is None:
        found = _of_model(config, model, items, gpus, gpu, room, imbalance)
    else:
        refused = {
            "--model": model,
            "--tensor": tensor,
            "--context": context,
            "--expert": expert,
            "--imbalance": imbalance if imbalance > 1 else None,
            "--micro-batch": micro_batch,
            **{f"--set {item}": item for item in overrides or () if item.startswith("dsx.")},
        }
        own = options.own_layers(layers, config, refused, items)
        found = _of_layers(own, gpus, pipeline or 1, chunks or 1, schedule or "auto", gpu, room)
    memory, title = found.memory, found.heading[0]
    if kind in _PICTURES:
        from dsx.memory.table import draw

        figure = draw(memory, title=title, capacity_bytes=None if room is None else room.usable_bytes)
        deliver(as_file(figure, kind, title=title), output)
    elif kind == "json":
        deliver(json.dumps({**found.facts, **_figures(memory, room)}, indent=2) + "\n", output)
    else:
        deliver(_text(found, room), output)
    if room is not None and found.memory.peak_bytes > room.usable_bytes:
        if found.advice is not None:
            say(found.advice(room.usable_bytes), err=True)
        raise typer.Exit(BAD)


class _Found(NamedTuple):
    """An estimate: what it is of, in words and as JSON, what it leaves out, and what would make it fit."""

    heading: Sequence[str]
    facts: Mapping[str, Any]
    memory: RunMemory
    beyond: str
    advice: Callable[[int], str] | None = None


def _of_layers(
    own: tuple[str, Callable[[], LayerList], dict[str, Any]],
    gpus: int,
    pipeline: int,
    chunks: int,
    schedule: str,
    cluster: Cluster | None,
    room: GpuMemory | None,
) -> _Found:
    from dsx.memory.layer_list import estimate_layers
    from dsx.memory.table import beyond_tensors
    from dsx.waiting import Waiting

    name, make, content = own
    with redirect_stdout(sys.stderr), Waiting(_LOOKING):  # the layers may print
        memory = estimate_layers(
            make,
            content,
            world_size=gpus,
            pipeline=pipeline,
            chunks=chunks,
            schedule=schedule,
            device=_device(cluster),
            capacity_bytes=None if room is None else room.usable_bytes,
        )
    title = f"{name} on {gpus} rank{'s' if gpus > 1 else ''}: pipeline {pipeline} x data {gpus // pipeline}"
    beyond = beyond_tensors(_device(cluster), precision(content))
    return _Found([title], {"layers": name}, memory, beyond)


def _of_model(
    config: Path | None,
    model: str | None,
    items: list[str],
    gpus: int,
    cluster: Cluster | None,
    room: GpuMemory | None,
    imbalance: float,
) -> _Found:
    from dsx.config.load import read
    from dsx.config.ordinary import complete
    from dsx.config.resolve import resolve
    from dsx.memory.estimate import estimate_run
    from dsx.memory.job import job_of
    from dsx.memory.table import beyond_tensors
    from dsx.waiting import Waiting

    whole = complete({} if config is None else read(config), model, overrides=items, where=str(config))
    source: Path | Mapping[str, Any] = whole.content
    if config is not None and model is None:
        source = config  # whose name errors then say
    else:
        items = []
    with Waiting(_LOOKING):
        run = resolve(source, world_size=gpus, overrides=items)
        where = cluster and _on_sites(cluster, run, gpus)
        capacity = None if room is None else room.usable_bytes
        job = job_of(run, device=_device(where), capacity_bytes=capacity, imbalance=imbalance)
        memory = estimate_run(job)
    several = "es" if run.accumulation > 1 else ""
    size = f"{run.micro_batch_size} x {run.sequence_length} tokens"
    told = [each for each in whole.assumed if not each.key.startswith(_WEIGHTLESS)]
    heading = [
        _title(run),
        *([options.how_busy(imbalance)] if run.mesh.ep > 1 else []),
        f"{run.accumulation} micro-batch{several} of {size}",
        *([memory.supposed] if memory.supposed else []),
        *(["assumed, unless --set says otherwise:", *(f"  {each}" for each in told)] if told else []),
    ]
    facts: dict[str, Any] = {
        "run": run.summary(),
        "assumed": {each.key: each.value for each in whole.assumed},
    }
    facts |= {"imbalance": imbalance} if run.mesh.ep > 1 else {}
    facts |= {"pictures": memory.supposed} if memory.supposed else {}
    beyond = beyond_tensors(_device(where), run.precision)
    return _Found(heading, facts, memory, beyond, lambda most: _advice(source, items, run, most, where))


def _on_sites(cluster: Cluster, run: RunConfig, gpus: int) -> Cluster:
    """What a run has of a cluster: one of several sites for an island, all of them for one job."""
    if cluster.sites == 1:
        return cluster
    alone = cluster.site(gpus if run.islands is None else run.islands.count * run.islands.ranks)
    return cluster.joined(gpus) if run.islands is None else alone


def _device(cluster: Cluster | None) -> DeviceKind:
    """On CPUs a run takes other paths than on GPUs."""
    return "cpu" if cluster is not None and cluster.is_host else "cuda"


def _title(run: RunConfig) -> str:
    from dsx.train.progress import compact

    mesh = run.mesh
    ranks = f"{mesh.size} rank{'s' if mesh.size > 1 else ''}"
    words = [
        f"{run.model.family}, {compact(run.num_parameters)} parameters on {ranks}: {mesh.words}",
        f"ZeRO-{run.zero_stage}",
        run.precision,
        str(run.deepspeed["optimizer"]["type"]),
    ]
    if mesh.pp > 1:
        words.append(run.schedule_name + (f" with {run.chunks} chunks" if run.chunks > 1 else ""))
    if run.islands is not None:
        words.append(f"one of {run.islands.count} islands")
    if run.dsx.recompute != "none":
        words.append(f"recompute {run.dsx.recompute}")
    if run.dsx.compile != "none":
        words.append("compiled blocks counted as they run uncompiled")
    return ", ".join(words)


def _text(found: _Found, room: GpuMemory | None) -> str:
    from dsx.memory.table import details, table

    memory, width = found.memory, columns()
    highest = memory.highest
    peak = highest.estimate.peak
    name, unit = unit_of(memory.peak_bytes)
    lines = [
        *found.heading,
        "",
        f"{name} at each rank's peak",
        table(memory, width=width),
        "",
        f"what pipeline rank {highest.pp_rank} holds then ({peak.when}), {name}",
        details(highest, width=width),
        "",
        wrapped(
            f"between steps: {highest.estimate.steady_bytes / unit:.2f} {name}. Not counted: {found.beyond}.",
            width,
        ),
    ]
    fullest = max((role.estimate for role in memory.roles), key=lambda estimate: estimate.host_bytes)
    if fullest.host_bytes:
        largest = ", ".join(f"{label.name} {size / unit:.2f}" for label, size in fullest.host_lines[:4])
        said = f"on the host, a rank: up to {fullest.host_bytes / unit:.2f} {name} ({largest})"
        lines.append(wrapped(said, width))
    if room is not None:
        left = (room.usable_bytes - memory.peak_bytes) / _GIB
        said = f"fits, {left:.2f} GiB left" if left >= 0 else f"does not fit, {-left:.2f} GiB too much"
        lines.append(f"{room}: {said}")
    return "\n".join(lines) + "\n"


def _lines(held: Sequence[tuple[Label, int]]) -> list[dict[str, Any]]:
    return [{**label._asdict(), "bytes": size} for label, size in held]


def _figures(memory: RunMemory, room: GpuMemory | None) -> dict[str, Any]:
    roles = [
        {
            "pipeline_rank": role.pp_rank,
            "ranks": list(role.ranks),
            "peak_bytes": role.estimate.peak.peak_bytes,
            "steady_bytes": role.estimate.steady_bytes,
            "host_bytes": role.estimate.host_bytes,
            "host_lines": _lines(role.estimate.host_lines),
            "phases": [
                {
                    "name": phase.name,
                    "peak_bytes": phase.peak_bytes,
                    "where": phase.where,
                    "lines": _lines(phase.lines),
                }
                for phase in role.estimate.phases
            ],
        }
        for role in memory.roles
    ]
    capacity = None if room is None else room.usable_bytes
    return {
        "peak_bytes": memory.peak_bytes,
        "capacity_bytes": capacity,
        "fits": None if capacity is None else memory.peak_bytes <= capacity,
        "pipeline_ranks": roles,
    }


def _advice(
    source: Path | Mapping[str, Any],
    items: list[str],
    run: RunConfig,
    capacity: int,
    cluster: Cluster | None,
) -> str:
    """The cheapest changes, by the step's time on ``cluster``: on an H100's if there is none."""
    from dsx.planner.cluster import preset
    from dsx.planner.predicted import LayoutScorer
    from dsx.planner.what_fits import what_would_fit
    from dsx.waiting import Waiting

    where = cluster or preset("H100")
    scorer = LayoutScorer.of(where, capacity)
    with Waiting("looking for changes with which it fits"):
        found = what_would_fit(source, items, run, scorer)
    if not found:
        return (
            "dsx: it does not fit, and no one or two changes make it fit: `dsx plan` looks through all "
            "layouts of these GPUs; if none fits, use more GPUs"
        )
    now = scorer.seconds(run)
    lines = [f"dsx: it does not fit. The cheapest changes with which it would (steps on {where.name}):"]
    for fit in found:
        flags = " ".join(f"--set {item}" for item in fit.items)
        step = "waiting for the host besides" if fit.seconds is None else f"{fit.seconds / now:.2f}x the step"
        lines.append(f"  {fit.saving.words}: {amount(fit.peak_bytes)}, {step} ({flags})")
    return "\n".join(lines)
