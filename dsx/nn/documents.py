"""Documents of a pack kept apart: positions that restart travel with the hidden states.

A pack is one row of a micro-batch that holds several documents. ``positions``, int64 [B, S], count from 0 in
each of them, so that a 0 says where a document begins; padding is a document of its own. The first layer gets
``(ids, positions)``, and what goes from layer to layer is then a tuple whose last item is ``positions``: they
cross stage boundaries with the hidden states, and recomputation is given them as an input. Without documents
apart the stream is the hidden states alone.

Shapes: B micro-batch, S sequence, s = S/tp under sequence parallelism, else S; H hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeAlias

import torch
from torch import Tensor

Stream: TypeAlias = "Tensor | tuple[Tensor, ...]"
"""Hidden states [B, s, H]; or these, what a family sends beside them, and ``positions`` if documents are
kept apart."""


def parted(given: Stream) -> tuple[Tensor, tuple[Tensor, ...], Tensor | None]:
    """A stream as hidden states (or ids), what is beside them, and positions if there are any."""
    if not isinstance(given, tuple):
        return given, (), None
    x, *beside = given
    if beside and not beside[-1].is_floating_point():
        return x, tuple(beside[:-1]), beside[-1]
    return x, tuple(beside), None


def joined(x: Tensor, beside: tuple[Tensor, ...], positions: Tensor | None) -> Stream:
    """The inverse of :func:`parted`."""
    rest = beside if positions is None else (*beside, positions)
    return (x, *rest) if rest else x


def carried(forward: Callable[[Any, Tensor], Tensor]) -> Callable[[Any, Stream], Stream]:
    """The forward of a layer that looks at hidden states alone, and hands on what comes with them."""

    @wraps(forward)
    def along(layer: Any, given: Stream) -> Stream:
        if isinstance(given, tuple):
            return forward(layer, given[0]), *given[1:]
        return forward(layer, given)

    return along


def ending(forward: Callable[..., Tensor]) -> Callable[..., Stream]:
    """The use of a module as the head, which hands on no positions; it may be given ``loss=``."""

    def along(module: Any, given: Stream, **loss: Any) -> Stream:
        x, beside, _ = parted(given)
        return joined(forward(module, x, **loss), beside, None)

    return along


class Last(dict[Any, Any]):
    """What was last made of a micro-batch's positions, by key; one object serves all blocks of a rank.

    Every block of a stage is given the same tensor, or a view of it where hooks hand it on (ZeRO-3), and
    backward with recomputation gives it once more.
    """

    def __init__(self) -> None:
        super().__init__()
        self._of: tuple[Tensor, ...] = ()

    def of(self, positions: Tensor, key: Any, make: Callable[[], Any]) -> Any:
        """What ``make`` makes of these positions, once for every key."""
        if not self._of or not _same(self._of[0], positions):
            self.clear()
            self._of = (positions,)
        if key not in self:
            # Not as inference tensors, which a later training step could not save for backward.
            with torch.inference_mode(mode=False), torch.no_grad():
                self[key] = make()
        return self[key]


def _same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors that live are the same memory."""
    places = [each.untyped_storage()._cdata for each in (one, other)]  # noqa: SLF001 (fake ones have no address)
    return places[0] == places[1] and one.shape == other.shape


def numbered(positions: Tensor) -> Tensor:
    """The number of each token's document in its row: int64 [B, S]."""
    return (positions == 0).cumsum(dim=-1)
