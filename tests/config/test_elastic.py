"""``dsx.elastic``: which layout a run takes on however many ranks it is started again."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_config import REMOVE, changed

from dsx.config.resolve import resolve
from dsx.errors import ConfigError

BATCH = {"gradient_accumulation_steps": REMOVE, "train_batch_size": 24}


def on(ranks, **limits):
    return resolve(changed({**BATCH, "dsx.elastic": limits}), world_size=ranks)


def degrees(run):
    return run.mesh.tp, run.mesh.pp, run.mesh.dp


def test_the_order_of_the_lists_decides():
    both = {"tensor": [2, 1], "pipeline": [2, 1]}
    assert [degrees(on(n, **both)) for n in (1, 2, 3, 4, 6, 8, 12)] == [
        (1, 1, 1), (2, 1, 1), (1, 1, 3), (2, 2, 1), (2, 1, 3), (2, 2, 2), (2, 2, 3),
    ]  # fmt: skip
    assert degrees(on(8, tensor=[1, 2], pipeline=[2, 1])) == (1, 2, 4)


def test_ranks_that_no_layout_can_use_are_spare():
    run = on(7, tensor=[2], pipeline=[2])
    assert (degrees(run), run.mesh.size, run.spare_ranks) == ((2, 2, 1), 4, 3)
    assert "on 4 of 7 ranks; 3 more wait as spares" in run.notes[-1]
    assert run.summary()["spare_ranks"] == 3


@given(
    ranks=st.integers(1, 24), micro=st.sampled_from([1, 2, 3, 4, 8]), batch=st.sampled_from([8, 12, 24, 48])
)
@settings(max_examples=60, deadline=None)
def test_the_global_batch_never_changes(ranks, micro, batch):
    edits = {**BATCH, "train_batch_size": batch, "train_micro_batch_size_per_gpu": micro}
    run = resolve(
        changed({**edits, "dsx.elastic": {"tensor": [4, 2, 1], "pipeline": [2, 1]}}), world_size=ranks
    )
    assert run.global_batch_size == batch == run.micro_batch_size * run.accumulation * run.mesh.dp
    assert micro % run.micro_batch_size == 0
    assert run.mesh.size + run.spare_ranks == ranks


def test_what_is_written_is_the_layout_that_was_taken():
    """The config.json beside a checkpoint gives that run again, without the choice."""
    run = on(8, tensor=[2, 1], pipeline=[2, 1])
    again = resolve(run.resolved(), world_size=8)
    assert (degrees(again), again.chunks, again.accumulation) == (degrees(run), run.chunks, run.accumulation)
    assert again.dsx.elastic is None


def test_a_cluster_chooses_by_predicted_time_within_its_memory(tmp_path):
    edits = {**BATCH, "train_batch_size": 64, "dsx.model.preset": "llama-3-8b", "dsx.model.family": REMOVE}
    edits |= {"dsx.data.tokenizer": "bytes", "bf16.enabled": True, "dsx.data.sequence_length": 2048}
    limits = {"tensor": [1, 2, 4, 8], "pipeline": [1, 2, 4], "cluster": "H100"}
    assert degrees(resolve(changed({**edits, "dsx.elastic": limits}), world_size=8)) == (1, 1, 8)
    # 8 billion parameters, ZeRO-1: 16 GB of weights and as much of gradients leave no room uncut.
    small = tmp_path / "small.json"
    small.write_text('{"gpu": "H100", "memory_gib": 40}')
    limits["cluster"] = str(small)
    assert degrees(resolve(changed({**edits, "dsx.elastic": limits}), world_size=8)) != (1, 1, 8)
    tight = tmp_path / "tight.json"
    tight.write_text('{"gpu": "H100", "memory_gib": 4, "reserved_gib": 1}')
    limits["cluster"] = str(tight)
    with pytest.raises(ConfigError, match=r"GiB per rank do not fit its 3\.00 GiB"):
        resolve(changed({**edits, "dsx.elastic": limits}), world_size=8)


@pytest.mark.parametrize(
    ("edits", "limits", "said"),
    [
        ({"train_batch_size": REMOVE}, {}, "without train_batch_size the global batch would change"),
        ({"gradient_accumulation_steps": 4}, {}, "remove it: it follows from the other two"),
        ({"dsx.train.output": "runs/x-{layout}"}, {}, "would not find its checkpoints"),
        ({"dsx.profile": "measure"}, {}, "a profile is of one layout"),
        ({}, {"tensor": [3]}, r"no layout on 1 to 8 ranks; for example, dsx\.parallel\.tensor = 3"),
        ({}, {"min_ranks": 9}, "8 ranks were started"),
        ({}, {"cluster": "H1000"}, "neither a known cluster nor a file"),
        ({}, {"tensor": []}, r"dsx\.elastic\.tensor"),
        ({}, {"tensors": [1]}, r"dsx\.elastic\.tensors.*tensor"),
    ],
)
def test_contradictions_are_refused(edits, limits, said):
    removed = {key: value for key, value in edits.items() if value is REMOVE}
    config = changed({**BATCH, **{key: value for key, value in edits.items() if value is not REMOVE}})
    for key in removed:
        del config[key]
    config["dsx"]["elastic"] = limits
    with pytest.raises(ConfigError, match=said):
        resolve(config, world_size=8)
