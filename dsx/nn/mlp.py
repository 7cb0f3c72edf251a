"""The MLP of a block, its hidden width cut over the tensor-parallel ranks.

Shapes: B micro-batch, S sequence, s = S/tp under sequence parallelism, else S; H hidden; F this rank's width.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from dsx.nn.linear import ColumnParallelLinear, RowParallelLinear
from dsx.nn.parameters import Weights
from dsx.spec.model import ModelSpec

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
    "relu": F.relu,
}


class _Gated(torch.autograd.Function):
    """``activation(gate) * up``, saving just the fused [gate, up]: 2 F a token, not 3 F."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.save_for_backward(gate_up)
        ctx.activation = activation
        gate, up = gate_up.chunk(2, dim=-1)
        return activation(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, dim=-1)
        with torch.enable_grad():
            gate = gate.detach().requires_grad_()
            activated = ctx.activation(gate)
        d_gate_up = torch.empty_like(gate_up)
        d_gate, d_up = d_gate_up.chunk(2, dim=-1)
        torch.mul(dy, activated.detach(), out=d_up)
        d_gate.copy_(torch.autograd.grad(activated, gate, dy * up)[0])
        return d_gate_up, None


class Mlp(nn.Module):
    """Two linears around an activation, the first one fused with a gate if the model's MLP is gated."""

    def __init__(self, model: ModelSpec, weights: Weights) -> None:
        super().__init__()
        width = model.ffn_size
        self.activation = ACTIVATIONS[model.activation]
        tp, options = weights.tp, {"bias": model.mlp_bias, "init": None, **weights.form}
        hidden, parts = model.hidden_size, (width, width)
        gated = model.gated_mlp
        self.gate_up = ColumnParallelLinear(hidden, 2 * width, tp, parts=parts, **options) if gated else None
        self.up = None if gated else ColumnParallelLinear(hidden, width, tp, **options)
        self.down = RowParallelLinear(width, hidden, tp, **options)

    def forward(self, x_BsH: Tensor) -> Tensor:
        """[B, s, H] to the same."""
        if self.gate_up is not None:
            hidden_BSF = _Gated.apply(self.gate_up(x_BsH), self.activation)
        else:
            assert self.up is not None
            hidden_BSF = self.activation(self.up(x_BsH))
        y: Tensor = self.down(hidden_BSF)
        return y
