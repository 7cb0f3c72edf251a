"""Hugging Face model folders: ``config.json`` and safetensors, read in slices and written in shards.

Which Hugging Face tensor holds which part of a parameter, and whether transposed, is in its
:class:`~dsx.models.param.ParamSpec`; this file only moves bytes.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from dsx.checkpoint import store
from dsx.checkpoint.catalog import Catalog, Entry
from dsx.checkpoint.formats.huggingface.catalog import (
    NamesOf,
    as_dsx,
    as_json,
    catalog_of,
    file_name,
    states_of,
    under_model_names,
    with_dtype,
)
from dsx.checkpoint.formats.huggingface.names import CONFIG, INDEX, SINGLE
from dsx.checkpoint.formats.safetensors_file import CRC32, NAMES, contents
from dsx.checkpoint.pieces import local_parts, whole_part
from dsx.checkpoint.plain import as_numpy
from dsx.checkpoint.read import Reader
from dsx.checkpoint.staging import check_absent, partial_of
from dsx.config.adapter import SETTINGS as ADAPTER_SETTINGS
from dsx.config.adapter import WEIGHTS as ADAPTER_WEIGHTS
from dsx.errors import CheckpointError
from dsx.models.hf_config import FAMILIES
from dsx.models.param import ParamSpec
from dsx.parallel.mesh import ALONE, Coordinates

_FLOATS = {"float64", "float32", "float16", "bfloat16"}


class HfWeights:
    """Weights of a model folder, read one rank's slices at a time. A context manager that closes its files.

    Args:
        names_of: The model's names of the files' tensors, by the names that they have there, where these may
            differ: :meth:`dsx.hub.disk_names.FolderNames.of`.
        file: The one file that counts, an adapter's for example; None for those of the model.
        apart: As of :func:`under_model_names`.
    """

    def __init__(
        self,
        folder: str | Path,
        names_of: NamesOf | None = None,
        file: str | None = None,
        apart: Sequence[ParamSpec] = (),
    ) -> None:
        self._source = catalog_of(Path(folder), file)
        if names_of is not None:
            self._source = under_model_names(self._source, names_of(self._source.by_name, folder), apart)
        self._by_name = self._source.by_name
        self.reader = Reader(self._source)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.reader.close()

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all tensors, as the files have them."""
        return tuple(self._by_name)

    def check(self, specs: Sequence[ParamSpec]) -> None:
        """Prove that the files hold exactly the model: every tensor there, of its shape, and no other.

        A copy of a tied tensor may be stored as well, with the same bits.
        """
        as_dsx(self._source, specs)
        for spec in specs:
            self._weight(spec)

    def read(self, spec: ParamSpec, at: Coordinates = ALONE) -> Tensor:
        """One rank's local tensor, in the file's dtype, on CPU; reads only that rank's bytes.

        It has the shape ``spec.local_shape(at)``; padding is zero.
        """
        entry, shape = self._weight(spec), spec.local_shape(at)
        local = torch.zeros(shape, dtype=getattr(torch, entry.dtype))
        parts = local_parts(spec, at, 0, local.numel())
        self.reader.fill(entry, parts, as_numpy(local), entry.dtype)
        return local

    def _weight(self, spec: ParamSpec) -> Entry:
        names, (entry,) = states_of(self._source, spec, self._by_name)
        if entry.dtype not in _FLOATS and not spec.buffer:
            raise CheckpointError(
                f"{self._source.root / entry.pieces[0].file}: tensor {names[0]}",
                f"its type is {NAMES[entry.dtype]}",
                "use unquantised weights",
            )
        return entry


def tensors_of(folder: Catalog, entries: Sequence[Entry]) -> dict[str, Tensor]:
    """Tensors of a model folder as they are, on the CPU."""
    found = {entry.name: torch.empty(entry.shape, dtype=getattr(torch, entry.dtype)) for entry in entries}
    with Reader(folder) as reader:
        for entry in entries:
            flat = as_numpy(found[entry.name]).reshape(-1)
            reader.fill(entry, [whole_part(entry.shape)], flat, entry.dtype)
    return found


def split(spec: ParamSpec, tensor: Tensor) -> dict[str, Tensor]:
    """The Hugging Face tensors, contiguous, of a parameter's logical tensor."""
    if tuple(tensor.shape) != spec.shape:
        raise CheckpointError(
            spec.name,
            f"its shape is {tuple(tensor.shape)}, not {spec.shape}",
            "merge the ranks' tensors first",
        )
    found = {}
    for name, box in spec.hf_boxes:
        piece = tensor[tuple(slice(*span) for span in box)]
        piece = piece[0] if spec.hf_stacked else piece
        found[name] = (piece.transpose(-1, -2) if spec.hf_transposed else piece).contiguous()
    return found


def join(spec: ParamSpec, get: Callable[[str], Tensor | None]) -> Tensor | None:
    """The logical tensor of a parameter's Hugging Face tensors; None if one of them is None."""
    whole = torch.empty(spec.shape)
    for name, box in spec.hf_boxes:
        tensor = get(name)
        if tensor is None:
            return None
        part = tensor.detach().transpose(-1, -2) if spec.hf_transposed else tensor.detach()
        whole[tuple(slice(*span) for span in box)] = part
    return whole


