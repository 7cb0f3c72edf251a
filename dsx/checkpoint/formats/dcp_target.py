"""torch.distributed.checkpoint (DCP) folders to be written: ``torch.distributed.checkpoint.load`` reads them.

The state dict is the one that ``torch.distributed.checkpoint.state_dict.get_state_dict`` makes, unflattened::

    model.<name>                    the weight; a tied one under each of its names, the same bytes
    optim.state.<name>.<state>      exp_avg, exp_avg_sq, step, ...; master, where the weight is not fp32
    optim.param_groups.<n>.<key>    lr, betas, ..., and params, the names in the group
    dsx                             every other fact, and how layouts cut each tensor

Every tensor is cut along its first dim into as many parts as there are files. Each part is a whole file of
``torch.save`` inside ``__<n>_0.distcp``; ``.metadata`` is the pickled index. Written for torch 2.13.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

from dsx.checkpoint import plain
from dsx.checkpoint.catalog import NO_SETTINGS, Catalog, Entry, Piece
from dsx.checkpoint.formats.dcp import FORMAT, INDEX, OWN
from dsx.checkpoint.formats.torch_target import Call, Hole, number, pickled, size_of, torch_skeleton
from dsx.checkpoint.formats.unpickle import Global, Record
from dsx.checkpoint.group_numbers import numbers_in
from dsx.checkpoint.pieces import contiguous
from dsx.checkpoint.target import Crc32Field, Skeleton, Target, Written, left_behind
from dsx.errors import CheckpointError

_PRECISIONS = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_MODULE = "torch.distributed.checkpoint.metadata"
_ALIGNMENT = 64
Key = tuple[str | int, ...]


def target_of(source: Catalog, root: Path, *, files: int, precision: str | None = None) -> Target:
    """A DCP folder with everything that ``source`` has, under its names.

    Args:
        source: What to write.
        root: Folder to make.
        files: How many files of tensors to make.
        precision: ``fp32``, ``bf16`` or ``fp16``: dtype of the weights; the source's by default.

    Raises:
        CheckpointError: Two tensors would have one key.
    """
    writer = _Writer([_File(f"__{number}_0.distcp") for number in range(files)])
    entries = [writer.tensor(entry) for entry in _entries(source, precision)]
    for entry in entries:
        for alias in entry.aliases if entry.state == "weight" else ():
            writer.alias(entry, alias)
    for key, value in _objects(source):
        writer.object(key, value)
    index = pickled(writer.index())
    skeletons = [file.skeleton() for file in writer.files]
    skeletons.append(Skeleton(file=INDEX, num_bytes=len(index), parts=((0, index),)))
    random = ("The ranks' random states stay behind.",) if source.facts.get("random_files") else ()
    return Target(
        catalog=Catalog(root=root, format=FORMAT, entries=tuple(entries), facts=source.facts),
        skeletons=tuple(skeletons),
        finish=_finish,
        dropped=(*random, *left_behind(source.facts)),
    )


def _finish(folder: Path, written: Written) -> None:
    """Nothing: the index was known before the bytes."""


def _entries(source: Catalog, precision: str | None) -> Iterator[Entry]:
    """Blank entries: every weight, made of its master if need be, and every other state."""
    by_name: dict[str, dict[str, Entry]] = {}
    for entry in source.entries:
        by_name.setdefault(entry.name, {})[entry.state] = entry
    told = _PRECISIONS.get(precision or str(source.facts.get("precision")), "float32")
    for states in by_name.values():
        weight = states.get("weight")
        if weight is None:
            weight = replace(next(iter(states.values())), state="weight", dtype=told)
        elif precision is not None and weight.role != "buffer":
            weight = replace(weight, dtype=told)
        yield replace(weight, pieces=())
        for state, entry in states.items():
            if state != "weight" and not (state == "master" and weight.dtype == entry.dtype):
                yield replace(entry, pieces=())


def _objects(source: Catalog) -> Iterator[tuple[Key, Any]]:
    """What is no tensor, by its path in the state dict."""
    groups = source.facts.get("param_groups") or ()
    for at, group in enumerate(groups):
        for key, value in group.items():
            if key == "names":
                yield ("optim", "param_groups", at, "params"), list(value)
            elif key not in NO_SETTINGS:
                yield ("optim", "param_groups", at, key), plain.decode(value, f"{key} of group {at}")
        for name in group.get("names", ()):
            for state, one in numbers_in(group, name).items():
                yield ("optim", "state", name, state), number(one)
    facts = {
        key: value
        for key, value in source.facts.items()
        if key not in ("param_groups", "random_files", "left_behind")
    }
    roles = {entry.name: entry.role for entry in source.entries if entry.role != "trained"}
    yield (OWN,), {"facts": facts, "specs": [asdict(spec) for spec in source.specs], "roles": roles}


@dataclass(slots=True)
class _File:
    """A file of items, one after another."""

    name: str
    end: int = 0
    parts: list[tuple[int, bytes]] = field(default_factory=list)
    fields: list[Crc32Field] = field(default_factory=list)

    def add(self, content: Any) -> tuple[int, int]:
        """An item; (first byte, length)."""
        item = torch_skeleton("archive", content)
        start = -(-self.end // _ALIGNMENT) * _ALIGNMENT
        self.end = start + item.num_bytes
        self.parts += [(start + at, data) for at, data in item.parts]
        self.fields += [
            Crc32Field(one.start + start, one.stop + start, tuple(at + start for at in one.places))
            for one in item.crc32_fields
        ]
        return start, item.num_bytes

    def skeleton(self) -> Skeleton:
        """The file with room for its tensors."""
        return Skeleton(
            file=self.name, num_bytes=self.end, parts=tuple(self.parts), crc32_fields=tuple(self.fields)
        )


class _Writer:
    """Lays out items over files, and keeps the index of them."""

    def __init__(self, files: list[_File]) -> None:
        self.files = files
        self._about: dict[str, Record] = {}
        self._paths: dict[str, Key] = {}
        self._storage: dict[Record, Record] = {}

    def tensor(self, entry: Entry) -> Entry:
        """A tensor's parts; the entry with its pieces."""
        weight = entry.state == "weight"
        key = self._new(("model", entry.name) if weight else ("optim", "state", entry.name, entry.state))
        pieces, chunks = [], []
        for at, (low, high) in enumerate(self._rows(entry.shape)):
            shape = (high - low, *entry.shape[1:]) if entry.shape else ()
            corner = (low, *(0 for _ in entry.shape[1:])) if entry.shape else ()
            hole = Hole(entry.dtype, shape)
            # Small tensors have one part: of those, each file gets some.
            file = self.files[(at + len(self._about)) % len(self.files)]
            start, length = file.add(hole)
            if hole.num_bytes:
                pieces.append(Piece(file.name, start + hole.offset, corner, shape, contiguous(shape)))
            chunks.append((corner, shape))
            self._place(key, corner, at, file.name, start, length)
        self._about[key] = _tensor_about(entry.dtype, entry.shape, chunks)
        return replace(entry, pieces=tuple(pieces))

    def alias(self, entry: Entry, name: str) -> None:
        """A tied weight's other name, as ``model.state_dict()`` has it: the same bytes."""
        key, home = self._new(("model", name)), f"model.{entry.name}"
        self._about[key] = self._about[home]
        for index, place in list(self._storage.items()):
            if index.state["fqn"] == home:
                self._storage[replace(index, state={**index.state, "fqn": key})] = place

    def object(self, path: Key, value: Any) -> None:
        """Something that is no tensor, or a step count, in the first file."""
        key, file = self._new(path), self.files[0]
        start, length = file.add(value)
        if isinstance(value, Hole):
            self._about[key] = _tensor_about(value.dtype, value.shape, [((), ())])
            self._place(key, (), 0, file.name, start, length)
        else:
            self._about[key] = Record(f"{_MODULE}.BytesStorageMetadata")
            self._place(key, None, None, file.name, start, length)

    def index(self) -> Record:
        """``Metadata``."""
        return Record(
            f"{_MODULE}.Metadata",
            (),
            {
                "state_dict_metadata": self._about,
                "planner_data": self._paths,
                "storage_data": self._storage,
                "storage_meta": None,
                "version": "1.0.0",
            },
        )

    def _rows(self, shape: tuple[int, ...]) -> list[tuple[int, int]]:
        if not shape or prod(shape) < len(self.files):
            return [(0, shape[0] if shape else 0)]
        step = -(-shape[0] // len(self.files))
        return [(low, min(low + step, shape[0])) for low in range(0, shape[0], step)]

    def _new(self, path: Key) -> str:
        key = ".".join(map(str, path))
        if key in self._paths:
            raise CheckpointError(
                key, "two tensors would have this key", "give one another name, with a rules file"
            )
        self._paths[key] = path
        return key

    def _place(
        self, key: str, corner: tuple[int, ...] | None, at: int | None, file: str, start: int, length: int
    ) -> None:
        offset = None if corner is None else size_of(corner)
        index = Record(f"{_MODULE}.MetadataIndex", (), {"fqn": key, "offset": offset, "index": at})
        self._storage[index] = Record(
            "torch.distributed.checkpoint.filesystem._StorageInfo",
            (),
            {"relative_path": file, "offset": start, "length": length},
        )


def _tensor_about(
    dtype: str, shape: tuple[int, ...], chunks: list[tuple[tuple[int, ...], tuple[int, ...]]]
) -> Record:
    """``TensorStorageMetadata``; its properties pickle themselves as a tuple (metadata.py, __getstate__)."""
    properties = (
        Global("torch", dtype),
        Call(Global("torch.serialization", "_get_layout"), ("torch.strided",)),
        False,
        Call(Global(_MODULE, "_MEM_FORMAT_ENCODING"), (0,)),
        False,
    )
    parts = [
        Record(f"{_MODULE}.ChunkStorageMetadata", (), {"offsets": size_of(low), "sizes": size_of(extents)})
        for low, extents in chunks
    ]
    about = {
        "properties": Record(f"{_MODULE}.TensorProperties", (), properties),
        "size": size_of(shape),
        "chunks": parts,
    }
    return Record(f"{_MODULE}.TensorStorageMetadata", (), about)
