"""Fit the model's constants to published rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import log

import numpy as np

from dsx.planner.cluster import preset
from dsx.planner.costs import Efficiency
from planner_bench.published import CALIBRATED_ON, ROWS, ZERO3_FITTED_TO, Run
from planner_bench.runs import SOFTWARE, PublishedRun, published

NAMES = {
    "A100": ("matmul", "memory", "foundry"),
    "H100": ("matmul", "memory", "attention", "fusion", "foundry"),
}
"""What is fitted for a generation; ``foundry`` is the share of LLM Foundry's kernel of attention."""

PRESETS = {"A100": "A100-80", "H100": "H100"}
"""A generation's cluster whose constants are shipped."""

_STEP = 1e-2
_MOST_CHANGE = 0.3
_LARGE = 0.03  # Errors above it count by their size, not by its square: single odd rows decide nothing.
_TURNS = 6


@dataclass(frozen=True, slots=True)
class Row:
    """A published run of any source, with its relative error as a function of the constants.

    Attributes:
        generation: Of its GPUs.
        run: The run.
        is_fitted: Whether the constants are fitted to it.
    """

    generation: str
    run: PublishedRun | Run
    is_fitted: bool

    def error(self, constants: Mapping[str, float]) -> float:
        """The logarithm of predicted over published throughput."""
        shares = dict(constants)
        foundry = shares.pop("foundry", None)
        efficiency = replace(shipped(self.generation), **shares)  # type: ignore[arg-type]
        if isinstance(self.run, Run):
            return log(self.run.teraflops(self.run.predict(efficiency)) / self.run.published)
        software = SOFTWARE[self.run.software]
        if foundry is not None and self.run.software.startswith("foundry"):
            software = replace(software, attention_share=foundry)
        return log(self.run.predicted(efficiency, software) / self.run.tokens)


def shipped(generation: str) -> Efficiency:
    """The constants that dsx uses for a generation."""
    return Efficiency.of(preset(PRESETS[generation]))


def rows(generation: str, *, adapters: bool = False, context: bool = False) -> Iterator[Row]:
    """All of a generation that are compared; ZeRO-3 of 2021 has constants of its own (:func:`zero3`).

    Args:
        generation: Which.
        adapters: Those in which adapters alone are trained, in place of the others.
        context: Those in which ranks share sequences, in place of the others.
    """
    for run in published():
        kind = bool(run.adapter), run.context > 1
        if run.cluster.generation == generation and kind == (adapters, context):
            yield Row(generation, run, run.is_fitted)
    if generation == "A100" and not (adapters or context):
        yield from (Row(generation, run, run.name in CALIBRATED_ON) for run in ROWS)


def start(generation: str) -> dict[str, float]:
    """The shipped constants that are fitted."""
    values = {name: getattr(shipped(generation), name, 0.0) for name in NAMES[generation]}
    return values | {"foundry": SOFTWARE[f"foundry, {generation}"].attention_share}


def improved(generation: str, constants: Mapping[str, float]) -> dict[str, float]:
    """A step of Newton's method in the logarithms of the constants, on the rows that are fitted.

    Errors are weighed by one over their size, which minimises their sum and not that of their squares.
    """
    fitted = [row for row in rows(generation) if row.is_fitted]
    now = np.array([row.error(constants) for row in fitted])
    slopes = []
    for name, value in constants.items():
        moved = dict(constants) | {name: value * (1 + _STEP)}
        slopes.append((np.array([row.error(moved) for row in fitted]) - now) / log(1 + _STEP))
    weight = np.maximum(np.abs(now), _LARGE) ** -0.5
    change, *_ = np.linalg.lstsq(np.stack(slopes, axis=1) * weight[:, None], -now * weight, rcond=None)
    limited = np.exp(np.clip(change, -_MOST_CHANGE, _MOST_CHANGE))
    return {name: float(value * by) for (name, value), by in zip(constants.items(), limited, strict=True)}


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
