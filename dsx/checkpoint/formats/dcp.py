"""torch.distributed.checkpoint (DCP) folders, read as catalogs and written.

``.metadata`` is a pickled index: for every tensor its shape and the boxes of it that lie somewhere, for every
box a file, an offset and a length; there lies a whole file of ``torch.save`` with that box. The index and the
files' structure are read as inert data, never executed.

Names, by the path in the saved state dict: ``(..., "state", NAME, STATE)`` is a state of the optimizer, as
``torch.distributed.checkpoint.state_dict`` lays them out, flattened or not; every other tensor is a weight,
under its path without a leading ``model``. Checked with torch 2.13.

The state dict is the one that ``torch.distributed.checkpoint.state_dict.get_state_dict`` makes, unflattened::

    model.<name>                    the weight; a tied one under each of its names, the same bytes
    optim.state.<name>.<state>      exp_avg, exp_avg_sq, step, ...; master, where the weight is not fp32
    optim.param_groups.<n>.<key>    lr, betas, ..., and params, the names in the group
    dsx                             every other fact, and how layouts cut each tensor

Every tensor is cut along its first dim into as many parts as there are files. Each part is a whole file of
``torch.save`` inside ``__<n>_0.distcp``; ``.metadata`` is the pickled index. Written for torch 2.13.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from dsx.checkpoint import plain, store
from dsx.checkpoint.catalog import (
    NO_SETTINGS,
    Catalog,
    Checksum,
    Crc32Field,
    Entry,
    Piece,
    Role,
    Skeleton,
    Target,
    left_behind,
    locate,
    numbers_in,
    unusable,
    with_numbers,
)
from dsx.checkpoint.formats.torch_file import (
    MAX_BYTES,
    Global,
    PickledObject,
    TensorRef,
    TorchFile,
    read_torch_file,
    unpickle,
)
from dsx.checkpoint.formats.torch_target import Call, Hole, number, pickled, size_of, torch_skeleton
from dsx.checkpoint.pieces import contiguous
from dsx.errors import CheckpointError, LayoutError
from dsx.models.param import PRECISIONS, ParamSpec

FORMAT = "dcp"
INDEX = ".metadata"
OWN = "dsx"  # key of the facts that dsx writes
_MODELS = {"model", "module", "state_dict", "model_state_dict", "app"}
_OPTIMIZERS = {"optim", "optimizer", "optimizers", "optimizer_state_dict"}


def looks_dcp(root: Path) -> bool:
    """Whether a folder has DCP's index."""
    return (root / INDEX).is_file()


def catalog_of(root: Path, *, objects: bool = True) -> Catalog:
    """What the DCP checkpoint in ``root`` holds; what is no tensor only with ``objects``."""
    index = _Index.read(root)
    shapes = {_name_of(index.paths[flat]): about[0] for flat, about in index.tensors.items()}
    found = _Found({name: shape for (name, state), shape in shapes.items() if state == "weight"})
    # Weights that lie where another does, and which: a tied one's names, after the optimizer's or first.
    trained = {name for name, state in map(_name_of, index.paths.values()) if state != "weight"}
    weights = [flat for flat in index.tensors if _name_of(index.paths[flat])[1] == "weight"]
    weights.sort(key=lambda flat: _name_of(index.paths[flat])[0] not in trained)
    places = {flat: frozenset(index.tensors[flat][2]) for flat in weights}
    homes = {place: flat for flat, place in reversed(places.items()) if place}
    others = {flat: homes[place] for flat, place in places.items() if homes.get(place, flat) != flat}
    for name, about in index.tensors.items():
        if name not in others:
            _take(root, index, name, about, found)
    for name, home in others.items():
        found.aliases[_name_of(index.paths[home])[0]] += [_name_of(index.paths[name])[0]]
    kept: dict[int | str, dict[str, Any]] = defaultdict(dict)
    client: dict[str, Any] = {}
    for name, item in index.objects.items() if objects else ():
        _take_object(root, index.paths[name], item, kept, client)
    groups = _groups(kept, list(dict.fromkeys(entry.name for entry in found.entries)))
    own = client.pop(OWN, {})
    facts = _facts(found, groups, client)
    names = {entry.name for entry in found.entries}
    try:
        specs = TypeAdapter(tuple[ParamSpec, ...]).validate_python(own.get("specs", ()))
    except (ValidationError, LayoutError) as error:
        raise unusable(str(root / INDEX), f"its {OWN} is damaged ({error})") from None
    return Catalog(
        root=root,
        format=FORMAT,
        entries=_with_roles(found, groups, own.get("roles")),
        facts={**facts, **own["facts"]} if own else facts,
        specs=tuple(spec for spec in specs if spec.name in names),
        checksums=tuple(found.checksums),
    )


