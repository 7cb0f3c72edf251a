"""One thing that the doctor has to say about a config."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

Path = tuple[str | int, ...]
Severity = Literal["error", "warning", "note"]


def dotted(path: Sequence[str | int]) -> str:
    """``("a", "b", 0)`` as ``a.b[0]``.

    >>> dotted(("scheduler", "params", "betas", 1))
    'scheduler.params.betas[1]'
    """
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")


@dataclass(frozen=True, slots=True)
class Edit:
    """One change of the file.

    Attributes:
        kind: "set" a value (makes the objects on the way), "remove" the key, "rename" it (value kept).
        path: The key.
        value: What "set" writes; the new last part for "rename".
    """

    kind: Literal["set", "remove", "rename"]
    path: Path
    value: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing to say.

    Attributes:
        check: Id of the check: ``batch-triple``. Stable: people write it into their tools.
        severity: "error": it fails, or silently does something else than written. "warning": likely a
            mistake. "note": worth knowing.
        path: The key; empty for the file as a whole.
        value: What is written there; ABSENT where nothing is.
        why: What is wrong: a clause without a full stop, that can follow "key = value: ".
        fix: What to do: an imperative clause without a full stop.
        edits: Changes that mend it; empty if a person must choose.
        safe: Whether the edits may be made without asking: DeepSpeed does the same with them as without, or
            refuses the config (here or when the engine is made) and they are the only reading of it. Nothing
            that DeepSpeed refuses for what it asks is taken away, and no value that it uses is changed.
    """

    check: str
    severity: Severity
    path: Path
    value: Any
    why: str
    fix: str
    edits: tuple[Edit, ...] = ()
    safe: bool = False


class _Absent:
    """The value of a key that is not written."""

    def __repr__(self) -> str:
        return "absent"


ABSENT = _Absent()
