"""Turn what is wrong with a config into ConfigErrors that name the key, the value, the reason and the fix."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

from dsx.config.doctor.reference import KEYS
from dsx.config.wording import at, either, show, suggest
from dsx.errors import ConfigError

__all__ = ["at", "either", "explain", "raise_all", "show", "suggest"]


class SeveralProblemsError(ConfigError):
    """More than one problem, told as one error; ``problems`` has them one by one."""

    problems: tuple[ConfigError, ...] = ()


def raise_all(source: str, problems: Sequence[ConfigError]) -> None:
    """Raise ``problems`` as one error; nothing for none."""
    if not problems:
        return
    if len(problems) == 1:
        raise problems[0]
    lines = "".join(f"\n  - {problem}" for problem in problems)
    error = SeveralProblemsError(source, f"{len(problems)} problems", f"mend each:{lines}")
    error.problems = tuple(problems)
    raise error


def explain(error: ValidationError, data: Mapping[str, Any], model: type[BaseModel]) -> list[ConfigError]:
    """One ConfigError per key that pydantic refused in ``data``, the value of the ``dsx`` block."""
    by_path: dict[tuple[str | int, ...], list[tuple[str, str]]] = {}
    for item in error.errors():
        path = _path(item["loc"], data, item["type"])
        by_path.setdefault(path, []).append((item["type"], item["msg"]))
    schema = model.model_json_schema()
    # A wrong list item also fails the other members of a union, as a whole: the item says it better.
    outer = {path[:i] for path in by_path for i in range(len(path))}
    return [_problem(path, reasons, data, schema) for path, reasons in by_path.items() if path not in outer]


def _path(loc: Sequence[str | int], data: object, kind: str) -> tuple[str | int, ...]:
    """Keys of ``loc``, without the names of union members that pydantic puts between them."""
    path: list[str | int] = []
    for i, part in enumerate(loc):
        inside = (isinstance(data, Mapping) and part in data) or (
            isinstance(data, list) and isinstance(part, int) and part < len(data)
        )
        if inside:
            data = data[part]  # type: ignore[index]
            path.append(part)
        elif kind == "missing" and i == len(loc) - 1:
            path.append(part)
    return tuple(path)


def _problem(
    path: tuple[str | int, ...],
    reasons: list[tuple[str, str]],
    data: Mapping[str, Any],
    schema: dict[str, Any],
) -> ConfigError:
    key = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in ("dsx", *path))[1:]
    kind, message = reasons[0]
    if kind == "missing":
        field = _field(schema, path)
        return ConfigError(key, "this key is needed", f"set it to {_expected(field, schema)}{_hint(field)}")
    value: Any = data
    for part in path:
        value = value[part]
    if kind == "extra_forbidden":
        siblings = _resolve(_field(schema, path[:-1]), schema).get("properties", {})
        if any(known.path == path[-1] for known in KEYS):
            fix = "move it to the top level, beside dsx"
            return ConfigError(at(key, value), "a key of DeepSpeed's, not of dsx's", fix)
        return ConfigError(at(key, value), "unknown key", suggest(str(path[-1]), siblings))
    if kind == "value_error":
        # A validator may say how to mend what it found; most are about keys that exclude each other.
        what, _, fix = message.removeprefix("Value error, ").partition(". Fix: ")
        return ConfigError(at(key, value), what, fix or "give exactly one of them")
    field = _field(schema, path)
    expected = _expected(field, schema)
    if isinstance(value, str) and re.fullmatch(r"-?\d+(\.\d+)?|true|false", value):
        return ConfigError(at(key, value), f"a string, not {expected}", f"remove the quotes: {value}")
    names = re.findall(r'"([^"]+)"', expected)
    if isinstance(value, str) and difflib.get_close_matches(value.lower(), names, n=1):
        return ConfigError(at(key, value), f"not {expected}", suggest(value, names))
    return ConfigError(at(key, value), "not a value for this key", f"use {expected}{_hint(field)}")


def _hint(field: dict[str, Any]) -> str:
    description = str(field.get("description", "")).rstrip(".")
    return f" ({description})" if description else ""


def _resolve(field: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    """``field`` itself: what it refers to, also where null would do."""
    reference = next(
        (option["$ref"] for option in (field, *field.get("anyOf", [])) if "$ref" in option), None
    )
    return schema["$defs"][reference.rsplit("/", 1)[1]] if reference else field


def _field(schema: dict[str, Any], path: Sequence[str | int]) -> dict[str, Any]:
    """The part of the JSON Schema that describes the key at ``path``."""
    field = schema
    for part in path:
        owner = _resolve(field, schema)
        if isinstance(part, int):
            lists = [owner, *owner.get("anyOf", [])]
            field = next((option["items"] for option in lists if "items" in option), {})
        else:
            field = owner.get("properties", {}).get(part, {})
    return field


def _expected(field: dict[str, Any], schema: dict[str, Any]) -> str:
    """What the JSON Schema ``field`` accepts, in words."""
    own = _resolve(field, schema)
    if "anyOf" in own:
        options = [_expected(option, schema) for option in own["anyOf"] if option.get("type") != "null"]
        return " or ".join(options)
    if "const" in own or "enum" in own:
        return either([f'"{name}"' for name in own.get("enum", [own.get("const")])])
    kind = own.get("type")
    if kind in ("integer", "number"):
        return _number(own, "a whole number" if kind == "integer" else "a number")
    if kind == "string" and "pattern" in own:
        return f"a string like {own['pattern'].strip('^$').replace('.+', '<regex>')}"
    if kind == "array":
        return f"a list, each {_expected(own['items'], schema)}"
    if own.get("required"):
        return f"an object {{...}} with {', '.join(own['required'])}"
    words = {"boolean": "true or false", "object": "an object {...}", "string": "a string"}
    text = words.get(str(kind), "a value")
    return f"{text} that is not empty" if own.get("minLength") else text


def _number(field: dict[str, Any], noun: str) -> str:
    low, below = field.get("minimum"), field.get("exclusiveMaximum")
    if field.get("exclusiveMinimum") is not None:
        return f"{noun} greater than {field['exclusiveMinimum']:g}"
    if low is not None and below is not None:
        return f"{noun} from {low:g} up to, not including, {below:g}"
    return noun if low is None else f"{noun} of at least {low:g}"
