"""Parts of a checkpoint's tensors straight into memory: what a rank of another layout needs, and no more."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Self

import numpy as np
from numpy.lib.stride_tricks import as_strided

from dsx.checkpoint.catalog import Catalog, Checksum, Entry, Piece, check_files, heads, locate
from dsx.checkpoint.checksums import digest
from dsx.checkpoint.copy_plan import TILE_ELEMENTS, region, tiles
from dsx.checkpoint.dtypes import Array, convert, numpy_dtype
from dsx.checkpoint.file_io import FilePool, blamed, read_box
from dsx.checkpoint.pieces import Part, PieceIndex, dense_blocks, flat_offset, intersect, volume
from dsx.errors import CheckpointError
from dsx.spec.param import Box

_USE_ANOTHER = "use another checkpoint"


class Reader:
    """Reads boxes of a checkpoint's tensors; may be used by several threads.

    What is read whole is compared with its checksum, where the checkpoint has one.

    Args:
        catalog: The checkpoint.

    Raises:
        CheckpointError: A file is missing, too short, or outside of the checkpoint's folder.
    """

    def __init__(self, catalog: Catalog) -> None:
        check_files(catalog)
        self.catalog = catalog
        self.read_bytes = 0
        self._lock = threading.Lock()
        self._entries = catalog.by_key
        self._indexes: dict[tuple[str, str], PieceIndex] = {}
        self._files = catalog.files
        self._heads = heads(catalog)
        self._pool = FilePool(self._path_of, os.O_RDONLY)
        self._sums: dict[tuple[str, int, int], Checksum] = {
            (one.file, one.start, one.stop): one for one in catalog.checksums if one.algorithm == "xxh3_128"
        }

    @classmethod
    @contextmanager
    def open(cls, catalog: Catalog) -> Iterator[Self]:
        """A reader whose files are closed at the end."""
        reader = cls(catalog)
        try:
            yield reader
        finally:
            reader._pool.close()

    def find(self, name: str, state: str) -> Entry | None:
        """The state of a tensor; master and weight stand in for each other. None if there is neither."""
        found = self._entries.get((name, state))
        if found is None and state in ("master", "weight"):
            found = self._entries.get((name, "weight" if state == "master" else "master"))
        return found

    def fill(self, entry: Entry, parts: Sequence[Part], out: Array, dtype: str) -> None:
        """Put parts of a tensor where they belong in a rank's flattened local tensor.

        Args:
            entry: The tensor.
            parts: Boxes, and where they lie in ``out``.
            out: One dim, written in place.
            dtype: Of ``out``, as torch names it.

        Raises:
            CheckpointError: Something is nowhere in the checkpoint, a file ends early, or bytes are not what
                their checksum says.
        """
        index = self._indexes.get(entry.key)
        if index is None:
            index = PieceIndex(piece for piece in entry.pieces if piece.replica == 0)
            self._indexes[entry.key] = index
        for part in parts:
            box = tuple((low, low + size) for low, size in zip(part.start, part.shape, strict=True))
            covered = 0
            for piece, shared in index.overlaps(box):
                covered += volume(shared)
                for tile in tiles_of(entry.shape, shared):
                    self._copy(entry, piece, tile, _window(out, part, tile), dtype)
            if covered != volume(box):
                raise CheckpointError(
                    f"{self.catalog.root}: {entry}", f"nothing holds all of {region(box)}", _USE_ANOTHER
                )

    def _path_of(self, file: str) -> Path:
        """Where a file is, when it is opened; its header, which no tensor needs, is compared once."""
        path = locate(self.catalog, file, str(self._files[file]))
        with self._lock:
            head = self._heads.pop(file, None)
        if head is not None:
            with path.open("rb") as opened:
                data = opened.read(head.stop)
            if digest(data) != head.digest:
                raise _changed(path, "its header", head.start, head.stop)
        return path

    def _copy(self, entry: Entry, piece: Piece, box: Box, window: Array, dtype: str) -> None:
        stored = numpy_dtype(entry.dtype)
        direct = dtype == entry.dtype and window.flags.c_contiguous
        values = window if direct else np.empty(window.shape, stored)
        path = self.catalog.root / piece.file
        with (
            self._pool.lend(piece.file) as descriptor,
            blamed(path, str(entry), "when dsx reads", _USE_ANOTHER),
        ):
            count = 0
            for start, stop, data in read_box(descriptor, piece, box, values):
                count += stop - start
                known = self._sums.get((piece.file, start, stop))
                if known is not None and digest(data) != known.digest:
                    raise _changed(path, str(entry), start, stop)
        with self._lock:
            self.read_bytes += count
        if not direct:
            window[...] = convert(values, entry.dtype, dtype)


def tiles_of(shape: Sequence[int], box: Box) -> Iterator[Box]:
    """The parts of a box by which it is read: of the tiles of its tensor, so that layouts share them."""
    for tile in tiles(shape, TILE_ELEMENTS):
        shared = intersect(tile, box)
        if shared is not None:
            yield shared


def stretches(piece: Piece, box: Box, item_bytes: int) -> Iterator[tuple[int, int]]:
    """Bytes of a piece's file that hold a box, as :func:`dsx.checkpoint.file_io.read_box` reads them."""
    shape = tuple(high - low for low, high in box)
    blocks = dense_blocks(shape, piece.strides)
    size = blocks.elements * item_bytes
    first = piece.offset + flat_offset(piece, box) * item_bytes
    for index in product(*(range(shape[dim]) for dim in blocks.outer)):
        steps = zip(index, blocks.outer, strict=True)
        start = first + item_bytes * sum(at * piece.strides[dim] for at, dim in steps)
        yield start, start + size


def _changed(path: Path, what: str, start: int, stop: int) -> CheckpointError:
    return CheckpointError(
        f"{path}: {what}",
        f"bytes {start} to {stop} are not what was written: their checksum is another",
        _USE_ANOTHER,
    )


def _window(out: Array, part: Part, box: Box) -> Array:
    """The elements of ``box``, which lies in ``part``, as a view on the flattened local tensor."""
    first = part.flat + sum(
        (low - corner) * step for (low, _), corner, step in zip(box, part.start, part.strides, strict=True)
    )
    shape = tuple(high - low for low, high in box)
    steps = tuple(step * out.itemsize for step in part.strides)
    return as_strided(out[first:], shape, steps)
