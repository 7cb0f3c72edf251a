"""Parts of a source that can be read on their own, from any document on: streaming seeks by them."""

from __future__ import annotations

import json
import os
import re
from codecs import BOM_UTF8
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import AnyStr, BinaryIO, Protocol, Self

from dsx.errors import DataError
from dsx.terminal import shortened

_SMALLEST_UNIT_BYTES, _LARGEST_UNIT_BYTES = 64 << 10, 64 << 20
_UNITS_PER_LANE = 4
_NEAR_BYTES = 64 << 10
_LONGEST_BYTES = 4 << 20
TO_UTF8 = "convert it (iconv -f latin1 -t utf-8) or leave it out"
_AHEAD_BYTES = 10 << 20  # in which datasets looks for the columns, too


class Unit(Protocol):
    """A part of a source that can be read on its own."""

    @property
    def name(self) -> str:
        """A name that is the same on every machine, and that no other unit of the source has."""

    def documents(self, start: int | None) -> Iterator[tuple[int, str]]:
        """Documents in order, each with where it begins; a record is the text of its JSON.

        Args:
            start: Where to begin, as an earlier call said; None for the unit's first document.
        """

    def place(self, at: int) -> str:
        """What people call the place where a document begins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stamp:
    """A file as it was when the run started."""

    path: Path
    size_bytes: int
    modified_ns: int

    @classmethod
    def of(cls, path: Path) -> Self:
        """The file as it is now. Raises DataError if it cannot be looked at."""
        try:
            stat = path.stat()
        except OSError as error:
            raise gone(path, error) from error
        return cls(path=path, size_bytes=stat.st_size, modified_ns=stat.st_mtime_ns)

    def check(self) -> None:
        """Raise DataError if the file is gone or has changed."""
        now = Stamp.of(self.path)
        if now != self:
            what = (
                f"{self.size_bytes:,} bytes then, {now.size_bytes:,} now"
                if now.size_bytes != self.size_bytes
                else "it was written to"
            )
            raise DataError(
                str(self.path),
                f"has changed since the run started ({what}): the data position would mean nothing",
                "restore the file and start again: the run continues from its last checkpoint",
            )


def gone(path: Path, error: OSError) -> DataError:
    """The error for a file that cannot be opened or looked at."""
    missing = isinstance(error, FileNotFoundError)
    return DataError(
        str(path),
        "the file is gone" if missing else f"cannot be read ({error.strerror})",
        "restore the file and start again: a run continues from its last checkpoint",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class FilePart:
    """The documents of a file that begin in ``[start, end)``.

    Args:
        stamp: The file.
        name: See :class:`Unit`.
        start: First byte.
        end: Byte after the last.
        lines: Whether a document is a line of JSON instead of a stretch of running text.
        column: The key of the JSON that holds the text; none if whole lines are records.
        cut_bytes: Running text is cut into documents of at least so many bytes, at blank lines where there
            are any, and at most about twice that.
        blank: Whether lines without text are documents, too, without a character.
    """

    stamp: Stamp
    name: str
    start: int
    end: int
    lines: bool
    column: str = ""
    cut_bytes: int = 0
    blank: bool = False

    def documents(self, start: int | None) -> Iterator[tuple[int, str]]:
        """See :class:`Unit`; positions are bytes of the file."""
        self.stamp.check()
        try:
            with self.stamp.path.open("rb") as file:
                at = self._border(file, self.start) if start is None else start
                end = self._border(file, self.end)
                file.seek(at)
                lines = _lines(file.readline if self.lines else partial(_line, file), end - at)
                for piece in lines if self.lines else pieces(lines, self.cut_bytes):
                    text = self._text(piece, at)
                    if text or (self.blank and piece.strip()):
                        yield at, text or ""
                    at += len(piece)
                if at < end:
                    self.stamp.check()
                    what = f"ends at byte {at}, before its size says"
                    raise DataError(str(self.stamp.path), what, "check the disk it lies on")
        except OSError as error:
            raise gone(self.stamp.path, error) from error
        self.stamp.check()

    def _border(self, file: BinaryIO, at: int) -> int:
        """Where the first document at or after byte ``at`` begins, on which adjoining units agree."""
        if at in (0, self.stamp.size_bytes):
            return at
        file.seek(at - 1)
        while (part := file.readline(_LONGEST_BYTES)) and not part.endswith(b"\n"):
            continue
        line = file.tell()
        if self.lines:
            return line
        while file.tell() < at + _NEAR_BYTES:
            text = file.readline(_NEAR_BYTES)
            if not text or not text.strip():
                return file.tell()
        return line

    def _text(self, piece: bytes, at: int) -> str | None:
        try:
            if self.lines and not self.column:  # whoever reads the record says what is wrong with it
                line = piece.removeprefix(BOM_UTF8) if at == 0 else piece
                return line.decode(errors="surrogateescape").strip()
            return self._json(piece, at) if self.lines else _decoded(piece, self.stamp.path, at)
        except DataError:
            self.stamp.check()  # if the file has changed, that is the reason
            raise

    def _json(self, line: bytes, at: int) -> str | None:
        if not line.strip():
            return None
        try:
            row = json.loads(line.removeprefix(BOM_UTF8) if at == 0 else line)
            cell = row.get(self.column) if isinstance(row, dict) else None
            if isinstance(cell, str):
                cell.encode()
        except UnicodeDecodeError:
            _decoded(line, self.stamp.path, at)
            raise
        except (ValueError, RecursionError) as error:
            what = f"is no line of JSON in UTF-8 ({error})"
            raise DataError(self.place(at), what, "mend or remove that line") from error
        if not isinstance(row, dict):
            raise DataError(self.place(at), f"holds {type(row).__name__}, not an object", "mend that line")
        if isinstance(cell, str) or (cell is None and (at or self.column in row or self._later())):
            return cell
        what = f"{self.stamp.path} has no such column; it has {shortened(', '.join(row), 500)}"
        if cell is not None:
            what = f"{self.place(at)} holds {type(cell).__name__} there, not text"
        texts = [key for key, value in row.items() if isinstance(value, str)]
        chats = [key for key, value in row.items() if re.search(r"^\[.*'(role|from)':", str(value))]
        raise DataError(f'dsx.data.text_column = "{self.column}"', what, to_name(texts, chats))

    def _later(self) -> bool:
        """Whether a line soon after the first has the column: some writers leave out what is null."""
        with self.stamp.path.open("rb") as file:
            for line in _lines(file.readline, _AHEAD_BYTES):
                with suppress(ValueError, RecursionError, TypeError):
                    if self.column in json.loads(line):
                        return True
        return False

    def place(self, at: int) -> str:
        """File and line of a byte; the byte itself where counting the lines would take long."""
        if at > _LARGEST_UNIT_BYTES:
            return f"{self.stamp.path}, byte {at}"
        with self.stamp.path.open("rb") as file:
            return f"{self.stamp.path}, line {file.read(at).count(10) + 1}"


def to_name(texts: Sequence[str], chats: Sequence[str]) -> str:
    """What to do about a column that is not text: name one that is, or make one."""
    if chats:  # messages, conversations: lists of turns
        turns = f'set dsx.data.format to "chat" for the turns of {", ".join(chats)}'
        return f"{turns}, or name one that holds text: {', '.join(texts)}" if texts else turns
    return f"name the column that holds the text: {', '.join(texts)}" if texts else "add a column of strings"


def file_parts(
    root: Path,
    paths: Sequence[Path],
    *,
    lanes: int,
    column: str | None = None,
    whole_files: bool = False,
) -> tuple[FilePart, ...]:
    """Local files cut into units: some for each lane, 64 Ki to 64 Mi bytes where the files are so large.

    Args:
        root: Folder that ``paths`` are relative to.
        paths: Files in order.
        lanes: Lanes that read them.
        column: The key of JSON lines that holds the text, empty for records; None for running text.
        whole_files: Do not cut files of running text into documents, but for very large ones.
    """
    stamps = [(path, Stamp.of(root / path)) for path in paths]
    total = sum(stamp.size_bytes for _, stamp in stamps)
    share = total // (lanes * _UNITS_PER_LANE)
    unit_bytes = min(max(share, _SMALLEST_UNIT_BYTES), _LARGEST_UNIT_BYTES)
    cut = _LONGEST_BYTES if whole_files else min(max(share // 2, 1 << 10), 64 << 10)
    units = []
    for path, stamp in stamps:
        count = max(1, round(stamp.size_bytes / unit_bytes)) if stamp.size_bytes else 0
        if whole_files and stamp.size_bytes <= _LONGEST_BYTES:
            count = min(count, 1)
        borders = [index * stamp.size_bytes // count for index in range(count)] + [stamp.size_bytes]
        units += [
            FilePart(
                stamp=stamp,
                name=f"{path.as_posix()}:{start}-{end}",
                start=start,
                end=end,
                lines=column is not None,
                column=column or "",
                cut_bytes=cut,
            )
            for start, end in pairwise(borders)
        ]
    return tuple(units)


def _lines(read: Callable[[], bytes], left: int) -> Iterator[bytes]:
    """The lines of the next ``left`` bytes; fewer if the file ends."""
    while left > 0 and (line := read()):
        yield line
        left -= len(line)


def pieces(lines: Iterable[AnyStr], cut: int) -> Iterator[AnyStr]:
    """Lines in pieces of ``cut`` characters or more, up to the next blank line, at most about twice that."""
    taken: list[AnyStr] = []
    length = 0
    for line in lines:
        taken.append(line)
        length += len(line)
        if length >= 2 * cut or (length >= cut and not line.strip()):
            yield line[:0].join(taken)
            taken, length = [], 0
    if taken:
        yield taken[0][:0].join(taken)


def _line(file: BinaryIO) -> bytes:
    """A line, or 4 MiB of a longer one, not cut within a character."""
    line = file.readline(_LONGEST_BYTES)
    while len(line) >= _LONGEST_BYTES and not line.endswith(b"\n"):
        following = file.read(1)
        if not following or following[0] & 0xC0 != 0x80:  # the next character begins here
            file.seek(-len(following), os.SEEK_CUR)
            break
        line += following
    return line


def _decoded(piece: bytes, path: Path, at: int) -> str:
    try:
        return piece.decode()
    except UnicodeDecodeError as error:
        raise DataError(
            str(path),
            f"is not UTF-8 text ({error.reason}: byte 0x{piece[error.start]:02x} at {at + error.start})",
            TO_UTF8,
        ) from error
