"""What one process knows of a mixture's routers: the z-loss of their logits, and how their biases move."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dsx.config.run import RunConfig
from dsx.hub.experts import tallies_of
from dsx.hub.model_structure import structure_of
from dsx.models.spec import HubModel


class ReferenceRouters:
    """Those of a transformers model that trains.

    Attributes:
        asked: What its forward is to be called with besides.
    """

    def __init__(self, model: Any, config: RunConfig) -> None:
        self._moe = config.dsx.moe
        self.asked = {"output_router_logits": True} if self._moe.z_loss else {}
        self._logits: tuple[Tensor, ...] = ()
        if self.asked:  # its own output of them, whichever class returns it
            model.get_decoder().register_forward_hook(self._note)
        self._held = {}
        if isinstance(config.model, HubModel):
            blocks = model.get_submodule(structure_of(config.model.config).blocks)
            self._held = {
                tally.name: (block.get_buffer(tally.bias), tally.counts)
                for at, block in enumerate(blocks)
                for tally in tallies_of(block, at, None)
                if tally.bias is not None
            }
        self._counts: dict[str, Tensor] = {}

    def _note(self, _module: Any, _given: Any, outputs: Any) -> None:
        self._logits = outputs.router_logits

    def begin(self, values: Mapping[str, Tensor]) -> None:
        """Begin a step with biases by block and path, where ``values`` has them."""
        self._counts = {name: torch.zeros_like(counts) for name, (_, counts) in self._held.items()}
        for name, (bias, counts) in self._held.items():
            bias.copy_(values.get(name, bias))
            counts.zero_()

    def count(self, times: int) -> None:
        """Count what has run since the last call so many times."""
        for name, (_, counts) in self._held.items():
            self._counts[name] += times * counts
            counts.zero_()

    def z_loss(self) -> Tensor | float:
        """Of the last call: Zoph et al. 2022, arXiv:2202.08906, equation 5, summed over layers."""
        return sum(self._moe.z_loss * torch.logsumexp(each, -1).square().mean() for each in self._logits)

    def moved(self) -> dict[str, Tensor]:
        """The biases after the step (Wang et al. 2024, arXiv:2408.15664, algorithm 1)."""
        means = {name: counts[:-1].double().mean() for name, counts in self._counts.items()}
        return {
            name: bias.float()
            + self._moe.bias_update_speed * (means[name] - self._counts[name][:-1]).sign().float()
            for name, (bias, _) in self._held.items()
        }
