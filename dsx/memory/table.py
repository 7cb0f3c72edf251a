"""A memory estimate as text and as a picture.

Needs matplotlib (the extra ``plot``), which is imported when it is first needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import wrap
from typing import TYPE_CHECKING

from dsx.errors import no_matplotlib
from dsx.memory.estimate import Phase, Role, RunMemory
from dsx.schedules.timeline import FAINT, GRID, INK
from dsx.terminal import aligned, amount, unit_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from dsx.memory.layer_record import DeviceKind
    from dsx.models.flops import Precision


def beyond_tensors(device: DeviceKind, precision: Precision) -> str:
    """What a process takes besides, in words; of oneDNN's as a test measures it."""
    if device == "cuda":
        return "what CUDA, NCCL and cuBLAS take outside of tensors, and the allocator's gaps"
    kernels = (
        "oneDNN's kernels, about 0.5 MiB for each shape of a bf16 product, " if precision == "bf16" else ""
    )
    return f"{kernels}what Python and its libraries take, and the allocator's gaps"


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
"""Every category of :class:`dsx.memory.ledger.Label`, lasting ones first."""

MOST_ROWS = 10
"""Pipeline ranks that a table lists; of more, the ends and the fullest."""

_LEAST_SHARE = 0.005  # of the peak: lines below are summed up


def by_category(phase: Phase) -> dict[str, int]:
    """Bytes of each category at the phase's peak."""
    held = dict.fromkeys(CATEGORIES, 0)
    for label, size in phase.lines:
        held[label.category] += size
    return held


def table(memory: RunMemory, *, width: int = 0) -> str:
    """Bytes at each rank's peak, by category; lines have at most ``width`` characters unless it is 0."""
    unit = unit_of(memory.peak_bytes)[1]
    titles = ["pipeline rank", *CATEGORIES, "peak", "when"]
    rows = [titles]
    for role in _listed(memory):
        peak = role.estimate.peak
        held = by_category(peak)
        rows.append(
            [
                f"{role.pp_rank} ({_ranks(role)})",
                *(f"{held[category] / unit:.2f}" for category in CATEGORIES),
                f"{peak.peak_bytes / unit:.2f}",
                f"{peak.name}{f', {peak.where}' if peak.where else ''}",
            ]
        )
    lines = aligned(rows, left=(0, len(titles) - 1), width=width)
    hidden = len(memory.roles) - len(rows) + 1
    if hidden:
        peaks = [role.estimate.peak.peak_bytes for role in memory.roles]
        lines.append(
            f"({hidden} more pipeline ranks; all between {min(peaks) / unit:.2f} and {max(peaks) / unit:.2f})"
        )
    return "\n".join(lines)


def details(role: Role, *, width: int = 0) -> str:
    """The lines of a role's peak, largest first, with shapes and operators; ``width`` as in :func:`table`."""
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
    return "\n".join(aligned(rows, left=range(1, 5), width=width))


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


MOST_BY_PHASE = 8
"""Pipeline ranks whose phases are drawn one by one; of more, each rank's highest alone."""

_LIMIT = "#b91c1c"
_COLOURS = {
    # Lasting ones in blues and greens, passing ones in warm colours: Okabe and Ito's hues, readable in print.
    "parameters": "#0b4f8a",
    "gradients": "#3b8fd0",
    "optimizer": "#0f766e",
    "buckets": "#79c2b8",
    "activations": "#e07b1a",
    "logits": "#f2b75c",
    "transfers": "#b45db0",
    "temporaries": "#c0392b",
}


_WIDEST_INCHES = 13.3  # 1,280 pixels of a screen
_TITLE_CHARACTERS = 10.5  # an inch
_FARTHEST_LINE = 3.0  # peaks: a line beyond would make the bars too low to read


