"""A tiny random model of every causal language model family of the installed transformers.

Sizes follow from what a config class calls its fields; the few families that need more have a line in
``_FAMILIES``. Experts, heads, key/value heads and widths divide by 2; the vocabulary does not. What a family
can do beside plain attention is at work at these sizes too: windows are shorter than the sequence, every type
of layer occurs, multipliers are not 1.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterable, Mapping
from typing import Any

from dsx.hub.shrunk import FIXED, HEAD, HEADS, OF_RANKS

WIDTH, LAYERS, VOCABULARY, POSITIONS = HEADS * HEAD, 4, 211, 64
SEQUENCE = 24

_SIZES = {
    name: size
    for names, size in {
        **OF_RANKS,
        **FIXED,
        "input_embedding_size output_embedding_size pronunciation_embed_dim shape_embed_dim": WIDTH // 2,
        "encoder_ffn_dim feed_forward_size dff dim_ff": 96,
        "attention_heads encoder_attention_heads": HEADS,
        "num_decoder_attention_heads num_encoder_attention_heads": HEADS,
        "num_key_value_heads num_kv_heads swa_num_key_value_heads n_groups mamba_ngroups": HEADS // 2,
        "sliding_window sliding_window_size attention_window_size window_size attention_chunk_size": HEAD,
        "dim_head": HEAD,
        "d_rel": HEAD // 2,
        "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers": LAYERS,
        "num_decoder_layers num_encoder_layers": LAYERS,
        "vocab_size vocab_size_per_layer_input pronunciation_vocab_size shape_vocab_size": VOCABULARY,
        "max_position_embeddings n_positions max_target_positions max_seq_len context_length": POSITIONS,
        "first_k_dense_replace attn_layer_period layer_group_size": 2,
        "n_group topk_group attn_layer_offset": 1,
        "logits_scaling": 1.5,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "is_decoder": True,
    }.items()
    for name in names.split()
}
"""What :mod:`dsx.hub.shrunk` makes sizes, and what it leaves alone or makes otherwise."""

_TOWER = {
    name: size
    for names, size in {
        "hidden_size embed_dim d_model projection_dim vision_output_dim projector_input_dim": HEADS * HEAD,
        "projector_output_dim out_hidden_size encoder_dim hidden_dim text_hidden_size": HEADS * HEAD,
        "adapter_in_dim adapter_out_dim adapter_input_size adapter_output_size": HEADS * HEAD,
        "intermediate_size mlp_dim encoder_ffn_dim projector_hidden_size output_dim": 4 * HEAD,
        "num_hidden_layers depth num_layers n_layers encoder_layers": 2,
        "num_attention_heads num_heads encoder_attention_heads num_key_value_heads": HEADS,
        "head_dim patch_size": HEAD,
        "num_position_embeddings": 16,
        "fullatt_block_indexes deepstack_visual_indexes": [1],
    }.items()
    for name in names.split()
}
"""Sizes of what stands beside the language model in a composite one."""

_PARTS: dict[str, dict[str, dict[str, Any]]] = {
    "emu3": {"": {"vocabulary_map": {"<image>": VOCABULARY - 1}}},
    "granite4_vision": {"": {"deepstack_layer_map": [[0, 0]], "downsample_rate": "1/2"}},
    "fun_asr_nano": {"adaptor_config": {"intermediate_size": WIDTH // 4}},
    "molmo2": {"adapter_config": {"vision_feature_layer": [1, 0]}},
    "dots3_note": {"vision_config": {"per_layer_config": {}}},
}
"""What else fits together only so."""

_MROPE = (
    "qwen2_vl", "qwen2_5_vl", "qwen2_5_omni", "qwen3_vl", "glm4v", "glm4v_moe", "glm_ocr", "hunyuan_vl",
    "paddleocr_vl", "cosmos3_edge",
)  # fmt: skip

_TYPES = ("layer_types", "mlp_layer_types", "layers_block_type")

_FAMILIES: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "big_bird": {"attention_type": "original_full"},
    "cohere_compass_text": {
        "layer_types": ["full_attention"] * LAYERS,
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}},
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"hidden_size": WIDTH, "ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v4": {"mlp_layer_types": ["moe"] * LAYERS},
    "dots3_note_text": {
        **dict.fromkeys(("swa_num_attention_heads", "swa_num_key_value_heads"), HEADS),
        **dict.fromkeys(("swa_q_lora_rank", "swa_kv_lora_rank", "swa_head_dim", "swa_v_head_dim"), HEAD),
        "swa_qk_nope_head_dim": HEAD // 2,
    },
    "gemma3n_text": {
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "activation_sparsity_pattern": [0.5, 0.5, 0.0, 0.0],
    },
    "gemma4_text": {"global_head_dim": 2 * HEAD},
    "gemma4_unified_text": {"global_head_dim": 2 * HEAD},
    "ernie4_5_vl_moe_text": {
        "moe_intermediate_size": [WIDTH // 2, WIDTH // 2],
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [3, 3, 2]},
    },
    "glm5_next_text": {"qk_rope_head_dim": 0},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "longcat_flash": {"head_dim": 8},
    "mamba2": {"head_dim": 32},
    "mpt": {"attn_config": {"alibi": True}},
    "qwen4_exp_text": {
        "indexer_kv_heads": 1,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
        "hc_lowrank": 16,
    },
    "reformer": {"axial_pos_embds_dim": (32, 32), "axial_pos_shape": (4, 6)},
    "xlm": {"n_words": VOCABULARY},
    "xmod": {"default_language": "en_XX"},
    **{
        f"{family}_text": {
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
        }
        for family in _MROPE
    },
    "glm4v_moe_text": {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.5,
            "mrope_section": [1, 1, 2],
        }
    },
    "zamba": {"layers_block_type": ["linear_attention", "hybrid"] * 2},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"] * 2},
    "zaya": {"num_experts_per_tok": 1},
}


def size_of(field: str, otherwise: int) -> int:
    """What a tiny model has for a field of a config, where it has it."""
    return _SIZES.get(field, otherwise)


def value_of(config: Any, field: str) -> Any:
    """A field of a config; None where it has none, or one for each layer."""
    try:
        return getattr(config, field, None)
    except RuntimeError:  # how transformers refuses to say what differs from layer to layer
        return None


def rotated(config: Any) -> int:
    """How many numbers of a head are rotated."""
    for name in ("qk_rope_head_dim", "rotary_dim", "head_dim"):
        if isinstance(size := value_of(config, name), int):
            break
    else:
        size = config.hidden_size // config.num_attention_heads
    rope = getattr(config, "rope_parameters", None) or {}
    return int(size * rope.get("partial_rotary_factor", 1.0))


def all_families() -> list[str]:
    """Every ``model_type`` for which transformers has a causal language model."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def composite_families() -> list[str]:
    """Every ``model_type`` that :func:`is_composite`."""
    from transformers.models.auto import modeling_auto as known

    names = {
        *known.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
        *known.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    }
    return sorted(filter(is_composite, names))


