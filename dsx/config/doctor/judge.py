"""Whether a value fits the row of its key, and what DeepSpeed makes of it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

from dsx.config.doctor.key import Key, Kind
from dsx.config.doctor.unusable import is_finite
from dsx.config.wording import either

# What pydantic takes for a boolean in its default mode (docs.pydantic.dev, "Booleans").
_TRUE = {"1", "t", "true", "y", "yes", "on"}
_FALSE = {"0", "f", "false", "n", "no", "off"}
_NUMBER = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?")
_PYTHON = {"True": True, "False": False, "None": None}

_PLURALS = {"string": "strings", "int": "whole numbers", "float": "numbers"}

Fault = Literal["", "auto", "null", "quoted", "wrong-type", "out-of-range", "not-a-choice"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a value is for its key.

    Attributes:
        fault: Empty if it fits.
        meant: The value that was surely meant, where ``has_meant``; else the value itself.
        has_meant: Whether a machine may write ``meant`` instead.
        expected: What the key takes, in words.
    """

    fault: Fault
    meant: Any
    has_meant: bool
    expected: str


def judge(value: Any, key: Key) -> Verdict:
    """``value`` against ``key``."""
    expected = describe(key)
    if value == "auto" and key.auto == "meaning":
        return Verdict("", value, False, expected)
    # Where any string goes, it is a name like others.
    is_name = "any" in key.kinds or ("string" in key.kinds and not key.choices)
    if value == "auto" and not (is_name or "auto" in key.choices):
        return Verdict("auto", value, False, expected)
    if value is None:
        fits = "null" in key.kinds or "any" in key.kinds
        return Verdict("" if fits else "null", value, False, expected)
    if not any(_is(value, kind) for kind in key.kinds):
        meant = unquoted(value, key)
        if meant is not None:
            inner = _limits(meant, key)
            return Verdict(inner or "quoted", meant, not inner, expected)
        if _is_switch(value, key):
            return Verdict("wrong-type", bool(value), True, expected)
        return Verdict("wrong-type", value, False, expected)
    if isinstance(value, list) and key.items and not all(_is(item, key.items) for item in value):
        return Verdict("wrong-type", value, False, expected)
    return Verdict(_limits(value, key), value, False, expected)


def unquoted(value: Any, key: Key) -> Any | None:
    """The number or boolean that is written in a string, if the key takes one; else None.

    Python's ``True``, which HJSON reads as a string, and a comma that HJSON takes along, are seen too.
    """
    if not isinstance(value, str):
        return None
    word = value.strip().rstrip(",").strip()
    found: Any = None
    if word.lower() in ("true", "false"):
        found = word.lower() == "true"
    elif _NUMBER.fullmatch(word.replace("_", "")):
        word = word.replace("_", "")
        number = float(word)
        found = int(number) if is_finite(number) and number == int(number) and "." not in word else number
    return found if found is not None and any(_is(found, kind) for kind in key.kinds) else None


def converted(value: Any, key: Key) -> Any | None:
    """What pydantic makes of a value of another type, for a block that is read by it; None if it refuses."""
    if key.auto == "meaning":
        return None  # a string is as good as a number there, and is kept
    if isinstance(value, str):
        return _from_string(value.strip(), key)
    if isinstance(value, bool) and ("int" in key.kinds or "float" in key.kinds):
        return int(value)
    return bool(value) if _is_switch(value, key) else None


def _from_string(word: str, key: Key) -> Any | None:
    if "bool" in key.kinds and word.lower() in _TRUE | _FALSE:
        return word.lower() in _TRUE
    if "float" in key.kinds or "int" in key.kinds:
        try:
            number = float(word)
        except ValueError:
            return None
        if "float" in key.kinds:
            return number
        # Whole numbers are not read from exponents.
        return (
            int(number) if is_finite(number) and number == int(number) and "e" not in word.lower() else None
        )
    return None


def describe(key: Key) -> str:
    """What ``key`` takes, in words."""
    if key.choices:
        words = either([f'"{choice}"' if isinstance(choice, str) else str(choice) for choice in key.choices])
        return f"a list of {words}" if "list" in key.kinds else words
    nouns = {
        "bool": "true or false",
        "int": "a whole number",
        "float": "a number",
        "string": "a string",
        "object": "an object {...}",
        "list": f"a list of {_PLURALS[key.items]}" if key.items in _PLURALS else "a list [...]",
        "any": "a value",
    }
    text = " or ".join(nouns[kind] for kind in key.kinds if kind != "null") or "anything that JSON can say"
    return text + _bounds(key)


def _bounds(key: Key) -> str:
    low = "" if key.low is None else f"{key.low:g}"
    if key.low is not None and key.high is not None:
        return f" from {low} to {key.high:g}"
    if key.high is not None:
        return f" of at most {key.high:g}"
    if not low:
        return ""
    return f" above {low}" if key.low_open else f" of at least {low}"


def _is_switch(value: object, key: Key) -> bool:
    """0 and 1 for a boolean."""
    return "bool" in key.kinds and isinstance(value, int | float) and value in (0, 1)


def _is(value: Any, kind: Kind) -> bool:
    if kind == "any":
        return True
    if kind in ("int", "float"):
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        return kind == "float" or (is_finite(value) and value == int(value))
    types: dict[str, type] = {"bool": bool, "string": str, "object": dict, "list": list, "null": type(None)}
    return isinstance(value, types[kind])


def _limits(value: Any, key: Key) -> Literal["", "out-of-range", "not-a-choice"]:
    if key.choices and isinstance(value, list):
        return "" if all(item in key.choices for item in value) else "not-a-choice"
    if key.choices and not isinstance(value, bool | dict):
        if value in key.choices:
            return ""
        lower = [choice.lower() for choice in key.choices if isinstance(choice, str)]
        return "" if key.any_case and isinstance(value, str) and value.lower() in lower else "not-a-choice"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return ""
    if not is_finite(value):
        return "out-of-range"
    below = key.low is not None and (value < key.low or (key.low_open and value == key.low))
    return "out-of-range" if below or (key.high is not None and value > key.high) else ""


def python_word(value: object) -> bool:
    """Whether the value is a Python constant that HJSON read as a string."""
    return isinstance(value, str) and value.strip().rstrip(",") in _PYTHON
