"""How often a run saves, and what failures leave of its time: formulas, and failures one by one. Pure.

Each component fails by itself, at a constant rate (exponential times), so that the next failure of a run
comes at the sum of the rates. It costs the training since the last complete checkpoint, the time until it is
noticed, and a start, which another failure can interrupt. A part of the failures takes its node away until it
is repaired: a spare one takes its place, or the run waits, or it goes on in a smaller layout.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush, nsmallest
from math import exp, floor, inf, lgamma, log, sqrt
from random import Random
from typing import NamedTuple

DAY_SECONDS = 86_400.0

PARTS = ("goodput", "saves", "again", "down", "waiting", "slower")
"""Where the time goes: training that counts; saves that stop it; training that was lost; until failures are
noticed, and starts; until nodes are repaired; what a smaller layout trains less."""

_FAILURES, _LIVES = 10_000, 200  # At most: what failures cost is known to a hundredth of itself.


def young(mttf_seconds: float, pause_seconds: float) -> float:
    """Training between two saves by J. W. Young, CACM 17(9), 1974, p. 530."""
    return sqrt(2 * pause_seconds * mttf_seconds)


def daly(mttf_seconds: float, pause_seconds: float) -> float:
    """The same to a higher order, by J. T. Daly, FGCS 22, 2006, equation 37.

    >>> round(daly(24 * 60.0, 5.0))  # minutes, as in figure 3 of the paper
    117
    """
    if pause_seconds >= 2 * mttf_seconds:
        return mttf_seconds
    part = pause_seconds / (2 * mttf_seconds)
    return young(mttf_seconds, pause_seconds) * (1 + sqrt(part) / 3 + part / 9) - pause_seconds


def as_good(mttf_seconds: float, pause_seconds: float, points: float) -> tuple[float, float]:
    """The shortest and the longest interval that cost at most ``points`` more than Young's, by his cost."""
    rate = sqrt(2 * pause_seconds / mttf_seconds) + points
    reach = sqrt(max(0.0, rate**2 - 2 * pause_seconds / mttf_seconds))
    return mttf_seconds * (rate - reach), mttf_seconds * (rate + reach)


def enough_spares(mean_away: float, most: int, share: float = 0.99) -> int:
    """The nodes that are away at once at most, ``share`` of the time: a Poisson number, cut at ``most``.

    >>> enough_spares(0.0, 9), enough_spares(6.05, 99), enough_spares(6.05, 9)
    (0, 12, 9)
    """
    known, count = exp(-mean_away), 0
    while known < share and count < most:
        count += 1
        known += exp(count * log(mean_away) - mean_away - lgamma(count + 1))
    return count


class SaveCost(NamedTuple):
    """A save stops training for its pause, and is complete its write later, beside training."""

    pause_seconds: float
    write_seconds: float = 0.0


class Rung(NamedTuple):
    """A layout that a run can go on in: the nodes that it needs, and its speed, of the first layout's."""

    nodes: int
    speed: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Hazards:
    """What happens to a run.

    Attributes:
        rungs: Its layout, and smaller ones that it may go on in while nodes are away, the fastest first.
        failures_per_second: With all nodes of the first one.
        notice_seconds: Until a failure is noticed.
        start_seconds: From there, or from a stop of one's own, to the first step.
        other_layout_seconds: What that takes longer in another layout than the checkpoint's.
        lost_share: Share of the failures that take a node away, for ``repair_seconds``.
        spares: Nodes beside those of the run.
    """

    rungs: tuple[Rung, ...]
    failures_per_second: float
    notice_seconds: float = 0.0
    start_seconds: float = 0.0
    other_layout_seconds: float = 0.0
    lost_share: float = 0.0
    repair_seconds: float = 0.0
    spares: int = 0

    @property
    def mttf_seconds(self) -> float:
        """Mean time to failure of the run."""
        return 1 / self.failures_per_second if self.failures_per_second else inf


def simulate(
    hazards: Hazards, saving: SaveCost, interval_seconds: float, *, days: float = 30.0, seed: int = 0
) -> dict[str, float]:
    """:data:`PARTS` of the time, the mean of many runs of so many days; the same arguments give the same.

    Runs are shorter where failures come so often that these say enough.
    """
    horizon = min(days * DAY_SECONDS, _FAILURES * hazards.mttf_seconds)
    each = horizon * hazards.failures_per_second
    lives = max(1, int(min(_LIVES, _FAILURES / each))) if each else 1
    chance, total = Random(seed), dict.fromkeys(PARTS, 0.0)  # noqa: S311
    for _ in range(lives):
        _live(hazards, saving, interval_seconds, horizon, chance, total)
    return {name: part / (lives * horizon) for name, part in total.items()}


def _live(
    hazards: Hazards,
    saving: SaveCost,
    interval: float,
    horizon: float,
    chance: Random,
    total: dict[str, float],
) -> None:
    """Add the seconds of one run to ``total``."""
    rungs, now, stopped, saved_in = hazards.rungs, 0.0, False, hazards.rungs[0]
    away: list[float] = []  # when each lost node is there again
    while now < horizon:
        while away and away[0] <= now:
            heappop(away)
        there = rungs[0].nodes + hazards.spares - len(away)
        at = next((at for at, rung in enumerate(rungs) if rung.nodes <= there), None)
        if at is None:
            then = min(away[0], horizon)
            total["waiting"] += then - now
            now = then
            continue
        rung, planned, fails = rungs[at], inf, inf  # planned: something else than a failure ends it
        if hazards.failures_per_second:
            fails = now + chance.expovariate(hazards.failures_per_second * rung.nodes / rungs[0].nodes)
        if stopped:
            planned = now + hazards.start_seconds + hazards.other_layout_seconds * (rung != saved_in)
        elif at and (more := rungs[at - 1].nodes - there) <= len(away):
            planned = nsmallest(more, away)[-1]  # enough are back for a larger layout
        then = min(fails, planned, horizon)
        if stopped:
            total["down"] += then - now
        else:
            cycle, ran, saved_in = interval + saving.pause_seconds, then - now, rung
            whole = then == horizon  # else it counts up to the last complete checkpoint
            saves = ran / cycle if whole else max(0, floor((ran - saving.write_seconds) / cycle))
            paused = saves * saving.pause_seconds
            trained = ran - paused if whole else saves * interval
            total["goodput"] += trained * rung.speed
            total["slower"] += trained * (1 - rung.speed)
            total["saves"] += paused
            total["again"] += ran - paused - trained
        stopped, now = not stopped or fails < planned, then
        if fails == then:
            now = min(then + hazards.notice_seconds, horizon)
            total["down"] += now - then
            if chance.random() < hazards.lost_share:
                heappush(away, then + hazards.repair_seconds)
