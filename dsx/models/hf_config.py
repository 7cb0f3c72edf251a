"""From a Hugging Face ``config.json``, each value checked, to a :class:`~dsx.models.spec.ModelSpec`.

Absent keys take the defaults of transformers' config classes. A setting that would make the model compute
something else than dsx's is refused, never ignored. One difference remains on purpose: ``pad_token_id`` is
not read, so the padding token's embedding row is trained like any other (transformers' Llama and its likes
give that row no gradient, ``nn.Embedding(padding_idx=...)``).

Values of a Hugging Face config, each checked as it is read.

Every function raises a ModelError that names the key, its value and what would be right. A config.json is
small whatever sizes it claims, and those are what everything is laid out by: each has a most.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from typing import Any, Literal

from dsx.errors import ModelError
from dsx.models.spec import Family, ModelSpec, Rope
from dsx.terminal import shortened

MOST = 2**31 - 1
"""Of every size: what kernels number the elements of a dimension by."""

MOST_LAYERS = 2048
"""Twice those of the deepest published transformer, DeepNet (arXiv:2203.00555)."""

_SHOWN_CHARACTERS = 120


def at(key: str, value: object) -> str:
    """``key = value``, the place of an error; of a long value the beginning."""
    return f"{key} = {shortened(repr(value), _SHOWN_CHARACTERS)}"


def size(config: Mapping[str, object], key: str, default: int, *, most: int = MOST) -> int:
    """A whole number of at least 1."""
    value = config.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelError(at(key, value), "not a whole number of at least 1", "write a number, unquoted")
    if value > most:
        raise ModelError(at(key, value), f"dsx takes at most {most:,}", "write the model's own size")
    return value


def size_or(config: Mapping[str, object], key: str, default: int) -> int:
    """A size for which transformers also takes null, meaning the default."""
    return default if config.get(key) is None else size(config, key, default)


def size_or_none(config: Mapping[str, object], key: str, default: int | None) -> int | None:
    """A size that may be null, or have no default."""
    return None if config.get(key, default) is None else size(config, key, default or 0)


def number(config: Mapping[str, object], key: str, default: float | None) -> float:
    """A number; None as default means that the key is needed."""
    value = config.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        what = "is missing" if value is None else "is not a number"
        raise ModelError(at(key, value), what, "write a number, unquoted")
    try:
        return float(value)
    except OverflowError:
        raise ModelError(at(key, value), "beyond 1e308, which nothing can hold", "write a number") from None


def positive(config: Mapping[str, object], key: str, default: float | None) -> float:
    """A finite number above 0; None as default means that the key is needed."""
    value = number(config, key, default)
    if not 0.0 < value < float("inf"):
        raise ModelError(at(key, value), "not a finite number above 0", "use a positive number")
    return value


def probability(config: Mapping[str, object], key: str, default: float) -> float:
    """A dropout probability; null means the default."""
    value = default if config.get(key) is None else number(config, key, default)
    if not 0.0 <= value < 1.0:
        raise ModelError(at(key, value), "a dropout probability is in 0 <= p < 1", "use such a number")
    return value


def flag(config: Mapping[str, object], key: str, *, default: bool) -> bool:
    """True or false."""
    value = config.get(key, default)
    if not isinstance(value, bool):
        raise ModelError(at(key, value), "neither true nor false", "write true or false, unquoted")
    return value


def check_divides(whole_key: str, whole: int, part_key: str, part: int) -> None:
    """Refuse a whole that does not divide by its part."""
    if whole % part:
        small = [n for n in range(1, math.isqrt(whole) + 1) if whole % n == 0]
        legal = sorted({*small, *(whole // n for n in small)})
        raise ModelError(
            f"{part_key} = {part}", f"{whole_key} = {whole} does not divide by it", f"use one of {legal}"
        )


def check_even(key: str, value: int) -> None:
    """Refuse an odd part of a head that is to be rotated."""
    if value % 2 or not value:
        raise ModelError(f"{key} = {value}", "rotary embeddings turn pairs of elements", "use an even one")


_KINDS = ("default", "linear", "llama3", "yarn")


def read_rope(
    config: Mapping[str, object],
    max_positions: int,
    *,
    theta: str = "rope_theta",
    share: str | None = None,
    usual: float = 1.0,
) -> Rope:
    """Rotary embedding of ``config``.

    Args:
        config: Content of config.json.
        max_positions: Of the model; those before scaling where nothing says another.
        theta: Its key for the base, outside the nested object.
        share: Its key for the rotated part of each head; None for a family that rotates whole heads.
        usual: That part where nothing says another.

    Raises:
        ModelError: A value that is missing or wrong, or a kind of scaling that dsx does not have.
    """
    # rope_scaling (transformers 4) wins over rope_parameters, as in convert_rope_params_to_dict.
    key = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    given = config.get(key) or {}
    if not isinstance(given, Mapping) or any(isinstance(value, Mapping) for value in given.values()):
        raise ModelError(at(key, given), "not one flat set of rope parameters", "give one object or null")
    values = {"rope_theta": config.get(theta, 10000.0), **given}
    # The place in messages is the key inside the nested object.
    rope = {f"{key}.{name}": value for name, value in values.items()}
    kind = values.get("rope_type", values.get("type", "default"))
    if kind not in _KINDS:
        raise ModelError(
            at(f"{key}.rope_type", kind), f"dsx has {', '.join(_KINDS)}", "use one of these types"
        )
    found: dict[str, Any] = {
        "theta": positive(rope, f"{key}.rope_theta", 10000.0),
        "share": _share(config, rope, key, share, usual),
    }
    original = _original_positions(config, rope, key, max_positions)
    if kind == "linear":
        found |= {"kind": kind, "factor": positive(rope, f"{key}.factor", None)}
    elif kind == "llama3":
        found |= _llama3(rope, key, original)
    elif kind == "yarn":
        found |= _yarn(rope, key, original)
    return Rope(**found)


def _share(
    config: Mapping[str, object], rope: Mapping[str, object], key: str, name: str | None, usual: float
) -> float:
    """The rotated part of each head."""
    nested = f"{key}.partial_rotary_factor"
    if name is None:
        value = positive(rope, nested, 1.0)
        if value != 1.0:
            raise ModelError(
                at(nested, value), "dsx rotates whole heads of this family", "use 1.0 or leave it out"
            )
        return value
    value = positive(rope, nested, None) if nested in rope else positive(config, name, usual)
    if value > 1.0:
        raise ModelError(at(name, value), "more than the whole head", "use a number up to 1")
    return value


def _llama3(rope: Mapping[str, object], key: str, original: int) -> dict[str, Any]:
    """Arguments of _compute_llama3_parameters."""
    low = positive(rope, f"{key}.low_freq_factor", None)
    high = positive(rope, f"{key}.high_freq_factor", None)
    if high <= low:
        raise ModelError(
            f"{key}.high_freq_factor = {high}", f"not above low_freq_factor = {low}", "use a larger one"
        )
    return {
        "kind": "llama3",
        "factor": positive(rope, f"{key}.factor", None),
        "low_frequency_factor": low,
        "high_frequency_factor": high,
        "original_positions": original,
    }


def _yarn(rope: Mapping[str, object], key: str, original: int) -> dict[str, Any]:
    """Arguments of _compute_yarn_parameters, whose null or 0 means the default too."""

    def optional(name: str, default: float) -> float:
        place = f"{key}.{name}"
        return positive(rope, place, None) if rope.get(place) else default

    fast, slow = optional("beta_fast", 32.0), optional("beta_slow", 1.0)
    if fast <= slow:
        raise ModelError(f"{key}.beta_fast = {fast}", f"not above beta_slow = {slow}", "use a larger one")
    factor = positive(rope, f"{key}.factor", None)
    one, all_dims = optional("mscale", 0.0), optional("mscale_all_dim", 0.0)
    usual = _attention_factor(factor, 1.0)
    if one and all_dims:
        usual = _attention_factor(factor, one) / _attention_factor(factor, all_dims)
    place = f"{key}.attention_factor"
    return {
        "kind": "yarn",
        "factor": factor,
        "original_positions": original,
        "beta_fast": fast,
        "beta_slow": slow,
        "truncate": flag(rope, f"{key}.truncate", default=True),
        "attention_factor": usual if rope.get(place) is None else positive(rope, place, None),
    }


def _attention_factor(factor: float, scale: float) -> float:
    """YaRN, arXiv:2309.00071, equation 22: the square root of 1/t."""
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1.0 else 1.0


def _original_positions(
    config: Mapping[str, object], rope: Mapping[str, object], key: str, max_positions: int
) -> int:
    """Positions before scaling: the top-level key, else the nested one, else the model's positions."""
    name = "original_max_position_embeddings"
    return size(config, name, 0) if name in config else size_or(rope, f"{key}.{name}", max_positions)


