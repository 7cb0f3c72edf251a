"""The engines that stock checkpoints are written for: cuts as DeepSpeed makes them, and what is refused."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from deepspeed.runtime.utils import partition_balanced, partition_uniform

import made
from dsx.checkpoint.catalog import Catalog, Entry
from dsx.checkpoint.formats.deepspeed.target import StockLayout
from dsx.checkpoint.layouts import Pipeline, TargetDegrees, evenest, parse_ties, stock_layout
from dsx.errors import CheckpointError

PLAIN = StockLayout(dp=1, zero_stage=1)


def test_the_cut_by_parameters_is_deepspeeds():
    chance = random.Random(0)
    for _ in range(150):
        weights = [chance.choice([0, 1, 5, 7, 40]) for _ in range(chance.randrange(1, 14))]
        stages = chance.randrange(1, 6)
        if len(weights) >= stages:
            assert list(evenest(weights, stages)) == partition_balanced(weights, stages), (weights, stages)


def test_the_uniform_cut_is_deepspeeds(tmp_path: Path):
    source = Catalog(root=tmp_path, format="plain", entries=(), specs=made.layout("qwen2").params)
    for stages in range(1, 8):  # a model of four blocks has seven layers, the last of which is the tied head
        wanted = Pipeline(partition="uniform")
        _, layout = stock_layout(source, TargetDegrees(pipeline=stages), wanted, PLAIN)
        assert list(layout.bounds) == partition_uniform(7, stages)
        assert layout.tied == (("word", (0, 6)),)


def test_layers_that_no_file_tells_of_have_to_be_named(tmp_path: Path):
    table = Entry(name="0.weight", state="weight", shape=(5, 2), dtype="float32", pieces=())
    source = Catalog(root=tmp_path, format="deepspeed", entries=(table,))
    with pytest.raises(CheckpointError, match=r"do not say how many layers.*--partition 3,2"):
        stock_layout(source, TargetDegrees(pipeline=2), Pipeline(), PLAIN)
    wanted = Pipeline(partition="3, 2", tied=parse_ties(["embed=0,4"]))
    named, layout = stock_layout(source, TargetDegrees(pipeline=2), wanted, PLAIN)
    assert (layout.bounds, layout.tied) == ((0, 3, 5), (("embed", (0, 4)),))
    assert [entry.name for entry in named.entries] == ["tied_modules.embed.weight"]
    for tied, problem in [
        ("embed=1,4", "has none of its tensors"),
        ("embed=0,5", "the pipeline has 5 layers"),
    ]:
        with pytest.raises(CheckpointError, match=problem):
            stock_layout(source, TargetDegrees(pipeline=2), replace(wanted, tied=parse_ties([tied])), PLAIN)
    several = replace(source, facts={"unnamed_ties": [0]})
    with pytest.raises(CheckpointError, match=r"layer 0: several stages have it.*--tied KEY=0,LAYER"):
        stock_layout(several, TargetDegrees(), Pipeline(), PLAIN, universal=True)
    said, _ = stock_layout(several, TargetDegrees(), Pipeline(tied=wanted.tied), PLAIN, universal=True)
    assert said.by_key.keys() == named.by_key.keys()
    assert parse_ties(["none"]) == ()
    for text in ("embed", "embed=", "=0,4", "embed=0,x"):
        with pytest.raises(CheckpointError, match="write for example embed=0,4"):
            parse_ties([text])
