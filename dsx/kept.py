"""What a machine has found and keeps: where it stands, and of which version of the code."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import tempfile
import time
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def cache_folder(kind: str) -> Path:
    """Where a machine keeps what dsx has found: in the user's home, or a temporary one if there is none."""
    try:
        home = Path.home()
    except RuntimeError:
        home = Path(tempfile.gettempdir()) / f"dsx-{os.getuid()}"
    return home / ".cache" / "dsx" / kind


_MONTH_SECONDS = 30 * 24 * 3600


def keep(place: Path, text: str) -> None:
    """Keep a text in a folder of :func:`code_version`; a cache that cannot be written is left alone.

    It is written aside and renamed. Folders of other versions that nobody has added to for a month are
    removed.
    """
    aside = place.with_name(f".{place.name}.{os.getpid()}")
    with suppress(OSError):
        if not place.parent.exists():
            place.parent.mkdir(parents=True)
            for other in place.parents[1].iterdir():
                if other.is_dir() and time.time() - other.stat().st_mtime > _MONTH_SECONDS:
                    shutil.rmtree(other, ignore_errors=True)
        aside.write_text(text)
        aside.replace(place)


_SOURCES = (
    "nn/*.py",
    "models/*.py",
    "hub/*.py",
    "hub/*.toml",
    "memory/*record*.py",
    "memory/module_gathers.py",
    "memory/device.py",
    "memory/meter.py",
)

_KERNELS = ("causal-conv1d", "flash-linear-attention", "mamba-ssm", "kernels", "peft", "bitsandbytes")
"""Packages by whose presence transformers' modules compute in another way."""


@cache
def code_version(*sources: str) -> str:
    """What a result of code depends on besides its input: Python, the packages that run, and the code.

    Args:
        sources: Patterns of dsx's files; by default those that run and record a layer.
    """
    package = Path(__file__).parent
    content = hashlib.sha256(f"{sys.version} {code_files(*sources or _SOURCES)}".encode())
    if not package.is_dir():  # a zip, by what changes when it is written anew
        archive = next(parent.stat() for parent in package.parents if parent.is_file())
        content.update(f"{archive.st_mtime_ns} {archive.st_size}".encode())
    for name in ("torch", "transformers", "deepspeed", *_KERNELS):
        with suppress(PackageNotFoundError):
            content.update(f"{name} {version(name)}".encode())
    return content.hexdigest()[:16]


def code_files(*sources: str) -> dict[str, str]:
    """Digest of each of dsx's files by patterns, but for what a wheel alone has and what editors hide."""
    package, found = Path(__file__).parent, {}
    for path in (path for pattern in sources for path in sorted(package.glob(pattern))):
        name = path.relative_to(package)
        if "shipped" not in name.parts and not any(part[0] == "." for part in name.parts):
            found[name.as_posix()] = hashlib.sha256(path.read_bytes()).hexdigest()[:12]
    return found
