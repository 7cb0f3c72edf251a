"""A checkpoint that megatron-core 0.16.1 wrote, read: the model gives Megatron's logits under transformers.

``megatron_core_0_16_1/`` was saved by ``megatron.core.dist_checkpointing.save`` of a Llama-like GPTModel
after a step of Adam (FP32Optimizer) on a CPU. ``megatron_core_0_16_1.safetensors`` has the logits it then
gave, and the moments of each of its parameters as Megatron names and lays them out in memory.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from checkpoint.stock_checkpoints import read_entry
from dsx.checkpoint.open import open_checkpoint

COMMAND = ("reshard",)
SAVED = Path(__file__).parent / "megatron_core_0_16_1"
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 31,  # Megatron's table has a row more, as if it were padding
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    return path


def test_transformers_gives_megatrons_logits(dsx, config, tmp_path):
    code, out, err = dsx(SAVED, tmp_path / "hf", "--to", "hf", "--hf-config", config)
    assert (code, err) == (0, "")
    assert "checksums of the source's files were right" in out
    model = LlamaForCausalLM.from_pretrained(tmp_path / "hf").eval()
    with torch.no_grad():
        found = model(input_ids=torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6, 28]])).logits
    expected = load_file(f"{SAVED}.safetensors")["logits"][..., :31]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_the_moments_come_along(dsx, config, tmp_path):
    code, _, err = dsx(SAVED, tmp_path / "dsx", "--to", "tp=2,pp=2,zero=3", "--hf-config", config)
    assert (code, err) == (0, "")
    catalog, held = open_checkpoint(tmp_path / "dsx"), load_file(f"{SAVED}.safetensors")
    for ours, theirs in (("exp_avg", "avg"), ("exp_avg_sq", "sq")):
        for layer in range(2):
            part = f"{theirs}:decoder.layers.{layer}."
            qkv = held[f"{part}self_attention.linear_qkv.weight"].view(2, 4, 4, 16)  # group, q q k v, head
            whole = torch.cat([qkv[:, :2].reshape(16, 16), *(qkv[:, at].reshape(8, 16) for at in (2, 3))])
            for name, expected in [
                ("attention.qkv.weight", whole),
                ("attention.out.weight", held[f"{part}self_attention.linear_proj.weight"]),
                ("norm_1.weight", held[f"{part}input_layernorm.weight"]),
                ("mlp.gate_up.weight", held[f"{part}mlp.linear_fc1.weight"]),
            ]:
                found = read_entry(catalog, catalog.by_key[f"{1 + layer}.{name}", ours])
                assert torch.equal(found, expected), (layer, name, ours)
        found = read_entry(catalog, catalog.by_key["0.word.weight", ours])
        assert torch.equal(found, held[f"{theirs}:embedding.word_embeddings.weight"][:31])
    (group,) = catalog.facts["param_groups"]
    assert (group["step"], group["lr"], len(group["names"])) == (1.0, 1e-3, 15)
    assert catalog.facts["step"] == 7


def test_what_it_does_not_say_has_to_be_given(dsx, config, tmp_path):
    code, _, err = dsx(SAVED, tmp_path / "out")
    assert (code, "--hf-config" in err) == (2, True), err
    config.write_text(json.dumps(CONFIG | {"num_hidden_layers": 3}))
    code, _, err = dsx(SAVED, tmp_path / "out", "--hf-config", config)
    assert (code, "has no layer 2" in err) == (2, True), err
    config.write_text(json.dumps(CONFIG | {"intermediate_size": 20}))
    code, _, err = dsx(SAVED, tmp_path / "out", "--hf-config", config)
    assert (code, "its shape is (48, 16), the model's (40, 16)" in err) == (2, True), err
    for family in ("gpt2", "mixtral"):
        config.write_text(json.dumps({"model_type": family}))
        code, _, err = dsx(SAVED, tmp_path / "out", "--hf-config", config)
        assert (code, "checkpoints of the families llama, mistral, qwen2, qwen3" in err) == (2, True), err
    shutil.copytree(SAVED, tmp_path / "zarr")
    (tmp_path / "zarr" / "metadata.json").write_text('{"sharded_backend": "zarr"}')
    code, _, err = dsx(tmp_path / "zarr", tmp_path / "out", "--hf-config", config)
    assert (code, "format zarr, which dsx cannot read" in err) == (2, True), err
    assert not (tmp_path / "out").exists()
