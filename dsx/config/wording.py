"""Words of error messages: a key with its value, the nearest known word, a list of choices."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Sequence

_MAX_VALUE_CHARACTERS = 80
_SUM_UP_AFTER = 12
# Above it, words differ by a slip of the finger.
_TYPO = 0.9


def show(value: object) -> str:
    """``value`` as JSON on one line, shortened."""
    text = json.dumps(value, default=str)
    return text if len(text) <= _MAX_VALUE_CHARACTERS else text[: _MAX_VALUE_CHARACTERS - 3] + "..."


def at(key: str, value: object) -> str:
    """``key = value``, the place of an error."""
    return f"{key} = {show(value)}"


def suggest(word: str, known: Iterable[str], *, otherwise: str = "remove it") -> str:
    """The fix for an unknown ``word``: the nearest known one, or all of them if none is near.

    Args:
        word: Unknown.
        known: What could be meant.
        otherwise: What to say when nothing is near, and there are too many to list.
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
    """The one known word that ``word`` begins with or holds as a part, unless another is nearly all of it.

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
