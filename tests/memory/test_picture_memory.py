"""Estimates of chats with pictures: beside the whole engine on paper, and which pictures they suppose."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from data import picture_chats
from dsx.config.resolve import resolve
from dsx.config.run import RunConfig
from dsx.engine.p2p import TensorMeta
from dsx.errors import ConfigError
from dsx.memory.estimate import Job, estimate
from dsx.memory.job import job_of
from dsx.memory.layer_record import DeviceKind, PictureInput, TensorForm
from dsx.memory.pictures import pictures_of
from dsx.memory.record_cache import ModelRecords
from hub import tiny_pictures
from hub.test_pictures import config_of
from meta_engine import programs
from often import often

LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "tower": {"tower": ["."]},
    "tp-pp": {"tp": 2, "pp": 2, "device": "cpu"},
    "plain": {"tp": 2, "sequence": False, "tower": ["projector|merger"], "zero": 1, "dp": 2, "device": "cpu"},
    "zero3": {"dp": 2, "zero": 3, "tower": ["."], "device": "cpu"},
    "recomputed": {"pp": 2, "zero": 1, "tower": ["."], "recompute": "full", "bf16": True},
}


def form_of(x: torch.Tensor) -> TensorForm:
    return TensorForm(tuple(x.shape), str(x.dtype).removeprefix("torch."), x.element_size(), False)


def with_pictures(run: RunConfig, batch: Any, device: DeviceKind) -> Job:
    """The job of a run that reads this micro-batch, in the place of the fullest of its data."""
    text = run.dsx.data.model_copy(update={"pictures": False, "documents": "joined"})
    job = job_of(replace(run, dsx=run.dsx.model_copy(update={"data": text})), device=device)
    (ids, given), _ = batch
    inputs = tuple(
        PictureInput(name, form_of(x), "" if x.is_floating_point() else json.dumps(x.tolist()))
        for name, x in {"": ids, **given}.items()
    )
    return replace(job, records=ModelRecords(replace(job.records.shape, pictures=inputs)))


def micro_batch(family: str) -> Any:
    """Two rows of four pictures each, and little text."""
    ids = torch.randint(3, tiny_pictures.IMAGE - 1, (2, tiny_pictures.SEQUENCE))
    for begin in range(1, 20, 5):
        ids[:, begin : begin + 5] = torch.tensor([tiny_pictures.IMAGE - 1, *[tiny_pictures.IMAGE] * 4])
    given = tiny_pictures.pictures_of(family, 8, torch.Generator())
    kinds = {"gemma3": "token_type_ids"}.get(family, "mm_token_type_ids" if "qwen" in family else "")
    given |= {kinds: (ids == tiny_pictures.IMAGE).long()} if kinds else {}
    return (ids, given), ids.clone()


@pytest.mark.parametrize(
    ("family", "layout"), often([(f, lay) for lay in LAYOUTS for f in tiny_pictures.SIX], 12)
)
def test_estimate_is_that_of_the_engine(family: str, layout: str, tmp_path: Path) -> None:
    """In models so small that rounding, and tables that stay, are one or two per cent."""
    changes = {**LAYOUTS[layout]}
    device = changes.pop("device", "cuda")
    tiny_pictures.model_of(family).save_pretrained(tmp_path / "model")
    config = config_of(tmp_path / "model", **changes)
    config |= {
        "gradient_accumulation_steps": 2 * changes.get("pp", 1),
        "bf16": {"enabled": "bf16" in changes},
    }
    config["zero_optimization"]["reduce_bucket_size"] = 100_000
    world = changes.get("tp", 1) * changes.get("pp", 1) * changes.get("dp", 1)
    run, batch = resolve(config, world_size=world), micro_batch(family)
    job = with_pictures(run, batch, device)
    stream = {
        stage: job.records.layer(run.stage_map.layers(stage)[0], divided=False, hooked=False).stream[1:]
        for stage in range(1, run.stage_map.num_stages)
    }
    told = {
        stage: [TensorMeta(each.shape, getattr(torch, each.dtype), each.differentiable) for each in forms]
        for stage, forms in stream.items()
    }
    where = "cpu" if device == "cpu" else "paper"
    found = {phase.name: phase.peak_bytes for phase in estimate(job, 0).phases}
    traced = programs.traced(config, 0, world, device=where, pictures=(batch, told)).phases
    assert found == {phase: pytest.approx(size, rel=0.025) for phase, size in traced.items()}
    text = replace(job, records=ModelRecords(replace(job.records.shape, pictures=())))
    less = {phase.name: phase.peak_bytes for phase in estimate(text, 0).phases}
    if changes.get("zero") != 3:  # in which the update of so small a model takes most
        assert less["step 1"] < (0.95 if "tower" in changes else 1.0) * found["step 1"]


def run_of(folder: Path, source: str) -> RunConfig:
    picture_chats.save_processor(folder / "model")
    model = tiny_pictures.model_of("gemma3", max_position_embeddings=128)
    model.config.image_token_index = picture_chats.IMAGE
    model.save_pretrained(folder / "model")
    config = config_of(folder / "model")
    config["dsx"]["data"] |= {"source": source, "tokenizer": "auto", "sequence_length": 96}
    return resolve(config, world_size=1)


def test_the_fullest_chats_of_the_data_are_supposed(tmp_path: Path) -> None:
    picture_chats.chats(tmp_path)
    run = run_of(tmp_path, f"{tmp_path}/chats.jsonl")
    job = job_of(run)
    assert job.supposed.startswith("at most 4 pictures in a micro-batch, the largest ")
    assert job.supposed.endswith(", as in the fullest of 12 chats of the data")
    ids, pixels = (each for each in job.records.shape.pictures if each.name in ("", "pixel_values"))
    assert json.loads(ids.values) == json.loads(pictures_of(run.dsx.data, 2).inputs[0].values)
    assert str(json.loads(ids.values)).count(f" {picture_chats.IMAGE},") == 4 * 4
    assert (ids.form.shape, pixels.form.shape) == ((2, 96), (4, 3, 64, 64))
    (one,) = (each for each in pictures_of(run.dsx.data, 1).inputs if each.name == "pixel_values")
    assert one.form.shape == (2, 3, 64, 64)


def test_without_chats_that_can_be_read_nothing_is_guessed(tmp_path: Path) -> None:
    (tmp_path / "text.jsonl").write_text(
        '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n'
    )
    with pytest.raises(ConfigError, match=r"source.*none of its chats has a picture.*a file of one"):
        job_of(run_of(tmp_path, f"{tmp_path}/text.jsonl"))
