"""Model families as layer lists of DeepSpeed's ``LayerSpec``: a stock PipelineModule runs them too."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from dsx.nn.families.builder import Layer, LayerListBuilder
from dsx.nn.families.gpt2 import gpt2
from dsx.nn.families.llama import llama
from dsx.nn.loss import cross_entropy
from dsx.nn.parallel import TensorParallel
from dsx.nn.split import WeightGradients
from dsx.spec.model import Family, ModelSpec, Recompute

__all__ = ["Layer", "layers", "loss"]

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
