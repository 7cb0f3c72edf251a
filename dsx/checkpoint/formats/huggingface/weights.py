"""Hugging Face model folders: ``config.json`` and safetensors, read in slices and written in shards.

Which Hugging Face tensor holds which part of a parameter, and whether transposed, is in its
:class:`~dsx.models.param.ParamSpec`; this file only moves bytes.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from math import prod
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from dsx.checkpoint import store
from dsx.checkpoint.copy_plan import TILE_ELEMENTS, tiles
from dsx.checkpoint.formats.huggingface.names import (
    CONFIG,
    INDEX,
    SINGLE,
    is_buffer,
    stored_names,
    tied_names,
    untied,
    weight_map,
)
from dsx.checkpoint.formats.safetensors_file import CRC32
from dsx.checkpoint.formats.slices import cut
from dsx.errors import CheckpointError
from dsx.models.hf_config import FAMILIES, model_spec
from dsx.models.param import Box, ParamSpec
from dsx.models.params import param_specs

_FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def open_weights(folder: str | Path) -> HfWeights:
    """The safetensors weights of a model folder: one file, or several with an index.

    Raises:
        CheckpointError: No such file, an unreadable one, or an index that names a missing file.
    """
    folder = Path(folder)
    index, single = folder / INDEX, folder / SINGLE
    if index.exists():
        names = weight_map(index, "download the model again")
        return HfWeights({name: folder / file for name, file in names.items()}, index)
    if not single.exists():
        raise CheckpointError(
            str(folder),
            f"it has neither {SINGLE} nor {INDEX}",
            "name a Hugging Face model folder; convert older .bin weights with "
            "AutoModelForCausalLM.from_pretrained(...).save_pretrained(...)",
        )
    with _open(single) as handle:
        return HfWeights(dict.fromkeys(handle.keys(), single), single)


class HfWeights:
    """Weights of a model folder, read one rank's slices at a time. A context manager that closes its files.

    Args:
        files: File of each tensor.
        source: What to call the whole in messages.
    """

    def __init__(self, files: Mapping[str, Path], source: Path) -> None:
        self._files = dict(files)
        self._source = source
        self._handles: dict[Path, Any] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all files."""
        self._handles.clear()
        self._stack.close()

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all tensors, as the files have them."""
        return tuple(self._files)

    def describe(self, name: str) -> tuple[tuple[int, ...], str]:
        """Shape of a tensor, and type in safetensors' words. Raises CheckpointError if not a float type."""
        stored = self._stored(name)
        if stored.get_dtype() not in _FLOATS:
            raise CheckpointError(
                f"{self._files[name]}: tensor {name}",
                f"its type is {stored.get_dtype()}",
                "use unquantised weights",
            )
        return tuple(stored.get_shape()), stored.get_dtype()

    def check(self, specs: Iterable[ParamSpec]) -> None:
        """Prove that the files hold exactly the model: every tensor there, of its shape, and no other.

        A copy of a tied tensor may be stored as well, with the same bits.

        Raises:
            CheckpointError: Naming the file and the tensor.
        """
        used = set()
        for spec in specs:
            for part, name in enumerate(spec.hf):
                used.add(self._slice(spec, name, _hf_shape(spec, part))[0])
            if spec.tie is not None:
                self._check_tied(spec)
                used.update(tied_names(spec))
        extra = sorted(name for name in self._files if name not in used and not is_buffer(name))
        if extra:
            raise CheckpointError(
                f"{self._files[extra[0]]}: tensor {extra[0]}",
                f"the model that config.json describes has no place for it (of {len(extra)} such tensors)",
                "use the config.json that belongs to these weights",
            )

    def _check_tied(self, spec: ParamSpec) -> None:
        """Prove, some rows at a time, that copies of a tied tensor are copies. Raises CheckpointError."""
        shape = _hf_shape(spec, 0)
        kept, held = self._slice(spec, spec.hf[0], shape)
        for name in tied_names(spec):
            if name not in self._files or name == kept:
                continue
            where = f"{self._files[name]}: tensor {name}"
            here, there = self.describe(name), self.describe(kept)
            if here != there:
                raise untied(where, f"{here[1]} {list(here[0])} and {there[1]} {list(there[0])}")
            copy = self._stored(name)
            for box in tiles(shape, TILE_ELEMENTS):
                at = tuple(slice(*span) for span in box)
                one, other = (stored[at].contiguous().view(torch.uint8) for stored in (copy, held))
                if not torch.equal(one, other):
                    raise untied(where, f"rows {box[0][0]} to {box[0][1]} differ from {kept}")

    def read(self, spec: ParamSpec, tp: int = 1, tp_rank: int = 0) -> Tensor:
        """One rank's local tensor, in the file's dtype, on CPU; reads only that rank's bytes.

        Args:
            spec: The parameter.
            tp: Tensor-parallel degree.
            tp_rank: This rank's index.

        Returns:
            Shape ``spec.local_shape(tp)``; padding is zero.

        Raises:
            CheckpointError: A tensor that is missing, of another shape or not of a float type.
        """
        return cut(spec, lambda box: self._read_box(spec, box), tp, tp_rank)

    def _read_box(self, spec: ParamSpec, box: Box) -> Tensor:
        """The global box of a parameter; it lies within one fused part."""
        part = 0
        if len(spec.hf) > 1:
            assert spec.split is not None
            starts = [sum(spec.parts[:i]) for i in range(len(spec.parts))]
            part = max(i for i, start in enumerate(starts) if start <= box[spec.split][0])
            lo, hi = (at - starts[part] for at in box[spec.split])
            box = (*box[: spec.split], (lo, hi), *box[spec.split + 1 :])
        _, stored = self._slice(spec, spec.hf[part], _hf_shape(spec, part))
        at = tuple(slice(*span) for span in box)
        piece: Tensor = stored[at[::-1] if spec.hf_transposed else at]
        return piece.t() if spec.hf_transposed else piece

    def _slice(self, spec: ParamSpec, name: str, shape: tuple[int, ...]) -> tuple[str, Any]:
        """The stored name of a tensor and its lazy slice, after checking type and shape."""
        found = next((n for n in stored_names(spec, name) if n in self._files), None)
        if found is None:
            raise CheckpointError(
                f"{self._source}: tensor {name}",
                "it is missing",
                "use the config.json that belongs to these weights, or complete the download",
            )
        stored_shape, _ = self.describe(found)
        if stored_shape != shape:
            raise CheckpointError(
                f"{self._files[found]}: tensor {found}",
                f"its shape is {stored_shape}, the model of config.json needs {shape}",
                "use the config.json that belongs to these weights",
            )
        return found, self._stored(found)

    def _stored(self, name: str) -> Any:
        """The lazy slice of a stored tensor."""
        file = self._files[name]
        if file not in self._handles:
            self._handles[file] = self._stack.enter_context(_open(file))
        try:
            return self._handles[file].get_slice(name)
        except SafetensorError as error:
            raise CheckpointError(f"{file}: tensor {name}", str(error), "download the model again") from error


