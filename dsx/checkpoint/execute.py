"""Carries out a plan of copies, may be killed at will, and reads the target back before it gets its name.

The reader of the target's format knows nothing of the plan by which the files were made. The names, ties,
shapes and places that it finds have to be the plan's: then a loader that follows the same rules finds every
tensor, whole and in its place.
"""

from __future__ import annotations

import os
import struct
import threading
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic

import numpy as np

from dsx.checkpoint.base import under_known_names
from dsx.checkpoint.catalog import Catalog, Checksum, Entry, Piece, Target, Written, check_files, locate
from dsx.checkpoint.claims import model_of, specs_of_model
from dsx.checkpoint.copy_plan import TILE_ELEMENTS, CopyPlan, check_cover, region
from dsx.checkpoint.file_io import (
    Crc32Parts,
    FilePool,
    Summed,
    blamed,
    convert,
    crc32_joined,
    crc32_of_zeros,
    digest,
    start_writeback,
    write_box,
    write_from,
)
from dsx.checkpoint.formats.deepspeed.order import TIED
from dsx.checkpoint.formats.huggingface import catalog
from dsx.checkpoint.open import open_checkpoint
from dsx.checkpoint.pieces import PieceIndex, flat_offset, volume
from dsx.checkpoint.read import Reader, within
from dsx.checkpoint.staging import AGAIN, Staging
from dsx.checkpoint.unpack import MOST_UNPACKING_BYTES
from dsx.errors import CheckpointError, ModelError
from dsx.launch.entry import usable_cores
from dsx.models.param import ITEM_BYTES, Box

_REPORT = "report this, with the command: the target was removed again, the source is untouched"


def check_target(folder: Path, wanted: Catalog) -> None:
    """Prove that a finished folder is read as what it was meant to be."""
    try:
        found = open_checkpoint(folder)
        check_files(found)
    except CheckpointError as error:
        raise CheckpointError(
            f"{wanted.root}: {error.where}", f"what was written cannot be read again: {error.what}", _REPORT
        ) from error
    held = found.by_key
    for entry in wanted.entries:
        same = held.pop(entry.key, None)
        if same is None:
            raise _wrong(wanted, entry, "the files do not have it")
        _check_entry(wanted, entry, same, is_hf=found.format == catalog.FORMAT)
    if held:
        raise _wrong(wanted, next(iter(held.values())), "the files have it, and it was not to be written")
    if found.format == catalog.FORMAT:
        _check_model(found, wanted)


def _check_entry(wanted: Catalog, entry: Entry, found: Entry, *, is_hf: bool) -> None:
    told = [("shape", entry.shape, found.shape), ("dtype", entry.dtype, found.dtype)]
    if not is_hf:  # whose files say neither
        # A pipeline's layers are other names of a tied module's tensors; a source need not have known them.
        more = {*found.aliases} - {*entry.aliases} if entry.name.startswith(f"{TIED}.") else set()
        told += [
            ("role", entry.role, found.role),
            ("other names", sorted(entry.aliases), sorted({*found.aliases} - more)),
        ]
    for what, mine, theirs in told:
        if mine != theirs:
            raise _wrong(wanted, entry, f"its {what}: {mine} was to be written, a loader finds {theirs}")
    check_cover(found, 0, wanted.tile_elements or TILE_ELEMENTS, str(wanted.root))
    homes: dict[str, list[Piece]] = defaultdict(list)
    for piece in entry.pieces:
        homes[piece.file].append(piece)
    indices = {file: PieceIndex(pieces) for file, pieces in homes.items()}
    for piece in found.pieces:
        others = indices[piece.file].overlaps(piece.box) if piece.file in indices else ()
        same = (
            volume(box) for other, box in others if _place(piece, box, entry) == _place(other, box, entry)
        )
        if sum(same) != volume(piece.box):
            raise _wrong(wanted, entry, f"a loader looks for {region(piece.box)} elsewhere in {piece.file}")


def _place(piece: Piece, box: Box, entry: Entry) -> tuple[int, tuple[int, ...]]:
    """Byte of a box's first element in the file, and the steps from there to its others."""
    steps = (step for (low, high), step in zip(box, piece.strides, strict=True) if high - low > 1)
    return piece.offset + entry.item_bytes * flat_offset(piece, box), tuple(steps)


