"""Tensors of a checkpoint, in tiles or straight into memory, every checksum checked; two of them compared."""

from __future__ import annotations

import os
import threading
import zlib
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.lib.stride_tricks import as_strided

from dsx.checkpoint.catalog import (
    USE_ANOTHER,
    Catalog,
    Checksum,
    Entry,
    Piece,
    check_files,
    heads,
    locate,
    unusable,
)
from dsx.checkpoint.copy_plan import TILE_ELEMENTS, check_cover, region, tiles
from dsx.checkpoint.file_io import (
    Array,
    Crc32Parts,
    FilePool,
    Summed,
    blamed,
    convert,
    crc32_joined,
    crc32_of_file,
    digest,
    digest_of_file,
    numpy_dtype,
    read_box,
    ulps,
)
from dsx.checkpoint.pieces import Part, PieceIndex, flat_offset, intersect, volume
from dsx.errors import CheckpointError
from dsx.models.param import Box

_DAMAGED = f"{USE_ANOTHER}: this one is damaged"


class DamagedError(CheckpointError):
    """Bytes that differ from those that were written."""


@dataclass(frozen=True, slots=True)
class Tile:
    """A tile that was read.

    Attributes:
        values: Array of the tile's shape, in the numpy dtype that holds the entry's.
        digest: xxh3_128 of its bytes, row-major.
    """

    values: Array
    digest: str


