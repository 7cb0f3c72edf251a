"""The pre-norm transformer block: ``x + Attention(Norm(x))``, then ``x + MLP(Norm(x))``.

With a parallel residual (GPT-J, GPT-NeoX: arXiv:2204.06745, section 2.1.2) both read the same x:
``x + Attention(Norm(x)) + MLP(Norm'(x))``.

Shapes: B micro-batch, s the sequence, or this rank's slice of it under sequence parallelism; H hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dsx.nn.attention import Attention
from dsx.nn.dropout import Dropout
from dsx.nn.mlp import Mlp
from dsx.nn.norm import model_norm
from dsx.nn.parameters import Weights
from dsx.nn.rotary import Rotary
from dsx.nn.window import Window
from dsx.spec.model import ModelSpec, Recompute


class Block(nn.Module):
    """Layer of the layer list: one transformer block.

    Args:
        model: The architecture.
        weights: Of this layer.
        rotary: Rotates queries and keys; None if positions are learned.
        recompute: What to compute again in backward: nothing, the attention core ("selective"), or the whole
            block, of which only the input is then kept ("full").
        window: Of its attention; None if a token attends to all before it.
    """

    def __init__(
        self,
        model: ModelSpec,
        weights: Weights,
        rotary: Rotary | None,
        recompute: Recompute = "none",
        window: Window | None = None,
    ) -> None:
        super().__init__()
        tp = weights.tp
        self.recompute, self.parallel = recompute, model.parallel_residual
        self.norm_1 = model_norm(model, weights)
        self.attention = Attention(model, weights, rotary, window, recompute_core=recompute == "selective")
        self.norm_2 = model_norm(model, weights)
        self.mlp = Mlp(model, weights)
        self.dropout = Dropout(model.residual_dropout, tp, sharded=tp.sequence)
        self.random = max(model.residual_dropout, model.attention_dropout) > 0.0
        weights.initialise(self)

    def forward(self, x_BsH: Tensor) -> Tensor:
        """[B, s, H] to the same."""
        if self.recompute == "full" and torch.is_grad_enabled():
            y: Tensor = checkpoint(
                self._residuals, x_BsH, use_reentrant=False, preserve_rng_state=self.random and self.training
            )
            return y
        return self._residuals(x_BsH)

    def _residuals(self, x_BsH: Tensor) -> Tensor:
        middle_BsH = x_BsH + self.dropout(self.attention(self.norm_1(x_BsH)))
        if not self.parallel:
            x_BsH = middle_BsH
        y: Tensor = middle_BsH + self.dropout(self.mlp(self.norm_2(x_BsH)))
        return y
