"""Read a DeepSpeed JSON (HJSON comments allowed) with a ``dsx`` block, and say what is wrong with it."""

from __future__ import annotations

import copy
import difflib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from dsx.config.document import from_text, is_finite, read_text, refuse, unusable
from dsx.config.keys import reference
from dsx.config.schema import DsxConfig
from dsx.config.wording import (
    HIDDEN_HERE,
    at,
    dotted,
    either,
    hidden_in,
    item_without_secrets,
    key,
    plain,
    suggest,
)
from dsx.config.wording import Path as KeyPath
from dsx.errors import ConfigError, DsxError, KeyPlace
from dsx.models.config_values import unquantized


class SeveralProblemsError(ConfigError):
    """More than one problem as one error; ``problems`` has them one by one."""

    problems: tuple[ConfigError, ...] = ()


def raise_all(source: str, problems: Sequence[ConfigError]) -> None:
    """Raise ``problems`` as one error, or return if there are none."""
    if not problems:
        return
    if len(problems) == 1:
        raise problems[0]
    lines = "".join(f"\n  - {problem}" for problem in problems)
    error = SeveralProblemsError(source, f"{len(problems)} problems", f"mend each:{lines}")
    error.problems = tuple(problems)
    raise error


_TOLD = "--set)"
_MODEL = "dsx.model.overrides."


@contextmanager
def told_of_set(overrides: Sequence[str]) -> Iterator[None]:
    """Inside the block, errors say which values ``overrides`` (``key=value`` items) have put there."""
    try:
        yield
    except DsxError as error:
        keys = [item.partition("=")[0].strip() for item in overrides]
        told = _told(error, keys)
        if told is error:
            raise
        for note in getattr(error, "__notes__", ()):
            told.add_note(note)
        raise told from None


def _told(error: DsxError, keys: Sequence[str]) -> DsxError:
    """The error that names the keys of ``--set`` which it is about; itself if it is about none."""
    if isinstance(error, SeveralProblemsError):
        problems = [_told(problem, keys) for problem in error.problems]
        if all(one is other for one, other in zip(problems, error.problems, strict=True)):
            return error
        try:
            raise_all(error.where, [each for each in problems if isinstance(each, ConfigError)])
        except ConfigError as several:
            return several
    found = [key for key in dict.fromkeys(keys) if _is_about(error, key)]
    if not found or error.where.endswith(_TOLD) or error.where.startswith("--set "):
        return error
    alone = error.where.count(" = ") < 2
    where = f"{error.where} ({_TOLD}" if alone else f"{error.where} ({', '.join(found)} by {_TOLD}"
    return type(error)(KeyPlace(where, error.path, error.value), error.what, error.fix)


def _is_about(error: DsxError, key: str) -> bool:
    parts = key.split(".")
    if [str(part) for part in error.path[: len(parts)]] == parts:
        return True
    # A model's own keys are told by their names in its config.json.
    names = [key, key.removeprefix(_MODEL)] if key.startswith(_MODEL) else [key]
    return any(re.search(rf"(?<![\w.]){re.escape(name)}(?!\w)", error.where) for name in names)


def explain(
    error: ValidationError, data: Mapping[str, Any], model: type[BaseModel], block: KeyPath = ()
) -> list[ConfigError]:
    """One ConfigError per key that pydantic refused in ``data``, the value of ``block``."""
    by_path: dict[KeyPath, ErrorDetails] = {}
    for item in error.errors():
        by_path.setdefault(_path(item["loc"], data, item["type"]), item)
    schema = model.model_json_schema()
    # A wrong list item also fails the other members of a union as a whole; the item's own error is clearer.
    outer = {path[:i] for path in by_path for i in range(len(path))}
    return [
        _problem(path, reason, data, schema, block) for path, reason in by_path.items() if path not in outer
    ]