class Reader:
    """Reads tensors of a checkpoint, for several threads. A context manager that closes its files.

    Whatever is read whole is compared with its checksum, if the checkpoint has one.

    Args:
        tile_elements: Size of the tiles that will be asked for. The manifest's digests are compared if it has
            them of tiles of this size.

    Attributes:
        read_bytes: Bytes of tensors that :meth:`fill` has read.
        tiles_checked: Tiles that :meth:`read` has compared whole with what the checkpoint says of them.
    """

    def __init__(self, catalog: Catalog, tile_elements: int = TILE_ELEMENTS) -> None:
        check_files(catalog)
        self.catalog = catalog
        self._entries = catalog.by_key
        self._indexes: dict[tuple[str, str], PieceIndex] = {}
        self._digests = catalog.tile_digests if catalog.tile_elements == tile_elements else {}
        self._holders = catalog.files
        self._heads = heads(catalog)
        self._files = FilePool(self._path_of, os.O_RDONLY)
        self._sums = _by_file(catalog)
        self._regions = {
            (one.file, one.start, one.stop): one for one in catalog.checksums if one.algorithm != "crc32"
        }
        self._right: set[tuple[str, int]] = set()
        self._parts = Crc32Parts()
        self._lock = threading.Lock()
        self.read_bytes = 0
        self.tiles_checked = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._files.close()

    def find(self, name: str, state: str) -> Entry | None:
        """The state of a tensor; master and weight stand in for each other. None if there is neither."""
        found = self._entries.get((name, state))
        if found is None and state in ("master", "weight"):
            found = self._entries.get((name, "weight" if state == "master" else "master"))
        return found

    def fill(self, entry: Entry, parts: Sequence[Part], out: Array, dtype: str) -> None:
        """Put parts of a tensor, boxes, where they belong in a rank's flattened local tensor.

        ``out`` is that, with one dim, and written in place; ``dtype`` is its dtype by torch's name.
        """
        for part in parts:
            box, covered = part.box, 0
            for piece, shared in self._index(entry).overlaps(box):
                covered += volume(shared)
                for tile in tiles_of(entry.shape, shared):
                    first = part.flat + flat_offset(part, tile)
                    shape = tuple(high - low for low, high in tile)
                    steps = tuple(step * out.itemsize for step in part.strides)
                    self._copy(entry, piece, tile, as_strided(out[first:], shape, steps), dtype)
            if covered != volume(box):
                raise unusable(f"{self.catalog.root}: {entry}", f"nothing holds all of {region(box)}")

    def _copy(self, entry: Entry, piece: Piece, box: Box, window: Array, dtype: str) -> None:
        direct = dtype == entry.dtype and window.flags.c_contiguous
        values = window if direct else np.empty(window.shape, numpy_dtype(entry.dtype))
        count = sum(stop - start for _, start, stop, _ in self._checked(entry, piece, box, values))
        with self._lock:
            self.read_bytes += count
        if not direct:
            window[...] = convert(values, entry.dtype, dtype)

    def read(self, entry: Entry, tile: Box, number: int) -> Tile:
        """The ``number``-th tile of an entry.

        Raises:
            DamagedError: Its bytes have another digest than the manifest says, or a file ends too early.
            CheckpointError: A file cannot be read.
        """
        out = np.empty([stop - start for start, stop in tile], numpy_dtype(entry.dtype))
        parts: list[Summed] = []
        known = self._digests.get(entry.key)
        regions = stretches = 0
        for piece, box in self._index(entry).overlaps(tile):
            view = out[within(box, tile)]
            for file, start, stop, data in self._checked(entry, piece, box, view, regions=known is None):
                if (file, "crc32") in self._sums:
                    parts.append((file, start, stop, zlib.crc32(data)))
                regions += known is None and (file, start, stop) in self._regions
                stretches += 1
        found = digest(out.reshape(-1).view(np.uint8).data)
        if known is not None and (number >= len(known) or known[number] != found):
            raise self._damage(entry, tile)
        self._parts.add(parts)
        with self._lock:
            self.tiles_checked += known is not None or 0 < regions == stretches
        return Tile(out, found)

    def _index(self, entry: Entry) -> PieceIndex:
        index = self._indexes.get(entry.key)
        if index is None:
            index = PieceIndex(entry.read_pieces)
            self._indexes[entry.key] = index
        return index

    def _checked(
        self, entry: Entry, piece: Piece, box: Box, out: Array, *, regions: bool = True
    ) -> Iterator[tuple[str, int, int, memoryview]]:
        """Read as :func:`read_box`, and compare with the checksums of the same stretches (``regions``).

        Yields:
            Of every stretch the file, the first byte, the one after the last, and the bytes.
        """
        if piece.packed is not None:
            from dsx.checkpoint.unpack import unpack  # here: most checkpoints are plain

            read: list[tuple[str, int, int, memoryview]] = []

            def part_of(part: Entry, region: Box) -> Array:
                values = np.empty([stop - start for start, stop in region], numpy_dtype(part.dtype))
                read.extend(self._checked(part, part.pieces[0], region, values, regions=regions))
                return values

            values = unpack(piece, box, entry.item_bytes, part_of)
            out[...] = convert(values, "float32", entry.dtype)
            yield from read
            return
        path = self.catalog.root / piece.file
        with blamed(path, str(entry), "reading", _DAMAGED), self._files.lend(piece.file) as file:
            for start, stop, data in read_box(file, piece, box, out):
                known = self._regions.get((piece.file, start, stop)) if regions else None
                if known is not None and digest(data) != known.digest:
                    raise _damaged(path, str(entry), known)
                if known is not None:
                    self._right.add((piece.file, start))
                yield piece.file, start, stop, data

    def _path_of(self, file: str) -> Path:
        """Where a file is, when it is opened; its header, which no tensor needs, is compared once."""
        path = locate(self.catalog, file, str(self._holders[file]))
        with self._lock:
            head = self._heads.pop(file, None)
        if head is not None:
            with blamed(path, "its header", "reading", _DAMAGED), path.open("rb") as opened:
                if digest_of_file(opened.fileno(), head.start, head.stop) != head.digest:
                    raise _damaged(path, "its header", head)
                self._right.add((file, head.start))
        return path

    def check_rest(self, entries: Iterable[Entry]) -> int:
        """Compare the checksums that could not be compared while tiles were read.

        These are the CRC32s of all members of files from which anything was read, and the checksums of what
        ranks wrote, where it was not read as it was written, because tensors now have other names and shapes.
        What has to be is read once more.

        Returns:
            How many were right.

        Raises:
            DamagedError: One is wrong; with the file and the tensors in it.
        """
        checked = len(heads(self.catalog)) - len(self._heads)  # when the files were opened
        for checksum in (*self._heads.values(), *self._unread(entries)):
            where, path = checksum.file, self.catalog.root / checksum.file
            with blamed(path, "its checksums", "reading", _DAMAGED), self._files.lend(where) as opened:
                found = digest_of_file(opened, checksum.start, checksum.stop)
            if found != checksum.digest:
                raise _damaged(path, _tensors_in(self.catalog, checksum), checksum)
            checked += 1
        for (file, algorithm), checksums in self._sums.items():
            if algorithm != "crc32":
                continue
            for checksum in checksums:
                stretches = list(self._parts.stretches(file, checksum.start, checksum.stop))
                if all(crc is None for _, _, crc in stretches):
                    continue
                self._compare(checksum, stretches)
                checked += 1
        return checked

    def _unread(self, entries: Iterable[Entry]) -> list[Checksum]:
        """Checksums of stretches that hold a part of an entry and were not compared yet."""
        found: dict[tuple[str, int], Checksum] = {}
        for entry in entries:
            if entry.key in self._digests:
                continue
            for part, piece in entry.stored:
                sums = self._overlapping(piece, part.item_bytes) if piece.replica == 0 else []
                found |= {(one.file, one.start): one for one in sums}
        return [one for key, one in sorted(found.items()) if key not in self._right]

    def _overlapping(self, piece: Piece, item_bytes: int) -> list[Checksum]:
        """Checksums, other than CRC32s, of stretches that reach into a piece."""
        sums = self._sums.get((piece.file, "xxh3_128"), [])
        low = bisect_right(sums, piece.offset, key=lambda item: item.stop)
        high = bisect_left(sums, piece.stop(item_bytes), key=lambda item: item.start)
        return sums[low:high]

    def _compare(self, checksum: Checksum, stretches: list[tuple[int, int, int | None]]) -> None:
        path = self.catalog.root / checksum.file
        total = 0
        with blamed(path, "its CRC32", "reading", _DAMAGED), self._files.lend(checksum.file) as file:
            for start, stop, known in stretches:
                crc = crc32_of_file(file, start, stop) if known is None else known
                total = crc32_joined(total, crc, stop - start)
        if f"{total:08x}" != checksum.digest:
            raise _damaged(path, _tensors_in(self.catalog, checksum), checksum)

    def _damage(self, entry: Entry, tile: Box) -> DamagedError:
        """The error for a tile with a wrong digest; finds the file by the regions' own checksums."""
        pieces = [piece for piece, _ in self._index(entry).overlaps(tile)]  # of files with digests, all plain
        for piece in pieces:
            path = self.catalog.root / piece.file
            with blamed(path, str(entry), "reading", _DAMAGED), self._files.lend(piece.file) as file:
                for checksum in self._overlapping(piece, entry.item_bytes):
                    if digest_of_file(file, checksum.start, checksum.stop) != checksum.digest:
                        return _damaged(path, str(entry), checksum)
        files = ", ".join(sorted({piece.file for piece in pieces}))
        return DamagedError(
            f"{self.catalog.root}: {entry}",
            f"its bytes (in {files}) do not have the checksum in the manifest: they or it were changed",
            _DAMAGED,
        )


