"""Files of ``torch.save`` to be filled: structure and a place for every tensor, made without torch.

The same archive that torch 2.13 writes: stored members, aligned to 64 bytes by a padding field, zip64 where a
member or the file has 4 GiB or more (torch/csrc's PyTorchStreamWriter; PKWARE's APPNOTE 6.3.9, 4.3 and 4.5).
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from dsx.checkpoint.catalog import Crc32Field, Skeleton
from dsx.checkpoint.formats.torch_file import STORAGES, Global, PickledObject
from dsx.checkpoint.pieces import contiguous
from dsx.models.param import ITEM_BYTES

_ALIGNMENT = 64
_LARGE = 0xFFFFFFFF
_LOCAL = struct.Struct("<4sHHHHHIIIHH")
_CENTRAL = struct.Struct("<4sHHHHHHIIIHHHHHII")
_DATE = 33  # 1980-01-01, so that equal contents make equal files
_STORAGE_CLASS = {dtype: name for name, dtype in STORAGES.items()}


@dataclass(eq=False, slots=True)
class Hole:
    """A tensor whose bytes come later, or are ``data``. It is stored once, however often it is referred to.

    Attributes:
        dtype: As torch names it.
        shape: Extents; row-major.
        data: Its bytes, if they are known already.
        offset: Byte of the file at which it begins; set by :func:`torch_skeleton`.
    """

    dtype: str
    shape: tuple[int, ...]
    data: bytes | None = None
    offset: int = -1

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Ordered:
    """An OrderedDict."""

    items: Mapping[Any, Any]


@dataclass(frozen=True, slots=True)
class Call:
    """An object that is made by a call: an enum's member, ``torch.Size``."""

    function: Global
    args: tuple[Any, ...]


def size_of(shape: Sequence[int]) -> Call:
    """A ``torch.Size``."""
    return Call(Global("torch", "Size"), (tuple(shape),))


def number(value: float) -> Hole:
    """A float32 tensor without dims, as torch's optimizers count steps."""
    return Hole("float32", (), struct.pack("<f", value))


def torch_skeleton(file: str, content: Any) -> Skeleton:
    """A file that ``torch.load`` reads as ``content`` once its tensors are in it.

    ``content`` has None, bools, numbers, strings, bytes, lists, tuples, dicts, and the classes of this module
    and :class:`~dsx.checkpoint.formats.torch_file.PickledObject`. Holes in it learn their offsets.
    """
    pickler = _Pickler()
    program = pickler.program(content)
    archive = _Archive(file.rsplit("/", 1)[-1].removesuffix(".pt"))
    archive.add("data.pkl", program)
    for name, data in ((".format_version", b"1"), (".storage_alignment", b"64"), ("byteorder", b"little")):
        archive.add(name, data)
    for key, hole in enumerate(pickler.holes):
        hole.offset = archive.add(f"data/{key}", hole.data, hole.num_bytes)
    archive.add("version", b"3\n")
    archive.close()
    return Skeleton(
        file=file,
        num_bytes=archive.end,
        parts=tuple((at, bytes(data)) for at, data in archive.parts),
        crc32_fields=tuple(archive.fields),
    )


def pickled(content: Any) -> bytes:
    """A pickle of what :func:`torch_skeleton` takes, but no holes."""
    return _Pickler().program(content)


