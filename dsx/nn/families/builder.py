"""Makes the entries of a family's layer list."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import torch
from deepspeed.pipe import LayerSpec, TiedLayerSpec

from dsx.nn.block import Block
from dsx.nn.embedding import Head, Positions, WordEmbedding, apply_as_head
from dsx.nn.norm import FinalNorm
from dsx.nn.parallel import TensorParallel
from dsx.nn.parameters import Weights
from dsx.nn.rotary import Rotary
from dsx.nn.split import WeightGradients
from dsx.nn.window import Window
from dsx.plan.params import TIE, param_specs
from dsx.spec.model import ModelSpec, Recompute
from dsx.spec.param import ParamSpec

Layer: TypeAlias = LayerSpec | TiedLayerSpec
"""One entry of a layer list; its ``build()`` makes the module."""


@dataclass(frozen=True, kw_only=True)
class LayerListBuilder:
    """What all layers of a model share; see :func:`dsx.nn.families.layers` for the fields."""

    model: ModelSpec
    tp: TensorParallel
    dtype: torch.dtype
    device: torch.device | str | None
    seed: int
    recompute: Recompute
    pad_multiple: int
    split: WeightGradients | None = None

    @cached_property
    def rotary(self) -> Rotary | None:
        """One for all blocks, so that its tables exist once."""
        return None if self.model.rope is None else Rotary(self.model.rope, self.model.rotary_size)

    @cached_property
    def windows(self) -> dict[int, Window]:
        """One for all blocks with the same window, so that its mask exists once."""
        return {size: Window(size) for size in set(self.model.windows) if size}

    def word_embedding(self) -> Layer:
        """Layer 0; tied with the head if the model's embeddings are."""
        if self.model.tied_embeddings:
            return TiedLayerSpec(
                TIE, WordEmbedding, self.model, self._weights(0), tied_weight_attr=["word.weight"]
            )
        return LayerSpec(WordEmbedding, self.model, self._weights(0))

    def positions(self, layer: int) -> Layer:
        """Learned positions."""
        return LayerSpec(Positions, self.model, self._weights(layer))

    def blocks(self, first: int) -> list[Layer]:
        """All blocks, the first one at layer ``first``."""
        model = self.model
        sizes = model.windows or (0,) * model.num_layers
        return [
            LayerSpec(
                Block,
                model,
                self._weights(first + block),
                self.rotary,
                self.recompute,
                self.windows.get(size),
            )
            for block, size in enumerate(sizes)
        ]

    def final_norm(self, layer: int) -> Layer:
        """The norm before the head."""
        return LayerSpec(FinalNorm, self.model, self._weights(layer))

    def head(self, layer: int) -> Layer:
        """The head; tied, it is the word embedding's table once more."""
        if self.model.tied_embeddings:
            return TiedLayerSpec(
                TIE,
                Head,
                self.model,
                self._weights(0),
                forward_fn=apply_as_head,
                tied_weight_attr=["word.weight"],
            )
        return LayerSpec(Head, self.model, self._weights(layer))

    def _weights(self, layer: int) -> Weights:
        specs = (spec for spec in self._specs if spec.layer == layer)
        return Weights.of_layer(
            specs, self.tp, dtype=self.dtype, device=self.device, seed=self.seed, split=self.split
        )

    @cached_property
    def _specs(self) -> tuple[ParamSpec, ...]:
        return param_specs(self.model, pad_multiple=self.pad_multiple)