def _check_model(found: Catalog, wanted: Catalog) -> None:
    """Check a Hugging Face folder against its own config, if that is of one of dsx's families."""
    try:
        model = model_of(dict(found.facts.get("hf_config") or {}))
        found = under_known_names(found, model)
    except ModelError:
        return
    try:
        catalog.as_dsx(found, specs_of_model(found, model))
    except CheckpointError as error:
        raise CheckpointError(
            f"{wanted.root}: {error.where}",
            f"its config.json is of another model: {error.what}",
            "give the config.json of the model that the checkpoint is of",
        ) from error


def _wrong(wanted: Catalog, entry: Entry, what: str) -> CheckpointError:
    return CheckpointError(f"{wanted.root}: {entry}", what, _REPORT)


DEFAULT_MEMORY_BYTES = 512 << 20
_INTERPRETER_BYTES = 80 << 20  # Python, numpy and the plan's own objects
_WORTH_STARTING_BYTES = 1 << 18
Unit = tuple[int, int, Box]


def default_workers() -> int:
    """One thread per core that this process may use; at least two, so that one can wait for the disk."""
    return max(2, min(8, usable_cores()))


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversionOptions:
    """The options of a conversion.

    Attributes:
        memory_bytes: Private memory that the process may take.
        workers: Threads; fewer are used if the memory is for fewer.
        point_latest: Whether ``latest`` beside the new checkpoint shall name it.
        progress: Called with the bytes written since the last call, from any thread.
    """

    memory_bytes: int = DEFAULT_MEMORY_BYTES
    workers: int = field(default_factory=default_workers)
    point_latest: bool = False
    progress: Callable[[int], None] = lambda _: None


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversionReport:
    """What a conversion did, and the proof of it.

    Attributes:
        tiles_checked: Tiles whose bytes had the digest that the source's manifest has.
        sums_checked: Other checksums of the source's files that were right: CRC32s of members, mostly.
        notes: What changed on the way or stayed behind.
    """

    target: Path
    tensors: int
    states: int
    elements: int
    read_bytes: int
    written_bytes: int
    tiles_checked: int
    sums_checked: int
    seconds: float
    notes: tuple[str, ...]


def execute(
    source: Catalog,
    target: Target,
    plan: CopyPlan,
    options: ConversionOptions,
    *,
    check: Callable[[Path, Catalog], None] = check_target,
) -> ConversionReport:
    """Make ``target`` from ``source`` by ``plan``. It appears whole or not at all.

    ``check`` raises CheckpointError unless a finished folder is read as the target's catalog; by default it
    is the reader of its format.
    """
    began = monotonic()
    fits = (options.memory_bytes - _INTERPRETER_BYTES) // worker_bytes(plan)
    if fits < 1:
        needed = (_INTERPRETER_BYTES + worker_bytes(plan)) / 2**20
        raise CheckpointError(
            f"--memory {options.memory_bytes / 2**20:.0f}MiB",
            f"one worker needs {needed:.0f} MiB, Python included",
            f"give {needed:.0f}MiB or more",
        )
    workers = max(1, min(options.workers, fits))
    with Reader(source, plan.tile_elements) as reader, Staging(target) as staging:
        before = _stamps(source)
        run = _Run(reader, target, plan, staging, options)
        try:
            run.work(workers)
            checked = reader.check_rest(job.source for job in plan.jobs)
            # An open file is read to its end though its name is another's by then: two checkpoints in one.
            now = _stamps(source)
            changed = next((file for file in before if before[file] != now[file]), None)
            if changed is not None:
                raise CheckpointError(
                    str(source.root / changed),
                    "it was changed while it was read",
                    "run the same command again when nothing writes there",
                )
            run.fill_crc32()
        finally:
            run.writes.close()
        with blamed(staging.data, "what ends the checkpoint", "writing", AGAIN):
            target.finish(staging.data, run.written())
        staging.require_own()
        check(staging.data, target.catalog)
        staging.commit(point_latest=options.point_latest)
    return ConversionReport(
        target=target.catalog.root,
        tensors=len({entry.name for entry in target.catalog.entries}),
        states=len(target.catalog.entries),
        elements=sum(entry.numel for entry in target.catalog.entries),
        read_bytes=plan.read_bytes,
        written_bytes=plan.write_bytes,
        tiles_checked=reader.tiles_checked,
        sums_checked=checked,
        seconds=monotonic() - began,
        notes=(*plan.notes, *target.dropped, *staging.notes),
    )


def _stamps(source: Catalog) -> dict[str, tuple[int, int]]:
    """Size and time of the last change of each of a checkpoint's files."""
    found = {file: locate(source, file, str(entry)).stat() for file, entry in source.files.items()}
    return {file: (status.st_size, status.st_mtime_ns) for file, status in found.items()}


