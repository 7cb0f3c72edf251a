"""Reads tiles of a checkpoint's tensors and checks, on the way, every checksum that it has."""

from __future__ import annotations

import os
import threading
import zlib
from bisect import bisect_left, bisect_right
from collections import defaultdict
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import numpy as np

from dsx.checkpoint.catalog import Catalog, Checksum, Entry, locate
from dsx.checkpoint.checksums import Crc32Parts, Part, crc32_joined, digest
from dsx.checkpoint.dtypes import Array, numpy_dtype
from dsx.checkpoint.file_io import FilePool, blamed, crc32_of_file, digest_of_file, read_box
from dsx.checkpoint.pieces import PieceIndex
from dsx.errors import CheckpointError
from dsx.spec.param import Box

_USE_ANOTHER = "use another checkpoint: this one is damaged"


class DamagedError(CheckpointError):
    """Bytes that are not those that were written."""


@dataclass(frozen=True, slots=True)
class Tile:
    """A tile as read.

    Attributes:
        values: Array of the tile's shape, in the numpy dtype that holds the entry's.
        digest: xxh3_128 of its bytes, row-major.
        checked: Whether the checkpoint's manifest has that digest.
        parts: CRC32s of what was read of files that have checksums of that kind.
    """

    values: Array
    digest: str
    checked: bool
    parts: tuple[Part, ...]


class SourceReader:
    """Tiles of a checkpoint, for several threads. A context manager that closes its files.

    Args:
        catalog: The checkpoint.
    """

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._holders = catalog.files
        self._files = FilePool(lambda file: locate(catalog, file, str(self._holders[file])), os.O_RDONLY)
        self._sums: dict[tuple[str, str], list[Checksum]] = defaultdict(list)
        for checksum in sorted(catalog.checksums, key=lambda item: (item.file, item.start)):
            self._sums[checksum.file, checksum.algorithm].append(checksum)
        self._parts = Crc32Parts()
        self._lock = threading.Lock()
        self.tiles_checked = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close all files."""
        self._files.close()

    def read(self, entry: Entry, index: PieceIndex, tile: Box, number: int) -> Tile:
        """The ``number``-th tile of an entry, whose pieces are in ``index``.

        Raises:
            DamagedError: Its bytes have another digest than the manifest says, or a file ends too early.
            CheckpointError: A file cannot be read.
        """
        out = np.empty([stop - start for start, stop in tile], numpy_dtype(entry.dtype))
        parts: list[Part] = []
        for piece, box in index.overlaps(tile):
            view = out[within(box, tile)]
            take_crc32 = (piece.file, "crc32") in self._sums
            path = self._catalog.root / piece.file
            with blamed(path, str(entry), "reading", _USE_ANOTHER), self._files.lend(piece.file) as file:
                for start, stop, data in read_box(file, piece, box, view):
                    if take_crc32:
                        parts.append((piece.file, start, stop, zlib.crc32(data)))
        found = digest(out.reshape(-1).view(np.uint8).data)
        known = self._catalog.tile_digests.get(entry.key)
        if known is not None and (number >= len(known) or known[number] != found):
            raise self._damage(entry, index, tile)
        self.note(parts, checked=known is not None)
        return Tile(out, found, known is not None, tuple(parts))

    def note(self, parts: list[Part], *, checked: bool) -> None:
        """Count a tile as read, by this reader or by an earlier one."""
        self._parts.add(parts)
        with self._lock:
            self.tiles_checked += checked

    def check_crc32(self) -> int:
        """Compare the CRC32 of every member of a file of which anything was read; reads what was left out.

        Returns:
            How many were right.

        Raises:
            DamagedError: One is wrong; with the file and the tensors in it.
        """
        checked = 0
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

    def _compare(self, checksum: Checksum, stretches: list[tuple[int, int, int | None]]) -> None:
        path = self._catalog.root / checksum.file
        total = 0
        with blamed(path, "its CRC32", "reading", _USE_ANOTHER), self._files.lend(checksum.file) as file:
            for start, stop, known in stretches:
                crc = crc32_of_file(file, start, stop) if known is None else known
                total = crc32_joined(total, crc, stop - start)
        if f"{total:08x}" != checksum.digest:
            raise _damaged(path, ", ".join(self._tensors_in(checksum)) or "a tensor", checksum)

    def _damage(self, entry: Entry, index: PieceIndex, tile: Box) -> DamagedError:
        """The error for a tile with a wrong digest; finds the file by the regions' own checksums."""
        pieces = [piece for piece, _ in index.overlaps(tile)]
        for piece in pieces:
            path = self._catalog.root / piece.file
            sums = self._sums.get((piece.file, "xxh3_128"), [])
            low = bisect_right(sums, piece.offset, key=lambda item: item.stop)
            high = bisect_left(sums, piece.stop(entry.item_bytes), key=lambda item: item.start)
            with blamed(path, str(entry), "reading", _USE_ANOTHER), self._files.lend(piece.file) as file:
                for checksum in sums[low:high]:
                    if digest_of_file(file, checksum.start, checksum.stop) != checksum.digest:
                        return _damaged(path, str(entry), checksum)
        files = ", ".join(sorted({piece.file for piece in pieces}))
        return DamagedError(
            f"{self._catalog.root}: {entry}",
            f"its bytes (in {files}) do not have the checksum in the manifest: they or it were changed",
            _USE_ANOTHER,
        )

    def _tensors_in(self, checksum: Checksum) -> list[str]:
        return [
            str(entry)
            for entry in self._catalog.entries
            if any(
                piece.file == checksum.file
                and piece.offset < checksum.stop
                and piece.stop(entry.item_bytes) > checksum.start
                for piece in entry.pieces
            )
        ]


def within(box: Box, tile: Box) -> tuple[Any, ...]:
    """Index of ``box`` in an array of the tile; it gives a view, also of a tensor without dims."""
    spans = zip(box, tile, strict=True)
    return (*(slice(start - base, stop - base) for (start, stop), (base, _) in spans), ...)


def _damaged(path: object, tensor: str, checksum: Checksum) -> DamagedError:
    return DamagedError(
        f"{path}: {tensor}",
        f"bytes {checksum.start} to {checksum.stop} do not have the {checksum.algorithm} they were written "
        "with: the file was changed or its disk is failing",
        _USE_ANOTHER,
    )
