"""``dsx guide``."""

from __future__ import annotations

import json
from typing import Annotated, Literal

import typer

from dsx.cli.options import FORMAT
from dsx.cli.output import say
from dsx.config.shipped import GUIDES
from dsx.config.wording import suggest
from dsx.errors import ConfigError


def guide(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="A guide; without it they are listed.")
    ] = None,
    *,
    style: Annotated[Literal["table", "json"], FORMAT] = "table",
) -> None:
    """Print a guide: how to do things, a page each."""
    texts = {path.stem: path.read_text(encoding="utf-8") for path in sorted(GUIDES.glob("*.md"))}
    if name is None:
        titles = {each: text.splitlines()[0].lstrip("# ") for each, text in texts.items()}
        width = max(map(len, titles), default=0)
        lines = [f"{each:<{width}}  {title}" for each, title in titles.items()]
        say(json.dumps(titles, indent=2) if style == "json" else "\n".join(lines))
        return
    if name.removesuffix(".md") not in texts:
        what = f"there is no such guide; there are {', '.join(texts)}"
        raise ConfigError(f"NAME {name}", what, suggest(name, texts, otherwise="name one of them"))
    text = texts[name.removesuffix(".md")]
    if style == "json":
        say(json.dumps({"name": name, "text": text}, indent=2))
    else:
        say(text, end="")