@dataclass(slots=True)
class _Found:
    """What was gathered from the files so far; ``shapes`` are the weights'."""

    shapes: Mapping[str, tuple[int, ...]]
    entries: list[Entry] = field(default_factory=list)
    checksums: list[Checksum] = field(default_factory=list)
    numbers: dict[str, dict[str, float]] = field(default_factory=lambda: defaultdict(dict))
    aliases: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))


@dataclass(frozen=True, slots=True)
class _Item:
    """Bytes of a file that are a file of ``torch.save`` themselves; ``at`` is the box's corner."""

    file: str
    start: int
    length: int
    at: tuple[int, ...]


_About = tuple[tuple[int, ...], Mapping[tuple[int, ...], tuple[int, ...]], list[_Item]]
"""A tensor's shape, its boxes by their corners, and the items that they are."""


@dataclass(frozen=True, slots=True)
class _Index:
    """DCP's index: by flat name the tensors with their items, the other objects, and every path."""

    tensors: Mapping[str, _About]
    objects: Mapping[str, _Item]
    paths: Mapping[str, tuple[str | int, ...]]

    @classmethod
    def read(cls, root: Path) -> _Index:
        path = root / INDEX
        content = unpickle(store.content_of(path, MAX_BYTES), str(path))
        try:
            return cls._of(content.state)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise unusable(str(path), f"it is no index of torch.distributed.checkpoint ({error!r})") from None

    @classmethod
    def _of(cls, state: Mapping[str, Any]) -> _Index:
        items: dict[str, list[_Item]] = defaultdict(list)
        for key, record in state["storage_data"].items():
            info, named = record.state, key.state
            if info.get("transform_descriptors"):
                raise ValueError(f"{named['fqn']} is compressed")
            at = tuple(named.get("offset") or ())
            items[named["fqn"]].append(_Item(info["relative_path"], info["offset"], info["length"], at))
        tensors, objects = {}, {}
        for name, record in state["state_dict_metadata"].items():
            if record.kind.endswith(".BytesStorageMetadata"):
                objects[name] = items[name][0]
                continue
            chunks = {tuple(c.state["offsets"]): tuple(c.state["sizes"]) for c in record.state["chunks"]}
            tensors[name] = (tuple(record.state["size"]), chunks, items[name])
        planned = state.get("planner_data") or {}
        names = state["state_dict_metadata"]
        return cls(tensors, objects, {name: tuple(planned.get(name, (name,))) for name in names})


def _take(root: Path, index: _Index, flat: str, about: _About, found: _Found) -> None:
    """One tensor: an entry, or a step count."""
    shape, chunks, items = about
    name, state = _name_of(index.paths[flat])
    pieces, dtype = [], "float32"
    for item in items:
        what = f"tensor {name}, {state}"
        file = _opened(root, item, what)
        ref = file.content
        if not isinstance(ref, TensorRef):
            raise CheckpointError(
                f"{file.path}: {what}",
                "it is stored in a way that dsx does not read",
                "save it with torch's own writer",
            )
        dtype = ref.dtype
        if ref.shape != chunks.get(item.at):
            raise unusable(
                f"{root / item.file}: {what}",
                f"it holds a box of shape {ref.shape} where the index has {chunks.get(item.at)}",
            )
        if state != "weight" and not shape and (state == "step" or found.shapes.get(name) != ()):
            found.numbers[state][name] = float(file.value(ref))
            return
        if ref.numel:
            pieces.append(Piece(item.file, ref.offset, item.at, ref.shape, ref.strides))
        found.checksums += file.checksums
    found.entries.append(Entry(name=name, state=state, shape=shape, dtype=dtype, pieces=tuple(pieces)))


