"""torch.distributed.checkpoint (DCP) folders, as a catalog: what FSDP runs and torchtitan save.

``.metadata`` is a pickled index: for every tensor its shape and the boxes of it that lie somewhere, for every
box a file, an offset and a length; there lies a whole file of ``torch.save`` with that box. The index and the
files' structure are read as inert data, never executed.

Names, by the path in the saved state dict: ``(..., "state", NAME, STATE)`` is a state of the optimizer, as
``torch.distributed.checkpoint.state_dict`` lays them out, flattened or not; every other tensor is a weight,
under its path without a leading ``model``. Checked with torch 2.13.
"""

from __future__ import annotations

import json
import struct
import zipfile
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from dsx.checkpoint import plain, store
from dsx.checkpoint.catalog import ITEM_BYTES, Catalog, Checksum, Entry, Piece, locate
from dsx.checkpoint.file_io import Window
from dsx.checkpoint.formats.unpickle import MAX_BYTES, TensorRef, unpickle
from dsx.checkpoint.group_numbers import with_numbers
from dsx.errors import CheckpointError, LayoutError
from dsx.spec.param import ParamSpec

FORMAT = "dcp"
INDEX = ".metadata"
OWN = "dsx"  # key of the facts that dsx writes
_MODELS = {"model", "module", "state_dict", "model_state_dict", "app"}
_OPTIMIZERS = {"optim", "optimizer", "optimizers", "optimizer_state_dict"}
_USE_ANOTHER = "use another checkpoint"
_FORMATS = {"float32": "<f", "float64": "<d", "int64": "<q", "int32": "<i"}


def looks_dcp(root: Path) -> bool:
    """Whether a folder has DCP's index."""
    return (root / INDEX).is_file()


def catalog_of(root: Path, *, objects: bool = True) -> Catalog:
    """What a DCP checkpoint holds.

    Args:
        root: Its folder.
        objects: Read what is no tensor too.

    Raises:
        CheckpointError: The index or a file is missing, damaged, or names something to be imported that
            checkpoints do not need; tensors that are stored in a way that dsx does not read.
    """
    index = _Index.read(root)
    shapes = {_name_of(index.paths[flat]): about[0] for flat, about in index.tensors.items()}
    found = _Found({name: shape for (name, state), shape in shapes.items() if state == "weight"})
    others = _other_names(index)
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
    return Catalog(
        root=root,
        format=FORMAT,
        entries=_with_roles(found, groups, own.get("roles")),
        facts={**facts, **own["facts"]} if own else facts,
        specs=_specs(root, own.get("specs", ()), {entry.name for entry in found.entries}),
        checksums=tuple(found.checksums),
    )


def _specs(root: Path, told: Sequence[Any], names: set[str]) -> tuple[ParamSpec, ...]:
    """How layouts cut the tensors, where dsx wrote it."""
    try:
        specs = TypeAdapter(tuple[ParamSpec, ...]).validate_python(told)
    except (ValidationError, LayoutError) as error:
        raise CheckpointError(str(root / INDEX), f"its {OWN} is damaged ({error})", _USE_ANOTHER) from None
    return tuple(spec for spec in specs if spec.name in names)


def _other_names(index: _Index) -> dict[str, str]:
    """Weights that lie where another does, and which: a tied one's names, after the optimizer's or first."""
    trained = {name for name, state in map(_name_of, index.paths.values()) if state != "weight"}
    weights = [flat for flat in index.tensors if _name_of(index.paths[flat])[1] == "weight"]
    weights.sort(key=lambda flat: _name_of(index.paths[flat])[0] not in trained)
    places = {flat: frozenset(index.tensors[flat][2]) for flat in weights}
    homes = {place: flat for flat, place in reversed(places.items()) if place}
    return {flat: homes[place] for flat, place in places.items() if homes.get(place, flat) != flat}


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


@dataclass(frozen=True, slots=True)
class _Index:
    """DCP's index: by flat name the tensors with their items, the other objects, and every path."""

    tensors: Mapping[str, tuple[tuple[int, ...], Mapping[tuple[int, ...], tuple[int, ...]], list[_Item]]]
    objects: Mapping[str, _Item]
    paths: Mapping[str, tuple[str | int, ...]]

    @classmethod
    def read(cls, root: Path) -> _Index:
        path = root / INDEX
        content = unpickle(store.content_of(path, MAX_BYTES), str(path))
        try:
            return cls._of(content.state)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                str(path), f"it is no index of torch.distributed.checkpoint ({error!r})", _USE_ANOTHER
            ) from None

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


def _take(
    root: Path,
    index: _Index,
    flat: str,
    about: tuple[tuple[int, ...], Mapping[tuple[int, ...], tuple[int, ...]], list[_Item]],
    found: _Found,
) -> None:
    """One tensor: an entry, or a step count."""
    shape, chunks, items = about
    name, state = _name_of(index.paths[flat])
    pieces, dtype = [], "float32"
    for item in items:
        ref, checksum = _tensor_in(root, item, f"tensor {name}, {state}")
        dtype = ref.dtype
        if ref.shape != chunks.get(item.at):
            raise CheckpointError(
                f"{root / item.file}: tensor {name}, {state}",
                f"it holds a box of shape {ref.shape} where the index has {chunks.get(item.at)}",
                _USE_ANOTHER,
            )
        if state != "weight" and not shape and (state == "step" or found.shapes.get(name) != ()):
            found.numbers[state][name] = _number(root / item.file, ref)
            return
        if ref.numel:
            pieces.append(Piece(item.file, ref.offset, item.at, ref.shape, ref.strides))
        found.checksums += [checksum] if checksum is not None else []
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


