"""From a Hugging Face ``config.json``, each value checked, to a :class:`~dsx.models.spec.ModelSpec`.

Absent keys take the defaults of transformers' config classes. A setting that would make the model compute
something else than dsx's is refused, never ignored; so is a key of which dsx does not know that it says
nothing of that.

The families are Llama (Touvron et al. 2023, arXiv:2302.13971; Llama 3, arXiv:2407.21783: RoPE, RMSNorm,
SwiGLU, GQA) and those whose layers are Llama's but for a setting or two: Mistral (arXiv:2310.06825) adds a
sliding window, Qwen2 (arXiv:2407.10671) biases on Q, K and V, Qwen3 (arXiv:2505.09388) norms of query and
key heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from functools import partial
from typing import Any

from dsx.errors import ModelError
from dsx.models import config_values as values
from dsx.models.config_values import at
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


FAMILIES: dict[str, ModelFamily] = {each.name: each for each in (LLAMA, MISTRAL, QWEN2, QWEN3)}
"""Every family of dsx's own, by its ``model_type``."""

_MOST_KEYS = 1000  # each key is compared with all known ones
_NEAR = 0.88

SAY_NOTHING = frozenset({
    # transformers' PreTrainedConfig, of this and earlier versions.
    "_name_or_path", "_commit_hash", "_attn_implementation", "_attn_implementation_autoset",
    "_attn_implementation_internal", "_from_model_config", "attn_implementation", "auto_map",
    "chunk_size_feed_forward", "cross_attention_hidden_size", "dtype", "finetuning_task", "id2label",
    "is_decoder", "label2id", "num_labels", "output_attentions", "output_hidden_states",
    "prefix", "problem_type", "return_dict", "task_specific_params", "tf_legacy_loss",
    "tokenizer_class", "torch_dtype", "torchscript", "transformers_version", "use_bfloat16", "use_cache",
    # Its special tokens and its GenerationConfig, which was a part of it.
    "bos_token_id", "eos_token_id", "sep_token_id", "decoder_start_token_id",
    "forced_bos_token_id", "forced_eos_token_id", "begin_suppress_tokens", "suppress_tokens",
    "assistant_confidence_threshold", "assistant_early_exit", "assistant_ensemble_weight",
    "assistant_lookbehind", "bad_words_ids", "cache_config", "cache_implementation", "compile_config",
    "constraints", "continuous_batching_config", "disable_compile", "diversity_penalty", "do_sample",
    "dola_layers", "early_stopping", "encoder_no_repeat_ngram_size", "encoder_repetition_penalty",
    "epsilon_cutoff", "eta_cutoff", "exponential_decay_length_penalty", "force_words_ids", "guidance_scale",
    "is_assistant", "length_penalty", "low_memory", "max_cache_len", "max_length", "max_matching_ngram_size",
    "max_new_tokens", "max_time", "min_length", "min_new_tokens", "min_p", "no_repeat_ngram_size",
    "num_assistant_tokens", "num_assistant_tokens_schedule", "num_beam_groups", "num_beams",
    "num_return_sequences", "output_logits", "output_scores", "penalty_alpha", "prefill_chunk_size",
    "prompt_lookup_num_tokens", "remove_invalid_values", "renormalize_logits", "repetition_penalty",
    "return_dict_in_generate", "sequence_bias", "speculation_type", "stop_strings", "target_lookbehind",
    "temperature", "token_healing", "top_h", "top_k", "top_p", "typical_p", "use_mtp", "watermarking_config",
    # Heads for other tasks.
    "classifier_dropout", "summary_activation", "summary_first_dropout", "summary_proj_to_labels",
    "summary_type", "summary_use_proj",
    # What published models have besides, and transformers does not read.
    "n_ctx",
    "_flash_attn_2_enabled", "dual_chunk_attention_config", "n_special", "num_steps", "output_past",
    "predict_special_tokens", "sliding_window_size",
    "_num_labels", "custom_pipelines", "gradient_checkpointing", "is_llama_config", "max_sequence_length",
    "model_max_length", "transformers.js_config", "unsloth_fixed", "unsloth_version",
})  # fmt: skip
"""Keys that say nothing of what a language model of dsx's families computes in training."""


