"""Checkpoints that all ranks write at once, beside the training if asked for, and one of them commits.

Each rank writes its file, then a note beside it. Rank 0 waits for all notes, writes the manifest and commits.
Nothing but files passes between the ranks meanwhile, so that threads may do this while they train.
"""

from __future__ import annotations

import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from dsx.checkpoint import store
from dsx.checkpoint.base import base_fact, composite_fact
from dsx.checkpoint.catalog import Catalog, Checksum, Entry, merged_groups
from dsx.checkpoint.file_io import blamed, digest, stretches, write_from
from dsx.checkpoint.formats import native
from dsx.checkpoint.formats.native import StoredBlock, read_manifest, write_manifest
from dsx.checkpoint.plain import as_numpy
from dsx.checkpoint.read import tiles_of
from dsx.checkpoint.run.names import CheckpointedRun, Names, specs_here
from dsx.checkpoint.run.state import group_facts, run_facts, save_random_states
from dsx.checkpoint.run.stored import stored_here
from dsx.errors import CheckpointError
from dsx.launch.entry import AGREED
from dsx.launch.processes import agree
from dsx.models.param import ParamSpec, layer_of

_WRITE_BYTES = 1 << 24


def write_share(blocks: Sequence[StoredBlock], folder: Path, rank: int) -> Catalog:
    """Write the file of ``rank`` below ``folder`` and flush it to the disk.

    Returns:
        What is in it: every state of every tensor that the rank has a part of, with its own pieces alone, and
        a checksum of every stretch.
    """
    name = native.rank_file(rank)
    path = folder / name
    header, places = native.header_of(blocks)
    entries: list[Entry] = []
    checksums = [Checksum(name, 0, len(header), "xxh3_128", digest(header))]
    what = f"the part of rank {rank}"
    with blamed(path, what, "when dsx writes", "free space, or choose another folder"):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        try:
            write_from(descriptor, memoryview(header), 0)
            for block, (at, _) in zip(blocks, places, strict=True):
                data = memoryview(as_numpy(block.values.detach().cpu().contiguous())).cast("B")
                for low in range(0, len(data), _WRITE_BYTES):
                    write_from(descriptor, data[low : low + _WRITE_BYTES], at + low)
                entry, size = block.entry, block.entry.item_bytes
                pieces = tuple(part.at(name, at, size) for part in block.parts)
                entries.append(replace(entry, pieces=pieces))
                checksums += (  # of every stretch that a reader may ask for
                    Checksum(name, start, stop, "xxh3_128", digest(data[start - at : stop - at]))
                    for piece in pieces
                    for tile in tiles_of(entry.shape, piece.box)
                    for start, stop in stretches(piece, tile, size)
                )
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    return Catalog(
        root=folder, format=native.FORMAT_NAME, entries=_joined(entries), checksums=tuple(checksums)
    )


def _joined(entries: Iterable[Entry]) -> tuple[Entry, ...]:
    """Entries of the same state of the same tensor as one, with all their pieces."""
    found: dict[tuple[str, str], list[Entry]] = defaultdict(list)
    for entry in entries:
        found[entry.key].append(entry)
    return tuple(
        replace(same[0], pieces=tuple(piece for entry in same for piece in entry.pieces))
        for same in found.values()
    )


T = TypeVar("T")

_LOOK_SECONDS = 0.05
_PATIENCE_SECONDS = 1800.0
_FIX = "mend that and save again"


