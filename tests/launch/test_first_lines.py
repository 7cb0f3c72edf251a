"""Nobody waits in silence: what takes long is said before it begins, by one rank."""

from __future__ import annotations

import copy
import importlib.util
import inspect
import io
import os
import subprocess
import sys
import zipimport
from importlib import resources
from importlib.machinery import ModuleSpec
from pathlib import Path
from zipfile import ZipFile

import pytest

from dsx.launch import entry

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


class Full(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(28, "No space left on device")


@pytest.fixture
def zipped(tmp_path, monkeypatch):
    """Slow packages in an archive, whose modules share one loader."""
    with ZipFile(tmp_path / "slow.zip", "w") as file:
        file.writestr("slow_zipped/__init__.py", "LOADED = 1\n")
        file.writestr("slow_zipped/data.txt", "data")
        file.writestr("not_slow.py", "")
    monkeypatch.syspath_prepend(tmp_path / "slow.zip")
    monkeypatch.setattr(sys, "meta_path", [entry._Loading(), *sys.meta_path])
    monkeypatch.setattr(entry, "_SLOW", {"slow_zipped": "Zipped", "slow_found": "Found"})
    monkeypatch.setenv("RANK", "")
    for name in ("slow_zipped", "not_slow", "slow_found"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield
    for name in ("slow_zipped", "not_slow", "slow_found"):
        sys.modules.pop(name, None)


def test_a_loader_that_speaks_is_the_other_in_all_else(zipped, capsys):
    copied = copy.copy(importlib.util.find_spec("slow_zipped"))
    assert copied.loader.get_source("slow_zipped") == "LOADED = 1\n"
    module, other = importlib.import_module("slow_zipped"), importlib.import_module("not_slow")
    for loader in (module.__loader__, module.__spec__.loader):
        assert type(loader) is type(other.__loader__) is zipimport.zipimporter
    assert resources.files(module).joinpath("data.txt").read_text() == "data"
    assert inspect.getsource(module) == "LOADED = 1\n"
    assert capsys.readouterr().err == "... loading Zipped\n"
    module.LOADED = 2
    assert importlib.reload(module).LOADED == 1


def test_finders_of_others_are_asked_in_their_order(zipped, capsys):
    class Own:
        @staticmethod
        def find_spec(name, path, target=None):
            return ModuleSpec(name, Own) if name.startswith("slow") else None

        @staticmethod
        def create_module(spec):
            return None

        @staticmethod
        def exec_module(module):
            module.own = True

    sys.meta_path[1:1] = [object(), Own]
    assert importlib.import_module("slow_found").own
    assert importlib.import_module("slow_zipped").own
    assert capsys.readouterr().err == "... loading Found\n... loading Zipped\n"


@pytest.mark.parametrize("console", ["full", "closed", None])
def test_a_console_that_takes_nothing_stops_no_import(zipped, monkeypatch, console):
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", {"full": Full(), "closed": closed}.get(console))
    assert importlib.import_module("slow_zipped").LOADED == 1


def test_an_empty_place_among_the_ranks_is_none(monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "")
    assert (entry.rank(), entry.local_rank(), entry.world_size(), entry.launched()) == (0, 0, 1, False)
