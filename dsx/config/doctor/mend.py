"""``dsx check --fix``: make the edits of findings in the file."""

from __future__ import annotations

import difflib
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import reduce
from pathlib import Path as File
from typing import Any

from dsx.config.doctor.context import step
from dsx.config.doctor.edit import apply_to_text
from dsx.config.doctor.finding import ABSENT, Finding, Path
from dsx.config.doctor.source import from_text
from dsx.errors import ConfigError


def has(config: Mapping[str, Any], path: Path) -> bool:
    """Whether ``path`` is written in ``config``."""
    found: Any = reduce(step, path, config)
    return found is not ABSENT


@dataclass(frozen=True, slots=True)
class Mended:
    """A text with the edits of findings made.

    Attributes:
        before: The text as it was.
        after: The text with the edits.
        findings: Those whose edits were made.
    """

    before: str
    after: str
    findings: tuple[Finding, ...]

    def diff(self, name: str) -> str:
        """A unified diff; empty if nothing changed."""
        lines = (self.before.splitlines(keepends=True), self.after.splitlines(keepends=True))
        marked = difflib.unified_diff(*lines, fromfile=name, tofile=f"{name} (mended)")
        return "".join(line if line.endswith("\n") else f"{line}\n" for line in marked)


# What shows behind a mended key, and behind that.
_MOST_ROUNDS = 5


def settle(text: str, look: Callable[[str], Iterable[Finding]], *, unsafe: bool = False) -> Mended:
    """``text`` mended until ``look`` finds nothing more to mend in it; see :func:`mend`."""
    after = text
    done: list[Finding] = []
    for _ in range(_MOST_ROUNDS):
        mended = mend(after, look(after), unsafe=unsafe)
        if not mended.findings:
            break
        after, done = mended.after, [*done, *mended.findings]
    return Mended(text, after, tuple(done))


def mend(text: str, findings: Iterable[Finding], *, unsafe: bool = False) -> Mended:
    """``text`` with the edits of ``findings`` made, one finding after the other.

    A finding whose key an earlier one has moved or removed is left for the next time.

    Args:
        text: The config.
        findings: What was found in it.
        unsafe: Also make edits that change what a run does.
    """
    after, done = text, []
    first = from_text(text).config
    for finding in findings:
        now = from_text(after).config
        # What is to be added and has come since is another finding's.
        came = any(
            edit.kind == "set" and has(now, edit.path) and not has(first, edit.path) for edit in finding.edits
        )
        if came or not finding.edits or not (finding.safe or unsafe):
            continue
        try:
            changed = apply_to_text(after, finding.edits)
        except (ConfigError, KeyError, IndexError, TypeError):
            continue
        if changed != after:
            after = changed
            done.append(finding)
    return Mended(text, after, tuple(done))


def write(path: File, text: str) -> File:
    """Put ``text`` into the file at once; what it held is kept as ``NAME.orig``, unless that exists.

    Returns:
        The path of the kept file.

    Raises:
        ConfigError: The file cannot be written.
    """
    kept = path.with_name(path.name + ".orig")
    try:
        if not kept.exists():
            shutil.copy2(path, kept)
        with tempfile.NamedTemporaryFile("wb", dir=path.parent, prefix=path.name, delete=False) as new:
            new.write(text.encode())
        shutil.copymode(path, new.name)
        File(new.name).replace(path)
    except OSError as error:
        raise ConfigError(str(path), f"it cannot be written ({error})", "make the folder writable") from None
    return kept
