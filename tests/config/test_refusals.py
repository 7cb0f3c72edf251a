"""Wrong dsx blocks: one message each, with the key, the value and the fix."""

from __future__ import annotations

import pytest
from sample_config import BASE, REMOVE, changed

from dsx.config.load import load
from dsx.config.resolve import resolve
from dsx.errors import ConfigError, DsxError

# (edits, world size, words that the message must hold: key, value, fix)
WRONG = {
    # The dsx block itself.
    "unknown key": ({"dsx.train.step": 5}, 1, ["dsx.train.step = 5", "unknown key", 'write "steps"']),
    "unknown block": ({"dsx.modle": {}}, 1, ["dsx.modle = {}", "unknown key", '"model"']),
    "key of DeepSpeed's": (
        {"dsx.train.gradient_clipping": 1.0},
        1,
        ["dsx.train.gradient_clipping", "top level"],
    ),
    "unknown far key": (
        {"dsx.schedule.zzz": 1},
        1,
        ["dsx.schedule.zzz = 1", "unknown", "name or warmup"],
    ),
    "missing key": ({"dsx.train.steps": REMOVE}, 1, ["dsx.train.steps", "needed", "at least 1"]),
    "missing block": ({"dsx.data": REMOVE}, 1, ["dsx.data", "needed", "with sequence_length"]),
    "block is no object": ({"dsx.data": "text"}, 1, ['dsx.data = "text"', "an object"]),
    "quoted number": ({"dsx.parallel.tensor": "2"}, 1, ['dsx.parallel.tensor = "2"', "remove the quotes: 2"]),
    "boolean as number": ({"dsx.train.steps": True}, 1, ["dsx.train.steps = true", "a whole number"]),
    "number as boolean": (
        {"dsx.parallel.sequence_parallel": 1},
        1,
        ["dsx.parallel.sequence_parallel = 1", "true or false"],
    ),
    "float as int": ({"dsx.train.log_every": 2.0}, 1, ["dsx.train.log_every = 2.0", "a whole number"]),
    "zero steps": ({"dsx.train.steps": 0}, 1, ["dsx.train.steps = 0", "of at least 1"]),
    "no sequence": ({"dsx.data.sequence_length": 0}, 1, ["dsx.data.sequence_length = 0", "of at least 1"]),
    "all held out": ({"dsx.data.held_out": 1.0}, 1, ["dsx.data.held_out = 1.0", "not including, 1"]),
    "empty output": ({"dsx.train.output": ""}, 1, ['dsx.train.output = ""', "not empty"]),
    "degree zero": ({"dsx.parallel.pipeline": 0}, 1, ["dsx.parallel.pipeline = 0", "at least 1", '"auto"']),
    "misspelt auto": ({"dsx.parallel.tensor": "atuo"}, 1, ['dsx.parallel.tensor = "atuo"', '"auto"']),
    "misspelt schedule": (
        {"dsx.schedule.name": "interleave"},
        1,
        ['dsx.schedule.name = "interleave"', 'write "interleaved"'],
    ),
    "unknown schedule": ({"dsx.schedule.name": "zb"}, 1, ['dsx.schedule.name = "zb"', '"gpipe"', '"1f1b"']),
    "unknown recompute": ({"dsx.recompute": "some"}, 1, ['dsx.recompute = "some"', '"selective"']),
    "unknown wandb mode": (
        {"dsx.tracking.wandb.mode": "on"},
        1,
        ['dsx.tracking.wandb.mode = "on"', '"online"'],
    ),
    "unknown partition": (
        {"dsx.partition.method": "speed"},
        1,
        ['dsx.partition.method = "speed"', '"flops"', "type:<regex>"],
    ),
    "partition of nothing": ({"dsx.partition.method": []}, 1, ["dsx.partition.method = []", "a list"]),
    "partition with a zero": (
        {"dsx.partition.method": [3, 0, 4]},
        1,
        ["dsx.partition.method[1] = 0", "at least 1"],
    ),
    "unknown resume": ({"dsx.train.resume": "yes"}, 1, ['dsx.train.resume = "yes"', '"never"']),
    # The model.
    "no model": ({"dsx.model": {}}, 1, ["dsx.model = {}", "none of them is given", "exactly one"]),
    "two models": (
        {"dsx.model.path": "some/folder"},
        1,
        ["dsx.model", "preset and path are given", "give exactly one"],
    ),
    "unknown preset": ({"dsx.model.preset": "tinny"}, 1, ['dsx.model.preset = "tinny"', '"tiny"']),
    "ambiguous preset": (
        {"dsx.model": {"preset": "tiny"}},
        1,
        [
            'dsx.model.preset = "tiny"',
            "dsx.model.family to gpt2, llama, mistral, qwen2, qwen3, gpt_neox or gemma2",
        ],
    ),
    "preset of the other family": (
        {"dsx.model": {"family": "gpt2", "preset": "llama-3-8b"}},
        1,
        ['dsx.model.family = "gpt2"', '"llama"'],
    ),
    "a model without its type": (
        {"dsx.model": {"family": "llama", "config": {"hidden_size": 64}}},
        1,
        ['dsx.model.family = "llama"', "no model_type", 'add "model_type": "llama"'],
    ),
    "no such model folder": (
        {"dsx.model": {"path": "/nowhere/model"}},
        1,
        [
            'dsx.model.path = "/nowhere/model"',
            "/nowhere/model/config.json",
            "local Hugging Face model folder",
        ],
    ),
    "weights of a preset": (
        {"dsx.model.weights": "load"},
        1,
        ['dsx.model.weights = "load"', "dsx.model.path"],
    ),
    "unknown override": (
        {"dsx.model.overrides": {"num_hidden_layer": 8}},
        1,
        ["dsx.model.overrides.num_hidden_layer = 8", '"num_hidden_layers"'],
    ),
    "unsupported model": (
        {"dsx.model": {"config": {"model_type": "t5"}}},
        1,
        ["dsx.model.config", "t5", "an encoder and a decoder"],
    ),
    "vocabulary below bytes": (
        {"dsx.model.overrides": {"vocab_size": 200}},
        1,
        ["vocab_size = 200", "at least 257"],
    ),
    # Degrees.
    "tensor does not divide the world": (
        {"dsx.parallel.tensor": 4},
        6,
        ["dsx.parallel.tensor = 4", "world size 6", "use 1 or 2"],
    ),
    "heads not divisible": (
        {"dsx.parallel.tensor": 3},
        6,
        ["dsx.parallel.tensor = 3", "attention heads = 8", "use 1 or 2"],
    ),
    "kv heads not divisible": (
        {
            "dsx.parallel.tensor": 6,
            "dsx.model.overrides": {"num_attention_heads": 12, "hidden_size": 144, "intermediate_size": 360},
        },
        6,
        ["dsx.parallel.tensor = 6", ": key/value heads = 4", "use 1 or 2"],
    ),
    "mlp not divisible": (
        {"dsx.parallel.tensor": 4, "dsx.model.overrides": {"intermediate_size": 350}},
        8,
        ["dsx.parallel.tensor = 4", "MLP width = 350", "use 1 or 2"],
    ),
    "sequence not divisible": (
        {"dsx.parallel.tensor": 2, "dsx.data.sequence_length": 255},
        2,
        ["dsx.parallel.tensor = 2", "sequence length = 255", "use 1", "sequence_parallel = false"],
    ),
    "pipeline does not divide the world": (
        {"dsx.parallel.pipeline": 3},
        8,
        ["dsx.parallel.pipeline = 3", "world size 8", "use 1, 2 or 4"],
    ),
    "product does not divide the world": (
        {"dsx.parallel.pipeline": 4, "dsx.parallel.tensor": 4},
        8,
        ["dsx.parallel.pipeline = 4", "tensor 4 x pipeline 4", "use 1 or 2"],
    ),
    "more stages than layers": (
        {"dsx.parallel.pipeline": 8},
        8,
        ["dsx.parallel.pipeline = 8", "more stages than layers", "has 7", "use 1, 2 or 4"],
    ),
    "more virtual stages than layers": (
        {"dsx.parallel.pipeline": 2, "dsx.parallel.chunks": 4},
        2,
        ["dsx.parallel.chunks = 4", "more stages than layers", "use at most 3"],
    ),
    "interleaved on too few layers": (
        {"dsx.parallel.pipeline": 4, "dsx.schedule.name": "interleaved"},
        4,
        ['dsx.schedule.name = "interleaved"', '"1f1b"'],
    ),
    "interleaved with one chunk": (
        {"dsx.parallel.pipeline": 2, "dsx.parallel.chunks": 1, "dsx.schedule.name": "interleaved"},
        2,
        ["dsx.parallel.chunks = 1", "at least 2 chunks", '"1f1b"'],
    ),
    "1f1b with chunks": (
        {"dsx.parallel.pipeline": 2, "dsx.parallel.chunks": 2, "dsx.schedule.name": "1f1b"},
        2,
        ["dsx.parallel.chunks = 2", "1f1b has one chunk", '"interleaved"'],
    ),
    "gpipe with chunks": (
        {"dsx.parallel.pipeline": 2, "dsx.parallel.chunks": 2, "dsx.schedule.name": "gpipe"},
        2,
        ["dsx.parallel.chunks = 2", "gpipe has one chunk", "use 1"],
    ),
    "partition of other stages": (
        {"dsx.parallel.pipeline": 2, "dsx.partition.method": [3, 2, 2]},
        2,
        ["dsx.partition.method = [3, 2, 2]", "lists 3 stages", "list 4 numbers"],
    ),
    "partition of other layers": (
        {"dsx.parallel.pipeline": 2, "dsx.parallel.chunks": 1, "dsx.partition.method": [3, 3]},
        2,
        ["dsx.partition.method = [3, 3]", "7 layers"],
    ),
    "partition by no type": (
        {"dsx.parallel.pipeline": 2, "dsx.partition.method": "type:Mamba"},
        2,
        ['dsx.partition.method = "type:Mamba"', "Block"],
    ),
    # Combinations.
    "sequence beyond positions": (
        {"dsx.data.sequence_length": 2048},
        1,
        ["dsx.data.sequence_length = 2048", "1024 positions", "at most 1024"],
    ),
    "output of an unknown name": (
        {"dsx.train.output": "runs/a-{layot}"},
        1,
        ['dsx.train.output = "runs/a-{layot}"', "{layout}"],
    ),
    "evaluation without text": (
        {"dsx.train.eval_every": 5, "dsx.data.held_out": 0.0},
        1,
        ["dsx.train.eval_every = 5", "dsx.data.held_out"],
    ),
    "muon with tensor parallelism": (
        {"optimizer.type": "Muon", "dsx.parallel.tensor": 2},
        2,
        ['optimizer.type = "Muon"', "dsx.parallel.tensor = 2", '"AdamW"'],
    ),
    "hpz with model parallelism": (
        {
            "zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2},
            "dsx.parallel.tensor": 2,
        },
        4,
        ["zero_optimization.zero_hpz_partition_size = 2", "use 1"],
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_refused(name):
    edits, world_size, words = WRONG[name]
    with pytest.raises(DsxError) as caught:
        resolve(changed(edits), world_size=world_size)
    message = str(caught.value)
    assert "Fix: " in message
    for word in words:
        assert word in message


def test_the_base_itself_is_right():
    assert resolve(BASE, world_size=1).mesh.size == 1


def test_world_size():
    with pytest.raises(ConfigError, match=r"world size 0.*use 1 or more"):
        resolve(BASE, world_size=0)


def test_all_problems_of_a_block_come_at_once():
    with pytest.raises(ConfigError) as caught:
        load(changed({"dsx.train.steps": 0, "dsx.parallel.tensor": "2", "dsx.data.seed": -1}))
    message = str(caught.value)
    assert "3 problems" in message
    assert "dsx.train.steps = 0" in message
    assert 'dsx.parallel.tensor = "2"' in message
    assert "dsx.data.seed = -1" in message