Activation = Literal["gelu", "gelu_new", "silu", "relu"]

# transformers/activations.py, ACT2CLS: several names, one function.
_ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu",
    "gelu_new": "gelu_new",
    "gelu_fast": "gelu_new",
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
_ROPE_KEYS = {"rope_parameters", "rope_scaling", "original_max_position_embeddings"}
_LLAMA_KEYS = _COMMON_KEYS | _ROPE_KEYS | {
    "intermediate_size", "num_key_value_heads", "hidden_act", "rms_norm_eps", "rope_theta",
    "attention_dropout", "partial_rotary_factor",
}  # fmt: skip
_QWEN_KEYS = _LLAMA_KEYS | {"use_sliding_window", "sliding_window", "max_window_layers", "layer_types"}
_KEYS: dict[Family, set[str]] = {
    "gpt2": _COMMON_KEYS | set(_GPT2_NAMES) | {
        "n_inner", "activation_function", "resid_pdrop", "embd_pdrop", "attn_pdrop", "layer_norm_epsilon",
        "scale_attn_weights", "scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn",
        "add_cross_attention", "pruned_heads",
    },
    "llama": _LLAMA_KEYS | {"head_dim", "pretraining_tp", "attention_bias", "mlp_bias"},
    "mistral": _LLAMA_KEYS | {"head_dim", "sliding_window"},
    "qwen2": _QWEN_KEYS | {"head_dim", "use_mrope"},
    "qwen3": _QWEN_KEYS | {"head_dim", "attention_bias"},
    "gpt_neox": _COMMON_KEYS | _ROPE_KEYS | {
        "intermediate_size", "hidden_act", "layer_norm_eps", "attention_dropout", "hidden_dropout",
        "attention_bias", "use_parallel_residual", "rotary_pct", "rotary_emb_base",
    },
}  # fmt: skip
_ARCHITECTURES: dict[Family, str] = {
    "gpt2": "GPT2",
    "llama": "Llama",
    "mistral": "Mistral",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "gpt_neox": "GPTNeoX",
}
"""Start of the names of transformers' classes."""
_MOST_KEYS = 1000  # each is compared with all that are known
# Settings that change what the model computes and that dsx does not implement: key -> the accepted value.
_FIXED: dict[Family, dict[str, object]] = {
    "gpt2": {
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "reorder_and_upcast_attn": False,
        "add_cross_attention": False,
    },
    "llama": {"pretraining_tp": 1, "partial_rotary_factor": 1.0},
    "mistral": {"partial_rotary_factor": 1.0},
    "qwen2": {"partial_rotary_factor": 1.0, "use_mrope": False},
    "qwen3": {"partial_rotary_factor": 1.0},
    "gpt_neox": {"hidden_dropout": 0.0},
}
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


