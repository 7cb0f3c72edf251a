"""Small models of families that keep parameters in fp32, or none."""

from __future__ import annotations

from typing import Any

_SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
_ERNIE = _SIZES | {"moe_intermediate_size": 16, "moe_num_experts": 4, "moe_k": 2, "moe_layer_start_index": 0}
_DEEPSEEK = _SIZES | {
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}
_OLMO = _SIZES | {
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "pad_token_id": None,
}
_GPT_OSS = _SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}
FAMILIES: dict[str, dict[str, Any]] = {
    "ernie4_5_moe": _ERNIE,  # routers and their biases, by name
    "olmo_hybrid": _OLMO,  # A_log, by its code
    "deepseek_v3": _DEEPSEEK,  # a buffer
    "gpt_oss": _GPT_OSS,  # norms, in fp16 alone
    "llama": _SIZES,  # nothing
    "gpt2": {"vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},  # nor in Conv1D
}
