"""Text on its way to a terminal: whatever the terminal would obey is made visible.

Names of tensors, keys and values of a config, and the text that a model generates come from files of unknown
origin. An escape sequence in one could clear the screen, rewrite the lines above, or set the clipboard.
"""

from __future__ import annotations

import re

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