def model_spec(config: Mapping[str, object]) -> ModelSpec:
    """The architecture that a Hugging Face config describes.

    Args:
        config: Content of ``config.json``, as written by transformers 4 (``rope_theta``, ``rope_scaling``) or
            5 (``rope_parameters``). Needs ``model_type``: a :data:`~dsx.models.spec.Family`.

    Raises:
        ModelError: A key that is missing, of a wrong type or value, misspelt, or not supported.
    """
    family = next((name for name in _KEYS if name == config.get("model_type")), None)
    if family is None:
        raise ModelError(
            at("model_type", config.get("model_type")),
            f"dsx builds the families {', '.join(_KEYS)}",
            "set model_type to one of them if the model is one",
        )
    _check_keys(config, family)
    _check_fixed(config, family)
    readers: dict[Family, Callable[[Mapping[str, object]], ModelSpec]] = {
        "gpt2": _gpt2,
        "gpt_neox": _gpt_neox,
    }
    return readers[family](config) if family in readers else _llama(config, family)


def architecture(family: str) -> str:
    """Name of transformers' language model class, as config.json has it: ``GPT2LMHeadModel``."""
    return _classes(family)[0]


def own_keys(family: Family, values: Mapping[str, Any]) -> dict[str, Any]:
    """``values``, given under Llama's keys, under the keys that ``family`` calls them.

    What a family does not say of itself, such as GPT-NeoX's key/value heads, is left out.

    >>> own_keys("gpt2", {"hidden_size": 8, "intermediate_size": 32, "head_dim": 4})
    {'n_embd': 8, 'n_inner': 32}
    """
    names: dict[str, str] = {}
    if family == "gpt2":
        names = {general: own for own, general in _GPT2_NAMES.items()} | {"intermediate_size": "n_inner"}
    own = {names.get(key, key): value for key, value in values.items()}
    return {key: value for key, value in own.items() if key in _KEYS[family]}


