"""LayerNorm and RMSNorm, replicated over the tensor-parallel ranks.

Statistics and the affine step are in float32 inside the fused operator, rounded once. (transformers'
LlamaRMSNorm rounds before the weight as well, so in bfloat16 it is the less exact of the two.)

Shapes: B micro-batch, S sequence (this rank's slice of it under sequence parallelism), H hidden.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dsx.nn.collectives import copy_parameters
from dsx.nn.parallel import TensorParallel
from dsx.nn.parameters import Weights
from dsx.nn.split import WeightGradients, late
from dsx.spec.model import ModelSpec


class LayerNorm(nn.Module):
    """Mean and variance normalisation with weight and bias, over the last dim of ``size``."""

    def __init__(
        self,
        size: int,
        epsilon: float,
        tp: TensorParallel,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        split: WeightGradients | None = None,
    ) -> None:
        super().__init__()
        self.epsilon, self.tp, self.split = epsilon, tp, split
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype, device=device))
        self.bias = nn.Parameter(torch.empty(size, dtype=dtype, device=device))

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] to the same."""
        parameters = late(self.weight, self.split), late(self.bias, self.split)
        weight, bias = copy_parameters(self.tp, *parameters)
        return F.layer_norm(x, weight.shape, weight, bias, self.epsilon)


class RMSNorm(nn.Module):
    """Root-mean-square normalisation with weight, over the last dim of ``size``.

    ``over_heads``: its input are attention heads, which are cut over the tensor-parallel ranks with sequence
    parallelism or without. So each rank's gradient is a part of the weight's.
    """

    def __init__(
        self,
        size: int,
        epsilon: float,
        tp: TensorParallel,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        split: WeightGradients | None = None,
        over_heads: bool = False,
    ) -> None:
        super().__init__()
        self.epsilon, self.tp, self.split, self.over_heads = epsilon, tp, split, over_heads
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype, device=device))

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] to the same."""
        (weight,) = copy_parameters(self.tp, late(self.weight, self.split), cut=self.over_heads)
        return F.rms_norm(x, weight.shape, weight, self.epsilon)


def model_norm(model: ModelSpec, weights: Weights) -> LayerNorm | RMSNorm:
    """The norm that ``model`` uses, over its hidden size."""
    kind = LayerNorm if model.norm == "layernorm" else RMSNorm
    return kind(
        model.hidden_size,
        model.norm_epsilon,
        weights.tp,
        dtype=weights.dtype,
        device=weights.device,
        split=weights.split,
    )


class FinalNorm(nn.Module):
    """Layer of the layer list: the norm before the head."""

    def __init__(self, model: ModelSpec, weights: Weights) -> None:
        super().__init__()
        self.norm = model_norm(model, weights)
        weights.initialise(self)

    def forward(self, x_BSH: Tensor) -> Tensor:
        """[B, S, H] to the same."""
        y: Tensor = self.norm(x_BSH)
        return y
