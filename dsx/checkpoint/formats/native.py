"""``dsx-2``: dsx's own checkpoints. Any layout writes one, any layout reads it.

Which rank writes which part of every tensor into a dsx checkpoint. Pure data, from a Layout.

Each rank writes what it holds anyway. What several hold alike is written once, by one of them or, if it is
large, by each in part, so that all ranks write about as much.

A folder with

- ``dsx.json``, the manifest (:mod:`dsx.checkpoint.formats.native`): facts, every tensor with the place
  of every piece, and checksums;
- ``rank_00000.safetensors``, ...: what each rank writes (:mod:`dsx.checkpoint.formats.native`), as intervals
  of its flattened local tensors, named ``<state>/<name>``;
- ``dsx_random_0.safetensors``, ...: the ranks' random states, if the run had them.

The fp32 master of a weight that is fp32 itself is that weight, and is stored once.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from math import prod
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, TypeAdapter, ValidationError

from dsx.checkpoint import store
from dsx.checkpoint.catalog import ITEM_BYTES, Catalog, Checksum, Entry, Piece, locate
from dsx.checkpoint.checksums import digest
from dsx.checkpoint.copy_plan import TILE_ELEMENTS
from dsx.checkpoint.file_io import blamed
from dsx.checkpoint.formats.safetensors_file import NAMES
from dsx.checkpoint.json_text import parsed
from dsx.checkpoint.layouts import is_guess
from dsx.checkpoint.pieces import Part, local_parts
from dsx.checkpoint.target import Skeleton, Target, Written, left_behind
from dsx.errors import CheckpointError, LayoutError
from dsx.models.param import Init, ParamSpec
from dsx.parallel.layout import Layout
from dsx.parallel.mesh import Mesh
from dsx.parallel.zero import ZeroPlan

_SPREAD_ELEMENTS = 1 << 16
"""A tensor with fewer elements than this is not spread over data-parallel ranks: it would be crumbs."""


@dataclass(frozen=True, slots=True)
class Share:
    """Elements ``start`` to ``stop`` of the flattened local tensor that a rank writes; none if equal."""

    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankShares:
    """What one rank writes of one parameter.

    Attributes:
        spec: The parameter.
        tp_rank: The rank's coordinate, which says what its local tensor is of.
        weight: Of the weight.
        state: Of the fp32 master and of each optimizer state.
    """

    spec: ParamSpec
    tp_rank: int
    weight: Share
    state: Share


def shares(layout: Layout, rank: int) -> Iterator[RankShares]:
    """What ``rank`` writes of every parameter that it holds, in layer order.

    Over all ranks, every element of every tensor is written exactly once.
    """
    at = layout.mesh.coords(rank)
    plan, dp = layout.zero_plan(at["pp"]), at["dp"]
    weights, states = plan.weights(dp), plan.state(dp)
    for number, spec in enumerate(layout.params):
        owners = layout.owners(spec)
        if at["pp"] not in owners:
            continue
        mine = at["pp"] == owners[0] and (spec.split is not None or at["tp"] == number % layout.mesh.tp)
        nothing = Share(0, 0)
        spread = _spread(layout, spec, dp, number)
        yield RankShares(
            spec=spec,
            tp_rank=at["tp"],
            weight=(Share(*weights[spec.name]) if _divided(plan, 3) else spread) if mine else nothing,
            state=(Share(*states[spec.name]) if _divided(plan, 1) else spread) if mine else nothing,
        )


def _divided(plan: ZeroPlan, stage: int) -> bool:
    """Whether data-parallel ranks hold different parts of what ZeRO cuts from ``stage`` on."""
    return plan.stage >= stage


def _spread(layout: Layout, spec: ParamSpec, dp_rank: int, number: int) -> Share:
    """This data-parallel rank's part of what all of them hold: whole rows, or all, or nothing."""
    shape, dp = spec.local_shape(layout.mesh.tp), layout.mesh.dp
    numel = prod(shape)
    if numel < _SPREAD_ELEMENTS or not shape:
        return Share(0, numel if dp_rank == number % dp else 0)
    row = prod(shape[1:])
    rows = -(-shape[0] // dp)
    return Share(min(dp_rank * rows, shape[0]) * row, min((dp_rank + 1) * rows, shape[0]) * row)


FORMAT = 2
FORMAT_NAME = "dsx-2"
_LARGEST_BYTES = 1 << 30
_RESERVED = {"format", "model_digest", "digest", "tile_elements", "files", "tensors", "checksums"}
_TAKE_ANOTHER = "use another checkpoint, or save this one again"

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
        raise CheckpointError(
            str(path), "its content does not have its digest: it was changed", _TAKE_ANOTHER
        )
    facts = {key: value for key, value in content.items() if key not in _RESERVED}
    kept = {key: content.get(key) for key in ("tile_elements", "files", "tensors", "checksums")}
    try:
        stored = TypeAdapter(_Stored).validate_json(json.dumps(kept), strict=True)
        return _catalog(path.parent, stored, facts)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        what = f"key {'.'.join(map(str, problem['loc']))}: {problem['msg']}"
        raise CheckpointError(str(path), what, _TAKE_ANOTHER) from None
    except (LayoutError, IndexError, KeyError, ValueError) as error:
        raise CheckpointError(str(path), f"it says what cannot be ({error})", _TAKE_ANOTHER) from None


def read_json(path: Path) -> dict[str, Any]:
    """A manifest of any format. Raises CheckpointError if there is none, or it is cut short or no JSON."""
    try:
        content = parsed(store.content_of(path, _LARGEST_BYTES), unique=True, finite=True)
    except FileNotFoundError:
        raise CheckpointError(str(path), "there is no such file", "give a checkpoint's folder") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(str(path), f"not JSON, or cut short ({error})", _TAKE_ANOTHER) from None
    if not isinstance(content, dict):
        raise CheckpointError(str(path), "not a description of a dsx checkpoint", _TAKE_ANOTHER)
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


PRECISIONS: Mapping[str, str] = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_ALIGNMENT_BYTES = 64
_LARGEST_RANDOM_STATE = 1 << 20
_USE_ANOTHER = "use another checkpoint"


def catalog_of(root: Path) -> Catalog:
    """What a dsx checkpoint holds.

    Raises:
        CheckpointError: ``root`` has no manifest of format 2, or one that is damaged.
    """
    return read_manifest(root / store.MANIFEST)


def target_of(
    source: Catalog,
    root: Path,
    layout: Layout,
    *,
    precision: str | None = None,
    facts: Mapping[str, Any] | None = None,
) -> Target:
    """A dsx checkpoint in ``layout`` with everything that ``source`` has.

    Args:
        source: Where the states come from; which states there are, their dtypes and the facts.
        root: Folder to make.
        layout: Whose ranks' files to write.
        precision: ``fp32``, ``bf16`` or ``fp16``: dtype of the weights; the source's by default.
        facts: Replace the source's of the same keys.

    Raises:
        CheckpointError: A random state of the source is unreadable.
    """
    wanted = _entries(source, layout, precision)
    random = _random_states(source, layout)
    files: list[Skeleton] = []
    pieces: dict[tuple[str, str], list[Piece]] = defaultdict(list)
    for rank in range(layout.mesh.size):
        skeleton = _rank_file(layout, rank, wanted, pieces)
        if skeleton is not None:
            files.append(skeleton)
    files += [
        Skeleton(file=random_file(rank), num_bytes=len(data), parts=((0, data),))
        for rank, data in random.items()
    ]
    catalog = Catalog(
        root=root,
        format=FORMAT_NAME,
        entries=tuple(
            replace(entry, pieces=tuple(pieces[entry.key])) for states in wanted.values() for entry in states
        ),
        facts=_facts(source, layout, wanted, random) | dict(facts or {}),
        specs=tuple(spec for spec in layout.params if not is_guess(spec)),
        tile_elements=source.tile_elements or TILE_ELEMENTS,
    )
    headers = tuple(
        Checksum(file.file, start, start + len(data), "xxh3_128", digest(data))
        for file in files
        for start, data in file.parts
    )

    def finish(folder: Path, written: Written) -> None:
        complete = replace(
            catalog,
            checksums=(*headers, *written.checksums),
            tile_elements=written.tile_elements,
            tile_digests=written.tile_digests,
        )
        store.write_atomically(folder / store.MANIFEST, write_manifest(complete))

    return Target(
        catalog=catalog,
        skeletons=tuple(files),
        finish=finish,
        dropped=left_behind(source.facts),
        is_tag=True,
    )


@dataclass(frozen=True, slots=True)
class StoredInterval:
    """An interval of a flattened local tensor, as a tensor of a rank's file.

    Attributes:
        entry: Of what state of what tensor.
        low: Its first element.
        high: The element after its last; nothing but padding of the share is left out.
        parts: The boxes in it.
        shape: In the file: whole rows of the local tensor if they are whole, else flat.
    """

    entry: Entry
    low: int
    high: int
    parts: tuple[Part, ...]
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes in the file."""
        return (self.high - self.low) * self.entry.item_bytes


def stored_by(layout: Layout, rank: int, wanted: Mapping[str, Sequence[Entry]]) -> list[StoredInterval]:
    """What ``rank`` writes, in the order of its file: wide elements first, then by state and layer.

    Args:
        layout: The layout.
        rank: The rank.
        wanted: The entries (without pieces) of every parameter, by name.
    """
    found = []
    for held in shares(layout, rank):
        states = wanted.get(held.spec.name, ())
        cuts = {
            share: _cut(held.spec, layout.mesh.tp, held.tp_rank, share) for share in {held.weight, held.state}
        }
        for entry in states:
            cut = cuts[held.weight if _is_weight(entry, states) else held.state]
            if cut is not None:
                found.append(StoredInterval(entry, *cut))
    return sorted(found, key=lambda item: (-item.entry.item_bytes, item.entry.state))


def _is_weight(entry: Entry, states: Sequence[Entry]) -> bool:
    """Whether an entry lies as weights do. A weight that is its own master lies as masters do."""
    return entry.state == "weight" and (any(other.state == "master" for other in states) or len(states) == 1)


def _cut(
    spec: ParamSpec, tp: int, tp_rank: int, share: Share
) -> tuple[int, int, tuple[Part, ...], tuple[int, ...]] | None:
    """A share without the padding at its ends: first element, the one after the last, parts, shape in a file.

    None if there is nothing but padding in it.
    """
    parts = local_parts(spec, tp, tp_rank, share.start, share.stop)
    if not parts:
        return None
    low = min(part.flat for part in parts)
    high = max(
        part.flat + 1 + sum((n - 1) * step for n, step in zip(part.shape, part.strides, strict=True))
        for part in parts
    )
    local = spec.local_shape(tp)
    row = prod(local[1:])
    rows_only = bool(local) and low % row == high % row == 0
    return low, high, parts, ((high - low) // row, *local[1:]) if rows_only else local and (high - low,)


def _rank_file(
    layout: Layout,
    rank: int,
    wanted: Mapping[str, Sequence[Entry]],
    pieces: dict[tuple[str, str], list[Piece]],
) -> Skeleton | None:
    """The file of one rank; adds its pieces to ``pieces``. None if it has nothing to write."""
    name = f"rank_{rank:05d}.safetensors"
    stored = stored_by(layout, rank, wanted)
    if not stored:
        return None
    header = header_of(stored)
    at = len(header)
    for item in stored:
        origin = at - item.low * item.entry.item_bytes
        pieces[item.entry.key] += [part.at(name, origin, item.entry.item_bytes) for part in item.parts]
        at += item.num_bytes
    return Skeleton(file=name, num_bytes=at, parts=((0, header),))


def header_of(stored: Sequence[StoredInterval]) -> bytes:
    """The header of a safetensors file with these tensors one after another."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt", "dsx": FORMAT_NAME}}
    at = 0
    for item in stored:
        header[f"{item.entry.state}/{item.entry.name}"] = {
            "dtype": NAMES[item.entry.dtype],
            "shape": item.shape,
            "data_offsets": [at, at + item.num_bytes],
        }
        at += item.num_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT_BYTES)
    return struct.pack("<Q", len(text)) + text


