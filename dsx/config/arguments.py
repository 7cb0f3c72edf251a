"""Command line of a recipe, under ``deepspeed``, ``torchrun`` or plain ``python``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from dsx.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Arguments:
    """What a recipe was called with; ``overrides`` are ``key=value`` items for ``resolve``."""

    config: Path
    overrides: tuple[str, ...]


def parse_arguments(argv: Sequence[str] | None = None, *, description: str | None = None) -> Arguments:
    """Read ``CONFIG`` and any number of ``--set KEY=VALUE``.

    ``--config FILE``, as recipes were called before, is ``CONFIG``.

    ``--local_rank``, which the deepspeed launcher inserts, is accepted and dropped: the environment says the
    same. ``--help`` ends the process.

    Args:
        argv: Arguments; those of the process by default.
        description: First lines of ``--help``.

    Raises:
        ConfigError: Anything else on the command line.

    >>> parse_arguments(["--local_rank=1", "a.json", "--set", "dsx.train.steps=5"]).overrides
    ('dsx.train.steps=5',)
    """
    parser = _Parser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("config", type=Path, metavar="CONFIG", help="DeepSpeed JSON with a dsx block")
    parser.add_argument(
        "--set",
        dest="overrides",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        type=_assignment,
        help="put a value over any key of the config, e.g. --set dsx.parallel.tensor=2; may be repeated",
    )
    parser.add_argument("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)
    words = sys.argv[1:] if argv is None else argv
    arguments = parser.parse_args([word.removeprefix("--config=") for word in words if word != "--config"])
    return Arguments(config=arguments.config, overrides=tuple(arguments.overrides))


class _Parser(argparse.ArgumentParser):
    """Raises where argparse would print the usage, which every rank would do, and end the process."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(
            "command line",
            message,
            "write CONFIG, a DeepSpeed JSON, and --set KEY=VALUE for every key to change",
        )


def _assignment(text: str) -> str:
    if "=" not in text:
        raise argparse.ArgumentTypeError(f"{text!r} is no KEY=VALUE; write dsx.parallel.tensor=4")
    return text
