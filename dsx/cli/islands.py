"""``dsx islands keys``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from dsx.cli.options import FORMAT, count
from dsx.cli.output import one_a_line, say, say_json


def islands(
    action: Annotated[  # noqa: ARG001 - the parser has judged it
        Literal["keys"], typer.Argument(metavar="keys", help="What to do: keys.", show_default=False)
    ],
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where the keys are to lie.")],
    number: Annotated[int, count("--islands", "How many islands there are (dsx.outer.islands).")] = 2,
    style: Annotated[Literal["table", "json"], FORMAT] = "table",
) -> None:
    """Make the keys by which islands know each other.

    FOLDER gets ca.pem and a secret file for each island. The site of island 1 needs ca.pem and island1.pem,
    in the folder that its config names as dsx.outer.keys. The key that has signed them is kept nowhere:
    further islands need keys that are all made anew.
    """
    from dsx.islands.links import write_keys

    authority, *own = write_keys(folder, number)
    if style == "json":
        say_json([[str(authority), str(file)] for file in own])
    else:
        lines = (f"island {island} needs {authority} and {file}" for island, file in enumerate(own))
        say(one_a_line(lines))
