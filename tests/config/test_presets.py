"""Presets against transformers' own classes and published parameter counts."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from dsx.checkpoint.claims import model_of
from dsx.models.params import num_parameters
from dsx.models.presets import presets
from dsx.models.spec import HubModel, PresetFamily
from often import often

# Parameter counts of the hub's models (safetensors metadata), tied tables once.
PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "mistral-7b": 7_241_732_096,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "gemma-2-2b": 2_614_341_888,
    "gemma-2-9b": 9_241_705_984,
    "pythia-160m": 162_322_944,
    "pythia-6.9b": 6_857_302_016,
}


@pytest.mark.parametrize("preset", often(presets(), 4), ids=lambda preset: f"{preset.family}-{preset.name}")
def test_parameters_equal_transformers(preset):
    config = AutoConfig.for_model(**preset.config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    theirs = sum(p.numel() for p in model.parameters())
    assert num_parameters(model_of(preset.config)) == (preset.parameters or theirs) == theirs


def test_published_counts():
    counts = {preset.name: num_parameters(model_of(preset.config)) for preset in presets()}
    assert {name: counts[name] for name in PUBLISHED} == PUBLISHED


@pytest.mark.parametrize("preset", presets(), ids=lambda preset: f"{preset.family}-{preset.name}")
def test_transformers_knows_every_key(preset):
    """A key that the config class does not have would be carried along and do nothing."""
    known = AutoConfig.for_model(preset.config["model_type"])
    # transformers 5 folds these into rope_parameters
    extra = {"rope_theta", "rope_scaling", "rotary_pct", "rotary_emb_base"}
    assert {key for key in preset.config if not hasattr(known, key)} <= extra


@pytest.mark.parametrize("family", get_args(PresetFamily))
def test_tiny_suits_3d_on_a_laptop(family):
    tiny = next(preset for preset in presets() if (preset.family, preset.name) == (family, "tiny"))
    model = model_of(tiny.config)
    assert 5e5 <= num_parameters(model) <= 1e6
    assert model.vocab_size == 257
    assert model.num_layers >= 4
    assert model.max_positions >= 512
    assert not any(value for key, value in tiny.config.items() if "drop" in key)
    if isinstance(model, HubModel):
        assert model.uncut(4) is None
    else:
        assert not any(size % 4 for size in (model.num_heads, model.num_kv_heads, model.ffn_size))
