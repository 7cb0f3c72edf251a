"""GPT-NeoX (arXiv:2204.06745): LayerNorm, a parallel residual, and a part of each head rotated."""

from __future__ import annotations

from collections.abc import Mapping

from dsx.models import config_values as values
from dsx.models.family import COMMON_KEYS, ROPE_KEYS, ModelFamily, shipped_presets
from dsx.models.spec import ModelSpec


def _read(config: Mapping[str, object]) -> ModelSpec:
    hidden_size = values.size(config, "hidden_size", 6144)
    num_heads = values.size(config, "num_attention_heads", 64)
    values.check_divides("hidden_size", hidden_size, "num_attention_heads", num_heads)
    max_positions = values.size(config, "max_position_embeddings", 2048)
    attention_bias = values.flag(config, "attention_bias", default=True)
    spec = ModelSpec(
        family="gpt_neox",
        num_layers=values.size(config, "num_hidden_layers", 44, most=values.MOST_LAYERS),
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=hidden_size // num_heads,
        ffn_size=values.size(config, "intermediate_size", 24576),
        vocab_size=values.size(config, "vocab_size", 50432),
        max_positions=max_positions,
        norm="layernorm",
        norm_epsilon=values.positive(config, "layer_norm_eps", 1e-5),
        activation=values.activation(config, "hidden_act", "gelu"),
        gated_mlp=False,
        attention_bias=attention_bias,
        attention_out_bias=attention_bias,
        mlp_bias=True,
        tied_embeddings=values.flag(config, "tie_word_embeddings", default=False),
        rope=values.read_rope(config, max_positions, theta="rotary_emb_base", share="rotary_pct", usual=0.25),
        attention_dropout=values.probability(config, "attention_dropout", 0.0),
        init_std=values.positive(config, "initializer_range", 0.02),
        interleaved_qkv=True,
        parallel_residual=values.flag(config, "use_parallel_residual", default=True),
    )
    values.check_even("rotary_pct * hidden_size / num_attention_heads", spec.rotary_size)
    return spec


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
        "pad_token_id",  # as in GPT-2
    },
    read=_read,
    presets=shipped_presets("gpt_neox"),
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