def _name_of(path: tuple[str | int, ...]) -> tuple[str, str]:
    """Name and state of a tensor by its path in the saved state dict."""
    parts = [str(part) for part in path]
    last = parts[-1]
    if len(parts) >= 3 and parts[-3] == "state":
        return parts[-2], last
    if last.startswith("state.") and last.count(".") > 1 and (len(parts) == 1 or parts[0] in _OPTIMIZERS):
        name, _, state = last.removeprefix("state.").rpartition(".")
        return name, state
    if len(parts) == 1:
        head, _, rest = last.partition(".")
        return (rest if head in _MODELS and rest else last), "weight"
    return ".".join(parts[1:] if parts[0] in _MODELS else parts), "weight"


def _opened(root: Path, item: _Item, what: str) -> TorchFile:
    """The file of ``torch.save`` that an item is."""
    locate(Catalog(root=root, format=FORMAT, entries=()), item.file, what)
    try:
        return read_torch_file(root, item.file, item.start, item.length)
    except CheckpointError as error:
        raise CheckpointError(f"{error.where}: {what}", error.what, error.fix) from None


def _take_object(
    root: Path,
    path: tuple[str | int, ...],
    item: _Item,
    groups: dict[int | str, dict[str, Any]],
    client: dict[str, Any],
) -> None:
    """Something that is no tensor: a hyperparameter of a group, or what the user saved with it."""
    where = ".".join(map(str, path))
    value = _opened(root, item, where).content
    if path == (OWN,) and isinstance(value, dict) and isinstance(value.get("facts"), dict):
        client[OWN] = value  # facts are plain data already
        return
    try:
        told = plain.encode(value, where)
    except CheckpointError:
        client.setdefault("left_behind", []).append(where)
        return
    name, _, key = str(path[-1]).removeprefix("param_groups.").rpartition(".")
    if len(path) >= 3 and path[-3] == "param_groups" and isinstance(path[-2], int):
        groups[path[-2]]["names" if path[-1] == "params" else str(path[-1])] = told
    elif name and str(path[-1]).startswith("param_groups.") and (len(path) == 1 or path[0] in _OPTIMIZERS):
        groups[name][key] = told  # flatten_optimizer_state_dict: every tensor has them for itself
    else:
        client[where] = told


def _groups(found: Mapping[int | str, dict[str, Any]], order: Sequence[str]) -> list[dict[str, Any]]:
    """The optimizer's groups; of tensors that have hyperparameters of their own, those with the same ones."""
    groups = [found[at] for at in sorted(at for at in found if isinstance(at, int))]
    merged: dict[str, dict[str, Any]] = {}
    for name in (name for name in order if name in found):
        alike = json.dumps(found[name], sort_keys=True)
        merged.setdefault(alike, {**found[name], "names": []})["names"].append(name)
    return [*groups, *merged.values()]


def _facts(found: _Found, groups: list[dict[str, Any]], client: dict[str, Any]) -> dict[str, Any]:
    left, scheduler = client.pop("left_behind", []), _scheduler(client)
    groups = [
        with_numbers(
            group,
            {
                state: {name: values[name] for name in group.get("names", ()) if name in values}
                for state, values in found.numbers.items()
            },
        )
        for group in groups
    ]
    facts: dict[str, Any] = {
        "param_groups": groups,
        "client_state": client,
        "left_behind": left,
        "lr_scheduler": scheduler,
    }
    if "step" in found.numbers:
        facts["step"] = int(max(found.numbers["step"].values()))
    return {key: value for key, value in facts.items() if value not in ({}, [])}


def _scheduler(client: dict[str, Any]) -> dict[str, Any]:
    """The state dict of the one learning-rate scheduler, taken out of what else was saved; empty if none."""
    for head in ("lr_scheduler.", "scheduler."):
        found = {key: key.removeprefix(head) for key in client if key.startswith(head)}
        # Of several, one in the other, no dict is left.
        if found and not any("." in key for key in found.values()):
            return {key: client.pop(path) for path, key in found.items()}
    return {}