def draw(memory: RunMemory, *, title: str, capacity_bytes: int | None = None) -> Figure:
    """The picture as a matplotlib figure, on the scale of what the ranks hold.

    The memory of a GPU is a line where the scale has room for it, and words where it has not.

    Raises:
        ConfigError: matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise no_matplotlib("dsx estimate --format") from None
    each = len(memory.roles) <= MOST_BY_PHASE
    bars = [role.estimate.peak for role in memory.roles]
    places = [float(role.pp_rank) for role in memory.roles]
    groups: list[tuple[float, str]] = []
    if each:
        bars, places, groups = _by_phase(memory)
    name, unit = unit_of(memory.peak_bytes)
    width = min(_WIDEST_INCHES, max(7.5, 2.2 + 0.42 * len(bars)))
    figure = Figure(figsize=(width, 5.2), layout="constrained")
    axes = figure.subplots()
    _stack(axes, bars, places, unit)
    highest = memory.peak_bytes / unit
    if capacity_bytes is not None:
        highest = _capacity(axes, capacity_bytes, unit, highest)
    axes.set_ylim(0, highest * 1.08)
    axes.set_ylabel(f"{name} per rank")
    if each:
        axes.set_xticks(places, [phase.name for phase in bars], rotation=40, ha="right", fontsize="small")
        for place, title_of in groups:
            axes.annotate(
                title_of,
                (place, 0),
                xycoords=("data", "axes fraction"),
                xytext=(0, -44),
                textcoords="offset points",
                ha="center",
                va="top",
                color=INK,
            )
        figure.get_layout_engine().set(rect=(0, 0.04, 1, 0.96))  # type: ignore[union-attr,call-arg]
    else:
        axes.set_xlabel("pipeline rank, at its highest moment")
        axes.set_xlim(-0.7, len(bars) - 0.3)
        axes.locator_params(axis="x", integer=True)
    axes.grid(visible=True, axis="y", color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(color=FAINT)
    head, _, rest = title.partition(": ")
    across = int(_TITLE_CHARACTERS * figure.get_figwidth())
    lines = [line for part in (head, rest) for line in wrap(part, across)]
    axes.set_title("\n".join(lines), loc="left", fontsize="medium", color=INK)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside right center", frameon=False)
    return figure


def _capacity(axes: Axes, capacity_bytes: int, unit: int, highest: float) -> float:
    """Mark what a GPU has for the run; returns the highest value that the axis must show."""
    line = capacity_bytes / unit
    near = line <= _FARTHEST_LINE * highest
    if near:
        axes.axhline(line, color=_LIMIT, linewidth=1.4, linestyle=(0, (5, 3)))
    axes.annotate(
        f"{amount(capacity_bytes)} usable" + ("" if near else ", above this scale"),
        (1.0, line if near else 1.0),
        xycoords=("axes fraction", "data" if near else "axes fraction"),
        xytext=(0, 3 if near else -12),
        textcoords="offset points",
        ha="right",
        color=_LIMIT,
    )
    return max(highest, line) if near else 1.1 * highest  # room for the words


def _by_phase(memory: RunMemory) -> tuple[list[Phase], list[float], list[tuple[float, str]]]:
    """A bar per rank and phase, with a gap between ranks; and where each rank's name goes."""
    bars: list[Phase] = []
    places: list[float] = []
    groups: list[tuple[float, str]] = []
    left = 0.0
    for role in memory.roles:
        phases = role.estimate.phases
        bars += phases
        places += [left + index for index in range(len(phases))]
        groups.append((left + (len(phases) - 1) / 2, f"pipeline rank {role.pp_rank}"))
        left += len(phases) + 0.8
    return bars, places, groups


def _stack(axes: Axes, bars: Sequence[Phase], places: Sequence[float], unit: int) -> None:
    held = [by_category(phase) for phase in bars]
    below = [0.0] * len(bars)
    for category in CATEGORIES:
        heights = [of[category] / unit for of in held]
        if not any(heights):
            continue
        axes.bar(
            places,
            heights,
            0.86,
            bottom=below,
            color=_COLOURS[category],
            label=category,
            edgecolor="white",
            linewidth=0.4,
        )
        below = [low + height for low, height in zip(below, heights, strict=True)]
    if len(bars) <= 4 * MOST_BY_PHASE:
        for place, top in zip(places, below, strict=True):
            axes.annotate(
                f"{top:.3g}",
                (place, top),
                xytext=(0, 2),
                textcoords="offset points",
                ha="center",
                fontsize="x-small",
                color=FAINT,
            )
