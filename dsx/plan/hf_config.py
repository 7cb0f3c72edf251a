"""From a Hugging Face ``config.json`` to a :class:`~dsx.spec.model.ModelSpec`.

Absent keys take the defaults of transformers' ``GPT2Config`` and ``LlamaConfig``. A setting that would make
the model compute something else than dsx's is refused, never ignored. One difference remains on purpose:
``pad_token_id`` is not read, so the padding token's embedding row is trained like any other (transformers'
Llama gives that row no gradient, ``nn.Embedding(padding_idx=...)``).
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Literal

from dsx.errors import ModelError
from dsx.spec.model import ModelSpec, Rope

Activation = Literal["gelu", "gelu_new", "silu", "relu"]

# transformers/activations.py, ACT2CLS: several names, one function.
_ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu",
    "gelu_new": "gelu_new",
    "gelu_pytorch_tanh": "gelu_new",
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
}
# configuration_gpt2.py, attribute_map: the general name of a GPT-2 key.
_GPT2_NAMES = {
    "n_embd": "hidden_size",
    "n_positions": "max_position_embeddings",
    "n_head": "num_attention_heads",
    "n_layer": "num_hidden_layers",
}
_COMMON_KEYS = {
    "model_type", "architectures", "vocab_size", "initializer_range", "tie_word_embeddings", "hidden_size",
    "max_position_embeddings", "num_attention_heads", "num_hidden_layers", "quantization_config",
}  # fmt: skip
_KEYS = {
    "gpt2": _COMMON_KEYS | set(_GPT2_NAMES) | {
        "n_inner", "activation_function", "resid_pdrop", "embd_pdrop", "attn_pdrop", "layer_norm_epsilon",
        "scale_attn_weights", "scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn",
        "add_cross_attention", "pruned_heads",
    },
    "llama": _COMMON_KEYS | {
        "intermediate_size", "num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps",
        "pretraining_tp", "rope_parameters", "rope_scaling", "rope_theta", "attention_bias",
        "attention_dropout", "mlp_bias", "partial_rotary_factor", "original_max_position_embeddings",
    },
}  # fmt: skip
_ARCHITECTURES = {
    "gpt2": {"GPT2LMHeadModel", "GPT2Model"},
    "llama": {"LlamaForCausalLM", "LlamaModel"},
}
# Settings that change what the model computes and that dsx does not implement: key -> the accepted value.
_FIXED: dict[str, dict[str, object]] = {
    "gpt2": {
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "reorder_and_upcast_attn": False,
        "add_cross_attention": False,
    },
    "llama": {"pretraining_tp": 1, "partial_rotary_factor": 1.0},
}


def model_spec(config: Mapping[str, object]) -> ModelSpec:
    """The architecture that a Hugging Face config describes.

    Args:
        config: Content of ``config.json``, as written by transformers 4 (``rope_theta``, ``rope_scaling``) or
            5 (``rope_parameters``). Needs ``model_type``: ``gpt2`` or ``llama``.

    Raises:
        ModelError: A key that is missing, of a wrong type or value, misspelt, or not supported.
    """
    family = config.get("model_type")
    if family not in _KEYS:
        raise ModelError(
            f"model_type = {family!r}",
            "dsx builds the gpt2 and llama families",
            'set model_type to "gpt2" or "llama" if the model is one of them',
        )
    family = str(family)
    _check_keys(config, family)
    _check_fixed(config, family)
    return _gpt2(config) if family == "gpt2" else _llama(config)


def _gpt2(config: Mapping[str, object]) -> ModelSpec:
    hidden_size = _gpt2_size(config, "n_embd", 768)
    num_heads = _gpt2_size(config, "n_head", 12)
    _check_divides("n_embd", hidden_size, "n_head", num_heads)
    return ModelSpec(
        family="gpt2",
        num_layers=_gpt2_size(config, "n_layer", 12),
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=hidden_size // num_heads,
        ffn_size=_size_or(config, "n_inner", 4 * hidden_size),
        vocab_size=_size(config, "vocab_size", 50257),
        max_positions=_gpt2_size(config, "n_positions", 1024),
        norm="layernorm",
        norm_epsilon=_positive(config, "layer_norm_epsilon", 1e-5),
        activation=_activation(config, "activation_function", "gelu_new"),
        gated_mlp=False,
        attention_bias=True,
        attention_out_bias=True,
        mlp_bias=True,
        tied_embeddings=_flag(config, "tie_word_embeddings", default=True),
        rope=None,
        embedding_dropout=_probability(config, "embd_pdrop", 0.1),
        attention_dropout=_probability(config, "attn_pdrop", 0.1),
        residual_dropout=_probability(config, "resid_pdrop", 0.1),
        init_std=_positive(config, "initializer_range", 0.02),
        scaled_output_init=True,
    )


def _llama(config: Mapping[str, object]) -> ModelSpec:
    hidden_size = _size(config, "hidden_size", 4096)
    num_heads = _size(config, "num_attention_heads", 32)
    num_kv_heads = _size_or(config, "num_key_value_heads", num_heads)
    # transformers 5 asks this even with an explicit head_dim (LlamaConfig.validate_architecture).
    _check_divides("hidden_size", hidden_size, "num_attention_heads", num_heads)
    _check_divides("num_attention_heads", num_heads, "num_key_value_heads", num_kv_heads)
    head_dim = _size_or(config, "head_dim", hidden_size // num_heads)
    if head_dim % 2:
        raise ModelError(
            f"head_dim = {head_dim}", "rotary embeddings turn pairs of elements", "use an even one"
        )
    attention_bias = _flag(config, "attention_bias", default=False)
    return ModelSpec(
        family="llama",
        num_layers=_size(config, "num_hidden_layers", 32),
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        ffn_size=_size(config, "intermediate_size", 11008),
        vocab_size=_size(config, "vocab_size", 32000),
        max_positions=_size(config, "max_position_embeddings", 2048),
        norm="rmsnorm",
        norm_epsilon=_positive(config, "rms_norm_eps", 1e-6),
        activation=_activation(config, "hidden_act", "silu"),
        gated_mlp=True,
        attention_bias=attention_bias,
        # LlamaAttention builds o_proj with the same flag (modeling_llama.py).
        attention_out_bias=attention_bias,
        mlp_bias=_flag(config, "mlp_bias", default=False),
        tied_embeddings=_flag(config, "tie_word_embeddings", default=False),
        rope=_rope(config),
        attention_dropout=_probability(config, "attention_dropout", 0.0),
        init_std=_positive(config, "initializer_range", 0.02),
    )


def _rope(config: Mapping[str, object]) -> Rope:
    """Rotary embedding of a Llama config, by the rules of transformers' modeling_rope_utils.py."""
    # rope_scaling (transformers 4) wins over rope_parameters, as in convert_rope_params_to_dict.
    key = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    given = config.get(key) or {}
    if not isinstance(given, Mapping) or any(isinstance(value, Mapping) for value in given.values()):
        raise ModelError(
            f"{key} = {given!r}", "not one flat set of rope parameters", "give one object or null"
        )
    values = {"rope_theta": config.get("rope_theta", 10000.0), **given}
    # The place in messages is the key inside the nested object.
    rope = {f"{key}.{name}": value for name, value in values.items()}
    kind = values.get("rope_type", values.get("type", "default"))
    if kind not in ("default", "linear", "llama3"):
        raise ModelError(
            f"{key}.rope_type = {kind!r}", "dsx has default, linear and llama3", "use one of these types"
        )
    if values.get("partial_rotary_factor", 1.0) != 1.0:
        raise ModelError(
            f"{key}.partial_rotary_factor = {values['partial_rotary_factor']!r}",
            "dsx rotates whole heads",
            "use 1.0 or leave it out",
        )
    theta = _positive(rope, f"{key}.rope_theta", 10000.0)
    if kind == "default":
        return Rope(theta=theta)
    factor = _positive(rope, f"{key}.factor", None)
    if kind == "linear":
        return Rope(theta=theta, kind="linear", factor=factor)
    low = _positive(rope, f"{key}.low_freq_factor", None)
    high = _positive(rope, f"{key}.high_freq_factor", None)
    if high <= low:
        raise ModelError(
            f"{key}.high_freq_factor = {high}", f"not above low_freq_factor = {low}", "use a larger one"
        )
    return Rope(
        theta=theta,
        kind="llama3",
        factor=factor,
        low_frequency_factor=low,
        high_frequency_factor=high,
        original_positions=_original_positions(config, rope, key),
    )


