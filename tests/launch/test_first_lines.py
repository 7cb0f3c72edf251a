"""Nobody waits in silence: what takes long is said before it begins, by one rank."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Stands in front of the packages of their names, and says when it is loaded, and after what was said before.
STAND_IN = "import sys\nsys.stderr.write(f'{__name__} is loaded\\n')\n"


@pytest.fixture
def said(tmp_path):
    """What a program says on standard error, with slow packages that only say that they are loaded."""
    (tmp_path / "deepspeed").mkdir()
    for name in ("torch", "deepspeed/__init__", "transformers"):
        (tmp_path / f"{name}.py").write_text(STAND_IN)
    accelerator = "class get_accelerator:\n    def device_name(self):\n        return 'cpu'\n"
    for name, text in {"accelerator": accelerator, "ops": ""}.items():
        (tmp_path / "deepspeed" / f"{name}.py").write_text(text)

    def run(program: str, *words: str, rank: int = 0) -> list[str]:
        file = tmp_path / "program.py"
        file.write_text(program)
        done = subprocess.run(
            [sys.executable, file, *words],
            env=os.environ | {"RANK": str(rank), "WORLD_SIZE": "2", "PYTHONPATH": f"{tmp_path}:{ROOT}"},
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stderr.splitlines()

    return run


RECIPE = """
import importlib.util
import dsx

def main():
    importlib.util.find_spec("transformers")  # as packages ask, which do not load it then
    import torch, deepspeed

dsx.run(main)
"""


def test_a_recipe_says_that_it_starts_and_what_it_loads_before_it_does(said):
    assert said(RECIPE) == [
        "... starting program.py on 2 ranks",
        "... loading torch",
        "torch is loaded",
        "... loading DeepSpeed",
        "deepspeed is loaded",
    ]


def test_other_ranks_say_nothing(said):
    assert said(RECIPE, rank=1) == ["torch is loaded", "deepspeed is loaded"]


def test_help_is_help_alone(said):
    assert said("import dsx\ndsx.run(lambda: None)", "--help") == []


def test_a_command_says_what_it_loads(said):
    program = "import sys\nsys.argv = ['dsx', 'presets']\nfrom dsx.cli import app\n"
    program += "app.build = lambda: lambda prog_name: __import__('torch')\napp.main()\n"
    assert said(program) == ["... loading torch", "torch is loaded"]


@pytest.mark.parametrize("recipe", ["gpt_3d", "finetune", "own_data", "generate"])
def test_recipes_load_nothing_slow_before_their_first_line(said, recipe):
    assert said((ROOT / "recipes" / f"{recipe}.py").read_text(), "--help") == []


PROGRAM = """
import dsx

import torch
from transformers import *
"""

SPARED = """
import sys
import dsx
import deepspeed
print(hasattr(deepspeed, "ops") and deepspeed.ops.__compatible_ops__, file=sys.stderr)
"""


def test_under_a_launcher_a_program_of_ones_own_says_it_too(said, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert said(PROGRAM) == [
        "... loading torch",
        "torch is loaded",
        "... loading transformers",
        "transformers is loaded",
    ]
    monkeypatch.delenv("LOCAL_RANK")
    assert said(PROGRAM) == ["torch is loaded", "transformers is loaded"]


@pytest.mark.parametrize("rank", [0, 1])
def test_under_a_launcher_every_rank_spares_a_build_on_cpus(said, monkeypatch, rank):
    """Whoever makes the process group, such as transformers' TrainingArguments."""
    monkeypatch.setenv("LOCAL_RANK", str(rank))
    assert said(SPARED, rank=rank)[-1] == "{'deepspeed_shm_comm': False}"
    monkeypatch.delenv("LOCAL_RANK")
    assert said(SPARED, rank=rank)[-1] == "False"
