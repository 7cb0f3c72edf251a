"""What DeepSpeed compiles when it starts: left out where CPUs do without, and said before it begins."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dsx.launch.entry import local_rank
from dsx.launch.extension_locks import extension_locks, extensions_folder
from dsx.waiting import Waiting


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


@contextmanager
def builds_said(waiting: Waiting) -> Iterator[None]:
    """Within the block, what DeepSpeed compiles is said before it begins, a minute or two for each operator.

    The first rank of each machine names a lock for which it would wait without end.

    Args:
        waiting: Of this rank, under way.
    """
    from deepspeed.ops.op_builder.builder import OpBuilder

    build = OpBuilder.jit_load

    def said(builder: Any, *given: Any, **named: Any) -> Any:
        folder, name = extensions_folder(), str(builder.name)
        for lock in extension_locks(folder) if local_rank() == 0 else ():
            if lock.path.parent.name == name and lock.builder is None:
                sys.stderr.write(f"warning: {lock.text()}\n")
        if _is_made(folder, name):
            return build(builder, *given, **named)
        with waiting.instead(f"compiling DeepSpeed's {name}, once on this machine, a minute or two"):
            return build(builder, *given, **named)

    OpBuilder.jit_load = said
    try:
        yield
    finally:
        OpBuilder.jit_load = build


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


def _is_made(folder: Path, name: str) -> bool:
    """Whether an operator has been compiled: torch then looks whether it is still up to date, in a second."""
    return any(True for place in ("", "*/") for _ in folder.glob(f"{place}{name}/{name}.so"))
