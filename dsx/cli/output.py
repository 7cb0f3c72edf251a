"""Where a command's text goes."""

from __future__ import annotations

from pathlib import Path

import typer

from dsx.errors import ConfigError


def deliver(text: str, output: Path | None) -> None:
    """To a file, saying so, or to standard output.

    Raises:
        ConfigError: The file cannot be written.
    """
    if output is None:
        typer.echo(text, nl=False)
        return
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"--output {output}", error.strerror or str(error), "name a file to write"
        ) from error
    typer.echo(f"wrote {output}")
