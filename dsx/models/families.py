"""Model families as layer lists of DeepSpeed's ``LayerSpec``: a stock PipelineModule runs them too.

Llama (Touvron et al. 2023, arXiv:2302.13971; Llama 3, arXiv:2407.21783): RoPE, RMSNorm, SwiGLU, GQA.

Also the layers of Mistral (arXiv:2310.06825: sliding window), Qwen2 (arXiv:2407.10671: biases on Q, K and V),
Qwen3 (arXiv:2505.09388: norms of query and key heads) and GPT-NeoX (arXiv:2204.06745: LayerNorm, parallel
residual, a part of each head rotated).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TypeAlias

import torch
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import Tensor

from dsx.models.param import ParamSpec
from dsx.models.params import TIE, param_specs
from dsx.models.spec import Family, ModelSpec, Recompute
from dsx.nn.attention import Rotary, Window
from dsx.nn.block import Block
from dsx.nn.embedding import Head, Positions, WordEmbedding, apply_as_head
from dsx.nn.loss import cross_entropy
from dsx.nn.norm import FinalNorm
from dsx.nn.parallel import TensorParallel
from dsx.nn.parameters import Weights
from dsx.nn.split import WeightGradients

__all__ = ["Layer", "layers", "loss"]


Layer: TypeAlias = LayerSpec | TiedLayerSpec
"""One entry of a layer list; its ``build()`` makes the module."""


@dataclass(frozen=True, kw_only=True)
class LayerListBuilder:
    """What all layers of a model share; see :func:`dsx.models.families.layers` for the fields."""

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


def gpt2(build: LayerListBuilder) -> list[Layer]:
    """Word embedding, positions, blocks, final norm, head."""
    num_blocks = build.model.num_layers
    return [
        build.word_embedding(),
        build.positions(1),
        *build.blocks(2),
        build.final_norm(2 + num_blocks),
        build.head(3 + num_blocks),
    ]


def llama(build: LayerListBuilder) -> list[Layer]:
    """Word embedding, blocks, final norm, head."""
    num_blocks = build.model.num_layers
    return [
        build.word_embedding(),
        *build.blocks(1),
        build.final_norm(1 + num_blocks),
        build.head(2 + num_blocks),
    ]


# The others have Llama's list of layers; what differs is in the blocks, by the ModelSpec.
_LISTS: dict[Family, Callable[[LayerListBuilder], list[Layer]]] = {
    "gpt2": gpt2,
    "llama": llama,
    "mistral": llama,
    "qwen2": llama,
    "qwen3": llama,
    "gpt_neox": llama,
}


def layers(
    model: ModelSpec,
    tp: TensorParallel,
    *,
    dtype: torch.dtype,
    device: torch.device | str | None = None,
    seed: int = 0,
    recompute: Recompute = "none",
    pad_multiple: int = 64,
    split: WeightGradients | None = None,
) -> list[Layer]:
    """The layer list of ``model`` for one tensor-parallel rank.

    Building an entry gives a module whose weights are initialised, the same global values in every layout,
    and tagged (:func:`dsx.nn.parameters.initialise`). The first layer takes int64 ids [B, S]; between layers
    goes [B, S, H], or [B, S/tp, H] under sequence parallelism; the last returns this rank's columns of the
    logits, [B, S, V/tp padded].

    Args:
        model: The architecture.
        tp: The tensor-parallel ranks.
        dtype: Of the parameters.
        device: Of the parameters.
        seed: Of the initial weights.
        recompute: What each block computes again in backward: "none", "selective" or "full".
        pad_multiple: Each rank's vocabulary rows are rounded up to a multiple of this.
        split: Takes weight gradients while it defers, for schedules that split the backward.
    """
    builder = LayerListBuilder(
        model=model,
        tp=tp,
        dtype=dtype,
        device=device,
        seed=seed,
        recompute=recompute,
        pad_multiple=pad_multiple,
        split=split,
    )
    return _LISTS[model.family](builder)


def loss(
    model: ModelSpec, tp: TensorParallel, *, overwrite_logits: bool = False
) -> Callable[[Tensor, Tensor], Tensor]:
    """The training loss: (logits [B, S, V/tp padded], labels [B, S]) to the mean over labels but -100.

    ``overwrite_logits`` is for a caller that drops the logits: see :func:`dsx.nn.loss.cross_entropy`.
    """
    return partial(cross_entropy, tp=tp, vocab_size=model.vocab_size, overwrite_logits=overwrite_logits)
