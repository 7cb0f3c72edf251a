"""Files of ``torch.save``, read without torch and without running anything: structure, places, checksums.

A file of today is a zip archive of stored (not compressed) members: ``<root>/data.pkl`` with the structure
and ``<root>/data/<key>`` per storage. One of before torch 1.6, which DeepSpeed still writes with
``checkpoint.writer``'s serialization off, is four pickles, a list of keys, and the storages one after
another, each behind its number of elements (torch/serialization.py, ``_legacy_load``).

A pickle is a program for a small stack machine, and Python's own machine calls whatever the program names.
The one here imports nothing and knows no classes: a global is only its name, and a call is looked up in a
table of the few constructors that stock checkpoints use, which build plain values. Any other global is an
error, so the worst that a malicious file can do is to be refused. The standard library's :mod:`pickletools`
documents the opcodes.
"""

from __future__ import annotations

import io
import os
import pickletools
import struct
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path, PurePosixPath
from reprlib import repr as short_repr
from typing import Any

import numpy as np

from dsx.checkpoint import store
from dsx.checkpoint.catalog import Checksum, unusable
from dsx.checkpoint.file_io import FileWindow, convert, numpy_dtype
from dsx.checkpoint.pieces import contiguous
from dsx.errors import CheckpointError
from dsx.models.param import ITEM_BYTES