def split(spec: ParamSpec, tensor: Tensor) -> dict[str, Tensor]:
    """The Hugging Face tensors, contiguous, of a parameter's logical tensor.

    Raises:
        CheckpointError: A tensor of another shape, a padded or local one for example.
    """
    if tuple(tensor.shape) != spec.shape:
        raise CheckpointError(
            spec.name,
            f"its shape is {tuple(tensor.shape)}, not {spec.shape}",
            "merge the ranks' tensors first",
        )
    whole = (tensor,)
    pieces = whole if len(spec.hf) == 1 else torch.split(tensor, list(spec.parts), spec.split or 0)
    turned = (piece.t() if spec.hf_transposed else piece for piece in pieces)
    return {name: piece.contiguous() for name, piece in zip(spec.hf, turned, strict=True)}


def write_shard(
    folder: str | Path,
    index: int,
    count: int,
    tensors: Mapping[str, Tensor],
    *,
    metadata: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Write one of ``count`` safetensors files of an export, aside, in ``<folder>.partial``, and sync it.

    Any number of processes that share the file system may each write theirs. When all have returned, one of
    them calls :func:`finish` with what they returned.

    Args:
        folder: The model folder to make. Must not exist yet.
        index: This shard, from 0.
        count: Number of shards.
        tensors: Hugging Face tensors (:func:`split`) by name, any device.
        metadata: Put into the file's header.

    Returns:
        The shard's file name for each tensor's name.

    Raises:
        CheckpointError: ``folder`` exists or cannot be written.
    """
    folder = Path(folder)
    _check_absent(folder)
    file = _partial(folder) / (SINGLE if count == 1 else f"model-{index + 1:05d}-of-{count:05d}.safetensors")
    state = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        # transformers refuses files without the format entry.
        save_file(state, file, metadata={**(metadata or {}), "format": "pt", **_checksums(state)})
        store.sync_file(file)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            str(file), f"cannot be written ({error})", "free space or choose another folder"
        ) from error
    return dict.fromkeys(state, file.name)


def _checksums(state: Mapping[str, Tensor]) -> dict[str, str]:
    flat = {name: tensor.reshape(-1).view(torch.uint8) for name, tensor in state.items() if tensor.numel()}
    return {CRC32 + name: f"{zlib.crc32(data.numpy().data):08x}" for name, data in flat.items()}


def finish(folder: str | Path, config: Mapping[str, Any], files: Mapping[str, str]) -> None:
    """Complete an export whose shards are all written: index, config, sync, then rename into place.

    The result loads with ``AutoModelForCausalLM.from_pretrained(folder)``.

    Args:
        folder: As given to :func:`write_shard`.
        config: The model's Hugging Face config; ``architectures`` and ``dtype`` are set to what was written.
        files: File name of every tensor, as all calls of :func:`write_shard` returned them.

    Raises:
        CheckpointError: ``folder`` exists, or the shards do not hold exactly the model's tensors.
    """
    folder = Path(folder)
    _check_absent(folder)
    partial = _partial(folder)
    expected = {name for spec in param_specs(model_spec(config)) for name in spec.hf}
    if files.keys() != expected:
        raise CheckpointError(
            str(partial),
            f"missing tensors {sorted(expected - files.keys())}, unknown {sorted(files.keys() - expected)}",
            "write every parameter of the model to one shard",
        )
    names = sorted(set(files.values()))
    total_bytes, dtypes = _survey(partial, files)
    # Left by an export that never finished, or the empty shard of a stage that has a tied head alone.
    for leftover in (path for path in partial.iterdir() if path.name not in names):
        leftover.unlink()
    if names != [SINGLE]:
        index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(files.items()))}
        store.write_atomically(partial / INDEX, _as_json(index))
    store.write_atomically(partial / CONFIG, _as_json(_export_config(config, dtypes)))
    store.sync_folder(partial)
    partial.rename(folder)
    store.sync_folder(folder.absolute().parent)


def _export_config(config: Mapping[str, Any], dtypes: set[str]) -> dict[str, Any]:
    out = {key: value for key, value in config.items() if key not in ("dtype", "torch_dtype")}
    out["architectures"] = [FAMILIES[str(config["model_type"])].classes[0]]
    if len(dtypes) == 1:
        out["dtype"] = str(_FLOATS[dtypes.pop()]).removeprefix("torch.")
    return out


def _survey(partial: Path, files: Mapping[str, str]) -> tuple[int, set[str]]:
    """Bytes of all tensors, and their types, from the headers of the files just written."""
    total_bytes, dtypes = 0, set()
    weights = HfWeights({name: partial / file for name, file in files.items()}, partial)
    with weights:
        for name in files:
            shape, dtype = weights.describe(name)
            total_bytes += prod(shape) * _FLOATS[dtype].itemsize
            dtypes.add(dtype)
    return total_bytes, dtypes


def _hf_shape(spec: ParamSpec, part: int) -> tuple[int, ...]:
    """Shape that a Hugging Face tensor of ``spec`` must have."""
    shape = spec.shape
    if len(spec.hf) > 1:
        assert spec.split is not None
        shape = (*shape[: spec.split], spec.parts[part], *shape[spec.split + 1 :])
    return shape[::-1] if spec.hf_transposed else shape


@contextmanager
def _open(file: Path) -> Iterator[Any]:
    try:
        store.opened(file).close()  # a pipe in its place would be waited for
        handle = safe_open(file, framework="pt")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            str(file), f"not a readable safetensors file ({error})", "download or export it again"
        ) from error
    with handle as opened:
        yield opened


def _as_json(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=2) + "\n").encode()


def _partial(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.partial")


def _check_absent(folder: Path) -> None:
    if folder.exists():
        raise CheckpointError(str(folder), "it exists already", "remove it or choose another folder")
