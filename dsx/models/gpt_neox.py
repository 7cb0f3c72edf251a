"""GPT-NeoX (arXiv:2204.06745): LayerNorm, a parallel residual, and a part of each head rotated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dsx.models.config_values import (
    MOST_LAYERS,
    activation,
    check_divides,
    check_even,
    flag,
    positive,
    probability,
    read_rope,
    size,
)
from dsx.models.family import BYTES_VOCABULARY, COMMON_KEYS, ROPE_KEYS, ModelFamily, Preset
from dsx.models.spec import ModelSpec


def _read(config: Mapping[str, object]) -> ModelSpec:
    hidden_size = size(config, "hidden_size", 6144)
    num_heads = size(config, "num_attention_heads", 64)
    check_divides("hidden_size", hidden_size, "num_attention_heads", num_heads)
    max_positions = size(config, "max_position_embeddings", 2048)
    attention_bias = flag(config, "attention_bias", default=True)
    spec = ModelSpec(
        family="gpt_neox",
        num_layers=size(config, "num_hidden_layers", 44, most=MOST_LAYERS),
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=hidden_size // num_heads,
        ffn_size=size(config, "intermediate_size", 24576),
        vocab_size=size(config, "vocab_size", 50432),
        max_positions=max_positions,
        norm="layernorm",
        norm_epsilon=positive(config, "layer_norm_eps", 1e-5),
        activation=activation(config, "hidden_act", "gelu"),
        gated_mlp=False,
        attention_bias=attention_bias,
        attention_out_bias=attention_bias,
        mlp_bias=True,
        tied_embeddings=flag(config, "tie_word_embeddings", default=False),
        rope=read_rope(config, max_positions, theta="rotary_emb_base", share="rotary_pct", usual=0.25),
        attention_dropout=probability(config, "attention_dropout", 0.0),
        init_std=positive(config, "initializer_range", 0.02),
        interleaved_qkv=True,
        parallel_residual=flag(config, "use_parallel_residual", default=True),
    )
    check_even("rotary_pct * hidden_size / num_attention_heads", spec.rotary_size)
    return spec


def _presets() -> tuple[Preset, ...]:
    laptop = {"vocab_size": BYTES_VOCABULARY, "max_position_embeddings": 512}
    return (
        Preset("gpt_neox", "tiny", "dsx, for seconds on a CPU", _config(4, 128, 8) | laptop),
        Preset("gpt_neox", "pythia-160m", "hub: EleutherAI/pythia-160m", _config(12, 768, 12)),
        Preset(
            "gpt_neox",
            "pythia-6.9b",
            "hub: EleutherAI/pythia-6.9b",
            _config(32, 4096, 32) | {"vocab_size": 50432},
        ),
    )


def _config(layers: int, hidden: int, heads: int) -> dict[str, Any]:
    return {
        "model_type": "gpt_neox",
        "architectures": ["GPTNeoXForCausalLM"],
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "intermediate_size": 4 * hidden,
        "vocab_size": 50304,
        "max_position_embeddings": 2048,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-5,
        "rotary_pct": 0.25,
        "rotary_emb_base": 10000,
        "initializer_range": 0.02,
        "attention_bias": True,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "use_parallel_residual": True,
        "tie_word_embeddings": False,
    }


GPT_NEOX = ModelFamily(
    name="gpt_neox",
    classes=("GPTNeoXForCausalLM", "GPTNeoXModel"),
    keys=COMMON_KEYS
    | ROPE_KEYS
    | {
        "intermediate_size",
        "hidden_act",
        "layer_norm_eps",
        "attention_dropout",
        "hidden_dropout",
        "attention_bias",
        "use_parallel_residual",
        "rotary_pct",
        "rotary_emb_base",
    },
    read=_read,
    presets=_presets(),
    hf_names={
        "word": ("gpt_neox.embed_in",),
        "norm_1": ("gpt_neox.layers.{}.input_layernorm",),
        "attention.qkv": ("gpt_neox.layers.{}.attention.query_key_value",),
        "attention.out": ("gpt_neox.layers.{}.attention.dense",),
        "norm_2": ("gpt_neox.layers.{}.post_attention_layernorm",),
        "mlp.up": ("gpt_neox.layers.{}.mlp.dense_h_to_4h",),
        "mlp.down": ("gpt_neox.layers.{}.mlp.dense_4h_to_h",),
        "norm": ("gpt_neox.final_layer_norm",),
        # Its name in files; transformers 5 calls the parameter lm_head (conversion_mapping.py).
        "head": ("embed_out",),
    },
    fixed={"hidden_dropout": 0.0},
)
