"""What a start is spared: builds of DeepSpeed's on CPUs or where nothing compiles them, torch's compilers."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any


def lean_on_cpu() -> None:
    """On CPUs, leave out what gloo does as well: to be called before the process group is made."""
    from deepspeed.accelerator import get_accelerator

    if get_accelerator().device_name() == "cpu":
        without_builds()
        # torch keeps a record of each of the last 2,000 collectives. Between the activations of a pipeline
        # these small blocks fragment the heap: 20 to 50 MiB in a thousand steps of a tiny model.
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "0")


def without_builds() -> None:
    """Keep DeepSpeed from compiling its shared-memory collectives at start.

    Their build takes a minute and needs a compiler, and gloo does the same without it. Filling the table
    (deepspeed/ops/__init__.py, __getattr__) also saves probing the compilers.
    """
    import deepspeed.ops

    vars(deepspeed.ops).setdefault("__compatible_ops__", {})["deepspeed_shm_comm"] = False


def why_not_compiled() -> str:
    """Why DeepSpeed's own optimizers are better not asked for on this machine; empty where they may be.

    It looks for devices and programs, without torch.
    """
    if not _has_gpu():
        return "no GPU is here, and on CPUs DeepSpeed would compile its own for a minute or two"
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    places = os.pathsep.join([os.environ.get("PATH", os.defpath), f"{home}/bin", "/opt/rocm/bin"])
    missing = [
        names[0]
        for names in (("nvcc", "hipcc"), (os.environ.get("CXX", "c++"), "g++", "clang++"), ("ninja",))
        if not any(shutil.which(name, path=places) for name in names)
    ]
    return f"{missing[0]} is not here, with which DeepSpeed would compile its own" if missing else ""


def _has_gpu(devices: Path = Path("/dev")) -> bool:
    """Whether a GPU's driver has made its file: NVIDIA's, AMD's, or that of Windows' Linux."""
    files = (*devices.glob("nvidia[0-9]*"), devices / "kfd", devices / "dxg")
    return os.environ.get("CUDA_VISIBLE_DEVICES") != "" and any(file.exists() for file in files)


DYNAMO = "torch._dynamo"


class _LateConfig:
    """What ``torch._dynamo.config`` is until more is asked of it than torch's checkpoint does."""

    error_on_nested_fx_trace = True  # torch's default, which checkpoint reads, and hands on inside of graphs

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(f"{DYNAMO}.config"), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(importlib.import_module(f"{DYNAMO}.config"), name, value)


class LateDynamo(ModuleType):
    """What ``import torch._dynamo`` gives until an attribute beyond these is asked for."""

    def __init__(self) -> None:
        super().__init__(DYNAMO)
        spec = importlib.util.find_spec(DYNAMO)
        assert spec is not None, "it is a part of torch"
        self.__spec__, self.__file__ = spec, spec.origin

    @property
    def config(self) -> Any:
        return _LateConfig() if sys.modules.get(DYNAMO) is self else self._loaded().config

    @staticmethod
    def graph_break(msg: str = "") -> None:
        """Outside of a graph, as torch's own, nothing."""

    def disable(self, fn: Any = None, *args: Any, **options: Any) -> Any:
        """``fn``, which torch's own ``disable`` is asked to keep out of graphs once there can be any."""
        if fn is None:
            return self._loaded().disable(fn, *args, **options)
        kept_out: Callable[..., Any] | None = None

        @functools.wraps(fn)
        def call(*values: Any, **named: Any) -> Any:
            nonlocal kept_out
            if kept_out is None:
                if isinstance(sys.modules.get(DYNAMO, self), LateDynamo):
                    return fn(*values, **named)
                kept_out = self._loaded().disable(fn, *args, **options)
            return kept_out(*values, **named)

        return call

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loaded(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("__") or sys.modules.get(DYNAMO) is self:
            super().__setattr__(name, value)
        else:  # a submodule that was just imported
            setattr(self._loaded(), name, value)

    def _loaded(self) -> Any:
        """Torch's own module. One thread takes the stand-in away; others wait for the import."""
        if sys.modules.get(DYNAMO) is self:
            sys.modules.pop(DYNAMO, None)
        return importlib.import_module(DYNAMO)


@contextmanager
def compilers_late() -> Iterator[None]:
    """Inside, :class:`LateDynamo` stands for compilers not loaded; a process group would ask more of it."""
    stand_in = LateDynamo()
    sys.modules.setdefault(DYNAMO, stand_in)
    try:
        yield
    finally:
        if sys.modules.get(DYNAMO) is stand_in:
            del sys.modules[DYNAMO]
