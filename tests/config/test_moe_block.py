"""What ``dsx.moe`` asks of models that do not have it is said before anything is spawned."""

from __future__ import annotations

import pytest
from sample_config import changed

from dsx.config.resolve import resolve
from dsx.errors import ConfigError

SIZES = {
    "vocab_size": 257,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 256,
}
GEMMA = {"enable_moe_block": True, "top_k_experts": 2, "num_experts": 4, "hidden_size_per_layer_input": 0}
LFM = {"num_dense_layers": 1, "layer_types": ["conv", "full_attention"], "use_expert_bias": True}
REFUSED = {
    "own": (None, {"z_loss": 0.001}, {}, r"dsx.moe.z_loss = 0.001: llama: no block has experts in stacks"),
    "bias": ("qwen3_moe", {"bias_update_speed": 0.1}, {}, "no buffer e_score_correction_bias or expert_bias"),
    "probabilities": ("gemma4_text", {"z_loss": 0.1}, {}, "are no logits"),
    "islands": ("lfm2_moe", {"bias_update_speed": 0.1}, {"dsx.outer": {"islands": 2}}, "their own ways"),
    "adapter": ("lfm2_moe", {"bias_update_speed": 0.1}, {"dsx.adapter": {"rank": 2}}, "as it is"),
    "negative": ("lfm2_moe", {"z_loss": -1.0}, {}, r"dsx.moe.z_loss"),
}


def edits_of(family: str | None, moe: dict[str, float], more: dict[str, object]) -> dict[str, object]:
    own = {"gemma4_text": GEMMA, "lfm2_moe": LFM}.get(family or "", {})
    model = {"config": {"model_type": family, **SIZES, **own}} if family else {"preset": "tiny"}
    base = {"dsx.model": model, "dsx.data.tokenizer": "bytes"} if family else {}
    return {**base, "dsx.moe": moe, **more}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_model_cannot_have_is_refused(name):
    family, moe, more, said = REFUSED[name]
    with pytest.raises(ConfigError, match=f"(?s){said}"):
        resolve(changed(edits_of(family, moe, more)), world_size=2)


def test_a_model_with_both_takes_both_in_bf16_too():
    moe = {"bias_update_speed": 0.001, "z_loss": 0.001}
    run = resolve(changed(edits_of("lfm2_moe", moe, {"bf16": {"enabled": True}})), world_size=2)
    assert run.model.balance.z_loss == 0.001
    assert run.model.experts == {1: 4}
