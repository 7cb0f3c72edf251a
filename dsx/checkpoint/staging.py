"""A checkpoint while it is being made: ``OUT.partial``, then ``OUT``, whole.

::

    OUT.partial/conversion.lock   held by the conversion that writes
    OUT.partial/data/             the files, renamed to OUT at the end

A kill at any moment leaves either no OUT or a complete one. What it leaves in OUT.partial the next conversion
to OUT removes, and begins anew.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Self

from filelock import FileLock, Timeout

from dsx.checkpoint import store
from dsx.checkpoint.catalog import Skeleton, Target, leads_out
from dsx.checkpoint.file_io import blamed, write_from
from dsx.errors import CheckpointError

AGAIN = "free space, or choose another target, and run the same command again: nothing was left behind"
_ELSEWHERE = "choose another target"
_LOCK = "conversion.lock"
_DATA = "data"


def partial_of(final: Path) -> Path:
    """Where a target is while it is being made."""
    return final.with_name(f"{final.name}.partial")


class Staging:
    """The folder that a target is made in; a context manager that removes it unless it was committed.

    Args:
        target: What is to be made.

    Raises:
        CheckpointError: The target exists, is being written by somebody else, or does not fit on the disk, or
            something that no conversion left is in the way.
    """

    def __init__(self, target: Target) -> None:
        self._target = target
        self.final = target.catalog.root
        self._partial = partial_of(self.final)
        self.data = self._partial / _DATA
        check_absent(self.final)
        # Names of tensors and states become those of files.
        outside = next((one.file for one in target.skeletons if leads_out(one.file)), None)
        if outside is not None:
            raise CheckpointError(
                f"{self.final}: {outside!r}",
                "a tensor's name would lead out of the folder",
                "do not trust this checkpoint",
            )
        self._check_leftover()
        self._lock = FileLock(self._partial / _LOCK, timeout=0, thread_local=False, fallback_to_soft=False)
        with blamed(self._partial, "the folder", "making", _ELSEWHERE):
            self._partial.mkdir(parents=True, exist_ok=True)
            self._acquire()
        try:
            with blamed(self.data, "what a kill left", "removing", _ELSEWHERE):
                store.remove(self.data)
            total_bytes = sum(skeleton.num_bytes for skeleton in target.skeletons)
            store.require_space(self.final.absolute().parent, total_bytes)
            self._make_files()
        except BaseException:
            self._discard()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._discard()

    def path_of(self, file: str) -> Path:
        """Where a file of the target is now."""
        return self.data / file

    def commit(self, *, point_latest: bool) -> None:
        """Flush everything, give the folder its name, and make it what ``latest`` names if wanted."""
        store.sync(self.data)
        with blamed(self.final, "the folder", "renaming", _ELSEWHERE):
            self.data.rename(self.final)
        store.sync_folder(self.final.absolute().parent)
        if point_latest:
            store.point_latest(self.final.absolute().parent, self.final.name)

    def _discard(self) -> None:
        """Delete the partial folder while it is locked. What cannot be deleted the next conversion finds."""
        with suppress(OSError):
            store.remove(self.data)  # first: what is left is known by its lock
            store.remove(self._partial)
        self._lock.release()

    def _acquire(self) -> None:
        try:
            self._lock.acquire()
        except Timeout:
            raise CheckpointError(
                str(self._partial),
                "another process is writing this checkpoint now",
                "wait for it, or choose another target",
            ) from None

    def _check_leftover(self) -> None:
        if not os.path.lexists(self._partial):
            return
        with blamed(self._partial, "the folder", "looking into", _ELSEWHERE):
            is_folder = self._partial.is_dir() and not self._partial.is_symlink()
            names = {path.name for path in self._partial.iterdir()} if is_folder else {""}
        if names and (_LOCK not in names or names - {_LOCK, _DATA}):
            raise CheckpointError(
                str(self._partial),
                "it is in the way: no conversion of this version of dsx left it",
                "remove it, or choose another target",
            )

    def _make_files(self) -> None:
        for skeleton in self._target.skeletons:
            path = self.path_of(skeleton.file)
            with blamed(path, "its header", "writing", AGAIN):
                path.parent.mkdir(parents=True, exist_ok=True)
                _make(path, skeleton)


def check_absent(final: Path) -> None:
    """Raise CheckpointError if a target exists; an empty folder may."""
    if not os.path.lexists(final):
        return
    if final.is_dir() and not final.is_symlink() and not any(final.iterdir()):
        return
    raise CheckpointError(str(final), "it exists already", "remove it or choose another target")


def _make(path: Path, skeleton: Skeleton) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        os.ftruncate(descriptor, skeleton.num_bytes)
        for offset, data in skeleton.parts:
            write_from(descriptor, memoryview(data), offset)
    finally:
        os.close(descriptor)
