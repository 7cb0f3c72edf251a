"""Training with feed-forwards tile by tile, beside the same layout with whole ones."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import ranks
from engine import plain_descent
from often import often

TOKENS, TILES, RATE = 24, 5, 8.0

EXPERTS = {"head_dim": 8, "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("dsx", {"model_type": "llama", "mlp_bias": True}, {}),
    "qwen3_moe": ("transformers", {"model_type": "qwen3_moe"} | EXPERTS, {}),
    "gemma2": ("transformers", {"model_type": "gemma2", "head_dim": 8}, {}),
    "gpt_neox": ("transformers", {"model_type": "gpt_neox", "num_key_value_heads": "none"}, {}),
    "llama, LoRA": (
        "dsx",
        {"model_type": "llama"},
        {"adapter": {"rank": 4, "targets": ["up_proj", "down_proj", "q_proj"]}},
    ),
    "qwen3_moe, routers' loss": (
        "transformers",
        {"model_type": "qwen3_moe", "mlp_only_layers": [1, 3], "output_router_logits": True} | EXPERTS,
        {},
    ),
    "granite, LoRA": (
        "transformers",
        {"model_type": "granite"},
        {"adapter": {"rank": 4, "targets": ["gate_proj", "down_proj"]}},
    ),
    "llama, frozen": ("dsx", {"model_type": "llama"}, {"freeze": ["down_proj", "embed_tokens"]}),
    "qwen2_moe, shared expert": (
        "transformers",
        {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 16} | EXPERTS,
        {},
    ),
}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp 2": (2, {"parallel": {"tensor": 2}}),
    "dp 2, ZeRO-3": (2, {"zero": 3}),
    "tp 2, whole sequences": (2, {"parallel": {"tensor": 2, "sequence_parallel": False}}),
    "pp 2, zero-bubble, ZeRO-2": (2, {"parallel": {"pipeline": 2}, "schedule": {"name": "zb_h1"}, "zero": 2}),
    "cp 2": (2, {"parallel": {"context": 2}}),
    "pp 2, GPipe, recomputed": (
        2,
        {"parallel": {"pipeline": 2}, "schedule": {"name": "gpipe"}, "recompute": "full"},
    ),
    "dp 2, ZeRO-3, recomputed": (2, {"zero": 3, "recompute": "full"}),
    "tp 2 x pp 2, zbv, ZeRO-1": (
        4,
        {"parallel": {"tensor": 2, "pipeline": 2}, "schedule": {"name": "zbv"}, "zero": 1},
    ),
    "pp 2 x dp 2, zero-bubble, ZeRO-3": (
        4,
        {"parallel": {"pipeline": 2}, "schedule": {"name": "zb_h1"}, "zero": 3},
    ),
}
CASES = [(model, layout) for layout in LAYOUTS for model in MODELS]


def micro_batches(step: int) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(step)
    for _ in range(plain_descent.MICRO_BATCHES):
        yield plain_descent.rows(generator, TOKENS)


def settings(model: str, layout: str, tiles: int) -> dict[str, Any]:
    *made, told = MODELS[model]
    told = {**told, "mlp_tiles": tiles}
    return plain_descent.settings((made[0], made[1]), LAYOUTS[layout][1], tokens=TOKENS, rate=RATE, told=told)


def both(_rank: int, world_size: int, model: str, layout: str) -> list[list[Tensor]]:
    return [trained(world_size, model, layout, tiles) for tiles in (1, TILES)]


def trained(world_size: int, model: str, layout: str, tiles: int) -> list[Tensor]:
    """Loss, norm and this rank's gradients, by a step of plain descent; the next step's; an evaluation's."""
    import dsx
    from dsx.nn.tiling import _Tiled

    config = dsx.load_config(json.loads(json.dumps(settings(model, layout, tiles))), world_size=world_size)
    engine = plain_descent.engine_of(config)
    made = sum(isinstance(each.forward, _Tiled) for each in engine.module.modules())
    assert bool(made) == (tiles > 1)
    seen = [*plain_descent.two_steps(engine, micro_batches, RATE), engine.eval_batch(micro_batches(9))]
    return [torch.as_tensor(each).detach() for each in seen]


@pytest.mark.parametrize(("model", "layout"), often(CASES, 61))
def test_tiles_train_as_whole_feed_forwards_do(model: str, layout: str) -> None:
    for whole, parts in ranks.run(both, LAYOUTS[layout][0], model, layout):
        largest = max(float(each.abs().max()) for each in whole[2:-3] if each.numel())
        assert largest > 0
        for place, (one, other) in enumerate(zip(whole, parts, strict=True)):
            far = float((one - other).abs().max()) if one.numel() else 0.0
            assert far <= 2e-6 * max(largest, float(one.abs().max())), place
