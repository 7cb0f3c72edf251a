"""What the ranks count of their experts' tokens, put together, and the biases of routers that follow it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dsx.nn.expert_load import Tally
from dsx.parallel.groups import Groups


class ExpertLoad:
    """Counts of a step, over the blocks of this rank.

    Every rank of a tensor axis sees all tokens of its replica, so that what the first of them counts is
    enough; ranks along data and context see others.

    Args:
        layers: This rank's layers, of which blocks with experts have ``tallies`` and ``biases``.
        groups: Its process groups.
        device: Of the counts.
        speed: What biases move by after a step; 0 leaves them alone.
    """

    def __init__(self, layers: nn.Module, groups: Groups, device: torch.device, speed: float) -> None:
        self._groups, self._device, self._speed = groups, device, speed
        self._blocks: list[Any] = [each for each in layers.modules() if getattr(each, "tallies", ())]
        self._tallies: list[Tally] = [tally for block in self._blocks for tally in block.tallies]

    def begin(self) -> None:
        """Count a step from zero."""
        if self._tallies:
            torch._foreach_zero_([tally.counts for tally in self._tallies])

    def move_biases(self) -> None:
        """Move each bias by ``speed`` towards equal loads. Collective over the ranks of this stage's data.

        ``b += speed * sign(mean of c - c)`` for counts c over the global batch (Wang et al. 2024,
        arXiv:2408.15664, algorithm 1): every rank adds the same, so that replicas stay alike.
        """
        pairs = [pair for block in self._blocks for pair in block.biases()] if self._speed else []
        if not pairs:
            return
        sizes = [tally.experts for tally, _ in pairs]
        counts = torch.cat([tally.counts[: tally.experts] for tally, _ in pairs])
        dist.all_reduce(counts, group=self._groups.data)
        for (_, bias), own in zip(pairs, counts.split(sizes), strict=True):
            towards = (own.sum() - own * len(own)).sign()  # whole numbers, so that equal is equal
            bias.add_(towards.view_as(bias).to(bias.dtype), alpha=self._speed)

    def of_all(self, layers: Mapping[str, int]) -> dict[str, list[int]]:
        """How many choices of the last step went to each expert. Collective over all ranks.

        Args:
            layers: How many experts each module of experts of the model has, by name.
        """
        places, start = dict[str, slice](), 0
        for name, experts in layers.items():
            places[name], start = slice(start, start + experts), start + experts
        total = torch.zeros(start, dtype=torch.int64, device=self._device)
        if self._groups.speaks:
            for tally in self._tallies:
                total[places[tally.name]] += tally.counts[: tally.experts]
        dist.all_reduce(total)
        counts = total.tolist()
        return {name: counts[place] for name, place in places.items()}
