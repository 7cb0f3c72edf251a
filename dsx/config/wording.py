"""Words of error messages: a key with its value, the nearest known word, a list of choices."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Sequence

from dsx.errors import KeyPlace

Path = tuple[str | int, ...]
"""The path of a key, from the top of a config."""

_MAX_VALUE_CHARACTERS = 80
_SUM_UP_AFTER = 12
# Words more similar than this differ by a slip of the finger.
_TYPO = 0.9


def show(value: object) -> str:
    """``value`` as JSON on one line, shortened."""
    text = json.dumps(value, default=str)
    return text if len(text) <= _MAX_VALUE_CHARACTERS else text[: _MAX_VALUE_CHARACTERS - 3] + "..."


def dotted(path: Sequence[str | int]) -> str:
    """``("a", "b", 0)`` as ``a.b[0]``.

    >>> dotted(("scheduler", "params", "betas", 1))
    'scheduler.params.betas[1]'
    """
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")


def key(name: str) -> KeyPlace:
    """A key as the place of an error about something that is not written there.

    >>> key("dsx.data.sources[0].source").path
    ('dsx', 'data', 'sources', 0, 'source')
    """
    parts = re.findall(r"[^.\[\]]+", name)
    return KeyPlace(name, tuple(int(part) if part.isdigit() else part for part in parts))


def at(name: str, value: object) -> KeyPlace:
    """``key = value``, the place of an error."""
    return KeyPlace(f"{name} = {show(value)}", key(name).path, value)


def suggest(word: str, known: Iterable[str], *, otherwise: str = "remove it") -> str:
    """The fix for an unknown ``word``: the nearest known one, or all of them if none is near.

    Args:
        word: The unknown word.
        known: The words that could be meant.
        otherwise: The fix if no word is near, and there are too many to list.
    """
    known = sorted(known)
    if part := _part(word, known):
        return f'write "{part}", if that is meant'
    near = difflib.get_close_matches(word.lower(), [name.lower() for name in known], n=1, cutoff=0.6)
    if near:
        return f'write "{next(name for name in known if name.lower() == near[0])}", if that is meant'
    if len(known) > _SUM_UP_AFTER:
        return otherwise
    return f"use {either(known)}" if known else otherwise


def _part(word: str, known: Sequence[str]) -> str:
    """The only known word that ``word`` begins with or contains, unless another is nearly all of it.

    >>> _part("tensor_paralel", ["pipeline", "sequence_parallel", "tensor"])
    'tensor'
    >>> _part("sequence_paralel", ["pipeline", "sequence_parallel", "tensor"])
    ''
    """
    parts = set(word.lower().replace("-", "_").split("_"))
    found = [name for name in known if name.lower() in parts]
    is_typo = difflib.get_close_matches(word.lower(), known, n=1, cutoff=_TYPO)
    return found[0] if len(found) == 1 and not is_typo else ""


def plain(word: str) -> str:
    """``word`` without case and punctuation.

    >>> plain("Zero-Optimization")
    'zerooptimization'
    """
    return "".join(char for char in word.lower() if char.isalnum())


def either(options: Sequence[object]) -> str:
    """``1, 2 or 4``."""
    words = [str(option) for option in options]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"
