"""Text on its way to a terminal: whatever the terminal would obey is made visible; sizes and tables as text.

Names of tensors, keys and values of a config, and the text that a model generates come from files of unknown
origin. An escape sequence in one could clear the screen, rewrite the lines above, or set the clipboard.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import sys
import traceback
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import zip_longest
from textwrap import fill, wrap
from typing import Any

# C0 without tab and newline, DEL and C1; a carriage return that ends no line; line and paragraph separators;
# marks that change the direction of writing; halves of UTF-16 pairs, which cannot be encoded; two that no XML
# may hold.
_OBEYED = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]|\r(?!\n)"
)


def printable(text: str) -> str:
    r"""``text`` with the characters that a terminal obeys instead of showing written as JSON escapes.

    JSON stays JSON of the same meaning, and tabs and line ends stay.

    >>> print(printable("layer\x1b[2J"))
    layer\u001b[2J
    """
    return _OBEYED.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def shortened(text: str, most: int) -> str:
    """At most ``most`` characters of ``text``, with the number of all if some are left out.

    >>> shortened("abcdefgh", 4)
    'abcd... (8 characters)'
    """
    return text if len(text) <= most else f"{text[:most]}... ({len(text):,} characters)"


def open_streams() -> None:
    """Whatever a shell has closed (``>&-``) leads nowhere, for this process and for those that it starts."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: PTH123, SIM115 - the process's own, to its end
            os.set_inheritable(getattr(sys, name).fileno(), True)


_GONE = (errno.EPIPE, errno.EBADF, errno.EIO)
"""Errors of a stream whose other end will not come back."""

READER_GONE = 141
"""Exit code of a command whose output nobody reads to its end, as a shell says it: 128 + SIGPIPE."""


def lost_output(error: OSError) -> bool:
    """Whether ``error`` came of standard output, which then forgets what is still written to it.

    Its disk is full, or who read it has gone (``| head``): ``error.errno`` says which.
    """
    try:
        with suppress(ValueError):  # it is closed
            sys.stdout.write("\n")
            sys.stdout.flush()
    except OSError as again:
        if again.errno == error.errno:
            forget(sys.stdout)
            return True
    return False


_FULL = {f"(os error {code})": code for code in (errno.ENOSPC, errno.EDQUOT)}  # Rust's words for it


def full_disk(error: BaseException | None) -> str:
    """The system's words for a full disk, or a quota, that ``error`` comes of; empty for another error.

    One that only came up while that one was handled is another, unless it is the system's, too.
    """
    while error is not None:
        if isinstance(error, OSError) and error.errno in _FULL.values():
            words = error.strerror or os.strerror(error.errno or 0)
            return f"{error.filename}: {words}" if error.filename else words
        if code := next((code for words, code in _FULL.items() if words in str(error)), 0):
            return os.strerror(code)
        if re.search("PytorchStreamWriter failed writing file|inline_container.*unexpected pos", str(error)):
            return "torch could not write a file, as on a full disk"
        implied = None if error.__suppress_context__ or not isinstance(error, OSError) else error.__context__
        error = error.__cause__ or implied
    return ""


def no_room(error: Exception) -> str:
    """A program's last words if a full disk ends it, else empty; with a traceback where no file is named."""
    full = full_disk(error)
    named = full.startswith(f"{getattr(error, 'filename', None)}: ")
    trace = "" if named else "".join(traceback.format_exception(error))
    return full and printable(f"{trace}error: {full}. Fix: make room on that disk.")


def with_room(error: BaseException | None, fix: str) -> str:
    """A fix for what cannot be written, which asks for room first where a full disk is why."""
    return f"make room on that disk, or {fix}" if full_disk(error) else fix


def complain(text: str, *, raw: bool = False) -> None:
    """A line on standard error; one that takes nothing (full, closed, its reader gone) stops nobody."""
    try:
        if raw:  # past Python's buffers, whose locks another thread may hold
            os.write(sys.stderr.fileno(), f"{text}\n".encode(errors="backslashreplace"))
        else:
            sys.stderr.write(f"{text}\n")
            sys.stderr.flush()
    except (OSError, ValueError, AttributeError) as error:
        if getattr(error, "errno", None) in _GONE:  # a full disk or pipe may have room again
            forget(sys.stderr)


def forget(stream: Any) -> None:
    """From now on, what is written there goes nowhere; else Python would try again at its end, and say so."""
    with suppress(OSError, ValueError, AttributeError), open(os.devnull, "wb", buffering=0) as nowhere:  # noqa: PTH123
        os.dup2(nowhere.fileno(), stream.fileno())


_UNITS = (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))


def amount(num_bytes: float) -> str:
    """Bytes with the unit that suits them.

    >>> amount(0), amount(2048), amount(3 << 30)
    ('0 B', '2.00 KiB', '3.00 GiB')
    """
    name, unit = next(((name, unit) for name, unit in _UNITS if num_bytes >= unit), ("B", 1))
    return f"{num_bytes / unit:.{0 if unit == 1 else 2}f} {name}"


def unit_of(size_bytes: int) -> tuple[str, int]:
    """The unit to show all sizes up to this one in, as in a table: its name and bytes.

    >>> unit_of(3 << 30), unit_of(5 << 20)
    (('GiB', 1073741824), ('MiB', 1048576))
    """
    return next(((name, unit) for name, unit in _UNITS[1:] if size_bytes >= unit), _UNITS[-1])