def without_names_of(family: Family, keys: Iterable[str], config: Mapping[str, Any]) -> dict[str, Any]:
    """``config`` without other names of ``keys``, which would contradict new values."""
    others = {_GPT2_NAMES.get(key) for key in keys} if family == "gpt2" else set()
    return {key: value for key, value in config.items() if key not in others}


def _classes(family: str) -> tuple[str, str]:
    """The language model and the same without a head."""
    start = next(start for name, start in _ARCHITECTURES.items() if name == family)
    return f"{start}LMHeadModel" if family == "gpt2" else f"{start}ForCausalLM", f"{start}Model"


def _gpt2(config: Mapping[str, object]) -> ModelSpec:
    hidden_size = _gpt2_size(config, "n_embd", 768)
    num_heads = _gpt2_size(config, "n_head", 12)
    check_divides("n_embd", hidden_size, "n_head", num_heads)
    return ModelSpec(
        family="gpt2",
        num_layers=_gpt2_size(config, "n_layer", 12, most=MOST_LAYERS),
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=hidden_size // num_heads,
        ffn_size=size_or(config, "n_inner", 4 * hidden_size),
        vocab_size=size(config, "vocab_size", 50257),
        max_positions=_gpt2_size(config, "n_positions", 1024),
        norm="layernorm",
        norm_epsilon=positive(config, "layer_norm_epsilon", 1e-5),
        activation=_activation(config, "activation_function", "gelu_new"),
        gated_mlp=False,
        attention_bias=True,
        attention_out_bias=True,
        mlp_bias=True,
        tied_embeddings=flag(config, "tie_word_embeddings", default=True),
        rope=None,
        embedding_dropout=probability(config, "embd_pdrop", 0.1),
        attention_dropout=probability(config, "attn_pdrop", 0.1),
        residual_dropout=probability(config, "resid_pdrop", 0.1),
        init_std=positive(config, "initializer_range", 0.02),
        scaled_output_init=True,
    )


def _llama(config: Mapping[str, object], family: Family) -> ModelSpec:
    """Llama, Mistral, Qwen2 or Qwen3."""
    default = _DEFAULTS[family]
    hidden_size = size(config, "hidden_size", 4096)
    num_heads = size(config, "num_attention_heads", 32)
    num_layers = size(config, "num_hidden_layers", 32, most=MOST_LAYERS)
    num_kv_heads = size_or_none(config, "num_key_value_heads", default["num_key_value_heads"]) or num_heads
    given_head_dim = config.get("head_dim", default["head_dim"]) is not None
    # transformers 5 asks this of Llama even with an explicit head_dim (LlamaConfig.validate_architecture).
    if family == "llama" or not given_head_dim:
        check_divides("hidden_size", hidden_size, "num_attention_heads", num_heads)
    check_divides("num_attention_heads", num_heads, "num_key_value_heads", num_kv_heads)
    head_dim = size_or_none(config, "head_dim", default["head_dim"]) or hidden_size // num_heads
    check_even("head_dim", head_dim)
    max_positions = size(config, "max_position_embeddings", default["max_position_embeddings"])
    attention_bias = family == "qwen2" or flag(config, "attention_bias", default=False)
    return ModelSpec(
        family=family,
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        ffn_size=size(config, "intermediate_size", default["intermediate_size"]),
        vocab_size=size(config, "vocab_size", default["vocab_size"]),
        max_positions=max_positions,
        norm="rmsnorm",
        norm_epsilon=positive(config, "rms_norm_eps", 1e-6),
        activation=_activation(config, "hidden_act", "silu"),
        gated_mlp=True,
        attention_bias=attention_bias,
        # Llama and Qwen3 build o_proj with the same flag, Qwen2 without a bias (modeling_qwen2.py).
        attention_out_bias=attention_bias and family != "qwen2",
        mlp_bias=flag(config, "mlp_bias", default=False),
        tied_embeddings=flag(config, "tie_word_embeddings", default=False),
        rope=read_rope(config, max_positions),
        attention_dropout=probability(config, "attention_dropout", 0.0),
        init_std=positive(config, "initializer_range", 0.02),
        windows=_windows(config, family, num_layers),
        qk_norm=family == "qwen3",
    )