def may_be_left(name: str) -> bool:
    """Whether a file of this name may be one of an export that was killed, which the next one removes."""
    plain = name.removeprefix(".").removesuffix(".partial")
    of_systems = name == ".DS_Store" or name.startswith(".nfs")  # NFS: an open file that was removed
    return of_systems or plain.endswith(".safetensors") or plain in (INDEX, CONFIG, ADAPTER_SETTINGS)


def write_shard(folder: str | Path, index: int, count: int, tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Write one of ``count`` safetensors files of an export, aside, in ``<folder>.partial``, and sync it.

    Any number of processes that share the file system may each write theirs. When all have returned, one of
    them calls :func:`finish` with what they returned.

    ``folder``, the model folder to make, must not exist yet. ``index`` counts shards from 0; ``tensors`` are
    Hugging Face's (:func:`split`) by name, on any device.

    Returns:
        The shard's file name for each tensor's name.
    """
    folder = Path(folder)
    check_absent(folder)
    file = partial_of(folder) / file_name(index, count)
    _save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, file)
    return dict.fromkeys(tensors, file.name)


def _save(state: Mapping[str, Tensor], file: Path) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        flat = {name: one.reshape(-1).view(torch.uint8) for name, one in state.items() if one.numel()}
        sums = {CRC32 + name: f"{zlib.crc32(data.numpy().data):08x}" for name, data in flat.items()}
        # transformers refuses files without the format entry.
        save_file(dict(state), file, metadata={"format": "pt", **sums})
        store.sync_file(file)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            str(file), f"cannot be written ({error})", "free space or choose another folder"
        ) from error


def finish_adapter(
    folder: str | Path, settings: Mapping[str, Any], files: Mapping[str, str], specs: Sequence[ParamSpec]
) -> None:
    """Complete an export of an adapter, as :func:`finish` does one of a model.

    The result loads with ``PeftModel.from_pretrained(model, folder)``.
    """
    folder = Path(folder)
    check_absent(folder)
    partial = partial_of(folder)
    _require_all(partial, files, {name for spec in specs for name in (*spec.hf, *spec.hf_copies)})
    tensors: dict[str, Tensor] = {}
    for name in sorted(set(files.values())):
        tensors |= load_file(partial / name)
    _save(tensors, partial / ADAPTER_WEIGHTS)
    for shard in (path for path in partial.iterdir() if path.name != ADAPTER_WEIGHTS):
        shard.unlink()
    store.write_atomically(partial / ADAPTER_SETTINGS, as_json(dict(settings)))
    _put_in_place(partial, folder)


def _require_all(partial: Path, files: Mapping[str, str], expected: set[str]) -> None:
    if files.keys() != expected:
        raise CheckpointError(
            str(partial),
            f"missing tensors {sorted(expected - files.keys())}, unknown {sorted(files.keys() - expected)}",
            "write every tensor of the model to one shard",
        )


def _put_in_place(partial: Path, folder: Path) -> None:
    store.sync_folder(partial)
    partial.rename(folder)
    store.sync_folder(folder.absolute().parent)


def finish(
    folder: str | Path,
    config: Mapping[str, Any],
    files: Mapping[str, str],
    specs: Sequence[ParamSpec],
    others: Collection[str] | None = None,
) -> None:
    """Complete an export whose shards are all written: index, config, sync, then rename into place.

    The result loads with ``AutoModelForCausalLM.from_pretrained(folder)``.

    Args:
        folder: As given to :func:`write_shard`.
        config: The model's Hugging Face config; ``architectures`` and ``dtype`` are set to what was written.
        files: File name of every tensor, as all calls of :func:`write_shard` returned them.
        specs: Every tensor of the model.
        others: Names of tensors that ride along, of a composite model, whose class ``config`` names; None of
            another.
    """
    folder = Path(folder)
    check_absent(folder)
    partial = partial_of(folder)
    beside = {*(others or ())}
    _require_all(partial, files, {*beside, *(name for spec in specs for name in spec.hf)})
    names = sorted(set(files.values()))
    held = [entry for name in names for entry in contents(partial, name)[0]]
    # Left by an export that never finished, or the empty shard of a stage that has a tied head alone.
    for leftover in (path for path in partial.iterdir() if path.name not in names):
        leftover.unlink()
    if names != [SINGLE]:
        index = {
            "metadata": {"total_size": sum(entry.num_bytes for entry in held)},
            "weight_map": dict(sorted(files.items())),
        }
        store.write_atomically(partial / INDEX, as_json(index))
    buffers = {*beside, *(name for spec in specs if spec.buffer for name in spec.hf)}
    weights = [entry for entry in held if entry.name not in buffers]
    complete = dict(config)
    if others is None:
        complete["architectures"] = [_class_of(str(config["model_type"]))]
    store.write_atomically(partial / CONFIG, as_json(with_dtype(complete, weights)))
    _put_in_place(partial, folder)


def _class_of(model_type: str) -> str:
    """Name of the class of a family's causal language models."""
    if model_type in FAMILIES:
        return FAMILIES[model_type].classes[0]
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    found = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type)
    if found is None:
        raise CheckpointError(
            f"model_type = {model_type}",
            "transformers has no class of this text model alone, which could read the folder",
            "start from the weights of a composite model's folder, which is then exported whole",
        )
    return str(found)
