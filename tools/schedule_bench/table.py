"""A run's figures as text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Row = dict[str, Any]

# Heading -> its text for a row. "-" stands for what there is no figure of.
_COLUMNS: dict[str, Callable[[Row], str]] = {
    "v": lambda row: str(row["chunks"]),
    "ms": lambda row: _ms(row["median_seconds"]),
    "spread": lambda row: _ms(row["spread_seconds"]),
    "CPU ms": lambda row: _ms(row["cpu_seconds"]),
    "theory": lambda row: _ms(row["theory_seconds"]),
    "simulated": lambda row: _ms(row["simulated_seconds"]),
    "excess": lambda row: _percent(row["excess"]),
    "bubble": lambda row: _percent(row["bubble"]),
    "simulated ": lambda row: _percent(row["simulated_bubble"]),
    "vs stock": lambda row: f"{row['speed']:.3f}x",
    "simulated  ": lambda row: f"{row['simulated_speed']:.3f}x",
}
_WIRE_COLUMNS: dict[str, Callable[[Row], str]] = {
    "wired ms": lambda row: _ms(row["wire"]["median_seconds"]),
    "wires/mb": lambda row: f"{row['wire']['wires_per_micro_batch']:.2f}",
    "simulated   ": lambda row: f"{row['wire']['simulated_wires_per_micro_batch']:.2f}",
    "vs stock ": lambda row: f"{row['wire']['speed']:.3f}x",
}


def as_text(table: dict[str, Any], arguments: dict[str, Any]) -> str:
    """One size's table, a line per engine."""
    size = f"p = {table['ranks']}, m = {table['micro_batches']}, median of {arguments['rounds']} rounds"
    if table["alone_seconds"] is None:
        size += f", F = I = W = {arguments['forward_ms']:g} ms per rank"
    else:
        size += (
            f", a GPT-2 of {table['rows'][0]['parameters']:,} parameters that takes a rank alone "
            f"{_ms(table['alone_seconds'])} ms"
        )
    columns = dict(_COLUMNS)
    if table["rows"][0]["wire"] is not None:
        size += f", wires of {arguments['wire']:g} F"
        columns |= _WIRE_COLUMNS
    widths = {name: max(8, len(name.strip())) for name in columns}
    lines = [
        size,
        f"{'engine':<24}" + "".join(f" {name.strip():>{width}}" for name, width in widths.items()),
    ]
    for row in table["rows"]:
        cells = (f" {text(row):>{widths[name]}}" for name, text in columns.items())
        lines.append(f"{row['engine']:<24}" + "".join(cells))
    return "\n".join(lines)


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:.1f}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}%"