def _path(loc: Sequence[str | int], data: object, kind: str) -> KeyPath:
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
    path: KeyPath,
    reason: ErrorDetails,
    data: Mapping[str, Any],
    schema: dict[str, Any],
    block: KeyPath,
) -> ConfigError:
    name, kind = dotted((*block, *path)), reason["type"]
    if kind == "missing":
        field = _field(schema, path)
        fix = f"set it to {_expected(field, schema)}{_hint(field)}"
        return ConfigError(key(name), "this key is needed", fix)
    value: Any = data
    for part in path:
        value = value[part]
    where = at(name, value)
    if kind == "extra_forbidden":
        owner = _resolve(_field(schema, path[:-1]), schema)
        siblings = owner.get("properties", {})
        for meant, pattern in owner.get("meant_by", {}).items():
            if re.fullmatch(pattern, plain(str(path[-1]))):
                return ConfigError(where, "unknown key", suggest(meant, siblings) + _hint(siblings[meant]))
        if reference().key(str(path[-1])):
            fix = "move it to the top level, beside dsx"
            return ConfigError(where, "a key of DeepSpeed's, not of dsx's", fix)
        return ConfigError(where, "unknown key", suggest(str(path[-1]), siblings))
    if kind == "value_error":
        mistake = reason["ctx"]["error"]
        return ConfigError(where, str(mistake), getattr(mistake, "fix", "give exactly one of them"))
    field = _field(schema, path)
    expected = _expected(field, schema)
    if isinstance(value, str) and re.fullmatch(r"-?\d+(\.\d+)?|true|false", value):
        return ConfigError(where, f"a string, not {expected}", f"remove the quotes: {value}")
    names = list(_names(field, schema))
    if isinstance(value, str) and difflib.get_close_matches(value.lower(), names, n=1):
        return ConfigError(where, f"not {expected}", suggest(value, names))
    return ConfigError(where, "not a value for this key", f"use {expected}{_hint(field)}")


def _names(field: dict[str, Any], schema: dict[str, Any]) -> Iterator[str]:
    own = _resolve(field, schema)
    for option in own.get("anyOf", ()):
        yield from _names(option, schema)
    yield from (name for name in own.get("enum", [own.get("const")]) if isinstance(name, str))


def _hint(field: dict[str, Any]) -> str:
    description = str(field.get("description", "")).rstrip(".")
    return f" ({description})" if description else ""


