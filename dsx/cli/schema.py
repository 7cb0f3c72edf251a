"""``dsx schema``."""

from __future__ import annotations

import json

import typer


def schema() -> None:
    """Print the JSON Schema of the dsx block.

    For editors and for reading: every key is described.
    """
    from dsx.config.schema import DsxConfig

    typer.echo(json.dumps(DsxConfig.model_json_schema(), indent=2))
