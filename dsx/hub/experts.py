"""Experts of transformers' modules over several ranks, with no code per family.

Families that decorate their experts for transformers' registry (``use_experts_implementation``) call them
alike: hidden states, the experts of each token, how much each counts. Their matrices, and biases if there are
any, are stacked along dim 0. So a rank can keep some of each stack, and the module's own forward computes
what comes to it (:mod:`dsx.nn.experts`), every row as a token with one expert that counts fully.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from dsx.hub.model_structure import structure_of
from dsx.hub.values import buffer_dtypes
from dsx.models.flops import Precision
from dsx.models.spec import HubModel
from dsx.nn.expert_load import Tally
from dsx.nn.experts import ExpertParallel, over_ranks
from dsx.nn.parallel import uncompiled
from dsx.nn.parameters import DTYPES

_COUNT = "num_experts"
_BIASES = ("e_score_correction_bias", "expert_bias")  # transformers' names of it
_CALLED_WITH = 3  # hidden states, and of each token experts and weights, in either order


def experts_in(block: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules of a block that hold stacks of experts, by path."""
    for path, module in block.named_modules():
        if holds_experts(module):
            yield path, module


def holds_experts(module: nn.Module) -> bool:
    """Whether a module's own parameters are stacks of experts, called as transformers' registry has it."""
    count = vars(module).get(_COUNT)
    if not hasattr(module, "_is_expert_parallel") or not isinstance(count, int):
        return False
    own = [parameter for _, parameter in module.named_parameters(recurse=False)]
    return bool(own) and all(parameter.ndim > 1 and len(parameter) == count for parameter in own)


def biases_in(block: nn.Module) -> list[str]:
    """Paths of the buffers [E] by which a block's routers choose, one for each module of experts, or none."""
    sizes = [vars(module)[_COUNT] for _, module in experts_in(block)]
    found = {path: each.numel() for path, each in block.named_buffers() if path.endswith(_BIASES)}
    return list(found) if sizes and list(found.values()) == sizes else []


def no_biases(model: HubModel, precision: Precision) -> str | None:
    """Why a model has no biases that loads could move; None if it has."""
    if not any(biases_in(block) for block in structure_of(model.config).list_of_blocks):
        return f"its routers have no buffer {' or '.join(_BIASES)}"
    dtypes = buffer_dtypes(model.config, DTYPES[precision])
    rounds = [path for path, each in dtypes.items() if path.endswith(_BIASES) and each != torch.float32]
    return f"transformers keeps {rounds[0]} in {precision}, which rounds small steps away" if rounds else None


def tallies_of(block: nn.Module, number: int, device: torch.device | str | None) -> list[Tally]:
    """Counts of block ``number``'s modules of experts, which must still have the experts of all ranks."""
    held = [(module, vars(module)[_COUNT]) for _, module in experts_in(block)]
    biases: list[str | None] = [*biases_in(block)] or [None] * len(held)
    return [Tally(number, *each, bias, device) for each, bias in zip(held, biases, strict=True)]


def share_experts(block: nn.Module, ep: ExpertParallel) -> None:
    """Have each of a block's modules of experts hold this rank's and compute what comes to them.

    Args:
        block: On the meta device. Its parameters get the shapes of this rank's part with their storage.
        ep: The ranks that hold the experts together.
    """
    if ep.size > 1:
        for _, module in experts_in(block):
            module.forward = SharedExperts(module, ep)
            for name, inner in [*module.named_children()]:
                if not [*inner.parameters()]:  # ZeRO-3 counts modules; ranks without rows run none
                    delattr(module, name)
                    setattr(module, name, inner.forward)


class SharedExperts:
    """The forward of a module of experts, of which the other ranks hold the rest."""

    def __init__(self, module: Any, ep: ExpertParallel) -> None:
        self._module, self._ep, self._forward = module, ep, module.forward
        self._experts: int = module.num_experts
        module.num_experts = self._experts // ep.size
        names = [*inspect.signature(inspect.unwrap(type(module).forward)).parameters][1:]
        self._names = names[:_CALLED_WITH]

    def __call__(self, *given: Any, **named: Any) -> Tensor:
        """The sum over a token's experts for each, in the shape of the hidden states."""
        found: Tensor = uncompiled(self._run, given, named)
        return found

    def _run(self, given: Any, named: Any) -> Tensor:
        told = dict(zip(self._names, given, strict=False)) | named
        hidden, *routed = (told[name] for name in self._names)
        turned = routed[0].is_floating_point()
        index, weights = reversed(routed) if turned else routed
        tokens = hidden.reshape(-1, hidden.shape[-1])

        def compute(rows: Tensor, which: Tensor) -> Tensor:
            if not len(rows):  # a part of the backward all the same, which the other ranks wait for
                own = (each for each in self._module.parameters() if each.requires_grad)
                return rows + torch.stack([0.0 * each.sum() for each in own] or [rows.new_zeros(())]).sum()
            one = which.unsqueeze(1), torch.ones((len(rows), 1), dtype=weights.dtype, device=rows.device)
            found: Tensor = self._forward(rows, *(reversed(one) if turned else one))
            return found

        routes = index.reshape(len(tokens), -1), weights.reshape(len(tokens), -1)
        y = over_ranks(tokens, *routes, ep=self._ep, experts=self._experts, compute=compute)
        return y.view_as(hidden)