def seconds(duration: float) -> str:
    """A duration in the unit that suits it.

    >>> [seconds(d) for d in (0.0123, 0.66, 12.34, 75.2, 7384)]
    ['12 ms', '0.66 s', '12.3 s', '1 min 15 s', '2 h 03 min']
    """
    if duration < 0.1:
        return f"{1000 * duration:.0f} ms"
    if duration < 60:
        return f"{duration:.2f} s" if duration < 10 else f"{duration:.1f} s"
    minutes, rest = divmod(round(duration), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02} s"
    return f"{minutes // 60} h {minutes % 60:02} min"


NARROWEST = 80
"""Columns of a line where no terminal says how many it has, as in a pipe or a file."""


def columns() -> int:
    """Characters of a line of standard output's terminal (or of ``COLUMNS``)."""
    return shutil.get_terminal_size(fallback=(NARROWEST, 0)).columns


def wrapped(text: str, width: int, *, indent: str = "") -> str:
    """Each line of ``text`` in lines of at most ``width``, those that continue one behind ``indent``."""
    lines = text.split("\n")
    cut = (fill(e, width, subsequent_indent=indent, **_WHOLE) if len(e) > width else e for e in lines)
    return "\n".join(cut)


def aligned(
    rows: Iterable[Sequence[str]], left: Collection[int] = (0,), *, width: int = 0, names: int = 1
) -> list[str]:
    """A line per row, two spaces between columns, each as wide as its widest cell.

    Where that is too wide, cells of text go on below themselves; where these would get too narrow for it, the
    table goes on below itself, with the columns that name its rows repeated.

    Args:
        rows: Cells, as many in every row; the first one names the columns.
        left: Columns whose cells begin together; the cells of the others end together.
        width: The most characters of a line; 0 if it does not matter.
        names: How many of the first columns name the rows.

    >>> aligned([("a", "12", "x"), ("bcd", "3", "")], left=(0, 2))
    ['a    12  x', 'bcd   3']
    >>> aligned([("a", "long words that go on"), ("b", "c")], left=(0, 1), width=14)
    ['a  long words', '   that go on', 'b  c']
    """
    listed = list(rows)
    widths = [max(map(len, column)) for column in zip(*listed, strict=True)]
    lines = [line for row in listed for line in _lines(row, widths, left)]
    if not width or all(len(line) <= width for line in lines):
        return lines
    named = names if len(widths) > 1 + names and _total(widths[:names]) <= _NAME_SHARE * width else 0
    texts = [index for index in left if named <= index < len(widths)]
    least, room = list(widths), list(widths)
    for index in texts:
        least[index] = _least([row[index] for row in listed])
        room[index] = max(least[index], min(widths[index], _USUAL_TEXT))
    while texts and _total(widths) > width:
        widest = max(texts, key=lambda index: widths[index] - least[index])
        if widths[widest] <= least[widest]:
            break
        widths[widest] -= 1
    if _total(widths) > width and len(widths) > 1 + names:
        return _panels(listed, left, width, room, names)
    if _total(widths) > width and texts:
        longest = max(texts, key=lambda index: widths[index])
        widths[longest] = max(1, widths[longest] - (_total(widths) - width))
    return [line for row in listed for line in _lines(row, widths, left)]


_NAME_SHARE = 0.6  # of a line: a first column that is narrower stays whole
_NARROWEST_TEXT, _LONGEST_WORD, _USUAL_TEXT = 16, 20, 30
_WHOLE: dict[str, Any] = {"break_on_hyphens": False, "break_long_words": True}


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + 2 * (len(widths) - 1)


def _least(cells: Sequence[str]) -> int:
    """How narrow a column of text may get: as wide as its usual words."""
    word = max((len(word) for cell in cells for word in cell.split()), default=0)
    return min(max(map(len, cells)), max(_NARROWEST_TEXT, min(word, _LONGEST_WORD)))


def _lines(row: Sequence[str], widths: Sequence[int], left: Collection[int]) -> Iterator[str]:
    """The lines of a row whose cells are wrapped to these widths."""
    parts = [
        wrap(cell, width, **_WHOLE) if len(cell) > width else [cell]
        for cell, width in zip(row, widths, strict=True)
    ]
    for cells in zip_longest(*parts, fillvalue=""):
        yield "  ".join(
            cell.ljust(width) if index in left else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ).rstrip()


def _panels(
    rows: list[Sequence[str]], left: Collection[int], width: int, room: list[int], names: int
) -> list[str]:
    """The table in parts, one below the other, each with the names and as many other columns as fit."""
    lines: list[str] = []
    taken = names
    while taken < len(room):
        shown = [*range(names)]
        for index in range(taken, len(room)):
            if len(shown) > names and _total([room[each] for each in (*shown, index)]) > width:
                break
            shown.append(index)
        lines += [""] if lines else []
        part = [[row[index] for index in shown] for row in rows]
        part = [row for row in part if any(row[names:])] if taken > names else part
        texts = [place for place, index in enumerate(shown) if index in left]
        lines += aligned(part, texts, width=width if len(shown) < len(room) else 0, names=names)
        taken = shown[-1] + 1
    return lines
