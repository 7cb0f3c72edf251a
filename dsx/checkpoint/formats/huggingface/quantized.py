"""A quantised folder's tensors as those of the plain model, which stored numbers and scales make when read.

Which tensors belong together is told by their names, and how by the config (:mod:`dsx.models.quantization`).
What they make has the config's dtype, and is read in boxes as any other tensor is
(:mod:`dsx.checkpoint.unpack`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite, prod
from pathlib import Path
from typing import Any

from dsx.checkpoint import store
from dsx.checkpoint.catalog import Entry, Packed, Piece
from dsx.checkpoint.json_text import parsed
from dsx.checkpoint.pieces import contiguous
from dsx.errors import CheckpointError
from dsx.models.quantization import FolderQuantization

_AGAIN = "download it again, or give the model before it was quantised"
_MXFP4_BLOCK = 32
_STATE = ".quant_state.bitsandbytes__"
_LARGEST_STATE_BYTES = 1 << 16
_BLOCKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)  # that bitsandbytes has
_ACTIVATIONS = ("activation_scale", "input_scale")
"""Scales of inputs, which weights do not need."""


def plain_entries(root: Path, entries: Sequence[Entry], how: FolderQuantization) -> list[Entry]:
    """The tensors of the plain model, in the order of their numbers in the files.

    Args:
        root: The folder.
        entries: Its tensors under their own names.
        how: What its config.json says.

    Raises:
        CheckpointError: Tensors that belong together are missing or do not fit.
    """
    folder = _Folder(root, {entry.name: entry for entry in entries}, how, set())
    made = [(entry, _METHODS[how.method](folder, entry)) for entry in entries]
    return [plain or entry for entry, plain in made if plain is not None or entry.name not in folder.used]


@dataclass(frozen=True, slots=True)
class _Folder:
    """A folder's tensors by name, and the names of those that are parts of others."""

    root: Path
    held: Mapping[str, Entry]
    how: FolderQuantization
    used: set[str]

    def part(self, state: str, name: str, shape: tuple[int, ...] | None, *dtypes: str) -> Entry:
        """A stored tensor as the part of another, seen in a shape (None: its own); of one of the dtypes."""
        entry = self.held.get(name)
        if entry is None:
            raise CheckpointError(f"{self.root}: tensor {name}", "it is missing", _AGAIN)
        shape = entry.shape if shape is None else shape
        if entry.numel != prod(shape) or entry.dtype not in dtypes or not entry.numel:
            what = f"it is {entry.dtype} {entry.shape}, the tensor needs {' or '.join(dtypes)} {shape}"
            raise CheckpointError(f"{self.root}: tensor {name}", what, _AGAIN)
        self.used.add(name)
        (piece,) = entry.pieces
        seen = replace(piece, start=(0,) * len(shape), shape=shape, strides=contiguous(shape))
        return replace(entry, state=state, shape=shape, pieces=(seen,))

    def made(self, entry: Entry, name: str, shape: tuple[int, ...], packed: Packed) -> Entry:
        """The tensor that parts make, of which ``entry`` has the numbers; the last dims may be turned."""
        steps = contiguous(packed.shape)
        steps = steps if shape == packed.shape else (*steps[:-2], *steps[-2:][::-1])
        piece = Piece(entry.pieces[0].file, 0, (0,) * len(shape), shape, steps, packed=packed)
        return replace(entry, name=name, shape=shape, dtype=self.how.dtype, pieces=(piece,), role="trained")


