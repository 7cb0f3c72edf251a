"""What docs/guides/methods.md says of each method is so: its commands run and print what stands under them.

Recipes run in ranks that are forked from one process with everything loaded, in place of a launcher's, which
would import torch and DeepSpeed for each of two dozen commands.
"""

from __future__ import annotations

import io
import os
import re
import shlex
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

import ranks
from often import often
from recipes.launching import free_port, recipe

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs/guides/methods.md").read_text(encoding="utf-8")


def _methods() -> dict[str, tuple[list[list[str]], list[str]]]:
    """Of each section its commands, and what they print in part."""
    out = {}
    for section in re.split(r"^## ", TEXT, flags=re.MULTILINE):
        fenced = re.search(r"^```bash\n(.*?)^```\n\n```text\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
        assert fenced
        commands = [shlex.split(line) for line in fenced[1].splitlines()]
        out[section.splitlines()[0].split(",")[0]] = (commands, fenced[2].splitlines())
    return out


METHODS = _methods()
TRAINING = ("  ", "step ")  # how lines of recipes begin


def printed_by_rank(rank: int, world_size: int, words: list[str], folder: str, port: int) -> str:
    """What a recipe prints in a process that a launcher has started, in a folder with the project's."""
    import torch.distributed as dist

    dist.destroy_process_group()  # the recipe makes its own
    os.environ["MASTER_PORT"] = str(port)
    os.chdir(folder)
    sys.argv = words
    output = io.StringIO()
    with redirect_stdout(output), redirect_stderr(output):
        code = recipe(Path(words[0]).stem).main()
    assert code == 0
    return output.getvalue()


def printed(command: list[str], folder: Path) -> list[str]:
    """Lines of all ranks of a recipe's command."""
    size, words = 1, command[1:]
    if command[0] == "deepspeed":
        assert command[1] == "--num_accelerators"
        size, words = int(command[2]), command[3:]
    return "".join(ranks.run(printed_by_rank, size, words, str(folder), free_port())).splitlines()


def numbers(line: str) -> list[float]:
    return [float(number) for number in re.findall(r"\d+(?:\.\d+)?(?:e-?\d+)?", line)]


def shape(line: str) -> str:
    return re.sub(r"\d[\d.]*(e-?\d+)?", "#", " ".join(line.split()))


def is_shown(shown: str, line: str) -> bool:
    """The line begins so, with the same numbers up to rounding on another machine; memory within 2 %."""
    expected = numbers(shown)
    tolerance = {"rel": 0.02} if "peak" in shown else {"rel": 2e-3, "abs": 2e-4}
    return shape(line).startswith(shape(shown)) and numbers(line)[: len(expected)] == pytest.approx(
        expected, **tolerance
    )


def steps(lines: list[str]) -> dict[str, tuple[float, float]]:
    """(loss, gradient norm) by step."""
    found = re.findall(
        r"^step +(\d+)/\d+ \| loss +([\d.]+) \| grad norm +([\d.]+)", "\n".join(lines), re.MULTILINE
    )
    return {step: (float(loss), float(norm)) for step, loss, norm in found}


ALONE = steps(next(iter(METHODS.values()))[1])


@pytest.mark.parametrize("method", often(METHODS, 5))
def test_every_method_trains_as_one_process(method, tmp_path):
    commands, shown = METHODS[method]
    assert len(ALONE) == 4
    for name in ("recipes", "configs"):
        (tmp_path / name).symlink_to(ROOT / name)
    lines = []
    for command in commands:
        if command[0] == "dsx":
            continue
        said = printed(command, tmp_path)
        found = steps(said)
        assert found, said
        for step, values in found.items():
            assert values == pytest.approx(ALONE[step], rel=2e-3, abs=2e-4), (shlex.join(command), step)
        assert max(found) == ("2" if "dsx.train.steps=2" in command else "4")
        lines += said
    expected = [line for line in shown if line.startswith(TRAINING)]
    assert expected
    missing = [line for line in expected if not any(is_shown(line, got) for got in lines)]
    assert not missing, "\n".join([*missing, "--- printed:", *lines])


@pytest.mark.parametrize(
    "method",
    [name for name, (commands, _) in METHODS.items() if any(words[0] == "dsx" for words in commands)],
)
def test_schedules_and_estimates(method, monkeypatch, capsys):
    from dsx.cli.app import main

    commands, shown = METHODS[method]
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("COLUMNS", "200")  # a terminal that breaks no line of the guide
    for command in commands:
        if command[0] == "dsx":
            monkeypatch.setattr(sys, "argv", command)
            with pytest.raises(SystemExit) as ended:
                main()
            assert not ended.value.code
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    expected = [" ".join(line.split()) for line in shown if not line.startswith(TRAINING)]
    assert expected
    assert [line for line in expected if not any(got.startswith(line) for got in lines)] == []


def test_figures_of_the_overview_stand_below_it():
    overview = TEXT.split("\n## ", 1)[0]
    table = [line.rsplit("|", 2)[1] for line in overview.splitlines() if line.startswith("| ")][1:]
    assert len(table) == len(METHODS)  # one more row than sections, whose first is no method
    figures = [figure for cell in table for figure in re.findall(r"\d+\.\d+", cell)]
    assert len(figures) > 15
    printed = {
        figure for _, shown in METHODS.values() for line in shown for figure in re.findall(r"\d+\.\d+", line)
    }
    assert set(figures) <= printed


def test_files_it_names_exist():
    named_files = re.findall(r"`(dsx/[\w/.]+|configs/[\w.]+|tests/[\w/.]+)`", TEXT)
    assert len(named_files) > 15
    assert [name for name in named_files if not (ROOT / name).exists()] == []
