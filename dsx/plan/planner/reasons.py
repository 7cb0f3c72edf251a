"""Why a layout loses, in words."""

from __future__ import annotations

from dsx.plan.planner.search import Plan, Ranked, gibibytes

_WORTH_A_WORD = 0.003  # Of the best step.
_MOST_WORDS = 3


def reason(plan: Plan, ranked: Ranked) -> str:
    """Why ``ranked`` was not chosen: its memory, or the parts of its step that are longer."""
    best = plan.best[0]
    step = ranked.time.seconds / best.time.seconds - 1.0
    if not ranked.fits:
        takes = ("at least " if ranked.is_bound else "") + gibibytes(ranked.peak_bytes)
        return f"{step:+.1%} step, but takes {takes} of {gibibytes(plan.cap_bytes)}"
    have, want = ranked.time.parts(), best.time.parts()
    change = {name: (have[name] - want[name]) / best.time.seconds for name in have}
    worst = sorted(change.items(), key=lambda item: -abs(item[1]))[:_MOST_WORDS]
    words = [f"{name} {part:+.1%}" for name, part in worst if abs(part) >= _WORTH_A_WORD]
    if step < _WORTH_A_WORD and not words:
        return f"{step:+.1%} step: as fast"
    return f"{step:+.1%} step: {', '.join(words)}" if words else f"{step:+.1%} step"
