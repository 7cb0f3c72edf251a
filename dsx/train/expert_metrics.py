"""How evenly a step's tokens went to the experts of each layer, as metrics and as a word on the console."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dsx.train.curves import IMBALANCE


@dataclass(frozen=True, slots=True)
class LayerLoad:
    """Of a layer's choices of experts in a step.

    Attributes:
        load: Share of them that the busiest expert got, 0 to 1.
        imbalance: The busiest expert's over the mean, 1 to the number of experts.
        entropy: Of the shares, over that of equal ones: 1 where all are equal, 0 where one has all.
        idle: Experts that got none.
    """

    load: float
    imbalance: float
    entropy: float
    idle: int

    @classmethod
    def of(cls, counts: Sequence[int]) -> LayerLoad:
        """Of how many each expert got.

        >>> LayerLoad.of([6, 2, 0, 0])
        LayerLoad(load=0.75, imbalance=3.0, entropy=0.4056390622295664, idle=2)
        """
        total = max(1, sum(counts))
        shares = [count / total for count in counts]
        entropy = -sum(share * math.log(share) for share in shares if share)
        most = math.log(len(counts)) or 1.0
        return cls(max(shares), max(shares) * len(counts), entropy / most, shares.count(0))


def metrics_of(counts: Mapping[str, Sequence[int]]) -> dict[str, float | int]:
    """Metrics of each layer, and of the layer in which each is worst; ``moe/idle`` counts in all layers.

    Args:
        counts: Of each layer by name, how many choices each expert got.
    """
    loads = {name: LayerLoad.of(each) for name, each in counts.items()}
    if not loads:
        return {}
    found: dict[str, float | int] = {
        "moe/load": max(each.load for each in loads.values()),
        "moe/imbalance": max(each.imbalance for each in loads.values()),
        "moe/entropy": min(each.entropy for each in loads.values()),
        "moe/idle": sum(each.idle for each in loads.values()),
    }
    for name, each in loads.items():
        found[f"moe/load/{name}"] = each.load
        found[f"{IMBALANCE}{name}"] = each.imbalance
        found[f"moe/entropy/{name}"] = each.entropy
    return found


def told(metrics: Mapping[str, float | int]) -> str:
    """A word of :func:`metrics_of`; empty without experts.

    >>> told({"moe/imbalance": 1.834, "moe/idle": 2}), told({})
    ('experts 1.83x, 2 idle', '')
    """
    if not metrics:
        return ""
    idle = f", {metrics['moe/idle']} idle" if metrics["moe/idle"] else ""
    return f"experts {metrics['moe/imbalance']:.2f}x{idle}"
