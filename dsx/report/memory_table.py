"""A memory estimate as text: a row per pipeline rank, then what the fullest rank holds."""

from __future__ import annotations

from collections.abc import Mapping

from dsx.plan.memory.estimate import Phase
from dsx.plan.memory.roles import Role, RunMemory
from dsx.report.progress import unit_of

CATEGORIES = (
    "parameters",
    "gradients",
    "optimizer",
    "buckets",
    "activations",
    "logits",
    "transfers",
    "temporaries",
)
"""Every category of :class:`dsx.plan.memory.tape.Label`, lasting ones first."""

MOST_ROWS = 10
"""Pipeline ranks that a table lists; of more, the ends and the fullest."""

_LEAST_SHARE = 0.005  # of the peak: lines below are summed up


def by_category(phase: Phase) -> dict[str, int]:
    """Bytes of each category at the phase's peak."""
    held = dict.fromkeys(CATEGORIES, 0)
    for label, size in phase.lines:
        held[label.category] += size
    return held


def table(memory: RunMemory, traced: Mapping[int, int] | None = None) -> str:
    """Bytes at each pipeline rank's peak, by category; ``traced`` adds the traced peak of pipeline ranks."""
    unit = unit_of(memory.peak_bytes)[1]
    titles = ["pipeline rank", *CATEGORIES, "peak", *(["traced"] if traced else []), "when"]
    rows = [titles]
    for role in _listed(memory):
        peak = role.estimate.peak
        held = by_category(peak)
        rows.append(
            [
                f"{role.pp_rank} ({_ranks(role)})",
                *(f"{held[category] / unit:.2f}" for category in CATEGORIES),
                f"{peak.peak_bytes / unit:.2f}",
                *([f"{traced[role.pp_rank] / unit:.2f}"] if traced else []),
                f"{peak.name}{f', {peak.where}' if peak.where else ''}",
            ]
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(titles))]
    last = len(titles) - 1
    lines = [
        "  ".join(
            cell.ljust(width) if i in (0, last) else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    hidden = len(memory.roles) - len(rows) + 1
    if hidden:
        peaks = [role.estimate.peak.peak_bytes for role in memory.roles]
        lines.append(
            f"({hidden} more pipeline ranks; all between {min(peaks) / unit:.2f} and {max(peaks) / unit:.2f})"
        )
    return "\n".join(lines)


def details(role: Role) -> str:
    """The lines of a role's peak with formula and source, largest first."""
    peak = role.estimate.peak
    unit = unit_of(peak.peak_bytes)[1]
    shown = [(label, size) for label, size in peak.lines if size >= _LEAST_SHARE * peak.peak_bytes]
    rest = peak.peak_bytes - sum(size for _, size in shown)
    rows = [
        (f"{size / unit:.2f}", label.category, label.name, label.formula, label.source)
        for label, size in shown
    ]
    if rest > 0:
        rows.append((f"{rest / unit:.2f}", "", "all smaller lines", "", ""))
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if i == 0 else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def _listed(memory: RunMemory) -> list[Role]:
    roles = memory.roles
    if len(roles) <= MOST_ROWS:
        return list(roles)
    wanted = {role.pp_rank: role for role in (*roles[:3], memory.highest, *roles[-2:])}
    return [wanted[pp_rank] for pp_rank in sorted(wanted)]


def _ranks(role: Role) -> str:
    """``ranks 0-1, 4-5``, or with a count if there are many spans."""
    spans: list[list[int]] = []
    for rank in role.ranks:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    if len(spans) > 3:
        return f"{len(role.ranks)} ranks from {role.ranks[0]}"
    words = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
    return f"rank{'s' if len(role.ranks) > 1 else ''} {words}"
