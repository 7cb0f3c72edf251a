"""What a family's model adds to plain training: its routers' auxiliary loss, heads that ranks share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM

import dsx
import ranks
from dsx.hub.read import hub_model

TOKENS, ROWS, MICRO_BATCHES, STEPS, CLIPPING = 16, 2, 4, 3, 0.5
ADAMW: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}

MIXTURE = {
    "model_type": "qwen3_moe",
    "vocab_size": 89,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 4,
    "mlp_only_layers": [1],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "output_router_logits": True,
    "router_aux_loss_coef": 0.5,
    "max_position_embeddings": 64,
}
ONE_PAIR = {
    "model_type": "olmo3",
    "vocab_size": 89,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "pad_token_id": None,
    "max_position_embeddings": 64,
}
SHARED = {
    **ONE_PAIR,
    "model_type": "qwen3",
    "num_key_value_heads": 2,
    "num_attention_heads": 8,
    "head_dim": 8,
}

LAYOUTS = {
    "tp 2": (2, {"tensor": 2, "pipeline": 1, "chunks": 1, "sequence_parallel": False}, "auto", 1),
    "pp 2, 2 chunks": (2, {"tensor": 1, "pipeline": 2, "chunks": 2}, "interleaved", 2),
    "tp 2 x pp 2, zero-bubble": (4, {"tensor": 2, "pipeline": 2, "chunks": 1}, "zb_h1", 1),
    "cp 2, ZeRO-2": (2, {"context": 2}, "auto", 2),
    "cp 2 x pp 2, 2 chunks, Ulysses": (
        4,
        {"context": 2, "context_method": "ulysses", "pipeline": 2, "chunks": 2},
        "interleaved",
        1,
    ),
    "cp 2 x tp 2, cut sequences, ZeRO-3": (4, {"context": 2, "tensor": 2}, "auto", 3),
    "tp 4, ZeRO-3": (4, {"tensor": 4, "pipeline": 1, "chunks": 1}, "auto", 3),
}


def micro_batches(step: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(step)
    made = [torch.randint(1, 89, (ROWS, TOKENS + 1), generator=generator) for _ in range(MICRO_BATCHES)]
    return [(ids[:, :-1].contiguous(), ids[:, 1:].contiguous()) for ids in made]


def transformers_alone(_rank: int, _world_size: int, folder: Path) -> list[tuple[float, float]]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    optimizer, found = torch.optim.AdamW(model.parameters(), **ADAMW), []
    for step in range(STEPS):
        optimizer.zero_grad()
        total = 0.0
        for inputs, labels in micro_batches(step):
            if getattr(model.config, "output_router_logits", False):
                loss = model(input_ids=inputs, labels=labels, shift_labels=labels, use_cache=False).loss
            else:
                logits = model(input_ids=inputs, use_cache=False).logits
                loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
            (loss / MICRO_BATCHES).backward()
            total += loss.item() / MICRO_BATCHES
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIPPING)
        optimizer.step()
        found.append((total, float(norm)))
    return found


def by_dsx(_rank: int, world_size: int, folder: Path, name: str) -> list[tuple[float, float]]:
    from dsx.parallel.groups import make_groups

    _, parallel, schedule, zero = LAYOUTS[name]
    settings = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "gradient_clipping": CLIPPING,
        "zero_optimization": {"stage": zero},
        "optimizer": {"type": "AdamW", "params": {**ADAMW, "torch_adam": True}},
        "dsx": {
            "model": {"path": str(folder), "implementation": "transformers"},
            "parallel": parallel,
            "schedule": {"name": schedule},
            "data": {"source": "own", "sequence_length": TOKENS},
            "train": {"steps": STEPS, "output": str(folder / "run")},
            "recompute": "full" if zero == 3 else "none",
        },
    }
    config = dsx.load_config(json.loads(json.dumps(settings)), world_size=world_size)
    groups = make_groups(config.mesh, sequence_parallel=config.dsx.parallel.sequence_parallel)
    engine = dsx.initialize(model=dsx.recipe.build_model(config, groups), config=config)[0]
    return [
        (float(engine.train_batch(iter(micro_batches(step)))), float(engine.get_global_grad_norm()))
        for step in range(STEPS)
    ]


@pytest.mark.parametrize(
    ("config", "names"),
    [
        (MIXTURE, ["tp 2", "pp 2, 2 chunks", "tp 2 x pp 2, zero-bubble"]),
        (ONE_PAIR, ["tp 2 x pp 2, zero-bubble"]),
        pytest.param(SHARED, ["tp 4, ZeRO-3"], marks=pytest.mark.slow),
        (MIXTURE, ["cp 2, ZeRO-2"]),
        pytest.param(
            ONE_PAIR,
            ["cp 2 x tp 2, cut sequences, ZeRO-3", "cp 2 x pp 2, 2 chunks, Ulysses"],
            marks=pytest.mark.slow,
        ),
    ],
    ids=[
        "routers' loss",
        "one key/value head",
        "two key/value heads for four ranks",
        "routers' loss, shared sequences",
        "one key/value head, shared sequences",
    ],
)
def test_training_equals_one_process_of_transformers(
    config: dict[str, Any], names: list[str], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    kind = {key: value for key, value in config.items() if key != "model_type"}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(config["model_type"], **kind))
    model.save_pretrained(tmp_path)
    expected = torch.tensor(ranks.run(transformers_alone, 1, tmp_path)[0])
    for name in names:
        found = torch.tensor(ranks.run(by_dsx, LAYOUTS[name][0], tmp_path, name)[0])
        torch.testing.assert_close(
            found, expected, rtol=1e-5, atol=0, msg=lambda text, n=name: f"{n}: {text}"
        )


def test_which_degrees_share_heads() -> None:
    one, two = hub_model(ONE_PAIR), hub_model(SHARED)
    assert one.uncut(2) is None
    assert two.uncut(4) is None
    assert "attention heads = 8" in str(two.uncut(3))
    key = "2.block.self_attn.k_proj.weight"
    assert {spec.name: spec.split for spec in two.params}[key] == 0
    assert {spec.name: spec.split for spec in two.for_tensor(4).params}[key] is None
