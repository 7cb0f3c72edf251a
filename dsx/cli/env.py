"""``dsx env``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from dsx.cli.options import FORMAT, OUTPUT
from dsx.cli.output import deliver


def env(
    hostfile: Annotated[
        Path | None,
        typer.Option("--hostfile", metavar="FILE", help="A DeepSpeed hostfile: are its machines there?"),
    ] = None,
    style: Annotated[Literal["table", "json"], FORMAT] = "table",
    output: Annotated[Path | None, OUTPUT] = None,
) -> None:
    """Tell what a bug report needs to know of this machine.

    Versions, devices, links, locks of extension builds, limits, ports and variables.
    """
    from dsx.runtime.entry import quiet
    from dsx.runtime.environment import sections

    quiet()
    found = sections(hostfile)
    if style == "json":
        deliver(
            json.dumps({title: [list(row) for row in rows] for title, rows in found.items()}, indent=2)
            + "\n",
            output,
        )
        return
    lines = []
    for title, rows in found.items():
        width = max((len(label) for label, _ in rows), default=0)
        lines += [title, *(f"  {label:<{width}}  {value}" for label, value in rows)]
    deliver("\n".join(lines) + "\n", output)