def _entries(source: Catalog, layout: Layout, precision: str | None) -> dict[str, tuple[Entry, ...]]:
    """Entries of the new checkpoint, still without pieces, by name."""
    held: dict[str, dict[str, Entry]] = defaultdict(dict)
    for entry in source.entries:
        held[entry.name][entry.state] = entry
    default = PRECISIONS.get(precision or str(source.facts.get("precision")), "float32")
    return {
        spec.name: tuple(_states(spec, held[spec.name], default, forced=precision is not None))
        for spec in layout.params
    }


def _states(spec: ParamSpec, held: Mapping[str, Entry], default: str, *, forced: bool) -> Iterator[Entry]:
    weight = held.get("weight")
    like = weight or held.get("master")
    dtype = default if weight is None else weight.dtype
    if forced and dtype in PRECISIONS.values() and (weight is None or weight.role != "buffer"):
        dtype = default
    blank = Entry(
        name=spec.name,
        state="weight",
        shape=spec.shape,
        dtype=dtype,
        pieces=(),
        role="trained" if like is None else like.role,
        aliases=() if like is None else like.aliases,
    )
    yield blank
    moments = [entry for state, entry in held.items() if state not in ("weight", "master")]
    if dtype in ("bfloat16", "float16") and ("master" in held or moments):
        yield replace(blank, state="master", dtype="float32")
    for entry in moments:
        yield replace(blank, state=entry.state, dtype=entry.dtype)