@dataclass(slots=True)
class _Pickler:
    """Writes pickles of protocol 2, by the few opcodes that inert values need."""

    holes: list[Hole] = field(default_factory=list)
    _keys: dict[int, int] = field(default_factory=dict)

    def program(self, value: Any) -> bytes:
        return b"\x80\x02" + self.of(value) + b"."

    def of(self, value: Any) -> bytes:
        if value is None or isinstance(value, bool):
            return {None: b"N", True: b"\x88", False: b"\x89"}[value]
        if isinstance(value, int | float):
            return self._int(value) if isinstance(value, int) else b"G" + struct.pack(">d", value)
        if isinstance(value, str):
            data = value.encode()
            return b"X" + struct.pack("<I", len(data)) + data
        if isinstance(value, tuple):
            return b"(" + b"".join(map(self.of, value)) + b"t"
        if isinstance(value, list):
            return b"](" + b"".join(map(self.of, value)) + b"e"
        if isinstance(value, Mapping):
            return b"}" + self._items(value)
        return self._object(value)

    def _object(self, value: Any) -> bytes:
        if isinstance(value, Hole):
            key = self._keys.setdefault(id(value), len(self.holes))
            if key == len(self.holes):
                self.holes.append(value)
            kind = Global("torch", str(_STORAGE_CLASS[value.dtype]))
            storage = self.of(("storage", kind, str(key), "cpu", prod(value.shape))) + b"Q"
            rest = (0, value.shape, contiguous(value.shape), False, Ordered({}))
            args = b"(" + storage + b"".join(map(self.of, rest)) + b"t"
            return self.of(Global("torch._utils", "_rebuild_tensor_v2")) + args + b"R"
        if isinstance(value, bytes):
            return self.of(Call(Global("_codecs", "encode"), (value.decode("latin-1"), "latin1")))
        if isinstance(value, Global):
            return f"c{value.module}\n{value.name}\n".encode()
        if isinstance(value, Ordered):
            return self.of(Global("collections", "OrderedDict")) + b")R" + self._items(value.items)
        if isinstance(value, Call):
            return self.of(value.function) + self.of(value.args) + b"R"
        if isinstance(value, PickledObject):
            module, name = value.kind.rsplit(".", 1)
            made = self.of(Global(module, name)) + self.of(value.args) + b"\x81"
            return made + self.of(value.state) + b"b"
        if isinstance(value, set | frozenset):
            return self.of(Call(Global("builtins", type(value).__name__), (list(value),)))
        raise TypeError(f"a {type(value).__name__} cannot be written")

    def _items(self, items: Mapping[Any, Any]) -> bytes:
        return b"(" + b"".join(self.of(part) for item in items.items() for part in item) + b"u"

    def _int(self, value: int) -> bytes:
        if -(2**31) <= value < 2**31:
            return b"J" + struct.pack("<i", value)
        data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
        return b"\x8a" + bytes([len(data)]) + data


class _Archive:
    """A zip archive that is being laid out."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._central: list[bytes] = []
        self.end = 0
        self.parts: list[tuple[int, bytearray]] = []
        self.fields: list[Crc32Field] = []
        self._open: list[tuple[int, int, int, int]] = []  # start, stop, place of the local CRC, entry

    def add(self, name: str, data: bytes | None, size: int | None = None) -> int:
        """Add a member, left empty without data; gives its first byte."""
        count = len(data) if data is not None else size or 0
        path = f"{self._root}/{name}".encode()
        wide = struct.pack("<HHQQ", 1, 16, count, count) if count >= _LARGE else b""
        short = min(count, _LARGE)
        crc = zlib.crc32(data or b"")
        bare = self.end + _LOCAL.size + len(path) + len(wide) + 4
        filler = b"Z" * (-bare % _ALIGNMENT)
        extra = wide + b"FB" + struct.pack("<H", len(filler)) + filler
        flags = (45 if wide else 20, 0x800, 0, 0, _DATE, crc, short, short, len(path))
        header = _LOCAL.pack(b"PK\x03\x04", *flags, len(extra)) + path + extra
        self._put(header)
        start, at = self.end, self.end - len(header)
        if data is None and count:
            self._open.append((start, start + count, at + 14, len(self._central)))
            self.end += count
        else:
            self._put(data or b"")
        self._central.append(self._entry(path, crc, count, at))
        return start

    def close(self) -> None:
        start = self.end
        places = []
        for entry in self._central:
            places.append(self.end + 16)
            self._put(entry)
        size, count = self.end - start, len(self._central)
        for low, high, local, entry_number in self._open:
            self.fields.append(Crc32Field(low, high, (local, places[entry_number])))
        if self.end >= _LARGE or count >= 0xFFFF:
            record = struct.pack("<4sQHHIIQQQQ", b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, size, start)
            locator = struct.pack("<4sIQI", b"PK\x06\x07", 0, self.end, 1)
            self._put(record + locator)
        few, small, low_start = min(count, 0xFFFF), min(size, _LARGE), min(start, _LARGE)
        self._put(struct.pack("<4sHHHHIIH", b"PK\x05\x06", 0, 0, few, few, small, low_start, 0))

    def _entry(self, path: bytes, crc: int, count: int, at: int) -> bytes:
        wide = [*([count, count] if count >= _LARGE else []), *([at] if at >= _LARGE else [])]
        extra = struct.pack(f"<HH{len(wide)}Q", 1, 8 * len(wide), *wide) if wide else b""
        short, version = min(count, _LARGE), 45 if wide else 20
        head = (version, version, 0x800, 0, 0, _DATE, crc, short, short, len(path), len(extra))
        return _CENTRAL.pack(b"PK\x01\x02", *head, 0, 0, 0, 0, min(at, _LARGE)) + path + extra

    def _put(self, data: bytes) -> None:
        """Add bytes, to those before where they follow them."""
        start, before = self.parts[-1] if self.parts else (0, bytearray())
        if self.parts and start + len(before) == self.end:
            before += data
        elif data:
            self.parts.append((self.end, bytearray(data)))
        self.end += len(data)
