"""What of a conversion is done: lines of JSON that are on the disk after the bytes that they speak of."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Self

from dsx.checkpoint.file_io import write_from
from dsx.errors import CheckpointError

VERSION = 1
Record = Mapping[str, Any]


class Journal:
    """A file of records, locked against a second conversion to the same folder.

    Args:
        path: The file; made if there is none.
        about: What the conversion is of; its first line. Another first line in the file means that the file
            is of another conversion.

    Attributes:
        records: What an interrupted conversion had done, when the journal was opened.

    Raises:
        CheckpointError: Another process has it open, or it is of another conversion.
    """

    def __init__(self, path: Path, about: Record) -> None:
        self._path = path
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            self._lock()
            self.records = self._read({"journal": VERSION, **about})
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def append(self, records: Iterable[Record]) -> None:
        """Write records and wait until they are on the disk. What they speak of must be there already."""
        text = "".join(json.dumps(record, separators=(",", ":")) + "\n" for record in records)
        write_from(self._descriptor, memoryview(text.encode()), self._end)
        self._end += len(text.encode())
        os.fsync(self._descriptor)

    def close(self) -> None:
        """Close and unlock the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _lock(self) -> None:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise CheckpointError(
                str(self._path.parent),
                "another process is writing this checkpoint now",
                "wait for it, or choose another target",
            ) from None

    def _read(self, about: Record) -> tuple[Record, ...]:
        """The records there, without a last one that was cut short; starts an empty file."""
        data = self._path.read_bytes()
        records, self._end = [], 0
        for line in data.splitlines(keepends=True):
            record = _parsed(line)
            if record is None:
                break
            records.append(record)
            self._end += len(line)
        os.ftruncate(self._descriptor, self._end)
        if not records:
            self.append([about])
            return ()
        differs = sorted(key for key in {*about, *records[0]} if about.get(key) != records[0].get(key))
        if differs:
            raise CheckpointError(
                str(self._path.parent),
                f"an interrupted conversion left it, and {', '.join(differs)} has changed since",
                "finish that conversion with the same source and target, or pass --restart to discard it",
            )
        return tuple(records[1:])


def _parsed(line: bytes) -> Record | None:
    if not line.endswith(b"\n"):
        return None
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None
