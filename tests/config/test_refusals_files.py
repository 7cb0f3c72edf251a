"""Wrong config files, model folders and --set items, which errors say to be no file's."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from sample_config import BASE, changed

from dsx.config.resolve import resolve
from dsx.errors import ConfigError, DsxError


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


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("absent.json", r"absent\.json: there is no such file.*Fix"),
        ("", r"a folder.*give the JSON file"),
        ("x.json", r"x\.json: it cannot be read"),
    ],
)
def test_what_is_no_text(tmp_path, name, said):
    (tmp_path / "x.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=said):
        resolve(tmp_path / name, world_size=1)


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
    said = r'dsx\.model\.weights = "load".*holds no \*\.safetensors.*random'
    with pytest.raises(ConfigError, match=said):
        resolve(changed({"dsx.model": model}), world_size=1)


def test_model_folder_with_a_broken_config(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"dsx\.model\.path.*cannot be read"):
        resolve(changed({"dsx.model": {"path": str(tmp_path)}}), world_size=1)


ZERO3 = Path(__file__).parents[2] / "configs/zero3.json"


@pytest.mark.parametrize(
    ("items", "where"),
    [
        (["dsx.train.steps=x"], 'dsx.train.steps = "x" (--set)'),
        (["dsx.train.stepps=3"], "dsx.train.stepps = 3 (--set)"),
        (["dsx.parallel.tensor=3"], "dsx.parallel.tensor = 3 (--set)"),
        (["zero_optimization.stage=9"], "zero_optimization.stage = 9 (--set)"),
        (['zero_optimization={"stage": 9}'], "zero_optimization.stage = 9 (--set)"),
        (["optimizer.params.betas=[0.9, 2]"], "optimizer.params.betas"),
        (
            ["train_batch_size=7"],
            "train_batch_size = 7, train_micro_batch_size_per_gpu = 2 (train_batch_size by --set)",
        ),
        (
            ["dsx.model.overrides.num_attention_heads=7"],
            "dsx.model.preset tiny: num_attention_heads = 7 (--set)",
        ),
    ],
)
def test_an_error_says_that_the_value_is_not_the_files(items, where):
    with pytest.raises(DsxError) as error:
        resolve(ZERO3, world_size=8, overrides=items)
    assert error.value.where.startswith(where)
    assert error.value.where.endswith("--set)")
    assert not re.search(r"\bline \d", str(error.value))


def test_the_files_own_mistakes_are_the_files(tmp_path):
    content = json.loads(ZERO3.read_text())
    content["dsx"]["train"]["steps"] = "x"
    (tmp_path / "a.json").write_text(json.dumps(content))
    with pytest.raises(DsxError) as error:
        resolve(tmp_path / "a.json", world_size=8, overrides=["dsx.parallel.tensors=2", "dsx.train.seed=3"])
    own, put = str(error.value).splitlines()[1:]
    assert (own.count("--set"), put.count("--set")) == (0, 1)
    assert "dsx.train.steps" in own


@pytest.mark.parametrize(
    "words",
    [
        ["estimate", ZERO3, "--gpus", 8],
        ["data", "show", ZERO3],
        ["verify", ZERO3, "--gpus", 8],
        ["init", "run", "--gpus", 8, "--from", ZERO3],
        ["init", "run", "--gpus", 8],
    ],
)
def test_every_command_says_it(dsx, tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    code, out, err = dsx(*words, "--set", "dsx.train.steps=0")
    assert (code, out) == (2, "")
    assert err.startswith("dsx: dsx.train.steps = 0 (--set): not a value for this key. Fix: ")
