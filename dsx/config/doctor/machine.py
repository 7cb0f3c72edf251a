"""Facts of this machine that stop a run whatever the config says."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from dsx.config.doctor.finding import ABSENT, Finding

# A build of one of DeepSpeed's operators takes a minute or two.
_BUILD_SECONDS = 600


def extensions_folder(environment: Mapping[str, str] | None = None) -> Path:
    """Where torch builds extensions (torch/utils/cpp_extension.py, get_default_build_root)."""
    given = (os.environ if environment is None else environment).get("TORCH_EXTENSIONS_DIR")
    return Path(given) if given else Path.home() / ".cache" / "torch_extensions"


def check_locks(folder: Path, now_seconds: float | None = None) -> Iterator[Finding]:
    """Locks of builds, for which later runs wait for ever without a word if the build was killed."""
    now = time.time() if now_seconds is None else now_seconds
    # <folder>/<name>/lock, or <folder>/py311_cu121/<name>/lock.
    for lock in sorted([*folder.glob("*/lock"), *folder.glob("*/*/lock")]):
        try:
            age_seconds = now - lock.stat().st_mtime
        except OSError:
            continue  # the build has just ended
        old = age_seconds > _BUILD_SECONDS
        yield Finding(
            check="extensions-lock",
            severity="warning" if old else "note",
            path=(),
            value=ABSENT,
            why=f"{lock} is {age_seconds / 60:,.0f} minutes old: runs that need it wait for ever",
            fix="delete it if no build is running"
            if old
            else "wait for the build, or delete it if there is none",
        )
