"""A checkpoint while it is being made: ``OUT.partial`` with its journal, then ``OUT``, whole.

::

    OUT.partial/journal.jsonl   what is done, as lines of JSON
    OUT.partial/data/           the files, renamed to OUT at the end

A kill at any moment leaves either no OUT or a complete one.

A record is written when its bytes are, so that a killed process loses next to nothing: what was written
lives on in the system. A machine that goes down loses what was not flushed; so :meth:`Journal.seal` notes how
many records speak of flushed bytes, and after another start of the machine only those count.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

from dsx.checkpoint import store
from dsx.checkpoint.catalog import Skeleton, Target, leads_out
from dsx.checkpoint.file_io import blamed, write_from
from dsx.errors import CheckpointError
from dsx.launch.entry import boot_id

VERSION = 1
Record = Mapping[str, Any]
RESUMES = "free space and run the same command again: it goes on from where it stopped"


class Journal:
    """A file of records, locked against a second conversion to the same folder.

    Args:
        path: The file; made if there is none.
        about: What the conversion is of; its first line. Another first line in the file means that the file
            is of another conversion.
        boot: Identifies this start of this machine; empty if that is unknown.

    Attributes:
        records: What an interrupted conversion had done, when the journal was opened.
        count: Records in the file.

    Raises:
        CheckpointError: Another process has it open, or it is of another conversion.
    """

    def __init__(self, path: Path, about: Record, boot: str | None = None) -> None:
        self._path = path
        self._boot = boot_id() if boot is None else boot
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._end = 0
        try:
            _lock(self._descriptor, path)
            self.records = self._read({"journal": VERSION, **about})
        except BaseException:
            self.close()
            raise
        self.count = len(self.records)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def append(self, record: Record) -> None:
        """Add a record of bytes that are written, if not flushed. Not for two threads at once."""
        self._write(record)
        self.count += 1

    def seal(self, count: int) -> None:
        """Note that the bytes of the first ``count`` records are flushed, and flush the note."""
        self._write({"flushed": count})
        with blamed(self._path, "the journal", "writing", RESUMES):
            os.fsync(self._descriptor)

    def close(self) -> None:
        """Close and unlock the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _read(self, about: Record) -> tuple[Record, ...]:
        """The records that count; starts an empty file, and cuts off what does not count."""
        lines = list(_lines(self._path.read_bytes()))
        if not lines:
            os.ftruncate(self._descriptor, 0)
            self._write(about)
            self._write({"boot": self._boot})
            os.fsync(self._descriptor)
            return ()
        first = lines[0][0]
        differs = sorted(key for key in {*about, *first} if about.get(key) != first.get(key))
        if differs:
            raise CheckpointError(
                str(self._path.parent),
                f"an interrupted conversion left it, and {', '.join(differs)} has changed since",
                "finish that conversion with the same source and target, or pass --restart to discard it",
            )
        records, ends, flushed, boot = [], [lines[0][1]], 0, ""
        for line, end in lines[1:]:
            flushed, boot = line.get("flushed", flushed), line.get("boot", boot)
            if "flushed" not in line and "boot" not in line:
                records.append(line)
                ends.append(end)
        self._end = lines[-1][1]
        if not boot or boot != self._boot:  # the bytes behind later records may be lost
            del records[flushed:]
            self._end = ends[len(records)]
        os.ftruncate(self._descriptor, self._end)
        if not boot or boot != self._boot:
            self._write({"boot": self._boot})
            self.seal(len(records))
        return tuple(records)

    def _write(self, line: Record) -> None:
        data = json.dumps(line, separators=(",", ":")).encode() + b"\n"
        with blamed(self._path, "the journal", "writing", RESUMES):
            write_from(self._descriptor, memoryview(data), self._end)
        self._end += len(data)


def require_free(path: Path) -> None:
    """Raise CheckpointError if a process has the journal at ``path`` open."""
    if path.is_file():
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            _lock(descriptor, path)
        finally:
            os.close(descriptor)


def _lock(descriptor: int, path: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise CheckpointError(
            str(path.parent),
            "another process is writing this checkpoint now",
            "wait for it, or choose another target",
        ) from None


def _lines(data: bytes) -> Iterator[tuple[Record, int]]:
    """Every line that is whole, with the offset after it."""
    end = 0
    for line in data.splitlines(keepends=True):
        end += len(line)
        try:
            record = json.loads(line) if line.endswith(b"\n") else None
        except ValueError:
            return
        if not isinstance(record, dict):
            return
        yield record, end


_JOURNAL = "journal.jsonl"
_DATA = "data"


def partial_of(final: Path) -> Path:
    """Where a target is while it is being made."""
    return final.with_name(f"{final.name}.partial")


class Staging:
    """The folder that a target is made in; a context manager that unlocks its journal.

    Args:
        target: What is to be made.
        about: What identifies this conversion, for resuming.
        restart: Throw away what an interrupted conversion left.

    Attributes:
        journal: What is done.

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
        # Names of tensors and states become those of files.
        outside = next((one.file for one in target.skeletons if leads_out(one.file)), None)
        if outside is not None:
            raise CheckpointError(
                f"{self.final}: {outside!r}",
                "a tensor's name would lead out of the folder",
                "do not trust this checkpoint",
            )
        if restart:
            require_free(self.partial / _JOURNAL)
            self.discard()
        self._check_leftover()
        store.require_space(self.final.absolute().parent, self._missing_bytes())
        try:
            self.partial.mkdir(parents=True, exist_ok=True)
            self.journal = Journal(self.partial / _JOURNAL, about)
        except OSError as error:
            raise CheckpointError(
                str(self.partial), f"cannot be made ({error.strerror})", "choose another target"
            ) from error
        try:
            self._make_files()
        except BaseException:
            self.journal.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.journal.close()

    def path_of(self, file: str) -> Path:
        """Where a file of the target is now."""
        return self.data / file

    def commit(self, *, point_latest: bool) -> None:
        """Flush everything, give the folder its name, and make it what ``latest`` names if wanted."""
        store.sync(self.data)
        with blamed(self.final, "the folder", "renaming", "choose another target"):
            self.final.parent.mkdir(parents=True, exist_ok=True)
            self.data.rename(self.final)
        store.sync_folder(self.final.absolute().parent)
        self.journal.close()
        self.discard()
        if point_latest:
            store.point_latest(self.final.absolute().parent, self.final.name)

    def discard(self) -> None:
        """Delete the partial folder."""
        store.remove(self.partial)

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
        resumed = bool(self.journal.records)
        if not resumed:
            store.remove(self.data)
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
        homes = {self.path_of(skeleton.file).parent for skeleton in self._target.skeletons}
        for folder in {self.partial, self.data, *homes}:
            if folder.is_dir():
                store.sync_folder(folder)


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
