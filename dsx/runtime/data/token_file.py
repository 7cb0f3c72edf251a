"""Token ids in a file, read in place and watched: a file that changes is an error, not a crash."""

from __future__ import annotations

import os
import weakref
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from dsx.errors import DataError


class Tokens(Protocol):
    """Token ids that can be sliced: an array, or a file."""

    def __len__(self) -> int:
        """Number of ids."""

    def __getitem__(self, part: slice, /) -> npt.NDArray[np.unsignedinteger[Any]]:
        """Some of them."""


class TokenFile:
    """A file of token ids.

    Read by ``pread``, not through a memory map: a page of a map that the file has lost ends the process by
    SIGBUS, and waiting for the disk in a page fault holds Python's lock. The open file outlives its name, so
    a deleted corpus can be read to the end of the run.

    Args:
        path: The file.
        dtype: Type of the ids.

    Raises:
        DataError: It cannot be opened.
    """

    def __init__(self, path: Path, dtype: np.dtype[Any]) -> None:
        self._path, self._dtype = path, dtype
        try:
            self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise self._lost(f"cannot be opened ({error.strerror})") from error
        weakref.finalize(self, os.close, self._file)
        self._stamp = _stamp(os.fstat(self._file))

    def __len__(self) -> int:
        return self._stamp[0] // self._dtype.itemsize

    def __getitem__(self, part: slice) -> npt.NDArray[np.unsignedinteger[Any]]:
        """A copy of the ids in ``part`` (step 1). Raises DataError if the file is not what it was."""
        start, stop, _ = part.indices(len(self))
        wanted = max(0, stop - start) * self._dtype.itemsize
        try:
            read = os.pread(self._file, wanted, start * self._dtype.itemsize)
            now = _stamp(os.fstat(self._file))
        except OSError as error:
            raise self._lost(f"cannot be read any more ({error.strerror})") from error
        if now != self._stamp or len(read) < wanted:
            raise self._lost(
                f"has changed since it was opened ({self._stamp[0]:,} bytes then, {now[0]:,} now)"
            )
        return np.frombuffer(read, self._dtype)

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[Any]:
        """All of them, for NumPy."""
        del copy  # reading is copying
        return self[:].astype(dtype or self._dtype)

    def _lost(self, what: str) -> DataError:
        return DataError(
            str(self._path), what, f"remove the folder {self._path.parent}; the run prepares it again"
        )


def _stamp(stat: os.stat_result) -> tuple[int, int]:
    return stat.st_size, stat.st_mtime_ns
