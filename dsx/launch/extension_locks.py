"""What DeepSpeed compiles when it starts, said before it begins, and the locks that killed builds leave.

Later runs would wait for such a lock in silence.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from dsx.launch.entry import local_rank
from dsx.terminal import complain
from dsx.waiting import Waiting


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtensionLock:
    """A lock file.

    Attributes:
        age_seconds: Time since it was made.
        builder: The process of this machine that has it open, as a build has from its start to its end
            (torch/utils/file_baton.py); None if it was killed or runs on another machine.
    """

    path: Path
    age_seconds: float
    builder: int | None

    @property
    def why(self) -> str:
        """What it does to a run."""
        age = f"{self.path} is {self.age_seconds / 60:,.0f} minutes old"
        if self.builder is not None:
            return f"{age}; process {self.builder} builds there: runs that need it wait for it"
        return f"{age} and no process of this machine builds there: runs that need it wait for ever"

    @property
    def fix(self) -> str:
        """What to do."""
        built_by_another = "delete it, if no other machine builds in that folder"
        return "wait for the build" if self.builder is not None else built_by_another

    def text(self) -> str:
        """One line for people, with what to do about a lock that nobody holds."""
        return self.why if self.builder is not None else f"{self.why}. Fix: {self.fix}"


def extensions_folder(environment: Mapping[str, str] | None = None) -> Path:
    """Where torch builds extensions (torch/utils/cpp_extension.py, get_default_build_root)."""
    given = (os.environ if environment is None else environment).get("TORCH_EXTENSIONS_DIR")
    return Path(given) if given else Path.home() / ".cache" / "torch_extensions"


def extension_locks(folder: Path, now_seconds: float | None = None) -> Iterator[ExtensionLock]:
    """Every lock below ``folder``, whether its build is alive or not.

    ``now_seconds``, since the epoch, is the time to reckon their age from; now by default.
    """
    now = time.time() if now_seconds is None else now_seconds
    # <folder>/<name>/lock, or <folder>/py311_cu121/<name>/lock.
    locks = sorted([*folder.glob("*/lock"), *folder.glob("*/*/lock")])
    builders = _openers({lock.resolve() for lock in locks}) if locks else {}
    for lock in locks:
        with suppress(OSError):  # the build has just ended
            age_seconds = now - lock.stat().st_mtime
            yield ExtensionLock(path=lock, age_seconds=age_seconds, builder=builders.get(lock.resolve()))


def _openers(files: set[Path]) -> dict[Path, int]:
    """Processes that have one of the files open, of those that this user may look into."""
    found: dict[Path, int] = {}
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):  # another user's, or it has ended meanwhile
            opened = {Path(file.path) for file in process.open_files()}
            found |= dict.fromkeys(opened & files, process.pid)
    return found


@contextmanager
def builds_said(waiting: Waiting) -> Iterator[None]:
    """Within the block, what DeepSpeed compiles is said before it begins, a minute or two for each operator.

    The first rank of each machine names a lock for which it would wait without end.
    """
    from deepspeed.ops.op_builder.builder import OpBuilder

    build = OpBuilder.jit_load

    def said(builder: Any, *given: Any, **named: Any) -> Any:
        folder, name = extensions_folder(), str(builder.name)
        for lock in extension_locks(folder) if local_rank() == 0 else ():
            if lock.path.parent.name == name and lock.builder is None:
                complain(f"warning: {lock.text()}")
        # It has been compiled: torch looks whether it is still up to date, in a second.
        if any(True for place in ("", "*/") for _ in folder.glob(f"{place}{name}/{name}.so")):
            return build(builder, *given, **named)
        with waiting.instead(f"compiling DeepSpeed's {name}, once on this machine, a minute or two"):
            return build(builder, *given, **named)

    OpBuilder.jit_load = said
    try:
        yield
    finally:
        OpBuilder.jit_load = build
