"""Builds of DeepSpeed's that a start is spared: on CPUs, and where there is nothing to compile them with."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


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
