"""Checkpoints that all ranks write at once, beside the training if asked for, and one of them commits.

Each rank writes its file, then a note beside it. Rank 0 waits for all notes, writes the manifest and commits.
Nothing but files passes between the ranks meanwhile, so that threads may do this while they train.
"""

from __future__ import annotations

import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from pydantic import TypeAdapter

from dsx.checkpoint import store
from dsx.checkpoint.catalog import Catalog, Checksum, Entry, Piece
from dsx.checkpoint.checksums import digest
from dsx.checkpoint.file_io import blamed, write_from
from dsx.checkpoint.formats import native
from dsx.checkpoint.formats.native import FORMAT_NAME, write_manifest
from dsx.checkpoint.pieces import Part
from dsx.checkpoint.plain import as_numpy
from dsx.checkpoint.read import stretches, tiles_of
from dsx.checkpoint.run.state import group_facts, merged_groups, run_facts, save_random_states
from dsx.checkpoint.run.stored import MASTER, WEIGHT, Content, Stored, extent, names_here, stored_here
from dsx.errors import CheckpointError
from dsx.launch.entry import AGREED
from dsx.launch.processes import agree
from dsx.models.param import ParamSpec

if TYPE_CHECKING:
    from dsx.engine.engine import PipelineEngine


_WRITE_BYTES = 1 << 24


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """Consecutive elements of a flat tensor that a rank writes.

    Attributes:
        item: What the file says of them.
        spec: The logical tensor.
        values: The elements, one dim, where they are.
    """

    item: native.StoredInterval
    spec: ParamSpec
    values: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class RankShare:
    """What one rank has written.

    Attributes:
        entries: Every state of every tensor that it has a part of, with its own pieces alone.
        specs: Their logical tensors.
        checksums: Of every stretch of its file.
    """

    entries: tuple[Entry, ...]
    specs: tuple[ParamSpec, ...]
    checksums: tuple[Checksum, ...]


def file_name(rank: int) -> str:
    """The file of a rank."""
    return f"rank_{rank:05d}.safetensors"


def blocks_of(engine: PipelineEngine) -> list[StoredBlock]:
    """What this rank writes, in the order of its file: wide elements first, then by state."""
    blocks = [_block(stored, content) for stored in stored_here(engine) for content in stored.contents]
    return sorted(blocks, key=lambda block: (-block.item.entry.item_bytes, block.item.entry.state))


def on_host(blocks: Sequence[StoredBlock]) -> list[StoredBlock]:
    """Copies in the host's memory, which the run does not change."""
    return [replace(block, values=block.values.detach().to("cpu", copy=True)) for block in blocks]


def num_bytes(blocks: Sequence[StoredBlock]) -> int:
    """Size of the tensors."""
    return sum(block.item.num_bytes for block in blocks)


def write_share(blocks: Sequence[StoredBlock], folder: Path, rank: int) -> RankShare:
    """Write the file of ``rank`` below ``folder`` and flush it to the disk.

    Raises:
        CheckpointError: The disk is full, or refuses otherwise.
    """
    name = file_name(rank)
    path = folder / name
    header = native.header_of([block.item for block in blocks])
    entries: list[Entry] = []
    checksums = [Checksum(name, 0, len(header), "xxh3_128", digest(header))]
    what = f"the part of rank {rank}"
    with blamed(path, what, "when dsx writes", "free space, or choose another folder"):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        try:
            write_from(descriptor, memoryview(header), 0)
            at = len(header)
            for block in blocks:
                data = _bytes_of(block.values)
                for low in range(0, len(data), _WRITE_BYTES):
                    write_from(descriptor, data[low : low + _WRITE_BYTES], at + low)
                entry, sums = _described(block.item, name, at, data)
                entries.append(entry)
                checksums += sums
                at += len(data)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    return RankShare(entries=tuple(entries), specs=_specs(blocks), checksums=tuple(checksums))


def _block(stored: Stored, content: Content) -> StoredBlock:
    low, high = extent(content.parts)
    entry = Entry(
        name=content.spec.name,
        state=_state(stored, content),
        shape=content.spec.shape,
        dtype=stored.dtype,
        pieces=(),
        role=content.role,
    )
    parts = tuple(Part(p.start, p.shape, p.strides, p.flat - low) for p in content.parts)
    item = native.StoredInterval(entry, 0, high - low, parts, (high - low,))
    return StoredBlock(item, content.spec, stored.values[low:high])


def _state(stored: Stored, content: Content) -> str:
    """An fp32 weight is its own master (:mod:`dsx.checkpoint.formats.native`)."""
    return WEIGHT if content.state == MASTER and stored.computes_as_master else content.state


