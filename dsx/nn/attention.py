"""Causal self-attention, its heads cut over the tensor-parallel ranks: rotary embedding, windows, documents.

Rotary position embedding (Su et al. 2021, arXiv:2104.09864) follows transformers' half-split convention. The
masks of sliding windows are those of Beltagy et al. 2020 (arXiv:2004.05150) and Mistral 7B
(arXiv:2310.06825).

Shapes: B micro-batch, S sequence, s = S/tp under sequence parallelism, else S; H hidden; N query heads and
K key/value heads of this rank; D head_dim, of which R elements are rotated; P = (N + 2 K) D, the fused
projection of this rank.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dsx.errors import ModelError
from dsx.models.spec import ModelSpec, Rope
from dsx.nn.documents import PerMicroBatch, Places
from dsx.nn.dropout import draw_seed, seeded
from dsx.nn.linear import ColumnParallelLinear, KeyValueLinear, RowParallelLinear
from dsx.nn.norm import RMSNorm
from dsx.nn.parallel import TensorParallel, uncompiled
from dsx.nn.parameters import Weights


def inverse_frequencies(rope: Rope, size: int) -> Tensor:
    """The angle per position of each pair of ``size`` elements: float32 [R/2].

    As transformers computes them (modeling_rope_utils.py: _compute_linear_scaling_rope_parameters,
    _compute_llama3_parameters and _compute_yarn_parameters; modeling_llama.py:
    compute_default_rope_parameters).
    """
    frequency = 1.0 / (rope.theta ** (torch.arange(0, size, 2, dtype=torch.float32) / size))
    if rope.kind == "default":
        return frequency
    if rope.kind == "linear":
        return frequency / rope.factor
    keep = _llama3_keep(rope, frequency) if rope.kind == "llama3" else _yarn_keep(rope, size)
    return (1 - keep) * frequency / rope.factor + keep * frequency


def _llama3_keep(rope: Rope, frequency: Tensor) -> Tensor:
    """Long waves are stretched by ``factor``, short ones kept, those between interpolated: [R/2] in 0..1."""
    wavelength = 2 * math.pi / frequency
    span = rope.high_frequency_factor - rope.low_frequency_factor
    keep = (rope.original_positions / wavelength - rope.low_frequency_factor) / span
    return keep.clamp(0.0, 1.0)


def _yarn_keep(rope: Rope, size: int) -> Tensor:
    """The same by turns over the original positions, linear in the pair (arXiv:2309.00071, section 3.2)."""

    def pair(turns: float) -> float:
        """The pair that makes so many turns over the original positions."""
        return size * math.log(rope.original_positions / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair(rope.beta_fast), pair(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    span = high - low if high != low else 0.001  # transformers avoids a division by zero so
    return 1 - ((torch.arange(size // 2, dtype=torch.float32) - low) / span).clamp(0.0, 1.0)


class RopeAndMask(NamedTuple):
    """What attention needs of the places of a micro-batch, made before a compiled block runs.

    Attributes:
        tables: What :meth:`Rotary.found` gives.
        mask: What :class:`CausalMask` gives.
    """

    tables: tuple[Tensor, Tensor]
    mask: Tensor | None


class Rotary:
    """Rotates queries and keys; one object serves all blocks of a rank.

    Args:
        size: Elements of each head that are rotated, R: ``ModelSpec.rotary_size``.
    """

    def __init__(self, rope: Rope, size: int) -> None:
        self.rope, self.size = rope, size
        self._frequency = inverse_frequencies(rope, size)
        self._tables: tuple[Tensor, Tensor] | None = None
        self._last = PerMicroBatch()

    def __repr__(self) -> str:
        return f"Rotary({self.rope})"

    def __call__(self, x: Tensor, places: Places | RopeAndMask | None = None) -> Tensor:
        """Turn each head by its position; [B, S, ..., D] keeps its shape.

        Args:
            x: Queries, keys or both.
            places: Of the tokens, positions below S; None counts from 0 in every row. Or what was made so.
        """
        if self.size == x.shape[-1]:
            return self._turn(x, places)
        # One split joins the two gradients in its backward; two slices would each fill a whole tensor.
        turning, rest = x.split((self.size, x.shape[-1] - self.size), dim=-1)
        return torch.cat((self._turn(turning, places), rest), dim=-1)

    def _turn(self, x: Tensor, places: Places | RopeAndMask | None) -> Tensor:
        heads = (1,) * (x.dim() - 3)
        if isinstance(places, RopeAndMask):
            tables = places.tables
        else:
            tables = uncompiled(self.found, x.shape[1], x.dtype, x.device, places)
        cos, sin = (t.unflatten(-2, (-1, *heads)) for t in tables)
        left, right = x.chunk(2, dim=-1)
        half_turned = torch.cat((-right, left), dim=-1)
        y: Tensor = x * cos + half_turned * sin
        return y

    def found(
        self, length: int, dtype: torch.dtype, device: torch.device, places: Places | None
    ) -> tuple[Tensor, Tensor]:
        """Cosine and sine of the positions, [S, R], or [B, S, R] if they are given."""
        tables = self.tables(length, dtype, device)
        if places is None:
            return tables
        positions = places.positions
        found: tuple[Tensor, Tensor] = self._last.of(
            positions, dtype, lambda: tuple(table[positions] for table in tables)
        )
        return found

    def tables(self, length: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
        """Cosine and sine [S, R] of positions 0 .. length-1 in float32; the last call's tables are kept."""
        kept = self._tables
        if (
            kept is not None
            and kept[0].shape[0] == length
            and (kept[0].dtype, kept[0].device) == (dtype, device)
        ):
            return kept
        # Not as inference tensors, which a later training step could not save for backward.
        with torch.inference_mode(mode=False), torch.no_grad():
            position_S = torch.arange(length, dtype=torch.float32, device=device)
            angle = position_S[:, None] * self._frequency.to(device)
            angle_SR = torch.cat((angle, angle), dim=-1)
            scale = self.rope.attention_factor
            self._tables = ((angle_SR.cos() * scale).to(dtype), (angle_SR.sin() * scale).to(dtype))
        return self._tables


