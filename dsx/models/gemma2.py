"""Gemma 2 (arXiv:2408.00118): norms after each branch too, soft caps, a scaled embedding, a gated GELU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from dsx.errors import ModelError
from dsx.models import config_values as values
from dsx.models.family import COMMON_KEYS, ROPE_KEYS, LayerParams, ModelFamily, shipped_presets
from dsx.models.param import Init, ParamSpec
from dsx.models.spec import ModelSpec


def _read(config: Mapping[str, object]) -> ModelSpec:
    hidden_size = values.size(config, "hidden_size", 2304)
    num_heads, num_kv_heads = (
        values.size(config, key, default)
        for key, default in (("num_attention_heads", 8), ("num_key_value_heads", 4))
    )
    values.check_divides("hidden_size", hidden_size, "num_attention_heads", num_heads)
    values.check_divides("num_attention_heads", num_heads, "num_key_value_heads", num_kv_heads)
    num_layers = values.size(config, "num_hidden_layers", 26, most=values.MOST_LAYERS)
    head_dim = values.size(config, "head_dim", 256)
    values.check_even("head_dim", head_dim)
    max_positions = values.size(config, "max_position_embeddings", 8192)
    if config.get("use_bidirectional_attention"):
        raise ModelError(
            values.at("use_bidirectional_attention", config["use_bidirectional_attention"]),
            "dsx trains causal language models",
            "set it to false, or leave it out",
        )
    window = values.size_or_none(config, "sliding_window", 4096) or 0
    # Gemma2Config.__post_init__: every second layer attends to everything.
    slides = values.layer_types(config, num_layers, window) or tuple(
        block % 2 == 0 for block in range(num_layers)
    )
    vocab_size = values.size(config, "vocab_size", 256000)
    activation = values.activation(config, "hidden_activation", "gelu_pytorch_tanh")
    if config.get("hidden_act") is not None and values.activation(config, "hidden_act", "") != activation:
        raise ModelError(
            values.at("hidden_act", config["hidden_act"]),
            "Gemma 2 goes by hidden_activation, which says otherwise",
            "remove it",
        )
    attention_bias = values.flag(config, "attention_bias", default=False)
    return ModelSpec(
        family="gemma2",
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        ffn_size=values.size(config, "intermediate_size", 9216),
        vocab_size=vocab_size,
        max_positions=max_positions,
        norm="rmsnorm",
        norm_epsilon=values.positive(config, "rms_norm_eps", 1e-6),
        activation=activation,
        gated_mlp=True,
        attention_bias=attention_bias,
        attention_out_bias=attention_bias,
        mlp_bias=False,
        tied_embeddings=values.flag(config, "tie_word_embeddings", default=True),
        rope=values.read_rope(config, max_positions),
        attention_dropout=values.probability(config, "attention_dropout", 0.0),
        init_std=values.positive(config, "initializer_range", 0.02),
        windows=tuple(window if slide else 0 for slide in slides) if window and any(slides) else (),
        attention_scale=values.positive(config, "query_pre_attn_scalar", 256) ** -0.5,
        attention_cap=_cap(config, "attn_logit_softcapping", 50.0),
        logit_cap=_cap(config, "final_logit_softcapping", 30.0),
        pad_token_id=values.padding(config, 0, vocab_size),
    )


def _cap(config: Mapping[str, object], key: str, default: float) -> float | None:
    """A soft cap; null means none."""
    return None if config.get(key, default) is None else values.positive(config, key, default)


def _block(params: LayerParams) -> Iterator[ParamSpec]:
    """Of :class:`dsx.nn.gemma2.Gemma2Block`."""
    for norm, after, branch in (("norm_1", "after_1", params.attention), ("norm_2", "after_2", params.mlp)):
        yield from params.norm(norm, weight=Init(kind="zeros"))
        yield from branch()
        yield from params.norm(after, weight=Init(kind="zeros"))


GEMMA2 = ModelFamily(
    name="gemma2",
    classes=("Gemma2ForCausalLM", "Gemma2Model"),
    keys=COMMON_KEYS
    | ROPE_KEYS
    | {
        "intermediate_size",
        "num_key_value_heads",
        "head_dim",
        "hidden_act",
        "hidden_activation",
        "rms_norm_eps",
        "rope_theta",
        "attention_bias",
        "attention_dropout",
        "partial_rotary_factor",
        "query_pre_attn_scalar",
        "sliding_window",
        "layer_types",
        "attn_logit_softcapping",
        "final_logit_softcapping",
        "use_bidirectional_attention",
        "pad_token_id",
    },
    read=_read,
    presets=shipped_presets("gemma2"),
    hf_names={
        "word": ("model.embed_tokens",),
        "norm_1": ("model.layers.{}.input_layernorm",),
        "attention.qkv": (
            "model.layers.{}.self_attn.q_proj",
            "model.layers.{}.self_attn.k_proj",
            "model.layers.{}.self_attn.v_proj",
        ),
        "attention.out": ("model.layers.{}.self_attn.o_proj",),
        "after_1": ("model.layers.{}.post_attention_layernorm",),
        "norm_2": ("model.layers.{}.pre_feedforward_layernorm",),
        "mlp.gate_up": ("model.layers.{}.mlp.gate_proj", "model.layers.{}.mlp.up_proj"),
        "mlp.down": ("model.layers.{}.mlp.down_proj",),
        "after_2": ("model.layers.{}.post_feedforward_layernorm",),
        "norm": ("model.norm",),
        "head": ("lm_head",),
    },
    fixed={"partial_rotary_factor": 1.0},
    block=_block,
    final_norm=lambda params: params.norm("norm", weight=Init(kind="zeros")),
    layers="dsx.nn.gemma2",
)