def modules(families: Iterable[str]) -> list[str]:
    """The modules that define the models of families."""
    found = {_config_class(family.partition("+")[0]).__module__ for family in families}
    return sorted(name.replace(".configuration_", ".modeling_") for name in found)


def text_family(family: str) -> str:
    """The ``model_type`` of the text model in a composite family; ``family`` itself if it is none.

    Raises:
        LookupError: The family is made of several models, and no language model of its own is among them.
    """
    parts = sorted(_config_class(family.partition("+")[0]).sub_configs)
    if not any(re.search("vision|audio|vq|encoder|patcher|text", name) for name in parts):
        return family
    made_of = f"{family} is made of {', '.join(parts)}"
    if "text_config" not in parts:
        raise LookupError(made_of)
    if "assistant" in family:
        raise LookupError(f"{family} drafts for another model, whose keys and values it reads")
    found = str(_config_class(family)().text_config.model_type)
    if found not in all_families():
        raise LookupError(f"{made_of}; {found} alone is no causal language model of transformers")
    return found


def tiny_config(family: str, option: Mapping[str, Any] | None = None, **sizes: Any) -> Any:
    """The config of a tiny model without dropout.

    Args:
        family: A ``model_type``, and fields to set behind a plus sign each: ``mixtral+output_router_logits``.
        option: What is set in any case (:mod:`all_families.options`).
        sizes: What to put in place of the family's own, for those of its fields that they name.
    """
    family, *flags = family.split("+")
    sizes = sizes | dict.fromkeys(flags, True)
    config_class = _config_class(family)
    fields = {field.name: field.default for field in dataclasses.fields(config_class)}
    values = {name: size for name, size in _SIZES.items() if name in fields}
    values |= {name: 0.0 for name in fields if re.search(r"drop(out)?($|_p)|_pdrop|jitter", name)}
    values |= {
        name: 0.75
        for name, default in fields.items()
        if re.search("multiplier$", name) and default == 1.0 and "dim" not in name
    }
    if "kv_lora_rank" in fields:  # latent attention makes keys and values for every head
        values["num_key_value_heads"] = HEADS
    values |= _FAMILIES.get(family, {}) | {name: size for name, size in sizes.items() if name in fields}
    values |= option or {}
    config = config_class(**values)
    lacking = {
        name: list(itertools.islice(itertools.cycle(kinds), LAYERS))
        for name in _TYPES
        if name in fields and name not in values and (kinds := _kinds(config_class(), name))
        if not set(kinds) <= set(getattr(config, name))
    }
    return config_class(**values | lacking) if lacking else config


