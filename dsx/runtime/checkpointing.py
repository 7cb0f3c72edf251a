"""Save and load a run: what all ranks hold, in a layout-free description, committed as one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist

from dsx.checkpoint import store
from dsx.checkpoint.catalog import Catalog
from dsx.checkpoint.open import open_checkpoint
from dsx.errors import CheckpointError, DsxError
from dsx.runtime.entry import AGREED
from dsx.runtime.launch import agree
from dsx.runtime.random_states import restore_random_states
from dsx.runtime.run_facts import require_same_optimizer, restore_facts
from dsx.runtime.stored import Names, load_stored
from dsx.runtime.zero_adapters.held import refresh_weights

if TYPE_CHECKING:
    from dsx.runtime.engine import PipelineEngine

_SHOWN = 3

T = TypeVar("T")


def load(engine: PipelineEngine, folder: Path, *, tag: str | None) -> tuple[Path, dict[str, Any]]:
    """Continue from a checkpoint, whatever layout it was saved in. Collective.

    ``folder`` is one of checkpoints, of which ``tag`` names one (the one that its file ``latest`` names by
    default), that of a run, or a checkpoint itself. A checkpoint of stock DeepSpeed is read as well, if its
    tensors have the names of this run's.

    Weights, optimizer state, learning-rate scheduler, counters and random states are restored; in the layout
    it was saved in, bit for bit. Each rank reads what it holds and no more.

    Returns:
        The checkpoint's folder and the ``client_state`` it was saved with.

    Raises:
        CheckpointError: None there, damaged, or of another model or optimizer.
    """
    names = _names(engine)
    root, tag = agree(lambda: store.place(folder, tag))

    def check() -> Path:
        found = store.find(root, tag)
        catalog = _or_earlier(root, tag, lambda: open_checkpoint(found))
        require_same_model(catalog, names)
        require_same_optimizer(engine, catalog.facts, str(found))
        return found

    path = agree(check)
    catalog = _together(lambda: _or_earlier(root, tag, lambda: open_checkpoint(path)))
    _together(lambda: _or_earlier(root, tag, lambda: load_stored(engine, catalog)))
    refresh_weights(engine.deepspeed_engine)
    client = restore_facts(engine, catalog.facts, str(path))
    _together(lambda: _or_earlier(root, tag, lambda: restore_random_states(engine, catalog)))
    return path, client


def _names(engine: PipelineEngine) -> dict[str, tuple[int, ...]]:
    """Shape of every parameter of the whole model. A collective call over all ranks."""
    names = Names(engine)
    specs = [names.of(parameter) for parameter in engine.pipeline.chunks.parameters()]
    gathered: list[dict[str, tuple[int, ...]]] = [{} for _ in range(engine.groups.mesh.size)]
    dist.all_gather_object(gathered, {spec.name: spec.shape for spec in specs})
    return {name: shape for part in gathered for name, shape in part.items()}


def require_same_model(catalog: Catalog, here: Mapping[str, tuple[int, ...]]) -> None:
    """Raise CheckpointError unless a run's parameters, by name and shape, are those of the checkpoint."""
    saved = {entry.name: entry.shape for entry in catalog.entries if entry.role != "buffer"}
    differences = [
        *(f"{name} {saved[name]} is in the checkpoint alone" for name in sorted(saved.keys() - here.keys())),
        *(f"{name} {here[name]} is in this run's model alone" for name in sorted(here.keys() - saved.keys())),
        *(
            f"{name} has shape {saved[name]} in the checkpoint, {here[name]} here"
            for name in sorted(saved.keys() & here.keys())
            if saved[name] != here[name]
        ),
    ]
    if differences:
        more = f"; and {len(differences) - _SHOWN} more differences" if len(differences) > _SHOWN else ""
        raise CheckpointError(
            str(catalog.root),
            f"the checkpoint is of another model: {'; '.join(differences[:_SHOWN])}{more}",
            "give the model that the checkpoint was trained with (dsx.model), or another checkpoint",
        )


def _or_earlier(root: Path, tag: str | None, action: Callable[[], T]) -> T:
    """Run ``action``. What is wrong with the checkpoint that ``latest`` names is said with an earlier one."""
    try:
        return action()
    except CheckpointError as error:
        newest = "" if tag is not None else store.find(root).name
        others = [other for other in store.tags(root) if other != newest]
        if tag is not None or not others:
            raise
        fix = f"{error.fix}; to go on from {others[-1]}, write that name into {root / store.LATEST}"
        raise CheckpointError(error.where, error.what, fix) from error


def _together(action: Callable[[], T]) -> T:
    """Run ``action`` on every rank; if it fails on any, every rank raises the first error."""
    result, error = None, None
    try:
        result = action()
    except DsxError as found:
        error = found
    errors: list[DsxError | None] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, error)
    first = next((found for found in errors if found is not None), None)
    if first is not None:
        first.add_note(AGREED)
        raise first
    return result  # type: ignore[return-value]