@dataclass(frozen=True, slots=True)
class Global:
    """The name of a class or function that a pickle mentions. Never imported."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(slots=True, eq=False)
class PickledObject:
    """An object of a class that is kept as data: the class's name, arguments and attributes."""

    kind: str
    args: tuple[Any, ...] = ()
    state: Any = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StorageRef:
    """A storage that the pickle refers to: torch's dtype name (None: untyped bytes), key, elements."""

    dtype: str | None
    key: str
    numel: int


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A tensor of a torch file, by where its elements lie.

    Attributes:
        dtype: As torch names it.
        strides: Strides in elements.
        storage: Key of the storage in the file.
        start: Element of the storage at which it begins.
        offset: Byte of the file at which it begins; -1 until the file's directory is known.
    """

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    storage: str
    start: int
    offset: int = -1

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def contiguous(self) -> bool:
        """Whether the elements follow one another, row-major."""
        dims = zip(self.shape, self.strides, contiguous(self.shape), strict=True)
        return not self.numel or all(extent == 1 or held == step for extent, held, step in dims)


STORAGES: Mapping[str, str | None] = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "Float8_e4m3fnStorage": "float8_e4m3fn",
    "Float8_e5m2Storage": "float8_e5m2",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "UntypedStorage": None,
}
"""dtype of each storage class in a pickle."""

_DTYPES = {name for name in STORAGES.values() if name is not None}
MAX_BYTES = 1 << 28
"""Of a pickle; that of a rank with 10,000 tensors has 3 MiB."""


def unpickle(
    data: bytes | FileWindow, where: str, load_storage: Callable[[Any, str], Any] | None = None
) -> Any:
    """The value that a pickle describes.

    Args:
        data: The pickle, or a :class:`~dsx.checkpoint.file_io.FileWindow` to read exactly one from.
        where: The file, for messages.
        load_storage: Makes a value of a persistent id; :func:`storage_of` by default.

    Returns:
        Dicts, lists, tuples, sets, numbers, strings, bytes, None, :class:`TensorRef`, :class:`StorageRef`,
        :class:`Global` and :class:`PickledObject`. An OrderedDict is a dict, an enum of DeepSpeed its number.
    """
    if isinstance(data, bytes) and len(data) > MAX_BYTES:
        raise CheckpointError(where, f"its pickle has {len(data)} bytes", "use a checkpoint of torch tensors")
    stream: Any = io.BytesIO(data) if isinstance(data, bytes) else data
    machine = _Machine(where, load_storage or storage_of)
    try:
        for opcode, argument, _ in pickletools.genops(stream):
            if opcode.name == "STOP":
                return machine.stack.pop()
            machine.step(opcode.name, argument)
    except (CheckpointError, MemoryError):
        raise
    except Exception as error:
        # Whatever a broken pickle does to the machine (an empty stack, a wrong type) means the same.
        raise unusable(where, f"its pickle is broken or cut short ({error!r})") from error
    raise unusable(where, "its pickle has no end")


def storage_of(identity: Any, where: str) -> StorageRef:
    """The storage that a persistent id of ``torch.save`` names."""
    if not isinstance(identity, tuple) or len(identity) < 5 or identity[0] != "storage":
        raise unusable(where, f"an unknown reference {short_repr(identity)}")
    kind, key, numel = identity[1], str(identity[2]), int(identity[4])
    if not isinstance(kind, Global) or kind.name not in STORAGES:
        raise unusable(where, f"a storage of unknown type {kind}")
    return StorageRef(STORAGES[kind.name], key, numel)


class _Machine:
    """The stack machine."""

    def __init__(self, where: str, load_storage: Callable[[Any, str], Any]) -> None:
        self.where = where
        self.load_storage = load_storage
        self.stack: list[Any] = []
        self.marks: list[list[Any]] = []
        self.memo: dict[int, Any] = {}

    def step(self, name: str, argument: Any) -> None:
        if name in _VALUES:
            self.stack.append(argument)
        elif name in _CONSTANTS:
            self.stack.append(_CONSTANTS[name]())
        elif name in _STEPS:
            _STEPS[name](self, argument)
        elif name not in {"PROTO", "FRAME"}:
            raise CheckpointError(
                self.where, f"its pickle uses {name}, which torch does not", "do not trust this file"
            )

    def items(self) -> list[Any]:
        """Pop what lies above the last mark, and the mark."""
        items, self.stack = self.stack, self.marks.pop()
        return items

    def mark(self, _: Any) -> None:
        self.marks.append(self.stack)
        self.stack = []

    def push_items(self, make: Callable[[list[Any]], Any]) -> None:
        items = self.items()
        self.stack.append(make(items))

    def push_last(self, count: int) -> None:
        values = tuple(self.stack[-count:])
        del self.stack[-count:]
        self.stack.append(values)

    def extend(self, values: Sequence[Any]) -> None:
        into = self.stack[-1]
        if not isinstance(into, list | set):
            raise TypeError(f"{type(into).__name__} is no list")
        if isinstance(into, list):
            into.extend(values)
        else:
            into.update(map(_key, values))

    def set_items(self, values: Sequence[Any]) -> None:
        into = self.stack[-1]
        if not isinstance(into, dict):
            raise TypeError(f"{type(into).__name__} is no dict")
        into.update(_pairs(values))

    def push_global(self, module: str, name: str) -> None:
        known = Global({"__builtin__": "builtins", "copy_reg": "copyreg"}.get(module, module), name)
        if str(known) not in _BUILDERS and not _is_type(known):
            raise CheckpointError(
                self.where,
                f"it wants {known} imported, which is not on the list of what checkpoints need",
                "do not trust this file; or, if it is yours, save without objects of that class",
            )
        self.stack.append(known)

    def call(self, args: Any) -> None:
        function = self.stack.pop()
        if not isinstance(function, Global) or str(function) not in _BUILDERS or not isinstance(args, tuple):
            raise CheckpointError(
                self.where, f"its pickle calls {short_repr(function)}", "do not trust this file"
            )
        self.stack.append(_BUILDERS[str(function)](function, args))

    def build(self, state: Any) -> None:
        value = self.stack[-1]
        if isinstance(value, PickledObject):
            value.state.update(state if isinstance(state, dict) else {"state": state})
        elif not isinstance(value, dict):  # an OrderedDict's attributes (torch's _metadata) are not needed
            raise TypeError(f"attributes for {type(value).__name__}")


def _is_type(known: Global) -> bool:
    """Whether a global is only mentioned: a dtype, a storage class, the class of a rebuilt tensor."""
    return (
        (known.module in {"torch", "torch.storage"} and (known.name in STORAGES or known.name in _DTYPES))
        or (known.module == "torch.nn.parameter" and known.name == "Parameter")
        or (known.module == "torch" and known.name == "Tensor")
        or (known.module == "builtins" and known.name in {"dict", "list", "int", "float", "object"})
        or (known.module == "numpy" and known.name == "ndarray")
    )


def _tensor(_: Global, args: tuple[Any, ...]) -> TensorRef:
    storage, start, shape, strides = args[:4]
    if not isinstance(storage, StorageRef) or storage.dtype is None:
        raise TypeError("a tensor without a typed storage")
    return TensorRef(storage.dtype, tuple(map(int, shape)), tuple(map(int, strides)), storage.key, int(start))


def _tensor_v3(_: Global, args: tuple[Any, ...]) -> TensorRef:
    storage, start, shape, strides, _, _, dtype = args[:7]
    if not isinstance(storage, StorageRef) or not isinstance(dtype, Global):
        raise TypeError("a tensor without a storage or dtype")
    return TensorRef(dtype.name, tuple(map(int, shape)), tuple(map(int, strides)), storage.key, int(start))


def _from_type(_: Global, args: tuple[Any, ...]) -> Any:
    function, _, inner, _ = args
    return _BUILDERS[str(function)](function, inner)


_ZERO_STAGE = "deepspeed.runtime.zero.config.ZeroStageEnum"
_ZERO_STAGES = {"disabled": 0, "optimizer_states": 1, "gradients": 2, "weights": 3}


def _member(_: Global, args: tuple[Any, ...]) -> int:
    """A ZeRO stage by its name: so Python 3.11.0 to 3.11.3 write members of enumerations, others by value."""
    owner, name = args
    if str(owner) != _ZERO_STAGE:
        raise ValueError(f"it calls builtins.getattr of {short_repr(owner)}, which no checkpoint needs")
    return _ZERO_STAGES[name]


def _encoded(_: Global, args: tuple[Any, ...]) -> bytes:
    text, encoding = args
    if encoding not in {"latin1", "latin-1"}:
        raise ValueError(f"bytes in {encoding!r}")
    return str(text).encode("latin-1")


def _dict(_: Global, args: tuple[Any, ...]) -> dict[Any, Any]:
    """A new dict, of (key, value) pairs or of another dict."""
    content = args[0] if args else {}
    pairs = content.items() if isinstance(content, dict) else content
    return {_key(key): value for key, value in pairs}


_Builder = Callable[[Global, tuple[Any, ...]], Any]
_OF_DCP = """
    filesystem._StorageInfo metadata.Metadata metadata.MetadataIndex metadata.StorageMeta
    metadata.TensorProperties metadata._MEM_FORMAT_ENCODING metadata.TensorStorageMetadata
    metadata.ChunkStorageMetadata metadata.BytesStorageMetadata
    planner.SavePlan planner.WriteItem planner.WriteItemType planner.TensorWriteData
