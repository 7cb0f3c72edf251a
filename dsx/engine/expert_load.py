"""What the ranks count of their experts' tokens, put together, and the biases of routers that follow it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from dsx.config.run import RunConfig
from dsx.engine.pipeline_module import PipelineModule
from dsx.models.spec import HubModel

if TYPE_CHECKING:  # loaded by models with experts
    from dsx.nn.expert_load import Tally


class ExpertLoad:
    """Counts of a step, over the blocks of this rank.

    Ranks of a tensor axis see the same tokens, so that what the first counts is enough.

    Args:
        pipeline: This rank's layers, of which blocks with experts have ``tallies``.
        config: Of the run; without one nothing is put together.
    """

    def __init__(self, pipeline: PipelineModule, config: RunConfig | None) -> None:
        self._groups, self._device = pipeline.groups, pipeline.device
        self._speed = 0.0 if config is None else config.dsx.moe.bias_update_speed
        model = None if config is None else config.model
        self._experts = model.experts if isinstance(model, HubModel) else {}
        self._held: list[tuple[Any, Tally]] = [
            (layer, tally) for layer in pipeline.chunks.modules() for tally in getattr(layer, "tallies", ())
        ]

    def begin(self) -> None:
        if self._held:
            torch._foreach_zero_([tally.counts for _, tally in self._held])

    def biases(self) -> dict[str, Tensor]:
        """This rank's biases by ``block.path``."""
        told = ((layer, tally) for layer, tally in self._held if tally.bias is not None)
        return {tally.name: layer.block.get_buffer(tally.bias) for layer, tally in told}

    def move_biases(self) -> None:
        """Move each bias by ``speed`` towards equal loads. Collective over the ranks of this stage's data.

        ``b += speed * sign(mean of c - c)`` for counts c over the global batch (Wang et al. 2024,
        arXiv:2408.15664, algorithm 1): every rank adds the same, so that replicas stay alike.
        """
        moved = [(layer, tally) for layer, tally in self._held if tally.bias is not None and self._speed]
        if not moved:
            return
        counts = torch.cat([tally.counts for _, tally in moved])
        dist.all_reduce(counts, group=self._groups.data)
        parts = counts.split([len(tally.counts) for _, tally in moved])
        for (layer, tally), each in zip(moved, parts, strict=True):
            bias, own = layer.block.get_buffer(tally.bias), each[:-1]
            towards = (own.sum() - own * len(own)).sign()  # whole numbers, so that equal is equal
            bias.add_(towards.view_as(bias).to(bias.dtype), alpha=self._speed)

    def of_all(self) -> dict[int, list[int]]:
        """How many choices of the last step went to each expert, by block. Collective over all ranks."""
        if not self._experts:
            return {}
        sizes = list(self._experts.values())
        total = torch.zeros(sum(sizes), dtype=torch.int64, device=self._device)
        parts = dict(zip(self._experts, total.split(sizes), strict=True))
        for _, tally in self._held if self._groups.speaks else ():
            parts[tally.number][: len(tally.counts) - 1] += tally.counts[:-1]
        dist.all_reduce(total)
        return {number: own.tolist() for number, own in zip(parts, total.cpu().split(sizes), strict=True)}


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
