"""Experts of transformers' modules over several ranks, with no code per family.

Families that decorate their experts for transformers' registry (``use_experts_implementation``) call them
alike: hidden states, the experts of each token, how much each counts. Their matrices, and biases if there are
any, are stacked along dim 0. So a rank can keep some of each stack, and the module's own forward computes
what comes to it (:mod:`dsx.nn.experts`), every row as a token with one expert that counts fully.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from dsx.hub.model_structure import structure_of
from dsx.hub.values import buffer_dtypes
from dsx.models.flops import Precision
from dsx.models.spec import HubModel
from dsx.nn.expert_load import Tally
from dsx.nn.experts import ExpertParallel, over_ranks
from dsx.nn.parallel import uncompiled
from dsx.nn.parameters import DTYPES
from dsx.nn.split import WeightGradients

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


class Beside:
    """A child that a module calls with its own input once its experts have run, such as shared experts.

    It runs while rows travel, and the family's code, which asks for its output later, is given that.
    """

    def __init__(self, parent: nn.Module, name: str) -> None:
        self._parent, self._name, self._forward = parent, name, parent.forward
        self._child = parent.get_submodule(name)
        self._given: Tensor | None = None
        self._early: tuple[Tensor, Any] | None = None
        parent.forward = self._around

    def _around(self, *given: Any, **named: Any) -> Any:
        """The parent's forward, which finds this in the place of the child."""
        if torch.compiler.is_compiling() or not given:  # a compiled block calls it where its graph has it
            return self._forward(*given, **named)
        self._given = given[0]
        vars(self._parent)[self._name] = self
        try:
            return self._forward(*given, **named)
        finally:
            del vars(self._parent)[self._name]
            self._given = self._early = None

    def run(self) -> None:
        """Call the child with what its parent was given."""
        given, self._given = self._given, None
        self._early = None if given is None else (given, self._child(given))

    def __call__(self, *given: Any, **named: Any) -> Any:
        """The child's output, for whoever calls it."""
        early, self._early = self._early, None
        if early is not None and not named and len(given) == 1 and given[0] is early[0]:
            return early[1]
        return self._child(*given, **named)


def called_beside(block: nn.Module, width: int) -> dict[str, str]:
    """By path of experts the child of the module above them that :class:`Beside` is for, found by a call.

    Args:
        block: On the meta device, as transformers makes it.
        width: The hidden size.
    """
    named = {path: _called_after(block, path, width) for path, _ in experts_in(block)}
    return {path: name for path, name in named.items() if name is not None}


def _called_after(block: nn.Module, path: str, width: int) -> str | None:
    """The first child that the module above experts calls after them, if once and with its own input."""
    parent, experts = block.get_submodule(path.rpartition(".")[0]), block.get_submodule(path)
    names = {each: name for name, each in parent.named_children() if any(True for _ in each.parameters())}
    called: list[tuple[nn.Module, tuple[Any, ...]]] = []

    def note(module: nn.Module, given: tuple[Any, ...], more: dict[str, Any]) -> None:
        called.append((module, (*given, *more.values())))

    hooks = [each.register_forward_pre_hook(note, with_kwargs=True) for each in names]
    x = torch.empty(1, 4, width, device="meta", dtype=next(parent.parameters()).dtype)
    experts.forward = lambda hidden, *_, **__: torch.empty_like(hidden)
    with suppress(Exception):  # it takes more than x, or branches on values: then nothing runs beside
        functional_call(parent, {name: each.to("meta") for name, each in parent.named_buffers()}, (x,))
    del experts.forward
    for hook in hooks:
        hook.remove()
    order = [module for module, _ in called]
    after, given = next(iter(called[order.index(experts) + 1 :] if experts in order else ()), (None, ()))
    alone = after is not None and order.count(after) == 1 and len(given) == 1 and given[0] is x
    return names[after] if after is not None and alone else None


def share_experts(
    block: nn.Module, ep: ExpertParallel, split: WeightGradients | None, beside: Mapping[str, str]
) -> bool:
    """Have each of a block's modules of experts hold this rank's and compute what comes to them.

    Args:
        block: On the meta device. Its parameters get the shapes of this rank's part with their storage.
        ep: The ranks that hold the experts together.
        split: Where the block's weight gradients wait when the backward is divided.
        beside: As :func:`called_beside` has found it of the block.

    Returns:
        Whether there are any, for which rows travel.
    """
    found = [*experts_in(block)] if ep.size > 1 else []
    for path, module in found:
        early = Beside(block.get_submodule(path.rpartition(".")[0]), beside[path]) if path in beside else None
        module.forward = SharedExperts(module, ep, split, early)
        for name, inner in [*module.named_children()]:
            if not any(True for _ in inner.parameters()):
                # ZeRO-3 counts the modules that run. A rank to which no row comes runs no activation, and
                # would then keep and gather other parameters than the rest, which wait for it.
                delattr(module, name)
                setattr(module, name, inner.forward)
    return bool(found)


class SharedExperts:
    """The forward of a module of experts, of which the other ranks hold the rest."""

    def __init__(
        self, module: Any, ep: ExpertParallel, split: WeightGradients | None, beside: Beside | None = None
    ) -> None:
        self._beside = None if beside is None else beside.run
        self._module, self._ep, self._split, self._forward = module, ep, split, module.forward
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
        told = {"ep": self._ep, "experts": self._experts, "split": self._split, "beside": self._beside}
        y = over_ranks(tokens, *routes, compute=compute, **told)
        return y.view_as(hidden)
