"""Read a DeepSpeed JSON (HJSON comments allowed) with a ``dsx`` block, and put ``--set`` values over it."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from dsx.config.doctor.finding import dotted
from dsx.config.doctor.source import from_text, read_text
from dsx.config.doctor.unusable import unusable
from dsx.config.problems import at, explain, raise_all
from dsx.config.schema import DsxConfig
from dsx.errors import ConfigError

_SET_EXAMPLE = "write --set dsx.parallel.tensor=4"


def load(
    source: str | Path | Mapping[str, Any], overrides: Sequence[str] = ()
) -> tuple[dict[str, Any], DsxConfig]:
    """DeepSpeed's part of the config, and the validated ``dsx`` block.

    Args:
        source: Path of the JSON file, or its content.
        overrides: ``key=value`` items in ``--set`` syntax, applied in order.

    Raises:
        ConfigError: The file, an override or a key of the ``dsx`` block cannot be used.
    """
    name = "config" if isinstance(source, Mapping) else str(source)
    content = content_of(source, overrides)
    block = content.pop("dsx", None)
    if block is None:
        raise ConfigError(f"{name}: dsx", "the config has no dsx block", 'add "dsx": {...}; see `dsx schema`')
    if not isinstance(block, dict):
        raise ConfigError(at("dsx", block), "it must be an object {...}", "see `dsx schema`")
    for problem in unusable(block, path=("dsx",)):
        raise ConfigError(problem.key, problem.what, problem.fix)
    try:
        # JSON mode: lists and numbers are judged as JSON has them, not as Python converts them.
        return content, DsxConfig.model_validate_json(json.dumps(block))
    except ValidationError as error:
        problems = explain(error, block, DsxConfig)
    raise_all(name, problems)
    raise AssertionError(problems)


def content_of(source: str | Path | Mapping[str, Any], overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The whole content of a config, with ``overrides`` put over it. Raises ConfigError."""
    content = copy.deepcopy(dict(source)) if isinstance(source, Mapping) else read(Path(source))
    for item in overrides:
        override(content, item)
    return content


def read(path: Path) -> dict[str, Any]:
    """The object in the JSON or HJSON file at ``path``. Raises ConfigError."""
    where = str(path)
    source = from_text(read_text(path), where)
    for key, lines in source.twice():
        place = f" (lines {', '.join(map(str, lines))})" if len(set(lines)) > 1 else ""
        raise ConfigError(f"{where}: {dotted(key)}", f"the key is written twice{place}", "keep one of them")
    return source.config


def override(content: dict[str, Any], item: str) -> None:
    """Set one ``a.b.c=value`` in ``content`` in place; missing objects on the way are made.

    The value is read as JSON, and taken as a plain string if it is none.

    >>> content = {"zero_optimization": {"stage": 1}}
    >>> override(content, "zero_optimization.stage=3")
    >>> override(content, "dsx.train.output=runs/a")
    >>> content
    {'zero_optimization': {'stage': 3}, 'dsx': {'train': {'output': 'runs/a'}}}
    """
    key, separator, text = item.partition("=")
    parts = key.strip().split(".")
    if not separator:
        raise ConfigError(f"--set {item}", "there is no =", _SET_EXAMPLE)
    if not all(parts):
        raise ConfigError(f"--set {item}", "the key has an empty part", _SET_EXAMPLE)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = text
    node = content
    for i, part in enumerate(parts[:-1]):
        inner = node.setdefault(part, {})
        if not isinstance(inner, dict):
            owner = ".".join(parts[: i + 1])
            raise ConfigError(f"--set {item}", f"{at(owner, inner)} is no object", f"set {owner} itself")
        node = inner
    node[parts[-1]] = value
