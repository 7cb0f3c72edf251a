"""A measured step beside its simulation, as text and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from dsx.plan.compare import Comparison, Executed
from dsx.plan.trace import computation
from dsx.report.palette import NAMES
from dsx.report.timeline import comparison_title
from dsx.report.timeline import milliseconds as ms
from dsx.spec.schedule import Op


def summary(comparison: Comparison) -> list[tuple[str, str]]:
    """Label-and-value rows: step, bubble, what bounds their precision, and the worst action."""
    trace, measured, simulated = comparison.trace, comparison.measured, comparison.simulated
    rows = [
        (
            "step",
            f"{ms(measured.seconds)}, simulated {ms(simulated.seconds)} ({comparison.excess:+.1%})",
        ),
        ("bubble", f"{measured.bubble:.1%} of the ideal time, simulated {simulated.bubble:.1%}"),
        ("after it", f"{ms(trace.after_seconds)} to the end of the step (reductions, optimizer)"),
        ("transfers", _transfers(comparison)),
        ("clocks", _clocks(max(trace.clock_error_seconds))),
    ]
    worst = comparison.worst(1)
    if worst and worst[0].lost > 0:
        rows.append(("lost most", f"{ms(worst[0].lost)} by {worst[0].action} on rank {worst[0].rank}"))
    return rows


def render(comparison: Comparison, *, worst: int = 5) -> str:
    """The summary, the costs per virtual stage, and the ``worst`` actions with what they waited for."""
    facts = summary(comparison)[:5]
    width = max(len(label) for label, _ in facts)
    head = [f"{label:<{width}}  {value}" for label, value in facts]
    return (
        "\n\n".join(
            (
                comparison_title(comparison),
                "\n".join(head),
                "median per micro-batch\n" + _columns(_cost_rows(comparison)),
                "actions that lost most, beside the simulation's costs\n"
                + _columns(_loss_rows(comparison, worst)),
            )
        )
        + "\n"
    )


def facts_json(comparison: Comparison) -> str:
    """Everything that the comparison found, times in seconds."""
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
        "costs_seconds": {op.value: list(usual[op]) for op in _ops(comparison)},
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


def _clocks(error_seconds: float) -> str:
    return f"the ranks' agree to {ms(error_seconds)}" if error_seconds else "the ranks read the same one"


def _ops(comparison: Comparison) -> list[Op]:
    used = {action.op for row in comparison.trace.schedule.rows for action in row}
    return [op for op in NAMES if op in used]


def _cost_rows(comparison: Comparison) -> list[Sequence[str]]:
    schedule, costs = comparison.trace.schedule, comparison.costs
    used = _ops(comparison)
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


def _columns(rows: Iterable[Sequence[str]]) -> str:
    """Cells aligned to the right, but for the last column."""
    listed = [list(row) for row in rows]
    widths = [max(map(len, column)) for column in zip(*listed, strict=True)]
    lines = []
    for *cells, last in listed:
        start = "  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=False))
        lines.append(f"  {start}  {last}".rstrip())
    return "\n".join(lines)
