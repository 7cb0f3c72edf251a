"""Entry point of the ``dsx`` command. Its exit codes are those of :mod:`dsx.cli.output`."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from dsx import __version__
from dsx.cli.check import check
from dsx.cli.data import data
from dsx.cli.diff import diff
from dsx.cli.estimate import estimate
from dsx.cli.init import init
from dsx.cli.inspect import inspect
from dsx.cli.models import models
from dsx.cli.options import Command
from dsx.cli.output import BAD_INPUT, say, tell
from dsx.cli.plan import plan
from dsx.cli.plot import plot, trace
from dsx.cli.reshard import reshard
from dsx.cli.schedule import schedule
from dsx.cli.show import env, guide, presets, schema
from dsx.cli.verify import verify
from dsx.errors import DsxError


def _version(show: bool) -> None:
    if show:
        say(f"dsx {__version__}")
        raise typer.Exit


def _root(
    _version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Train in 3D (tensor x pipeline x ZeRO) with DeepSpeed, from one JSON file.

    Exit codes of every command: 0 all is fine, 1 what it looked at is bad, 2 bad input, 130 Ctrl-C.
    """


def build() -> typer.Typer:
    """The command-line application."""
    app = typer.Typer(
        name="dsx",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    )
    app.callback()(_root)
    for command in (
        init,
        check,
        data,
        estimate,
        plan,
        schedule,
        trace,
        plot,
        reshard,
        inspect,
        diff,
        verify,
        models,
        presets,
        schema,
        guide,
        env,
    ):
        app.command(cls=Command)(command)
    return app


def main() -> None:
    """Run the ``dsx`` command of this process's arguments."""
    try:
        build()(prog_name="dsx")
    except DsxError as error:
        tell(error)
        sys.exit(BAD_INPUT)
