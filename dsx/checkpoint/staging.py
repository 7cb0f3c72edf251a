"""A checkpoint while it is being made: ``OUT.partial`` with its journal, then ``OUT``, whole.

::

    OUT.partial/journal.jsonl   what is done (:mod:`dsx.checkpoint.journal`)
    OUT.partial/data/           the files, renamed to OUT at the end

A kill at any moment leaves either no OUT or a complete one.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Any, Self

from dsx.checkpoint import store
from dsx.checkpoint.file_io import blamed, write_from
from dsx.checkpoint.journal import Journal, Record, require_free
from dsx.checkpoint.target import Skeleton, Target
from dsx.errors import CheckpointError

_JOURNAL = "journal.jsonl"
_DATA = "data"
RESUMES = "free space and run the same command again: it goes on from where it stopped"


class Staging:
    """The folder that a target is made in; a context manager that unlocks its journal.

    Args:
        target: What is to be made.
        about: What identifies this conversion, for resuming.
        restart: Throw away what an interrupted conversion left.

    Raises:
        CheckpointError: The target exists, is being written by somebody else, does not fit on the disk, or
            another conversion was interrupted there.
    """

    def __init__(self, target: Target, about: Mapping[str, Any], *, restart: bool) -> None:
        self._target = target
        self.final = target.catalog.root
        self.partial = partial_of(self.final)
        self.data = self.partial / _DATA
        check_absent(self.final)
        for skeleton in target.skeletons:
            _check_inside(skeleton.file, target)
        if restart:
            require_free(self.partial / _JOURNAL)
            self.discard()
        self._check_leftover()
        store.require_space(self.final.absolute().parent, self._missing_bytes())
        try:
            self.partial.mkdir(parents=True, exist_ok=True)
            self._journal = Journal(self.partial / _JOURNAL, about)
        except OSError as error:
            raise CheckpointError(
                str(self.partial), f"cannot be made ({error.strerror})", "choose another target"
            ) from error
        try:
            self._make_files()
        except BaseException:
            self._journal.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._journal.close()

    @property
    def records(self) -> tuple[Record, ...]:
        """What an interrupted conversion had done."""
        return self._journal.records

    def path_of(self, file: str) -> Path:
        """Where a file of the target is now."""
        return self.data / file

    @property
    def count(self) -> int:
        """Records in the journal."""
        return self._journal.count

    def note(self, record: Record) -> None:
        """Record work whose bytes are written. Not for two threads at once."""
        with blamed(self.partial / _JOURNAL, "the journal", "writing", RESUMES):
            self._journal.append(record)

    def seal(self, count: int) -> None:
        """Note that the bytes of the first ``count`` records are on the disk."""
        with blamed(self.partial / _JOURNAL, "the journal", "writing", RESUMES):
            self._journal.seal(count)

    def commit(self, *, point_latest: bool) -> None:
        """Flush everything, give the folder its name, and make it what ``latest`` names if wanted."""
        store.sync(self.data)
        with blamed(self.final, "the folder", "renaming", "choose another target"):
            self.final.parent.mkdir(parents=True, exist_ok=True)
            self.data.rename(self.final)
        store.sync_folder(self.final.absolute().parent)
        self._journal.close()
        self.discard()
        if point_latest:
            store.point_latest(self.final.absolute().parent, self.final.name)

    def discard(self) -> None:
        """Delete the partial folder."""
        if self.partial.is_symlink():
            self.partial.unlink()
        elif self.partial.exists():
            shutil.rmtree(self.partial)

    def _check_leftover(self) -> None:
        if not os.path.lexists(self.partial):
            return
        known = {_JOURNAL, _DATA}
        if (
            self.partial.is_symlink()
            or not self.partial.is_dir()
            or not {path.name for path in self.partial.iterdir()} <= known
        ):
            raise CheckpointError(
                str(self.partial),
                "it is in the way: no conversion of dsx left it",
                "remove it, pass --restart to have it removed, or choose another target",
            )

    def _missing_bytes(self) -> int:
        """Bytes of the disk that are still to be taken."""
        total = sum(skeleton.num_bytes for skeleton in self._target.skeletons)
        taken = 0
        if self.data.is_dir():
            taken = sum(path.stat().st_blocks * 512 for path in self.data.rglob("*") if path.is_file())
        return max(0, total - taken)

    def _make_files(self) -> None:
        resumed = bool(self.records)
        if not resumed and self.data.exists():
            shutil.rmtree(self.data)
        for skeleton in self._target.skeletons:
            path = self.path_of(skeleton.file)
            with blamed(path, "its header", "writing", RESUMES):
                if resumed and (not path.is_file() or path.stat().st_size != skeleton.num_bytes):
                    raise CheckpointError(
                        str(path),
                        "it is not as an interrupted conversion left it",
                        "pass --restart to begin anew",
                    )
                path.parent.mkdir(parents=True, exist_ok=True)
                _make(path, skeleton)
        for folder in {
            self.partial,
            self.data,
            *(self.path_of(s.file).parent for s in self._target.skeletons),
        }:
            if folder.is_dir():
                store.sync_folder(folder)


def partial_of(final: Path) -> Path:
    """The folder that ``final`` is made in."""
    return final.with_name(f"{final.name}.partial")


def check_absent(final: Path) -> None:
    """Raise CheckpointError if a target exists; an empty folder may."""
    if not os.path.lexists(final):
        return
    if final.is_dir() and not final.is_symlink() and not any(final.iterdir()):
        return
    raise CheckpointError(str(final), "it exists already", "remove it or choose another target")


def _check_inside(file: str, target: Target) -> None:
    """Names of tensors and states become those of files, and must not lead out of the target's folder."""
    pure = PurePosixPath(file)
    if pure.is_absolute() or ".." in pure.parts or "\0" in file or "\\" in file:
        raise CheckpointError(
            f"{target.catalog.root}: {file!r}",
            "a tensor's name would lead out of the folder",
            "do not trust this checkpoint",
        )


def _make(path: Path, skeleton: Skeleton) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        os.ftruncate(descriptor, skeleton.num_bytes)
        for offset, data in skeleton.parts:
            write_from(descriptor, memoryview(data), offset)
    finally:
        os.close(descriptor)
