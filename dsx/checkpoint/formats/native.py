"""``dsx-2``: dsx's own checkpoints. Any layout writes one, any layout reads it. Pure data.

A folder with

- ``dsx.json``, the manifest: facts, every tensor with the place of every piece, and checksums;
- ``rank_00000.safetensors``, ...: what each rank writes, as intervals of its flattened local tensors, named
  ``<state>/<name>``;
- ``dsx_random_0.safetensors``, ...: the ranks' random states, if the run had them.

Each rank writes what it holds anyway. What several hold alike is written once, by one of them or, if it is
large, by each in part, so that all ranks write about as much. The fp32 master of a weight that is fp32 itself
is that weight, and is stored once.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from math import prod
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError
from safetensors import SafetensorError, deserialize

from dsx.checkpoint import store
from dsx.checkpoint.catalog import (
    SAVE_AGAIN,
    USE_ANOTHER,
    Catalog,
    Checksum,
    Entry,
    Piece,
    Role,
    Skeleton,
    Target,
    Written,
    left_behind,
    locate,
    unusable,
)
from dsx.checkpoint.copy_plan import TILE_ELEMENTS
from dsx.checkpoint.file_io import blamed, digest
from dsx.checkpoint.formats import safetensors_file
from dsx.checkpoint.json_text import parsed
from dsx.checkpoint.pieces import Part, local_parts
from dsx.errors import CheckpointError, LayoutError
from dsx.models.param import ITEM_BYTES, PRECISIONS, Init, ParamSpec
from dsx.parallel.layout import Layout
from dsx.parallel.mesh import Coordinates, Mesh
from dsx.parallel.stages import StageMap

_SPREAD_ELEMENTS = 1 << 16
"""A tensor with fewer elements than this is not spread over data-parallel ranks: it would be crumbs."""


def share_of(
    shape: Sequence[int], number: int, held: tuple[int, int], copy: int, copies: int
) -> tuple[int, int]:
    """The part of what some ranks hold alike that one of them writes: the one rule, of runs and conversions.

    Over these ranks every element is written exactly once: in equal parts of whole rows, or by one of them,
    each in turn.

    Args:
        shape: Of the local tensor.
        number: Index of the parameter among those that the ranks hold.
        held: The first of the flattened local tensor's elements that they hold, and the one after the last.
        copy: Which of the ranks this is.
        copies: How many they are.

    Returns:
        The first element and the one after the last; equal if the rank writes nothing.
    """
    start, stop = held
    if stop - start < _SPREAD_ELEMENTS:
        return (start, stop) if copy == number % copies else (start, start)
    row = prod(shape[1:])
    step = -(-(stop - start) // (row * copies)) * row
    return min(start + copy * step, stop), min(start + (copy + 1) * step, stop)


FORMAT = 2
FORMAT_NAME = "dsx-2"
_LARGEST_BYTES = 1 << 30
_CUTS = ("split", "parts", "tie", "layer", "hf", "hf_transposed")
_PARTED = ("hf_stacked", "hf_split", "hf_parts", "hf_whole", "hf_copies")
_SHARED = ("experts", "expert_blocks")
_ALL = (*_CUTS, *_PARTED, *_SHARED)
_RESERVED = {"format", "model_digest", "digest", "tile_elements", "files", "tensors", "checksums"}

_Placed = tuple[int, int, tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""Number of the file, offset, start, shape, strides: as :class:`dsx.checkpoint.catalog.Piece` has them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _State:
    """One state of a tensor."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    dtype: str
    pieces: tuple[_Placed, ...]
    tiles: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tensor:
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
    experts: int | None = None
    expert_blocks: int = 1
    tie: str | None = None
    layer: int | None = None
    hf: tuple[str, ...] = ()
    hf_transposed: bool = False
    hf_stacked: bool = False
    hf_split: int | None = None
    hf_parts: tuple[int, ...] = ()
    hf_whole: str = ""
    hf_copies: tuple[str, ...] = ()
    role: Role = "trained"
    aliases: tuple[str, ...] = ()
    states: dict[str, _State]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Manifest:
    """What is not facts."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    tile_elements: int
    files: tuple[str, ...]
    tensors: tuple[_Tensor, ...]
    checksums: dict[str, tuple[tuple[int, int, str], ...]]


def write_manifest(catalog: Catalog) -> bytes:
    """The manifest of a checkpoint, complete with its checksums."""
    taken = sorted(_RESERVED & catalog.facts.keys())
    if taken:
        raise CheckpointError(str(catalog.root), f"facts {taken} have reserved names", "report this")
    files = sorted({piece.file for entry in catalog.entries for piece in entry.pieces})
    rows = list(_rows(catalog, {file: number for number, file in enumerate(files)}))
    shapes = sorted({entry.name: list(entry.shape) for entry in catalog.entries}.items())
    head: dict[str, Any] = {
        "format": FORMAT,
        **catalog.facts,
        # Of the tensors' names and shapes: equal for every layout of one model.
        "model_digest": hashlib.sha256(json.dumps(shapes, separators=(",", ":")).encode()).hexdigest(),
        "tile_elements": catalog.tile_elements,
        "files": files,
        "checksums": _checksums(catalog.checksums),
    }
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
    """The catalog of the checkpoint whose manifest is ``path``; no other file is looked at."""
    content = read_json(path)
    if content.get("format") != FORMAT:
        raise CheckpointError(
            f"{path}: format = {content.get('format')!r}",
            f"this reader knows format {FORMAT}",
            f"load it with the dsx that wrote it: {content.get('versions')}",
        )
    own = content.pop("digest", None)
    if own != _digest(content):
        raise CheckpointError(str(path), "its content does not have its digest: it was changed", SAVE_AGAIN)
    facts = {key: value for key, value in content.items() if key not in _RESERVED}
    kept = {key: content.get(key) for key in ("tile_elements", "files", "tensors", "checksums")}
    try:
        stored = TypeAdapter(_Manifest).validate_json(json.dumps(kept), strict=True)
        return _catalog(path.parent, stored, facts)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        what = f"key {'.'.join(map(str, problem['loc']))}: {problem['msg']}"
        raise CheckpointError(str(path), what, SAVE_AGAIN) from None
    except (LayoutError, IndexError, KeyError, ValueError) as error:
        raise CheckpointError(str(path), f"it says what cannot be ({error})", SAVE_AGAIN) from None


def read_json(path: Path) -> dict[str, Any]:
    """A manifest of any format. Raises CheckpointError if there is none, or it is cut short or no JSON."""
    try:
        content = parsed(store.content_of(path, _LARGEST_BYTES), unique=True, finite=True)
    except FileNotFoundError:
        raise CheckpointError(str(path), "there is no such file", "give a checkpoint's folder") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(str(path), f"not JSON, or cut short ({error})", SAVE_AGAIN) from None
    if not isinstance(content, dict):
        raise CheckpointError(str(path), "not a description of a dsx checkpoint", SAVE_AGAIN)
    return content


def _rows(catalog: Catalog, files: Mapping[str, int]) -> Iterator[dict[str, Any]]:
    """Every tensor, as :class:`_Tensor` describes it."""
    specs = {spec.name: spec for spec in catalog.specs}
    for name, states in catalog.by_name.items():
        spec, first = specs.get(name), next(iter(states.values()))
        # Older readers do not know these, which are told only where they say something.
        cuts = (*_CUTS, *_PARTED) if any(getattr(spec, field, None) for field in _PARTED) else _CUTS
        cuts = cuts if spec is None or spec.experts is None else (*cuts, *_SHARED)
        yield {
            "name": name,
            "shape": first.shape,
            "dtype": states.get("weight", first).dtype,
            **({} if spec is None else {field: getattr(spec, field) for field in cuts}),
            "pad_multiple": 1 if spec is None else spec.pad_multiple or 1,
            "padded": None if spec is None else spec.pad_multiple is not None,
            "role": first.role,
            "aliases": first.aliases,
            "states": {
                state: {
                    "dtype": entry.dtype,
                    "pieces": [(files[p.file], p.offset, p.start, p.shape, p.strides) for p in entry.pieces],
                    "tiles": catalog.tile_digests.get(entry.key, ()),
                }
                for state, entry in states.items()
            },
        }


def _catalog(root: Path, stored: _Manifest, facts: dict[str, Any]) -> Catalog:
    entries, specs = [], []
    digests: dict[tuple[str, str], tuple[str, ...]] = {}
    for tensor in stored.tensors:
        if tensor.layer is not None:
            specs.append(_spec(tensor))
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


def _spec(tensor: _Tensor) -> ParamSpec:
    """How layouts cut a tensor. How it was initialised is no part of a checkpoint."""
    padded = tensor.pad_multiple > 1 if tensor.padded is None else tensor.padded
    kept: dict[str, Any] = {field: getattr(tensor, field) for field in ("name", "shape", *_ALL)}
    multiple = tensor.pad_multiple if padded else None
    init, is_buffer = Init(kind="zeros"), tensor.role == "buffer"
    return ParamSpec(**kept, init=init, pad_multiple=multiple, buffer=is_buffer)


def _piece(stored: _Placed, files: Sequence[str], dims: int) -> Piece:
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


def _digest(content: Mapping[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return digest(text.encode())


_LARGEST_RANDOM_STATE = 1 << 20


def catalog_of(root: Path) -> Catalog:
    """What a dsx checkpoint holds."""
    return read_manifest(root / store.MANIFEST)


def target_of(source: Catalog, root: Path, layout: Layout, *, precision: str | None = None) -> Target:
    """A dsx checkpoint in ``layout`` with everything that ``source`` has.

    ``precision`` (``fp32``, ``bf16`` or ``fp16``) is the weights' dtype; the source's by default.
    """
    held = source.by_name
    default = PRECISIONS.get(precision or str(source.facts.get("precision")), "float32")
    wanted = {
        spec.name: tuple(_states(spec, held.get(spec.name, {}), default, forced=precision is not None))
        for spec in layout.params
    }
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
    found = {states[0].dtype for states in wanted.values() if states[0].role != "buffer"}
    dtypes = sorted(found - {"float32"} or found)  # beside others, that is what the family keeps so
    names = {dtype: precision for precision, dtype in PRECISIONS.items()}
    told = {k: v for k, v in source.facts.items() if k not in ("left_behind", "random_files")}
    catalog = Catalog(
        root=root,
        format=FORMAT_NAME,
        entries=tuple(
            replace(entry, pieces=tuple(pieces[entry.key])) for states in wanted.values() for entry in states
        ),
        facts={
            **told,
            "versions": {**source.facts.get("versions", {}), "dsx": metadata.version("dsx")},
            **layout_facts(layout.mesh, layout.stages, layout.zero_stage),
            "precision": names.get(dtypes[0], dtypes[0]) if dtypes else "fp32",
            **({"random_files": {rank: random_file(rank) for rank in random}} if random else {}),
        },
        specs=tuple(spec for spec in layout.params if not spec.is_guess),
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
        catalog=catalog, skeletons=tuple(files), finish=finish, dropped=left_behind(source.facts), is_tag=True
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredBlock:
    """Consecutive elements of a rank's flattened local tensor, as a tensor of its file.

    Attributes:
        entry: Of what state of what tensor; without pieces.
        first: Where it begins in the local tensor. Padding at its ends is left out.
        parts: The boxes in it; element 0 is the block's first.
        shape: In the file: whole rows of the local tensor if they are whole, else flat.
        values: The elements, one dim, where a run has them (a torch tensor); None in a conversion.
    """

    entry: Entry
    first: int
    parts: tuple[Part, ...]
    shape: tuple[int, ...]
    values: Any = None

    @classmethod
    def of(
        cls,
        entry: Entry,
        spec: ParamSpec,
        at: Coordinates,
        held: tuple[int, int],
        number: int,
        copies: tuple[int, int],
    ) -> StoredBlock | None:
        """What a rank writes of the elements that it holds; None if that is nothing, or padding.

        ``at`` is where it stands; the rest is as :func:`share_of` takes it.
        """
        local = spec.local_shape(at)
        parts = local_parts(spec, at, *share_of(local, number, held, *copies))
        if not parts:
            return None
        low = min(part.flat for part in parts)
        high = max(part.end for part in parts)
        row = prod(local[1:])
        rows_only = bool(local) and low % row == high % row == 0
        return cls(
            entry=entry,
            first=low,
            parts=tuple(replace(part, flat=part.flat - low) for part in parts),
            shape=((high - low) // row, *local[1:]) if rows_only else local and (high - low,),
        )

    @property
    def numel(self) -> int:
        """Elements in the file."""
        return prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.numel * self.entry.item_bytes


def file_order(blocks: Iterable[StoredBlock]) -> list[StoredBlock]:
    """The blocks of a rank in the order of its file: wide elements first, then by state and layer."""
    return sorted(blocks, key=lambda block: (-block.entry.item_bytes, block.entry.state))


def blocks_of(layout: Layout, rank: int, wanted: Mapping[str, Sequence[Entry]]) -> list[StoredBlock]:
    """What ``rank`` writes, in the order of its file; entries of ``wanted`` have no pieces yet."""
    mesh, at = layout.mesh, layout.mesh.at(rank)
    numbers = {spec.name: number for number, spec in enumerate(layout.params)}
    found = []
    for held in layout.holdings(rank):
        spec = held.spec
        if at.along("pp")[1] != layout.owners(spec)[0]:
            continue  # of a tied one, the first stage writes it
        states = wanted.get(spec.name, ())
        # A weight that is its own master lies as masters do.
        own_master = len(states) > 1 and all(other.state != "master" for other in states)
        for entry in states:
            is_weight = entry.state == "weight" and not own_master
            interval, stage = (held.weights, 3) if is_weight else (held.state, 1)
            divided = layout.zero_stage >= stage
            cut, experts = spec.split is not None, spec.experts is not None
            copies = mesh.copies(rank, cut=cut, divided=divided, experts=experts)
            block = StoredBlock.of(entry, spec, at, interval, numbers[spec.name], copies)
            found += [] if block is None else [block]
    return file_order(found)


def _rank_file(
    layout: Layout,
    rank: int,
    wanted: Mapping[str, Sequence[Entry]],
    pieces: dict[tuple[str, str], list[Piece]],
) -> Skeleton | None:
    """The file of one rank; adds its pieces to ``pieces``. None if it has nothing to write."""
    name = rank_file(rank)
    blocks = blocks_of(layout, rank, wanted)
    if not blocks:
        return None
    header, places = header_of(blocks)
    for block, (at, _) in zip(blocks, places, strict=True):
        pieces[block.entry.key] += [part.at(name, at, block.entry.item_bytes) for part in block.parts]
    return Skeleton(file=name, num_bytes=places[-1][1], parts=((0, header),))


def header_of(blocks: Sequence[StoredBlock]) -> tuple[bytes, list[tuple[int, int]]]:
    """As :func:`~dsx.checkpoint.formats.safetensors_file.header_of`, of a rank's file."""
    named = ((f"{one.entry.state}/{one.entry.name}", one.entry.dtype, one.shape) for one in blocks)
    return safetensors_file.header_of(named, {"format": "pt", "dsx": FORMAT_NAME})