def _facts(
    source: Catalog, layout: Layout, wanted: Mapping[str, Sequence[Entry]], random: Mapping[str, bytes]
) -> dict[str, Any]:
    stages = layout.stages
    dtypes = [states[0].dtype for states in wanted.values() if states[0].role != "buffer"]
    names = {dtype: precision for precision, dtype in PRECISIONS.items()}
    told = {k: v for k, v in source.facts.items() if k not in ("left_behind", "random_files")}
    return {
        **told,
        "versions": {**source.facts.get("versions", {}), "dsx": metadata.version("dsx")},
        "mesh": dict(layout.mesh.axes),
        "chunks": stages.num_chunks,
        "placement": stages.placement,
        "stage_bounds": list(stages.bounds),
        "zero_stage": layout.zero_stage,
        "precision": names.get(dtypes[0], dtypes[0]) if dtypes else "fp32",
        **({"random_files": {rank: random_file(rank) for rank in random}} if random else {}),
    }


def _random_states(source: Catalog, layout: Layout) -> dict[str, bytes]:
    """For every rank of the new layout the random states of the source's rank in the corresponding place.

    Tensor-parallel ranks draw alike: in another mesh all take those of their first, as runs do that load a
    checkpoint of another layout.
    """
    found = {}
    for rank in range(layout.mesh.size) if source.facts.get("random_files") else ():
        data = random_state(source, corresponding(source.facts.get("mesh"), layout.mesh, rank))
        if data is not None:
            found[str(rank)] = data
    return found


