"""Fit the model's constants to published rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from dsx.planner.costs import Efficiency
from planner_bench.published import ZERO3_FITTED_TO, Run

_NAMES = ("matmul", "memory", "link")
_STEP = 1e-3
_MOST_CHANGE = 0.2
_ROUNDS = 12
_TURNS = 6


def calibrate(rows: Sequence[Run], start: Efficiency) -> Efficiency:
    """Shares of matrix multiplication, memory and links with which three rows come out as published.

    Newton's method on the rows' relative errors, in the logarithms of the three shares.
    """

    def errors(efficiency: Efficiency) -> list[float]:
        return [row.teraflops(row.predict(efficiency)) / row.published - 1 for row in rows]

    efficiency = start
    for _ in range(_ROUNDS):
        now = errors(efficiency)
        slopes = []
        for name in _NAMES:
            moved = replace(efficiency, **{name: getattr(efficiency, name) * (1 + _STEP)})
            slopes.append([(b - a) / _STEP for a, b in zip(now, errors(moved), strict=True)])
        change = _solve([list(column) for column in zip(*slopes, strict=True)], [-each for each in now])
        limited = [max(-_MOST_CHANGE, min(_MOST_CHANGE, each)) for each in change]
        efficiency = replace(
            efficiency,
            **{n: getattr(efficiency, n) * (1 + d) for n, d in zip(_NAMES, limited, strict=True)},
        )
    return efficiency


def zero3(efficiency: Efficiency) -> tuple[Efficiency, float]:
    """``Efficiency.beside``, and what ZeRO-3's collectives of 2021 got of the usual rate.

    Fitted to two rows of table 2 in turns: the first is bound by compute, the second by gathers.
    """
    share = 0.1
    for _ in range(_TURNS):
        efficiency = replace(efficiency, beside=_beside(efficiency, share))
        share = gather_share(efficiency)
    return efficiency, share


def _beside(efficiency: Efficiency, share: float) -> float:
    def is_slow(beside: float) -> bool:
        return not _is_too_fast(ZERO3_FITTED_TO[0], replace(efficiency, beside=beside), share)

    return _bisect(is_slow, 0.0, 1.0)


def gather_share(efficiency: Efficiency) -> float:
    """The second of these with the first one given."""
    return _bisect(lambda share: _is_too_fast(ZERO3_FITTED_TO[1], efficiency, share), 0.001, 1.0)


def _is_too_fast(run: Run, efficiency: Efficiency, share: float) -> bool:
    software = replace(run.software(), gather_share=share)
    return run.teraflops(run.predict(efficiency, software)) > run.published


def _bisect(is_high: Callable[[float], bool], low: float, high: float) -> float:
    for _ in range(24):
        middle = (low + high) / 2
        low, high = (low, middle) if is_high(middle) else (middle, high)
    return (low + high) / 2


def _solve(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Gauss's elimination."""
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    size = len(rows)
    for i in range(size):
        pivot = max(range(i, size), key=lambda r: abs(rows[r][i]))
        rows[i], rows[pivot] = rows[pivot], rows[i]
        for j in range(size):
            if j != i:
                factor = rows[j][i] / rows[i][i]
                rows[j] = [a - factor * b for a, b in zip(rows[j], rows[i], strict=True)]
    return [rows[i][-1] / rows[i][i] for i in range(size)]
