"""What of a conversion is done, as lines of JSON.

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

from dsx.checkpoint.file_io import write_from
from dsx.errors import CheckpointError

VERSION = 1
Record = Mapping[str, Any]

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Journal:
    """A file of records, locked against a second conversion to the same folder.

    Args:
        path: The file; made if there is none.
        about: What the conversion is of; its first line. Another first line in the file means that the file
            is of another conversion.
        boot: Identifies this start of this machine; empty if that is unknown.

    Attributes:
        records: What an interrupted conversion had done, when the journal was opened.

    Raises:
        CheckpointError: Another process has it open, or it is of another conversion.
    """

    def __init__(self, path: Path, about: Record, boot: str | None = None) -> None:
        self._path = path
        self._boot = _boot_id() if boot is None else boot
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._end = 0
        try:
            _lock(self._descriptor, path)
            self.records = self._read({"journal": VERSION, **about})
        except BaseException:
            self.close()
            raise
        self._count = len(self.records)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def count(self) -> int:
        """Records in the file."""
        return self._count

    def append(self, record: Record) -> None:
        """Add a record of bytes that are written, if not flushed. Not for two threads at once."""
        self._write(record)
        self._count += 1

    def seal(self, count: int) -> None:
        """Note that the bytes of the first ``count`` records are flushed, and flush the note."""
        self._write({"flushed": count})
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


def _boot_id() -> str:
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return ""
