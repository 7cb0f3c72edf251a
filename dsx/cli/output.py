"""Where a command's text goes, and with which exit code a command ends.

0 is a good end; 1 says that what the command was asked to look at is bad; 2 that it could not look: a wrong
option, a file that is missing or no such file, a config that is none. 130 is Ctrl-C.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import typer

from dsx.checkpoint.store import write_atomically
from dsx.errors import CheckpointError, ConfigError, DsxError
from dsx.terminal import printable

BAD = 1
"""Exit code: what was looked at is bad."""

BAD_INPUT = 2
"""Exit code: it could not be looked at."""


def say(text: str, *, err: bool = False, end: str = "\n") -> None:
    """On standard output or error, without what a terminal would obey: every command speaks through this."""
    typer.echo(printable(text) + end, nl=False, err=err)


def one_a_line(lines: Iterable[str]) -> str:
    """Lines of a table, none of which becomes two: a name from a file could have a line of its own in it."""
    return "\n".join(line.replace("\r", "\\r").replace("\n", "\\n") for line in lines)


def deliver(text: str, output: Path | None) -> None:
    """To a file, saying so, or to standard output.

    Raises:
        ConfigError: The file cannot be written.
    """
    if output is None:
        say(text, end="")
        return
    write(text, output)
    say(f"wrote {output}")


def write(text: str, output: Path) -> None:
    """To a file, whole or not at all, saying nothing.

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
    """Within, an error of these kinds says that what was looked at is bad, not that it was bad input."""
    try:
        yield
    except kinds as error:
        tell(error)
        raise typer.Exit(BAD) from None


def tell(error: DsxError) -> None:
    """One message on standard error."""
    say(f"dsx: {error}", err=True)
