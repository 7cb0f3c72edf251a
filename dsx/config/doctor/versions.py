"""DeepSpeed's version numbers."""

from __future__ import annotations

import importlib.metadata
import re

from dsx.errors import ConfigError

Version = tuple[int, ...]

# What the reference and the checks describe.
REFERENCE: Version = (0, 19, 8)


def version(text: str) -> Version:
    """``0.19.8`` as numbers; what follows them (``+cu121``, ``rc1``) is left out.

    Raises:
        ConfigError: It is no version.
    """
    found = re.match(r"v?(\d+)\.(\d+)(?:\.(\d+))?", text.strip())
    if found is None:
        raise ConfigError(f"version {text}", "it is no version number", "write one such as 0.16.4")
    return tuple(int(part or 0) for part in found.groups())


def shown(number: Version) -> str:
    """``(0, 19, 8)`` as ``0.19.8``."""
    return ".".join(map(str, number))


def installed() -> Version:
    """The installed DeepSpeed's; the reference's if there is none."""
    try:
        return version(importlib.metadata.version("deepspeed"))
    except importlib.metadata.PackageNotFoundError:
        return REFERENCE
