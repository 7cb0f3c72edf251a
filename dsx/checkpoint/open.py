"""A folder, whatever wrote it, as a catalog."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from dsx.checkpoint import store
from dsx.checkpoint.catalog import Catalog
from dsx.checkpoint.formats import dcp, deepspeed, dsx_manifest, dsx_native, hf_catalog, universal
from dsx.checkpoint.formats.deepspeed_cut import Rules
from dsx.checkpoint.formats.deepspeed_files import looks_stock
from dsx.checkpoint.manifest import Manifest
from dsx.errors import CheckpointError
from dsx.plan.params import param_specs
from dsx.spec.model import ModelSpec
from dsx.spec.param import Init, ParamSpec

_KNOWN = (
    "give the folder of a checkpoint of dsx, of DeepSpeed or of torch.distributed.checkpoint, a Hugging Face "
    "model folder with safetensors, or the folder of checkpoints, which has a file latest"
)


def open_checkpoint(folder: Path, *, rules: Path | None = None) -> Catalog:
    """What the checkpoint in ``folder`` holds, recognised by its files.

    Args:
        folder: The checkpoint's own folder, or the one that has a file ``latest``.
        rules: A file that says how tensor parallelism cut the tensors, for stock DeepSpeed checkpoints that
            do not (:mod:`dsx.checkpoint.formats.deepspeed_cut`).

    Raises:
        CheckpointError: Nothing that is known, a checkpoint that is incomplete or damaged, or rules for one
            that needs none.
    """
    if not folder.is_dir():
        what = "it is not a folder" if folder.exists() else "there is no such folder"
        raise CheckpointError(str(folder), what, _KNOWN)
    manifest = folder / store.MANIFEST
    if not manifest.exists() and not looks_stock(folder) and (folder / store.LATEST).is_file():
        folder = store.find(folder)
        manifest = folder / store.MANIFEST
    given = None if rules is None else Rules.read(rules)
    if manifest.exists() and dsx_manifest.read_json(manifest).get("format") == 1:
        return _format_1(folder, given)
    if universal.looks_universal(folder):
        return universal.catalog_of(folder)
    if not manifest.exists() and looks_stock(folder):
        return deepspeed.catalog_of(folder, given)
    if given is not None:
        raise CheckpointError(
            f"--rules {rules}", f"{folder} is no stock DeepSpeed checkpoint", "leave the rules out"
        )
    if manifest.exists():
        return dsx_native.catalog_of(folder)
    if dcp.looks_dcp(folder):
        return dcp.catalog_of(folder)
    if any((folder / name).is_file() for name in (hf_catalog.SINGLE, hf_catalog.INDEX)):
        return hf_catalog.catalog_of(folder)
    raise CheckpointError(str(folder), "no file in it is one that dsx knows", _KNOWN)


def _format_1(folder: Path, rules: Rules | None) -> Catalog:
    """A checkpoint of dsx 0.1: DeepSpeed's files, and a manifest that says how they are cut."""
    manifest = Manifest.read(folder / store.MANIFEST)
    specs = {spec.name: spec for spec in _specs(manifest)}
    told = replace(rules or Rules(), specs=specs, source=str(folder / store.MANIFEST))
    catalog = deepspeed.catalog_of(folder, told, tp=manifest.mesh.get("tp", 1))
    kept = (
        *("versions", "mesh", "chunks", "placement", "stage_bounds", "zero_stage", "precision", "schedule"),
        *("step", "global_batch_size", "tokens", "data_cursor", "seed", "model", "wandb_run_id"),
    )
    facts = {key: value for key in kept if (value := getattr(manifest, key)) is not None}
    random = {
        str(rank): name
        for rank in range(manifest.world_size)
        if (folder / (name := f"dsx_random_{rank}.safetensors")).is_file()
    }
    return replace(catalog, facts={**catalog.facts, **facts, "random_files": random})


def _specs(manifest: Manifest) -> tuple[ParamSpec, ...]:
    """How the tensors are cut: of dsx's own families in full, else as far as the manifest tells."""
    if manifest.model is not None:
        padding = max((entry.pad_multiple for entry in manifest.tensors), default=1)
        try:
            return param_specs(ModelSpec(**manifest.model), pad_multiple=padding)
        except (TypeError, AttributeError):
            raise CheckpointError(
                f"{manifest.source}: model", "this version does not know such a model", "use another dsx"
            ) from None
    return tuple(
        ParamSpec(
            name=entry.name,
            layer=int(entry.name.partition(".")[0]),
            shape=entry.shape,
            init=Init(kind="zeros"),
            hf=(entry.name,),
            split=entry.split,
            parts=entry.parts,
            pad_multiple=entry.pad_multiple,
            tie=entry.tie,
        )
        for entry in manifest.tensors
        if entry.name.partition(".")[0].isdecimal()
    )
