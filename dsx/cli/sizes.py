"""Numbers of bytes, as people write them."""

from __future__ import annotations

import re

import typer

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def parse_bytes(text: str) -> int:
    """``512MiB``, ``2G`` or ``1000`` as a number of bytes; units are powers of 1024.

    Raises:
        typer.BadParameter: Not a size.

    >>> parse_bytes("512MiB"), parse_bytes("1.5g"), parse_bytes("1000")
    (536870912, 1610612736, 1000)
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?\s*", text.lower())
    if match is None:
        raise typer.BadParameter(f"{text!r} is no size; write for example 512MiB")
    return int(float(match[1]) * _UNITS[match[2]])


def show_bytes(count: int) -> str:
    """A number of bytes for people.

    >>> show_bytes(0), show_bytes(2048), show_bytes(3 << 30)
    ('0 B', '2.00 KiB', '3.00 GiB')
    """
    for unit, name in ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if count >= unit:
            return f"{count / unit:.2f} {name}"
    return f"{count} B"
