"""Files of ``torch.save``, read without torch and without running anything: structure, places, checksums.

A file of today is a zip archive of stored (not compressed) members: ``<root>/data.pkl`` with the structure
and ``<root>/data/<key>`` per storage. One of before torch 1.6, which DeepSpeed still writes with
``checkpoint.writer``'s serialization off, is four pickles, a list of keys, and the storages one after
another, each behind its number of elements (torch/serialization.py, ``_legacy_load``).
"""

from __future__ import annotations

import os
import struct
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from dsx.checkpoint import store
from dsx.checkpoint.catalog import ITEM_BYTES, Checksum
from dsx.checkpoint.file_io import Window, crc32_of_file
from dsx.checkpoint.formats.unpickle import Record, StorageRef, TensorRef, storage_of, unpickle
from dsx.errors import CheckpointError

_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
_LEGACY_PROTOCOL = 1001
_LOCAL_HEADER = struct.Struct("<4s22xHH")
_USE_ANOTHER = "use another checkpoint"
_MAX_DEPTH = 100


@dataclass(frozen=True, slots=True)
class Storage:
    """Bytes ``start`` to ``stop`` of a file hold one storage; ``crc32`` if the file has it."""

    start: int
    stop: int
    crc32: int | None = None


@dataclass(frozen=True, slots=True)
class TorchFile:
    """What a file of ``torch.save`` holds.

    Attributes:
        path: The file.
        name: Its path relative to the checkpoint's folder, as pieces have it.
        content: Plain values, with a :class:`~dsx.checkpoint.formats.unpickle.TensorRef` for every tensor.
        storages: Where each storage lies.
    """

    path: Path
    name: str
    content: Any
    storages: Mapping[str, Storage]

    @property
    def checksums(self) -> tuple[Checksum, ...]:
        """What the file itself says that its storages hash to."""
        return tuple(
            Checksum(self.name, storage.start, storage.stop, "crc32", f"{storage.crc32:08x}")
            for storage in self.storages.values()
            if storage.crc32 is not None and storage.start < storage.stop
        )

    def value(self, ref: TensorRef) -> int | float:
        """The one number of a tensor of one element."""
        if ref.numel != 1 or ref.dtype not in _FORMATS:
            raise CheckpointError(
                str(self.path), f"a number is expected where it has a tensor {ref.shape}", _USE_ANOTHER
            )
        with self.path.open("rb") as file:
            file.seek(ref.offset)
            data = file.read(ITEM_BYTES[ref.dtype])
        if ref.dtype == "bfloat16":
            data = b"\0\0" + data
        number: int | float = struct.unpack(_FORMATS[ref.dtype], data)[0]
        return number


_FORMATS: Mapping[str, str] = {
    "float64": "<d",
    "float32": "<f",
    "float16": "<e",
    "bfloat16": "<f",
    "int64": "<q",
    "int32": "<i",
    "int16": "<h",
    "int8": "<b",
    "uint8": "<B",
    "bool": "<?",
}


def read_torch_file(folder: Path, name: str) -> TorchFile:
    """Read the structure of ``folder/name``; of the tensors only where they lie.

    Raises:
        CheckpointError: The file is missing, cut short, of another kind, names something to be imported that
            checkpoints do not need, or has a tensor that does not lie within its storage.
    """
    path = folder / name
    try:
        with store.opened(path) as file:
            start = file.read(4)
            file.seek(0)
            if start.startswith(b"PK"):
                content, storages = _read_zip(file, path)
            elif start.startswith(b"\x80\x02"):
                content, storages = _read_legacy(file, path)
            else:
                raise CheckpointError(str(path), "it is no file of torch.save", _USE_ANOTHER)
    except FileNotFoundError:
        raise CheckpointError(str(path), "the file is missing", "complete the checkpoint") from None
    except OSError as error:
        raise CheckpointError(
            str(path), f"it cannot be read ({error.strerror or error})", _USE_ANOTHER
        ) from error
    return TorchFile(path, name, _placed(content, storages, str(path)), storages)


def verify(file: TorchFile) -> None:
    """Read the whole file and prove that every storage is what its CRC32 says.

    Raises:
        CheckpointError: One is not, with its name; or the file ends early.
    """
    descriptor = os.open(file.path, os.O_RDONLY)
    try:
        for key, storage in file.storages.items():
            if storage.crc32 is not None and storage.crc32 != crc32_of_file(
                descriptor, storage.start, storage.stop
            ):
                raise CheckpointError(
                    f"{file.path}: storage {key}", "its bytes do not match their CRC32", _USE_ANOTHER
                )
    except EOFError:
        raise CheckpointError(str(file.path), "it was cut short", _USE_ANOTHER) from None
    finally:
        os.close(descriptor)


def _read_zip(file: BinaryIO, path: Path) -> tuple[Any, dict[str, Storage]]:
    try:
        archive = zipfile.ZipFile(file)
        members = archive.infolist()
    except (zipfile.BadZipFile, NotImplementedError, struct.error, ValueError, UnicodeDecodeError) as error:
        raise CheckpointError(
            str(path), f"its zip directory cannot be read, it was cut short ({error})", _USE_ANOTHER
        ) from None
    names = [member.filename for member in members]
    pickles = [name for name in names if name.count("/") == 1 and name.endswith("/data.pkl")]
    if len(pickles) != 1 or len(set(names)) != len(names):
        raise CheckpointError(str(path), "its members are not those of torch.save", _USE_ANOTHER)
    root = pickles[0].removesuffix("data.pkl")
    size = os.fstat(file.fileno()).st_size
    places = {member.filename: _place(file, member, size, path) for member in members}
    if (order := places.get(f"{root}byteorder")) and _bytes_of(file, order, path, "byteorder") != b"little":
        raise CheckpointError(str(path), "its numbers are big-endian", "save it on a little-endian machine")
    content = unpickle(_bytes_of(file, places[pickles[0]], path, "data.pkl"), str(path))
    prefix = f"{root}data/"
    return content, {n.removeprefix(prefix): at for n, at in places.items() if n.startswith(prefix)}