def _states(spec: ParamSpec, held: Mapping[str, Entry], default: str, *, forced: bool) -> Iterator[Entry]:
    weight, default = held.get("weight"), spec.dtype_in(default)
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


def layout_facts(mesh: Mesh, stages: StageMap, zero_stage: int) -> dict[str, Any]:
    """The facts that say in what layout a checkpoint was written."""
    return {
        "mesh": dict(mesh.axes),
        "chunks": stages.num_chunks,
        "placement": stages.placement,
        "stage_bounds": list(stages.bounds),
        "zero_stage": zero_stage,
    }


def _random_states(source: Catalog, layout: Layout) -> dict[str, bytes]:
    """For ranks of the new layout the random states of the source's rank in the corresponding place, if any.

    Tensor-parallel ranks draw alike: in another mesh all take those of their first, as runs do that load a
    checkpoint of another layout.
    """
    found = {}
    for rank in range(layout.mesh.size) if source.facts.get("random_files") else ():
        data = random_state(source, corresponding(source.facts.get("mesh"), layout.mesh, rank))
        if data is not None:
            found[str(rank)] = data
    return found


def random_state(source: Catalog, rank: int | None) -> bytes | None:
    """The file with the random states of a rank of ``source``; None if it has none."""
    file = source.facts.get("random_files", {}).get(str(rank))
    if file is None:
        return None
    what = f"random states of rank {rank}"
    path = locate(source, file, what)
    with blamed(path, what, "reading", USE_ANOTHER):
        data = store.content_of(path, _LARGEST_RANDOM_STATE)
    sums = [known for known in source.checksums if known.file == file]
    differs = any(digest(data[known.start : known.stop]) != known.digest for known in sums)
    if differs or not (sums or _has_own_digest(data)):
        raise unusable(f"{path}: {what}", "they are not what was written: their checksum is another")
    return data


