"""Whether a step's loss and gradient norm are those of a healthy run."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

_SIGMA = 1.4826  # of a normal distribution, by its median absolute deviation
_LEAST = 0.01  # of the median: what a window of nearly equal values takes for a deviation


@dataclass(frozen=True, slots=True)
class StepFinding:
    """What is wrong with a step.

    Attributes:
        kind: ``nonfinite``, ``loss_spike`` or ``grad_norm_spike``, as the config names its policies.
        text: The same in words, with the figures.
    """

    kind: str
    text: str


@dataclass(slots=True)
class RecentSteps:
    """The last healthy values of a series.

    It is robust: a few outliers move neither its median nor its deviation.

    Args:
        size: Values that are kept; half of them must be there before a value can be a spike.
        sigmas: Standard deviations above the median from which a value is a spike.

    >>> window = RecentSteps(8, 6.0)
    >>> for value in (2.0, 2.1, 1.9, 2.0):
    ...     window.add(value)
    >>> window.limit(), window.is_spike(2.4), window.is_spike(2.5)
    (2.44478, False, True)
    """

    size: int
    sigmas: float
    values: deque[float] = field(default_factory=deque)

    def add(self, value: float) -> None:
        self.values.append(value)
        while len(self.values) > self.size:
            self.values.popleft()

    def limit(self) -> float:
        """Largest healthy value; infinite while too few are known."""
        if len(self.values) < self.size // 2:
            return math.inf
        middle = median(self.values)
        deviation = _SIGMA * median(abs(value - middle) for value in self.values)
        return middle + self.sigmas * max(deviation, _LEAST * abs(middle))

    def is_spike(self, value: float) -> bool:
        return value > self.limit()


class Health:
    """Judges steps by those before them.

    The same figures in the same order give the same findings on every rank, in every layout and after a
    restart from :attr:`state`.
    """

    def __init__(self, *, window: int, sigmas: float) -> None:
        self._series = {"loss": RecentSteps(window, sigmas), "grad_norm": RecentSteps(window, sigmas)}

    def judge(self, loss: float, grad_norm: float | None, *, spikes: frozenset[str]) -> StepFinding | None:
        """What is wrong with a step of these figures; None for a healthy one.

        ``grad_norm`` is that before clipping, None if unknown. ``spikes`` are those of ``loss`` and
        ``grad_norm`` whose spikes are looked for.
        """
        known = {"loss": loss} if grad_norm is None else {"loss": loss, "grad_norm": grad_norm}
        for name, value in known.items():
            if not math.isfinite(value):
                return StepFinding("nonfinite", f"{name.replace('_', ' ')} is {value}")
        for name, value in known.items():
            window = self._series[name]
            if name in spikes and window.is_spike(value):
                text = f"{name.replace('_', ' ')} {value:.4g} is over {window.limit():.4g}"
                count = len(window.values)
                return StepFinding(f"{name}_spike", f"{text}, as the {count} healthy steps before have it")
        return None

    def accept(self, loss: float, grad_norm: float | None) -> None:
        self._series["loss"].add(loss)
        if grad_norm is not None:
            self._series["grad_norm"].add(grad_norm)

    @property
    def state(self) -> dict[str, list[float]]:
        """What :meth:`restore` needs, for the checkpoint."""
        return {name: list(window.values) for name, window in self._series.items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from :attr:`state`; an empty one forgets everything."""
        for name, window in self._series.items():
            values: Sequence[float] = state.get(name, ())
            window.values.clear()
            for value in values:
                window.add(float(value))
