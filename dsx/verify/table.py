"""A verdict on a layout as text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from textwrap import wrap

from dsx.terminal import aligned
from dsx.verify.diagnosis import ParityFinding, StepRow

_WIDTH = 100
_LABEL = 11


def parity_table(rows: Iterable[StepRow]) -> list[str]:
    """Lines: a heading and a line per step, with how far each number is from the reference's, relative."""
    heading = ("clipping", "step", "loss", "off", "norm", "off", "gradients off", "at most in", "updates off")
    cells = [heading, *map(_cells, rows)]
    return aligned(cells, left=range(len(heading)))


def findings_text(findings: Sequence[ParityFinding]) -> list[str]:
    """Lines on what differs, and why it may."""
    lines = []
    for finding in findings:
        place = f"step {finding.step}" if finding.step else "before the first step"
        lines += labelled("differs", f"{place}: {finding.cause}")
        if finding.tensor:
            lines += labelled("first", finding.tensor)
        lines += labelled("seen", finding.what)
        lines += labelled("likely", finding.why)
    return lines


def labelled(label: str, text: str) -> list[str]:
    """``text`` beside a label, its further lines aligned with the first."""
    first, *rest = wrap(text, _WIDTH - _LABEL, break_long_words=False, break_on_hyphens=False) or [""]
    return [f"{label:<{_LABEL}}{first}", *(f"{'':<{_LABEL}}{line}" for line in rest)]


def _off(seen: float, expected: float) -> str:
    return f"{abs(seen - expected) / max(abs(expected), 1e-30):.1e}"


def _cells(row: StepRow) -> tuple[str, ...]:
    return (
        f"{row.clipping:.4g}" if row.clipping else "none",
        str(row.step),
        f"{row.loss:.6f}",
        _off(row.loss, row.expected_loss),
        "not told" if row.norm is None else f"{row.norm:.6f}",
        "" if row.norm is None else _off(row.norm, row.expected_norm),
        f"{row.gradient:.1e}",
        row.gradient_of,
        "-" if row.update is None else f"{row.update:.1e}",
    )
