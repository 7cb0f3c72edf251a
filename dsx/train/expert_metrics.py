"""How evenly a step's tokens went to the experts of each layer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence


def metrics_of(counts: Mapping[int, Sequence[int]]) -> dict[str, float | int]:
    """Metrics of how many choices each expert got, by the numbers of layers, and of the worst layer.

    >>> metrics_of({3: [6, 2, 0, 0]})  # doctest: +NORMALIZE_WHITESPACE
    {'moe/load': 0.75, 'moe/imbalance': 3.0, 'moe/entropy': 0.4056390622295664, 'moe/idle': 2,
     'moe/load/layer3': 0.75, 'moe/imbalance/layer3': 3.0, 'moe/entropy/layer3': 0.4056390622295664}
    """
    if not counts:
        return {}
    shares = {layer: [each / max(1, sum(own)) for each in own] for layer, own in counts.items()}
    load = {layer: max(own) for layer, own in shares.items()}
    imbalance = {layer: load[layer] * len(own) for layer, own in shares.items()}
    entropy = {
        layer: -sum(share * math.log(share) for share in own if share) / math.log(max(2, len(own)))
        for layer, own in shares.items()
    }
    found = {
        "moe/load": max(load.values()),
        "moe/imbalance": max(imbalance.values()),
        "moe/entropy": min(entropy.values()),
        "moe/idle": sum(own.count(0) for own in counts.values()),
    }
    for kind, of_layers in (("load", load), ("imbalance", imbalance), ("entropy", entropy)):
        found |= {f"moe/{kind}/layer{layer}": value for layer, value in of_layers.items()}
    return found
