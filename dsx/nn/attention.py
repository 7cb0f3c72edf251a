"""Causal self-attention, its heads cut over the tensor-parallel ranks.

Shapes: B micro-batch, S sequence, s = S/tp under sequence parallelism, else S; H hidden; N query heads and
K key/value heads of this rank; D head_dim; P = (N + 2 K) D, the fused projection of this rank.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dsx.errors import ModelError
from dsx.nn.dropout import draw_seed, seeded
from dsx.nn.linear import ColumnParallelLinear, RowParallelLinear
from dsx.nn.parameters import Weights
from dsx.nn.rotary import Rotary
from dsx.spec.model import ModelSpec


class Attention(nn.Module):
    """Grouped-query attention with a fused QKV projection.

    Args:
        model: Sizes, biases and dropout.
        weights: Tensor-parallel ranks, dtype and device.
        rotary: Rotates queries and keys; None if positions are elsewhere.
        recompute_core: Keep only the fused projection for backward and compute what is between it and the
            output projection again ("selective", arXiv:2205.05198, section 5).

    Raises:
        ModelError: Query or key/value heads that do not divide by the tensor-parallel size.
    """

    def __init__(
        self, model: ModelSpec, weights: Weights, rotary: Rotary | None, *, recompute_core: bool = False
    ) -> None:
        super().__init__()
        tp = weights.tp
        for what, heads in (("num_heads", model.num_heads), ("num_kv_heads", model.num_kv_heads)):
            if heads % tp.size:
                raise ModelError(
                    f"{what} = {heads}",
                    f"it does not divide by the tensor-parallel size {tp.size}",
                    f"use a size that divides both {model.num_heads} and {model.num_kv_heads}",
                )
        self.num_heads, self.num_kv_heads = model.num_heads // tp.size, model.num_kv_heads // tp.size
        self.head_dim, self.dropout = model.head_dim, model.attention_dropout
        self.tp, self.rotary, self.recompute_core = tp, rotary, recompute_core
        parts = (model.query_size, model.kv_size, model.kv_size)
        self.qkv = ColumnParallelLinear(
            model.hidden_size,
            sum(parts),
            tp,
            bias=model.attention_bias,
            parts=parts,
            dtype=weights.dtype,
            device=weights.device,
            split=weights.split,
        )
        self.out = RowParallelLinear(
            model.query_size,
            model.hidden_size,
            tp,
            bias=model.attention_out_bias,
            dtype=weights.dtype,
            device=weights.device,
            split=weights.split,
        )

    def forward(self, x_BsH: Tensor) -> Tensor:
        """[B, s, H] to the same."""
        qkv_BSP = self.qkv(x_BsH)
        # Drawn outside the recomputed part, which so needs no generator. Heads are cut: a mask per rank.
        dropping = self.training and self.dropout > 0.0
        seed = draw_seed(self.tp, sharded=True) if dropping else None
        if self.recompute_core and torch.is_grad_enabled():
            context = checkpoint(self._core, qkv_BSP, seed, use_reentrant=False, preserve_rng_state=False)
        else:
            context = self._core(qkv_BSP, seed)
        y: Tensor = self.out(context)
        return y

    def _core(self, qkv_BSP: Tensor, seed: int | None) -> Tensor:
        """Attention of this rank's heads: fused projection [B, S, P] to context [B, S, N D]."""
        heads = qkv_BSP.unflatten(-1, (-1, self.head_dim))
        if self.rotary is None:
            q, k, v = heads.split((self.num_heads, self.num_kv_heads, self.num_kv_heads), dim=2)
        else:
            qk, v = heads.split((self.num_heads + self.num_kv_heads, self.num_kv_heads), dim=2)
            q, k = self.rotary(qk).split((self.num_heads, self.num_kv_heads), dim=2)
            # A copy of the small V frees the unrotated projection, which a view would keep for backward.
            v = v.contiguous()
        q_BNSD, k_BKSD, v_BKSD = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if seed is None:
            context_BNSD = _attend(q_BNSD, k_BKSD, v_BKSD, 0.0)
        else:
            with seeded(q.device, seed):
                context_BNSD = _attend(q_BNSD, k_BKSD, v_BKSD, self.dropout)
        return context_BNSD.transpose(1, 2).flatten(2)


def _attend(q_BNSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, dropout: float) -> Tensor:
    """Causal scaled dot-product attention; torch picks the fused kernel."""
    groups = q_BNSD.shape[1] // k_BKSD.shape[1]
    if groups > 1 and q_BNSD.is_cuda and q_BNSD.dtype == torch.float32:
        # The only fused kernel for float32 on CUDA, the memory-efficient one, takes no enable_gqa: without
        # this, torch would fall back to a kernel that stores S x S scores.
        k_BKSD, v_BKSD = (t.repeat_interleave(groups, dim=1) for t in (k_BKSD, v_BKSD))
        groups = 1
    return F.scaled_dot_product_attention(
        q_BNSD, k_BKSD, v_BKSD, dropout_p=dropout, is_causal=True, enable_gqa=groups > 1
    )
