"""A quantised folder's tensors as those of the plain model, which stored numbers and scales make when read.

Which tensors belong together is told by their names, and how by the config (:mod:`dsx.models.config_values`).
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
from dsx.models.config_values import FolderQuantization

_AGAIN = "download it again, or give the model before it was quantised"
_MXFP4_BLOCK = 32
_STATE = ".quant_state.bitsandbytes__"
_LARGEST_STATE_BYTES = 1 << 16
_BLOCKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)  # that bitsandbytes has
_ACTIVATIONS = ("activation_scale", "input_scale")
"""Scales of inputs, which weights do not need."""


def plain_entries(root: Path, entries: Sequence[Entry], how: FolderQuantization) -> list[Entry]:
    """The tensors of the plain model of a folder, in the order of their numbers in the files.

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

    def part(self, state: str, name: str, shape: tuple[int, ...], *dtypes: str) -> Entry:
        """A stored tensor as the part of another, seen in a shape; of one of the dtypes, "bytes" for any."""
        entry = self.held.get(name)
        if entry is None:
            raise CheckpointError(f"{self.root}: tensor {name}", "it is missing", _AGAIN)
        if "bytes" in dtypes:
            dtypes, entry = ("uint8",), replace(entry, dtype="uint8", shape=(entry.num_bytes,))
        if entry.numel != prod(shape) or entry.dtype not in dtypes or not entry.numel:
            what = f"it is {entry.dtype} {entry.shape}, the tensor needs {' or '.join(dtypes)} {shape}"
            raise CheckpointError(f"{self.root}: tensor {name}", what, _AGAIN)
        self.used.add(name)
        seen = replace(entry.pieces[0], start=(0,) * len(shape), shape=shape, strides=contiguous(shape))
        return replace(entry, state=state, shape=shape, pieces=(seen,))

    def made(self, name: str, packed: Packed, *, turned: bool = False) -> Entry:
        """The tensor that parts make; ``turned`` for one whose last two dims are the other way round."""
        order = [*range(len(packed.shape))]
        order = [*order[:-2], *order[-2:][::-1]] if turned else order
        shape, steps = (
            tuple(each[dim] for dim in order) for each in (packed.shape, contiguous(packed.shape))
        )
        file = packed.part("numbers").pieces[0].file
        piece = Piece(file, 0, (0,) * len(shape), shape, steps, packed=packed)
        return Entry(name=name, state="weight", shape=shape, dtype=self.how.dtype, pieces=(piece,))


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
    parts = (
        folder.part("numbers", entry.name, entry.shape, entry.dtype),
        folder.part("scales", name, grid, "float32", "bfloat16", "float16", "float8_e8m0fnu", "uint8"),
    )
    inputs = {f"{entry.name.rpartition('.')[0]}.{kind}" for kind in _ACTIVATIONS}
    folder.used.update(inputs & folder.held.keys())
    return folder.made(entry.name, Packed(method="fp8", shape=entry.shape, block=block, parts=parts))


def _mxfp4(folder: _Folder, entry: Entry) -> Entry | None:
    """Of GPT-OSS: experts [E, inputs, outputs], stored [E, outputs, inputs] by 32."""
    name = entry.name.removesuffix("_blocks")
    if name == entry.name or len(entry.shape) != 4:
        return None
    experts, rows, groups, _ = entry.shape
    parts = (
        folder.part("numbers", entry.name, (*entry.shape[:3], _MXFP4_BLOCK // 2), "uint8"),
        folder.part("scales", f"{name}_scales", entry.shape[:3], "uint8"),
    )
    shape, block = (experts, rows, groups * _MXFP4_BLOCK), (1, 1, _MXFP4_BLOCK)
    return folder.made(name, Packed(method="mxfp4", shape=shape, block=block, parts=parts), turned=True)


def _bitsandbytes(folder: _Folder, entry: Entry) -> Entry | None:
    """Of bitsandbytes' Linear8bitLt and Params4bit."""
    name, module = entry.name, entry.name.removesuffix("weight")
    shape = entry.shape
    if entry.dtype == "int8" and f"{module}SCB" in folder.held:
        folder.used.update({f"{module}weight_format"} & folder.held.keys())
        parts = [folder.part("numbers", name, shape, "int8")]
        parts.append(folder.part("scales", f"{module}SCB", shape[:1], "float32"))
        return folder.made(name, Packed(method="int8", shape=shape, block=(1, shape[-1]), parts=tuple(parts)))
    state = next((key for kind in ("nf4", "fp4") if (key := f"{name}{_STATE}{kind}") in folder.held), None)
    if state is None:
        return None
    shape, size, outer, mean = _settings(folder, folder.held[state])
    scales = -(-prod(shape) // size)
    # The numbers may be stored as another dtype's (bnb_4bit_quant_storage).
    parts = [folder.part("numbers", name, (shape[0], shape[1] // 2), "bytes")]
    parts.append(folder.part("table", f"{name}.quant_map", (16,), "float32"))
    parts.append(folder.part("scales", f"{name}.absmax", (scales,), "uint8" if outer else "float32"))
    if outer:
        parts.append(folder.part("outer_scales", f"{name}.nested_absmax", (-(-scales // outer),), "float32"))
        parts.append(folder.part("outer_table", f"{name}.nested_quant_map", (256,), "float32"))
    block = (1, size, outer)
    return folder.made(name, Packed(method="4bit", shape=shape, block=block, parts=tuple(parts), mean=mean))


def _settings(folder: _Folder, entry: Entry) -> tuple[tuple[int, int], int, int, float]:
    """Shape, numbers of a block, scales of a block (0: plain), and what is added to scales."""
    folder.part("settings", entry.name, entry.shape, "uint8")
    where, (piece,) = folder.root / entry.pieces[0].file, entry.pieces
    try:
        with store.opened(where) as file:
            file.seek(piece.offset)
            told: dict[str, Any] = parsed(file.read(min(entry.numel, _LARGEST_STATE_BYTES)))
        rows, columns = map(int, told["shape"])
        size, outer = int(told["blocksize"]), int(told.get("nested_blocksize") or 0)
        mean = float(told.get("nested_offset") or 0)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        what = f"it says no shape and blocks of a matrix ({error!r})"
        raise CheckpointError(f"{where}: tensor {entry.name}", what, _AGAIN) from None
    if min(rows, columns) < 1 or columns % 2 or size not in _BLOCKS or outer < 0 or not isfinite(mean):
        what = f"a matrix of {rows} by {columns} in blocks of {size}, and of {outer} scales, is none of dsx's"
        raise CheckpointError(f"{where}: tensor {entry.name}", what, _AGAIN)
    return (rows, columns), size, outer, mean


_METHODS: Mapping[str, Callable[[_Folder, Entry], Entry | None]] = {
    "fp8": _fp8,
    "mxfp4": _mxfp4,
    "bitsandbytes": _bitsandbytes,
}
