"""Modules whose gradients DeepSpeed reduces together at ZeRO-3, beside one process without ZeRO."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

import ranks
from engine.plain_descent import engine_of
from engine.test_mlp_tiles import TOKENS, micro_batches, settings
from often import often

SHARED, FIRST = "qwen2_moe, shared expert", {"adapter": {"rank": 4, "targets": ["up_proj", "down_proj"]}}
CASES: dict[str, tuple[int, str, dict[str, Any]]] = {
    "linears whose weight gradients would come later": (
        4,
        SHARED,
        {"parallel": {"tensor": 1, "pipeline": 2}, "schedule": {"name": "zb_h1"}},
    ),
    "adapters of experts alone, whose input wants no gradient": (2, SHARED, FIRST),
    "compiled blocks of packs": (2, "llama", {"compile": "blocks"}),
    "a compiled block whose input wants no gradient": (2, "llama", {"compile": "blocks", **FIRST}),
}


def packs(step: int, *, packed: bool) -> Iterator[Any]:
    """Micro-batches, whose rows may be two documents each."""
    for ids, labels in micro_batches(step):
        positions = torch.cat([torch.arange(7), torch.arange(TOKENS - 7)]).expand(len(ids), -1)
        yield ((ids, positions.contiguous()) if packed else ids), labels


def trained(_rank: int, world_size: int, case: str, zero: int, more: dict[str, Any]) -> list[float]:
    """Losses and norms of two steps, and an evaluation's loss."""
    import dsx
    from dsx.nn import compiled

    compiled.BACKEND = "aot_eager"
    config = json.loads(json.dumps(settings(CASES[case][1], "dp 2, ZeRO-3", 1)))
    config["zero_optimization"]["stage"] = zero
    config["dsx"] |= more
    run = dsx.load_config(config, world_size=world_size)
    engine = engine_of(run)
    seen, given = list[Any](), partial(packs, packed="packs" in case)
    for step in range(2):
        seen += [engine.train_batch(given(step)), engine.get_global_grad_norm()]
    return [*map(float, seen), float(engine.eval_batch(given(9)))]


@pytest.mark.parametrize("case", often(CASES, 6))
def test_leaves_train_as_one_process_does(case: str) -> None:
    world_size, _, more = CASES[case]
    alone = ranks.run(trained, 1, case, 0, {k: v for k, v in more.items() if k == "adapter"})[0]
    assert alone[1] > 0
    for found in ranks.run(trained, world_size, case, 3, more):
        assert found == pytest.approx(alone, rel=1e-5)
