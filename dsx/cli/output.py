"""Where a command's text goes, which exit code it ends with, and numbers of bytes as people write them.

0 is a good end. 1 says that what the command was asked to look at is bad, 2 that it could not look: a wrong
option, a missing file, or a file of another kind. 130 is Ctrl-C.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from errno import EPIPE
from pathlib import Path
from typing import Any

import typer

from dsx.checkpoint.store import write_atomically
from dsx.config.wording import either
from dsx.errors import CheckpointError, ConfigError, DsxError
from dsx.terminal import READER_GONE, lost_output, printable, with_room

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


_ENDINGS = {
    "table": (".txt",),
    "json": (".json",),
    "csv": (".csv",),
    "svg": (".svg",),
    "png": (".png",),
    "pdf": (".pdf",),
    "html": (".html", ".htm"),
    "perfetto": (".perfetto.json", ".json"),
}
"""How the files of each format end."""

BINARY = ("png", "pdf")
"""Formats that no terminal shows."""


def style_of(
    style: str | None, output: Path | None, styles: Sequence[str], *, needs_ending: bool = False
) -> str:
    """The format to write: ``--format`` if given, else what the file's name ends in, else the first one.

    ``styles`` are what the command can write; with ``needs_ending`` a name without an ending is refused.

    Raises:
        ConfigError: The two name different formats, the ending names none of ``styles``, or a picture would
            go to a terminal.
    """
    if output is None:
        if style in BINARY:
            where, fix = f"--format {style}", f"write --output picture.{style}"
            raise ConfigError(where, "it needs a file", fix)
        return style or styles[0]
    name = output.name.lower()
    if style is not None:
        # Text may have any ending but that of another format.
        others = {ending for endings in _ENDINGS.values() for ending in endings} - {".txt"}
        wrong = style in BINARY or output.suffix.lower() in others
        if wrong and not name.endswith(_ENDINGS[style]):
            what = f"a file of --format {style} ends in {_ENDINGS[style][0]}"
            raise ConfigError(f"--output {output}", what, "leave --format out, or name the file so")
        return style
    if not (output.suffix or needs_ending) or (output.exists() and not output.is_file()):
        return styles[0]
    found = {ending: each for each in reversed(styles) for ending in _ENDINGS[each] if name.endswith(ending)}
    if not found:
        endings = either([_ENDINGS[each][0] for each in styles])
        what = f"{output.suffix!r} names no format of this command"
        raise ConfigError(f"--output {output}", what, f"end it in {endings}")
    return found[max(found, key=len)]


def deliver(content: str | bytes, output: Path | None) -> None:
    """Write text, or a picture, to a file and say so; or print text to standard output.

    Raises:
        ConfigError: The file cannot be written.
    """
    if output is None:
        assert isinstance(content, str)
        say(content, end="")
        return
    write(content, output)
    say(f"wrote {output}")


def write(content: str | bytes, output: Path) -> None:
    """Write to a file, whole or not at all, without saying so.

    Raises:
        ConfigError: The file cannot be written.
    """
    whole = content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content
    try:
        if output.exists() and not output.is_file():
            output.write_bytes(whole)  # /dev/stdout or a pipe: nothing to rename over
        else:
            write_atomically(output.resolve(), whole)
    except (CheckpointError, OSError) as error:
        why = error.what if isinstance(error, CheckpointError) else error.strerror or str(error)
        why = why if why.startswith("cannot be written") else f"cannot be written ({why})"
        fix = with_room(error, "name a file in a folder that exists")
        raise ConfigError(f"--output {output}", why, fix) from None


@contextmanager
def judging(*kinds: type[DsxError]) -> Iterator[None]:
    """Inside the block, an error of these kinds means that what was looked at is bad, not the input."""
    try:
        yield
    except kinds as error:
        tell(error)
        raise typer.Exit(BAD) from None


def tell(error: DsxError | str) -> None:
    """Print one message to standard error."""
    say(f"dsx: {error}", err=True)