def model_spec(config: Mapping[str, object]) -> ModelSpec:
    """The architecture that a Hugging Face config describes.

    Args:
        config: Content of ``config.json``, as written by transformers 4 (``rope_theta``, ``rope_scaling``) or
            5 (``rope_parameters``). Needs ``model_type``: a :data:`~dsx.models.spec.Family`.

    Raises:
        ModelError: A key that is missing, of a wrong type or value, misspelt, or not supported.
    """
    kind = config.get("model_type")
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None:
        raise ModelError(
            at("model_type", kind),
            f"dsx builds the families {', '.join(FAMILIES)}",
            "set model_type to one of them if the model is one",
        )
    _check_keys(config, family)
    _check_fixed(config, family)
    return family.read(config)


def _check_keys(config: Mapping[str, object], family: ModelFamily) -> None:
    """Refuse keys of other families, near misses of a known key, and what nobody here knows.

    Each would leave a default in silence. A key that is null, false or empty asks for nothing.
    """
    if len(config) > _MOST_KEYS:
        raise ModelError(f"{len(config):,} keys", f"a config has at most {_MOST_KEYS:,}", "use its own")
    known = family.keys
    foreign = set[str]().union(*(other.keys for other in FAMILIES.values())) - known
    for key, value in config.items():
        if key in known or key in SAY_NOTHING or _is_neutral(key, value, config):
            continue
        near = get_close_matches(key, sorted(known), n=1, cutoff=_NEAR)
        if near and key not in foreign:
            raise ModelError(at(key, value), f"a {family.name} config has no such key", f"write {near[0]}")
        if value is None or value is False or value in ("", [], {}):
            continue
        if key in foreign:
            fix = f"write {near[0]}" if near else f"remove it; {family.name} knows {', '.join(sorted(known))}"
            raise ModelError(at(key, value), f"a {family.name} config has no such key", fix)
        raise ModelError(
            at(key, value),
            f"dsx does not know what it means in a {family.name} config",
            f'if it changes nothing in training, remove it, or write {{"{key}": null}} into '
            'dsx.model.overrides; else set dsx.model.implementation to "transformers"',
        )


def _is_neutral(key: str, value: object, config: Mapping[str, object]) -> bool:
    """Whether a key that the family does not have says what the family does anyway.

    Scripts and published configs have keys of other families (Llama's ``pretraining_tp = 1`` above all).
    """
    if any(key in other.fixed and value == other.fixed[key] for other in FAMILIES.values()):
        return True
    if key == "scale_attn_weights":  # GPT-2's, where it is true
        return value is True
    if key == "max_window_layers":
        return not (config.get("use_sliding_window") and config.get("sliding_window"))
    if key == "layer_types" and isinstance(value, list):
        return set(value) == {"full_attention"}
    return "drop" in key and value == 0


def _check_fixed(config: Mapping[str, object], family: ModelFamily) -> None:
    for key, accepted in family.fixed.items():
        if config.get(key, accepted) != accepted:
            raise ModelError(at(key, config[key]), "dsx does not implement it", f"only {accepted} works")
    for key in ("quantization_config", "pruned_heads"):
        if config.get(key):
            raise ModelError(at(key, config[key]), "dsx trains plain dense weights", "use such a model")
    names = config.get("architectures") or []
    if not isinstance(names, list | tuple) or not all(name in family.classes for name in names):
        raise ModelError(
            at("architectures", names),
            f"dsx builds {family.name} language models ({', '.join(sorted(family.classes))})",
            "use a language model; if it is one under another name, remove this key",
        )
