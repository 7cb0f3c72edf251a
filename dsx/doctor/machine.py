"""Facts of this machine that stop a run whatever the config says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from dsx.doctor.finding import ABSENT, Finding
from dsx.launch.extension_locks import extension_locks


def check_locks(folder: Path, now_seconds: float | None = None) -> Iterator[Finding]:
    """Locks of builds, for which later runs wait for ever without a word if the build was killed."""
    for lock in extension_locks(folder, now_seconds):
        why, _, fix = lock.text().partition(". Fix: ")
        yield Finding(
            check="extensions-lock",
            severity="note" if lock.builder else "warning",
            path=(),
            value=ABSENT,
            why=why,
            fix=fix or "wait for the build",
        )