def is_composite(family: str) -> bool:
    """Whether a family's models read more than text, beside a text model that its config has as a part."""
    return composite_class(family) is not None


def composite_class(family: str) -> Any:
    """The Auto class that makes a composite family's models; None if it is not :func:`is_composite`."""
    import transformers
    from transformers.models.auto import modeling_auto as known

    mappings = {
        transformers.AutoModelForMultimodalLM: known.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
        transformers.AutoModelForSeq2SeqLM: known.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    }
    kind = next((each for each, names in mappings.items() if family in names), None)
    return kind if kind and "text_config" in _config_class(family).sub_configs else None


def tiny_composite(family: str, **sizes: Any) -> Any:
    """The config of a tiny composite model: the tiny text model, of ``sizes``, beside a tiny tower."""
    config_class = _config_class(family)
    made = config_class()
    text = made.get_text_config(decoder=True)
    key = next(name for name in config_class.sub_configs if getattr(made, name, None) is text)
    parts = {
        name: _tower(part.to_dict()) | _PARTS.get(family, {}).get(name, {})
        for name in config_class.sub_configs
        if name != key and (part := getattr(made, name, None)) is not None
    }
    tied = {name: getattr(made, name) for name in ("tie_word_embeddings",) if hasattr(made, name)}
    own = _PARTS.get(family, {}).get("", {})
    text = tiny_config(text.model_type, **tied, **sizes).to_dict()
    return config_class(**{**parts, key: text, **tied, **own})


def _tower(part: Mapping[str, Any]) -> dict[str, Any]:
    """A part of a composite config with sizes of :data:`_TOWER`; lists by layer are cut."""
    small, layers = dict(part), part.get("num_hidden_layers")
    for field, value in part.items():
        size = _TOWER.get(field)
        if size is not None and type(value) in (type(size), type(None)):
            small[field] = size
        elif isinstance(value, list) and len(value) == layers:
            small[field] = value[: _TOWER["num_hidden_layers"]]
    return small


def _config_class(family: str) -> Any:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return CONFIG_MAPPING[family]


def _kinds(config: Any, name: str) -> list[str]:
    return list(dict.fromkeys(getattr(config, name) or ()))