def _bytes_of(values: torch.Tensor) -> memoryview:
    host = values.detach()
    if host.device.type != "cpu":
        host = host.cpu()
    return memoryview(as_numpy(host.contiguous())).cast("B")


def _described(
    item: native.StoredInterval, file: str, origin: int, data: memoryview
) -> tuple[Entry, list[Checksum]]:
    """The entry with its pieces in the file, and a checksum for each stretch that a reader may ask for."""
    size = item.entry.item_bytes
    pieces = tuple(part.at(file, origin, size) for part in item.parts)
    sums = [
        Checksum(file, start, stop, "xxh3_128", digest(data[start - origin : stop - origin]))
        for piece in pieces
        for start, stop in _stretches(item.entry, piece)
    ]
    return replace(item.entry, pieces=pieces), sums


def _stretches(entry: Entry, piece: Piece) -> Iterator[tuple[int, int]]:
    for tile in tiles_of(entry.shape, piece.box):
        yield from stretches(piece, tile, entry.item_bytes)


def _specs(blocks: Iterable[StoredBlock]) -> tuple[ParamSpec, ...]:
    """Of dsx's own layers: those of others are not known to be cut in any way."""
    known: dict[str, Any] = {
        block.spec.name: block.spec for block in blocks if block.spec.hf != (block.spec.name,)
    }
    return tuple(known.values())


T = TypeVar("T")

_LOOK_SECONDS = 0.05
_PATIENCE_SECONDS = 1800.0
_FIX = "mend that and save again"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Note:
    """What a rank tells rank 0 when its file is on the disk."""

    share: RankShare
    groups: list[dict[str, Any]]
    names: list[str]
    failed: bool = False


class Saver:
    """Saves an engine's checkpoints, one at a time. Every method is a collective call over all ranks.

    Args:
        engine: The engine.
    """

    def __init__(self, engine: PipelineEngine) -> None:
        self._engine = engine
        self._thread: threading.Thread | None = None
        self._work: _Work | None = None

    def save(
        self, root: Path, tag: str, client_state: Mapping[str, Any], *, background: bool, keep: int
    ) -> Path:
        """Write ``root/tag``, point ``latest`` at it and delete all but the newest ``keep`` (0: none).

        With ``background`` the states are copied to the host's memory, and the rest happens while the run
        goes on; a save before is waited for, so that one copy exists at most. What goes wrong meanwhile is
        raised by the next call of :meth:`save` or :meth:`wait`.

        Raises:
            CheckpointError: The folder cannot be written, the disk is too small, ``client_state`` is no plain
                data; or the save before has failed.
        """
        self.wait()
        engine, rank = self._engine, self._engine.groups.rank
        facts: dict[str, Any] = agree(lambda: run_facts(engine, client_state))
        blocks = blocks_of(engine)
        size = torch.tensor([num_bytes(blocks)], dtype=torch.float64, device=engine.pipeline.device)
        dist.all_reduce(size)
        agree(lambda: store.require_space(root, int(size.item())))
        staged: Path = agree(lambda: store.stage(root, tag))
        work = _Work(
            root=root,
            tag=tag,
            staged=staged,
            rank=rank,
            world_size=engine.groups.mesh.size,
            blocks=on_host(blocks) if background else blocks,
            groups=group_facts(engine),
            names=names_here(engine),
            facts=facts,
            keep=keep,
        )
        work.begin(lambda: save_random_states(staged, rank))
        self._work = work
        if background:
            self._thread = threading.Thread(target=work.run, name=f"dsx saves {tag}")
            self._thread.start()
        else:
            work.run()
            self.wait()
        return root / tag

    def wait(self) -> None:
        """Until the save under way is done. Raises CheckpointError if it has failed on any rank.

        What a failed save has written is deleted, as its disk may be full.
        """
        work, thread = self._work, self._thread
        self._work = self._thread = None
        if work is None:
            return
        if thread is not None:
            thread.join()
        failures: list[tuple[bool, CheckpointError] | None] = [None] * work.world_size
        dist.all_gather_object(failures, work.failure)
        failed = [failure for failure in failures if failure is not None]
        if failed:
            if self._engine.groups.rank == 0:
                store.abandon(work.root, work.tag)
            _, first = min(failed, key=lambda failure: failure[0])
            error = CheckpointError(
                f"checkpoint {work.tag} in {work.root}", f"{first.where}: {first.what}", first.fix
            )
            error.add_note(AGREED)
            raise error


