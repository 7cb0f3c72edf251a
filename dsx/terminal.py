"""Text on its way to a terminal: whatever the terminal would obey is made visible; sizes and tables as text.

Names of tensors, keys and values of a config, and the text that a model generates come from files of unknown
origin. An escape sequence in one could clear the screen, rewrite the lines above, or set the clipboard.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress

# C0 without tab and newline, DEL and C1; a carriage return that ends no line; line and paragraph separators;
# marks that change the direction of writing; halves of UTF-16 pairs, which cannot be encoded.
_OBEYED = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]|\r(?!\n)"
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


READER_GONE = 141
"""Exit code of a command whose output nobody reads to its end, as a shell says it: 128 + SIGPIPE."""


def lost_output(error: OSError) -> bool:
    """Whether ``error`` came of standard output, which then forgets what is still written to it.

    Its disk is full, or who read it has gone (``| head``): ``error.errno`` says which.
    """
    try:
        sys.stdout.write("\n")
        sys.stdout.flush()
    except OSError as again:
        found = again.errno == error.errno
    except ValueError:  # it is closed
        found = False
    else:
        found = False
    if found:
        with suppress(OSError, ValueError):  # or Python would try again at its end, and say so
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return found


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
    return ("GiB", 1 << 30) if size_bytes >= 1 << 30 else ("MiB", 1 << 20)


def aligned(rows: Iterable[Sequence[str]], left: Collection[int] = (0,)) -> list[str]:
    """A line per row, two spaces between columns, each as wide as its widest cell.

    Args:
        rows: Cells, as many in every row.
        left: Columns whose cells begin together; the cells of the others end together.

    >>> aligned([("a", "12", "x"), ("bcd", "3", "")], left=(0, 2))
    ['a    12  x', 'bcd   3']
    """
    listed = list(rows)
    widths = [max(map(len, column)) for column in zip(*listed, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if index in left else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in listed
    ]
