"""Blocks' inputs on the host: the same bits as where they stay on the device, in any layout."""

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

TOKENS, RATE = 24, 8.0

EXPERTS = {"head_dim": 8, "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("dsx", {"model_type": "llama"}, {}),
    "gemma2": ("transformers", {"model_type": "gemma2", "head_dim": 8}, {}),
    "gpt2, dropout": ("transformers", {"model_type": "gpt2", "n_positions": 64}, {}),
    "qwen3_moe, routers' loss": (
        "transformers",
        {"model_type": "qwen3_moe", "output_router_logits": True} | EXPERTS,
        {},
    ),
    "llama, LoRA": ("dsx", {"model_type": "llama"}, {"adapter": {"rank": 4, "targets": ["q_proj"]}}),
    "llama, frozen": ("dsx", {"model_type": "llama"}, {"freeze": ["layers.0", "layers.1", "embed_tokens"]}),
    "llama, tiles": ("dsx", {"model_type": "llama"}, {"mlp_tiles": 3}),
    "llama, compiled": ("dsx", {"model_type": "llama"}, {"compile": "blocks"}),
}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp 2, ZeRO-3": (2, {"zero": 3}),
    "tp 2": (2, {"parallel": {"tensor": 2}}),
    "cp 2": (2, {"parallel": {"context": 2}}),
    "pp 2, 1F1B": (2, {"parallel": {"pipeline": 2}, "schedule": {"name": "1f1b"}}),
    "pp 2, GPipe": (2, {"parallel": {"pipeline": 2}, "schedule": {"name": "gpipe"}}),
    "pp 2, zbv, ZeRO-1": (2, {"parallel": {"pipeline": 2}, "schedule": {"name": "zbv"}, "zero": 1}),
    "pp 2, 2 chunks": (2, {"parallel": {"pipeline": 2, "chunks": 2}, "schedule": {"name": "interleaved"}}),
    "pp 2 x dp 2, zero-bubble, ZeRO-3": (
        4,
        {"parallel": {"pipeline": 2}, "schedule": {"name": "zb_h1"}, "zero": 3},
    ),
    "pp 2 x tp 2, dualpipev": (
        4,
        {"parallel": {"tensor": 2, "pipeline": 2}, "schedule": {"name": "dualpipev"}},
    ),
}
CASES = [(model, layout) for layout in LAYOUTS for model in MODELS]


def micro_batches(step: int) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(step)
    for _ in range(plain_descent.MICRO_BATCHES):
        yield plain_descent.rows(generator, TOKENS)


def both(_rank: int, world_size: int, model: str, layout: str) -> list[list[Tensor]]:
    return [trained(world_size, model, layout, how) for how in ("full", "offload")]


def trained(world_size: int, model: str, layout: str, how: str) -> list[Tensor]:
    """Loss, norm and this rank's gradients, by a step of plain descent; the next step's; an evaluation's."""
    import dsx
    from dsx.nn import offload

    *made, told = MODELS[model]
    told = {**told, "recompute": how}
    content = plain_descent.settings(
        (made[0], made[1]), LAYOUTS[layout][1], tokens=TOKENS, rate=RATE, told=told
    )
    left = 0
    before = offload._Kept.leave

    def leave(kept: Any) -> None:
        nonlocal left
        left += 1
        before(kept)

    torch.manual_seed(1)
    offload._Kept.leave = leave
    try:
        config = dsx.load_config(json.loads(json.dumps(content)), world_size=world_size)
        engine = plain_descent.engine_of(config)
        seen = [*plain_descent.two_steps(engine, micro_batches, RATE), engine.eval_batch(micro_batches(9))]
    finally:
        offload._Kept.leave = before
    assert bool(left) == (how == "offload")
    return [torch.as_tensor(each).detach() for each in seen]


@pytest.mark.parametrize(("model", "layout"), often(CASES, 57))
def test_what_comes_back_from_the_host_is_what_left(model: str, layout: str) -> None:
    for stays, comes_back in ranks.run(both, LAYOUTS[layout][0], model, layout):
        for place, (one, other) in enumerate(zip(stays, comes_back, strict=True)):
            assert torch.equal(one, other), place
