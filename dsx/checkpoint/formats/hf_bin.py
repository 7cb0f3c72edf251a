"""Weights in ``pytorch_model.bin``: older Hugging Face folders, DeepSpeed's zero_to_fp32, save_16bit_model.

Files of ``torch.save`` that hold a state dict, one or several with an index. Never executed
(:mod:`.torch_file`).
"""

from __future__ import annotations

from pathlib import Path

from dsx.checkpoint.catalog import Checksum, Entry, Piece
from dsx.checkpoint.formats.hf_names import weight_map
from dsx.checkpoint.formats.torch_file import TorchFile, read_torch_file
from dsx.checkpoint.formats.unpickle import TensorRef
from dsx.errors import CheckpointError

SINGLE = "pytorch_model.bin"
INDEX = "pytorch_model.bin.index.json"
_AGAIN = "download or write it again"


def looks_bin(root: Path) -> bool:
    """Whether a folder has such files."""
    return (root / SINGLE).is_file() or (root / INDEX).is_file()


def contents(root: Path) -> tuple[tuple[Entry, ...], list[Checksum]]:
    """All tensors of a folder under their own names, and the CRC32s of their files.

    Raises:
        CheckpointError: A file is missing, damaged or holds no state dict; the index does not fit them.
    """
    told: dict[str, str] = {}
    if (root / INDEX).is_file():
        told = weight_map(root / INDEX, _AGAIN)
    found: dict[str, Entry] = {}
    checksums: list[Checksum] = []
    for name in dict.fromkeys(told.values()) if told else [SINGLE]:
        file = read_torch_file(root, name)
        found |= _entries(file)
        checksums += file.checksums
    lost = next((name for name in told if name not in found), None)
    if lost is not None:
        raise CheckpointError(f"{root / told[lost]}: tensor {lost}", "the file does not have it", _AGAIN)
    return tuple(found.values()), checksums


def _entries(file: TorchFile) -> dict[str, Entry]:
    content = file.content if isinstance(file.content, dict) else {}
    refs = {str(name): ref for name, ref in content.items() if isinstance(ref, TensorRef)}
    if not refs:
        raise CheckpointError(str(file.path), "it holds no state dict: names with tensors", _AGAIN)
    return {
        name: Entry(
            name=name,
            state="weight",
            shape=ref.shape,
            dtype=ref.dtype,
            pieces=(Piece(file.name, ref.offset, (0,) * len(ref.shape), ref.shape, ref.strides),)
            if ref.numel
            else (),
        )
        for name, ref in refs.items()
    }
