"""What a bug report needs to say about this machine: ``dsx env``. It asks, and changes nothing."""

from __future__ import annotations

import errno
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
from importlib import metadata
from pathlib import Path

import psutil

from dsx.errors import ConfigError
from dsx.launch.entry import usable_cores
from dsx.launch.extension_locks import extension_locks, extensions_folder
from dsx.terminal import amount

Rows = list[tuple[str, str]]

_PACKAGES = (
    "dsx", "torch", "deepspeed", "transformers", "datasets", "huggingface-hub", "tokenizers", "wandb",
    "safetensors", "pydantic", "numpy",
)  # fmt: skip
_LIMITS = {
    "open files": resource.RLIMIT_NOFILE,
    "locked memory": resource.RLIMIT_MEMLOCK,
    "processes": resource.RLIMIT_NPROC,
    "address space": resource.RLIMIT_AS,
    "core file": resource.RLIMIT_CORE,
}
_VARIABLES = (
    "CUDA_", "DS_", "DEEPSPEED", "NCCL_", "GLOO_", "TORCH", "PYTORCH", "OMP_", "MKL_", "MASTER_",
    "WORLD_SIZE", "RANK", "LOCAL_", "SLURM_", "HF_", "TRANSFORMERS_", "TOKENIZERS_", "WANDB_", "HIP_",
    "ROCR_",
)  # fmt: skip
_SECRETS = ("KEY", "TOKEN", "SECRET", "PASSWORD", "CREDENTIAL")
_PORT = 29500
"""The default port of DeepSpeed and torchrun."""

_SSH = 22
_ANSWER_SECONDS = 3.0
ANSWERS = "sshd answers"


def sections(hostfile: Path | None = None) -> dict[str, Rows]:
    """Label-and-value rows by section.

    Args:
        hostfile: A DeepSpeed hostfile, whose machines are looked up and asked for their sshd.

    Raises:
        ConfigError: The hostfile cannot be read, or says what DeepSpeed does not understand.
    """
    hosts = {} if hostfile is None else {"hosts": list(_hosts(hostfile))}
    return {
        "versions": list(_versions()),
        "devices": list(_devices()),
        "links": list(_links()),
        "extension builds": list(_locks()),
        "limits": list(_limits()),
        "ports": list(_ports()),
        "variables": list(_variables(os.environ)),
        **hosts,
    }


def _versions() -> Iterator[tuple[str, str]]:
    yield "Python", f"{platform.python_version()} at {sys.executable}"
    yield "system", f"{platform.platform()}, {platform.libc_ver()[1] and ' '.join(platform.libc_ver())}"
    for package in _PACKAGES:
        try:
            yield package, metadata.version(package)
        except metadata.PackageNotFoundError:
            yield package, "not installed"
    for tool in ("nvcc", "ninja", "c++"):
        found = shutil.which(tool)
        yield tool, found or "not found (DeepSpeed compiles its own optimizers and offload with it)"


def _devices() -> Iterator[tuple[str, str]]:
    import torch

    yield "CPU", f"{usable_cores()} of {os.cpu_count()} cores usable, {platform.machine()}"
    memory = psutil.virtual_memory()
    yield "memory", f"{amount(memory.available)} of {amount(memory.total)} available"
    for place in ("/dev/shm", "."):  # noqa: S108 (NCCL's and the data loaders' shared memory)
        with suppress(OSError):
            room = shutil.disk_usage(place)
            yield f"room in {place}", f"{amount(room.free)} of {amount(room.total)}"
    yield "CUDA", f"torch is built for {torch.version.cuda or 'CPUs alone'}"
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        yield f"GPU {index}", f"{about.name}, {amount(about.total_memory)}"


def _links() -> Iterator[tuple[str, str]]:
    for folder in sorted(Path("/sys/class/net").glob("*")):
        state, speed = _read(folder / "operstate"), _read(folder / "speed")
        told = f", {speed} Mbit/s" if speed.isdigit() else ""
        yield folder.name, f"{state or 'unknown'}{told}"
    for folder in sorted(Path("/sys/class/infiniband").glob("*/ports/*")):
        name = f"{folder.parts[-3]} port {folder.name}"
        yield name, f"{_read(folder / 'state')}, {_read(folder / 'rate')}"
    tool = shutil.which("nvidia-smi")
    if tool is not None:
        asked = [tool, "topo", "-m"]
        done = subprocess.run(asked, capture_output=True, text=True, timeout=30, check=False)  # noqa: S603
        yield "nvidia-smi topo -m", f"\n{done.stdout or done.stderr}".rstrip()


def _read(file: Path) -> str:
    with suppress(OSError, ValueError):  # an interface that is down has no speed
        return file.read_text(encoding="utf-8").strip()
    return ""


def _locks() -> Iterator[tuple[str, str]]:
    folder = extensions_folder()
    found = list(extension_locks(folder))
    yield "folder", f"{folder}{'' if folder.is_dir() else ' (none yet)'}"
    for lock in found:
        yield "lock", lock.text()
    if not found:
        yield "locks", "none"


def _limits() -> Iterator[tuple[str, str]]:
    for name, number in _LIMITS.items():
        soft, hard = (
            "unlimited" if n == resource.RLIM_INFINITY else f"{n:,}" for n in resource.getrlimit(number)
        )
        yield name, f"{soft} (at most {hard})"


def _ports() -> Iterator[tuple[str, str]]:
    yield "host", f"{socket.gethostname()}, {_addresses(socket.gethostname())}"
    with closing(socket.socket()) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("", _PORT))
        except OSError as error:
            taken = "taken by another program: use --master_port"
            yield str(_PORT), taken if error.errno == errno.EADDRINUSE else str(error)
        else:
            yield str(_PORT), "free (the launchers' own)"


def _variables(environment: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Variables that change how training starts or runs; of secrets, only that they are set."""
    for name, value in sorted(environment.items()):
        if name.startswith(_VARIABLES):
            yield name, "(set)" if any(word in name.upper() for word in _SECRETS) else value


def _hosts(hostfile: Path) -> Iterator[tuple[str, str]]:
    if not hostfile.is_file():
        raise ConfigError(f"--hostfile {hostfile}", "there is no such file", "name a DeepSpeed hostfile")
    from deepspeed.launcher.runner import fetch_hostfile

    try:
        found = fetch_hostfile(str(hostfile))
    except (ValueError, OSError) as error:
        raise ConfigError(
            f"--hostfile {hostfile}", str(error), "write a line for each machine, such as node1 slots=8"
        ) from None
    for name, slots in found.items():
        yield name, f"{slots} slot{'s' * (slots != 1)}, {_addresses(name)}, {_answer(name)}"


def _addresses(name: str) -> str:
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError as error:
        return f"no address ({error.strerror or error})"
    return ", ".join(dict.fromkeys(str(entry[4][0]) for entry in found))


def _answer(name: str) -> str:
    """Whether the machine's sshd, which DeepSpeed starts ranks through, answers."""
    try:
        with socket.create_connection((name, _SSH), timeout=_ANSWER_SECONDS):
            return ANSWERS
    except OSError as error:
        return f"no answer from port {_SSH} ({error.strerror or error})"
