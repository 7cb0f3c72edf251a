"""Which modules of a family's blocks are feed-forwards, found by trying a small model of it."""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from dsx.hub.balance import Routers
from dsx.hub.context_probe import FAR, block_calls
from dsx.hub.model_structure import BlockCall, structure_of
from dsx.hub.shrunk import kinds_of, random_model, shrunk
from dsx.models.transformers_settings import torch_forms

_MATRIX = 2  # dims


def feed_forwards(config: str, *, balanced: bool = False) -> list[frozenset[str]]:
    """For every block of a model, the paths of what may compute some tokens of its input at a time.

    These are modules that take hidden states alone, give as many, and of some tokens the same as of all.
    Experts whose auxiliary loss is trained are left out: it counts the tokens that a router sees. Of a model
    of which no small one runs, nothing is known, and nothing found. ``balanced``: such a loss is trained.
    """
    found = _found(config, balanced)
    return [found.get(kind, frozenset()) for kind in kinds_of(structure_of(config))]


@lru_cache(maxsize=8)
def _found(config: str, balanced: bool) -> Mapping[Hashable, frozenset[str]]:
    try:
        with torch_forms(), torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(1)
            return _tried(config, balanced)
    except Exception:  # noqa: BLE001 - whatever the family's code does on this machine
        return {}


def _tried(config: str, balanced: bool) -> Mapping[Hashable, frozenset[str]]:
    small = shrunk(json.loads(config), tensor=1)
    structure, model = structure_of(json.dumps(small, sort_keys=True)), random_model(small).eval()
    kinds = kinds_of(structure)
    found = dict[Hashable, frozenset[str]]()
    for number, (block, call) in enumerate(block_calls(model, structure.blocks, 1)):
        routed = Routers(model, block, f"{structure.blocks}.{number}") if balanced else None
        found.setdefault(kinds[number], _by_token(block, call, routed))
    return found


def _by_token(block: nn.Module, call: BlockCall, routers: Routers | None) -> frozenset[str]:
    """The outermost modules below a block that do so."""
    seen: dict[str, tuple[Any, Any, Any]] = {}
    handles = [
        inner.register_forward_hook(
            lambda _, given, named, gave, path=path: seen.update({path: (given, named, gave)}),
            with_kwargs=True,
        )
        for path, inner in block.named_modules()
        if path
        and any(True for _ in inner.children())
        and any(p.dim() >= _MATRIX for p in inner.parameters())
    ]
    call.make(block, call.hidden)
    for handle in handles:
        handle.remove()
    found: list[str] = []
    for path, inner in block.named_modules():
        inside = any(path.startswith(f"{each}.") for each in found)
        if path in seen and not inside and _takes_tokens(inner, *seen[path], routers):
            found.append(path)
    return frozenset(found)


def _takes_tokens(module: nn.Module, given: Any, named: Any, gave: Any, routers: Routers | None) -> bool:
    """Whether a module that made ``gave`` of ``given`` makes the same of a part of the tokens."""
    if named or len(given) != 1 or not isinstance(gave, Tensor) or gave.shape != given[0].shape:
        return False
    if routers is not None:
        with routers.collected() as logits:
            module(given[0])
        if logits:
            return False
    (x,), some = given, given[0].shape[1] // 3
    others = [(x[:, :some], gave[:, :some]), (x[:, some:], gave[:, some:]), (x.flip(1), gave.flip(1))]
    far = FAR * float(gave.abs().max())
    return all(float((module(part.contiguous()) - wanted).abs().max()) <= far for part, wanted in others)
