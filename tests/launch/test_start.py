"""``dsx train``: a program's ranks under DeepSpeed's launcher, and its exit code."""

from __future__ import annotations

import signal
from pathlib import Path
from types import SimpleNamespace

import deepspeed.accelerator
import pytest

from dsx.config.starter import recipe_of
from dsx.errors import ConfigError
from dsx.launch import start

PROGRAM = """
import os, signal, sys
print(os.environ["RANK"], os.environ["WORLD_SIZE"], sys.argv[2:], flush=True)
if "killed" in sys.argv:
    os.kill(os.getpid(), signal.SIGKILL)
sys.exit(143 if "stopped" in sys.argv and os.environ["RANK"] == "1" else 0)
"""


@pytest.fixture
def ended(tmp_path, capfd, monkeypatch):
    """Exit code, output and errors of a start of the program."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)

    def run(*words: str, gpus: int | None) -> tuple[int, list[str], str]:
        code = start.start(program, words, gpus=gpus)
        out, err = capfd.readouterr()
        return code, sorted(out.splitlines()), err

    return run


STARTING = "... starting DeepSpeed's launcher\n"


def test_ranks_get_the_words_and_the_exit_code_is_theirs(ended):
    words = ["a.json", "--set", "dsx.train.steps=5", "stopped"]
    assert ended(*words, gpus=2) == (143, [f"{rank} 2 {words}" for rank in range(2)], STARTING)


def test_a_rank_that_was_killed_is_named(ended):
    code, out, err = ended("killed", gpus=None)
    assert (code, out) == (128 + signal.SIGKILL, ["0 1 ['killed']"])
    assert err.removeprefix(STARTING).startswith("dsx: a rank was ended by SIGKILL, ")


@pytest.fixture
def machine(monkeypatch):
    """A machine of so many GPUs, of which the environment names some."""

    def have(count: int, names: str | None = None) -> None:
        accelerator = SimpleNamespace(
            device_name=lambda: "cuda" if count else "cpu",
            device_count=lambda: count,
            visible_devices_envs=lambda: ["CUDA_VISIBLE_DEVICES"],
        )
        monkeypatch.setattr(deepspeed.accelerator, "get_accelerator", lambda: accelerator)
        if names is None:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        else:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", names)

    return have


def test_gpus_are_those_that_the_machine_has(machine):
    machine(0)
    assert (start.devices(0), start.devices(3)) == (["0"], ["0", "1", "2"])
    machine(4)
    assert (start.devices(0), start.devices(2)) == (["0", "1", "2", "3"], ["0", "1"])
    machine(2, "5,GPU-7a")
    assert (start.devices(0), start.devices(1)) == (["5", "GPU-7a"], ["5"])
    with pytest.raises(ConfigError, match=r"--gpus 3: this machine has 2\. Fix: "):
        start.devices(3)


def test_weights_are_fine_tuned_and_anything_else_trained_from_the_beginning(tmp_path: Path):
    def of(**model: object) -> str:
        return recipe_of({"dsx": {"model": model}})

    folder = str(tmp_path)
    assert of(preset="tiny") == of(path=folder) == recipe_of({}) == recipe_of({"dsx": 1}) == "gpt_3d.py"
    assert of(path=folder, weights="load") == "finetune.py"
    (tmp_path / "model.safetensors").touch()
    assert of(path=folder) == "finetune.py"
    assert of(path=folder, weights="random") == "gpt_3d.py"
