"""``metrics.jsonl``: one record per line, of every step once, however often a run was stopped and resumed."""

from __future__ import annotations

import json
import math
import numbers
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dsx.errors import DataError

STEP = "train/step"
_NON_FINITE = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}  # as in protobuf's JSON


class MetricsFile:
    """Appends records; what a resumed run will do again is dropped first.

    Args:
        path: The file; its folder is made.
        first_step: Records of this step and later ones go, and lines that a kill left torn.

    Raises:
        DataError: It cannot be written.
    """

    def __init__(self, path: Path, first_step: int) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.dropped = _drop_records(path, first_step)
            """Step and metric of everything that was dropped at the start."""
            self._file = path.open("a", encoding="utf-8")
        except OSError as error:
            raise DataError(
                str(path), f"cannot be written ({error.strerror})", "mend that, or change dsx.train.output"
            ) from error

    def forget(self, first_step: int) -> frozenset[tuple[int, str]]:
        """Drop the records of this step and later ones, which will come again; gives step and metric of each.

        Raises OSError; the file then stays as it was, and takes records as before.
        """
        self._file.flush()
        dropped = _drop_records(self.path, first_step)
        written, self._file = self._file, self.path.open("a", encoding="utf-8")
        written.close()
        return dropped

    def write(self, record: Mapping[str, Any]) -> None:
        """Append a record, at once. Raises OSError; then the next call tries again to write it as well."""
        self._file.write(json.dumps(jsonable(record), allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file; safe to call twice. Raises OSError if a record is still not on the disk."""
        self._file.close()


def jsonable(value: Any) -> Any:
    """``value`` with mappings, sequences and plain values only, and non-finite floats as strings."""
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [jsonable(item) for item in value]
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, numbers.Integral):  # NumPy's too
        return int(value)
    if isinstance(value, numbers.Real):
        number = float(value)
        return number if math.isfinite(number) else _NON_FINITE[str(number)]
    return str(value)


def _drop_records(path: Path, first_step: int) -> frozenset[tuple[int, str]]:
    """Rewrite ``path``, atomically, without records of ``first_step`` and later; step and metric of those."""
    if not path.exists():
        return frozenset()
    kept, dropped = list[str](), set[tuple[int, str]]()
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        row = _record(line)
        if row is not None and row[STEP] < first_step:
            kept.append(line)
        elif row is not None:
            dropped.update((row[STEP], name) for name in row)
    aside = path.with_name(f".{path.name}.partial")
    with aside.open("w", encoding="utf-8") as file:
        file.writelines(f"{line}\n" for line in kept)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)
    return frozenset(dropped)


def _record(line: str) -> dict[str, Any] | None:
    """A line's record; None if a kill in mid-write, or a power cut, has torn it."""
    try:
        row = json.loads(line)
        return {**row, STEP: int(row[STEP])}
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