def _has_own_digest(data: bytes) -> bool:
    """Whether random states have the digest that stands in their own file, as older checkpoints' alone have.

    Files without one, or of another kind, are taken as they are.
    """
    if data[8:9] != b"{":
        return True
    try:
        header = parsed(data[8 : 8 + int.from_bytes(data[:8], "little")])
        states = sorted(deserialize(data), key=lambda state: state[0])
        parts = [
            f"{name} torch.{safetensors_file.DTYPES[told['dtype']]} ".encode() + told["data"]
            for name, told in states
        ]
    except (SafetensorError, ValueError, KeyError):
        return False
    known = header.get("__metadata__", {}).get("xxh3_128")
    return known in (None, digest(b"".join(parts)))


def corresponding(saved: Mapping[str, int] | None, mesh: Mesh, rank: int) -> int | None:
    """The rank of the saved mesh in the place of ``rank``; None if there was none: no two draw alike for it.

    Whatever axes its replicas are along, the first of them takes the place of the first.
    """
    if not saved or dict(saved) == dict(mesh.axes):
        return rank
    was, replica = Mesh(tuple(saved.items())), mesh.replica(rank)
    place = {"pp": mesh.coords(rank).get("pp", 0)}
    for axis, size in reversed(was.axes):
        if axis in was.replica_axes:
            replica, place[axis] = divmod(replica, size)
    return None if replica or place["pp"] >= was.pp else was.rank(**place)


def rank_file(rank: int) -> str:
    """The file with a rank's part of every tensor."""
    return f"rank_{rank:05d}.safetensors"


def random_file(rank: int | str) -> str:
    """The file with a rank's random states."""
    return f"dsx_random_{rank}.safetensors"
