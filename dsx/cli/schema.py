"""``dsx schema``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from dsx.cli.options import FORMAT
from dsx.cli.output import say


def schema(style: Annotated[Literal["table", "json"], FORMAT] = "json") -> None:
    """Print the JSON Schema of the dsx block.

    For editors and for reading: every key is described. As a table, a line per key.
    """
    from dsx.config.schema import DsxConfig

    found = DsxConfig.model_json_schema()
    if style == "json":
        say(json.dumps(found, indent=2))
        return
    for key, text in _keys(found, found, "dsx"):
        say(f"{key:<36} {text}".rstrip())


def _keys(root: Mapping[str, Any], part: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, str]]:
    """Each key under ``part`` with what it is, blocks before their keys."""
    for name, value in part.get("properties", {}).items():
        choices = [choice["$ref"] for choice in (value, *value.get("anyOf", ())) if "$ref" in choice]
        blocks = [root["$defs"][reference.rsplit("/", 1)[1]] for reference in choices]
        texts = (block.get("description", "") for block in (value, *blocks))
        yield f"{prefix}.{name}", " ".join(next(filter(None, texts), "").split())
        for block in blocks:
            yield from _keys(root, block, f"{prefix}.{name}")
