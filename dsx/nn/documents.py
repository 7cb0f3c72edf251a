"""What travels from layer to layer: hidden states, and where tokens stand if documents are kept apart.

A pack is one row of a micro-batch that holds several documents. Its positions, int64 [B, S], count from 0 in
each of them; padding is a document of its own. The first layer is given ``(ids, positions)`` and numbers the
documents. Whoever cuts rows must do so before: a 0 says where a document begins only in a whole row. From
there on both go along, across stage boundaries and into recomputation, in a plain tuple of tensors that any
layer may hand on. Without documents apart it is the hidden states alone.

Shapes: B micro-batch, S sequence, s = S/tp under sequence parallelism, else S; H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

Given: TypeAlias = "Tensor | tuple[Tensor, ...]"
"""A stream as it crosses a boundary between layers: see :meth:`Stream.flat`."""


class Places(NamedTuple):
    """Where a micro-batch's tokens stand, int64 [B, S] each.

    Attributes:
        positions: A token's place in its document, from 0.
        documents: The number of its document, outside of which it attends to nothing; None if rows are not
            made of several.
    """

    positions: Tensor
    documents: Tensor | None = None

    @classmethod
    def of_packs(cls, positions: Tensor) -> Places:
        """The places in whole rows, in which a document begins wherever positions are 0."""
        return cls(positions, (positions == 0).cumsum(dim=-1))


class Told(tuple[Tensor, ...]):
    """What blocks are told of a micro-batch with pictures, in the order of travel.

    Positions, integers [..., B, S]; masks [B, 1, S, S], one for each kind of attention; what is added to the
    hidden states behind the next blocks, [B, s, H] each (:mod:`dsx.hub.tower`). Each may be missing.
    """

    __slots__ = ()

    @property
    def of_stages(self) -> Told:
        """Positions and masks, which all blocks are told."""
        return Told(each for each in self if not _is_added(each))

    @property
    def added(self) -> Told:
        """What is still to be added to hidden states."""
        return Told(each for each in self if _is_added(each))

    def named(self, kinds: Sequence[str]) -> dict[str, Any]:
        """Arguments of a family's text forward, whose masks are of these kinds."""
        positions = [each for each in self.of_stages if not _is_mask(each)]
        masks = [each for each in self.of_stages if _is_mask(each)]
        found: dict[str, Any] = {"position_ids": positions[0]} if positions else {}
        if masks:
            several = len(masks) > 1
            found["attention_mask"] = dict(zip(kinds, masks, strict=True)) if several else masks[0]
        return found


_MASK_DIMS = 4


def _is_mask(tensor: Tensor) -> bool:
    return tensor.dim() == _MASK_DIMS


def _is_added(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and not _is_mask(tensor)


class MicroBatch(NamedTuple):
    """What a pipeline reads: what its first stage is given, and what its last one compares with.

    Attributes:
        inputs: For dsx's models ids, int64 [B, S], or ``(ids, positions)`` where documents are kept apart,
            or ids and a dict of what the family's processor made of pictures.
        labels: Likewise [B, S], shifted by one, -100 where nothing is trained.
    """

    inputs: Any
    labels: Any


class Stream(NamedTuple):
    """What a layer is given and gives.

    Attributes:
        hidden: Hidden states [B, s, H], ids [B, S] before the first layer, logits after the last.
        sums: What a family's auxiliary loss is computed of; None if it has none.
        places: Of the tokens, or what is told of pictures; None if every row counts from 0.
    """

    hidden: Tensor
    sums: Tensor | None = None
    places: Places | Told | None = None

    @classmethod
    def first(cls, given: Given) -> Stream:
        """What the first layer is given: ids, or ids and positions, or these and documents."""
        stream = cls.of(given)
        if not isinstance(stream.places, Places) or stream.places.documents is not None:
            return stream
        return stream._replace(places=Places.of_packs(stream.places.positions))

    @classmethod
    def of(cls, given: Given, *, sums: bool = False, told: bool = False) -> Stream:
        """The inverse of :meth:`flat`.

        ``sums`` says whether the model has an auxiliary loss, ``told`` whether it reads pictures.
        """
        if not isinstance(given, tuple):
            return cls(given)
        hidden, *rest = given
        found = rest.pop(0) if sums else None
        return cls(hidden, found, (Told(rest) if told else Places(*rest)) if rest else None)

    def flat(self) -> Given:
        """Tensors alone, as engines, stock DeepSpeed's too, send them: hidden states, sums, places."""
        hidden, sums, places = self
        if sums is None and not places:
            return hidden
        return tuple(tensor for tensor in (hidden, sums, *(places or ())) if tensor is not None)

    def then(self, hidden: Tensor) -> Given:
        """:meth:`flat` with other hidden states: what a layer gives that hands the rest on."""
        return Stream(hidden, self.sums, self.places).flat()


def carried(forward: Callable[[Any, Tensor], Tensor]) -> Callable[[Any, Given], Given]:
    """The forward of a layer that looks at hidden states alone, and hands on what comes with them."""

    @wraps(forward)
    def along(layer: Any, given: Given) -> Given:
        if isinstance(given, tuple):
            return forward(layer, given[0]), *given[1:]
        return forward(layer, given)

    return along


def hidden_of(given: Given) -> Tensor:
    """The hidden states of a stream that ends here, or of what a family's block gives."""
    return given[0] if isinstance(given, tuple | list) else given


class PerMicroBatch(dict[Any, Any]):
    """What was last made of a micro-batch's places, by key; one object serves all blocks of a rank.

    Every block of a stage is given the same tensor, or a view of it where hooks hand it on (ZeRO-3), and
    backward with recomputation gives it once more.
    """

    def __init__(self) -> None:
        super().__init__()
        self._of: tuple[Tensor, ...] = ()

    def of(self, places: Tensor, key: Any, make: Callable[[], Any]) -> Any:
        """What ``make`` makes of these positions, or documents, once for every key."""
        if not self._of or not _same(self._of[0], places):
            self.clear()
            self._of = (places,)
        if key not in self:
            # Not as inference tensors, which a later training step could not save for backward.
            with torch.inference_mode(mode=False), torch.no_grad():
                self[key] = make()
        return self[key]


def _same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors that live are the same part of the same memory."""
    memory = [each.untyped_storage()._cdata for each in (one, other)]  # noqa: SLF001 (fake ones have no address)
    parts = [(each.storage_offset(), each.shape, each.stride()) for each in (one, other)]
    return memory[0] == memory[1] and parts[0] == parts[1]