def _windows(config: Mapping[str, object], family: Family, num_layers: int) -> tuple[int, ...]:
    """Sliding window of each block: MistralConfig, or Qwen2Config.__post_init__ and Qwen3's alike."""
    if family == "llama":
        return ()
    window = 0
    if family == "mistral" or flag(config, "use_sliding_window", default=False):
        window = size_or_none(config, "sliding_window", 4096) or 0
    sliding = (True,) * num_layers if family == "mistral" else _sliding(config, num_layers, window)
    windows = tuple(window if slides else 0 for slides in sliding)
    return windows if any(windows) else ()


def _sliding(config: Mapping[str, object], num_layers: int, window: int) -> tuple[bool, ...]:
    """Whether each layer's attention slides, if there is a window."""
    kinds = config.get("layer_types")
    if kinds is None:
        first = config.get("max_window_layers", 28)
        if isinstance(first, bool) or not isinstance(first, int) or first < 0:
            raise ModelError(at("max_window_layers", first), "not a whole number", "use 0 or more")
        return tuple(block >= first for block in range(num_layers))
    known = ("full_attention", "sliding_attention")
    if (
        not isinstance(kinds, list | tuple)
        or len(kinds) != num_layers
        or not all(kind in known for kind in kinds)
    ):
        raise ModelError(
            at("layer_types", kinds),
            f"not {' or '.join(known)} for each of {num_layers} layers",
            "name each layer's attention, or leave it out",
        )
    if known[1] in kinds and not window:
        raise ModelError(
            at("layer_types", kinds),
            "there is no window to slide",
            "set use_sliding_window and sliding_window",
        )
    return tuple(kind == known[1] for kind in kinds)


def _gpt_neox(config: Mapping[str, object]) -> ModelSpec:
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
        activation=_activation(config, "hidden_act", "gelu"),
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


def _check_keys(config: Mapping[str, object], family: Family) -> None:
    """Refuse keys of other families and near misses of a known key: both would silently leave a default.

    Another family's key that is null or false asks for nothing.
    """
    if len(config) > _MOST_KEYS:
        raise ModelError(f"{len(config):,} keys", f"a config has at most {_MOST_KEYS:,}", "use its own")
    known = _KEYS[family]
    foreign = set().union(*_KEYS.values()) - known
    for key, value in config.items():
        if key in known or (key in foreign and (value is None or value is False)):
            continue
        near = get_close_matches(key, sorted(known), n=1, cutoff=0.88)
        if key in foreign or near:
            raise ModelError(
                at(key, value),
                f"a {family} config has no such key",
                f"write {near[0]}" if near else f"remove it; {family} knows {', '.join(sorted(known))}",
            )


def _check_fixed(config: Mapping[str, object], family: Family) -> None:
    for key, accepted in _FIXED[family].items():
        if config.get(key, accepted) != accepted:
            raise ModelError(at(key, config[key]), "dsx does not implement it", f"only {accepted} works")
    for key in ("quantization_config", "pruned_heads"):
        if config.get(key):
            raise ModelError(at(key, config[key]), "dsx trains plain dense weights", "use such a model")
    names = config.get("architectures") or []
    allowed = _classes(family)
    if not isinstance(names, list | tuple) or not all(name in allowed for name in names):
        raise ModelError(
            at("architectures", names),
            f"dsx builds {family} language models ({', '.join(sorted(allowed))})",
            "use a language model; if it is one under another name, remove this key",
        )


def _gpt2_size(config: Mapping[str, object], key: str, default: int, *, most: int = MOST) -> int:
    """A GPT-2 size under its own or its general name; both must agree."""
    other = _GPT2_NAMES[key]
    if other not in config:
        return size(config, key, default, most=most)
    value = size(config, other, default, most=most)
    if size(config, key, value, most=most) != value:
        raise ModelError(at(key, config[key]), f"{other} = {value} says otherwise", "keep one of the two")
    return value


def _activation(config: Mapping[str, object], key: str, default: str) -> Activation:
    value = config.get(key, default)
    if not isinstance(value, str) or value not in _ACTIVATIONS:
        raise ModelError(
            at(key, value),
            "dsx does not implement this activation",
            f"use one of {sorted(_ACTIVATIONS)}",
        )
    return _ACTIVATIONS[value]
