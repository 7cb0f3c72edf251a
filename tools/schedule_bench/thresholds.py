"""Bounds that the schedules must keep, checked against the tables of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

TIE = 0.005
"""Engines whose medians are closer than this are equally fast: rounds of one engine differ by more."""

Table = dict[str, Any]
Rows = dict[str, dict[str, Any]]
Figure = Callable[[dict[str, Any]], float]


@dataclass(frozen=True, slots=True)
class Outcome:
    """One threshold on one table."""

    what: str
    measured: float
    bound: float
    at_most: bool

    @property
    def met(self) -> bool:
        """Whether the figure is on the right side."""
        return self.measured <= self.bound if self.at_most else self.measured >= self.bound

    def __str__(self) -> str:
        sign = "<=" if self.at_most else ">="
        return (
            f"{'met   ' if self.met else 'MISSED'} {self.what}: {self.measured:.3f} ({sign} {self.bound:.3f})"
        )


# (ranks, micro-batches or None for any, schedule, excess over the simulation at most)
_EXCESS = (
    (4, 8, "1f1b", 0.03),
    (4, 8, "interleaved", 0.035),
    (4, 8, "interleaved_zb", 0.06),
    (4, 8, "zbv", 0.05),
    (8, None, "1f1b", 0.06),
    (8, None, "interleaved", 0.06),
    (8, None, "interleaved_zb", 0.06),
    (8, None, "zbv", 0.06),
)
# (ranks, micro-batches, schedule, speed over stock DeepSpeed's 1F1B at least)
_SPEED = (
    (4, 8, "interleaved", 1.15),
    (4, 8, "interleaved_zb", 1.24),
    (4, 4, "interleaved", 1.25),
    (4, 4, "interleaved_zb", 1.45),
)
_WIRE_SHARE = 0.25
_WIRE_SCHEDULES = ("interleaved wide", "interleaved_zb wide")
# (ranks, micro-batches, speed over stock with such wires of dsx's fastest schedule at least)
_WIRE_SPEED = (4, 16, 1.24)
# Real compute: micro-batches -> speed over stock of dsx's fastest schedule at least.
_REAL = {2: 1.15, 4: 1.06}


def outcomes(table: Table, wire_share: float) -> list[Outcome]:
    """Every threshold that this table's size has, and that its engines allow to check."""
    rows: Rows = {row["engine"]: row for row in table["rows"]}
    size = f"p={table['ranks']} m={table['micro_batches']}"
    if table["alone_seconds"] is not None:
        return [*_of_real(table, rows, size)]
    found = [*_of_virtual(table, rows, size), *_of_peers(rows, size, "", lambda row: row["median_seconds"])]
    if wire_share == _WIRE_SHARE:
        found += _of_wire(table, rows, size)
    return found


def _of_virtual(table: Table, rows: Rows, size: str) -> Iterator[Outcome]:
    for ranks, count, name, bound in _EXCESS:
        here = table["ranks"] == ranks and count in (None, table["micro_batches"])
        if here and f"dsx {name}" in rows:
            what = f"{size}: excess of dsx {name} over its simulation"
            yield Outcome(what, rows[f"dsx {name}"]["excess"], bound, at_most=True)
    for ranks, count, name, bound in _SPEED:
        if (table["ranks"], table["micro_batches"]) == (ranks, count) and f"dsx {name}" in rows:
            what = f"{size}: speed of dsx {name} over deepspeed 1f1b"
            yield Outcome(what, rows[f"dsx {name}"]["speed"], bound, at_most=False)


def _of_peers(rows: Rows, size: str, how: str, seconds: Figure) -> Iterator[Outcome]:
    for engine, row in rows.items():
        whose, name = engine.split(" ", 1)
        if whose != "dsx" and f"dsx {name}" in rows:
            what = f"{size}: speed of dsx {name} over {engine}{how}"
            yield Outcome(what, seconds(row) / seconds(rows[f"dsx {name}"]), 1 - TIE, at_most=False)


def _of_wire(table: Table, rows: Rows, size: str) -> Iterator[Outcome]:
    yield from _of_peers(rows, size, " with wires", lambda row: row["wire"]["median_seconds"])
    peer = rows.get("torch interleaved")
    for name in _WIRE_SCHEDULES:
        row = rows.get(f"dsx {name}")
        if row is None:
            continue
        if peer is not None:
            what = f"{size}: wires per micro-batch of dsx {name}, at most torch interleaved's"
            paid, bound = (r["wire"]["wires_per_micro_batch"] for r in (row, peer))
            yield Outcome(what, paid, bound, at_most=True)
    ranks, count, least = _WIRE_SPEED
    ours = [row for name, row in rows.items() if name.startswith("dsx ")]
    if (table["ranks"], table["micro_batches"]) == (ranks, count) and ours:
        best = max(ours, key=lambda row: row["wire"]["speed"])
        what = f"{size}: speed of {best['engine']} over deepspeed 1f1b with wires"
        yield Outcome(what, best["wire"]["speed"], least, at_most=False)


def _of_real(table: Table, rows: Rows, size: str) -> Iterator[Outcome]:
    # Torch's layers are plain modules: which of them is faster says nothing about schedules.
    same = {name: row for name, row in rows.items() if not name.startswith("torch ")}
    yield from _of_peers(same, size, ", real compute", lambda row: row["median_seconds"])
    ours = [row for name, row in rows.items() if name.startswith("dsx ")]
    if table["ranks"] == 2 and table["micro_batches"] in _REAL and ours:
        best = max(ours, key=lambda row: row["speed"])
        what = f"{size}: speed of {best['engine']} over deepspeed 1f1b, real compute"
        yield Outcome(what, best["speed"], _REAL[table["micro_batches"]], at_most=False)
