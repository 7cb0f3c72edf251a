"""Checkpoints that all ranks write at once, beside the training if asked for, and one of them commits.

Each rank writes its file, then a note beside it. Rank 0 waits for all notes, writes the manifest and commits.
Nothing but files passes between the ranks meanwhile, so that threads may do this while they train.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from pydantic import TypeAdapter

from dsx.checkpoint import store
from dsx.checkpoint.catalog import Catalog, Checksum, Entry, Piece
from dsx.checkpoint.formats.dsx_manifest import FORMAT_NAME, write_manifest
from dsx.errors import CheckpointError
from dsx.runtime.entry import AGREED
from dsx.runtime.launch import agree
from dsx.runtime.random_states import save_random_states
from dsx.runtime.run_facts import group_facts, merged_groups, run_facts
from dsx.runtime.share_writer import Block, Share, blocks_of, num_bytes, on_host, write_share
from dsx.runtime.stored import names_here
from dsx.spec.param import ParamSpec

if TYPE_CHECKING:
    from dsx.runtime.engine import PipelineEngine

T = TypeVar("T")

_LOOK_SECONDS = 0.05
_PATIENCE_SECONDS = 1800.0
_FIX = "mend that and save again"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Note:
    """What a rank tells rank 0 when its file is on the disk."""

    share: Share
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
        blocks: Sequence[Block],
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
        share = Share(entries=(), specs=(), checksums=())
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
