"""Small models of transformers' modules over drawn layouts, for test_hub_memory.py."""

from __future__ import annotations

import random
from typing import Any

_ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
_SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "vocab_size": 300,
    "max_position_embeddings": 512,
}
_EXPERTS = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}

MODELS: tuple[dict[str, Any], ...] = (
    {"model_type": "granite", **_ATTENTION, "tie_word_embeddings": True, "logits_scaling": 8.0},
    {"model_type": "qwen3_moe", **_ATTENTION, **_EXPERTS, "num_experts": 4, "output_router_logits": True},
    {
        "model_type": "deepseek_v3",
        **_EXPERTS,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "n_routed_experts": 8,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
    },
    {"model_type": "gemma3_text", **_ATTENTION, "sliding_window": 32},
    {
        "model_type": "granitemoehybrid",
        **_ATTENTION,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "layer_types": ["mamba", "attention", "mamba", "mamba"],
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_d_state": 16,
        "mamba_chunk_size": 16,
        "shared_intermediate_size": 32,
    },
)


def case(number: int) -> dict[str, Any]:
    """A model and a layout: the model goes round, the rest is drawn."""
    draw = random.Random(number)
    chunks = draw.choice((1, 2))
    zero = draw.choice((0, 1, 2, 3))
    hybrid = number % len(MODELS) == len(MODELS) - 1
    pipeline = draw.choice((1, 2)) if chunks == 1 else 2
    return {
        "model": number % len(MODELS),
        "tensor": 1 + number % 2 if hybrid else draw.choice((1, 2)),
        "pipeline": pipeline,
        "chunks": chunks,
        "data": draw.choice((1, 2)),
        "sequence": draw.random() < 0.5,
        "schedule": "interleaved" if chunks == 2 else draw.choice(("1f1b", "zb_h1")),
        "zero": zero,
        "bf16": draw.random() < 0.7,
        "recompute": draw.choice(("none", "full")),
        "offload": zero > 0 and draw.random() < 0.3,
        "rank": draw.randrange(pipeline),
        "documents": "joined" if hybrid else draw.choice(("apart", "joined")),
    }


def config(drawn: dict[str, Any]) -> dict[str, Any]:
    """The config of a case."""
    zero: dict[str, Any] = {"stage": drawn["zero"], "reduce_bucket_size": 100_000}
    if drawn["offload"]:
        zero["offload_optimizer"] = {"device": "cpu"}
    eager = {"attn_implementation": "eager"} if drawn.get("eager") else {}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2 * drawn["pipeline"],
        "gradient_clipping": 1.0,
        "bf16": {"enabled": drawn["bf16"]},
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": zero,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "dsx": {
            "model": {
                "config": {**_SIZES, **MODELS[drawn["model"]], **eager},
                "implementation": "transformers",
            },
            "parallel": {
                "tensor": drawn["tensor"],
                "pipeline": drawn["pipeline"],
                "chunks": drawn["chunks"],
                "sequence_parallel": drawn["sequence"],
                "context": drawn.get("context", 1),
                "context_method": drawn.get("method", "auto"),
            },
            "schedule": {"name": drawn["schedule"]},
            "recompute": drawn["recompute"],
            "mlp_tiles": drawn.get("tiles", 1),
            "adapter": drawn.get("adapter"),
            "data": {"sequence_length": 128, "documents": drawn["documents"]},
            "train": {"steps": 2, "output": "runs/paper"},
        },
    }