def verify(catalog: Catalog, progress: Callable[[int], None] = lambda _: None) -> Iterator[DamagedError]:
    """Read what has a checksum and compare; yields what is wrong. ``progress`` is told of more bytes read."""
    check_files(catalog)
    files = FilePool(lambda file: locate(catalog, file, "a checksum"), os.O_RDONLY)
    take = {"xxh3_128": digest_of_file, "crc32": lambda *span: f"{crc32_of_file(*span):08x}"}
    try:
        for (file, algorithm), checksums in sorted(_by_file(catalog).items()):
            path = catalog.root / file
            with blamed(path, "its checksums", "reading", _DAMAGED), files.lend(file) as descriptor:
                for checksum in checksums:
                    found = take[algorithm](descriptor, checksum.start, checksum.stop)
                    progress(checksum.stop - checksum.start)
                    if found != checksum.digest:
                        yield _damaged(path, _tensors_in(catalog, checksum), checksum)
    finally:
        files.close()


def _by_file(catalog: Catalog) -> dict[tuple[str, str], list[Checksum]]:
    """Checksums by file and algorithm, in the order of their bytes."""
    found: dict[tuple[str, str], list[Checksum]] = defaultdict(list)
    for checksum in sorted(catalog.checksums, key=lambda item: (item.file, item.start)):
        found[checksum.file, checksum.algorithm].append(checksum)
    return found


def _tensors_in(catalog: Catalog, checksum: Checksum) -> str:
    names = [
        str(entry)
        for entry in catalog.entries
        if any(
            piece.file == checksum.file
            and piece.offset < checksum.stop
            and piece.stop(part.item_bytes) > checksum.start
            for part, piece in entry.stored
        )
    ]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    if not names and checksum.file not in catalog.files:
        return "all of it"
    return "; ".join(names[:3]) + more if names else "its header"


def within(box: Box, tile: Box) -> tuple[Any, ...]:
    """Index of ``box`` in an array of the tile; it gives a view, also of a tensor without dims."""
    spans = zip(box, tile, strict=True)
    return (*(slice(start - base, stop - base) for (start, stop), (base, _) in spans), ...)


def _damaged(path: object, tensor: str, checksum: Checksum) -> DamagedError:
    return DamagedError(
        f"{path}: {tensor}",
        f"bytes {checksum.start} to {checksum.stop} do not have the {checksum.algorithm} they were written "
        "with: the file was changed or its disk is failing",
        _DAMAGED,
    )