def _place(file: BinaryIO, member: zipfile.ZipInfo, size: int, path: Path) -> Storage:
    """Where a member's bytes lie; the directory does not say it, the member's own header does."""
    if member.compress_type != zipfile.ZIP_STORED or member.flag_bits & 1:
        raise CheckpointError(
            f"{path}: {member.filename}", "it is compressed, which torch never does", _USE_ANOTHER
        )
    file.seek(member.header_offset)
    header = file.read(_LOCAL_HEADER.size)
    if len(header) < _LOCAL_HEADER.size or not header.startswith(b"PK\x03\x04"):
        raise CheckpointError(f"{path}: {member.filename}", "it is not where it should be", _USE_ANOTHER)
    _, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(header)
    start = member.header_offset + _LOCAL_HEADER.size + name_bytes + extra_bytes
    if start + member.file_size > size:
        raise CheckpointError(f"{path}: {member.filename}", "the file ends before it does", _USE_ANOTHER)
    # torch.serialization.set_crc32_options(False) leaves no CRC.
    return Storage(start, start + member.file_size, member.CRC or None)


def _bytes_of(file: BinaryIO, place: Storage, path: Path, what: str) -> bytes:
    if place.crc32 is not None and place.crc32 != crc32_of_file(file.fileno(), place.start, place.stop):
        raise CheckpointError(f"{path}: {what}", "its bytes do not match their CRC32", _USE_ANOTHER)
    file.seek(place.start)
    return file.read(place.stop - place.start)


def _read_legacy(whole: BinaryIO, path: Path) -> tuple[Any, dict[str, Storage]]:
    where, size = str(path), os.fstat(whole.fileno()).st_size
    file = Window(whole, 0, size)
    if (unpickle(file, where), unpickle(file, where)) != (_LEGACY_MAGIC, _LEGACY_PROTOCOL):
        raise CheckpointError(where, "it is a pickle, but not one of torch.save", _USE_ANOTHER)
    if not unpickle(file, where).get("little_endian", True):
        raise CheckpointError(where, "its numbers are big-endian", "save it on a little-endian machine")
    found: dict[str, StorageRef] = {}

    def load(identity: Any, where: str) -> StorageRef:
        storage = storage_of(identity, where)
        if len(identity) > 5 and identity[5] is not None:
            raise CheckpointError(where, "it has views of storages, as torch 0.1 wrote", _USE_ANOTHER)
        return found.setdefault(storage.key, storage)

    content, keys = unpickle(file, where, load), unpickle(file, where)
    at = file.tell()
    storages = {}
    for key in keys:
        storage = found.get(str(key))
        file.seek(at)
        count = file.read(8)
        if storage is None or len(count) < 8 or struct.unpack("<q", count)[0] != storage.numel:
            raise CheckpointError(f"{where}: storage {key}", "it is not where it should be", _USE_ANOTHER)
        stop = at + 8 + storage.numel * ITEM_BYTES[storage.dtype or "uint8"]
        if stop > size:
            raise CheckpointError(f"{where}: storage {key}", "the file ends before it does", _USE_ANOTHER)
        storages[storage.key] = Storage(at + 8, stop)
        at = stop
    return content, storages


def _placed(content: Any, storages: Mapping[str, Storage], where: str) -> Any:
    """The same values with every tensor's byte filled in. What occurs several times stays one object."""
    done: dict[int, Any] = {}

    def place(value: Any, depth: int) -> Any:
        if isinstance(value, TensorRef):
            return _located(value, storages, where)
        if not isinstance(value, dict | list | tuple | Record):
            return value
        if depth > _MAX_DEPTH:
            raise CheckpointError(
                where, f"it is nested more than {_MAX_DEPTH} deep", "do not trust this file"
            )
        if id(value) not in done:
            done[id(value)] = None  # a cycle ends here
            done[id(value)] = _mapped(value, lambda part: place(part, depth + 1))
        return done[id(value)]

    return place(content, 0)


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, dict):
        return {key: change(part) for key, part in value.items()}
    if isinstance(value, Record):
        return Record(
            value.kind, tuple(map(change, value.args)), {k: change(v) for k, v in value.state.items()}
        )
    return type(value)(change(part) for part in value)


def _located(ref: TensorRef, storages: Mapping[str, Storage], where: str) -> TensorRef:
    storage = storages.get(ref.storage)
    item = ITEM_BYTES.get(ref.dtype)
    label = f"{where}: storage {ref.storage}"
    if item is None:
        raise CheckpointError(label, f"a tensor of type {ref.dtype}", "dsx has no use for such tensors")
    if storage is None:
        raise CheckpointError(label, "the file does not have it", "complete the checkpoint")
    if len(ref.shape) != len(ref.strides) or min((ref.start, *ref.shape, *ref.strides)) < 0:
        raise CheckpointError(label, f"a tensor of shape {ref.shape}, strides {ref.strides}", _USE_ANOTHER)
    last = sum((extent - 1) * step for extent, step in zip(ref.shape, ref.strides, strict=True))
    stop = storage.start + (ref.start + last + 1) * item
    if ref.numel and stop > storage.stop:
        raise CheckpointError(
            label,
            f"a tensor {ref.shape} that begins at its element {ref.start} does not lie within it",
            "do not trust this file",
        )
    return replace(ref, offset=storage.start + ref.start * item)
