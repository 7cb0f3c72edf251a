"""Wrong config files, --set items and model folders."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from sample_config import BASE, changed

from dsx.config.resolve import resolve
from dsx.errors import ConfigError


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "config.json"
    path.write_text(text)
    return path


WRONG_FILES = {
    "list": ("[1, 2]", ["config.json", "not an object"]),
    "number": ("3", ["config.json", "not an object"]),
    "syntax": ('{"a": 1,\n "b": [1, 2\n}', ["config.json, line ", "column ", "not JSON"]),
    "no dsx block": ('{"train_batch_size": 8}', ["config.json: dsx", "no dsx block", "dsx schema"]),
    "dsx is no block": ('{"dsx": 5}', ["dsx = 5", "an object"]),
    "duplicate": ('{\n  "dsx": {},\n  "dsx": {}\n}', ["config.json: dsx", "twice", "lines 2, 3"]),
    "inner duplicate": ('{"dsx": {"train": {"steps": 1, "steps": 2}}}', ["steps", "twice", "keep one"]),
}


@pytest.mark.parametrize("name", WRONG_FILES)
def test_refused_files(name, tmp_path):
    text, words = WRONG_FILES[name]
    with pytest.raises(ConfigError) as caught:
        resolve(written(tmp_path, text), world_size=1)
    for word in words:
        assert word in str(caught.value)


def test_missing_file(tmp_path):
    with pytest.raises(ConfigError, match=r"absent\.json: there is no such file.*Fix"):
        resolve(tmp_path / "absent.json", world_size=1)


def test_folder_instead_of_file(tmp_path):
    with pytest.raises(ConfigError, match=r"a folder.*give the JSON file"):
        resolve(tmp_path, world_size=1)


def test_binary_file(tmp_path):
    (tmp_path / "x.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"x\.json: it cannot be read"):
        resolve(tmp_path / "x.json", world_size=1)


@pytest.mark.parametrize(
    ("item", "words"),
    [
        ("dsx.train.steps", ["--set dsx.train.steps", "there is no =", "--set dsx.parallel.tensor=4"]),
        ("dsx..steps=1", ["--set dsx..steps=1", "empty part"]),
        ("=1", ["--set =1", "empty part"]),
        ("train_micro_batch_size_per_gpu.x=1", ["train_micro_batch_size_per_gpu = 2", "no object"]),
        ("dsx.train.step=5", ["dsx.train.step = 5", '"steps"']),
        ("dsx.trian.steps=5", ["dsx.trian", '"train"']),
        ("zero_optimisation.stage=3", ["zero_optimisation", '"zero_optimization"']),
        ("dsx.train.steps=ten", ['dsx.train.steps = "ten"', "a whole number"]),
    ],
)
def test_refused_overrides(item, words):
    with pytest.raises(ConfigError) as caught:
        resolve(BASE, world_size=1, overrides=[item])
    for word in words:
        assert word in str(caught.value)


def test_model_folder_without_weights(tmp_path):
    config = {"model_type": "gpt2", "n_layer": 2, "n_embd": 32, "n_head": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = {"path": str(tmp_path), "weights": "load"}
    with pytest.raises(ConfigError, match=r"dsx\.model\.weights.*no \*\.safetensors.*random"):
        resolve(changed({"dsx.model": model}), world_size=1)


def test_model_folder_with_a_broken_config(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"dsx\.model\.path.*cannot be read"):
        resolve(changed({"dsx.model": {"path": str(tmp_path)}}), world_size=1)