def worker_bytes(plan: CopyPlan) -> int:
    """Memory that one worker needs at most: the tile as read, as converted, and a piece of it set aside."""
    widths = (
        ITEM_BYTES[job.source.dtype]
        + (4 + ITEM_BYTES[job.target.dtype]) * job.converts
        + MOST_UNPACKING_BYTES * any(piece.packed is not None for piece in job.source.pieces)
        for job in plan.jobs
    )
    return plan.tile_elements * (max(widths, default=1) + max(ITEM_BYTES.values()))


class _Run:
    """A conversion under way, with what its threads share."""

    def __init__(
        self, reader: Reader, target: Target, plan: CopyPlan, staging: Staging, options: ConversionOptions
    ) -> None:
        self._target, self._plan, self._staging = target, plan, staging
        self._progress = options.progress
        self._reader = reader
        self.writes = FilePool(staging.path_of, os.O_RDWR)
        self._crc32_files = {s.file for s in target.skeletons if s.crc32_fields}
        self._crc32 = Crc32Parts()
        self._lock = threading.Lock()
        self._stopped = False
        self._regions: list[tuple[str, int, int, str]] = []
        self._digests: dict[tuple[int, int], str] = {}

    def work(self, workers: int) -> None:
        units = self._plan.units()
        with ThreadPoolExecutor(workers, thread_name_prefix="reshard") as pool:
            try:
                for future in as_completed([pool.submit(self._worker, units) for _ in range(workers)]):
                    future.result()
            finally:
                self._stopped = True  # on an error or Ctrl-C the others end after their tile

    def _worker(self, units: Iterator[Unit]) -> None:
        try:
            while not self._stopped:
                with self._lock:
                    unit = next(units, None)
                if unit is None:
                    return
                self._progress(self._unit(*unit))
        except BaseException:
            self._stopped = True
            raise

    def _unit(self, at: int, number: int, tile: Box) -> int:
        """Read one tile, convert it, write it to every place that it has; gives the bytes written."""
        job = self._plan.jobs[at]
        read = self._reader.read(job.source, tile, number)
        if job.change is None:
            values = convert(read.values, job.source.dtype, job.target.dtype)
        else:
            wide = job.change(convert(read.values, job.source.dtype, "float32"), tile)
            values = convert(wide, "float32", job.target.dtype)
        name = digest(values.reshape(-1).view(np.uint8).data) if job.converts else read.digest
        regions: list[tuple[str, int, int, str]] = []
        parts: list[Summed] = []
        for piece, box in job.writes.overlaps(tile):
            path = self._staging.path_of(piece.file)
            with blamed(path, str(job.target), "writing", AGAIN), self.writes.lend(piece.file) as file:
                for start, stop, data in write_box(file, piece, box, values[within(box, tile)]):
                    regions.append((piece.file, start, stop, digest(data)))
                    if stop - start >= _WORTH_STARTING_BYTES:
                        start_writeback(file, start, stop)
                    if piece.file in self._crc32_files:
                        parts.append((piece.file, start, stop, zlib.crc32(data)))
        self._crc32.add(parts)
        with self._lock:
            self._regions += regions
            self._digests[at, number] = name
        return sum(stop - start for _, start, stop, _ in regions)

    def fill_crc32(self) -> None:
        """Write the CRC32s that the target's files keep of their own members."""
        for skeleton in self._target.skeletons:
            path = self._staging.path_of(skeleton.file)
            for place in skeleton.crc32_fields:
                with blamed(path, "its CRC32", "writing", AGAIN), self.writes.lend(skeleton.file) as file:
                    crc = 0
                    for start, stop, part in self._crc32.stretches(skeleton.file, place.start, place.stop):
                        # What nothing was written to is zero.
                        known = crc32_of_zeros(stop - start) if part is None else part
                        crc = crc32_joined(crc, known, stop - start)
                    data = f"{crc:08x}".encode() if place.as_text else struct.pack("<I", crc)
                    for at in place.places:
                        write_from(file, memoryview(data), at)

    def written(self) -> Written:
        """What there is to know about the new checkpoint's bytes."""
        digests: dict[tuple[str, str], list[str]] = defaultdict(list)
        for (at, _), name in sorted(self._digests.items()):
            digests[self._plan.jobs[at].target.key].append(name)
        return Written(
            checksums=tuple(
                Checksum(file, start, stop, "xxh3_128", name)
                for file, start, stop, name in sorted(self._regions)
            ),
            tile_elements=self._plan.tile_elements,
            tile_digests={key: tuple(names) for key, names in digests.items()},
        )
