"""A valid config with one thing wrong at a time: what DeepSpeed refuses, and what it loses, the doctor finds.

DeepSpeedConfig is the oracle. Mutations are of classes (a typo, a wrong type, a wrong level ...), applied to
every key in turn.
"""

from __future__ import annotations

import copy
import json
import logging
import random

import pytest

from dsx.doctor import examine

BASE = {
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 1.0,
    "steps_per_print": 10,
    "prescale_gradients": False,
    "communication_data_type": "fp32",
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.95], "weight_decay": 0.1}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"warmup_max_lr": 3e-4, "warmup_num_steps": 100, "total_num_steps": 1000},
    },
    "bf16": {"enabled": True, "check_grad_overflow": True},
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": True,
        "reduce_bucket_size": 1000000,
        "stage3_prefetch_bucket_size": 100000,
        "offload_optimizer": {"device": "cpu", "ratio": 0.9},
        "zenflow": {"topk_ratio": 0.1, "update_interval": 4},
    },
    "activation_checkpointing": {"partition_activations": True},
    "wandb": {"enabled": True, "project": "p"},
    "flops_profiler": {"enabled": True, "profile_step": 2},
    "checkpoint": {"tag_validation": "Warn", "load_universal": True},
    "data_types": {"grad_accum_dtype": "fp32"},
}
# Strings of the user's own, which no other word is a mistake for; and where "auto" is a value.
FREE = {("wandb", "project")}
AUTO = {("zero_optimization", "zenflow", "update_interval")}


def items(node, path=()):
    for key, value in node.items():
        yield (*path, key), value
        if isinstance(value, dict):
            yield from items(value, (*path, key))


def changed(path, value=None, *, key=None, up=False):
    """BASE with another value at ``path``, or its key renamed, or moved to the top level."""
    config = copy.deepcopy(BASE)
    node = config
    for part in path[:-1]:
        node = node[part]
    if up:
        config[path[-1]] = node.pop(path[-1])
    elif key:
        content = [(key if name == path[-1] else name, inner) for name, inner in node.items()]
        node.clear()
        node.update(content)
    else:
        node[path[-1]] = value
    return config


def typo(word, rng):
    """``word`` with one letter lost, doubled or swapped with the next."""
    i = rng.randrange(len(word) - 1)
    swapped = word[:i] + word[i + 1] + word[i] + word[i + 2 :]
    return rng.choice([word[:i] + word[i + 1 :], word[:i] + word[i] + word[i:], swapped])


def mutants():
    """(class, path, config)."""
    rng = random.Random(0)
    for path, value in items(BASE):
        if (word := typo(path[-1], rng)) != path[-1]:
            yield "typo", path, changed(path, key=word)
        yield "case", path, changed(path, key=path[-1].upper())
        if len(path) > 1 and path[-1] not in BASE:
            yield "level", path, changed(path, up=True)
        yield "null", path, changed(path)
        if isinstance(value, dict):
            yield "block", path, changed(path, True)
            yield "block", path, changed(path, [value])
            yield "unknown", path, changed((*path, "no_such_key"), 1)
        else:
            yield "type", path, changed(path, {"value": value})
        if isinstance(value, bool | int | float):
            yield "quoted", path, changed(path, json.dumps(value))
            yield "type", path, changed(path, "many")
            if path not in AUTO:
                yield "auto", path, changed(path, "auto")
        if isinstance(value, int | float) and not isinstance(value, bool):
            yield "negative", path, changed(path, -abs(value) - 2)
        if isinstance(value, str) and path not in FREE:
            yield "word", path, changed(path, value + "x")


def theirs(config):
    """What DeepSpeed makes of it: None if it refuses."""
    from deepspeed.runtime.config import DeepSpeedConfig

    try:
        parsed = vars(DeepSpeedConfig(copy.deepcopy(config)))
    except Exception:  # noqa: BLE001 (whatever it raises, it refuses)
        return None
    parsed = {name: value for name, value in parsed.items() if name != "_param_dict"}
    return {
        name: repr(vars(value)) if hasattr(value, "__dict__") else repr(value)
        for name, value in parsed.items()
    }


@pytest.fixture(scope="module")
def judged():
    """(class, path, "refused" | "changed" | "same", severities of what the doctor newly finds)."""
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    usual = theirs(BASE)
    assert usual is not None
    known = {(finding.check, finding.path) for finding in examine(BASE, world_size=1).findings}
    out = []
    for kind, path, config in mutants():
        parsed = theirs(config)
        state = "refused" if parsed is None else "same" if parsed == usual else "changed"
        found = examine(config, world_size=1, runner="deepspeed").findings
        new = {finding.severity for finding in found if (finding.check, finding.path) not in known}
        out.append((kind, path, state, new))
    return out


def test_base_is_valid():
    report = examine(BASE, world_size=1)
    assert [*report.errors, *report.warnings] == []


def test_what_deepspeed_refuses_is_an_error(judged):
    refused = [item for item in judged if item[2] == "refused"]
    assert len(refused) > 120
    assert [item for item in refused if "error" not in item[3]] == []


def test_what_deepspeed_loses_in_silence_is_found(judged):
    """All but what is legal: null where that means "none". Whoever writes "auto" may want the default."""
    lost = [item for item in judged if item[2] == "changed" and item[0] != "null"]
    assert len(lost) > 60
    due = {"error", "warning"}
    assert [item for item in lost if not (due | {"note"} if item[0] == "auto" else due) & item[3]] == []
