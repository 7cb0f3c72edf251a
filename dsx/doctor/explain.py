"""``dsx check --explain KEY``: what the reference says of one key of DeepSpeed's JSON.

It also knows keys that DeepSpeed's documentation still describes though 0.19.8 refuses their whole block; the
doctor reports the block.
"""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Iterable, Sequence
from functools import cache
from importlib.resources import files
from typing import Any, Final

from dsx.config.keys import REQUIRED, Key, KeyBlock, NoEffect, When, describe, reference
from dsx.errors import ConfigError

_OPERATORS: Final = {
    "==": "is",
    "!=": "is not",
    "<": "is below",
    ">": "is above",
    "<=": "is at most",
    ">=": "is at least",
}
_MOST_SHOWN: Final = 12


@cache
def documented() -> tuple[Key, ...]:
    """Keys that DeepSpeed's documentation still describes, inside blocks that are refused as a whole."""
    content = tomllib.loads((files("dsx.doctor") / "documented.toml").read_text(encoding="utf-8"))
    return tuple(
        Key(
            path=f"{block['path']}.{name}",
            kinds=("any",),
            default=None,
            effect=effect,
            source="docs/_pages/config-json.md",
            variant=block.get("variant", ""),
            status="removed",
            until=block["until"],
            replacement=block["replacement"],
        )
        for block in content["block"]
        for name, effect in block["effects"].items()
    )


@cache
def _all() -> tuple[Key, ...]:
    return (*reference().rows, *documented())


def explain(path: str) -> str:
    """A key's type, default, effect and history, what ignores it, and where DeepSpeed reads it.

    Args:
        path: Dotted key, the end of one that no other key has, or the name of an optimizer or scheduler.

    >>> print(explain("prefetch_bucket_size"))  # doctest: +ELLIPSIS
    zero_optimization.stage3_prefetch_bucket_size
      parameter elements gathered ahead of their use
      type      a whole number of at least 0, in elements
      default   50000000
      also      prefetch_bucket_size
      ignored   if zero_optimization.stage is below 3: only ZeRO-3 partitions parameters
      ...
    """
    return "\n\n".join(_text(rows) for rows in _found(path))


def explain_json(path: str) -> dict[str, Any]:
    """As ``explain``, for programs: one item per variant (optimizer or scheduler) of the key."""
    return {"keys": [_json(key) for rows in _found(path) for key in rows]}


def _found(path: str) -> list[list[Key]]:
    """The rows of one key (with its variants), or of a whole optimizer or scheduler, grouped by key."""
    word = path.strip().strip(".")
    rows = [key for key in _all() if word in _spellings(key)]
    if not rows:
        rows = [key for key in _all() if any(name.endswith(f".{word}") for name in _spellings(key))]
    if not rows and word:
        # An optimizer or scheduler by its own name, such as WarmupLR, needs no unique end.
        rows = [key for key in _all() if key.variant == word.lower()]
        return [[key] for key in rows] if rows else _unknown(path)
    # Where a former block had a key of that name too, the one that DeepSpeed still has is meant.
    rows = [key for key in rows if key.status != "removed"] or rows
    paths = sorted({key.path for key in rows})
    if len(paths) > 1:
        shown = ", ".join(paths[:_MOST_SHOWN]) + (" ..." if len(paths) > _MOST_SHOWN else "")
        raise ConfigError(f"--explain {path}", f"{len(paths)} keys end so", f"name one in full: {shown}")
    alike: dict[tuple[str, tuple[str, ...]], list[Key]] = {}
    for key in rows:
        alike.setdefault((key.effect, key.kinds), []).append(key)
    return list(alike.values()) or _unknown(path)


def _spellings(key: Key) -> list[str]:
    owner, _, last = key.path.rpartition(".")
    return [f"{owner}.{name}".removeprefix(".") for name in (last, *key.aliases)]


def _unknown(path: str) -> list[list[Key]]:
    names = {name: key.path for key in _all() for name in (*_spellings(key), key.path.rpartition(".")[2])}
    near = difflib.get_close_matches(path.lower(), names, n=3, cutoff=0.7)
    likely = " or ".join(dict.fromkeys(names[name] for name in near))
    fix = f"write {likely}, if that is meant" if near else "see `dsx check --help`"
    raise ConfigError(f"--explain {path}", "DeepSpeed 0.19.8 knows no such key", fix)


