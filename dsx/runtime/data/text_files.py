"""Documents from plain text files, among them the standard library's source, which is always there."""

from __future__ import annotations

import hashlib
import json
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from dsx.errors import DataError
from dsx.runtime.data.units import Unit, file_parts

# With fewer files than this a file is too large a unit to hold out, so files are cut into documents.
_FEW_FILES = 64
_DOCUMENTS_OF_FEW_FILES = 128
_SMALLEST_CUT, _LARGEST_CUT = 1 << 10, 4 << 20

_NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})


@dataclass(frozen=True, slots=True, kw_only=True)
class TextFiles:
    """UTF-8 text files.

    From 64 files on, a file is a document. A corpus of fewer files is cut into about 128 documents, at blank
    lines where there are any, so that some can be held out. No document is much over 4 Mi characters.

    Args:
        root: Folder that ``paths`` are relative to.
        paths: Files, in the order in which they are read.
        timestamps: Whether a changed modification time makes another corpus.
    """

    root: Path
    paths: tuple[Path, ...]
    timestamps: bool = True

    def identity(self) -> dict[str, object]:
        """What the cache recognises this corpus by."""
        return file_identity(self.root, self.paths, timestamps=self.timestamps)

    def documents(self) -> Iterator[str]:
        """Documents in order. Raises DataError naming the file that is not UTF-8 or cannot be read."""
        cut = _LARGEST_CUT
        if len(self.paths) < _FEW_FILES:
            total_bytes = sum((self.root / path).stat().st_size for path in self.paths)
            cut = min(cut, max(_SMALLEST_CUT, total_bytes // _DOCUMENTS_OF_FEW_FILES))
        for path in self.paths:
            try:
                yield from _pieces(self.root / path, cut)
            except UnicodeDecodeError as error:
                raise DataError(
                    str(self.root / path),
                    f"is not UTF-8 text ({error.reason}: byte 0x{error.object[error.start]:02x})",
                    "convert it (iconv -f latin1 -t utf-8) or leave it out",
                ) from error
            except OSError as error:
                raise DataError(
                    str(self.root / path), f"cannot be read ({error.strerror})", "check the file"
                ) from error

    def units(self, lanes: int) -> tuple[Unit, ...]:
        """Parts for streaming; a corpus of few files is cut into more and smaller documents than here."""
        whole = len(self.paths) >= _FEW_FILES
        return file_parts(self.root, self.paths, lanes=lanes, whole_files=whole)


def standard_library() -> TextFiles:
    """The ``*.py`` files of this Python's standard library, without tests and installed packages."""
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = (path.relative_to(root) for path in root.rglob("*.py"))
    kept = sorted((path for path in paths if not _NOT_LIBRARY & set(path.parts)), key=Path.as_posix)
    if not kept:
        raise DataError(
            'dsx.data.source = "python-stdlib"',
            f"this Python has no source files in {root}",
            "name a text file or folder instead",
        )
    # An installation's file times say nothing about its text.
    return TextFiles(root=root, paths=tuple(kept), timestamps=False)


def file_identity(root: Path, paths: Iterable[Path], *, timestamps: bool = True) -> dict[str, object]:
    """Number and bytes of files, and a hash of their names, sizes and modification times."""
    stats = [(path.as_posix(), (root / path).stat()) for path in paths]
    rows = [(name, stat.st_size, stat.st_mtime_ns if timestamps else 0) for name, stat in stats]
    return {
        "files": len(rows),
        "bytes": sum(size for _, size, _ in rows),
        "stamp": hashlib.sha256(json.dumps(rows).encode()).hexdigest(),
    }


def _pieces(path: Path, cut: int) -> Iterator[str]:
    """``path`` in pieces of ``cut`` characters or more: to the next blank line, at most twice that."""
    lines: list[str] = []
    length = 0
    with path.open(encoding="utf-8", newline="") as file:  # newline="": the bytes as they are
        for line in file:
            lines.append(line)
            length += len(line)
            if length >= 2 * cut or (length >= cut and not line.strip()):
                yield "".join(lines)
                lines, length = [], 0
    if lines:
        yield "".join(lines)
