"""Training with feed-forwards tile by tile, beside the same layout with whole ones."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import ranks
from often import often

TOKENS, ROWS, MICRO_BATCHES, TILES, VOCABULARY, RATE = 24, 2, 4, 5, 89, 8.0

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": None,
}
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
    for _ in range(MICRO_BATCHES):
        ids = torch.randint(1, VOCABULARY, (ROWS, TOKENS + 1), generator=generator)
        yield ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def settings(model: str, layout: str, tiles: int, **more: Any) -> dict[str, Any]:
    implementation, changed, told = MODELS[model]
    block = {"schedule": {"name": "auto"}} | dict(LAYOUTS[layout][1])
    zero = block.pop("zero", 0)
    degrees = {"tensor": 1, "pipeline": 1, "chunks": "auto"} | block.pop("parallel", {})
    config = {key: value for key, value in (SIZES | changed).items() if value != "none"}
    told = dict(told)
    freeze = {"freeze": told.pop("freeze")} if "freeze" in told else {}
    return {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": zero},
        "zero_allow_untested_optimizer": True,
        "optimizer": {"type": "SGD", "params": {"lr": RATE}},
        "dsx": {
            "model": {"config": config, "implementation": implementation},
            "parallel": degrees,
            "data": {"source": "own", "sequence_length": TOKENS},
            "train": {"steps": 2, "output": "unused"} | freeze,
            "mlp_tiles": tiles,
            **told,
            **block,
        },
        **more,
    }


def both(_rank: int, world_size: int, model: str, layout: str) -> list[list[Tensor]]:
    return [trained(world_size, model, layout, tiles) for tiles in (1, TILES)]


def trained(world_size: int, model: str, layout: str, tiles: int) -> list[Tensor]:
    """Loss, norm and this rank's gradients, by a step of plain descent; the next step's; an evaluation's."""
    import dsx
    from dsx.nn.tiling import _Tiled
    from dsx.parallel.groups import make_groups

    config = dsx.load_config(json.loads(json.dumps(settings(model, layout, tiles))), world_size=world_size)
    groups = make_groups(config.mesh, sequence_parallel=config.dsx.parallel.sequence_parallel)
    engine = dsx.initialize(model=dsx.recipe.build_model(config, groups), config=config)[0]
    made = sum(isinstance(each.forward, _Tiled) for each in engine.module.modules())
    assert bool(made) == (tiles > 1)

    def weights() -> list[Tensor]:
        return [getattr(p, "ds_tensor", p).detach().clone() for p in engine.module.parameters()]

    before = weights()
    seen: list[Any] = [engine.train_batch(micro_batches(0)), engine.get_global_grad_norm()]
    seen += [(one - other) / RATE for one, other in zip(before, weights(), strict=True)]
    seen += [engine.train_batch(micro_batches(1)), engine.get_global_grad_norm()]
    seen.append(engine.eval_batch(micro_batches(9)))
    return [torch.as_tensor(each).detach() for each in seen]


@pytest.mark.parametrize(("model", "layout"), often(CASES, 10))
def test_tiles_train_as_whole_feed_forwards_do(model: str, layout: str) -> None:
    for whole, parts in ranks.run(both, LAYOUTS[layout][0], model, layout):
        largest = max(float(each.abs().max()) for each in whole[2:-3] if each.numel())
        assert largest > 0
        for place, (one, other) in enumerate(zip(whole, parts, strict=True)):
            far = float((one - other).abs().max()) if one.numel() else 0.0
            assert far <= 2e-6 * max(largest, float(one.abs().max())), place