class _Work:
    """One rank's part in one save."""

    def __init__(
        self,
        *,
        root: Path,
        tag: str,
        staged: Path,
        rank: int,
        world_size: int,
        blocks: Sequence[StoredBlock],
        groups: list[dict[str, Any]],
        names: list[str],
        facts: Mapping[str, Any],
        keep: int,
    ) -> None:
        self.root, self.tag, self.world_size = root, tag, world_size
        self._staged, self._rank, self._keep = staged, rank, keep
        self._blocks, self._groups, self._names, self._facts = blocks, groups, names, facts
        self._checksums: tuple[Checksum, ...] = ()
        self.failure: tuple[bool, CheckpointError] | None = None
        """What went wrong first, and whether another rank had given the save up before."""

    def begin(self, action: Callable[[], tuple[Checksum, ...]]) -> None:
        """What has to be done before the run goes on; gives checksums of the files that it writes."""
        self._checksums = self._attempt(action) or ()

    def run(self) -> None:
        """Write, note, and on rank 0 commit. Never raises: see :attr:`failure`."""
        share = RankShare(entries=(), specs=(), checksums=())
        if self.failure is None:
            share = self._attempt(lambda: write_share(self._blocks, self._staged, self._rank)) or share
        self._blocks = ()
        share = replace(share, checksums=(*share.checksums, *self._checksums))
        note = _Note(share=share, groups=self._groups, names=self._names, failed=self.failure is not None)
        if self._attempt(lambda: self._leave(note)) is None:
            # The disk is too full even for a note: by this rank 0 sees that it need not wait for one.
            store.give_up(self.root, self.tag)
        elif self._rank == 0 and self.failure is None:
            self._attempt(self._commit)

    def _attempt(self, action: Callable[[], T]) -> T | None:
        try:
            return action()
        except CheckpointError as error:
            self._note_failure(error)
        except Exception as error:  # noqa: BLE001 - in a thread nobody else would hear of it
            what = str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
            self._note_failure(CheckpointError(f"the part of rank {self._rank}", what, _FIX))
        return None

    def _note_failure(self, error: CheckpointError) -> None:
        if self.failure is None:
            self.failure = not self._staged.is_dir(), error

    def _leave(self, note: _Note) -> Path:
        path = self._note(self._rank)
        store.write_atomically(path, TypeAdapter(_Note).dump_json(note))
        return path

    def _note(self, rank: int) -> Path:
        return self._staged / f"note_{rank:05d}.json"

    def _commit(self) -> None:
        notes = [self._await(rank) for rank in range(self.world_size)]
        if any(note.failed for note in notes):
            return  # that rank tells all of why: see wait
        manifest = write_manifest(_catalog(self.root / self.tag, notes, self._facts))
        for rank in range(self.world_size):
            self._note(rank).unlink()
        store.write_atomically(self._staged / store.MANIFEST, manifest)
        store.commit(self.root, self.tag)
        store.point_latest(self.root, self.tag)
        if self._keep:
            store.prune(self.root, keep=self._keep)

    def _await(self, rank: int) -> _Note:
        """The note of a rank, when it is there."""
        path, deadline = self._note(rank), time.monotonic() + _PATIENCE_SECONDS
        while not path.exists():
            if time.monotonic() > deadline or not self._staged.is_dir():
                raise CheckpointError(
                    str(self._staged), f"rank {rank} has not written its part", "see that rank's output"
                )
            time.sleep(_LOOK_SECONDS)
        return TypeAdapter(_Note).validate_json(path.read_bytes())


def _catalog(root: Path, notes: Sequence[_Note], facts: Mapping[str, Any]) -> Catalog:
    """All ranks' parts as one."""
    entries: dict[tuple[str, str], Entry] = {}
    pieces: dict[tuple[str, str], list[Piece]] = defaultdict(list)
    specs: dict[str, ParamSpec] = {}
    checksums: list[Checksum] = []
    for note in notes:
        for entry in note.share.entries:
            entries.setdefault(entry.key, entry)
            pieces[entry.key] += entry.pieces
        specs.update({spec.name: spec for spec in note.share.specs})
        checksums += note.share.checksums
    places = {name: place for note in notes for place, name in enumerate(note.names)}
    ordered = sorted(entries.items(), key=lambda item: (_layer(item[0][0]), places.get(item[0][0], 0)))
    return Catalog(
        root=root,
        format=FORMAT_NAME,
        entries=tuple(replace(entry, pieces=tuple(pieces[key])) for key, entry in ordered),
        facts={**facts, "param_groups": merged_groups([note.groups for note in notes])},
        specs=tuple(specs.values()),
        checksums=tuple(checksums),
    )


def _layer(name: str) -> int:
    """Index in the layer list, with which a tensor's name begins."""
    first = name.partition(".")[0]
    return int(first) if first.isdecimal() else 0
