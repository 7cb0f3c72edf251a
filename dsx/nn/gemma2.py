"""Gemma 2's layers (transformers' modeling_gemma2.py), made of the parts of the others.

Shapes: B micro-batch, S sequence, s = S/tp under sequence parallelism, else S; H hidden; N query heads and
K key/value heads of this rank, G = N/K; D head_dim; V this rank's columns of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dsx.models.spec import ModelSpec, Recompute
from dsx.nn.attention import Attention, CausalMask, RopeAndMask, Rotary
from dsx.nn.block import Mlp, along
from dsx.nn.collectives import copy_parameters
from dsx.nn.documents import Given, Places, Stream, carried, hidden_of
from dsx.nn.embedding import as_head, vocabulary_table
from dsx.nn.parameters import ZEROS, Weights, fresh_parameter
from dsx.nn.split import late


def soft_cap(x: Tensor, cap: float | None) -> Tensor:
    """``cap * tanh(x / cap)`` (arXiv:2408.00118, section 2): values stay between -cap and cap."""
    return x if cap is None else torch.tanh(x / cap) * cap


class OffsetNorm(nn.Module):
    """RMSNorm times 1 + weight, the weight starting at 0; replicated over the tensor-parallel ranks."""

    def __init__(self, model: ModelSpec, weights: Weights) -> None:
        super().__init__()
        self.epsilon, self.tp, self.split = model.norm_epsilon, weights.tp, weights.split
        shape = (model.hidden_size,)
        self.weight = fresh_parameter(shape, weights.tp, ZEROS, dtype=weights.dtype, device=weights.device)

    def forward(self, x_BsH: Tensor) -> Tensor:
        """[B, s, H] to the same; in float32, rounded once."""
        (weight,) = copy_parameters(self.tp, late(self.weight, self.split))
        normed = F.rms_norm(x_BsH.float(), weight.shape, 1.0 + weight.float(), self.epsilon)
        return normed.type_as(x_BsH)


def attend(
    q_BNSD: Tensor,
    k_BKSD: Tensor,
    v_BKSD: Tensor,
    dropout: float,
    mask: Tensor | None,
    *,
    scale: float,
    cap: float | None,
) -> Tensor:
    """Attention whose scores are capped: see :data:`dsx.nn.attention.Attend`.

    No fused kernel of torch's caps scores, so that [B, N, S, S] of them exist, as in transformers' eager
    attention; ``dsx.recompute`` = selective keeps them for no longer than a layer's backward.
    """
    groups = q_BNSD.shape[1] // k_BKSD.shape[1]
    q_BKGSD = q_BNSD.unflatten(1, (-1, groups)) * scale
    scores_BKGSS = soft_cap(q_BKGSD @ k_BKSD.unsqueeze(2).transpose(-1, -2), cap)
    if mask is None:
        length = q_BNSD.shape[2]
        ahead = torch.ones(length, length, dtype=torch.bool, device=q_BNSD.device).triu_(1)
        scores_BKGSS = scores_BKGSS.masked_fill(ahead, -torch.inf)
    else:
        scores_BKGSS = scores_BKGSS + (mask if mask.dim() == 2 else mask.unsqueeze(2))
    shares_BKGSS = scores_BKGSS.softmax(-1, dtype=torch.float32).to(q_BNSD.dtype)
    if dropout:
        shares_BKGSS = F.dropout(shares_BKGSS, dropout)
    return (shares_BKGSS @ v_BKSD.unsqueeze(2)).flatten(1, 2)


class Gemma2WordEmbedding(nn.Module):
    """Layer of the layer list: token ids to vectors, times the square root of their size."""

    def __init__(self, model: ModelSpec, weights: Weights) -> None:
        super().__init__()
        self.word, self.logit_cap = vocabulary_table(model, weights), model.logit_cap
        # Rounded to the vectors' dtype, as transformers does it.
        self.scale = float(torch.tensor(model.hidden_size**0.5, dtype=weights.dtype, device="cpu"))
        weights.initialise(self)

    def forward(self, given: Given) -> Given:
        """int64 [B, S] to [B, s, H]."""
        stream = Stream.first(given)
        return stream.then(self.word(stream.hidden) * self.scale)


class Gemma2Block(nn.Module):
    """Layer of the layer list: ``x + Norm(Attention(Norm(x)))``, then the same with the MLP.

    Args:
        recompute: As :class:`dsx.nn.block.Block` has it.
    """

    compiled: Callable[..., Tensor] | None = None

    def __init__(
        self,
        model: ModelSpec,
        weights: Weights,
        rotary: Rotary | None,
        recompute: Recompute = "none",
        mask: CausalMask | None = None,
    ) -> None:
        super().__init__()
        scale = model.head_dim**-0.5 if model.attention_scale is None else model.attention_scale
        self.recompute, self.random = recompute, model.dropout_in_blocks > 0.0
        self.norm_1 = OffsetNorm(model, weights)
        self.attention = Attention(
            model,
            weights,
            rotary,
            mask,
            recompute_core=recompute == "selective",
            attend=partial(attend, scale=scale, cap=model.attention_cap),
        )
        self.after_1 = OffsetNorm(model, weights)
        self.norm_2 = OffsetNorm(model, weights)
        self.mlp = Mlp(model, weights)
        self.after_2 = OffsetNorm(model, weights)
        weights.initialise(self)

    def forward(self, given: Given) -> Given:
        """[B, s, H] to the same, with places beside it if they come along."""
        return along(self, given)

    def computed(self, x_BsH: Tensor, places: Places | RopeAndMask | None) -> Tensor:
        """What of the forward is compiled; see :mod:`dsx.nn.compiled`."""
        x_BsH = x_BsH + self.after_1(self.attention(self.norm_1(x_BsH), places))
        y: Tensor = x_BsH + self.after_2(self.mlp(self.norm_2(x_BsH)))
        return y


class Gemma2FinalNorm(nn.Module):
    """Layer of the layer list: the norm before the head."""

    def __init__(self, model: ModelSpec, weights: Weights) -> None:
        super().__init__()
        self.norm = OffsetNorm(model, weights)
        weights.initialise(self)

    @carried
    def forward(self, x_BsH: Tensor) -> Tensor:
        """[B, s, H] to the same."""
        y: Tensor = self.norm(x_BsH)
        return y


class Gemma2Head(nn.Module):
    """Layer of the layer list: vectors to this rank's slice of the logits, which are capped."""

    def __init__(self, model: ModelSpec, weights: Weights) -> None:
        super().__init__()
        self.word, self.logit_cap = vocabulary_table(model, weights), model.logit_cap
        weights.initialise(self)

    def forward(self, given: Given, **loss: Any) -> Tensor:
        """[B, s, H] to [B, S, V], or to the loss."""
        return self.as_head(self, given, **loss)

    @staticmethod
    def as_head(
        module: Gemma2WordEmbedding | Gemma2Head, given: Given, loss: Callable[..., Tensor] | None = None
    ) -> Tensor:
        """Use the table of ``module`` (the word embedding, when tied) as head: the tie's ``forward_fn``."""

        def logits(x: Tensor, linear: Callable[[Tensor], Tensor]) -> Tensor:
            y = soft_cap(linear(x), module.logit_cap)
            if module.logit_cap is not None and module.word.num_valid is not None:
                y[..., module.word.num_valid :] = -torch.inf  # the cap has lifted the padding columns
            return y

        if loss is None:
            return logits(hidden_of(given), partial(as_head, module.word))
        return as_head(module.word, given, partial(loss, logits=logits))


LAYERS = {
    "WordEmbedding": Gemma2WordEmbedding,
    "Block": Gemma2Block,
    "FinalNorm": Gemma2FinalNorm,
    "Head": Gemma2Head,
}
"""Read by :mod:`dsx.models.families`."""
