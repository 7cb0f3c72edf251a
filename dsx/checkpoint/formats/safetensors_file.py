"""safetensors files as data: where each tensor's bytes lie, and the checksums that dsx puts beside them.

The format (its own description): eight bytes with the length of a JSON header, the header, the tensors. The
format has no checksums. dsx puts each tensor's into ``__metadata__``; other programs that rewrite the file
leave them out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from dsx.checkpoint import store
from dsx.checkpoint.catalog import Checksum, Entry, Role
from dsx.checkpoint.formats.huggingface.names import is_buffer
from dsx.checkpoint.json_text import parsed
from dsx.checkpoint.pieces import whole_part
from dsx.errors import CheckpointError
from dsx.models.param import ITEM_BYTES

CRC32 = "crc32/"
"""With a tensor's name after it: the key in ``__metadata__`` of its bytes' CRC32, 8 hexadecimal digits."""

DTYPES: Mapping[str, str] = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}
"""Torch's name of every dtype of safetensors that a catalog may have."""
NAMES: Mapping[str, str] = {dtype: name for name, dtype in DTYPES.items()}
"""The other way round."""
_METADATA = "__metadata__"
_LARGEST_HEADER = 100_000_000  # safetensors' own limit
_ALIGNMENT_BYTES = 64  # of the first tensor
_DOWNLOAD = "download or export it again"


def contents(root: Path, file: str) -> tuple[list[Entry], list[Checksum]]:
    """The tensors of a file under their own names, and the checksums of those that have one."""
    header, base = _header(root / file)
    entries = list(_tensors(root, file, header, base))
    told = header.get(_METADATA)
    return entries, list(_checksums(root, told, entries)) if isinstance(told, dict) else []


def header_of(
    tensors: Iterable[tuple[str, str, Sequence[int]]], metadata: Mapping[str, str]
) -> tuple[bytes, list[tuple[int, int]]]:
    """The start of a file that is to be written, up to its first tensor.

    Args:
        tensors: Name, torch's dtype and shape of each, in the order in which they will lie.
        metadata: The file's metadata. transformers refuses files whose ``format`` is not ``pt``.

    Returns:
        The bytes, and where each tensor lies in the file: first byte, and the one after the last.
    """
    header: dict[str, Any] = {_METADATA: dict(metadata)}
    at = 0
    for name, dtype, shape in tensors:
        stop = at + prod(shape) * ITEM_BYTES[dtype]
        header[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [at, stop]}
        at = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT_BYTES)
    data = len(text).to_bytes(8, "little") + text
    places = [told["data_offsets"] for name, told in header.items() if name != _METADATA]
    return data, [(len(data) + start, len(data) + stop) for start, stop in places]


def _header(path: Path) -> tuple[dict[str, Any], int]:
    """Header of a file, and the byte at which its tensors begin."""
    try:
        # The library refuses tensors that lie outside of the file, overlap or leave gaps, too long headers,
        # and more: what it reads is a safetensors file, and nothing else is. It does not say where they lie.
        with store.opened(path) as file, safe_open(path, framework="np") as by_library:
            names = set(by_library.keys())
            length = int.from_bytes(file.read(8), "little")
            header = parsed(file.read(min(length, _LARGEST_HEADER)))
    except (OSError, SafetensorError, ValueError) as error:
        why = error.strerror or error if isinstance(error, OSError) else error
        what = f"not a readable safetensors file ({why})"
        raise CheckpointError(str(path), what, _DOWNLOAD) from None
    if not isinstance(header, dict) or header.keys() - {_METADATA} != names:
        raise CheckpointError(str(path), "its header reads in more than one way", _DOWNLOAD)
    return header, 8 + length


def _checksums(root: Path, told: Mapping[str, Any], entries: Iterable[Entry]) -> Iterator[Checksum]:
    for entry in entries:
        crc = told.get(CRC32 + entry.name)
        for piece in entry.pieces if crc is not None else ():
            if not re.fullmatch("[0-9a-f]{8}", str(crc)):
                raise CheckpointError(
                    f"{root / piece.file}: tensor {entry.name}", f"its CRC32 cannot be {crc!r}", _DOWNLOAD
                )
            yield Checksum(piece.file, piece.offset, piece.stop(entry.item_bytes), "crc32", str(crc))


def _tensors(root: Path, file: str, header: Mapping[str, Any], base: int) -> Iterator[Entry]:
    size = (root / file).stat().st_size
    for name, told in header.items():
        if name == _METADATA:
            continue
        where = f"{root / file}: tensor {name}"
        try:
            shape, dtype = tuple(map(int, told["shape"])), DTYPES[told["dtype"]]
            start, stop = map(int, told["data_offsets"])
        except (KeyError, TypeError, ValueError) as error:
            what = f"dsx has no use for such a tensor: {str(told)[:80]} ({error!r})"
            raise CheckpointError(where, what, _DOWNLOAD) from None
        if min((*shape, start)) < 0 or stop - start != prod(shape) * ITEM_BYTES[dtype] or base + stop > size:
            raise CheckpointError(
                where, f"its bytes {start} to {stop} are not those of {dtype} {shape}", _DOWNLOAD
            )
        pieces = (whole_part(shape).at(file, base + start, ITEM_BYTES[dtype]),) if prod(shape) else ()
        role: Role = "buffer" if is_buffer(name) else "trained"
        yield Entry(name=name, state="weight", shape=shape, dtype=dtype, pieces=pieces, role=role)
