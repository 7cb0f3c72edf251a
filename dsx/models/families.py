"""Models as layer lists of DeepSpeed's ``LayerSpec``: a stock PipelineModule runs them too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import nn

from dsx.models.family import TIE
from dsx.models.param import ParamSpec
from dsx.models.params import layer_kinds, param_specs
from dsx.models.spec import HubModel, Model, ModelSpec, Recompute
from dsx.nn.attention import CausalMask, Rotary
from dsx.nn.block import Block
from dsx.nn.embedding import Head, WordEmbedding
from dsx.nn.loss import HeadLoss, TokenMean
from dsx.nn.norm import FinalNorm
from dsx.nn.parallel import TensorParallel
from dsx.nn.parameters import Weights
from dsx.nn.split import WeightGradients

if TYPE_CHECKING:
    from deepspeed.pipe import LayerSpec, TiedLayerSpec

__all__ = ["Layer", "LayerListBuilder", "layers", "loss"]


Layer: TypeAlias = "LayerSpec | TiedLayerSpec"
"""One entry of a layer list; its ``build()`` makes the module."""

_LAYERS: dict[str, Any] = {
    "WordEmbedding": WordEmbedding,
    "FinalNorm": FinalNorm,
    "Head": Head,
}


@dataclass(frozen=True, slots=True)
class LayerEntry:
    """A layer before DeepSpeed's LayerSpec.

    Attributes:
        tied: Whether it shares the word embedding's table.
        forward_fn: How it uses that; None for its own forward.
    """

    layer: Any
    arguments: tuple[Any, ...]
    tied: bool = False
    forward_fn: Callable[[nn.Module, Any], Any] | None = None

    def build(self) -> nn.Module:
        """The module."""
        module: nn.Module = self.layer(*self.arguments)
        return module


@dataclass(frozen=True, kw_only=True)
class LayerListBuilder:
    """What all layers of a model share; see :func:`dsx.models.families.layers` for the fields."""

    model: Model
    tp: TensorParallel
    dtype: torch.dtype
    device: torch.device | str | None
    seed: int
    recompute: Recompute
    pad_multiple: int
    split: WeightGradients | None = None

    @property
    def _own(self) -> ModelSpec:
        assert isinstance(self.model, ModelSpec)
        return self.model

    @cached_property
    def rotary(self) -> Rotary:
        """One object for all blocks, so that its tables exist once."""
        return Rotary(self._own.rope, self._own.rotary_size)

    @cached_property
    def masks(self) -> dict[int, CausalMask]:
        """One object for all blocks with the same window, so that its mask exists once."""
        return {size: CausalMask(size) for size in {0, *self._own.windows}}

    def build(self) -> list[Layer]:
        """The whole list for DeepSpeed."""
        from deepspeed.pipe import LayerSpec, TiedLayerSpec

        found: list[Layer] = []
        for entry in self.entries():
            if not entry.tied:
                found.append(LayerSpec(entry.layer, *entry.arguments))
                continue
            use = {} if entry.forward_fn is None else {"forward_fn": entry.forward_fn}
            tie = {"tied_weight_attr": ["word.weight"], **use}
            found.append(TiedLayerSpec(TIE, entry.layer, *entry.arguments, **tie))
        return found

    def entries(self) -> list[LayerEntry]:
        """The whole list (:func:`dsx.models.params.layer_kinds`)."""
        kinds = layer_kinds(self.model)
        if isinstance(self.model, HubModel):
            from dsx.hub import layers as hub  # here: dsx's own families need nothing of transformers

            made = hub.entries(self.model, self._weights, self.device, self.recompute)
            return [LayerEntry(*each) for each in made]
        sizes = iter(self._own.windows)
        return [
            self._block(layer, next(sizes, 0)) if kind == "Block" else self._layer(kind, layer)
            for layer, kind in enumerate(kinds)
        ]

    def _block(self, layer: int, window: int) -> LayerEntry:
        shared = (self.rotary, self.recompute, self.masks[window])
        return LayerEntry(Block, (self.model, self._weights(layer), *shared))

    def _layer(self, kind: str, layer: int) -> LayerEntry:
        """A layer other than a block. The tied head is the word embedding's table once more."""
        tied, layer_class = self.model.tied_embeddings, _LAYERS[kind]
        if not tied or kind not in ("WordEmbedding", "Head"):
            return LayerEntry(layer_class, (self.model, self._weights(layer)))
        use = layer_class.as_head if kind == "Head" else None
        return LayerEntry(layer_class, (self.model, self._weights(0)), tied=True, forward_fn=use)

    def _weights(self, layer: int) -> Weights:
        return Weights(
            specs={spec.name.split(".", 1)[1]: spec for spec in self._specs if spec.layer == layer},
            tp=self.tp,
            dtype=self.dtype,
            device=self.device,
            seed=self.seed,
            split=self.split,
            adapter=self.model.adapter,
        )

    @cached_property
    def _specs(self) -> tuple[ParamSpec, ...]:
        return param_specs(self.model, pad_multiple=self.pad_multiple)


def layers(
    model: Model,
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
    return builder.build()


def loss(
    model: Model, tp: TensorParallel, *, overwrite_logits: bool = False, chunk_tokens: int | None = 0
) -> TokenMean:
    """The training loss of logits [B, S, V/tp padded] and labels [B, S]: the mean over all labels but -100.

    ``overwrite_logits`` is for a caller that drops the logits: see :func:`dsx.nn.loss.cross_entropy`. With
    ``chunk_tokens`` the head computes the loss itself: see :class:`dsx.nn.loss.HeadLoss`.
    """
    plain = HeadLoss(
        tp=tp, vocab_size=model.vocab_size, overwrite_logits=overwrite_logits, chunk_tokens=chunk_tokens
    )
    if not isinstance(model, HubModel) or model.balance is None:
        return TokenMean(plain)
    from dsx.hub.balance import Balanced

    return TokenMean(Balanced(plain, model.balance))
