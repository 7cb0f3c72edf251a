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


def ending(forward: Callable[[Any, Tensor], Tensor]) -> Callable[[Any, Stream], Stream]:
    """The use of a module as the head, which hands on no positions."""

    def along(module: Any, given: Stream) -> Stream:
        x, beside, _ = parted(given)
        return joined(forward(module, x), beside, None)

    return along


class Last:
    """What was last made of a micro-batch's positions; one object serves all blocks of a rank.

    Every block of a stage is given the same tensor, and backward with recomputation gives it once more.
    """

    def __init__(self) -> None:
        self._of: Tensor | None = None
        self._made: dict[Any, Any] = {}

    def of(self, positions: Tensor, key: Any, make: Callable[[], Any]) -> Any:
        """What ``make`` makes of these positions, once for every key."""
        if self._of is not positions:
            self._of, self._made = positions, {}
        if key not in self._made:
            # Not as inference tensors, which a later training step could not save for backward.
            with torch.inference_mode(mode=False), torch.no_grad():
                self._made[key] = make()
        return self._made[key]


def numbered(positions: Tensor) -> Tensor:
    """The number of each token's document in its row: int64 [B, S]."""
    return (positions == 0).cumsum(dim=-1)
