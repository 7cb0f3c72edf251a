"""What a program has said of its work, but for what it says while one waits, which depends on the machine."""

from __future__ import annotations


def own_words(text: str) -> str:
    """Without the lines that say what takes long (``dsx.waiting``), or what is loaded."""
    return "".join(line for line in text.splitlines(keepends=True) if not line.startswith("... "))