def _original_positions(config: Mapping[str, object], rope: Mapping[str, object], key: str) -> int:
    """Positions before scaling: the top-level key, else the nested one, else the model's positions."""
    name = "original_max_position_embeddings"
    if name in config:
        return _size(config, name, 0)
    return _size_or(rope, f"{key}.{name}", _size(config, "max_position_embeddings", 2048))


def _check_keys(config: Mapping[str, object], family: str) -> None:
    """Refuse keys of the other family and near misses of a known key: both would silently leave a default."""
    known = _KEYS[family]
    foreign = set().union(*_KEYS.values()) - known
    for key in config:
        if key in known:
            continue
        near = get_close_matches(key, sorted(known), n=1, cutoff=0.88)
        if key in foreign or near:
            raise ModelError(
                f"{key} = {config[key]!r}",
                f"a {family} config has no such key",
                f"write {near[0]}" if near else f"remove it; {family} knows {', '.join(sorted(known))}",
            )


def _check_fixed(config: Mapping[str, object], family: str) -> None:
    for key, accepted in _FIXED[family].items():
        if config.get(key, accepted) != accepted:
            raise ModelError(
                f"{key} = {config[key]!r}", "dsx does not implement it", f"only {accepted} works"
            )
    for key in ("quantization_config", "pruned_heads"):
        if config.get(key):
            raise ModelError(f"{key} = {config[key]!r}", "dsx trains plain dense weights", "use such a model")
    names = config.get("architectures") or []
    allowed = _ARCHITECTURES[family]
    if not isinstance(names, list | tuple) or not allowed.issuperset(names):
        raise ModelError(
            f"architectures = {names!r}",
            f"dsx builds {family} language models ({', '.join(sorted(allowed))})",
            "use a language model; if it is one under another name, remove this key",
        )


