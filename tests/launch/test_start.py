"""``dsx train``: a program's ranks under DeepSpeed's launcher, and its exit code."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import deepspeed.accelerator
import pytest

from dsx.config.ordinary import recipe_of
from dsx.errors import ConfigError
from dsx.launch import start

PROGRAM = """
import os, signal, sys
print(os.environ["RANK"], os.environ["WORLD_SIZE"], sys.argv[2:], flush=True)
if "killed" in sys.argv:
    os.kill(os.getpid(), signal.SIGKILL)
if "stopped" in sys.argv:  # whoever fails waits for the other's line: the launcher ends both
    failing = os.environ["RANK"] == "1"
    open(os.path.join(os.path.dirname(sys.argv[0]), "printed"), "r" if failing else "w").close()
    sys.exit(143 if failing else 0)
"""


@pytest.fixture
def ended(tmp_path, capfd, monkeypatch):
    """Exit code, output and errors of a start of the program."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    os.mkfifo(tmp_path / "printed")

    def run(*words: str, gpus: int | None) -> tuple[int, list[str], str]:
        code = start.start(program, words, gpus=gpus)
        out, err = capfd.readouterr()
        return code, sorted(out.splitlines()), err

    return run


STARTING = "... starting DeepSpeed's launcher\n"


def test_ranks_get_the_words_and_the_exit_code_is_theirs(ended):
    words = ["a.json", "--set", "dsx.train.steps=5", "stopped"]
    assert ended(*words, gpus=2) == (143, [f"{rank} 2 {words}" for rank in range(2)], STARTING)


SEES = """
import os
from deepspeed.accelerator import get_accelerator
print(get_accelerator().device_name(), repr(os.environ["CUDA_VISIBLE_DEVICES"]), flush=True)
assert os.environ["DS_ACCELERATOR"] == "cpu"
"""


def test_ranks_on_cpus_stay_there(ended, tmp_path, monkeypatch):
    """The launcher names GPUs to them that whoever hid all GPUs does not want."""
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    (tmp_path / "program.py").write_text(SEES)
    assert ended(gpus=2)[:2] == (0, ["cpu ''"] * 2)


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


@pytest.mark.parametrize(
    "told",
    [
        {"LOCAL_RANK": "0", "WORLD_SIZE": "2"},
        {"SLURM_STEP_NUM_TASKS": "8"},
        {"OMPI_COMM_WORLD_SIZE": "2"},
    ],
)
def test_under_another_launcher_it_is_refused(monkeypatch, tmp_path, told):
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"^dsx train: a launcher has started [28] of it"):
        start.start(tmp_path / "none.py", [], gpus=1)


def test_one_task_of_a_launcher_or_of_a_batch_script_may_start_ranks(monkeypatch, tmp_path):
    one = {"LOCAL_RANK": "0", "WORLD_SIZE": "1", "SLURM_STEP_NUM_TASKS": "1"}
    for name, value in (one | {"SLURM_NTASKS": "8", "SLURM_PROCID": "0"}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(start.subprocess, "Popen", lambda *_args, **_more: 1 / 0)  # it comes so far
    with pytest.raises(ZeroDivisionError):
        start.start(tmp_path / "none.py", [], gpus=1)


def test_ranks_import_dsx_from_where_it_was(monkeypatch):
    root, here = str(Path(start.__file__).parents[2]), sys.path
    monkeypatch.setenv("PYTHONPATH", "/more")
    monkeypatch.setattr(sys, "path", [root, *(place for place in here if place not in ("", root))])
    assert start._environment()["PYTHONPATH"] == f"{root}{os.pathsep}/more"
    monkeypatch.setattr(sys, "path", ["/bin", root, *here])
    assert start._environment()["PYTHONPATH"] == "/more"


INTERRUPTED = """
import os, signal, sys
from types import ModuleType
from dsx.launch import start

class Loads(ModuleType):
    def __getattr__(self, name):
        os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError(name)

sys.modules["deepspeed.accelerator"] = Loads("deepspeed.accelerator")
sys.argv[1:] = ["0", "program.py"]
start.main()
"""


def test_ctrl_c_while_packages_are_loaded_is_no_traceback():
    command = [sys.executable, "-c", INTERRUPTED]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_ctrl_c_while_the_launcher_starts_is_no_traceback(capfd):
    launcher = start._launcher([sys.executable, "-P", "-m", start.__name__, "1", "none.py"])
    launcher.send_signal(signal.SIGINT)
    assert launcher.wait(100) == 130
    assert capfd.readouterr() == ("", "")
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
