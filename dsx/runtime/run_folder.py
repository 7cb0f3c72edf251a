"""Where a run keeps things in its output folder, and a checkpoint found from any place in it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dsx.checkpoint import store
from dsx.errors import CheckpointError

CONFIG = "config.json"

_ABOVE = 2  # folders between a checkpoint, or a model in hf/, and its run's folder


def find_checkpoint(path: Path, step: int | None = None) -> Path:
    """The checkpoint that ``path`` stands for: itself, the latest in a folder of them, or in a run's folder.

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
    """The tokenizer that the run trained with whose output ``folder`` lies in; None if it is in none."""
    for place in (folder, *folder.absolute().parents[:_ABOVE]):
        try:
            config: Any = json.loads((place / CONFIG).read_text(encoding="utf-8"))
            return str(config["dsx"]["data"]["tokenizer"])
        except (OSError, ValueError, KeyError, TypeError):  # another program's config.json, or none
            continue
    return None
