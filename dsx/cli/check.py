"""``dsx check``."""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import typer


def check(
    config: Annotated[
        Path,
        typer.Argument(
            metavar="CONFIG", help="DeepSpeed JSON with a dsx block.", exists=True, dir_okay=False
        ),
    ],
    world_size: Annotated[int, typer.Option(help="Number of ranks (processes) to resolve for.", min=1)],
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Put a value over a key of the config; repeatable."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Resolve CONFIG for a world size.

    Prints mesh, schedule, batch and the layers of every stage; or what is wrong, with exit code 1.
    """
    from dsx.config.resolve import resolve

    for item in overrides or []:
        if "=" not in item:
            what = f"{item!r} is no KEY=VALUE; write dsx.parallel.tensor=4"
            raise typer.BadParameter(what, param_hint="--set")
    summary = resolve(config, world_size=world_size, overrides=overrides or []).summary()
    typer.echo(json.dumps(summary, indent=2) if as_json else _text(summary))


def _text(summary: dict[str, Any]) -> str:
    mesh, batch, model = summary["mesh"], summary["batch"], summary["model"]
    degrees = (
        f"tensor {mesh['tp']} x pipeline {mesh['pp']} x data {mesh['dp']} = {summary['world_size']} ranks"
    )
    factors = (
        f"micro-batch {batch['micro_batch_size']}",
        f"{batch['micro_batches_per_step']} micro-batches",
        f"data {mesh['dp']}",
    )
    size = f"{batch['global_batch_size']} sequences of {batch['sequence_length']} tokens per step"
    lines = [
        f"model      {model['family']}, {model['parameters']:,} parameters",
        f"mesh       {degrees}{', sequence parallel' if summary['sequence_parallel'] else ''}",
        f"schedule   {summary['schedule']}, chunks per pipeline rank: {summary['chunks']}",
        f"memory     ZeRO-{summary['zero_stage']}, {summary['precision']}, recompute {summary['recompute']}",
        f"batch      {size} = {' x '.join(factors)}",
    ]
    for stage in summary["stages"]:
        chunks = " | ".join(_layers(layers) for layers in stage["chunks"])
        size = f"{stage['parameters_per_rank']:,} parameters per rank"
        lines.append(f"stage {stage['pipeline_rank']:<4} {chunks}  ({size})")
    lines += [f"note       {note}" for note in summary["notes"]]
    return "\n".join(lines)


def _layers(layers: list[str]) -> str:
    """``["0 WordEmbedding", "1 Block", "2 Block"]`` as ``0 WordEmbedding, 1-2 Block``."""
    words = []
    for kind, group in groupby((layer.split(" ", 1) for layer in layers), key=lambda layer: layer[1]):
        numbers = [number for number, _ in group]
        words.append(f"{numbers[0]}{f'-{numbers[-1]}' if len(numbers) > 1 else ''} {kind}")
    return ", ".join(words)
