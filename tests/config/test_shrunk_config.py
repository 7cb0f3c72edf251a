"""A config made small keeps what decides how ranks cooperate, and can be resolved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dsx.config.resolve import RunConfig, resolve
from dsx.config.shrunk import trial

CONFIGS = Path(__file__).parents[2] / "configs"


def small(config: RunConfig, **options: Any) -> tuple[RunConfig, tuple[str, ...]]:
    made = trial(config, **options)
    return resolve(made.content, world_size=config.mesh.size), made.changes


@pytest.mark.parametrize(
    ("name", "world_size"),
    [(path.name, size) for path in sorted(CONFIGS.glob("*.json")) for size in (1, 2, 8, 64)],
)
def test_shipped_configs_keep_their_structure(name: str, world_size: int) -> None:
    given = json.loads((CONFIGS / name).read_text())
    if given["dsx"]["model"].get("path"):
        pytest.skip("needs a model folder")
    try:
        config = resolve(CONFIGS / name, world_size=world_size)
    except Exception:  # noqa: BLE001 (not a size of this config)
        pytest.skip("the config is not for so many ranks")
    made, changes = small(config)
    assert changes
    assert made.mesh == config.mesh
    for key in ("chunks", "program", "zero_stage"):
        assert getattr(made, key) == getattr(config, key), key
    assert made.dsx.parallel.sequence_parallel == config.dsx.parallel.sequence_parallel
    assert made.dsx.recompute in (config.dsx.recompute, "none")
    was, now = config.model, made.model
    for key in ("family", "tied_embeddings", "attention_bias", "mlp_bias", "gated_mlp", "norm", "activation"):
        assert getattr(now, key) == getattr(was, key), key
    assert now.num_heads / now.num_kv_heads == was.num_heads / was.num_kv_heads
    assert (now.query_size == now.hidden_size) == (was.query_size == was.hidden_size)
    assert made.num_parameters < 20_000_000
    assert made.num_parameters <= config.num_parameters
    assert made.precision == "fp32"
    blocks = lambda c: [  # noqa: E731
        sum(0 < i < c.stage_map.num_layers - 2 for i in c.stage_map.layers(s))
        for s in range(c.stage_map.num_stages)
    ]
    assert [n > 0 for n in blocks(made)] == [n > 0 for n in blocks(config)], "stages with blocks have blocks"
    pp = config.mesh.pp
    assert made.accumulation % pp == config.accumulation % pp or made.accumulation == config.accumulation


def test_uneven_stages_odd_vocabularies_and_dropout_stay() -> None:
    content = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 35,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "csv_monitor": {"enabled": True},
        "dsx": {
            "model": {"family": "gpt2", "preset": "gpt2", "overrides": {"vocab_size": 50257}},
            "parallel": {"tensor": 2, "pipeline": 2, "chunks": 2},
            "partition": {"method": [6, 3, 2, 5]},
            "data": {"sequence_length": 1024, "tokenizer": "bytes"},
            "train": {"steps": 1, "output": "unused"},
        },
    }
    config = resolve(content, world_size=8)
    made, changes = small(config)
    assert [len(made.stage_map.layers(s)) for s in range(4)] == [4, 1, 1, 3]
    assert made.model.vocab_size % 2 == 1
    assert made.accumulation == 5, "35 and 5 leave the same rest over the pipeline"
    assert made.model.residual_dropout == made.model.attention_dropout == made.model.embedding_dropout == 0.0
    assert "csv_monitor" not in made.deepspeed
    assert made.deepspeed["optimizer"]["params"]["torch_adam"] is True
    assert any("dropout" in change for change in changes)
    masks = trial(config).dropout
    assert masks is not None
    assert resolve(masks, world_size=8).model.residual_dropout == config.model.residual_dropout > 0.0
    kept, _ = small(config, full=True, keep_precision=True)
    assert (kept.num_parameters, kept.precision) == (config.num_parameters, "bf16")
    assert kept.accumulation == 35
    assert kept.stage_map == config.stage_map
