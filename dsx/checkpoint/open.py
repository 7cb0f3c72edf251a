"""A folder, whatever wrote it, as a catalog."""

from __future__ import annotations

from pathlib import Path

from dsx.checkpoint import store
from dsx.checkpoint.catalog import Catalog
from dsx.checkpoint.formats import dsx_manifest, dsx_native
from dsx.errors import CheckpointError

_KNOWN = (
    "give the folder of a checkpoint (or the folder of checkpoints, with its file latest) of dsx, of "
    "DeepSpeed, DeepSpeed's universal format, or a Hugging Face model folder with safetensors"
)


def open_checkpoint(folder: Path) -> Catalog:
    """What the checkpoint in ``folder`` holds, recognised by its files.

    Args:
        folder: The checkpoint's own folder, or the one that has a file ``latest``.

    Raises:
        CheckpointError: Nothing that is known, or a checkpoint that is incomplete or damaged.
    """
    if not folder.is_dir():
        what = "it is not a folder" if folder.exists() else "there is no such folder"
        raise CheckpointError(str(folder), what, _KNOWN)
    if (folder / store.LATEST).is_file() and not (folder / store.MANIFEST).exists():
        folder = store.find(folder)
    if _has_dsx_manifest(folder):
        return dsx_native.catalog_of(folder)
    raise CheckpointError(str(folder), "no file in it is one that dsx knows", _KNOWN)


def _has_dsx_manifest(folder: Path) -> bool:
    """Whether there is a manifest of format 2; format 1 has DeepSpeed's files beside it."""
    path = folder / store.MANIFEST
    return path.exists() and dsx_manifest.read_json(path).get("format") != 1
