"""Keys of a ``config.json``: what dsx reads, what it knows to say nothing, and what it refuses by name."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from transformers import AutoConfig, GenerationConfig, PretrainedConfig

from dsx.errors import ModelError
from dsx.hub.model_structure import check_keys
from dsx.hub.read import hub_model
from dsx.models.hf_config import model_spec
from dsx.models.presets import find_preset
from dsx.models.spec import Family

LLAMA = dict(find_preset("llama", "tiny").config)
QWEN = dict(find_preset("qwen3", "tiny").config)
NULLED = {"is_encoder_decoder", "add_cross_attention", "pruned_heads"}  # true would be another model


@pytest.mark.parametrize("family", get_args(Family))
def test_whatever_transformers_writes_is_read(family: Family) -> None:
    """Every key of its config of the family, of all configs, and of generation, which older ones have too."""
    config = dict(find_preset(family, "tiny").config)
    written = AutoConfig.for_model(**config).to_dict()
    general = PretrainedConfig().to_dict() | GenerationConfig().to_dict()
    general |= dict.fromkeys((key for key, value in general.items() if value is None), 1)
    others = {key: value for key, value in general.items() if key not in written.keys() | NULLED}
    assert model_spec(written | others) == model_spec(config)


@pytest.mark.parametrize(
    ("config", "change", "said"),
    [
        (LLAMA, {"residual_multiplier": 0.22}, "does not know what it means in a llama config"),
        (LLAMA, {"logits_scaling": 16}, 'write {"logits_scaling": null} into dsx.model'),
        (LLAMA, {"use_qk_norm": True}, "does not know what it means"),
        (LLAMA, {"num_experts": 0}, "does not know what it means"),
        (LLAMA, {"is_encoder_decoder": True}, "does not know what it means"),
        (LLAMA, {"quantization": {"bits": 4}}, "does not know what it means"),
        (LLAMA, {"hidden_sizes": 64}, "write hidden_size"),
        (LLAMA, {"layer_types": ["sliding_attention"]}, "a llama config has no such key"),
        (LLAMA, {"max_window_layers": 1, "use_sliding_window": True, "sliding_window": 8}, "has no such key"),
        (QWEN, {"pretraining_tp": 2}, "a qwen3 config has no such key"),
        (LLAMA, {"rope_scaling": {"rope_type": "default", "mrope_section": [1, 1, 2]}}, "mrope_section"),
        (LLAMA, {"pad_token_id": 257}, "have the numbers 0 to 256"),
        (LLAMA, {"pad_token_id": -258}, "no token of the vocabulary"),
        (LLAMA, {"pad_token_id": True}, "no token of the vocabulary"),
        (LLAMA, {"pad_token_id": [1]}, "no token of the vocabulary"),
    ],
)
def test_what_nobody_knows_is_refused_by_name(
    config: dict[str, Any], change: dict[str, Any], said: str
) -> None:
    with pytest.raises(ModelError) as caught:
        model_spec({**config, "vocab_size": 257, **change})
    assert next(iter(change)) in caught.value.where
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("config", "change"),
    [
        (LLAMA, {"residual_multiplier": None, "use_qk_norm": False, "quantization": {}}),
        (LLAMA, {"unsloth_version": "2025.1", "transformers.js_config": {"dtype": "q4"}}),
        (LLAMA, {"rope_scaling": {"rope_type": "default", "mrope_section": None}}),
        # As published: Qwen2.5 1M, DeepSeek-R1 on Qwen3.
        (QWEN, {"pretraining_tp": 1, "hidden_dropout_prob": 0, "cache_implementation": "hybrid"}),
        (LLAMA, {"dual_chunk_attention_config": {"chunk_size": 262144}, "_flash_attn_2_enabled": True}),
        (LLAMA, {"rope_scaling": {"rope_type": "default", "attn_factor": 0.8}, "embd_pdrop": 0}),
        (LLAMA, {"max_window_layers": 1, "layer_types": ["full_attention"]}),
    ],
)
def test_what_asks_for_nothing_is_let_pass(config: dict[str, Any], change: dict[str, Any]) -> None:
    assert model_spec(config | change) == model_spec(config)


def test_a_padding_token_below_zero_counts_from_the_end_as_in_torch() -> None:
    assert model_spec({**LLAMA, "vocab_size": 257, "pad_token_id": -1}).pad_token_id == 256


def test_two_names_of_one_size_that_disagree_are_refused_of_any_family() -> None:
    """transformers takes the one that comes last."""
    gpt2 = find_preset("gpt2", "tiny").config
    check_keys(gpt2 | {"hidden_size": gpt2["n_embd"]})
    with pytest.raises(ModelError, match=r"n_embd = 128: hidden_size = 24 says otherwise"):
        check_keys(gpt2 | {"hidden_size": 24})
    with pytest.raises(ModelError, match=r"z_loss_coefficient = 0.1: the family's own loss"):
        check_keys({"model_type": "bamba", "z_loss_coefficient": 0.1})


def test_keys_of_published_gpt2_folders_say_nothing_elsewhere_either():
    gpt2 = dict(find_preset("gpt2", "tiny").config)
    neutral = {"n_ctx": 1024, "summary_first_dropout": 0.1, "_num_labels": 1}
    assert model_spec(LLAMA | neutral | {"scale_attn_weights": True}) == model_spec(LLAMA)
    check_keys(gpt2 | neutral)
    with pytest.raises(ModelError, match="scale_attn_weights"):
        model_spec(LLAMA | {"scale_attn_weights": 2})


@pytest.mark.parametrize(
    ("family", "key"), [("gpt2", "n_layer"), ("gemma2", "num_hidden_layers"), ("gpt2", "num_hidden_layers")]
)
def test_more_layers_than_any_model_has_are_refused_before_they_are_counted(family, key):
    config = {"model_type": family, key: 10**9}
    with pytest.raises(ModelError, match=f"{key} = 1000000000: more than 2,048"):
        hub_model(config)