def _resolve(field: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    """``field`` itself: what it refers to, also where null would be allowed."""
    links = (option["$ref"] for option in (field, *field.get("anyOf", [])) if "$ref" in option)
    link = next(links, None)
    return schema["$defs"][link.rsplit("/", 1)[1]] if link else field


def _field(schema: dict[str, Any], path: Sequence[str | int]) -> dict[str, Any]:
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
    low, below, high = (field.get(key) for key in ("minimum", "exclusiveMaximum", "maximum"))
    if field.get("exclusiveMinimum") is not None:
        return f"{noun} greater than {field['exclusiveMinimum']:g}"
    if low is not None and below is not None:
        return f"{noun} from {low:g} up to, not including, {below:g}"
    if low is not None and high is not None:
        return f"{noun} from {low:g} to {high:.12g}"
    return noun if low is None else f"{noun} of at least {low:g}"


_SET_EXAMPLE = "write --set dsx.parallel.tensor=4"


def load(
    source: str | Path | Mapping[str, Any], overrides: Sequence[str] = ()
) -> tuple[dict[str, Any], DsxConfig]:
    """DeepSpeed's part of the config, and the validated ``dsx`` block."""
    name = "config" if isinstance(source, Mapping) else str(source)
    content = content_of(source, overrides)
    block = content.pop("dsx", None)
    if block is None:
        raise ConfigError(f"{name}: dsx", "the config has no dsx block", 'add "dsx": {...}; see `dsx schema`')
    if not isinstance(block, dict):
        raise ConfigError(at("dsx", block), "it must be an object {...}", "see `dsx schema`")
    for problem in unusable(block, path=("dsx",)):
        raise ConfigError(KeyPlace(problem.key, problem.path), problem.what, problem.fix)
    try:
        # JSON mode: lists and numbers are judged as JSON has them, not as Python converts them.
        return content, DsxConfig.model_validate_json(json.dumps(block))
    except ValidationError as error:
        problems = explain(error, block, DsxConfig, ("dsx",))
    raise_all(name, problems)
    raise AssertionError(problems)


def content_of(source: str | Path | Mapping[str, Any], overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The whole content of a config, with ``overrides`` put over it. Raises ConfigError."""
    content = copy.deepcopy(dict(source)) if isinstance(source, Mapping) else read(Path(source))
    for item in overrides:
        override(content, item)
    refuse_hidden(content, "config" if isinstance(source, Mapping) else str(source))
    block = content.get("dsx")
    model = block.get("model") if isinstance(block, dict) else None
    if isinstance(model, dict):
        model.update({key: _words_for_floats(model[key]) for key in _HUGGING_FACE if key in model})
    return content


def refuse_hidden(content: Mapping[str, Any], source: str) -> None:
    """Raise a ConfigError about the secrets that dsx hid when it wrote ``content``, if there are any."""
    problems = [ConfigError(at(dotted(path), text), *HIDDEN_HERE) for path, text in hidden_in(content)]
    raise_all(source, problems)


_HUGGING_FACE = ("config", "overrides")  # keys of dsx.model whose values are those of a config.json


def _words_for_floats(node: Any) -> Any:
    """``node`` with infinities and NaN as transformers 5 writes and reads them: {"__float__": "Infinity"}.

    Published files (Mamba2's, Bamba's) have them as Python's json does, and these are no JSON.
    """
    if isinstance(node, dict):
        return {key: _words_for_floats(value) for key, value in node.items()}
    if isinstance(node, list | tuple):
        return [_words_for_floats(value) for value in node]
    return {"__float__": json.dumps(node)} if isinstance(node, float) and not is_finite(node) else node


def read_hf_config(path: Path) -> dict[str, Any]:
    """The content of a model's config.json, infinities and NaN as above, as that of plain weights.

    Raises:
        ConfigError: It cannot be read.
        ModelError: The weights are quantised in a way that dsx does not read.
    """
    content: dict[str, Any] = _words_for_floats(read(path, infinite=lambda _value, _name: True))
    return unquantized(content)


def _may_be_infinite(value: float, name: str) -> bool:
    is_model = name.startswith(tuple(f"dsx.model.{key}." for key in _HUGGING_FACE))
    return is_model or reference().is_infinite(value, name)


def read(
    path: Path | Traversable, *, infinite: Callable[[float, str], bool] = _may_be_infinite
) -> dict[str, Any]:
    """The object in the JSON or HJSON file at ``path``. Raises ConfigError.

    ``infinite`` says whether an infinity or NaN is allowed, by the value and its dotted key.
    """
    where = str(path)
    source = from_text(read_text(path), where)
    refuse(source, unusable(source.config, infinite=infinite))
    for twice, lines in source.twice():
        place = f" (lines {', '.join(map(str, lines))})" if len(set(lines)) > 1 else ""
        raise ConfigError(f"{where}: {dotted(twice)}", f"the key is written twice{place}", "keep one of them")
    return source.config


def override(content: dict[str, Any], item: str) -> KeyPath:
    """Set one ``a.b.c=value`` in ``content`` in place, and return its path; missing objects are made.

    The value is read as JSON, and taken as a plain string if it is none.

    >>> content = {"zero_optimization": {"stage": 1}}
    >>> override(content, "zero_optimization.stage=3")
    ('zero_optimization', 'stage')
    >>> override(content, "dsx.train.output=runs/a")
    ('dsx', 'train', 'output')
    >>> content
    {'zero_optimization': {'stage': 3}, 'dsx': {'train': {'output': 'runs/a'}}}
    """
    name, separator, text = item.partition("=")
    parts = name.strip().split(".")
    if not separator:
        raise ConfigError(f"--set {item}", "there is no =", _SET_EXAMPLE)
    if not all(parts):
        raise ConfigError(f"--set {item_without_secrets(item)}", "the key has an empty part", _SET_EXAMPLE)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = text
    node = content
    for i, part in enumerate(parts[:-1]):
        inner = node.setdefault(part, {})
        if not isinstance(inner, dict):
            owner = ".".join(parts[: i + 1])
            where = f"--set {item_without_secrets(item)}"
            raise ConfigError(where, f"{at(owner, inner)} is no object", f"set {owner} itself")
        node = inner
    node[parts[-1]] = value
    return tuple(parts)
