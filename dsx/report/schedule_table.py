"""A schedule as text: one line per rank, time from left to right."""

from __future__ import annotations

from dsx.plan.simulate import Span, Timeline, simulate
from dsx.spec.schedule import Op, Schedule

_MOST_COLUMNS = 4096


def render(schedule: Schedule, timeline: Timeline | None = None, *, width: int = 110, unit: str = "s") -> str:
    """Draw a schedule, in panels one below the other when it is wider than ``width`` characters.

    Args:
        schedule: What ran.
        timeline: When it ran; by default simulated with a backward of twice a forward and free transfers.
        width: Characters per line. A panel has at least one column, however narrow the lines.
        unit: Unit of the timeline's time: ``s``, or ``forward`` when a forward costs 1.

    >>> from dsx.plan.builders import build
    >>> print(render(build("1f1b", 2, 1, 2)), end="")
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
    labels = [[_label(schedule, span) for span in row] for row in timeline.spans]
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
    return "\n".join([*panels, _legend(schedule, column)])


def _label(schedule: Schedule, span: Span) -> str:
    """``F3``, or ``5F3`` with the virtual stage where a rank has several."""
    action = span[0]
    return str(action) if schedule.num_chunks > 1 else f"{action.op}{action.micro_batch}"


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


def _legend(schedule: Schedule, column: str) -> str:
    used = {action.op for row in schedule.rows for action in row}
    stage = "0" if schedule.num_chunks > 1 else ""
    meanings = [f"{stage}{op}1: {meaning}" for op, meaning in _MEANINGS.items() if op in used]
    if stage:
        meanings[0] += " in virtual stage 0"
    return f"{', '.join(meanings)}, . idle; one column is {column}\n"
