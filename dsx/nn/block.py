"""The pre-norm transformer block, ``x + Attention(Norm(x))``, then ``x + MLP(Norm(x))``, and its MLP.

The MLP's hidden width is cut over the tensor-parallel ranks.

Shapes: B micro-batch, S sequence, s this rank's slice of it under sequence parallelism, else S; H hidden;
F this rank's part of the MLP's width.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from dsx.models.spec import ModelSpec, Recompute
from dsx.nn.attention import Attention, CausalMask, RopeAndMask, Rotary
from dsx.nn.documents import Given, Places, Stream
from dsx.nn.linear import ColumnParallelLinear, RowParallelLinear
from dsx.nn.norm import model_norm
from dsx.nn.offload import HostCopies
from dsx.nn.parameters import Weights
from dsx.nn.tiling import tile

T = TypeVar("T")

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
    "relu": F.relu,
}

_aten = torch.ops.aten

_DERIVATIVES: dict[str, Callable[..., Tensor]] = {
    "gelu": partial(_aten.gelu_backward.grad_input, approximate="none"),
    "gelu_new": partial(_aten.gelu_backward.grad_input, approximate="tanh"),
    "silu": _aten.silu_backward.grad_input,
    "relu": partial(_aten.threshold_backward.grad_input, threshold=0),
}
"""The kernels that autograd runs for these: ``(dy, x, grad_input=dx)``."""


class _Gated(torch.autograd.Function):
    """``activation(gate) * up``, which saves just the fused [gate, up]: 2 F a token, not 3 F."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, activation: str) -> Tensor:
        ctx.save_for_backward(gate_up)
        ctx.activation = activation
        gate, up = gate_up.chunk(2, dim=-1)
        return ACTIVATIONS[activation](gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, dim=-1)
        d_gate_up = torch.empty_like(gate_up)
        d_gate, d_up = d_gate_up.chunk(2, dim=-1)
        torch.mul(dy, ACTIVATIONS[ctx.activation](gate), out=d_up)
        _DERIVATIVES[ctx.activation](dy * up, gate, grad_input=d_gate)
        return d_gate_up, None


def gated(gate_up: Tensor, activation: str) -> Tensor:
    """``ACTIVATIONS[activation](gate) * up`` of the fused [gate, up]: [..., 2 F] to [..., F]."""
    if torch.compiler.is_compiling():  # which chooses by itself what it saves
        gate, up = gate_up.chunk(2, dim=-1)
        return ACTIVATIONS[activation](gate) * up
    y: Tensor = _Gated.apply(gate_up, activation)
    return y


class Mlp(nn.Module):
    """Two linears around an activation, the first one fused with its gate."""

    def __init__(self, model: ModelSpec, weights: Weights) -> None:
        super().__init__()
        width = model.ffn_size
        self.activation = model.activation
        tp, options = weights.tp, {"bias": model.mlp_bias, "init": None, **weights.form}
        hidden, parts = model.hidden_size, (width, width)
        self.gate_up = ColumnParallelLinear(hidden, 2 * width, tp, parts=parts, **options)
        self.down = RowParallelLinear(width, hidden, tp, **options)

    def forward(self, x_BsH: Tensor) -> Tensor:
        """[B, s, H] to the same."""
        y: Tensor = self.down(gated(self.gate_up(x_BsH), self.activation))
        return y


def again(
    recompute: Recompute, host: HostCopies | None, function: Callable[..., T], *, random: bool
) -> Callable[..., T]:
    """A block's ``function``, of which backward keeps what ``recompute`` says.

    Args:
        recompute: "full" and "offload" keep the inputs alone.
        host: Takes the first of them to the host; None leaves it on the device.
        function: Of tensors, and of what is no tensor.
        random: Whether it draws numbers.
    """
    if recompute not in ("full", "offload"):
        return function
    return partial(recomputed if host is None else host.recomputed, function, random=random)


def recomputed(function: Callable[..., T], *inputs: Tensor | Places | None, random: bool) -> T:
    """What ``function`` gives, of which backward keeps the inputs alone; ``random``: it draws numbers."""
    if not torch.is_grad_enabled():
        return function(*inputs)
    y: T = checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=random)
    return y


class Block(nn.Module):
    """A transformer block as one layer of the layer list.

    Args:
        rotary: Rotates queries and keys.
        recompute: What to compute again in backward: nothing, the attention core ("selective"), or the whole
            block, of which only the input is then kept, on the device ("full") or on the host ("offload").
        mask: Limits what a token attends to; None for all tokens before it.
    """

    compiled: Callable[..., Tensor] | None = None

    def __init__(
        self,
        model: ModelSpec,
        weights: Weights,
        rotary: Rotary,
        recompute: Recompute = "none",
        mask: CausalMask | None = None,
    ) -> None:
        super().__init__()
        self.recompute, self.host = recompute, weights.host
        self.norm_1 = model_norm(model, weights)
        self.attention = Attention(model, weights, rotary, mask, recompute_core=recompute == "selective")
        self.norm_2 = model_norm(model, weights)
        self.mlp = Mlp(model, weights)
        tile(self.mlp, weights.mlp_tiles, weights.split)
        self.random = model.dropout_in_blocks > 0.0
        weights.initialise(self)

    def forward(self, given: Given) -> Given:
        """[B, s, H] to the same, with places beside it if they come along."""
        stream = Stream.of(given)
        run = again(self.recompute, self.host, self._run, random=self.random and self.training)
        return stream.then(run(stream.hidden, stream.places))

    def _run(self, x_BsH: Tensor, places: Places | None) -> Tensor:
        if self.compiled is None:
            return self.computed(x_BsH, places)
        return self.compiled(self, x_BsH, self.attention.rope_and_mask(x_BsH, places))

    def computed(self, x_BsH: Tensor, places: Places | RopeAndMask | None) -> Tensor:
        """What of the forward is compiled; see :mod:`dsx.nn.compiled`."""
        x_BsH = x_BsH + self.attention(self.norm_1(x_BsH), places)
        y: Tensor = x_BsH + self.mlp(self.norm_2(x_BsH))
        return y