"""
_RECORDS = (
    "argparse.Namespace",
    "types.SimpleNamespace",
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.utils.tensor_fragment.fragment_address",
    "deepspeed.checkpoint.universal_checkpoint.SubparamShape",
    "numpy.dtype",
    "numpy.core.multiarray._reconstruct",
    "numpy._core.multiarray._reconstruct",
    "numpy.core.multiarray.scalar",
    "numpy._core.multiarray.scalar",
    "torch.device",
    # The index of torch.distributed.checkpoint, and what Megatron keeps in it of how it was written.
    "torch.serialization._get_layout",
    *(f"torch.distributed.checkpoint.{name}" for name in _OF_DCP.split()),
    "megatron.core.dist_checkpointing.strategies.torch.MCoreMetadata",
    "megatron.core.dist_checkpointing.strategies.torch.MCoreSavePlan",
)
_BUILDERS: Mapping[str, _Builder] = {
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor_v3,
    "torch._utils._rebuild_parameter": lambda _, args: args[0],
    "torch._utils._rebuild_parameter_with_state": lambda _, args: args[0],
    "torch._tensor._rebuild_from_type_v2": _from_type,
    "torch.Size": lambda _, args: tuple(args[0]),
    "collections.OrderedDict": _dict,
    "collections.defaultdict": lambda *_: {},
    "collections.Counter": _dict,
    "builtins.set": lambda _, args: {_key(item) for item in (args[0] if args else ())},
    "builtins.frozenset": lambda _, args: frozenset(map(_key, args[0] if args else ())),
    "builtins.bytearray": lambda _, args: bytes(args[0]) if args and isinstance(args[0], bytes) else b"",
    "builtins.complex": lambda _, args: complex(*args),
    "copyreg._reconstructor": lambda _, args: _BUILDERS[str(args[0])](args[0], ()),
    "_codecs.encode": _encoded,
    _ZERO_STAGE: lambda _, args: int(args[0]),
    "builtins.getattr": _member,
    "pathlib.PosixPath": lambda _, args: str(PurePosixPath(*args)),
    "pathlib._local.PosixPath": lambda _, args: str(PurePosixPath(*args)),
    **dict.fromkeys(_RECORDS, lambda known, args: PickledObject(str(known), args)),
}

_CONSTANTS: Mapping[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_DICT": dict,
    "EMPTY_LIST": list,
    "EMPTY_TUPLE": tuple,
    "EMPTY_SET": set,
}
_VALUES = {
    *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
    *("STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE"),
    *("BINUNICODE8", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8"),
}
_STEPS: Mapping[str, Callable[[_Machine, Any], Any]] = {
    "MARK": _Machine.mark,
    "POP": lambda m, _: m.stack.pop(),
    "POP_MARK": lambda m, _: m.items(),
    "DUP": lambda m, _: m.stack.append(m.stack[-1]),
    "TUPLE": lambda m, _: m.push_items(tuple),
    "TUPLE1": lambda m, _: m.push_last(1),
    "TUPLE2": lambda m, _: m.push_last(2),
    "TUPLE3": lambda m, _: m.push_last(3),
    "LIST": lambda m, _: m.push_items(list),
    "DICT": lambda m, _: m.push_items(lambda items: dict(_pairs(items))),
    "FROZENSET": lambda m, _: m.push_items(lambda items: frozenset(map(_key, items))),
    "APPEND": lambda m, _: m.extend([m.stack.pop()]),
    "APPENDS": lambda m, _: m.extend(m.items()),
    "ADDITEMS": lambda m, _: m.extend(m.items()),
    "SETITEM": lambda m, _: m.set_items([m.stack.pop(), m.stack.pop()][::-1]),
    "SETITEMS": lambda m, _: m.set_items(m.items()),
    **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT"), lambda m, at: m.memo.__setitem__(at, m.stack[-1])),
    "MEMOIZE": lambda m, _: m.memo.__setitem__(len(m.memo), m.stack[-1]),
    **dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), lambda m, at: m.stack.append(m.memo[at])),
    "GLOBAL": lambda m, names: m.push_global(*names.split(" ", 1)),
    "STACK_GLOBAL": lambda m, _: m.push_global(*map(str, [m.stack.pop(), m.stack.pop()][::-1])),
    "REDUCE": lambda m, _: m.call(m.stack.pop()),
    "NEWOBJ": lambda m, _: m.call(m.stack.pop()),
    "BUILD": lambda m, _: m.build(m.stack.pop()),
    "BINPERSID": lambda m, _: m.stack.append(m.load_storage(m.stack.pop(), m.where)),
}


def _key(value: Any) -> Any:
    """A key of a dict or element of a set: flat, because Python hashes deep tuples without a guard."""
    parts = value if isinstance(value, tuple) else (value,)
    if not all(isinstance(part, str | int | float | bytes | Global | PickledObject | None) for part in parts):
        raise TypeError(f"a key of type {type(value).__name__}")
    return value


def _pairs(items: Sequence[Any]) -> list[tuple[Any, Any]]:
    return list(zip(map(_key, items[::2]), items[1::2], strict=True))


_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
_LEGACY_PROTOCOL = 1001
_LOCAL_HEADER = struct.Struct("<4s22xHH")
_MAX_DEPTH = 100


@dataclass(frozen=True, slots=True)
class FileStorage:
    """Bytes ``start`` to ``stop`` of a file hold one storage; ``crc32`` if the file has it."""

    start: int
    stop: int
    crc32: int | None = None


@dataclass(frozen=True, slots=True)
class TorchFile:
    """What a file of ``torch.save`` holds.

    Attributes:
        name: Its path relative to the checkpoint's folder, as pieces have it.
        content: Plain values, with a :class:`~dsx.checkpoint.formats.torch_file.TensorRef` for every tensor.
    """

    path: Path
    name: str
    content: Any
    storages: Mapping[str, FileStorage]

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
        if ref.numel != 1 or ref.dtype.startswith("float8"):
            raise unusable(str(self.path), f"a number is expected where it has a tensor {ref.shape}")
        with self.path.open("rb") as file:
            file.seek(ref.offset)
            held = np.frombuffer(file.read(ITEM_BYTES[ref.dtype]), numpy_dtype(ref.dtype))
        wanted = "float32" if ref.dtype == "bfloat16" else ref.dtype
        number: int | float = convert(held, ref.dtype, wanted).item()
        return number


def read_torch_file(folder: Path, name: str, start: int = 0, length: int | None = None) -> TorchFile:
    """Read the structure of ``folder/name``; of the tensors only where they lie.

    The file of ``torch.save`` may be a part of another: ``length`` bytes from ``start``, by default all.
    """
    path = folder / name
    try:
        with store.opened(path) as whole:
            size = os.fstat(whole.fileno()).st_size - start
            file = FileWindow(whole, start, size if length is None else length)
            magic = file.read(4)
            file.seek(0)
            if magic.startswith(b"PK"):
                content, storages = _read_zip(file, path)
            elif magic.startswith(b"\x80\x02"):
                content, storages = _read_legacy(file, path)
            else:
                raise unusable(str(path), "it is no file of torch.save")
    except FileNotFoundError:
        raise CheckpointError(str(path), "the file is missing", "complete the checkpoint") from None
    except OSError as error:
        raise unusable(str(path), f"it cannot be read ({error.strerror or error})") from error
    held = {key: replace(at, start=at.start + start, stop=at.stop + start) for key, at in storages.items()}
    return TorchFile(path, name, _placed(content, held, str(path)), held)


def _read_zip(file: FileWindow, path: Path) -> tuple[Any, dict[str, FileStorage]]:
    try:
        archive = zipfile.ZipFile(file)
        members = archive.infolist()
    except (zipfile.BadZipFile, NotImplementedError, struct.error, ValueError, UnicodeDecodeError) as error:
        raise unusable(str(path), f"its zip directory cannot be read, it was cut short ({error})") from None
    names = [member.filename for member in members]
    pickles = [name for name in names if name.count("/") == 1 and name.endswith("/data.pkl")]
    if len(pickles) != 1 or len(set(names)) != len(names):
        raise unusable(str(path), "its members are not those of torch.save")
    root = pickles[0].removesuffix("data.pkl")
    places = {member.filename: _place(file, member, path) for member in members}
    if (order := places.get(f"{root}byteorder")) and _bytes_of(file, order, path, "byteorder") != b"little":
        raise CheckpointError(str(path), "its numbers are big-endian", "save it on a little-endian machine")
    content = unpickle(_bytes_of(file, places[pickles[0]], path, "data.pkl"), str(path))
    prefix = f"{root}data/"
    return content, {n.removeprefix(prefix): at for n, at in places.items() if n.startswith(prefix)}


def _place(file: FileWindow, member: zipfile.ZipInfo, path: Path) -> FileStorage:
    """Where a member's bytes lie; the directory does not say it, the member's own header does."""
    if member.compress_type != zipfile.ZIP_STORED or member.flag_bits & 1:
        raise unusable(f"{path}: {member.filename}", "it is compressed, which torch never does")
    file.seek(member.header_offset)
    header = file.read(_LOCAL_HEADER.size)
    if len(header) < _LOCAL_HEADER.size or not header.startswith(b"PK\x03\x04"):
        raise unusable(f"{path}: {member.filename}", "it is not where it should be")
    _, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(header)
    start = member.header_offset + _LOCAL_HEADER.size + name_bytes + extra_bytes
    if start + member.file_size > file.length:
        raise unusable(f"{path}: {member.filename}", "the file ends before it does")
    # torch.serialization.set_crc32_options(False) leaves no CRC.
    return FileStorage(start, start + member.file_size, member.CRC or None)


def _bytes_of(file: FileWindow, place: FileStorage, path: Path, what: str) -> bytes:
    file.seek(place.start)
    data = file.read(place.stop - place.start)
    if place.crc32 is not None and place.crc32 != zlib.crc32(data):
        raise unusable(f"{path}: {what}", "its bytes do not match their CRC32")
    return data


def _read_legacy(file: FileWindow, path: Path) -> tuple[Any, dict[str, FileStorage]]:
    where = str(path)
    if (unpickle(file, where), unpickle(file, where)) != (_LEGACY_MAGIC, _LEGACY_PROTOCOL):
        raise unusable(where, "it is a pickle, but not one of torch.save")
    if not unpickle(file, where).get("little_endian", True):
        raise CheckpointError(where, "its numbers are big-endian", "save it on a little-endian machine")
    found: dict[str, StorageRef] = {}

    def load(identity: Any, where: str) -> StorageRef:
        storage = storage_of(identity, where)
        if len(identity) > 5 and identity[5] is not None:
            raise unusable(where, "it has views of storages, as torch 0.1 wrote")
        return found.setdefault(storage.key, storage)

    content, keys = unpickle(file, where, load), unpickle(file, where)
    at = file.tell()
    storages = {}
    for key in keys:
        storage = found.get(str(key))
        file.seek(at)
        count = file.read(8)
        if storage is None or len(count) < 8 or struct.unpack("<q", count)[0] != storage.numel:
            raise unusable(f"{where}: storage {key}", "it is not where it should be")
        stop = at + 8 + storage.numel * ITEM_BYTES[storage.dtype or "uint8"]
        if stop > file.length:
            raise unusable(f"{where}: storage {key}", "the file ends before it does")
        storages[storage.key] = FileStorage(at + 8, stop)
        at = stop
    return content, storages


def _placed(content: Any, storages: Mapping[str, FileStorage], where: str) -> Any:
    """The same values with every tensor's byte filled in; what occurs repeatedly stays one object."""
    done: dict[int, Any] = {}

    def place(value: Any, depth: int) -> Any:
        if isinstance(value, TensorRef):
            return _located(value, storages, where)
        if not isinstance(value, dict | list | tuple | PickledObject):
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
    if isinstance(value, PickledObject):
        return PickledObject(
            value.kind, tuple(map(change, value.args)), {k: change(v) for k, v in value.state.items()}
        )
    return type(value)(change(part) for part in value)


def _located(ref: TensorRef, storages: Mapping[str, FileStorage], where: str) -> TensorRef:
    storage = storages.get(ref.storage)
    item = ITEM_BYTES.get(ref.dtype)
    label = f"{where}: storage {ref.storage}"
    if item is None:
        raise CheckpointError(label, f"a tensor of type {ref.dtype}", "dsx has no use for such tensors")
    if storage is None:
        raise CheckpointError(label, "the file does not have it", "complete the checkpoint")
    if len(ref.shape) != len(ref.strides) or min((ref.start, *ref.shape, *ref.strides)) < 0:
        raise unusable(label, f"a tensor of shape {ref.shape}, strides {ref.strides}")
    last = sum((extent - 1) * step for extent, step in zip(ref.shape, ref.strides, strict=True))
    stop = storage.start + (ref.start + last + 1) * item
    if ref.numel and stop > storage.stop:
        raise CheckpointError(
            label,
            f"a tensor {ref.shape} that begins at its element {ref.start} does not lie within it",
            "do not trust this file",
        )
    return replace(ref, offset=storage.start + ref.start * item)