def _fp8(folder: _Folder, entry: Entry) -> Entry | None:
    """Of DeepSeek-V3 and transformers' FineGrainedFP8Config; where a matrix has one scale, of vLLM's too."""
    if entry.dtype != "float8_e4m3fn" or len(entry.shape) < 2:
        return None
    names = (f"{entry.name}_scale_inv", f"{entry.name}_scale")
    name = next((name for name in names if name in folder.held), names[0])
    block, grid = entry.shape, (1,) * len(entry.shape)
    if folder.how.block is not None:
        block = (*(1 for _ in entry.shape[2:]), *folder.how.block)
        grid = tuple(-(-extent // size) for extent, size in zip(entry.shape, block, strict=True))
    scales = folder.part("scales", name, grid, "float32", "bfloat16", "float16", "float8_e8m0fnu", "uint8")
    numbers = folder.part("numbers", entry.name, entry.shape, entry.dtype)
    inputs = (f"{entry.name.rpartition('.')[0]}.{kind}" for kind in _ACTIVATIONS)
    folder.used.update(name for name in inputs if name in folder.held)
    packed = Packed(method="fp8", shape=entry.shape, block=block, parts=(numbers, scales))
    return folder.made(entry, entry.name, entry.shape, packed)


def _mxfp4(folder: _Folder, entry: Entry) -> Entry | None:
    """Of GPT-OSS: experts [E, rows, columns] of inputs by outputs, stored the other way round."""
    name = entry.name.removesuffix("_blocks")
    if name == entry.name or len(entry.shape) != 4:
        return None
    experts, rows, groups, _ = entry.shape
    shape = (experts, rows, groups * _MXFP4_BLOCK)
    parts = (
        folder.part("numbers", entry.name, (*entry.shape[:3], _MXFP4_BLOCK // 2), "uint8"),
        folder.part("scales", f"{name}_scales", entry.shape[:3], "uint8"),
    )
    packed = Packed(method="mxfp4", shape=shape, block=(1, 1, _MXFP4_BLOCK), parts=parts)
    return folder.made(entry, name, (experts, shape[2], rows), packed)


def _bitsandbytes(folder: _Folder, entry: Entry) -> Entry | None:
    """Of bitsandbytes' Params4bit and Linear8bitLt."""
    name, module = entry.name, entry.name.removesuffix("weight")
    if entry.dtype == "int8" and f"{module}SCB" in folder.held:
        both = (
            folder.part("numbers", name, entry.shape, "int8"),
            folder.part("scales", f"{module}SCB", entry.shape[:1], "float32"),
        )
        folder.used.update({f"{module}weight_format"} & folder.held.keys())
        packed = Packed(method="int8", shape=entry.shape, block=(1, entry.shape[-1]), parts=both)
        return folder.made(entry, name, entry.shape, packed)
    state = next((key for kind in ("nf4", "fp4") if (key := f"{name}{_STATE}{kind}") in folder.held), None)
    if state is None:
        return None
    shape, size, outer, mean = _settings(folder, folder.part("settings", state, None, "uint8"))
    flat = prod(shape)
    # The numbers may be stored as another dtype's (bnb_4bit_quant_storage).
    columns = entry.numel * entry.item_bytes // shape[0]
    if 2 * columns * shape[0] != flat:
        what = f"{entry.num_bytes} bytes of 4-bit numbers do not make {shape}, of even rows"
        raise CheckpointError(f"{folder.root}: tensor {name}", what, _AGAIN)
    folder.used.add(name)
    (piece,) = entry.pieces
    seen = replace(piece, start=(0, 0), shape=(shape[0], columns), strides=(columns, 1))
    numbers = replace(entry, state="numbers", dtype="uint8", shape=seen.shape, pieces=(seen,))
    scales = -(-flat // size)
    parts = [numbers, folder.part("table", f"{name}.quant_map", (16,), "float32")]
    parts.append(folder.part("scales", f"{name}.absmax", (scales,), "uint8" if outer else "float32"))
    if outer:
        wide = (-(-scales // outer),)
        parts.append(folder.part("outer_scales", f"{name}.nested_absmax", wide, "float32"))
        parts.append(folder.part("outer_table", f"{name}.nested_quant_map", (256,), "float32"))
    packed = Packed(method="4bit", shape=shape, block=(1, size, outer), parts=tuple(parts), mean=mean)
    return folder.made(entry, name, shape, packed)


def _settings(folder: _Folder, entry: Entry) -> tuple[tuple[int, int], int, int, float]:
    """Shape, numbers of a block, scales of a block (0: plain), and what is added to scales."""
    where, (piece,) = folder.root / entry.pieces[0].file, entry.pieces
    try:
        with store.opened(where) as file:
            file.seek(piece.offset)
            told: dict[str, Any] = parsed(file.read(min(entry.numel, _LARGEST_STATE_BYTES)))
        rows, columns = (int(extent) for extent in told["shape"])
        size, outer = int(told["blocksize"]), int(told.get("nested_blocksize") or 0)
        mean = float(told.get("nested_offset") or 0)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        what = f"it says no shape and blocks of a matrix ({error!r})"
        raise CheckpointError(f"{where}: tensor {entry.name}", what, _AGAIN) from None
    if min(rows, columns) < 1 or size not in _BLOCKS or outer < 0 or not isfinite(mean):
        what = f"a matrix of {rows} by {columns} in blocks of {size}, and of {outer} scales"
        raise CheckpointError(f"{where}: tensor {entry.name}", what, _AGAIN)
    return (rows, columns), size, outer, mean


_METHODS: Mapping[str, Callable[[_Folder, Entry], Entry | None]] = {
    "fp8": _fp8,
    "mxfp4": _mxfp4,
    "bitsandbytes": _bitsandbytes,
}
