"""Spoilt checkpoints of every format through ``dsx inspect``, ``diff`` and ``reshard``: no traceback.

No mutant may end in anything but an exit code and, where that is not 0, a message: no exception that dsx did
not raise on purpose, no 20 seconds, no GiB of memory, no control character on the terminal.
"""

from __future__ import annotations

import io
import random
import shutil
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import deepspeed  # noqa: F401 (before the children's memory is limited)
import pytest
import torch.distributed.checkpoint  # noqa: F401
import typer

from checkpoint.hostile_originals import FORMATS, write_originals
from dsx.cli.app import build
from dsx.cli.output import BAD_INPUT, tell
from dsx.errors import DsxError
from dsx.terminal import printable
from mutant_runs import Outcome, counted, outcomes
from said import own_words

_MANY = -(-10_000 // len(FORMATS))  # of each format; ten thousand of all together
_SLOW = [pytest.mark.slow, pytest.mark.timeout(3600)]
_SEEDS = [range(3), pytest.param(range(1000, 1000 + _MANY), marks=_SLOW)]
_TARGETS = (
    ("--to", "dsx"),
    ("--to", "tp=2,pp=1,dp=3,zero=2"),
    ("--to", "deepspeed,zero=1", "--names", "source"),
    ("--to", "deepspeed,zero=0"),
    ("--to", "universal"),
    ("--to", "dcp"),
    ("--to", "hf"),
)


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    home = tmp_path_factory.mktemp("originals") / "all"
    write_originals(home)
    return home


class Commands:
    """``dsx`` in this process, as often as one likes."""

    def __init__(self) -> None:
        self._app = typer.main.get_command(build())

    def run(self, *arguments: object) -> tuple[int, str, str]:
        out, err = io.StringIO(), io.StringIO()
        with redirect_stdout(out), redirect_stderr(err):
            try:
                self._app.main([str(one) for one in arguments], prog_name="dsx")
            except DsxError as error:
                tell(error)
                return BAD_INPUT, out.getvalue(), err.getvalue()
            except SystemExit as ended:
                return int(ended.code or 0), out.getvalue(), err.getvalue()
        raise AssertionError("a command ended without an exit code")


def attempt_with(originals: Path):
    """Reads a mutant with two commands, the second by the seed; says which exit codes they had."""
    commands = Commands()

    def attempt(folder: Path, seed: int) -> str:
        rng = random.Random(-1 - seed)
        target = folder.parent / "target"
        how = rng.choice(((), ("--format", "json"), ("--verify",)))
        first = commands.run("inspect", folder, *how)
        second = (
            commands.run("diff", folder, originals / folder.name)
            if rng.random() < 0.3
            else commands.run("reshard", folder, target, *rng.choice(_TARGETS), "--workers", 1)
        )
        for code, out, err in (first, second):
            assert code in (0, 1, 2)
            said = out + err
            assert said == printable(said)
            assert len(said) < 200_000
            assert "report this" not in said  # the file is wrong, not dsx
            assert code != BAD_INPUT or own_words(err).startswith(("dsx: ", "Usage: ")), err
        assert not first[0] or second[0] or how == ("--verify",), "what cannot be inspected was converted"
        return f"exit {first[0]} and {second[0]}"

    return attempt


def run(originals: Path, name: str, seeds: range, scratch: Path) -> list[Outcome]:
    """Every seed's mutant of one format."""
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    attempt = attempt_with(originals)
    return list(outcomes(seeds, originals / name, scratch, attempt, allowed=()))


@pytest.mark.parametrize("seeds", _SEEDS, ids=["some", "many"])
@pytest.mark.parametrize("name", FORMATS)
def test_mutants_of_every_format_end_well(originals, tmp_path, name, seeds):
    found = run(originals, name, seeds, tmp_path / "scratch")
    print(name, dict(counted(found)))
    assert [one for one in found if not one.good] == []
    assert len(found) == len(seeds)