def _opened(root: Path, item: _Item, what: str) -> tuple[Any, dict[str, tuple[int, int, int]]]:
    """The structure of an item, and (first byte, last, CRC32) in the file of every storage."""
    blank = Catalog(root=root, format=FORMAT, entries=())
    path = locate(blank, item.file, what)
    with path.open("rb") as file:
        window = Window(file, item.start, item.length)
        try:
            archive = zipfile.ZipFile(window)
            members = archive.infolist()
            (pickled,) = [member for member in members if member.filename.endswith("/data.pkl")]
            data = archive.read(pickled)
            places = {member.filename: _place(window, member, item) for member in members}
        except (
            zipfile.BadZipFile,
            ValueError,
            NotImplementedError,
            struct.error,
            zlib.error,
            OSError,
        ) as error:
            raise CheckpointError(
                f"{path}: {what}",
                f"{item.length} bytes at {item.start} are no whole file of torch.save ({error})",
                _USE_ANOTHER,
            ) from None
    prefix = pickled.filename.removesuffix("data.pkl") + "data/"
    storages = {name.removeprefix(prefix): at for name, at in places.items() if name.startswith(prefix)}
    return unpickle(data, str(path)), storages


def _place(window: Window, member: zipfile.ZipInfo, item: _Item) -> tuple[int, int, int]:
    window.seek(member.header_offset)
    header = window.read(30)
    if member.compress_type != zipfile.ZIP_STORED or len(header) < 30 or header[:4] != b"PK\x03\x04":
        raise ValueError(f"{member.filename} is not as torch writes it")
    first = member.header_offset + 30 + sum(struct.unpack("<HH", header[26:30]))
    if first + member.file_size > item.length:
        raise ValueError(f"{member.filename} reaches over its end")
    start = item.start + first
    return start, start + member.file_size, member.CRC


def _tensor_in(root: Path, item: _Item, what: str) -> tuple[TensorRef, Checksum | None]:
    """The one tensor that an item is, with its byte in the file, and the CRC32 of its storage."""
    ref, storages = _opened(root, item, what)
    where = f"{root / item.file}: {what}"
    if not isinstance(ref, TensorRef) or ref.storage not in storages or ref.dtype not in ITEM_BYTES:
        raise CheckpointError(
            where, "it is stored in a way that dsx does not read", "save it with torch's own writer"
        )
    start, stop, crc = storages[ref.storage]
    size = ITEM_BYTES[ref.dtype]
    last = sum((extent - 1) * step for extent, step in zip(ref.shape, ref.strides, strict=True))
    begin = start + ref.start * size
    if min((ref.start, *ref.strides, *ref.shape)) < 0 or (ref.numel and begin + (last + 1) * size > stop):
        raise CheckpointError(where, "it does not lie within its storage", "do not trust this file")
    checksum = Checksum(item.file, start, stop, "crc32", f"{crc:08x}") if crc and start < stop else None
    return replace(ref, offset=begin), checksum


def _number(path: Path, ref: TensorRef) -> float:
    with path.open("rb") as file:
        file.seek(ref.offset)
        data = file.read(ITEM_BYTES[ref.dtype])
    if ref.dtype not in _FORMATS or ref.numel != 1:
        raise CheckpointError(str(path), f"a step count of type {ref.dtype}", _USE_ANOTHER)
    return float(struct.unpack(_FORMATS[ref.dtype], data)[0])


def _take_object(
    root: Path,
    path: tuple[str | int, ...],
    item: _Item,
    groups: dict[int | str, dict[str, Any]],
    client: dict[str, Any],
) -> None:
    """Something that is no tensor: a hyperparameter of a group, or what the user saved with it."""
    where = ".".join(map(str, path))
    value, _ = _opened(root, item, where)
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
    groups = [with_numbers(group, _numbers_of(group, found)) for group in groups]
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


def _numbers_of(group: Mapping[str, Any], found: _Found) -> dict[str, dict[str, float]]:
    """The states of a group's tensors that are one number."""
    return {
        state: {name: values[name] for name in group.get("names", ()) if name in values}
        for state, values in found.numbers.items()
    }


def _with_roles(found: _Found, groups: Iterable[Mapping[str, Any]], told: Any) -> tuple[Entry, ...]:
    """Dsx wrote which tensors are not trained. In others' checkpoints the optimizer knows those that are.

    What it does not know is frozen if it is a float, and what is no float is a buffer.
    """
    trained = {entry.name for entry in found.entries if entry.state != "weight"}
    trained |= {str(name) for group in groups for name in group.get("names", ())}

    def role(entry: Entry) -> Literal["trained", "frozen", "buffer"]:
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