def tiles_of(shape: Sequence[int], box: Box) -> Iterator[Box]:
    """The parts in which a box is read: those of the tensor's tiles, so that layouts share them."""
    for tile in tiles(shape, TILE_ELEMENTS):
        shared = intersect(tile, box)
        if shared is not None:
            yield shared


BROKEN_ULPS = 2**64 - 1
"""The distance of a NaN from anything else."""

_LAYOUT_FACTS = {
    "mesh",
    "chunks",
    "placement",
    "stage_bounds",
    "zero_stage",
    "precision",
    "schedule",
    "versions",
    "random_files",
}
"""Facts in which a converted checkpoint may differ from its source."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDifference:
    """One state of one tensor in both.

    Attributes:
        differing: Number of elements with different bits.
        max_ulps: The largest distance, in representable numbers; :data:`BROKEN_ULPS` beside a NaN.
        max_abs: The largest absolute difference of finite elements.
        what: Why it could not be compared (shapes or dtypes differ); empty if it was.
    """

    name: str
    state: str
    elements: int
    differing: int = 0
    max_ulps: int = 0
    max_abs: float = 0.0
    what: str = ""

    @property
    def equal(self) -> bool:
        return not self.differing and not self.what


def compare(
    a: Catalog, b: Catalog, progress: Callable[[int], None] = lambda _: None
) -> Iterator[TensorDifference]:
    """Every entry that both have, in the order of ``a``; ``progress`` is told of more elements compared."""
    size = a.tile_elements or b.tile_elements or TILE_ELEMENTS
    others = b.by_key
    with Reader(a, size) as reads_a, Reader(b, size) as reads_b:
        for entry in a.entries:
            other = others.get(entry.key)
            if other is None:
                continue
            if (entry.shape, entry.dtype) != (other.shape, other.dtype):
                what = f"{entry.dtype} {list(entry.shape)} and {other.dtype} {list(other.shape)}"
                yield TensorDifference(name=entry.name, state=entry.state, elements=entry.numel, what=what)
                continue
            check_cover(entry, 0, size, str(a.root))
            check_cover(other, 0, size, str(b.root))
            found = TensorDifference(name=entry.name, state=entry.state, elements=entry.numel)
            for number, tile in enumerate(tiles(entry.shape, size)):
                one, two = reads_a.read(entry, tile, number), reads_b.read(other, tile, number)
                progress(one.values.size)
                if one.digest != two.digest:
                    found = _add(found, one, two, entry.dtype)
            yield found


def only_in(a: Catalog, b: Catalog) -> tuple[tuple[str, str], ...]:
    """Names and states of what ``a`` has and ``b`` lacks."""
    return tuple(sorted(a.by_key.keys() - b.by_key.keys()))


def fact_differences(a: Catalog, b: Catalog) -> dict[str, tuple[Any, Any]]:
    """Facts that both have with different values, and that do not depend on the layout.

    Of dsx's modules and of transformers' a model is described in other words; it has one config.
    """
    shared = (a.facts.keys() & b.facts.keys()) - _LAYOUT_FACTS
    if len({"config" in (each.facts.get("model") or ()) for each in (a, b)}) > 1:
        shared -= {"model"}
    return {key: (a.facts[key], b.facts[key]) for key in sorted(shared) if a.facts[key] != b.facts[key]}


def _add(found: TensorDifference, a: Tile, b: Tile, dtype: str) -> TensorDifference:
    flat_a, flat_b = a.values.reshape(-1), b.values.reshape(-1)
    bits = np.dtype(f"u{flat_a.dtype.itemsize}")
    at = np.flatnonzero(flat_a.view(bits) != flat_b.view(bits))
    one, two = flat_a[at], flat_b[at]
    return replace(
        found,
        differing=found.differing + len(at),
        max_ulps=max(found.max_ulps, int(ulps(one, two, dtype).max())),
        max_abs=max(found.max_abs, _max_abs(one, two, dtype)),
    )


def _max_abs(a: Array, b: Array, dtype: str) -> float:
    if dtype.startswith("float8"):
        return 0.0
    with np.errstate(invalid="ignore", over="ignore"):
        wide = [convert(x, dtype, "float32") if dtype == "bfloat16" else x for x in (a, b)]
        distance = np.abs(wide[0].astype(np.float64) - wide[1].astype(np.float64))
    finite = distance[np.isfinite(distance)]
    return float(finite.max()) if finite.size else 0.0
