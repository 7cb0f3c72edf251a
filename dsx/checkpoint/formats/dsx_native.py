"""``dsx-2``: dsx's own checkpoints. Any layout writes one, any layout reads it.

A folder with

- ``dsx.json``, the manifest (:mod:`dsx.checkpoint.formats.dsx_manifest`): facts, every tensor with the place
  of every piece, and checksums;
- ``rank_00000.safetensors``, ...: what each rank writes (:mod:`dsx.checkpoint.shares`), as intervals of its
  flattened local tensors, named ``<state>/<name>``;
- ``dsx_random_0.safetensors``, ...: the ranks' random states, if the run had them.

The fp32 master of a weight that is fp32 itself is that weight, and is stored once.
"""

from __future__ import annotations

import json
import struct
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from math import prod
from pathlib import Path
from typing import Any

from dsx.checkpoint import store
from dsx.checkpoint.catalog import Catalog, Checksum, Entry, Piece, locate
from dsx.checkpoint.checksums import digest
from dsx.checkpoint.copy_plan import TILE_ELEMENTS
from dsx.checkpoint.file_io import blamed
from dsx.checkpoint.formats.dsx_manifest import FORMAT_NAME, read_manifest, write_manifest
from dsx.checkpoint.formats.safetensors_file import NAMES
from dsx.checkpoint.layouts import is_guess
from dsx.checkpoint.pieces import Part, local_parts
from dsx.checkpoint.shares import Share, shares
from dsx.checkpoint.target import Skeleton, Target, Written, left_behind
from dsx.errors import CheckpointError
from dsx.spec.layout import Layout
from dsx.spec.mesh import Mesh
from dsx.spec.param import ParamSpec

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
class Stored:
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


def stored_by(layout: Layout, rank: int, wanted: Mapping[str, Sequence[Entry]]) -> list[Stored]:
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
                found.append(Stored(entry, *cut))
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


def header_of(stored: Sequence[Stored]) -> bytes:
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
