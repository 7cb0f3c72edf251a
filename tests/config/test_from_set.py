"""Errors about values of ``--set``: in ``resolve``, which recipes call, and in every command with it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from dsx.config.resolve import resolve
from dsx.errors import DsxError

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
