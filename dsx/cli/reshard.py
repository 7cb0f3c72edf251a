"""``dsx reshard`` and ``dsx upcycle``, which make one checkpoint or folder of another."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from dsx.cli.options import (
    CHECKPOINT_FORMATS,
    CHUNKS,
    CONFIG,
    CONTEXT,
    EXPERT,
    FORMAT,
    GPUS,
    PIPELINE,
    RULES,
    TENSOR,
    ZERO,
    count,
)
from dsx.cli.output import one_a_line, parse_bytes, say, say_json
from dsx.errors import ConfigError
from dsx.parallel.mesh import AXES, Mesh
from dsx.terminal import amount, seconds

if TYPE_CHECKING:
    from dsx.checkpoint.execute import ConversionReport
    from dsx.checkpoint.layouts import TargetDegrees
    from dsx.config.run import RunConfig


def reshard(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="SOURCE",
            help="A checkpoint's folder, the folder of checkpoints that has a file latest, or a run's.",
            show_default=False,
        ),
    ],
    target: Annotated[
        Path,
        typer.Argument(metavar="TARGET", help="Folder to make; must not exist.", show_default=False),
    ],
    config: Annotated[Path | None, CONFIG] = None,
    *,
    to: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FORMAT,LAYOUT",
            help=f"What TARGET shall be: a format ({', '.join(CHECKPOINT_FORMATS)}; dsx if left out), a "
            "layout (tp=2,pp=2,chunks=2,dp=2,zero=1; what is left out stays), or both; repeatable.",
        ),
    ] = None,
    gpus: Annotated[int | None, GPUS] = None,
    tensor: Annotated[int | None, TENSOR] = None,
    pipeline: Annotated[int | None, PIPELINE] = None,
    context: Annotated[int | None, CONTEXT] = None,
    expert: Annotated[int | None, EXPERT] = None,
    data: Annotated[int | None, count("--data", "Data-parallel degree.")] = None,
    chunks: Annotated[int | None, CHUNKS] = None,
    zero: Annotated[int | None, ZERO] = None,
    precision: Annotated[
        Literal["fp32", "bf16", "fp16"] | None,
        typer.Option(help="Precision of the weights; the source's by default."),
    ] = None,
    rules: Annotated[Path | None, RULES] = None,
    names: Annotated[
        Literal["dsx", "hf", "source"] | None,
        typer.Option(
            help="Whose names tensors shall have. Default: dsx's in dsx, Hugging Face's in hf, else the "
            "source's."
        ),
    ] = None,
    hf_config: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The config.json of a hf TARGET.", exists=True, dir_okay=False),
    ] = None,
    partition: Annotated[
        str | None,
        typer.Option(
            metavar="METHOD|COUNTS",
            help="How the PipelineModule of a deepspeed TARGET cuts its layers: uniform, parameters (its "
            "default) or layers per stage, 3,2.",
        ),
    ] = None,
    tied: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=LAYERS",
            help="A TiedLayerSpec's key and the layers that use it, embed=0,4, where SOURCE does not say; "
            "none: there is none.",
        ),
    ] = None,
    base: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Model folder of the frozen parameters that SOURCE leaves out; default: where it says.",
            exists=True,
            file_okay=False,
        ),
    ] = None,
    memory: Annotated[str, typer.Option(metavar="SIZE", help="Most memory to take.")] = "512MiB",
    workers: Annotated[
        int | None, typer.Option(min=1, help="Threads.", show_default="one per core, 2 to 8")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be done, and check what can be checked.")
    ] = False,
    latest: Annotated[
        bool | None,
        typer.Option(
            "--latest/--no-latest",
            help="Whether the file latest beside TARGET shall name it. Default: if there is none.",
        ),
    ] = None,
    style: Annotated[Literal["table", "json"], FORMAT] = "table",
) -> None:
    """Convert a checkpoint to another layout or format, byte for byte.

    The layout is given by --to and the degrees, or by CONFIG on --gpus ranks. TARGET appears whole or not at
    all; what is written beside it is said first.
    """
    from dsx.checkpoint.execute import ConversionOptions, default_workers
    from dsx.checkpoint.formats.huggingface.names import read_config
    from dsx.checkpoint.layouts import Pipeline, TargetDegrees, parse_ties
    from dsx.checkpoint.open import open_checkpoint
    from dsx.checkpoint.reshard import WantedTarget, prepare
    from dsx.waiting import Waiting

    degrees = TargetDegrees(
        tensor=tensor,
        pipeline=pipeline,
        context=context,
        expert=expert,
        data=data,
        chunks=chunks,
        zero=zero,
    )
    target_format, layout = _asked(to or [])
    if layout:
        degrees = degrees.over(TargetDegrees.parse(layout))
    wanted = WantedTarget(
        format=target_format,
        degrees=degrees,
        run=_run(degrees, config, gpus),
        precision=precision,
        names=names,
        hf_config=None if hf_config is None else read_config(hf_config),
        pipeline=Pipeline(partition=partition, tied=None if tied is None else parse_ties(tied)),
        base=base,
    )
    with Waiting(f"reading what {source} holds and planning"):
        checkpoint = open_checkpoint(source, rules=rules, ties=wanted.pipeline.tied)
        conversion = prepare(checkpoint, target, wanted)
    point = conversion.target.is_tag and not (target.absolute().parent / "latest").exists()
    options = ConversionOptions(
        memory_bytes=parse_bytes(memory),
        workers=workers or default_workers(),
        point_latest=point if latest is None else latest and conversion.target.is_tag,
    )
    outline = conversion.outline(options)
    if style != "json":
        say(_outline_text(outline))
    if dry_run:
        if style == "json":
            say_json(outline)
        return
    with Waiting("copying", total=conversion.plan.write_bytes, unit="bytes") as waiting:
        report = conversion.run(replace(options, progress=waiting.advance))
    if style == "json":
        told = asdict(report) | {"target": str(report.target)}
        say_json(outline | {"report": told})
    else:
        text = report_text(report)
        text += "".join(f"\nnote       {note}" for note in report.notes if note not in outline["notes"])
        if conversion.target.is_tag:
            # load_checkpoint loads nothing from a folder that has no ``latest``.
            named, place = options.point_latest, target.absolute()
            how = "which latest there names" if named else "say it: latest there does not name it"
            text += f"\nto load    folder {place.parent}, tag {place.name}, {how}"
        say(text)


def _asked(to: list[str]) -> tuple[str, str]:
    """The format and the layout that ``--to`` names."""
    from dsx.checkpoint.reshard import WRITERS

    words = [word.strip() for item in to for word in item.split(",") if word.strip()]
    formats = list(dict.fromkeys(word for word in words if word in WRITERS))
    if len(formats) > 1:
        raise ConfigError(f"--to {','.join(to)}", f"{' and '.join(formats)} are two formats", "name one")
    return (formats or ["dsx"])[0], ",".join(word for word in words if word not in WRITERS)


def _run(degrees: TargetDegrees, config: Path | None, gpus: int | None) -> RunConfig | None:
    """The resolved config whose layout to write, if one is named."""
    from dsx.checkpoint.layouts import TargetDegrees

    if config is None:
        if gpus is not None:
            raise ConfigError(f"--gpus {gpus}", "it needs a CONFIG", "name one, or use --data instead")
        return None
    if gpus is None:
        raise ConfigError(f"CONFIG {config}", "it needs the number of ranks", "give --gpus N")
    if degrees != TargetDegrees():
        raise ConfigError(f"CONFIG {config}", "it says the layout itself", "leave out the degrees")
    from dsx.config.resolve import resolve  # here: without a config a conversion needs none of it

    return resolve(config, world_size=gpus)


def _outline_text(outline: dict[str, Any]) -> str:
    source, target = outline["source"], outline["target"]
    layout = target["layout"]
    where = ""
    if layout is not None:
        degrees = Mesh.of(**{axis.name: layout.get(axis.name, 1) for axis in AXES}).words
        where = f", {degrees}, chunks {layout['chunks']}, ZeRO-{layout['zero_stage']}"
    read_bytes, write_bytes = amount(outline["read_bytes"]), amount(outline["write_bytes"])
    amounts = f"{read_bytes} to read, {write_bytes} to write in {outline['files']} files"
    lines = [
        f"source     {source['path']} ({source['format']})",
        f"target     {target['path']} ({target['format']}){where}",
        f"tensors    {outline['tensors']}: {', '.join(outline['states'])}",
        f"copy       {amounts}; {amount(outline['free_bytes'])} free on the disk",
        f"memory     {amount(outline['memory_bytes'])} at most for tensors",
    ]
    lines += [f"beside     {each}" for each in outline["beside"]]
    return one_a_line([*lines, *(f"note       {note}" for note in outline["notes"])])


def report_text(report: ConversionReport) -> str:
    """What a conversion did, for people."""
    rate = amount(report.written_bytes / max(report.seconds, 1e-9))
    checked = []
    if report.tiles_checked:
        checked.append(f"{report.tiles_checked:,} tiles had the checksum of the source's manifest")
    if report.sums_checked:
        checked.append(f"{report.sums_checked:,} other checksums of the source's files were right")
    what = f"{report.states} states of {report.tensors} tensors, {report.elements:,} elements"
    lines = [
        f"written    {report.target}: {what}",
        f"time       {seconds(report.seconds)}, {rate}/s",
        f"checked    {'; '.join(checked) or 'the source has no checksums: nothing'}",
    ]
    return "\n".join(lines)


_FAMILIES = {"llama": "mixtral", "mistral": "mixtral", "qwen2": "qwen2_moe", "qwen3": "qwen3_moe"}


def upcycle(
    dense: Annotated[
        Path, typer.Argument(metavar="DENSE", help="A dense Hugging Face folder.", show_default=False)
    ],
    target: Annotated[
        Path, typer.Argument(metavar="TARGET", help="Folder to make; must not exist.", show_default=False)
    ],
    experts: Annotated[int, typer.Option("--experts", min=1, help="Experts of a layer.")] = 8,
    top_k: Annotated[int, typer.Option("--top-k", min=1, help="Experts that a token is sent to.")] = 2,
    granularity: Annotated[
        int, typer.Option(min=1, help="Into how many experts a copy of the feed-forward is divided.")
    ] = 1,
    family: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL_TYPE",
            help="Family of the mixture. Default: "
            + ", ".join(f"{moe} of {name}" for name, moe in _FAMILIES.items())
            + ".",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the routers' weights.")] = 0,
    style: Annotated[Literal["table", "json"], FORMAT] = "table",
) -> None:
    """Make a mixture of experts, at first equal, of a dense model.

    Every expert is a copy of the feed-forward, or a part of one; routers are drawn at random. Before anything
    is written, a small model of the same structure has to give the dense one's logits.
    """
    from dsx.checkpoint.execute import ConversionOptions
    from dsx.checkpoint.formats.huggingface.names import read_config
    from dsx.checkpoint.upcycle import prepare
    from dsx.hub.upcycle import Upcycling
    from dsx.waiting import Waiting

    kind = str(read_config(dense).get("model_type"))
    moe = family or _FAMILIES.get(kind)
    if moe is None:
        raise ConfigError(f"DENSE {dense}", f"of {kind} no mixture is known", "name one with --family")
    wanted = Upcycling(family=moe, experts=experts, top_k=top_k, granularity=granularity, seed=seed)
    with Waiting(f"trying {kind} as {moe}, small, and planning"):
        conversion = prepare(dense, target, wanted)
    with Waiting("copying", total=conversion.plan.write_bytes, unit="bytes") as waiting:
        report = conversion.run(ConversionOptions(progress=waiting.advance))
    if style == "json":
        say_json({**asdict(report), "target": str(report.target), "family": moe})
        return
    proof = f"proved     a small {moe} of the same structure has the logits of {kind}"
    say(one_a_line([proof, *report_text(report).splitlines()]))
