"""What may reach a terminal: text from a file, with everything in it that a terminal would obey made visible.

Names of tensors, keys and values of a config, and what a model writes come from files that somebody else
made. An escape sequence in one could clear the screen, rewrite lines above, or set the clipboard.
"""

from __future__ import annotations

import re

# C0 without tab and newline, DEL and C1; a carriage return unless it is half of a line's end; line and
# paragraph separators; what turns the direction of writing; halves of UTF-16 pairs, which cannot be encoded.
_OBEYED = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]|\r(?!\n)"
)


def printable(text: str) -> str:
    r"""``text`` with the characters that a terminal obeys instead of showing written as JSON escapes.

    What is JSON stays JSON of the same meaning. Tabs and ends of lines stay.

    >>> print(printable("layer\x1b[2J"))
    layer\u001b[2J
    """
    return _OBEYED.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def shortened(text: str, most: int) -> str:
    """At most ``most`` characters of ``text``, and how many it had.

    >>> shortened("abcdefgh", 4)
    'abcd... (8 characters)'
    """
    return text if len(text) <= most else f"{text[:most]}... ({len(text):,} characters)"
