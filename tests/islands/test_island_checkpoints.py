"""Checkpoints of islands: a resumed island is the undisturbed one, in any layout and format."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_oracles import ROWS, STEPS, Samples, config_of

import dsx
import ranks
from dsx.checkpoint.execute import ConversionOptions
from dsx.checkpoint.layouts import TargetDegrees
from dsx.checkpoint.open import open_checkpoint
from dsx.checkpoint.read import compare, fact_differences, only_in
from dsx.checkpoint.reshard import WantedTarget, prepare
from dsx.parallel.islands import OUTER_STATES
from often import often

TP, PP = {"tensor": 2}, {"tensor": 1, "pipeline": 2}
CASES = {
    # name: parallel, ZeRO stage, ranks of an island, dsx.outer
    "tp 2, mid-interval": (TP, 0, 2, {"every": 4}),
    "dp 2, ZeRO-3, int8": ({"tensor": 1}, 3, 2, {"every": 2, "wire": "int8"}),
    "dp 2, ZeRO-0, int8, shares": ({"tensor": 1}, 0, 2, {"every": 2, "wire": "int8", "shares": 2}),
    "shares and delay": ({"tensor": 1}, 1, 1, {"every": 4, "shares": 2, "delay": 1}),
    "a round under way": ({"tensor": 1}, 1, 1, {"every": 3, "delay": 2}),
}


def states(engine):
    """All that this rank's checkpoint would hold, by tensor, state and place."""
    from dsx.checkpoint.run.stored import stored_here

    return {
        (block.entry.name, block.entry.state, block.first): block.values.detach().clone()
        for block in stored_here(engine)
    }


def run(rank, world_size, content, steps, folder, save_at=(), load=None):
    """Losses and states of a run that saves after the steps ``save_at``, or begins with what ``load`` has.

    In both folders each island has one of its own; ``load`` may name one island's, for all.
    """
    config = dsx.load_config(content, world_size=world_size, rank=rank)
    number = 0 if config.islands is None else config.islands.index
    own, source = f"{folder}/{number}", None if load is None else Path(load)
    if source is not None and not (source / "latest").exists():
        source /= str(number)
    with dsx.distributed(config.mesh, seed=3, islands=config.islands) as groups:
        engine = dsx.recipe.build_engine(config, groups)
        if source is not None:
            engine.load_checkpoint(source)
            if engine.global_steps in save_at:
                engine.save_checkpoint(own)
        at_start = {} if engine.outer is None or engine.outer.state is None else states(engine)
        facts = None if engine.outer is None else engine.outer.facts()
        batches = dsx.recipe.training_batches(
            config, Samples(), dp_rank=groups.dp_rank, cursor=engine.global_samples
        )
        losses = []
        while engine.global_steps < steps:
            losses.append(float(engine.train_batch(batches)))
            if engine.global_steps in save_at:
                engine.save_checkpoint(own)
        return losses, states(engine), at_start, facts


def same(a, b):
    assert a.keys() == b.keys()
    for key in a:
        assert torch.equal(a[key], b[key]), key


@pytest.mark.parametrize("case", often(CASES, 3))
def test_a_resumed_run_is_the_undisturbed_run(case, tmp_path):
    parallel, stage, world, outer = CASES[case]
    content = config_of(parallel, stage, outer={"islands": 2, **outer})
    whole = ranks.run(run, 2 * world, content, STEPS, str(tmp_path), (3,))
    resumed = ranks.run(run, 2 * world, content, STEPS, str(tmp_path), (), str(tmp_path))
    for (losses, end, _, _), (later, its, begun, _) in zip(whole, resumed, strict=True):
        assert later == losses[3:]
        same(end, its)
        kinds = {state for _, state, _ in begun}
        assert {"outer_weights", "outer_momentum"} <= kinds
        assert ("outer_error" in kinds) == (outer.get("wire") == "int8")


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """Two islands of tp 2 after three steps: config, the losses to come, and the folder of their folders."""
    folder = tmp_path_factory.mktemp("first")
    outer = {"islands": 2, "every": 2, "wire": "int8"}
    whole = ranks.run(run, 4, config_of(TP, 1, outer=outer), STEPS, str(folder), (3,))
    return outer, [losses[3:] for losses, *_ in whole], folder


