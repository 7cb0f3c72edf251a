"""Values of a Hugging Face config, each checked as it is read.

Every function raises a ModelError that names the key, its value and what would be right. A config.json is
small whatever sizes it claims, and those are what everything is laid out by: each has a most.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from dsx.errors import ModelError
from dsx.terminal import shortened

MOST = 2**31 - 1
"""Of every size: what kernels number the elements of a dimension by."""

MOST_LAYERS = 2048
"""Twice those of the deepest published transformer, DeepNet (arXiv:2203.00555)."""

_SHOWN_CHARACTERS = 120


def at(key: str, value: object) -> str:
    """``key = value``, the place of an error; of a long value the beginning."""
    return f"{key} = {shortened(repr(value), _SHOWN_CHARACTERS)}"


def size(config: Mapping[str, object], key: str, default: int, *, most: int = MOST) -> int:
    """A whole number of at least 1."""
    value = config.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelError(at(key, value), "not a whole number of at least 1", "write a number, unquoted")
    if value > most:
        raise ModelError(at(key, value), f"dsx takes at most {most:,}", "write the model's own size")
    return value


def size_or(config: Mapping[str, object], key: str, default: int) -> int:
    """A size for which transformers also takes null, meaning the default."""
    return default if config.get(key) is None else size(config, key, default)


def size_or_none(config: Mapping[str, object], key: str, default: int | None) -> int | None:
    """A size that may be null, or have no default."""
    return None if config.get(key, default) is None else size(config, key, default or 0)


def number(config: Mapping[str, object], key: str, default: float | None) -> float:
    """A number; None as default means that the key is needed."""
    value = config.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        what = "is missing" if value is None else "is not a number"
        raise ModelError(at(key, value), what, "write a number, unquoted")
    try:
        return float(value)
    except OverflowError:
        raise ModelError(at(key, value), "beyond 1e308, which nothing can hold", "write a number") from None


def positive(config: Mapping[str, object], key: str, default: float | None) -> float:
    """A finite number above 0; None as default means that the key is needed."""
    value = number(config, key, default)
    if not 0.0 < value < float("inf"):
        raise ModelError(at(key, value), "not a finite number above 0", "use a positive number")
    return value


def probability(config: Mapping[str, object], key: str, default: float) -> float:
    """A dropout probability; null means the default."""
    value = default if config.get(key) is None else number(config, key, default)
    if not 0.0 <= value < 1.0:
        raise ModelError(at(key, value), "a dropout probability is in 0 <= p < 1", "use such a number")
    return value


def flag(config: Mapping[str, object], key: str, *, default: bool) -> bool:
    """True or false."""
    value = config.get(key, default)
    if not isinstance(value, bool):
        raise ModelError(at(key, value), "neither true nor false", "write true or false, unquoted")
    return value


def check_divides(whole_key: str, whole: int, part_key: str, part: int) -> None:
    """Refuse a whole that does not divide by its part."""
    if whole % part:
        small = [n for n in range(1, math.isqrt(whole) + 1) if whole % n == 0]
        legal = sorted({*small, *(whole // n for n in small)})
        raise ModelError(
            f"{part_key} = {part}", f"{whole_key} = {whole} does not divide by it", f"use one of {legal}"
        )


def check_even(key: str, value: int) -> None:
    """Refuse an odd part of a head that is to be rotated."""
    if value % 2 or not value:
        raise ModelError(f"{key} = {value}", "rotary embeddings turn pairs of elements", "use an even one")
