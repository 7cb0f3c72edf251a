"""Compiled blocks: torch.compile of what the blocks of a model compute, once for all equal ones.

A block of dsx's, of a transformers family's or of a layer list is called as ever: hooks, recomputation, what
ZeRO-3 gathers and releases, and the names in checkpoints stay outside. Inside, communication, masks of
dropout and a divided backward (:mod:`dsx.nn.split`) run between graphs; without them a block is one graph.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._dynamo import config as dynamo
from torch._dynamo.exc import TorchDynamoException
from torch._inductor.exc import InvalidCxxCompiler

from dsx.terminal import shortened

BACKEND = "inductor"


@torch.compiler.disable  # type: ignore[untyped-decorator]
def between_graphs(function: Callable[..., Any], *arguments: Any) -> Any:
    """``function(*arguments)`` as it is."""
    return function(*arguments)


class Compiled:
    """A function of equal blocks, compiled at its first call.

    Where the compiler fails, a warning names the blocks and the reason, and they run as they are.

    Args:
        function: Called with a block first.
        name: Of the blocks.
        backend: As ``torch.compile`` takes it.
    """

    def __init__(self, function: Callable[..., Any], name: str, backend: str | Callable[..., Any]) -> None:
        self._function, self._name = function, name
        self._compiled: Callable[..., Any] | None = torch.compile(function, backend=backend)

    def __deepcopy__(self, memo: dict[int, Any]) -> Compiled:
        """Itself, which a copied block shares."""
        return self

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """What the function gives."""
        if self._compiled is not None:
            try:
                return self._compiled(*arguments, **named)
            except (TorchDynamoException, InvalidCxxCompiler) as error:
                why = shortened(" ".join(str(error).split()), 160)
                warnings.warn(f"{self._name} runs as it is, not compiled: {why}", stacklevel=2)
                self._compiled = None
        return self._function(*arguments, **named)


def compile_blocks(
    layers: Iterable[Any], kinds: Iterable[type], backend: str | Callable[..., Any] | None = None
) -> list[nn.Module]:
    """Compile those of a rank's layers that are blocks, in place.

    Args:
        layers: This rank's.
        kinds: The class of every layer of the model that is not tied. A block is a module that says what of
            it to compile (``computed`` and ``compiled``), or one of several of its class. One with a
            ``why_not_compiled`` stays as it is, and a warning says so.
        backend: As ``torch.compile`` takes it; None for :data:`BACKEND`.

    Returns:
        The blocks.
    """
    # Where a graph breaks deep inside a block, what is around it stays in the graphs before and after.
    if hasattr(dynamo, "nested_graph_breaks"):
        dynamo.nested_graph_breaks = True
    counts, made, found = Counter(kinds), dict[type, Compiled](), list[nn.Module]()
    reasons: set[tuple[str, str]] = set()
    for layer in layers:
        kind = type(layer)
        if not isinstance(layer, nn.Module) or not (hasattr(kind, "compiled") or counts[kind] > 1):
            continue
        own: Any = layer
        replaced = "its forward has been replaced" if "forward" in vars(layer) else ""
        if reason := getattr(layer, "why_not_compiled", replaced):
            reasons.add((kind.__name__, reason))
            continue
        if kind not in made:
            function = kind.computed if hasattr(kind, "compiled") else kind.forward
            made[kind] = Compiled(function, kind.__name__, backend or BACKEND)
        if hasattr(kind, "compiled"):
            own.compiled = made[kind]
        else:
            own.forward = partial(made[kind], layer)
        found.append(layer)
    for name, reason in sorted(reasons):
        warnings.warn(f"{name} runs as it is, not compiled: {reason}", stacklevel=2)
    return found


def hooks_between_graphs(blocks: Iterable[nn.Module]) -> None:
    """Have the hooks of the modules inside compiled blocks run between graphs, as they are.

    ZeRO-3 gathers and releases in them, module by module, where a block is not gathered whole. Traced, they
    would be compiled anew for every module, up to the compiler's limit.
    """
    for block in blocks:
        for module in block.modules():
            for hooks in (module._forward_pre_hooks, module._forward_hooks):  # noqa: SLF001
                hooks.update({key: torch.compiler.disable(hook) for key, hook in hooks.items()})
