"""dsx upcycle, as a shell sees it: from a dense folder in bf16 to one that transformers reads."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM


def test_a_dense_folder_becomes_a_mixture_of_equal_logits(dsx, tmp_path):
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=1, vocab_size=128,
        rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0},
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "dense", max_shard_size="60KB")
    words = ("--experts", 8, "--top-k", 4, "--granularity", 2)
    code, out, _ = dsx("upcycle", tmp_path / "dense", tmp_path / "mixture", *words)
    assert code == 0
    assert "proved     a small mixtral of the same structure has the logits of llama\nwritten    " in out
    assert "\\n" not in out
    ids, found = torch.arange(48).reshape(2, 24), {}
    for name in ("dense", "mixture"):
        model = AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float32)
        found[name] = model(ids).logits.detach()
    assert model.config.model_type == "mixtral"
    away = (found["mixture"] - found["dense"]).abs().max()
    assert away <= 1e-5 * found["dense"].abs().max()

    code, _, err = dsx("upcycle", tmp_path / "dense", tmp_path / "mixture", *words)
    assert code == 2
    assert "exists" in err