def random_state(source: Catalog, rank: int) -> bytes | None:
    """The file with the random states of a rank of ``source``; None if it has none.

    Raises:
        CheckpointError: The file is missing, unreadable, or not what was written.
    """
    file = source.facts.get("random_files", {}).get(str(rank))
    if file is None:
        return None
    what = f"random states of rank {rank}"
    path = locate(source, file, what)
    with blamed(path, what, "reading", _USE_ANOTHER):
        data = store.content_of(path, _LARGEST_RANDOM_STATE)
    for known in source.checksums:
        if known.file == file and digest(data[known.start : known.stop]) != known.digest:
            raise CheckpointError(
                f"{path}: {what}", "they are not what was written: their checksum is another", _USE_ANOTHER
            )
    return data


def corresponding(saved: Mapping[str, int] | None, mesh: Mesh, rank: int) -> int:
    """The rank of the saved mesh in the place of ``rank``."""
    if not saved or dict(saved) == dict(mesh.axes):
        return rank
    at = mesh.coords(rank)
    return Mesh(tuple(saved.items())).rank(
        **{axis: at.get(axis, 0) % size for axis, size in saved.items() if axis != "tp"}
    )


def random_file(rank: int | str) -> str:
    """The file with a rank's random states."""
    return f"dsx_random_{rank}.safetensors"
