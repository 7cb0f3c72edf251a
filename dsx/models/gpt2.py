"""GPT-2 (Radford et al. 2019), as transformers' modeling_gpt2.py computes it."""

from __future__ import annotations

from collections.abc import Mapping

from dsx.errors import ModelError
from dsx.models import config_values as values
from dsx.models.family import COMMON_KEYS, ModelFamily, shipped_presets
from dsx.models.spec import ModelSpec

# configuration_gpt2.py, attribute_map: the general name of each of these keys.
_GENERAL = {
    "n_embd": "hidden_size",
    "n_positions": "max_position_embeddings",
    "n_head": "num_attention_heads",
    "n_layer": "num_hidden_layers",
}


def _read(config: Mapping[str, object]) -> ModelSpec:
    hidden_size = _size(config, "n_embd", 768)
    num_heads = _size(config, "n_head", 12)
    values.check_divides("n_embd", hidden_size, "n_head", num_heads)
    return ModelSpec(
        family="gpt2",
        num_layers=_size(config, "n_layer", 12, most=values.MOST_LAYERS),
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=hidden_size // num_heads,
        ffn_size=values.size_or(config, "n_inner", 4 * hidden_size),
        vocab_size=values.size(config, "vocab_size", 50257),
        max_positions=_size(config, "n_positions", 1024),
        norm="layernorm",
        norm_epsilon=values.positive(config, "layer_norm_epsilon", 1e-5),
        activation=values.activation(config, "activation_function", "gelu_new"),
        gated_mlp=False,
        attention_bias=True,
        attention_out_bias=True,
        mlp_bias=True,
        tied_embeddings=values.flag(config, "tie_word_embeddings", default=True),
        rope=None,
        embedding_dropout=values.probability(config, "embd_pdrop", 0.1),
        attention_dropout=values.probability(config, "attn_pdrop", 0.1),
        residual_dropout=values.probability(config, "resid_pdrop", 0.1),
        init_std=values.positive(config, "initializer_range", 0.02),
        scaled_output_init=True,
    )


def _size(config: Mapping[str, object], key: str, default: int, *, most: int = values.MOST) -> int:
    """A GPT-2 size under its own or its general name; both must agree."""
    other = _GENERAL[key]
    if other not in config:
        return values.size(config, key, default, most=most)
    value = values.size(config, other, default, most=most)
    if values.size(config, key, value, most=most) != value:
        raise ModelError(
            values.at(key, config[key]), f"{other} = {value} says otherwise", "keep one of the two"
        )
    return value


GPT2 = ModelFamily(
    name="gpt2",
    classes=("GPT2LMHeadModel", "GPT2Model"),
    keys=COMMON_KEYS
    | _GENERAL.keys()
    | {
        "n_inner",
        "activation_function",
        "resid_pdrop",
        "embd_pdrop",
        "attn_pdrop",
        "layer_norm_epsilon",
        "scale_attn_weights",
        "scale_attn_by_inverse_layer_idx",
        "reorder_and_upcast_attn",
        "add_cross_attention",
        "pruned_heads",
        "pad_token_id",  # whose row is trained like any other: transformers gives it no padding_idx
    },
    read=_read,
    presets=shipped_presets("gpt2"),
    hf_names={
        "word": ("transformer.wte",),
        "position": ("transformer.wpe",),
        "norm_1": ("transformer.h.{}.ln_1",),
        "attention.qkv": ("transformer.h.{}.attn.c_attn",),
        "attention.out": ("transformer.h.{}.attn.c_proj",),
        "norm_2": ("transformer.h.{}.ln_2",),
        "mlp.up": ("transformer.h.{}.mlp.c_fc",),
        "mlp.down": ("transformer.h.{}.mlp.c_proj",),
        "norm": ("transformer.ln_f",),
        "head": ("lm_head",),
    },
    hf_transposed=True,
    fixed={
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "reorder_and_upcast_attn": False,
        "add_cross_attention": False,
    },
    own_names={general: own for own, general in _GENERAL.items()} | {"intermediate_size": "n_inner"},
    dropouts=("attn_pdrop", "embd_pdrop", "resid_pdrop"),
)
