"""Whatever a config holds, the answer is a run or a dsx error that can be read: never a traceback."""

from __future__ import annotations

import copy
import json

from hypothesis import given, settings
from hypothesis import strategies as st
from sample_config import BASE

from dsx.config.resolve import resolve
from dsx.errors import DsxError

FULL = copy.deepcopy(BASE) | {
    "train_batch_size": 8,
    "bf16": {"enabled": True, "check_grad_overflow": True},
    "fp16": {"enabled": False},
    "steps_per_print": 5,
    "torch_autocast": {"enabled": False},
    "zero_optimization": {
        "stage": 3,
        "zero_hpz_partition_size": 1,
        "offload_optimizer": {"device": "cpu", "nvme_path": None},
        "offload_param": {"device": "none"},
    },
    "scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 10, "warmup_num_steps": 2}},
    "zero_allow_untested_optimizer": True,
}
FULL["dsx"] |= {
    "parallel": {"tensor": 1, "pipeline": "auto", "chunks": 1, "sequence_parallel": True},
    "schedule": {"name": "auto"},
    "partition": {"method": "flops"},
    "recompute": "none",
    "tracking": {"wandb": {"mode": "disabled", "tags": ["a"]}},
}
FULL["dsx"]["model"] = {
    "config": {"model_type": "gpt2", "n_embd": 32, "n_head": 4},
    "overrides": {"n_layer": 4},
}

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 70)
    | st.floats(allow_nan=True)
    | st.sampled_from(
        ["auto", "", "2", "gpt2", "flops", "cpu", "AdamW", "type:(", "interleaved", "WarmupLR", "é"]
    ),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["stage", "x"]), inner, max_size=2)
    ),
    max_leaves=4,
)


def paths(node, prefix=()):
    """Every key of a nested config."""
    for key, value in node.items():
        yield (*prefix, key)
        if isinstance(value, dict):
            yield from paths(value, (*prefix, key))


@settings(max_examples=200, deadline=None)
@given(
    edits=st.lists(st.tuples(st.sampled_from([*paths(FULL)]), values), min_size=1, max_size=3),
    world_size=st.sampled_from([1, 2, 4, 6, 8]),
)
def test_a_run_or_a_readable_error(edits, world_size):
    config = copy.deepcopy(FULL)
    for path, value in edits:
        node = config
        for key in path[:-1]:
            node = node.get(key, {}) if isinstance(node, dict) else {}
        if isinstance(node, dict):
            node[path[-1]] = value
    try:
        run = resolve(config, world_size=world_size)
    except DsxError as error:
        assert all((error.where, error.what, error.fix)), error  # noqa: PT017
    else:
        json.dumps(run.summary())
        assert resolve(run.resolved(), world_size=world_size).resolved() == run.resolved()
