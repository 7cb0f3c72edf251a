"""Records of three expert degrees give those of all others, event for event: so does a plan made of them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dsx.memory import record_request
from dsx.memory.layer_record import LayerRecord, LayerRequest, Shape
from dsx.memory.record_cache import alone, recorded, recorded_for_many
from dsx.planner.cluster import read_cluster
from dsx.planner.inputs import plan_inputs

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
    "num_experts_per_tok": 4,
    "max_position_embeddings": 4096,
}


@pytest.mark.parametrize(
    ("family", "experts", "changes"),
    [
        ("qwen3_moe", {"num_experts": 128}, {}),
        ("qwen3_moe", {"num_experts": 128}, {"recompute": "full", "context": 4, "context_method": "ulysses"}),
        ("qwen3_moe", {"num_experts": 128}, {"micro_batch": 3, "tensor": 2, "imbalance": 1.5}),
        ("mixtral", {"num_local_experts": 64}, {"width": 4, "recompute": "selective"}),
    ],
)
def test_three_expert_degrees_give_all_others(
    family: str,
    experts: dict[str, int],
    changes: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family, **SIZES, **experts}))
    model = plan_inputs(
        model=str(tmp_path),
        config=None,
        cluster=read_cluster("H100"),
        gpus=8,
        global_batch=8,
        sequence_length=4096,
        overrides=(),
        imbalance=1.0,
    ).run.model
    usual: dict[str, Any] = {
        "tensor": 1,
        "sequence_parallel": False,
        "micro_batch": 1,
        "sequence_length": 4096,
        "width": 2,
    }
    shape = alone(Shape(**{"model": model, "expert": 4, **usual, **changes}), 1)
    made: list[LayerRequest] = []
    record = record_request.record_request

    def counted(request: LayerRequest) -> LayerRecord:
        made.append(request)
        return record(request)

    monkeypatch.setattr(record_request, "record_request", counted)
    requests = [
        LayerRequest(shape=replace(shape, expert=degree), kind="Block", divided=True)
        for degree in (4, 16, 64)
    ]
    found = [recorded_for_many(request) for request in requests]
    assert {request.shape.expert for request in made} == {2, 8, 32}
    assert found == [recorded(request) for request in requests]
