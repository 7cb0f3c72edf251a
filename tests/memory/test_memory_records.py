"""Records are kept between commands, made again when spoiled, and alike on either device without storage."""

from __future__ import annotations

import logging
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dsx.checkpoint.claims import model_of
from dsx.config.resolve import resolve
from dsx.memory import record_cache as records
from dsx.memory.device import fake_build
from dsx.memory.estimate import estimate
from dsx.memory.job import job_of
from dsx.memory.layer_record import LOSS, LayerRecord, LayerRequest, Shape, TensorForm
from dsx.memory.layer_recorder import record_layer
from dsx.memory.record_cache import ModelRecords, alone
from dsx.memory.record_request import record_request
from dsx.models.hf_config import FAMILIES
from dsx.models.params import layer_kinds
from dsx.models.presets import presets

CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 2,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "dsx": {
        "model": {"family": "mistral", "preset": "tiny", "overrides": {"sliding_window": 16}},
        "parallel": {"tensor": 2, "pipeline": 1},
        "data": {"sequence_length": 64},
        "train": {"steps": 1, "output": "runs/records"},
    },
}


def job():
    return job_of(resolve(CONFIG, world_size=2))


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A cache of its own, in a process that has recorded nothing yet."""
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    records.recorded.cache_clear()
    yield tmp_path
    records.recorded.cache_clear()


def test_a_record_is_read_back_as_it_was_written():
    made = ModelRecords(job().records.shape).layer(1, divided=True, hooked=True)
    assert LayerRecord.from_json(made.to_json()) == made
    assert made.weights
    assert any(event[0] == "fetch" for event in made.forward)


def test_spoiled_and_unwritable_records_are_made_again(home):
    before = estimate(job(), 0)
    kept = list((home / ".cache" / "dsx" / "records").rglob("*.json"))
    assert kept
    for path in kept:
        path.write_text(path.read_text()[:100])
    records.recorded.cache_clear()
    assert estimate(job(), 0) == before
    for path in kept:
        LayerRecord.from_json(path.read_text())
        path.unlink()
    kept[0].parent.rmdir()
    kept[0].parent.write_text("no folder")
    records.recorded.cache_clear()
    assert estimate(job(), 0) == before


def test_equal_blocks_are_recorded_once():
    shape = job().records.shape
    several = replace(shape, model=replace(shape.model, num_layers=4, windows=(16, 0, 64, 16)))
    first = layer_kinds(several.model).index("Block")
    found = [alone(several, first + block).model.windows for block in range(4)]
    # A window as long as the sequence, 64, is none.
    assert found == [(16,), (), (), (16,)]
    assert len({alone(several, first + block) for block in range(4)}) == 2


@pytest.mark.parametrize("kind", ["WordEmbedding", "Block", "FinalNorm", "Head"])
def test_a_gpus_paths_are_the_same_on_meta_tensors_and_on_the_paper_device(kind, monkeypatch):
    """The engine that estimates are compared with runs on the paper device; records are made on meta."""
    shape = job().records.shape
    request = LayerRequest(shape=alone(shape, layer_kinds(shape.model).index(kind)), kind=kind, divided=True)
    on_meta = record_request(request)
    found = []

    def moved(layer, inputs, *, device, **options):
        found.append(device)
        return record_layer(layer, inputs, device="paper", **options)

    monkeypatch.setattr("dsx.memory.record_request.fake_build", lambda _, **__: fake_build("paper"))
    monkeypatch.setattr("dsx.memory.record_request.record_layer", moved)
    monkeypatch.setattr("dsx.memory.record_request.DEVICES", {"cuda": "paper", "cpu": "cpu"})
    assert record_request(request) == on_meta
    assert found == ["paper"]


def test_a_layer_of_several_tensors():
    """Two inputs of which one is handed on, and an integer one."""

    def layer(given):
        x, mask, ids = given
        return torch.relu(x) * mask, mask, ids

    forms = [
        TensorForm((4, 8), "float32", 4, differentiable=True),
        TensorForm((4, 8), "float32", 4, differentiable=True),
        TensorForm((4,), "int64", 8, differentiable=False),
    ]
    with fake_build("meta"):
        record = record_layer(layer, forms, device="meta")
    assert [str(form) for form in record.outputs] == ["4 x 8 float32", "4 x 8 float32", "4 int64"]
    assert record.output_ids[1:] == ("x1", "x2")
    assert [form.differentiable for form in record.outputs] == [True, True, False]
    (gradients,) = [event[1] for event in record.backward if event[0] == "in"]
    assert gradients[2] is None
    assert None not in gradients[:2]


class Sends(torch.nn.Module):
    """Holds what it made last until it makes the next: of a backward half of what a forward makes."""

    held: list[torch.Tensor]

    def forward(self, x):
        self.held = [x.detach() * 2]
        y = x * 1
        if y.requires_grad:
            y.register_hook(lambda dy: self.held.__setitem__(0, dy[:2] * 2))
        return y


def test_what_a_micro_batch_replaces_is_counted_once():
    with fake_build("meta"):
        record = record_layer(Sends(), [TensorForm((4, 8), "float32", 4, differentiable=True)], device="meta")
    assert [(each.owner, each.size_bytes) for each in record.kept] == [("", 2 * 8 * 4)]
    assert [event[2] for event in record.forward if event[0] == "+"] == [4 * 8 * 4] * 2


def test_what_fails_is_said_by_its_error_alone(caplog):
    """Torch would print its traceback beside."""
    form = TensorForm((4, 8), "float32", 4, differentiable=True)
    torchs = logging.getLogger("torch._subclasses.fake_tensor")
    torchs.addHandler(caplog.handler)
    try:
        with fake_build("cpu"), pytest.raises(RuntimeError, match="dim"):
            record_layer(lambda x: torch.mm(x, x), [form], device="cpu")
    finally:
        torchs.removeHandler(caplog.handler)
    assert not caplog.records


def named(record: LayerRecord, phase: str) -> list[tuple[object, ...]] | None:
    """The events of a phase with their labels in place."""
    events = getattr(record, phase)
    is_new = ("+", "sum")
    return events and [
        (*event[:3], record.labels[event[3]], *event[4:]) if event[0] in is_new else event for event in events
    ]


@pytest.mark.parametrize("seed", range(40))
def test_records_of_two_micro_batches_give_those_of_all_others(seed, home):
    """Beside a run of the layer itself with the micro-batch that was asked for."""
    draw = random.Random(seed)
    preset = draw.choice(
        [each for each in presets() if each.family in FAMILIES and each.name in ("tiny", "small")]
    )
    model = model_of(preset.config)
    shape = Shape(
        model=model,
        tensor=draw.choice([size for size in (1, 2, 4) if model.num_kv_heads % size == 0]),
        sequence_parallel=draw.random() < 0.5,
        micro_batch=draw.choice((2, 3, 4, 5, 7, 8, 12, 16, 48, 64)),
        sequence_length=draw.choice((64, 128)),
        width=draw.choice((2, 4)),
        recompute=draw.choice(("none", "selective", "full")),
        device=draw.choice(("cuda", "cpu")),
    )
    index = draw.choice((0, 1, len(layer_kinds(model)) - 1))
    kind = layer_kinds(model)[index]
    divided, hooked = draw.random() < 0.5, draw.random() < 0.5
    made = ModelRecords(shape, many=True).layer(index, divided=divided, hooked=hooked)
    own = shape if kind == "Block" else replace(shape, recompute="none")
    asked = LayerRequest(shape=alone(own, index), kind=kind, divided=divided, hooked=hooked)
    by_itself = record_request(asked)
    for phase in ("forward", "backward", "backward_input"):
        assert named(made, phase) == named(by_itself, phase)
    for what in ("inputs", "outputs", "output_ids", "parameters", "buffer_bytes", "kept", "kept_bytes"):
        assert getattr(made, what) == getattr(by_itself, what)
    places = list((home / ".cache" / "dsx" / "records").rglob("*.json"))
    assert len(places) == 2, "two recordings"
    # An estimate that comes later takes the same two.
    records.recorded.cache_clear()
    assert records.recorded(asked) == made


def test_a_layer_that_does_other_things_with_more_samples_is_recorded_by_itself():
    """Chunks of the loss are as many as its tokens."""
    shape = replace(job().records.shape, sequence_length=1 << 16)
    few, many = (
        record_request(LayerRequest(shape=replace(shape, micro_batch=number), kind=LOSS)) for number in (2, 4)
    )
    assert LayerRecord.between((few, many), ((1, 1), 2)) is None