def _with_roles(found: _Found, groups: Iterable[Mapping[str, Any]], told: Any) -> tuple[Entry, ...]:
    """Dsx wrote which tensors are not trained. In others' checkpoints the optimizer knows those that are.

    What it does not know is frozen if it is a float, and what is no float is a buffer.
    """
    trained = {entry.name for entry in found.entries if entry.state != "weight"}
    trained |= {str(name) for group in groups for name in group.get("names", ())}

    def role(entry: Entry) -> Role:
        if isinstance(told, dict):
            known = told.get(entry.name)
            return known if known in ("frozen", "buffer") else "trained"
        if entry.name in trained:
            return "trained"
        if "float" not in entry.dtype:
            return "buffer"
        return "frozen" if trained else "trained"

    return tuple(
        replace(entry, role=role(entry), aliases=tuple(found.aliases.get(entry.name, ())))
        for entry in found.entries
    )


_PACKAGE = "torch.distributed.checkpoint"
_ALIGNMENT = 64
Key = tuple[str | int, ...]


def target_of(source: Catalog, root: Path, *, files: int, precision: str | None = None) -> Target:
    """A DCP folder with everything that ``source`` has, under its names.

    ``files`` is how many files of tensors there are, ``precision`` the weights' dtype (``fp32``, ``bf16`` or
    ``fp16``), by default the source's.
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
        dropped=(*random, *left_behind(source.facts)),
    )


def _entries(source: Catalog, precision: str | None) -> Iterator[Entry]:
    """Blank entries: every weight, made of its master if need be, and every other state."""
    told = PRECISIONS.get(precision or str(source.facts.get("precision")), "float32")
    for name, states in source.by_name.items():
        weight, dtype = states.get("weight"), source.dtype_in(name, told)
        if weight is None:
            weight = replace(next(iter(states.values())), state="weight", dtype=dtype)
        elif precision is not None and weight.role != "buffer":
            weight = replace(weight, dtype=dtype)
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
        return Skeleton(
            file=self.name, num_bytes=self.end, parts=tuple(self.parts), crc32_fields=tuple(self.fields)
        )


class _Writer:
    """Lays out items over files, and keeps the index of them."""

    def __init__(self, files: list[_File]) -> None:
        self.files = files
        self._about: dict[str, PickledObject] = {}
        self._paths: dict[str, Key] = {}
        self._storage: dict[PickledObject, PickledObject] = {}

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
            self._about[key] = _record("metadata.BytesStorageMetadata")
            self._place(key, None, None, file.name, start, length)

    def index(self) -> PickledObject:
        """``Metadata``."""
        return _record(
            "metadata.Metadata",
            state_dict_metadata=self._about,
            planner_data=self._paths,
            storage_data=self._storage,
            storage_meta=None,
            version="1.0.0",
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
        index = _record("metadata.MetadataIndex", fqn=key, offset=offset, index=at)
        self._storage[index] = _record(
            "filesystem._StorageInfo", relative_path=file, offset=start, length=length
        )


def _tensor_about(
    dtype: str, shape: tuple[int, ...], chunks: list[tuple[tuple[int, ...], tuple[int, ...]]]
) -> PickledObject:
    """``TensorStorageMetadata``; its properties pickle themselves as a tuple (metadata.py, __getstate__)."""
    properties = (
        Global("torch", dtype),
        Call(Global("torch.serialization", "_get_layout"), ("torch.strided",)),
        False,
        Call(Global(f"{_PACKAGE}.metadata", "_MEM_FORMAT_ENCODING"), (0,)),
        False,
    )
    parts = [
        _record("metadata.ChunkStorageMetadata", offsets=size_of(low), sizes=size_of(extents))
        for low, extents in chunks
    ]
    made = PickledObject(f"{_PACKAGE}.metadata.TensorProperties", (), properties)
    return _record("metadata.TensorStorageMetadata", properties=made, size=size_of(shape), chunks=parts)


def _record(kind: str, **state: Any) -> PickledObject:
    return PickledObject(f"{_PACKAGE}.{kind}", (), state)
