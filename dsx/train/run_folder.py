"""Where a run keeps things in its output folder, and how a checkpoint is found from any place in it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dsx.checkpoint import store
from dsx.config.run import RunConfig
from dsx.errors import CheckpointError

CONFIG = "config.json"

_ABOVE = 2  # folders between a checkpoint, or a model in hf/, and its run's folder


def find_checkpoint(path: Path, step: int | None = None) -> Path:
    """The checkpoint that ``path`` stands for: itself, or the latest in a run or a folder of checkpoints.

    Args:
        path: A run's output folder, a folder of checkpoints, or one checkpoint or model folder.
        step: Optimizer step whose checkpoint is wanted, in a folder of several; the latest by default.

    Raises:
        CheckpointError: None there, or none of that step; with the ones there are.
    """
    for root in (path / store.CHECKPOINTS, path):
        if (root / store.LATEST).is_file():
            return store.find(root, None if step is None else f"global_step{step}")
    if step is not None:
        raise CheckpointError(
            f"step {step} of {path}",
            "the folder is none of several checkpoints: it has no file latest",
            "leave the step out, or give the folder of the run",
        )
    return path


def tokenizer_of_run(folder: Path) -> str | None:
    """The tokenizer of the run in whose output ``folder`` lies; None if it lies in none."""
    for place in (folder, *folder.absolute().parents[:_ABOVE]):
        try:
            config: Any = json.loads((place / CONFIG).read_text(encoding="utf-8"))
            return str(config["dsx"]["data"]["tokenizer"])
        except (
            OSError,
            ValueError,
            KeyError,
            TypeError,
            RecursionError,
        ):  # of another program, or none
            continue
    return None


def own_checkpoint(config: RunConfig) -> tuple[Path, str | None] | None:
    """Folder and tag of the newest checkpoint that this run itself has saved; None if there is none."""
    root = config.output / store.CHECKPOINTS
    if config.dsx.train.resume == "never":
        return None
    if (root / store.LATEST).exists():
        return root, None
    found = store.tags(root)
    if len(found) > 1:
        store.find(root)  # says that latest is missing, and what there is
    # A kill between the first checkpoint's last rename and its name in latest leaves one alone.
    return (root, found[0]) if found else None


def start_of(config: RunConfig) -> tuple[Path, str | None] | None:
    """Folder and tag to continue from; None for a fresh start."""
    named = config.dsx.train.resume
    own = own_checkpoint(config)
    if own is not None:
        return own
    if named in ("auto", "never"):
        return None
    root, tag = store.place(Path(named))
    if tag is not None or (root / store.LATEST).is_file():
        return root, tag
    raise CheckpointError(
        f"dsx.train.resume = {named}",
        "there is no checkpoint of dsx",
        'give the output folder of a run, or a checkpoint in it; or "auto" or "never"',
    )


def standing(config: RunConfig, step: int) -> str:
    """One line for a run that ends before its last step: how far it came, and how to continue.

    Args:
        config: The run's.
        step: Steps done.
    """
    root, train = config.output / store.CHECKPOINTS, config.dsx.train
    came = f"stopped after step {step} of {train.steps}"
    try:
        tag = (root / store.LATEST).read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return f"{came}; nothing is saved: the same command begins anew"
    if train.resume == "never":
        return f'{came}; saved as {root / tag}: dsx.train.resume = "auto" goes on from there'
    return f"{came}; saved as {root / tag}: the same command goes on from there"
