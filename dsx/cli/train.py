"""``dsx train``."""

from __future__ import annotations

from importlib.resources import as_file
from pathlib import Path
from typing import Annotated

import typer

from dsx.cli.options import CONFIG, MOST_RANKS, SET, count
from dsx.config.document import shipped


def train(
    config: Annotated[Path, CONFIG],
    *,
    gpus: Annotated[
        int | None,
        count(
            "--gpus", "Number of ranks. Default: one for each GPU, or one where there is none.", MOST_RANKS
        ),
    ] = None,
    overrides: Annotated[list[str] | None, SET] = None,
) -> None:
    """Train by a config on this machine, under DeepSpeed's launcher.

    It starts the recipe that comes with dsx: finetune.py where the model has weights to begin with, gpt_3d.py
    otherwise. The exit code is the run's. For several machines, recipes of your own and options of the
    launcher: deepspeed or torchrun (dsx guide launching).
    """
    from dsx.config.load import content_of
    from dsx.config.ordinary import recipe_of
    from dsx.launch.start import start

    items = overrides or []
    recipe = shipped(f"recipes/{recipe_of(content_of(config, items))}")
    words = [str(config), *(word for item in items for word in ("--set", item))]
    with as_file(recipe) as program:  # a file of a package may lie in an archive
        code = start(program, words, gpus=gpus)
    raise typer.Exit(code)
