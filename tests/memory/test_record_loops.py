"""Records of layers that loop, from short sequences: what recording the whole gives to whoever reads it."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from all_families import tiny

from dsx.hub.read import hub_model
from dsx.memory import record_cache
from dsx.memory.layer_record import LayerRecord, LayerRequest, Shape
from dsx.memory.ledger import Leaf, Ledger, Storage, dropped
from dsx.memory.record_cache import alone
from dsx.memory.record_loops import folded
from dsx.memory.record_request import record_request
from dsx.memory.walk import RecordedLayer, _Shared
from dsx.models.params import layer_kinds
from often import often


def request(
    family: str, length: int, *, layer: int = 0, hooked: bool = False, **changes: Any
) -> LayerRequest:
    model = hub_model(json.loads(tiny.tiny_config(family).to_json_string()))
    shape = Shape(
        model=model, tensor=1, sequence_parallel=False, micro_batch=1, sequence_length=length, width=2
    )
    index = layer_kinds(model).index("Block") + layer
    return LayerRequest(
        shape=alone(replace(shape, **changes), index), kind="Block", divided=True, hooked=hooked
    )


def replayed(record: LayerRecord, phase: str) -> list[Any]:
    """What a ledger says of two micro-batches: after each part bytes, the peak, and of what it consists."""
    ledger = Ledger(512)
    leaves = {each.name: Leaf(each.name, each.shape, each.width) for each in record.parameters}
    found = []

    def note() -> None:
        found.append((ledger.current_bytes, ledger.peak_bytes, ledger.at_peak))
        ledger.start()

    def made(forms: Any, name: str) -> list[Storage]:
        return [
            Storage(ledger, record.labels[0]._replace(name=name), each.size_bytes).hold() for each in forms
        ]

    layers = [RecordedLayer(ledger, record, leaves, None) for _ in range(2)]
    ends = []
    for layer in layers:
        inputs = made(record.inputs, "inputs")
        ends.append(layer.forward(inputs))
        dropped(inputs)
        note()
    for layer, outputs in zip(layers, ends, strict=True):
        dropped(outputs)
        waits = {name: record.gives(phase).count(name) for name in record.gives(phase)}
        gradients = [form for form in record.outputs if form.differentiable]
        dropped(
            layer.backward(made(gradients, "gradients"), phase, _Shared(lambda: None, waits), copies=True)
        )
        note()
        for place in range(len(record.uses) if phase == "backward_input" else 0):
            layer.begin_use(place)
            layer.finish_use(place).drop()
        note()
    return found


def require_alike(found: LayerRecord, whole: LayerRecord) -> None:
    assert found == folded(whole)
    assert LayerRecord.from_json(found.to_json()) == found
    for what in ("inputs", "outputs", "output_ids", "parameters", "buffer_bytes", "kept", "kept_bytes"):
        assert getattr(found, what) == getattr(whole, what)
    for phase in ("forward", "backward", "backward_input"):
        assert found.operators(phase) == whole.operators(phase)
    for phase in ("backward", "backward_input"):
        assert replayed(found, phase) == replayed(whole, phase)


LOOPS = (
    ("qwen3_next", {}),
    ("qwen3_next", {"recompute": "full", "context": 4, "context_method": "ring", "micro_batch": 3}),
    ("olmo_hybrid", {"context": 2, "recompute": "full"}),
    ("olmo_hybrid", {"micro_batch": 11, "width": 4}),
    ("qwen3_next", {"hooked": True, "context": 2}),
    ("qwen3_next", {"mlp_tiles": 4}),
)  # fmt: skip


@pytest.mark.parametrize(("family", "changes"), often(LOOPS, 8))
def test_short_records_give_that_of_a_long_sequence(family, changes, monkeypatch):
    recorded = []
    monkeypatch.setattr(
        "dsx.memory.record_request.record_request",
        lambda asked: recorded.append(asked.shape.length) or record_request(asked),
    )
    ranks = changes.get("context", 1)
    asked = request(family, 5056 * ranks, **changes)
    found, whole = record_cache.recorded(asked), record_request(asked)
    assert 5056 not in recorded
    assert len(found.backward) < 3000 < len(whole.backward)
    require_alike(found, whole)


STRAIGHT = (("llama", 0), ("bamba", 0), ("nemotron_h", 0), ("qwen3_next", 3), ("jamba", 1))


@pytest.mark.parametrize(("family", "layer"), often(STRAIGHT, 2))
def test_what_has_no_loop_or_attends_is_recorded_whole(family, layer, monkeypatch):
    asked = request(family, 8192, layer=layer)
    assert not record_cache._loops(asked)
    assert record_cache.recorded(asked) == record_request(asked)
