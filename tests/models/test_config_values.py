"""Configs that dsx writes are read by transformers, whose config classes check types."""

from __future__ import annotations

import dataclasses
import json

import pytest
from transformers import AutoConfig

import dsx
from dsx.models.config_values import with_floats
from dsx.models.hf_config import FAMILIES
from dsx.models.presets import find_preset


@pytest.mark.parametrize("family", [*FAMILIES, "gpt2", "gemma2"])
def test_floats_are_those_that_transformers_wants(family):
    kind = type(AutoConfig.for_model(family))
    strict = [
        each.name
        for each in dataclasses.fields(kind)
        if "float" in str(each.type) and "int" not in str(each.type).replace("Rope", "")
    ]
    assert strict
    assert {
        key: type(value) for key, value in with_floats(dict.fromkeys(strict, 1)).items()
    } == dict.fromkeys(strict, float)


@pytest.mark.parametrize("way", ["path", "config", "overrides"])
def test_the_config_of_a_run_is_one_of_transformers(way, tmp_path):
    tiny = find_preset("gemma2", "tiny").config
    whole = dict(tiny) | {"final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    model = {
        "path": {"path": str(tmp_path), "weights": "random"},
        "config": {"config": whole},
        "overrides": {"family": "gemma2", "preset": "tiny", "overrides": {"final_logit_softcapping": 30}},
    }[way]
    (tmp_path / "ds_config.json").write_text(
        json.dumps(
            {
                "train_micro_batch_size_per_gpu": 1,
                "gradient_accumulation_steps": 1,
                "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
                "dsx": {
                    "model": model,
                    "data": {"sequence_length": 16, "tokenizer": "bytes"},
                    "train": {"steps": 1, "output": str(tmp_path / "run")},
                },
            }
        )
    )
    run = dsx.load_config(tmp_path / "ds_config.json", world_size=1)
    written = json.loads(json.dumps(run.hf_config))
    read = AutoConfig.for_model(**written)
    assert (read.final_logit_softcapping, type(read.final_logit_softcapping)) == (30.0, float)
