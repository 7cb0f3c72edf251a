"""``dsx.json`` of format 2: a catalog as JSON that a person, ``jq`` and a program without torch can read."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, TypeAdapter, ValidationError

from dsx.checkpoint import store
from dsx.checkpoint.catalog import ITEM_BYTES, Catalog, Checksum, Entry, Piece
from dsx.checkpoint.checksums import digest
from dsx.checkpoint.json_text import parsed
from dsx.errors import CheckpointError, LayoutError
from dsx.spec.param import Init, ParamSpec

FORMAT = 2
FORMAT_NAME = "dsx-2"
_LARGEST_BYTES = 1 << 30
_RESERVED = {"format", "model_digest", "digest", "tile_elements", "files", "tensors", "checksums"}
_USE_ANOTHER = "use another checkpoint, or save this one again"

StoredPiece = tuple[int, int, tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""Number of the file, offset, start, shape, strides: as :class:`dsx.checkpoint.catalog.Piece` has them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredState:
    """One state of a tensor."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    dtype: str
    pieces: tuple[StoredPiece, ...]
    tiles: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A logical tensor.

    ``layer`` is None for a tensor of which it is not known how layouts cut it. Files from before ``padded``
    have None there, and padding where ``pad_multiple`` is above 1.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    name: str
    shape: tuple[int, ...]
    dtype: str
    split: int | None = None
    parts: tuple[int, ...] = ()
    pad_multiple: int = 1
    padded: bool | None = None
    tie: str | None = None
    layer: int | None = None
    hf: tuple[str, ...] = ()
    hf_transposed: bool = False
    role: Literal["trained", "frozen", "buffer"] = "trained"
    aliases: tuple[str, ...] = ()
    states: dict[str, StoredState]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stored:
    """What is not facts."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    tile_elements: int
    files: tuple[str, ...]
    tensors: tuple[StoredTensor, ...]
    checksums: dict[str, tuple[tuple[int, int, str], ...]]


def write_manifest(catalog: Catalog) -> bytes:
    """The manifest of a checkpoint, complete with its checksums.

    Raises:
        CheckpointError: A fact cannot be told in JSON.
    """
    taken = sorted(_RESERVED & catalog.facts.keys())
    if taken:
        raise CheckpointError(str(catalog.root), f"facts {taken} have reserved names", "report this")
    files = sorted({piece.file for entry in catalog.entries for piece in entry.pieces})
    tensors = _tensors(catalog, {file: number for number, file in enumerate(files)})
    head: dict[str, Any] = {
        "format": FORMAT,
        **catalog.facts,
        "model_digest": _model_digest(tensors),
        "tile_elements": catalog.tile_elements,
        "files": files,
        "checksums": _checksums(catalog.checksums),
    }
    rows = [asdict(tensor) for tensor in tensors]
    try:
        own = _digest({**head, "tensors": rows})
        text = json.dumps({**head, "digest": own}, indent=None, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"{catalog.root}: facts", f"they cannot be written as JSON ({error})", "keep them to plain values"
        ) from None
    lines = ",\n".join(f"  {json.dumps(row)}" for row in rows)
    return f'{text.removesuffix("}")},\n "tensors": [\n{lines}\n ]\n}}\n'.encode()


def read_manifest(path: Path) -> Catalog:
    """The catalog of the checkpoint whose manifest is ``path``; no other file is looked at.

    Raises:
        CheckpointError: It is missing, cut short, changed, of another format, or says what cannot be.
    """
    content = read_json(path)
    if content.get("format") != FORMAT:
        raise CheckpointError(
            f"{path}: format = {content.get('format')!r}",
            f"this reader knows format {FORMAT}",
            f"load it with the dsx that wrote it: {content.get('versions')}",
        )
    own = content.pop("digest", None)
    if own != _digest(content):
        raise CheckpointError(str(path), "its content does not have its digest: it was changed", _USE_ANOTHER)
    facts = {key: value for key, value in content.items() if key not in _RESERVED}
    kept = {key: content.get(key) for key in ("tile_elements", "files", "tensors", "checksums")}
    try:
        stored = TypeAdapter(_Stored).validate_json(json.dumps(kept), strict=True)
        return _catalog(path.parent, stored, facts)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        what = f"key {'.'.join(map(str, problem['loc']))}: {problem['msg']}"
        raise CheckpointError(str(path), what, _USE_ANOTHER) from None
    except (LayoutError, IndexError, KeyError, ValueError) as error:
        raise CheckpointError(str(path), f"it says what cannot be ({error})", _USE_ANOTHER) from None


def read_json(path: Path) -> dict[str, Any]:
    """A manifest of any format. Raises CheckpointError if there is none, or it is cut short or no JSON."""
    try:
        content = parsed(store.content_of(path, _LARGEST_BYTES), unique=True, finite=True)
    except FileNotFoundError:
        raise CheckpointError(str(path), "there is no such file", "give a checkpoint's folder") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(str(path), f"not JSON, or cut short ({error})", _USE_ANOTHER) from None
    if not isinstance(content, dict):
        raise CheckpointError(str(path), "not a description of a dsx checkpoint", _USE_ANOTHER)
    return content


def _tensors(catalog: Catalog, files: Mapping[str, int]) -> list[StoredTensor]:
    specs = {spec.name: spec for spec in catalog.specs}
    by_name: dict[str, list[Entry]] = defaultdict(list)
    for entry in catalog.entries:
        by_name[entry.name].append(entry)
    return [_tensor(entries, specs.get(name), catalog, files) for name, entries in by_name.items()]


def _tensor(
    entries: Sequence[Entry], spec: ParamSpec | None, catalog: Catalog, files: Mapping[str, int]
) -> StoredTensor:
    first = entries[0]
    known: dict[str, Any] = {}
    if spec is not None:
        fields = ("split", "parts", "tie", "layer", "hf", "hf_transposed")
        known = {field: getattr(spec, field) for field in fields}
        known |= {"padded": spec.pad_multiple is not None, "pad_multiple": spec.pad_multiple or 1}
    return StoredTensor(
        name=first.name,
        shape=first.shape,
        dtype=next((entry.dtype for entry in entries if entry.state == "weight"), first.dtype),
        role=first.role,
        aliases=first.aliases,
        states={
            entry.state: StoredState(
                dtype=entry.dtype,
                pieces=tuple((files[p.file], p.offset, p.start, p.shape, p.strides) for p in entry.pieces),
                tiles=catalog.tile_digests.get(entry.key, ()),
            )
            for entry in entries
        },
        **known,
    )


def _catalog(root: Path, stored: _Stored, facts: dict[str, Any]) -> Catalog:
    entries, specs = [], []
    digests: dict[tuple[str, str], tuple[str, ...]] = {}
    for tensor in stored.tensors:
        if tensor.layer is not None:
            specs.append(_spec(tensor, tensor.layer))
        for state, held in tensor.states.items():
            entry = Entry(
                name=tensor.name,
                state=state,
                shape=tensor.shape,
                dtype=held.dtype,
                pieces=tuple(_piece(piece, stored.files, len(tensor.shape)) for piece in held.pieces),
                role=tensor.role,
                aliases=tensor.aliases,
            )
            if entry.dtype not in ITEM_BYTES:
                raise ValueError(f"{entry} has dtype {entry.dtype}")
            if held.tiles:
                digests[entry.key] = held.tiles
            entries.append(entry)
    return Catalog(
        root=root,
        format=FORMAT_NAME,
        entries=tuple(entries),
        facts=facts,
        specs=tuple(sorted(specs, key=lambda spec: spec.layer)),
        checksums=tuple(
            Checksum(file, start, stop, "xxh3_128", name)
            for file, sums in stored.checksums.items()
            for start, stop, name in sums
        ),
        tile_elements=stored.tile_elements,
        tile_digests=digests,
    )


def _spec(tensor: StoredTensor, layer: int) -> ParamSpec:
    """How layouts cut a tensor. How it was initialised is no part of a checkpoint."""
    padded = tensor.pad_multiple > 1 if tensor.padded is None else tensor.padded
    return ParamSpec(
        name=tensor.name,
        layer=layer,
        shape=tensor.shape,
        init=Init(kind="zeros"),
        hf=tensor.hf,
        split=tensor.split,
        parts=tensor.parts,
        pad_multiple=tensor.pad_multiple if padded else None,
        hf_transposed=tensor.hf_transposed,
        tie=tensor.tie,
    )


def _piece(stored: StoredPiece, files: Sequence[str], dims: int) -> Piece:
    number, offset, start, shape, strides = stored
    if not len(start) == len(shape) == len(strides) == dims:
        raise ValueError(f"a piece with {len(shape)} dims of a tensor with {dims}")
    if min((number, offset, *start, *strides), default=0) < 0 or min(shape, default=1) < 1:
        raise ValueError(f"a piece at {start} of shape {shape}")
    return Piece(files[number], offset, start, shape, strides)


def _checksums(checksums: Iterable[Checksum]) -> dict[str, list[tuple[int, int, str]]]:
    found: dict[str, list[tuple[int, int, str]]] = defaultdict(list)
    for checksum in checksums:
        found[checksum.file].append((checksum.start, checksum.stop, checksum.digest))
    return {file: sorted(sums) for file, sums in sorted(found.items())}


def _model_digest(tensors: Iterable[StoredTensor]) -> str:
    """SHA-256 of the tensors' names and shapes: equal for every layout of one model."""
    shapes = sorted([tensor.name, list(tensor.shape)] for tensor in tensors)
    return hashlib.sha256(json.dumps(shapes, separators=(",", ":")).encode()).hexdigest()


def _digest(content: Mapping[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return digest(text.encode())