class Saver:
    """Saves a run's checkpoints, one at a time. Every method is a collective call over all ranks."""

    def __init__(self, run: CheckpointedRun) -> None:
        self._run = run
        self._thread: threading.Thread | None = None
        self._work: _Work | None = None

    @cached_property
    def _left_out(self) -> dict[str, Any]:
        """Where what is left out is from: read once, as it does not change while the run goes on."""
        config = self._run.run_config
        found = {"base": base_fact(config), "composite": composite_fact(config)}
        return {key: fact for key, fact in found.items() if fact is not None}

    def save(
        self, root: Path, tag: str, client_state: Mapping[str, Any], *, background: bool, keep: int
    ) -> Path:
        """Write ``root/tag``, point ``latest`` at it and delete all but the newest ``keep`` (0: none).

        With ``background`` the states are copied to the host's memory, and the rest happens while the run
        goes on; a save before is waited for, so that one copy exists at most. What goes wrong meanwhile is
        raised by the next call of :meth:`save` or :meth:`wait`.
        """
        self.wait()
        run, rank = self._run, self._run.groups.rank
        facts: dict[str, Any] = agree(lambda: run_facts(run, client_state, self._left_out))
        blocks = native.file_order(stored_here(run))
        num_bytes = sum(block.num_bytes for block in blocks)
        size = torch.tensor([num_bytes], dtype=torch.float64, device=run.pipeline.device)
        dist.all_reduce(size)
        agree(lambda: store.require_space(root, int(size.item())))
        staged: Path = agree(lambda: store.stage(root, tag))
        if background:  # copies in the host's memory, which the run does not change
            blocks = [replace(one, values=one.values.detach().to("cpu", copy=True)) for one in blocks]
        work = _Work(
            root=root,
            tag=tag,
            staged=staged,
            rank=rank,
            world_size=run.groups.mesh.size,
            blocks=blocks,
            specs=[*specs_here(run), *(spec for spec, _ in Names(run).buffers())],
            groups=group_facts(run),
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
            if self._run.groups.rank == 0:
                store.abandon(work.root, work.tag)
            _, first = min(failed, key=lambda failure: failure[0])
            error = CheckpointError(
                f"checkpoint {work.tag} in {work.root}", f"{first.where}: {first.what}", first.fix
            )
            error.add_note(AGREED)
            raise error


@dataclass(kw_only=True)
class _Work:
    """One rank's part in one save.

    Attributes:
        failure: What went wrong first, and whether another rank had given the save up before.
    """

    root: Path
    tag: str
    staged: Path
    rank: int
    world_size: int
    blocks: Sequence[StoredBlock]
    specs: Sequence[ParamSpec]
    groups: list[dict[str, Any]]
    facts: Mapping[str, Any]
    keep: int
    checksums: tuple[Checksum, ...] = ()
    failure: tuple[bool, CheckpointError] | None = None

    def begin(self, action: Callable[[], tuple[Checksum, ...]]) -> None:
        """What has to be done before the run goes on; gives checksums of the files that it writes."""
        self.checksums = self._attempt(action) or ()

    def run(self) -> None:
        """Write, note, and on rank 0 commit. Never raises: see :attr:`failure`."""
        share = Catalog(root=self.staged, format=native.FORMAT_NAME, entries=())
        if self.failure is None:
            share = self._attempt(lambda: write_share(self.blocks, self.staged, self.rank)) or share
        self.blocks = ()
        # Of dsx's own layers: those of others are not known to be cut in any way.
        own = tuple(spec for spec in self.specs if spec.hf != (spec.name,))
        note = replace(
            share,
            specs=own,
            checksums=(*share.checksums, *self.checksums),
            facts={
                "param_groups": self.groups,
                "order": [spec.name for spec in self.specs],
                "failed": self.failure is not None,
            },
        )
        if self._attempt(lambda: self._leave(note)) is None:
            # The disk is too full even for a note: by this rank 0 sees that it need not wait for one.
            store.give_up(self.root, self.tag)
        elif self.rank == 0 and self.failure is None:
            self._attempt(self._commit)

    def _attempt(self, action: Callable[[], T]) -> T | None:
        try:
            return action()
        except CheckpointError as error:
            self._note_failure(error)
        except Exception as error:  # noqa: BLE001 - in a thread nobody else would hear of it
            what = str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
            self._note_failure(CheckpointError(f"the part of rank {self.rank}", what, _FIX))
        return None

    def _note_failure(self, error: CheckpointError) -> None:
        if self.failure is None:
            self.failure = not self.staged.is_dir(), error

    def _leave(self, note: Catalog) -> Path:
        """Tell rank 0 that this rank's file is on the disk: by a manifest of it."""
        path = self._note(self.rank)
        store.write_atomically(path, write_manifest(note))
        return path

    def _note(self, rank: int) -> Path:
        return self.staged / f"note_{rank:05d}.json"

    def _commit(self) -> None:
        notes = [self._await(rank) for rank in range(self.world_size)]
        if any(note.facts["failed"] for note in notes):
            return  # that rank tells all of why: see wait
        manifest = write_manifest(_catalog(self.root / self.tag, notes, self.facts))
        for rank in range(self.world_size):
            self._note(rank).unlink()
        store.write_atomically(self.staged / store.MANIFEST, manifest)
        store.commit(self.root, self.tag)
        store.point_latest(self.root, self.tag)
        if self.keep:
            store.prune(self.root, keep=self.keep)

    def _await(self, rank: int) -> Catalog:
        """The note of a rank, when it is there."""
        path, deadline = self._note(rank), time.monotonic() + _PATIENCE_SECONDS
        while not path.exists():
            if time.monotonic() > deadline or not self.staged.is_dir():
                raise CheckpointError(
                    str(self.staged), f"rank {rank} has not written its part", "see that rank's output"
                )
            time.sleep(_LOOK_SECONDS)
        return read_manifest(path)


def _catalog(root: Path, notes: Sequence[Catalog], facts: Mapping[str, Any]) -> Catalog:
    specs = {spec.name: spec for note in notes for spec in note.specs}
    places = {name: place for note in notes for place, name in enumerate(note.facts["order"])}
    entries = _joined(entry for note in notes for entry in note.entries)
    held = {entry.name for entry in entries}
    return Catalog(
        root=root,
        format=native.FORMAT_NAME,
        entries=tuple(sorted(entries, key=lambda entry: (layer_of(entry.name), places.get(entry.name, 0)))),
        facts={**facts, "param_groups": merged_groups([note.facts["param_groups"] for note in notes])},
        specs=tuple(spec for name, spec in specs.items() if name in held),
        checksums=tuple(checksum for note in notes for checksum in note.checksums),
    )
