"""Checkpoints of islands: a resumed island is the undisturbed one, in any layout and format."""

from __future__ import annotations

import pytest
import torch
from test_oracles import STEPS, Samples, config_of

import dsx
import ranks

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


def run(rank, world_size, content, steps, folder, save_at=(), load=False):
    """Losses and states of a run that saves after the steps ``save_at``, or begins with what was saved."""
    config = dsx.load_config(content, world_size=world_size, rank=rank)
    own = f"{folder}/{0 if config.islands is None else config.islands.index}"
    with dsx.distributed(config.mesh, seed=3, islands=config.islands) as groups:
        engine = dsx.recipe.build_engine(config, groups)
        if load:
            engine.load_checkpoint(own if load is True else load)
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


@pytest.mark.parametrize("case", CASES)
def test_a_resumed_run_is_the_undisturbed_run(case, tmp_path):
    parallel, stage, world, outer = CASES[case]
    content = config_of(parallel, stage, outer={"islands": 2, **outer})
    whole = ranks.run(run, 2 * world, content, STEPS, str(tmp_path), (3,))
    resumed = ranks.run(run, 2 * world, content, STEPS, str(tmp_path), (), True)
    for (losses, end, _, _), (later, its, begun, _) in zip(whole, resumed, strict=True):
        assert later == losses[3:]
        same(end, its)
        kinds = {state for _, state, _ in begun}
        assert {"outer_weights", "outer_momentum"} <= kinds
        assert ("outer_error" in kinds) == (outer.get("wire") == "int8")
