"""The architecture's numbers, read from a Hugging Face config. Pure data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Family = Literal["gpt2", "llama"]
Recompute = Literal["none", "selective", "full"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Rotary position embedding.

    ``kind`` is ``default``, ``linear`` or ``llama3`` (transformers, modeling_rope_utils.py). The other
    fields are that function's arguments; ``low_frequency_factor``, ``high_frequency_factor`` and
    ``original_positions`` matter to ``llama3`` alone.
    """

    theta: float = 10000.0
    kind: Literal["default", "linear", "llama3"] = "default"
    factor: float = 1.0
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_positions: int = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Sizes in elements, probabilities in 0..1. ``plan.hf_config`` makes it from a Hugging Face config.

    Attributes:
        num_kv_heads: Key/value heads; equal to ``num_heads`` without grouped-query attention.
        head_dim: Size of one head; ``num_heads * head_dim`` need not equal ``hidden_size``.
        ffn_size: Width of the MLP between its two linears.
        max_positions: Longest sequence the positions allow.
        gated_mlp: SwiGLU-style gate times up (Llama) instead of a plain up projection (GPT-2).
        attention_bias: Biases on the fused QKV projection.
        attention_out_bias: Bias on the attention output projection.
        mlp_bias: Biases on the MLP linears.
        rope: Rotary embedding; None means learned absolute positions.
        scaled_output_init: Divide the init std of the two residual output projections by
            sqrt(2 * num_layers), as GPT-2 does (transformers, modeling_gpt2.py, _init_weights).
    """

    family: Family
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    max_positions: int
    norm: Literal["layernorm", "rmsnorm"]
    norm_epsilon: float
    activation: Literal["gelu", "gelu_new", "silu", "relu"]
    gated_mlp: bool
    attention_bias: bool
    attention_out_bias: bool
    mlp_bias: bool
    tied_embeddings: bool
    rope: Rope | None
    embedding_dropout: float = 0.0
    attention_dropout: float = 0.0
    residual_dropout: float = 0.0
    init_std: float = 0.02
    scaled_output_init: bool = False

    @property
    def query_size(self) -> int:
        """Width of all query heads."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key heads (and of all value heads)."""
        return self.num_kv_heads * self.head_dim
