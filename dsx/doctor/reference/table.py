"""The rows of the reference, read from the TOML files beside this one, which people edit.

A file has blocks, each with the rows of its keys. What the attributes mean stands in :mod:`dsx.doctor.key`;
the words ``"null"`` and ``"required"`` stand for a default of null, which TOML has not, and for none at all.

- ``[[block]]``: ``path``, ``source``, ``unknown``, ``types``, ``variant``; ``since`` and ``no_effect`` hold
  for each of its keys, the latter but for ``enabled``. One with ``keys_only`` is described in another file.
- ``[[block.key]]``: ``name``, ``kinds`` (parted by ``|``), ``default``, ``effect``, and other attributes.
- ``[causes]``: names for what makes keys do nothing, used in ``no_effect``; conditions are ``key operator
  value``, the value as JSON.
- ``[parameters.NAME]``: a key that many blocks have, in ``[block.defaults]`` with its default there.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, cast

from dsx.doctor.key import REQUIRED, Key, KeyBlock, Kind, NoEffect, Operator, When

_TOPICS: Final = (
    "top", "optimizers", "schedulers", "precision", "zero", "offload", "training", "parallel", "reports",
    "data", "tuning", "former",
)  # fmt: skip
_TUPLES: Final = ("choices", "aliases")
_HANDLED: Final = ("name", "kinds", "default", "no_effect")


def _read(topic: str) -> dict[str, Any]:
    return tomllib.loads((Path(__file__).parent / f"{topic}.toml").read_text(encoding="utf-8"))


def _value(value: Any) -> Any:
    if isinstance(value, list):
        return [_value(item) for item in value]
    return {"null": None, "required": REQUIRED}.get(value, value) if isinstance(value, str) else value


def _condition(text: str) -> When:
    key, operator, *value = text.split(" ", 2)
    return When(key, cast("Operator", operator), json.loads(value[0]) if value else None)


def _key(block: Mapping[str, Any], row: Mapping[str, Any], causes: Mapping[str, NoEffect]) -> Key:
    given = {
        name: value for name, value in row.items() if name not in ("name", "kinds", "default", "no_effect")
    }
    given |= {name: tuple(_value(given[name])) for name in _TUPLES if name in given}
    # DeepSpeedConfigModel.__init__ (runtime/config_utils.py) drops every value that is "auto".
    common = {"since": block.get("since", ""), "auto": "default" if block["types"] == "coerced" else "kept"}
    names = [*row.get("no_effect", ()), *(block.get("no_effect", ()) if row["name"] != "enabled" else ())]
    return Key(
        path=f"{block['path']}.{row['name']}".lstrip("."),
        kinds=cast("tuple[Kind, ...]", tuple(filter(None, row["kinds"].split("|")))),
        default=_value(row["default"]),
        source=block["source"],
        variant=block.get("variant", ""),
        no_effect=tuple(causes[name] for name in names),
        **(common | given),
    )


def _keys(content: Mapping[str, Any]) -> Iterator[Key]:
    causes = {
        name: NoEffect(tuple(map(_condition, cause["when"])), cause["why"])
        for name, cause in content.get("causes", {}).items()
    }
    for block in content["block"]:
        for name, default in block.get("defaults", {}).items():
            yield _key(block, content["parameters"][name] | {"name": name, "default": default}, causes)
        for row in block.get("key", ()):
            yield _key(block, row, causes)


def _blocks(content: Mapping[str, Any]) -> Iterator[KeyBlock]:
    fields = KeyBlock.__dataclass_fields__
    for block in content["block"]:
        if not block.get("keys_only"):
            yield KeyBlock(**{name: value for name, value in block.items() if name in fields})


def _documented() -> Iterator[Key]:
    for block in _read("documented")["block"]:
        for name, effect in block["effects"].items():
            yield Key(
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


_CONTENTS: Final = tuple(map(_read, _TOPICS))
KEYS: Final[tuple[Key, ...]] = tuple(key for content in _CONTENTS for key in _keys(content))
"""Every key that DeepSpeed 0.19.8 has, or refuses because an earlier one had it."""
BLOCKS: Final[tuple[KeyBlock, ...]] = tuple(block for content in _CONTENTS for block in _blocks(content))
"""Every object of the JSON."""
DOCUMENTED: Final[tuple[Key, ...]] = tuple(_documented())
"""Keys that DeepSpeed's documentation still describes, inside blocks that are refused as a whole."""
