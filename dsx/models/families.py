"""Models as layer lists of DeepSpeed's ``LayerSpec``: a stock PipelineModule runs them too."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any, TypeAlias

import torch

from dsx.models.family import TIE
from dsx.models.param import ParamSpec
from dsx.models.params import layer_kinds, param_specs
from dsx.models.spec import HubModel, Model, Recompute
from dsx.nn.attention import CausalMask, Rotary
from dsx.nn.block import Block
from dsx.nn.context import WHOLE, ContextParallel
from dsx.nn.embedding import Head, WordEmbedding, as_head
from dsx.nn.experts import ALL_EXPERTS, ExpertParallel
from dsx.nn.loss import HeadLoss, TokenMean
from dsx.nn.norm import FinalNorm
from dsx.nn.offload import HostCopies
from dsx.nn.parallel import TensorParallel
from dsx.nn.parameters import Weights
from dsx.nn.split import WeightGradients

__all__ = ["Entry", "layers", "loss"]

Entry: TypeAlias = Callable[..., Any]
"""``entry(layer, *arguments, tied=False, use=None)``: what is to become ``layer(*arguments)``; ``tied`` if it
shares the word embedding's table, and ``use(module, inputs)`` is then called in the place of its forward."""


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
    entry: Entry | None = None,
    cp: ContextParallel = WHOLE,
    ep: ExpertParallel = ALL_EXPERTS,
    mlp_tiles: int = 1,
) -> list[Any]:
    """The layer list of ``model`` for one tensor-parallel rank.

    Building an entry gives a module whose weights are initialised, the same global values in every layout,
    and tagged (:func:`dsx.nn.parameters.initialise`). The first layer takes int64 ids [B, S]; between layers
    goes [B, S, H], or [B, S/tp, H] under sequence parallelism; the last returns this rank's columns of the
    logits, [B, S, V/tp padded]. On a context axis S is this rank's part of the rows (:mod:`dsx.nn.context`).

    Args:
        model: The architecture.
        tp: The tensor-parallel ranks.
        dtype: Of the parameters.
        device: Of the parameters.
        seed: Of the initial weights.
        recompute: What each block computes again in backward: "none", "selective" or "full"; "offload" keeps
            what "full" does on the host.
        pad_multiple: Each rank's vocabulary rows are rounded up to a multiple of this.
        split: Takes weight gradients while it defers, for schedules that split the backward.
        entry: Makes the entries; None for DeepSpeed's ``LayerSpec`` and ``TiedLayerSpec``.
        cp: The ranks that share a sequence.
        ep: The ranks that hold the experts of a layer together.
        mlp_tiles: Parts of a sequence that a block's feed-forward computes one after the other.
    """
    entry, tied = entry or _layer_spec, model.tied_embeddings
    held: dict[int, dict[str, ParamSpec]] = defaultdict(dict)
    host = HostCopies() if recompute == "offload" else None
    for spec in param_specs(model, pad_multiple=pad_multiple):
        held[spec.layer][spec.name.split(".", 1)[1]] = spec

    def weights(layer: int) -> Weights:
        specs, adapter = held[layer], model.adapter
        return Weights(
            specs=specs,
            tp=tp,
            dtype=dtype,
            device=device,
            seed=seed,
            split=split,
            adapter=adapter,
            cp=cp,
            ep=ep,
            mlp_tiles=mlp_tiles,
            host=host,
        )

    if isinstance(model, HubModel):
        from dsx.hub.layers import entries  # here: dsx's own families need nothing of transformers

        return list(entries(model, weights, device, recompute, entry))
    # One object for all blocks, so that its tables exist once, and one for all with the same window.
    rotary = Rotary(model.rope, model.rotary_size, cp)
    masks, sizes = {size: CausalMask(size) for size in {0, *model.windows}}, iter(model.windows)
    found = []
    for layer, kind in enumerate(layer_kinds(model)):
        own = model, weights(0 if tied and kind == "Head" else layer)
        if kind == "WordEmbedding":
            found.append(entry(WordEmbedding, *own, tied=tied))
        elif kind == "Block":
            found.append(entry(Block, *own, rotary, recompute, masks[next(sizes, 0)]))
        elif kind == "FinalNorm":
            found.append(entry(FinalNorm, *own))
        else:  # tied, it is the word embedding's table once more
            found.append(entry(Head, *own, tied=tied, use=as_head if tied else None))
    return found


def _layer_spec(layer: Any, *arguments: Any, tied: bool = False, use: Any = None) -> Any:
    from deepspeed.pipe import LayerSpec, TiedLayerSpec  # here: estimates need nothing of it

    if not tied:
        return LayerSpec(layer, *arguments)
    shared = [name for name, spec in arguments[1].specs.items() if spec.tie is not None]
    return TiedLayerSpec(TIE, layer, *arguments, forward_fn=use, tied_weight_attr=shared)


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
