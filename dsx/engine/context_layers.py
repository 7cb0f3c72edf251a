"""Whether layers of the caller's own may be given a part of every row, as ranks of a context axis are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from dsx.errors import ModelError
from dsx.nn.context import ContextParallel
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
        name, found = f"layer {index} ({getattr(layer, '__name__', type(layer).__name__)})", [*_told(layer)]
        if other := next((each for each in found if (each.size, each.rank) != (cp.size, cp.rank)), None):
            raise ModelError(
                name,
                f"its attention is built for {other.size} context-parallel ranks, and the mesh has {cp.size}",
                "build it with groups.context_parallel of the groups that dsx.PipelineModule gets",
            )
        ours = type(layer).__module__.startswith("dsx.") or type(layer) in _BY_TOKEN
        if not (found or ours or getattr(layer, VOUCHED, False)):
            raise ModelError(
                f"{name} on {cp.size} context-parallel ranks",
                "it is given a part of each row, and whether it looks at one token at a time is not known",
                f"build its attention of dsx's modules; where it needs no other token, set its {VOUCHED} = "
                "True; or use context 1",
            )


def _told(layer: Any) -> Iterator[ContextParallel]:
    """What the modules of a layer were told of the context axis."""
    for module in layer.modules() if isinstance(layer, nn.Module) else ():
        yield from (each for each in vars(module).values() if isinstance(each, ContextParallel))
