"""A schedule, and a measured step beside its simulation, as text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from dsx.schedules.schedule import Op, Schedule
from dsx.schedules.simulate import Span, Timeline, simulate
from dsx.schedules.timeline import NAMES, comparison_title, used_ops
from dsx.schedules.timeline import milliseconds as ms
from dsx.schedules.trace import Comparison, Executed, computation
from dsx.terminal import aligned, wrapped

_MOST_COLUMNS = 4096


def schedule_table(
    schedule: Schedule, timeline: Timeline | None = None, *, width: int = 110, unit: str = "s"
) -> str:
    """Draw a schedule, in panels one below the other when it is wider than ``width`` characters.

    Args:
        schedule: The schedule.
        timeline: The times of its actions; by default simulated, with a backward of twice a forward and free
            transfers.
        width: Characters per line. A panel has at least one column, however narrow the lines.
        unit: Unit of the timeline's time: ``s``, or ``forward`` when a forward costs 1.

    >>> from dsx.schedules.builders import build
    >>> print(schedule_table(build("1f1b", 2, 1, 2)), end="")
            0     2     4     6     8
    rank 0  F0 F1 .  .  B0 -- .  B1 --
    rank 1  .  F0 B0 -- F1 B1 -- .  .
    <BLANKLINE>
    F1: forward of micro-batch 1, B1: its backward, . idle; one column is the time of one forward
    """
    if timeline is None:
        timeline, unit = simulate(schedule), "forward"
    slot = max(
        min(end - start for row in timeline.spans for _, start, end in row),
        timeline.seconds / _MOST_COLUMNS,
    )
    column = "the time of one forward" if (slot, unit) == (1.0, "forward") else f"{slot:.3g} {unit}"
    several = schedule.num_chunks > 1  # F3, or 5F3 with the virtual stage
    labels = [
        [str(action) if several else f"{action.op}{action.micro_batch}" for action, _, _ in row]
        for row in timeline.spans
    ]
    cell = 1 + max(len(label) for row in labels for label in row)
    columns = max(1, int(timeline.seconds / slot + 0.5))
    rows = [
        _cells(row, names, slot, cell, columns) for row, names in zip(timeline.spans, labels, strict=True)
    ]
    heads = [f"rank {rank}" for rank in range(schedule.num_ranks)]
    indent = 2 + max(map(len, heads))
    per_panel = max(1, (width - indent) // cell)
    panels = []
    for first in range(0, columns, per_panel):
        last = min(columns, first + per_panel)
        lines = [" " * indent + _ruler(first, last, cell)]
        lines += [
            head.ljust(indent) + "".join(row[first:last]) for head, row in zip(heads, rows, strict=True)
        ]
        panels.append("".join(line.rstrip() + "\n" for line in lines))
    used = {action.op for row in schedule.rows for action in row}
    stage = "0" if schedule.num_chunks > 1 else ""
    meanings = [f"{stage}{op}1: {meaning}" for op, meaning in _MEANINGS.items() if op in used]
    if stage:
        meanings[0] += " in virtual stage 0"
    return "\n".join([*panels, f"{', '.join(meanings)}, . idle; one column is {column}\n"])


def _cells(row: tuple[Span, ...], labels: list[str], slot: float, cell: int, columns: int) -> list[str]:
    """One string of ``cell`` characters per column: a label where an action starts, dashes while it lasts."""
    cells = [".".ljust(cell)] * columns
    for (_, start, end), label in zip(row, labels, strict=True):
        # Half a column always rounds up, so that actions one column apart stay apart.
        first = min(int(start / slot + 0.5), columns - 1)
        for column in range(first + 1, min(int(end / slot + 0.5), columns)):
            cells[column] = "-" * (cell - 1) + " "
        cells[first] = label.ljust(cell)
    return cells


def _ruler(first: int, last: int, cell: int) -> str:
    """Column numbers, at every other column, or rarer if they need more room."""
    every = max(2, -(-(len(str(last)) + 1) // cell))
    start = -(-first // every) * every
    numbers = (str(column).ljust(cell * every) for column in range(start, last, every))
    return " " * (cell * (start - first)) + "".join(numbers)


_MEANINGS = {
    Op.FORWARD: "forward of micro-batch 1",
    Op.BACKWARD: "its backward",
    Op.BACKWARD_INPUT: "the input's gradient",
    Op.BACKWARD_WEIGHT: "the weights' gradients",
}


def summary(comparison: Comparison) -> list[tuple[str, str]]:
    """Label-and-value rows: step, bubble, what bounds their precision, and the worst action."""
    trace, measured, simulated = comparison.trace, comparison.measured, comparison.simulated
    error = max(trace.clock_error_seconds)
    rows = [
        (
            "step",
            f"{ms(measured.seconds)}, simulated {ms(simulated.seconds)} ({comparison.excess:+.1%})",
        ),
        ("bubble", f"{measured.bubble:.1%} of the ideal time, simulated {simulated.bubble:.1%}"),
        ("after it", f"{ms(trace.after_seconds)} to the end of the step (reductions, optimizer)"),
        ("transfers", _transfers(comparison)),
        ("clocks", f"the ranks' agree to {ms(error)}" if error else "the ranks read the same one"),
    ]
    worst = comparison.worst(1)
    if worst and worst[0].lost > 0:
        rows.append(("lost most", f"{ms(worst[0].lost)} by {worst[0].action} on rank {worst[0].rank}"))
    return rows


def step_table(comparison: Comparison, *, worst: int = 5, width: int = 0) -> str:
    """The summary, the costs per virtual stage, and the ``worst`` actions with what they waited for.

    Lines have at most ``width`` characters, unless it is 0.
    """
    head = aligned(summary(comparison)[:5], left=(0, 1), width=width)
    title = comparison_title(comparison)
    return (
        "\n\n".join(
            (
                wrapped(title, width, indent="  ") if width else title,
                "\n".join(head),
                "median per micro-batch\n" + _indented(_cost_rows(comparison), width, text=False),
                "actions that lost most, beside the simulation's costs\n"
                + _indented(_loss_rows(comparison, worst), width),
            )
        )
        + "\n"
    )


def facts_json(comparison: Comparison) -> str:
    """Everything that the comparison found, as JSON, with times in seconds."""
    trace, costs = comparison.trace, comparison.costs
    usual = costs.by_op(trace.schedule.num_stages)
    data = {
        "title": comparison_title(comparison),
        "step": trace.step,
        "measured_seconds": comparison.measured.seconds,
        "simulated_seconds": comparison.simulated.seconds,
        "ideal_seconds": comparison.ideal_seconds,
        "excess": comparison.excess,
        "measured_bubble_over_ideal": comparison.measured.bubble,
        "simulated_bubble_over_ideal": comparison.simulated.bubble,
        "tail_seconds": list(trace.tail_seconds),
        "clock_error_seconds": list(trace.clock_error_seconds),
        "transfer_seconds": costs.transfer_seconds,
        "transfers_measured": comparison.num_transfers,
        "costs_seconds": {op.value: list(usual[op]) for op in used_ops(trace.schedule)},
        "actions": [_facts(ran) for row in comparison.actions for ran in row],
    }
    return json.dumps(data, indent=2) + "\n"


def _facts(ran: Executed) -> dict[str, Any]:
    return {
        "rank": ran.rank,
        "action": str(ran.action),
        "start": ran.start,
        "end": ran.end,
        "simulated_start": ran.simulated_start,
        "simulated_end": ran.simulated_end,
        "start_error": ran.start_error,
        "duration_error": ran.duration_error,
        "gap": ran.gap,
        "lost": ran.lost,
        "waited_for": None if ran.waited_for is None else str(ran.waited_for),
        "held_up_by": None if ran.held_up_by is None else str(ran.held_up_by),
    }


def _transfers(comparison: Comparison) -> str:
    costs, saved = comparison.costs, comparison.simulated.seconds - comparison.ideal_seconds
    if not comparison.num_transfers:
        return "none that a rank waited for from its start; simulated as free"
    return (
        f"{ms(costs.transfer_seconds)} (median of {comparison.num_transfers} that a rank waited for), "
        f"{ms(saved)} of the simulated step"
    )


def _cost_rows(comparison: Comparison) -> list[Sequence[str]]:
    schedule, costs = comparison.trace.schedule, comparison.costs
    used = used_ops(schedule)
    rows: list[Sequence[str]] = [("stage", "rank", *(NAMES[op] for op in used))]
    usual = costs.by_op(schedule.num_stages)
    rows += (
        (str(stage), str(schedule.rank_of(stage)), *(ms(usual[op][stage]) for op in used))
        for stage in range(schedule.num_stages)
    )
    return rows


def _loss_rows(comparison: Comparison, count: int) -> list[Sequence[str]]:
    schedule = computation(comparison.trace.schedule)
    rows: list[Sequence[str]] = [("rank", "action", "lost", "late", "longer", "was waiting for")]
    for ran in comparison.worst(count):
        waited = "nothing"
        if ran.waited_for is not None:
            waited = f"{ran.waited_for} on rank {schedule.rank_of(ran.waited_for.stage)}"
        if ran.held_up_by is not None:
            waited += f", then {ran.held_up_by}"
        times = (ran.lost, ran.gap, ran.duration_error)
        rows.append((str(ran.rank), str(ran.action), *(ms(value) for value in times), waited))
    return rows


def _indented(rows: Sequence[Sequence[str]], width: int, *, text: bool = True) -> str:
    lines = aligned(rows, left=(len(rows[0]) - 1,) if text else (), width=width and max(1, width - 2))
    return "\n".join(f"  {line}".rstrip() for line in lines)
