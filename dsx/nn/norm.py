"""LayerNorm and RMSNorm, replicated over the tensor-parallel ranks.

Statistics and the affine step are in float32 inside the fused operator, rounded once. (transformers'
LlamaRMSNorm rounds before the weight as well, so in bfloat16 it is the less exact of the two.)

Shapes: B micro-batch, S sequence (this rank's slice of it under sequence parallelism), H hidden.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dsx.models.spec import ModelSpec
from dsx.nn.collectives import copy_parameters
from dsx.nn.documents import carried
from dsx.nn.parallel import TensorParallel
from dsx.nn.parameters import ONES, ZEROS, Weights, fresh_parameter
from dsx.nn.split import WeightGradients, late, late_together


class LayerNorm(nn.Module):
    """Normalise by mean and variance, with a weight (ones) and a bias (zeros), as ``torch.nn.LayerNorm``.

    Args:
        size: H, the last dim, over which it normalises.
        tp: The tensor-parallel ranks. Under sequence parallelism each rank normalises its slice, and the
            parameters' gradients are summed over the ranks, which ``torch.nn.LayerNorm`` does not do.
        epsilon: Added to the variance.
    """

    def __init__(
        self,
        size: int,
        tp: TensorParallel,
        *,
        epsilon: float = 1e-5,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        split: WeightGradients | None = None,
    ) -> None:
        super().__init__()
        self.epsilon, self.tp, self.split = epsilon, tp, split
        self.weight = fresh_parameter((size,), tp, ONES, dtype=dtype, device=device)
        self.bias = fresh_parameter((size,), tp, ZEROS, dtype=dtype, device=device)

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] to the same."""
        weight, bias = copy_parameters(self.tp, *late_together(self.split, self.weight, self.bias))
        return F.layer_norm(x, weight.shape, weight, bias, self.epsilon)


class RMSNorm(nn.Module):
    """Normalise by the root mean square over the last dim of ``size``, with a weight (ones).

    Args:
        size: H, the last dim, over which it normalises.
        tp: The tensor-parallel ranks; under sequence parallelism as for :class:`LayerNorm`.
        epsilon: Added to the mean square.
        over_heads: Whether the input is attention heads, which are cut over the tensor-parallel ranks with or
            without sequence parallelism: each rank's gradient is then a part of the weight's.
    """

    def __init__(
        self,
        size: int,
        tp: TensorParallel,
        *,
        epsilon: float = 1e-6,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        split: WeightGradients | None = None,
        over_heads: bool = False,
    ) -> None:
        super().__init__()
        self.epsilon, self.tp, self.split, self.over_heads = epsilon, tp, split, over_heads
        self.weight = fresh_parameter((size,), tp, ONES, dtype=dtype, device=device)

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] to the same."""
        (weight,) = copy_parameters(self.tp, late(self.weight, self.split), cut=self.over_heads)
        return F.rms_norm(x, weight.shape, weight, self.epsilon)


def model_norm(model: ModelSpec, weights: Weights) -> LayerNorm | RMSNorm:
    """The norm that ``model`` uses, over its hidden size."""
    kind = LayerNorm if model.norm == "layernorm" else RMSNorm
    return kind(model.hidden_size, weights.tp, epsilon=model.norm_epsilon, **weights.form)


class FinalNorm(nn.Module):
    """The norm before the head, as a layer of the layer list."""

    def __init__(self, model: ModelSpec, weights: Weights) -> None:
        super().__init__()
        self.norm = model_norm(model, weights)
        weights.initialise(self)

    @carried
    def forward(self, x_BSH: Tensor) -> Tensor:
        """[B, S, H] to the same."""
        y: Tensor = self.norm(x_BSH)
        return y
