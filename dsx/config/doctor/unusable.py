"""Values that a config can hold and no program can use: numbers beyond every float, halves of characters."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from dsx.config.doctor.finding import Path, dotted
from dsx.config.wording import show

# Half of a pair of UTF-16 units, which is no character: \ud83d without \ude00 behind it.
_HALF = re.compile("[\ud800-\udfff]")
# Objects in objects; DeepSpeed's deepest key has eight above it.
_MOST_LEVELS = 100
BEYOND = "a number beyond 1e308, which nothing can hold"


@dataclass(frozen=True, slots=True)
class Unusable:
    """One such value.

    Attributes:
        path: The key, or what holds a key that is none.
        what: What is wrong.
        fix: What to write.
    """

    path: Path
    what: str
    fix: str

    @property
    def key(self) -> str:
        """``path`` in characters that every terminal can show."""
        return dotted(self.path).encode("ascii", "backslashreplace").decode()


def is_finite(value: float) -> bool:
    """Whether a float can hold ``value``, and it is not inf or nan."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def unusable(node: object, *, infinite: bool = False, path: Path = ()) -> Iterator[Unusable]:
    """Every value in ``node`` that no program can use.

    Args:
        node: A config, or a part of it.
        infinite: Whether inf and nan are allowed, as in a dictionary that Python has made.
        path: Of ``node``.
    """
    if len(path) > _MOST_LEVELS:
        what = f"it holds more than {_MOST_LEVELS} objects or lists in one another"
        yield Unusable(path[:1], what, "write fewer")
    elif isinstance(node, Mapping):
        for key, value in node.items():
            if not isinstance(key, str):
                yield Unusable(path, f"it holds the key {show(key)}, which is no string", "put it in quotes")
            else:
                yield from _half(key, (*path, key), "the key ")
                yield from unusable(value, infinite=infinite, path=(*path, key))
    elif isinstance(node, list | tuple):
        for at, value in enumerate(node):
            yield from unusable(value, infinite=infinite, path=(*path, at))
    elif isinstance(node, str):
        yield from _half(node, path, "it ")
    elif isinstance(node, int) and not is_finite(node):
        yield Unusable(path, BEYOND, "write the number that is meant")
    elif isinstance(node, float) and not infinite and not is_finite(node):
        yield Unusable(path, f"{node} is no number of JSON's", "write the number that is meant")


def _half(word: str, path: Path, subject: str) -> Iterator[Unusable]:
    found = _HALF.search(word)
    if found is not None:
        shown = f"\\u{ord(found[0]):04x}"
        yield Unusable(path, f"{subject}holds {shown}, half of a character", "write the whole character")
