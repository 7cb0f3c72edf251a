"""FLOPs against torch's counter on transformers' models; peaks by the names that torch reports."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig

from dsx.checkpoint.claims import model_of
from dsx.models.flops import flops_per_token, layer_flops, peak_flops
from dsx.models.hf_config import model_spec
from dsx.models.params import layer_kinds
from dsx.models.presets import find_preset
from tiny_configs import tiny

SIZES = {"vocabulary": 101, "width": 48, "ffn": 100, "heads": 6, "layers": 2}
MODELS = {
    "gpt2": tiny("gpt2", vocabulary=101, width=24, heads=3, layers=3, ffn=50, n_positions=40),
    "gpt2-untied": tiny("gpt2", vocabulary=51, width=8, heads=2, layers=1, tie_word_embeddings=False),
    "llama": tiny("llama", **SIZES, kv_heads=2, head_dim=10, max_position_embeddings=40),
    "qwen3": tiny("qwen3", **SIZES, kv_heads=2, head_dim=10),
    "gpt_neox": tiny("gpt_neox", **SIZES),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("length", [7, 32])
def test_flops_equal_what_torch_counts(name, length):
    config, batch = MODELS[name], 2
    # Eager attention multiplies the full square, which is what the MFU convention counts.
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    ids = torch.zeros(batch, length, dtype=torch.long)
    counter = FlopCounterMode(display=False)
    with counter:
        model(ids, use_cache=False).logits.sum().backward()
    # transformers below 5.18 makes the rotary table by a product of matrices.
    table = sum(sum(n.values()) for at, n in counter.get_flop_counts().items() if at.endswith("rotary_emb"))
    counted = counter.get_total_flops() - table
    assert flops_per_token(model_of(config.to_dict()), length) * batch * length == counted


def test_windows_of_transformers_modules_count_where_the_config_names_layers():
    """Beside the same model with a window that is never reached; its blocks have one by turns."""
    config = dict(find_preset("gemma2", "tiny").config)
    model, whole = model_of(config), model_of(config | {"sliding_window": 1024})
    assert layer_flops(model, 64) == layer_flops(whole, 64)
    windowed, full = layer_flops(model, 512), layer_flops(whole, 512)
    less = 12 * model.query_size * (512 - 128)
    assert [b - a for a, b in zip(windowed, full, strict=True)] == [0, less, 0, less, 0, 0, 0]


def test_a_window_takes_the_place_of_a_longer_sequence():
    """Attention's part is that of a sequence as long as the window, block by block; the rest stays."""
    sizes = {"hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 2}
    whole = model_spec(MistralConfig(**sizes, sliding_window=None).to_dict())
    model = model_spec(MistralConfig(**sizes, sliding_window=16).to_dict())
    assert layer_flops(model, 16) == layer_flops(whole, 16)
    assert layer_flops(model, 64) == layer_flops(whole, 16)
    mixed = dataclasses.replace(model, windows=(0, 16, 0))
    longer, short = layer_flops(whole, 64), layer_flops(whole, 16)
    assert layer_flops(mixed, 64) == (*longer[:2], short[2], *longer[3:])
    assert longer[2] - short[2] == 12 * 48 * (64 - 16)


def test_flops_per_layer():
    model = model_spec(MODELS["llama"].to_dict())
    flops = layer_flops(model, 32)
    assert sum(flops) == flops_per_token(model, 32)
    assert [kind for kind, f in zip(layer_kinds(model), flops, strict=True) if f] == [
        "Block",
        "Block",
        "Head",
    ]


def test_the_palm_formula_on_llama_3_8b():
    """6 N + 12 L H Q T (PaLM appendix B), N without the embedding table that is only looked up."""
    config = LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
        num_attention_heads=32, num_key_value_heads=8,
    )  # fmt: skip
    with torch.device("meta"):
        parameters = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    norms = (2 * 32 + 1) * 4096
    expected = 6 * (parameters - 128256 * 4096 - norms) + 12 * 32 * 32 * 128 * 8192
    assert flops_per_token(model_spec(config.to_dict()), 8192) == expected


@pytest.mark.parametrize(
    ("name", "dtype", "tera"),
    [
        ("NVIDIA A100-SXM4-80GB", "bf16", 312),
        ("NVIDIA A100 80GB PCIe", "fp32", 19.5),
        ("NVIDIA H100 80GB HBM3", "bf16", 989.4),
        ("NVIDIA H100 PCIe", "bf16", 756),
        ("NVIDIA H100 NVL", "bf16", 835.5),
        ("NVIDIA H200", "bf16", 989.4),
        ("NVIDIA H200", "fp32", 66.9),
        ("NVIDIA GH200 480GB", "bf16", 989.4),
        ("NVIDIA B200", "bf16", 2250),
        ("NVIDIA GB200", "bf16", 2500),
        ("AMD Instinct MI300X", "bf16", 1307.4),
        ("NVIDIA L40S", "bf16", 362.05),
        ("NVIDIA L4", "bf16", 121),
        ("NVIDIA GeForce RTX 4090", "bf16", 165.2),
        ("Tesla V100-SXM2-16GB", "fp16", 125),
        ("Tesla V100-PCIE-32GB", "fp16", 112),
        ("Tesla V100-SXM2-16GB", "fp32", 15.7),
    ],
)
def test_peaks_by_reported_name(name, dtype, tera):
    assert peak_flops(name, dtype) == pytest.approx(tera * 1e12)


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA L40",
        "NVIDIA A10G",
        "cpu",
        "",
    ],
)
def test_no_peak_is_invented(name):
    assert peak_flops(name, "bf16") is None
    assert peak_flops(name, "fp32") is None


def test_v100_has_no_bf16_units():
    assert peak_flops("Tesla V100-SXM2-16GB", "bf16") is None
