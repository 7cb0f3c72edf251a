"""Rows of the reference: what one key, and one block of keys, of DeepSpeed's JSON is."""

from __future__ import annotations

import importlib.metadata
import re
from dataclasses import dataclass
from typing import Any, Literal

from dsx.errors import ConfigError

Version = tuple[int, ...]

# What the reference and the checks describe.
REFERENCE: Version = (0, 19, 8)


def version(text: str) -> Version:
    """``0.19.8`` as numbers; what follows them (``+cu121``, ``rc1``) is left out.

    Raises:
        ConfigError: It is no version.
    """
    found = re.match(r"v?(\d+)\.(\d+)(?:\.(\d+))?", text.strip())
    if found is None:
        raise ConfigError(f"version {text}", "it is no version number", "write one such as 0.16.4")
    return tuple(int(part or 0) for part in found.groups())


def shown(number: Version) -> str:
    """``(0, 19, 8)`` as ``0.19.8``."""
    return ".".join(map(str, number))


def installed() -> Version:
    """The installed DeepSpeed's; the reference's if there is none."""
    try:
        return version(importlib.metadata.version("deepspeed"))
    except importlib.metadata.PackageNotFoundError:
        return REFERENCE


Kind = Literal["bool", "int", "float", "string", "object", "list", "null", "any"]
Operator = Literal["<", "<=", "==", "!=", ">=", ">", "missing", "given", "falsy", "truthy"]


class _Required:
    """The default of a key that has none."""

    def __repr__(self) -> str:
        return "required"


REQUIRED = _Required()


@dataclass(frozen=True, slots=True)
class When:
    """A condition on the config, as data: ``key operator value``.

    ``key`` is dotted; a key that is not written has its default from the reference.
    """

    key: str
    operator: Operator
    value: Any = None


@dataclass(frozen=True, slots=True)
class NoEffect:
    """The key does nothing when all of ``conditions`` hold, because of ``why`` (a clause, no full stop)."""

    conditions: tuple[When, ...]
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One key.

    Attributes:
        path: Dotted, from the top: ``zero_optimization.offload_param.device``.
        kinds: JSON types that mean something here ("float" takes ints too; "int" takes 5e8).
        default: JSON value that DeepSpeed uses when the key is absent, or REQUIRED (within its block).
        effect: What it does, one line in our words.
        variant: Of a block whose keys depend on a name: the optimizer's or scheduler's type in DeepSpeed's
            spelling in lower case (``adamw``, ``warmuplr``); empty elsewhere.
        choices: The only values allowed, of a list the only items; strings are compared in lower case if
            ``any_case``.
        items: JSON type of a list's items; empty if they are of several, or judged elsewhere.
        low, high: Inclusive bounds; with ``low_open`` the lower one is exclusive.
        unit: "elements", "bytes", "steps", "seconds", "ranks" ... or empty.
        no_effect: When it does nothing.
        status: "deprecated" still works (replacement, if there is one), "removed" is refused by the version
            in ``until``, "dead" is accepted and never read.
        since, until: First version that reads it, first version that does not; empty: before 0.9, still.
        replacement: Dotted key that replaces it.
        auto: What the word "auto" does in DeepSpeed itself here: "default" (dropped: the default is used),
            "meaning" (it is a value of its own), "kept" (the string is used as if it were the value: wrong).
        trainer_auto: Whether transformers' Trainer fills in "auto" here.
        aliases: Other spellings of the last part that DeepSpeed takes for the same key.
        source: ``file:line`` or class in DeepSpeed 0.19.8, below deepspeed/.
    """

    path: str
    kinds: tuple[Kind, ...]
    default: Any
    effect: str
    source: str
    variant: str = ""
    choices: tuple[Any, ...] = ()
    items: Kind | Literal[""] = ""
    any_case: bool = False
    low: float | None = None
    high: float | None = None
    low_open: bool = False
    unit: str = ""
    no_effect: tuple[NoEffect, ...] = ()
    status: Literal["live", "deprecated", "removed", "dead"] = "live"
    since: str = ""
    until: str = ""
    replacement: str = ""
    auto: Literal["default", "meaning", "kept"] = "kept"
    trainer_auto: bool = False
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyBlock:
    """One object of the JSON, and how DeepSpeed treats what is in it.

    Attributes:
        path: Dotted; empty for the top level.
        unknown: What DeepSpeed does with a key that it does not know: "refused" (an error), "ignored"
            (silence), "free" (names are the user's own: nothing is unknown).
        types: "coerced" (pydantic: "5" becomes 5, "true" becomes true, what cannot be is an error) or
            "raw" (used as written: a quoted number fails late or misbehaves).
        variant: As in Key, for ``optimizer.params`` and ``scheduler.params``.
        source: As in Key.
    """

    path: str
    unknown: Literal["refused", "ignored", "free"]
    types: Literal["coerced", "raw"]
    source: str
    variant: str = ""