_ALIGNMENT = 8
"""The mask's rows are stored with a multiple of so many elements: else torch's memory-efficient kernel copies
the mask in every call (aten/native/transformers/attention.cpp, preprocess_mask)."""


class CausalMask:
    """Which keys a token attends to: those before it and itself, in its window and its document.

    One object serves all blocks with the same window.

    Args:
        window: Each token attends to the last so many tokens, itself among them; 0 for all.
    """

    def __init__(self, window: int = 0) -> None:
        self.window = window
        self._mask: Tensor | None = None
        self._last = PerMicroBatch()

    def __repr__(self) -> str:
        return f"CausalMask({self.window})"

    def __call__(
        self, length: int, dtype: torch.dtype, device: torch.device, places: Places | None = None
    ) -> Tensor | None:
        """[S, S], or [B, 1, S, S] for documents, to be added to the scores: 0, or -inf for other keys.

        None if the window holds the whole sequence, which is one document: then a causal mask is enough, for
        which kernels need no tensor. The mask of the last call is kept.
        """
        document_BS = None if places is None else places.documents
        if document_BS is not None:
            mask: Tensor = self._last.of(document_BS, dtype, lambda: self._of_documents(document_BS, dtype))
            return mask
        if not self.window or length <= self.window:
            return None
        kept = self._mask
        if kept is None or kept.shape[0] != length or (kept.dtype, kept.device) != (dtype, device):
            # Not as inference tensors, which a later training step could not save for backward.
            with torch.inference_mode(mode=False), torch.no_grad():
                self._mask = None
                kept = self._mask = self._before(length, dtype, device).log_()[:, :length]
        return kept

    def _before(self, length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Ones for the keys before a token and in its window, [S, at least S]; their logarithm is the mask.

        The logarithm is 0 inside and -inf outside, which takes no second S x S tensor.
        """
        stored = -(-length // _ALIGNMENT) * _ALIGNMENT
        ones = torch.ones(length, stored, dtype=dtype, device=device).tril_()
        return ones.triu_(1 - self.window) if self.window else ones

    def _of_documents(self, document_BS: Tensor, dtype: torch.dtype) -> Tensor:
        length = document_BS.shape[1]
        before_SS = self._before(length, dtype, document_BS.device)
        document_BK = F.pad(document_BS, (0, before_SS.shape[1] - length))
        same_BSK = document_BS.unsqueeze(2) == document_BK.unsqueeze(1)
        return same_BSK.to(dtype).mul_(before_SS).log_().unsqueeze(1)[..., :length]


def kv_heads(model: ModelSpec, tp: TensorParallel) -> range:
    """The key/value heads that this rank's queries attend to.

    Raises:
        ModelError: Query heads that the ranks cannot share out, or key/value heads that they can neither
            share out nor, in the form of the model that says so, share.
    """
    heads = model.num_kv_heads
    shared = model.shared_kv and tp.size % heads == 0
    for what, count in (("num_heads", model.num_heads), ("num_kv_heads", 0 if shared else heads)):
        if count % tp.size:
            raise ModelError(
                f"{what} = {count}",
                f"it does not divide by the tensor-parallel size {tp.size}",
                f"use a size that divides both {model.num_heads} and {heads}; one that {heads} divides needs "
                "ModelSpec.for_tensor",
            )
    first = tp.rank * heads // tp.size
    return range(first, first + max(1, heads // tp.size))


class Attention(nn.Module):
    """Grouped-query attention with one projection to queries, keys and values.

    Args:
        model: Sizes, biases and dropout.
        rotary: Rotates queries and keys.
        mask: Limits the keys of a query; None for all keys before it.
        recompute_core: Keep only the fused projection for backward and compute what is between it and the
            output projection again ("selective", arXiv:2205.05198, section 5).

    Raises:
        ModelError: As :func:`kv_heads`.
    """

    def __init__(
        self,
        model: ModelSpec,
        weights: Weights,
        rotary: Rotary,
        mask: CausalMask | None = None,
        *,
        recompute_core: bool = False,
    ) -> None:
        super().__init__()
        tp = weights.tp
        self.num_heads, self.num_kv_heads = model.num_heads // tp.size, len(kv_heads(model, tp))
        self.head_dim, self.dropout = model.head_dim, model.attention_dropout
        self.tp, self.rotary, self.recompute_core = tp, rotary, recompute_core
        self.mask = mask or CausalMask()
        sizes = (model.query_size, model.kv_size, model.kv_size)
        options: dict[str, Any] = {"bias": model.attention_bias, "init": None, **weights.form}
        self.qkv = (
            KeyValueLinear(
                model.hidden_size, model.num_kv_heads, model.head_dim, tp, queries=model.query_size, **options
            )
            if model.shared_kv
            else ColumnParallelLinear(model.hidden_size, sum(sizes), tp, parts=sizes, **options)
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

    def forward(self, x_BsH: Tensor, places: Places | RopeAndMask | None = None) -> Tensor:
        """[B, s, H] to the same."""
        qkv_BSP = self.qkv(x_BsH)
        dropping = self.training and self.dropout > 0.0
        context = (
            uncompiled(self._drawn, qkv_BSP, places) if dropping else self._context(qkv_BSP, None, places)
        )
        y: Tensor = self.out(context)
        return y

    def rope_and_mask(self, x_BsH: Tensor, places: Places | None) -> RopeAndMask:
        """What :meth:`forward` takes in the place of places, so that a graph need not make it."""
        length = x_BsH.shape[1] * (self.tp.size if self.tp.sequence else 1)
        form = (length, x_BsH.dtype, x_BsH.device, places)
        return RopeAndMask(self.rotary.found(*form), self.mask(*form))

    def _drawn(self, qkv_BSP: Tensor, places: Places | RopeAndMask | None) -> Tensor:
        # Drawn outside the recomputed part, which then needs no generator; one per rank, as heads are cut.
        return self._context(qkv_BSP, draw_seed(self.tp, sharded=True), places)

    def _context(self, *given: Any) -> Tensor:
        if not self.recompute_core or not torch.is_grad_enabled():
            return self._core(*given)
        context: Tensor = checkpoint(self._core, *given, use_reentrant=False, preserve_rng_state=False)
        return context

    def _core(self, qkv_BSP: Tensor, seed: int | None, places: Places | RopeAndMask | None) -> Tensor:
        """Attention of this rank's heads: fused projection [B, S, P] to context [B, S, N D]."""
        q, k, v = self._heads(qkv_BSP, places)
        mask = (
            places.mask
            if isinstance(places, RopeAndMask)
            else uncompiled(self.mask, q.shape[1], q.dtype, q.device, places)
        )
        q_BNSD, k_BKSD, v_BKSD = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if seed is None:
            context_BNSD = scaled_dot_product(q_BNSD, k_BKSD, v_BKSD, 0.0, mask)
        else:
            with seeded(q.device, seed):
                context_BNSD = scaled_dot_product(q_BNSD, k_BKSD, v_BKSD, self.dropout, mask)
        return context_BNSD.transpose(1, 2).flatten(2)

    def _heads(self, qkv_BSP: Tensor, places: Places | RopeAndMask | None) -> tuple[Tensor, ...]:
        """Queries [B, S, N, D], keys and values [B, S, K, D], as attention takes them."""
        heads = qkv_BSP.unflatten(-1, (-1, self.head_dim))
        counts = (self.num_heads, self.num_kv_heads, self.num_kv_heads)
        if self.q_norm is not None:
            assert self.k_norm is not None
            q, k, v = heads.split(counts, dim=2)
            # The norms keep the projection for backward, so that a copy of V would free nothing.
            return self.rotary(self.q_norm(q), places), self.rotary(self.k_norm(k), places), v
        qk, v = heads.split((self.num_heads + self.num_kv_heads, self.num_kv_heads), dim=2)
        q, k = self.rotary(qk, places).split((self.num_heads, self.num_kv_heads), dim=2)
        # A copy of the small V frees the unrotated projection, which a view would keep for backward.
        return q, k, v.contiguous()


def scaled_dot_product(
    q_BNSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, dropout: float, mask: Tensor | None
) -> Tensor:
    """Scaled dot-product attention, causal unless a mask says more; torch picks the fused kernel.

    Queries [B, N, S, D], keys and values [B, K, S, D], a probability of dropout, which draws from torch's
    generator, and a mask [S, S] or [B, 1, S, S] to be added to the scores to context [B, N, S, D].
    """
    groups = q_BNSD.shape[1] // k_BKSD.shape[1]
    if groups > 1 and q_BNSD.is_cuda and (q_BNSD.dtype == torch.float32 or mask is not None):
        # The only fused kernel on CUDA for float32 or with a mask, the memory-efficient one, takes no
        # enable_gqa: without this, torch would fall back to a kernel that stores S x S scores.
        k_BKSD, v_BKSD = (t.repeat_interleave(groups, dim=1) for t in (k_BKSD, v_BKSD))
        groups = 1
    return F.scaled_dot_product_attention(
        q_BNSD,
        k_BKSD,
        v_BKSD,
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=mask is None,
        enable_gqa=groups > 1,
    )
