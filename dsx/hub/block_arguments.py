"""What a family's own forward gives its blocks beside the hidden states: masks, rotary tables, positions."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from dsx.hub.context import ContextAttention, ShapesAlone, put_context
from dsx.hub.model_structure import BlockCall, ModelStructure
from dsx.models.transformers_settings import masks_of
from dsx.nn.context import WHOLE, ContextParallel
from dsx.nn.documents import PerMicroBatch, Places, Told


class BlockArguments:
    """The family's forward without weights: what it gives to every block, kept for the last shapes.

    All blocks of a model share one. It takes no memory before the first of them runs.

    Args:
        structure: The model.
        device: Where the arguments are wanted.
        dtype: Of the hidden states.
        dtypes: Of buffers, as of :func:`dsx.hub.values.buffer_dtypes`.
        cp: The ranks that share a sequence. Blocks are given this rank's part of what goes along it.
    """

    def __init__(
        self,
        structure: ModelStructure,
        device: torch.device,
        dtype: torch.dtype,
        dtypes: Mapping[str, Any],
        cp: ContextParallel = WHOLE,
    ) -> None:
        self._structure, self._device, self._dtype, self._dtypes = structure, device, dtype, dtypes
        self._calls: list[BlockCall] = []
        self._width = structure.width
        self._bases: dict[type[ContextAttention] | None, nn.Module] = {}
        self._last = PerMicroBatch()
        self.kept: dict[tuple[Any, ...], list[tuple[Any, ...]]] = {}
        self._cp, self._dims = cp, dict[bool, list[list[tuple[int, ...]]]]()

    def __repr__(self) -> str:
        return "the family's own masks and positions"

    def __deepcopy__(self, memo: dict[int, Any]) -> BlockArguments:
        """Itself, which all layers share."""
        return self

    def _base(self, attention: type[ContextAttention] | None) -> nn.Module:
        if attention not in self._bases:
            self._bases[attention] = self._made(attention)
        return self._bases[attention]

    def _made(self, attention: type[ContextAttention] | None) -> nn.Module:
        base = self._structure.stripped((), self._note, self._device, self._dtype)
        for path, buffer in list(base.named_buffers(prefix="base", remove_duplicate=False)):
            owner, _, name = path.removeprefix("base.").rpartition(".")
            setattr(base.get_submodule(owner), name, buffer.to(self._device, self._dtypes.get(path)))
        if attention is not None:
            put_context(base, self._cp, attention)
        return base

    def _note(self, number: int, call: BlockCall) -> Tensor:
        del number
        self._calls.append(call)
        return call.hidden

    def call(
        self,
        number: int,
        hidden: Tensor,
        length: int,
        places: Places | Told | None,
        *,
        training: bool,
        whole: bool = False,
    ) -> BlockCall:
        """The call of block ``number`` in a forward, with these hidden states.

        Args:
            number: Of the block.
            hidden: [B, s, ...]; the block's other arguments depend on its shape alone.
            length: Tokens of a whole sequence.
            places: Of the tokens, if rows do not all count from 0, or what is told of pictures: the family's
                own forward then makes masks and rotary tables of it, once per micro-batch.
            training: Whether the model is.
            whole: Whether the block is called as one that has whole sequences, of which its hidden states
                are a part all the same.
        """
        key = (hidden.shape[0], length, hidden.dtype, training, whole)
        made = partial(self._run, base=self._base(None)) if whole else self._own_part
        run = partial(made, hidden, length, places, training=training)
        if places:
            return BlockCall(hidden, *self._last.of(places[0], key, run)[number])
        if key not in self.kept:
            if len(self.kept) >= _MOST_SHAPES:
                self.kept.pop(next(iter(self.kept)))
            with torch.no_grad():
                self.kept[key] = run()
        return BlockCall(hidden, *self.kept[key][number])

    def _own_part(
        self, hidden: Tensor, length: int, places: Places | Told | None, *, training: bool
    ) -> list[tuple[Any, ...]]:
        """What every block is called with on this rank, hidden states aside."""
        whole = self._run(hidden, length, places, training=training, base=self._base(ContextAttention))
        if self._cp.size == 1:
            return whole
        told = places is not None
        if told not in self._dims:
            self._dims[told] = self._found_dims(hidden, min(length, _MEASURED), told=told, training=training)
        done: dict[int, Any] = {}  # blocks share what is large

        def cut(each: Any, dims: tuple[int, ...]) -> Any:
            if isinstance(each, Tensor) and dims and each.shape[dims[0]] == length:
                of_keys = len(dims) > 1 and self._cp.method == "ulysses"  # which all heads of a rank see
                if id(each) not in done:
                    done[id(each)] = each if of_keys else self._cp.cut(each, dims[0])
                return done[id(each)]
            return each

        parts = []
        for call, dims in zip(whole, self._dims[told], strict=True):
            values, form = tree_flatten(call)
            parts.append(tree_unflatten(map(cut, values, dims), form))
        return parts

    def _found_dims(
        self, hidden: Tensor, most: int, *, told: bool, training: bool
    ) -> list[list[tuple[int, ...]]]:
        """Of each value that each block is called with, the dims that go along the sequence.

        These are the ones that are shorter where the sequence is.
        """
        seen = []
        for length in (most, most // 2):
            base = self._made(ShapesAlone)
            positions = torch.arange(length, device=hidden.device).expand(hidden.shape[0], -1)
            places = Places(positions) if told else None
            calls = self._run(hidden, length, places, training=training, base=base)
            seen.append([[_shape(each) for each in tree_leaves(call)] for call in calls])
        return [
            [
                tuple(dim for dim, sizes in enumerate(zip(a, b, strict=True)) if len({*sizes}) > 1)
                for a, b in zip(*both, strict=True)
            ]
            for both in zip(*seen, strict=True)
        ]

    def _run(
        self,
        hidden: Tensor,
        length: int,
        places: Places | Told | None,
        *,
        training: bool,
        base: nn.Module,
    ) -> list[tuple[Any, ...]]:
        """What every block is called with for whole sequences, hidden states aside."""
        self._calls = []
        base.train(training)
        like = hidden.new_zeros(1).expand(hidden.shape[0], length, self._width)
        like = like.clone() if self._structure.writes else like
        # Dropout of the embeddings drops nothing here; how often this is called must not move other masks.
        with torch.random.fork_rng(devices=[hidden.device] if hidden.is_cuda else []):
            if not isinstance(places, Places):
                told = {} if places is None else places.named(self._structure.kinds_of_masks)
                base(inputs_embeds=like, use_cache=False, **told)
            else:
                with masks_of(places.positions, base):
                    base(inputs_embeds=like, use_cache=False, position_ids=places.positions)
        calls, self._calls = self._calls, []
        return [(call.arguments, call.named, call.by_name) for call in calls]


_MOST_SHAPES = 4
_MEASURED = 16
"""Tokens that show which dims are as long as the sequence."""


def _shape(value: Any) -> tuple[int, ...]:
    return tuple(value.shape) if isinstance(value, Tensor) else ()