def _text(rows: Sequence[Key]) -> str:
    key = rows[0]
    lines = [("type", _type(key)), ("default", _defaults(rows))]
    lines += [("also", ", ".join(key.aliases))] if key.aliases else []
    lines += [("ignored", _cause(cause)) for cause in key.no_effect]
    lines += [('"auto"', text) for text in _auto(key)]
    lines += [("history", text) for text in _history(key)]
    block = next((block for block in reference().objects if block.path == key.path), None)
    if block is not None:
        lines.append(("keys", _members(key.path)))
        lines.append(("unknown", _UNKNOWN[block.unknown]))
    lines.append(("source", f"deepspeed/{key.source}" if "/" in key.source else key.source))
    body = "".join(f"\n  {word:<9} {text}" for word, text in lines)
    return f"{key.path}\n  {key.effect}{body}"


_UNKNOWN: Final[dict[str, str]] = {
    "refused": "keys that DeepSpeed does not know are an error",
    "ignored": "keys that DeepSpeed does not know are ignored in silence",
    "free": "any key is allowed",
}


def _type(key: Key) -> str:
    null = " or null" if "null" in key.kinds and len(key.kinds) > 1 else ""
    case = ", in any case" if key.any_case else ""
    unit = f", in {key.unit}" if key.unit else ""
    return f"{describe(key)}{null}{case}{unit}" if key.kinds else "no value that JSON can say"


def _defaults(rows: Sequence[Key]) -> str:
    owners: dict[str, list[str]] = {}
    for key in rows:
        text = "none: it is needed" if key.default is REQUIRED else json.dumps(key.default)
        owners.setdefault(text, []).append(key.variant)
    return "; ".join(f"{text} ({', '.join(of)})" if of[0] else text for text, of in owners.items())


def _cause(cause: NoEffect) -> str:
    return f"if {' and '.join(map(_condition, cause.conditions))}: {cause.why}"


def _condition(condition: When) -> str:
    words = {"missing": "is absent", "given": "is given", "falsy": "is off", "truthy": "is on"}
    if condition.operator in words:
        return f"{condition.key} {words[condition.operator]}"
    return f"{condition.key} {_OPERATORS[condition.operator]} {json.dumps(condition.value)}"


def _auto(key: Key) -> Iterable[str]:
    if key.auto == "meaning":
        yield "a value of its own"
    elif key.trainer_auto:
        yield "transformers' Trainer or Accelerate fill it in; DeepSpeed alone " + (
            "uses the default" if key.auto == "default" else "takes it for the value"
        )


def _history(key: Key) -> Iterable[str]:
    if key.since:
        yield f"since {key.since}"
    if key.status == "removed":
        yield f"refused since {key.until}" if key.until else "refused"
    elif key.status == "dead":
        yield f"ignored since {key.until}" if key.until else "accepted, and read by nothing"
    elif key.status == "deprecated":
        yield "deprecated"
    if key.replacement:
        yield f"use {key.replacement}"


def _members(path: str) -> str:
    names = [key.path.removeprefix(f"{path}.") for key in _all() if key.path.startswith(f"{path}.")]
    return ", ".join(dict.fromkeys(name for name in names if "." not in name)) or "any"


def _json(key: Key) -> dict[str, Any]:
    block = next(
        (block for block in reference().objects if (block.path, block.variant) == (key.path, key.variant)),
        None,
    )
    return {
        "path": key.path,
        "variant": key.variant or None,
        "effect": key.effect,
        "types": list(key.kinds),
        "default": None if key.default is REQUIRED else key.default,
        "required": key.default is REQUIRED,
        "choices": list(key.choices) or None,
        "minimum": key.low,
        "minimum_exclusive": key.low_open,
        "maximum": key.high,
        "unit": key.unit or None,
        "aliases": list(key.aliases),
        "ignored_if": [_cause(cause).removeprefix("if ") for cause in key.no_effect],
        "auto": key.auto,
        "auto_filled_by_trainer": key.trainer_auto,
        "status": key.status,
        "since": key.since or None,
        "until": key.until or None,
        "replacement": key.replacement or None,
        "unknown_keys": block.unknown if isinstance(block, KeyBlock) else None,
        "source": key.source,
    }
