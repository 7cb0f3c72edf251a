"""Reads a folder as a catalog, whatever wrote it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from dsx.checkpoint import store
from dsx.checkpoint.catalog import Catalog
from dsx.checkpoint.claims import check_claims, reading
from dsx.checkpoint.formats import dcp, megatron, native, universal
from dsx.checkpoint.formats.deepspeed import reader
from dsx.checkpoint.formats.deepspeed.cut import Rules
from dsx.checkpoint.formats.deepspeed.files import looks_stock
from dsx.checkpoint.formats.deepspeed.order import Ties
from dsx.checkpoint.formats.huggingface import catalog as hugging_face
from dsx.errors import CheckpointError

_KNOWN = (
    "give the folder of a checkpoint of dsx, DeepSpeed, torch.distributed.checkpoint or Megatron-core "
    "(torch_dist), a Hugging Face model folder with safetensors or pytorch_model.bin, the folder of "
    "checkpoints, which has a file latest, or the folder of a run"
)


def _has_manifest(folder: Path) -> bool:
    return (folder / store.MANIFEST).exists()


# How each format is recognised and read; the first that fits counts.
_READERS: tuple[tuple[Callable[[Path], object], Callable[..., Catalog]], ...] = (
    (universal.looks_universal, universal.catalog_of),
    (_has_manifest, native.catalog_of),
    (looks_stock, reader.catalog_of),
    (megatron.looks_megatron, megatron.catalog_of),
    (dcp.looks_dcp, dcp.catalog_of),
    (hugging_face.files_of, hugging_face.catalog_of),
    (hugging_face.looks_adapted, hugging_face.adapter_catalog),
)


def open_checkpoint(folder: Path, *, rules: Path | None = None, ties: Ties | None = None) -> Catalog:
    """What the checkpoint in ``folder`` holds, recognised by its files.

    Args:
        folder: The checkpoint's own folder, the one that has a file ``latest``, or that of a run.
        rules: A file that says how tensor parallelism cut the tensors, for stock DeepSpeed checkpoints that
            do not (:mod:`dsx.checkpoint.formats.deepspeed.cut`).
        ties: Tied modules of a stock pipeline, before those of the rules: without ZeRO its files name none.
    """
    with reading(str(folder)):
        catalog = _opened(folder, rules, ties)
        check_claims(catalog)
    return catalog


def _opened(folder: Path, rules: Path | None, ties: Ties | None) -> Catalog:
    if not folder.is_dir():
        what = "it is not a folder" if folder.exists() else "there is no such folder"
        raise CheckpointError(str(folder), what, _KNOWN)
    folder = _newest(folder)
    read = next((read for looks, read in _READERS if looks(folder)), None)
    if read is reader.catalog_of:
        given = None if rules is None else Rules.read(rules)
        return read(folder, given if ties is None else replace(given or Rules(), ties=ties))
    if rules is not None:
        raise CheckpointError(
            f"--rules {rules}", f"{folder} is no stock DeepSpeed checkpoint", "leave the rules out"
        )
    if read is None:
        raise _unknown(folder)
    return read(folder)


def _newest(folder: Path) -> Path:
    """The folder itself, or the checkpoint that ``latest`` names in it or in a run's checkpoints."""
    if _has_manifest(folder) or looks_stock(folder):
        return folder
    found = next((root for root in _roots(folder) if (root / store.LATEST).is_file()), None)
    return folder if found is None else store.find(found)


def _unknown(folder: Path) -> CheckpointError:
    root, found = next(((root, tags) for root in _roots(folder) if (tags := store.tags(root))), (folder, ()))
    if found:
        what = "it holds checkpoints, and no file latest"
        return CheckpointError(str(root), what, f"name one of {', '.join(found)} in it")
    below = sorted(str(run) for run in folder.glob("*") if (run / store.CHECKPOINTS / store.LATEST).is_file())
    what = "no file in it is one that dsx knows"
    return CheckpointError(
        str(root), what, f"name one of the runs in it: {', '.join(below)}" if below else _KNOWN
    )


def _roots(folder: Path) -> tuple[Path, Path]:
    """Where checkpoints may lie: a folder of them, or of a run."""
    return folder, folder / store.CHECKPOINTS
