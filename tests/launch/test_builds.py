"""What DeepSpeed compiles at a start is left out, or said before, with the lock it waits for."""

from __future__ import annotations

import io
import os

import deepspeed.ops
import pytest
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.op_builder.builder import OpBuilder

import dsx
from dsx.launch import spared
from dsx.launch.extension_locks import builds_said, extension_locks
from dsx.waiting import Waiting


class Operator(OpBuilder):
    """One that compiles in no time."""

    BUILD_VAR = ""

    def absolute_name(self) -> str:
        return "deepspeed.ops.an_operator"

    def sources(self) -> list[str]:
        return []


@pytest.fixture
def loaded(tmp_path, monkeypatch, capsys):
    """Load ``an_operator`` and give what was said before it was compiled, and after."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    stream = io.StringIO()
    compiled = []

    def compile_it(builder, verbose=True):
        compiled.append(stream.getvalue() + capsys.readouterr().err)
        return builder.name

    monkeypatch.setattr(OpBuilder, "jit_load", compile_it)

    def load() -> str:
        with Waiting("making the engine", stream=stream, first_seconds=600.0) as waiting:
            with builds_said(waiting):
                assert Operator("an_operator").load() == "an_operator"
            assert OpBuilder.jit_load is compile_it
        return compiled.pop()

    return load


SAID = "... compiling DeepSpeed's an_operator, once on this machine, a minute or two\n"


def test_an_operator_is_named_before_it_is_compiled(loaded):
    assert loaded() == SAID


def test_one_that_was_compiled_before_is_not_worth_a_line(loaded, tmp_path):
    (tmp_path / "an_operator").mkdir()
    (tmp_path / "an_operator" / "an_operator.so").touch()
    assert loaded() == ""


@pytest.mark.parametrize("place", ["an_operator", "py311_cpu/an_operator"])
def test_a_lock_that_a_stopped_compilation_left_is_named(loaded, tmp_path, place):
    lock = tmp_path / place / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    os.utime(lock, (0, 0))
    said = loaded()
    assert str(lock) in said
    assert "Fix: delete it" in said
    with lock.open():  # as the process has it that compiles
        assert loaded() == SAID * 2


def test_a_lock_of_another_operator_is_no_matter(loaded, tmp_path):
    (tmp_path / "another").mkdir()
    (tmp_path / "another" / "lock").touch()
    assert loaded() == SAID


def test_what_a_machine_lacks_for_a_compilation(tmp_path, monkeypatch):
    has_gpu, devices, programs = spared._has_gpu, tmp_path / "dev", tmp_path / "bin"
    monkeypatch.setattr(spared, "_has_gpu", lambda: has_gpu(devices))
    for name, value in {"PATH": programs, "CUDA_HOME": tmp_path, "CUDA_VISIBLE_DEVICES": "0"}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.delenv("CXX", raising=False)
    for folder in (devices, programs):
        folder.mkdir()
    assert spared.why_not_compiled().startswith("no GPU is here")
    (devices / "nvidiactl").touch()
    assert spared.why_not_compiled().startswith("no GPU is here")
    (devices / "nvidia0").touch()
    for name in ("nvcc", "c++", "ninja"):
        assert spared.why_not_compiled().startswith(f"{name} is not here")
        (programs / name).touch(mode=0o755)
    assert spared.why_not_compiled() == ""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert spared.why_not_compiled().startswith("no GPU is here")


@pytest.mark.skipif(get_accelerator().device_name() != "cpu", reason="it is about CPUs")
def test_a_stock_program_spares_what_recipes_spare():
    """By importing what it needs of dsx, before it makes its process group."""
    assert dsx.PipelineModule
    assert deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] is False
    assert os.environ["TORCH_FR_BUFFER_SIZE"]


@pytest.fixture
def lock(tmp_path):
    path = tmp_path / "extensions/py311_cpu/cpu_adam/lock"
    path.parent.mkdir(parents=True)
    path.touch()
    return path


def test_the_process_that_has_it_open(lock):
    with lock.open():
        (found,) = extension_locks(lock.parents[2])
        assert (found.path, found.builder) == (lock, os.getpid())
    (found,) = extension_locks(lock.parents[2])
    assert found.builder is None


def test_a_process_that_ends_while_it_is_looked_at(lock, monkeypatch):
    """Others start and end all the time: between its folder's being seen and read it is gone."""
    gone = f"/proc/{os.getppid()}/fd"

    def without(real):
        def listed(path="."):
            if os.fspath(path) == gone:
                raise FileNotFoundError(path)
            return real(path)

        return listed

    for name in ("scandir", "listdir"):
        monkeypatch.setattr(os, name, without(getattr(os, name)))
    with lock.open():
        (found,) = extension_locks(lock.parents[2])
        assert found.builder == os.getpid()
