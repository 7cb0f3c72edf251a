"""Command line of recipes."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsx.errors import ConfigError
from dsx.launch.entry import parse_arguments


@pytest.mark.parametrize("rank", [[], ["--local_rank=1"], ["--local_rank", "1"], ["--local-rank=1"]])
def test_launchers(rank):
    """The deepspeed launcher puts --local_rank first; torch.distributed.launch writes --local-rank."""
    items = ["--set", "x.y=1", "--set", "z=a=b"]
    for words in (
        ["a.json", *items],
        [*items, "a.json"],
        ["--config", "a.json", *items],
        ["--config=a.json", *items],
        ["--deepspeed_config", "a.json", *items],
        ["--deepspeed", *items, "--deepspeed_config=a.json"],
        ["--deepspeed", "a.json", *items],
        ["--deepspeed=a.json", *items, "./a.json"],  # twice the same
        [*items, "--", "a.json"],
    ):
        found = parse_arguments([*rank, *words])
        assert found.config == Path("a.json")
        assert found.overrides == ("x.y=1", "z=a=b")


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ([], "CONFIG"),
        (["--config"], "CONFIG"),
        (["--deepspeed"], "CONFIG"),
        (["a.json", "--config"], "--config: it needs a value"),
        (["--config", "a.json", "--deepspeed_config", "b.json"], "another one is named, too: a.json"),
        (["a.json", "--deepspeed", "b.json"], "CONFIG a.json"),
        (["a.json", "--set"], "--set: it needs a value"),
        (["a.json", "--set", "x.y"], "dsx.parallel.tensor=4"),
        (["a.json", "--steps", "5"], "--steps"),
        (["a.json", "extra"], "extra"),
        (["--config", "a.json", "extra"], "extra"),
        (["--conf", "a.json"], "CONFIG"),
        (["a.json", "--local_rank", "x"], "--local_rank x: not a whole number"),
    ],
)
def test_bad_usage(arguments, word, capsys):
    with pytest.raises(ConfigError) as error:
        parse_arguments(arguments)
    assert word in str(error.value)
    assert capsys.readouterr() == ("", "")  # under a launcher every rank would print it


def test_help(capsys):
    with pytest.raises(SystemExit) as ended:
        parse_arguments(["--help"], description="Train something.")
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert "Train something." in shown
    assert "local_rank" not in shown
