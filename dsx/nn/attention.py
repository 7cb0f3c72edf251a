"""Causal self-attention, with a sliding window or without, its heads cut over the tensor-parallel ranks.

Shapes: B micro-batch, S sequence, s = S/tp under sequence parallelism, else S; H hidden; N query heads and
K key/value heads of this rank; D head_dim; P = (N + 2 K) D, the fused projection of this rank.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dsx.errors import ModelError
from dsx.nn.dropout import draw_seed, seeded
from dsx.nn.linear import ColumnParallelLinear, RowParallelLinear
from dsx.nn.norm import RMSNorm
from dsx.nn.parameters import Weights
from dsx.nn.rotary import Rotary
from dsx.nn.window import Window
from dsx.spec.model import ModelSpec


class Attention(nn.Module):
    """Grouped-query attention with a fused QKV projection.

    Args:
        model: Sizes, biases and dropout.
        weights: Tensor-parallel ranks, dtype and device.
        rotary: Rotates queries and keys; None if positions are elsewhere.
        window: Limits the keys of a query; None if it attends to all before it.
        recompute_core: Keep only the fused projection for backward and compute what is between it and the
            output projection again ("selective", arXiv:2205.05198, section 5).

    Raises:
        ModelError: Query or key/value heads that do not divide by the tensor-parallel size.
    """

    def __init__(
        self,
        model: ModelSpec,
        weights: Weights,
        rotary: Rotary | None,
        window: Window | None = None,
        *,
        recompute_core: bool = False,
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
        self.tp, self.rotary, self.window, self.recompute_core = tp, rotary, window, recompute_core
        self.interleaved = model.interleaved_qkv
        sizes = (model.query_size, model.kv_size, model.kv_size)
        self.qkv = ColumnParallelLinear(
            model.hidden_size,
            sum(sizes),
            tp,
            bias=model.attention_bias,
            parts=() if model.interleaved_qkv else sizes,
            init=None,
            **weights.form,
        )
        self.out = RowParallelLinear(
            model.query_size,
            model.hidden_size,
            tp,
            bias=model.attention_out_bias,
            init=None,
            **weights.form,
        )
        head_norm = partial(
            RMSNorm, model.head_dim, tp, epsilon=model.norm_epsilon, over_heads=True, **weights.form
        )
        self.q_norm = head_norm() if model.qk_norm else None
        self.k_norm = head_norm() if model.qk_norm else None

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
        q, k, v = self._heads(qkv_BSP)
        mask = None if self.window is None else self.window.mask(q.shape[1], q.dtype, q.device)
        q_BNSD, k_BKSD, v_BKSD = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if seed is None:
            context_BNSD = _attend(q_BNSD, k_BKSD, v_BKSD, 0.0, mask)
        else:
            with seeded(q.device, seed):
                context_BNSD = _attend(q_BNSD, k_BKSD, v_BKSD, self.dropout, mask)
        return context_BNSD.transpose(1, 2).flatten(2)

    def _heads(self, qkv_BSP: Tensor) -> tuple[Tensor, ...]:
        """Queries [B, S, N, D], keys and values [B, S, K, D], as attention takes them."""
        if self.interleaved:
            query_key, v = qkv_BSP.unflatten(-1, (-1, 3, self.head_dim)).split((2, 1), dim=3)
            assert self.rotary is not None
            q, k = self.rotary(query_key).unbind(dim=3)
            return q, k, v.squeeze(3).contiguous()
        heads = qkv_BSP.unflatten(-1, (-1, self.head_dim))
        counts = (self.num_heads, self.num_kv_heads, self.num_kv_heads)
        if self.rotary is None:
            q, k, v = heads.split(counts, dim=2)
            return q, k, v
        if self.q_norm is not None:
            assert self.k_norm is not None
            q, k, v = heads.split(counts, dim=2)
            # The norms keep the projection for backward, so that a copy of V would free nothing.
            return self.rotary(self.q_norm(q)), self.rotary(self.k_norm(k)), v
        qk, v = heads.split((self.num_heads + self.num_kv_heads, self.num_kv_heads), dim=2)
        q, k = self.rotary(qk).split((self.num_heads, self.num_kv_heads), dim=2)
        # A copy of the small V frees the unrotated projection, which a view would keep for backward.
        return q, k, v.contiguous()


def _attend(q_BNSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, dropout: float, mask_SS: Tensor | None) -> Tensor:
    """Scaled dot-product attention, causal unless a mask says more; torch picks the fused kernel."""
    groups = q_BNSD.shape[1] // k_BKSD.shape[1]
    if groups > 1 and q_BNSD.is_cuda and (q_BNSD.dtype == torch.float32 or mask_SS is not None):
        # The only fused kernel on CUDA for float32 or with a mask, the memory-efficient one, takes no
        # enable_gqa: without this, torch would fall back to a kernel that stores S x S scores.
        k_BKSD, v_BKSD = (t.repeat_interleave(groups, dim=1) for t in (k_BKSD, v_BKSD))
        groups = 1
    return F.scaled_dot_product_attention(
        q_BNSD,
        k_BKSD,
        v_BKSD,
        attn_mask=mask_SS,
        dropout_p=dropout,
        is_causal=mask_SS is None,
        enable_gqa=groups > 1,
    )
