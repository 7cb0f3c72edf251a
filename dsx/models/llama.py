"""Llama and the families whose layers are Llama's but for a setting or two.

Llama (Touvron et al. 2023, arXiv:2302.13971; Llama 3, arXiv:2407.21783): RoPE, RMSNorm, SwiGLU, GQA. Mistral
(arXiv:2310.06825) adds a sliding window, Qwen2 (arXiv:2407.10671) biases on Q, K and V, Qwen3
(arXiv:2505.09388) norms of query and key heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from dsx.errors import ModelError
from dsx.models import config_values as values
from dsx.models.family import COMMON_KEYS, ROPE_KEYS, ModelFamily, shipped_presets
from dsx.models.spec import Family, ModelSpec

# Defaults of the config classes where they are not Llama's.
_LLAMA_DEFAULTS: dict[str, Any] = {
    "intermediate_size": 11008,
    "num_key_value_heads": None,
    "head_dim": None,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
}
_QWEN_DEFAULTS = _LLAMA_DEFAULTS | {
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
}
_DEFAULTS: dict[Family, dict[str, Any]] = {
    "llama": _LLAMA_DEFAULTS,
    "mistral": _LLAMA_DEFAULTS
    | {"intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 131072},
    "qwen2": _QWEN_DEFAULTS,
    "qwen3": _QWEN_DEFAULTS | {"head_dim": 128},
}


def _read(config: Mapping[str, object], family: Family) -> ModelSpec:
    """The architecture of a Llama, Mistral, Qwen2 or Qwen3 config."""
    default = _DEFAULTS[family]
    hidden_size = values.size(config, "hidden_size", 4096)
    num_heads = values.size(config, "num_attention_heads", 32)
    num_layers = values.size(config, "num_hidden_layers", 32, most=values.MOST_LAYERS)
    num_kv_heads = (
        values.size_or_none(config, "num_key_value_heads", default["num_key_value_heads"]) or num_heads
    )
    given_head_dim = config.get("head_dim", default["head_dim"]) is not None
    # transformers 5 asks this of Llama even with an explicit head_dim (LlamaConfig.validate_architecture).
    if family == "llama" or not given_head_dim:
        values.check_divides("hidden_size", hidden_size, "num_attention_heads", num_heads)
    values.check_divides("num_attention_heads", num_heads, "num_key_value_heads", num_kv_heads)
    head_dim = values.size_or_none(config, "head_dim", default["head_dim"]) or hidden_size // num_heads
    values.check_even("head_dim", head_dim)
    max_positions = values.size(config, "max_position_embeddings", default["max_position_embeddings"])
    vocab_size = values.size(config, "vocab_size", default["vocab_size"])
    attention_bias = family == "qwen2" or values.flag(config, "attention_bias", default=False)
    return ModelSpec(
        family=family,
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        ffn_size=values.size(config, "intermediate_size", default["intermediate_size"]),
        vocab_size=vocab_size,
        max_positions=max_positions,
        norm="rmsnorm",
        norm_epsilon=values.positive(config, "rms_norm_eps", 1e-6),
        activation=values.activation(config, "hidden_act", "silu"),
        attention_bias=attention_bias,
        # Llama and Qwen3 build o_proj with the same flag, Qwen2 without a bias (modeling_qwen2.py).
        attention_out_bias=attention_bias and family != "qwen2",
        mlp_bias=values.flag(config, "mlp_bias", default=False),
        tied_embeddings=values.flag(config, "tie_word_embeddings", default=False),
        rope=values.read_rope(config, max_positions),
        attention_dropout=values.probability(config, "attention_dropout", 0.0),
        init_std=values.positive(config, "initializer_range", 0.02),
        windows=_windows(config, family, num_layers),
        qk_norm=family == "qwen3",
        pad_token_id=values.padding(config, None, vocab_size),
    )


def _windows(config: Mapping[str, object], family: Family, num_layers: int) -> tuple[int, ...]:
    """Sliding window of each block: MistralConfig, or Qwen2Config.__post_init__ and Qwen3's alike."""
    if family == "llama":
        return ()
    window = 0
    if family == "mistral" or values.flag(config, "use_sliding_window", default=False):
        window = values.size_or_none(config, "sliding_window", 4096) or 0
    sliding = (True,) * num_layers if family == "mistral" else _sliding(config, num_layers, window)
    windows = tuple(window if slides else 0 for slides in sliding)
    return windows if any(windows) else ()


def _sliding(config: Mapping[str, object], num_layers: int, window: int) -> tuple[bool, ...]:
    """Whether each layer's attention slides, if there is a window."""
    slides = values.layer_types(config, num_layers, window)
    if slides is not None:
        return slides
    first = config.get("max_window_layers", 28)
    if isinstance(first, bool) or not isinstance(first, int) or first < 0:
        raise ModelError(values.at("max_window_layers", first), "not a whole number", "use 0 or more")
    return tuple(block >= first for block in range(num_layers))


_KEYS = COMMON_KEYS | ROPE_KEYS | {
    "intermediate_size", "num_key_value_heads", "hidden_act", "rms_norm_eps", "rope_theta",
    "attention_dropout", "partial_rotary_factor", "pad_token_id",
}  # fmt: skip
_QWEN_KEYS = _KEYS | {"head_dim", "use_sliding_window", "sliding_window", "max_window_layers", "layer_types"}
_HF_NAMES: dict[str, tuple[str, ...]] = {
    "word": ("model.embed_tokens",),
    "norm_1": ("model.layers.{}.input_layernorm",),
    "attention.qkv": (
        "model.layers.{}.self_attn.q_proj",
        "model.layers.{}.self_attn.k_proj",
        "model.layers.{}.self_attn.v_proj",
    ),
    "attention.out": ("model.layers.{}.self_attn.o_proj",),
    "attention.q_norm": ("model.layers.{}.self_attn.q_norm",),
    "attention.k_norm": ("model.layers.{}.self_attn.k_norm",),
    "norm_2": ("model.layers.{}.post_attention_layernorm",),
    "mlp.gate_up": ("model.layers.{}.mlp.gate_proj", "model.layers.{}.mlp.up_proj"),
    "mlp.down": ("model.layers.{}.mlp.down_proj",),
    "norm": ("model.norm",),
    "head": ("lm_head",),
}


def _family(name: Family, start: str, keys: frozenset[str], **fixed: object) -> ModelFamily:
    return ModelFamily(
        name=name,
        classes=(f"{start}ForCausalLM", f"{start}Model"),
        keys=keys,
        read=partial(_read, family=name),
        presets=shipped_presets(name),
        hf_names=_HF_NAMES,
        fixed={"partial_rotary_factor": 1.0, **fixed},
    )


_LLAMA_KEYS = _KEYS | {"head_dim", "pretraining_tp", "attention_bias", "mlp_bias"}
LLAMA = _family("llama", "Llama", _LLAMA_KEYS, pretraining_tp=1)
MISTRAL = _family("mistral", "Mistral", _KEYS | {"head_dim", "sliding_window"})
QWEN2 = _family("qwen2", "Qwen2", _QWEN_KEYS | {"use_mrope"}, use_mrope=False)
QWEN3 = _family("qwen3", "Qwen3", _QWEN_KEYS | {"attention_bias"})