def _check_divides(whole_key: str, whole: int, part_key: str, part: int) -> None:
    if whole % part:
        legal = [n for n in range(1, whole + 1) if whole % n == 0]
        raise ModelError(
            f"{part_key} = {part}", f"{whole_key} = {whole} does not divide by it", f"use one of {legal}"
        )


def _gpt2_size(config: Mapping[str, object], key: str, default: int) -> int:
    """A GPT-2 size under its own or its general name; both must agree."""
    other = _GPT2_NAMES[key]
    if other not in config:
        return _size(config, key, default)
    value = _size(config, other, default)
    if _size(config, key, value) != value:
        raise ModelError(
            f"{key} = {config[key]!r}", f"{other} = {value} says otherwise", "keep one of the two"
        )
    return value


def _size(config: Mapping[str, object], key: str, default: int) -> int:
    value = config.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelError(f"{key} = {value!r}", "not a whole number of at least 1", "write a number, unquoted")
    return value


def _size_or(config: Mapping[str, object], key: str, default: int) -> int:
    """A size for which transformers also takes null, meaning the default."""
    return default if config.get(key) is None else _size(config, key, default)


def _number(config: Mapping[str, object], key: str, default: float | None) -> float:
    value = config.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        what = "is missing" if value is None else "is not a number"
        raise ModelError(f"{key} = {value!r}", what, "write a number, unquoted")
    return float(value)


def _positive(config: Mapping[str, object], key: str, default: float | None) -> float:
    value = _number(config, key, default)
    if not 0.0 < value < float("inf"):
        raise ModelError(f"{key} = {value!r}", "not a finite number above 0", "use a positive number")
    return value


def _probability(config: Mapping[str, object], key: str, default: float) -> float:
    value = default if config.get(key) is None else _number(config, key, default)
    if not 0.0 <= value < 1.0:
        raise ModelError(f"{key} = {value!r}", "a dropout probability is in 0 <= p < 1", "use such a number")
    return value


def _flag(config: Mapping[str, object], key: str, *, default: bool) -> bool:
    value = config.get(key, default)
    if not isinstance(value, bool):
        raise ModelError(f"{key} = {value!r}", "neither true nor false", "write true or false, unquoted")
    return value


def _activation(config: Mapping[str, object], key: str, default: str) -> Activation:
    value = config.get(key, default)
    if not isinstance(value, str) or value not in _ACTIVATIONS:
        raise ModelError(
            f"{key} = {value!r}",
            "dsx does not implement this activation",
            f"use one of {sorted(_ACTIVATIONS)}",
        )
    return _ACTIVATIONS[value]
