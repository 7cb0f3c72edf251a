"""Whether layers of the caller's own may be given a part of every row, as ranks of a context axis are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from dsx.errors import ModelError
from dsx.nn.context import ContextParallel
from dsx.nn.embedding import TiedUse
from dsx.nn.loss import TokenMean

VOUCHED = "context_parallel"
"""An attribute of a layer that is true where its author says that it computes, of a part of each row, what
belongs to that part in the whole row's output."""

_BY_TOKEN = (
    nn.Embedding, nn.Linear, nn.LayerNorm, nn.RMSNorm, nn.Identity, nn.Dropout,
    nn.GELU, nn.ReLU, nn.SiLU, nn.Tanh, nn.Sigmoid,
)  # fmt: skip


def require_mean(loss_fn: Any, cp: ContextParallel) -> None:
    """Refuse a loss of parts of rows that is no mean over all trained tokens. Raises ModelError."""
    if cp.size > 1 and not isinstance(loss_fn, TokenMean):
        raise ModelError(
            f"loss_fn on {cp.size} context-parallel ranks",
            "ranks have different numbers of trained tokens, of which it would take means by rank",
            "wrap it in dsx.nn.TokenMean",
        )


def require_context(layers: Iterable[tuple[int, Any]], cp: ContextParallel) -> None:
    """Refuse layers that would train something else on a part of each row in silence.

    Raises:
        ModelError: A layer that is not dsx's, none of torch's that look at one token at a time, not built of
            dsx's attention, and for which its author does not vouch; or attention built for another context
            axis.
    """
    if cp.size == 1:
        return
    for index, layer in layers:
        name = f"layer {index} ({_name(layer)})"
        if other := next(
            (each for each in _told(layer) if (each.size, each.rank) != (cp.size, cp.rank)), None
        ):
            raise ModelError(
                name,
                f"its attention is built for {other.size} context-parallel ranks, and the mesh has {cp.size}",
                "build it with groups.context_parallel of the groups that dsx.PipelineModule gets",
            )
        if not _sees_to_it(layer):
            what = "its forward_fn's" if isinstance(layer, TiedUse) else "its"
            raise ModelError(
                f"{name} on {cp.size} context-parallel ranks",
                "it is given a part of each row, and whether it looks at one token at a time is not known",
                f"build its attention of dsx's modules; where it needs no other token, set {what} {VOUCHED}"
                " = True; or use context 1",
            )


def _sees_to_it(layer: Any) -> bool:
    """Whether a layer is known to compute, of a part of each row, that part of the whole row's output."""
    if getattr(layer, VOUCHED, False):
        return True
    if type(layer) is nn.Sequential:
        return all(map(_sees_to_it, layer))
    if any(True for _ in _told(layer)):
        return True
    if isinstance(layer, TiedUse):
        use = layer.forward_fn
        module = str(getattr(getattr(use, "func", use), "__module__", ""))
        vouched = bool(getattr(use, VOUCHED, False))
        return vouched or (module.startswith("dsx.") and _sees_to_it(layer.tied_module))
    return type(layer).__module__.startswith("dsx.") or type(layer) in _BY_TOKEN


def _name(layer: Any) -> str:
    if isinstance(layer, TiedUse):
        return f"{_name(layer.tied_module)} by {_name(layer.forward_fn)}"
    return str(getattr(layer, "__name__", type(layer).__name__))


def _told(layer: Any) -> Iterator[ContextParallel]:
    """What the modules of a layer were told of the context axis."""
    layer = layer.tied_module if isinstance(layer, TiedUse) else layer
    for module in layer.modules() if isinstance(layer, nn.Module) else ():
        yield from (each for each in vars(module).values() if isinstance(each, ContextParallel))
