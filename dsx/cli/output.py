"""Where a command's text goes, which exit code it ends with, and numbers of bytes as people write them.

0 is a good end. 1 says that what the command was asked to look at is bad, 2 that it could not look: a wrong
option, a missing file, or a file of another kind. 130 is Ctrl-C.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from errno import EPIPE
from pathlib import Path
from typing import Any

import typer

from dsx.checkpoint.store import write_atomically
from dsx.errors import CheckpointError, ConfigError, DsxError
from dsx.terminal import READER_GONE, lost_output, printable

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def parse_bytes(text: str) -> int:
    """``512MiB``, ``2G`` or ``1000`` as a number of bytes; units are powers of 1024.

    Raises:
        ConfigError: Not a size.

    >>> parse_bytes("512MiB"), parse_bytes("1.5g"), parse_bytes("1000")
    (536870912, 1610612736, 1000)
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?\s*", text.lower())
    if match is None:
        raise ConfigError("--memory", f"{text!r} is no size", "write for example 512MiB")
    return int(float(match[1]) * _UNITS[match[2]])


BAD = 1
"""Exit code: what was looked at is bad."""

BAD_INPUT = 2
"""Exit code: it could not be looked at."""


def say(text: str, *, err: bool = False, end: str = "\n") -> None:
    """Print without what a terminal would obey: every command prints through this."""
    with writing():
        typer.echo(printable(text) + end, nl=False, err=err)


@contextmanager
def writing() -> Iterator[None]:
    """Inside the block, standard output may take no more: a reader that has gone ends the command quietly.

    Raises:
        ConfigError: Its disk is full.
    """
    try:
        yield
    except OSError as error:
        if not lost_output(error):
            raise
        if error.errno == EPIPE:
            raise typer.Exit(READER_GONE) from None
        what = error.strerror or str(error)
        raise ConfigError("standard output", what, "make room, or send it elsewhere") from None


def say_json(content: Any) -> None:
    """Print what a command found, for programs."""
    say(json.dumps(content, indent=2))


def say_styled(parts: Iterable[tuple[str, str]], *, plain: str) -> None:
    """Print stretches of text, each in a style of rich's; or ``plain``, where there are no colours.

    There are none outside of a terminal, and where NO_COLOR or TERM says so.
    """
    if not sys.stdout.isatty():
        say(plain)
        return
    from rich.text import Text

    from dsx.train.progress import Lines

    console = Lines(highlight=False)
    if console.color_system is None or console.no_color:
        say(plain)
        return
    line = Text.assemble(*((printable(text), style) for text, style in parts))
    with writing():
        console.print(line, soft_wrap=True)


def one_a_line(lines: Iterable[str]) -> str:
    """Lines of a table, with line breaks in a file's names escaped, so that each stays one line."""
    return "\n".join(line.replace("\r", "\\r").replace("\n", "\\n") for line in lines)


def text_of(path: Path, where: str, fix: str) -> str:
    """The text of a file that a command line names. Raises ConfigError, at ``where``, if there is none."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ConfigError(where, "not text", fix) from None
    except OSError as error:
        raise ConfigError(where, error.strerror or str(error), fix) from None


def deliver(text: str, output: Path | None) -> None:
    """Write text to a file and say so, or print it to standard output.

    Raises:
        ConfigError: The file cannot be written.
    """
    if output is None:
        say(text, end="")
        return
    write(text, output)
    say(f"wrote {output}")


def write(text: str, output: Path) -> None:
    """Write text to a file, whole or not at all, without saying so.

    Raises:
        ConfigError: The file cannot be written.
    """
    try:
        if output.exists() and not output.is_file():
            output.write_text(text, encoding="utf-8")  # /dev/stdout or a pipe: nothing to rename over
        else:
            write_atomically(output.resolve(), text.encode("utf-8"))
    except (CheckpointError, OSError) as error:
        what = error.what if isinstance(error, CheckpointError) else error.strerror or str(error)
        raise ConfigError(f"--output {output}", what, "name a file in a folder that exists") from None


@contextmanager
def judging(*kinds: type[DsxError]) -> Iterator[None]:
    """Inside the block, an error of these kinds means that what was looked at is bad, not the input."""
    try:
        yield
    except kinds as error:
        tell(error)
        raise typer.Exit(BAD) from None


def tell(error: DsxError) -> None:
    """Print one message to standard error."""
    say(f"dsx: {error}", err=True)