@pytest.mark.parametrize(("parallel", "stage"), often([({"tensor": 1}, 3), (PP, 1)], 2), ids=repr)
def test_another_layout_keeps_all_bits(first, parallel, stage, tmp_path):
    outer, expected, folder = first
    content = config_of(parallel, stage, outer=outer)
    results = ranks.run(run, 4, content, STEPS, str(tmp_path), (3,), str(folder))
    for island in range(2):
        one, two = (open_checkpoint(root / str(island) / "global_step3") for root in (folder, tmp_path))
        assert all(item.equal for item in compare(one, two))
        assert not only_in(one, two)
        assert not only_in(two, one)
        assert {entry.state for entry in two.entries} >= set(OUTER_STATES)
        assert two.facts["outer"] == one.facts["outer"]
        assert two.facts["outer"]["version"] == 1
        assert results[2 * island][0] == pytest.approx(expected[2 * island], abs=1e-3)


FORMATS = {
    "dcp": WantedTarget(format="dcp"),
    "deepspeed, tp 2": WantedTarget(format="deepspeed", degrees=TargetDegrees(tensor=2, data=2, zero=1)),
    "deepspeed, ZeRO-3": WantedTarget(format="deepspeed", degrees=TargetDegrees(tensor=1, data=3, zero=3)),
    "universal": WantedTarget(format="universal", degrees=TargetDegrees(tensor=1, zero=1)),
}


@pytest.mark.parametrize("way", FORMATS)
def test_every_format_gives_back_all_bits(first, way, tmp_path):
    start = found = open_checkpoint(first[2] / "1" / "global_step3")
    back = WantedTarget(degrees=TargetDegrees(tensor=1, pipeline=2, zero=3))
    for number, wanted in enumerate([FORMATS[way], back]):
        prepare(found, tmp_path / str(number), wanted).run(ConversionOptions(workers=1))
        found = open_checkpoint(tmp_path / str(number))
        assert found.facts["outer"] == start.facts["outer"]
        assert found.facts["client_state"] == start.facts["client_state"]
    assert all(item.equal for item in compare(start, found))
    assert not only_in(start, found)
    assert "outer" not in fact_differences(start, found)


def test_hugging_face_says_what_it_drops(first, tmp_path):
    conversion = prepare(
        open_checkpoint(first[2] / "1" / "global_step3"), tmp_path / "hf", WantedTarget(format="hf")
    )
    assert any("outer_momentum" in note and "stay behind" in note for note in conversion.target.dropped)
    conversion.run(ConversionOptions(workers=1))
    assert {entry.state for entry in open_checkpoint(tmp_path / "hf").entries} == {"weight"}


def test_islands_begin_with_a_checkpoint_of_one_job_and_the_other_way_round(first, tmp_path):
    outer, _, folder = first
    one_job = config_of(TP, 1)
    ((_, alone, _, _), *_) = ranks.run(run, 2, one_job, 4, str(tmp_path / "one"), (4,), str(folder / "1"))
    saved = open_checkpoint(tmp_path / "one" / "0" / "global_step4")
    assert not {entry.state for entry in saved.entries} & set(OUTER_STATES)
    assert "outer" not in saved.facts
    # One job has read what both islands had, and a step more of its own.
    assert saved.facts["counters"]["global_samples"] == 7 * ROWS
    results = ranks.run(
        run, 4, config_of(TP, 1, outer=outer), 6, str(tmp_path / "more"), (4, 5), str(tmp_path / "one" / "0")
    )
    begun = open_checkpoint(tmp_path / "more" / "0" / "global_step4")
    assert all(item.equal for item in compare(saved, begun))
    # Seven batches are three and a half steps of two islands, which leave out the other half.
    assert begun.facts["counters"]["global_samples"] == 4 * ROWS
    # What all islands had last are the weights that they began with.
    assert all(len(losses) == 2 for losses, *_ in results)
    for (name, state, start), value in results[0][1].items():
        if state == "weight":
            other = results[2][1][name, state, start]
            assert torch.equal(value, other), name
            assert not torch.equal(value, alone[name, state, start]), name
