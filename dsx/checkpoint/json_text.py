"""JSON that somebody else may have made: read whole, as what it says, or refused; nothing in between."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

_MAX_DEPTH = 100
"""Deeper than any file of a checkpoint or model, and far from where Python's own recursion ends."""


def parsed(data: bytes | str, *, unique: bool = False, finite: bool = False) -> Any:
    """The value of a JSON text.

    Args:
        data: The text; bytes are UTF-8.
        unique: An object must not have a key twice.
        finite: NaN, Infinity and numbers that are too large for a float are refused, which JSON itself does
            not know, and Python reads.

    Raises:
        ValueError: No JSON, one that is nested more than 100 deep, a text in it that is no Unicode (half of a
            surrogate pair), or what ``unique`` and ``finite`` exclude.
    """
    text = data.decode("utf-8") if isinstance(data, bytes) else data
    more: dict[str, Any] = {"object_pairs_hook": _unique} if unique else {}
    if finite:
        more |= {"parse_constant": _finite, "parse_float": _finite}
    try:
        value = json.loads(text, **more)
    except RecursionError:
        raise ValueError(f"it is nested more than {_MAX_DEPTH} deep") from None
    check_plain(value, halves="\\ud" in text.casefold())
    return value


def check_plain(plain: Any, *, halves: bool = True) -> None:
    """Raise ValueError if plain values are nested too deep, or (``halves``) a text in them is no Unicode."""
    level = [plain]
    for _ in range(_MAX_DEPTH):
        if not level:
            return
        for value in level if halves else ():
            if isinstance(value, str) and not is_unicode(value):
                raise ValueError(f"the text {value[:40]!r} is no Unicode")
        level = [part for one in level for part in _parts(one)]
    raise ValueError(f"it is nested more than {_MAX_DEPTH} deep")


def _parts(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        yield from (part for part in value if isinstance(part, str))
        yield from value.values()
    elif isinstance(value, list):
        yield from (part for part in value if isinstance(part, dict | list | str))


def is_unicode(text: str) -> bool:
    """Whether a text has no half of a surrogate pair, which no file and no terminal takes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {twice[:100]!r} is there twice")
    return found


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]} is no number")
    return value
