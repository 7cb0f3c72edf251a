"""Wrong dsx blocks: one message each, with the key, the value and the fix."""

from __future__ import annotations

import pytest
from sample_config import BASE, REMOVE, changed, check_refused

from dsx.config.load import load
from dsx.config.resolve import resolve
from dsx.errors import ConfigError

# (edits, words that the message must hold: key, value, fix; world size, 1 if left out)
WRONG = {
    # The dsx block itself.
    "unknown key": ({"dsx.train.step": 5}, ["dsx.train.step = 5", "unknown key", 'write "steps"']),
    "unknown block": ({"dsx.modle": {}}, ["dsx.modle = {}", "unknown key", '"model"']),
    "key of DeepSpeed's": (
        {"dsx.train.gradient_clipping": 1.0},
        ["dsx.train.gradient_clipping", "top level"],
    ),
    "unknown far key": ({"dsx.schedule.zzz": 1}, ["dsx.schedule.zzz = 1", "unknown", "name or warmup"]),
    "missing key": ({"dsx.train.steps": REMOVE}, ["dsx.train.steps", "needed", "at least 1"]),
    "missing block": ({"dsx.data": REMOVE}, ["dsx.data", "needed", "with sequence_length"]),
    "block is no object": ({"dsx.data": "text"}, ['dsx.data = "text"', "an object"]),
    "quoted number": ({"dsx.parallel.tensor": "2"}, ['dsx.parallel.tensor = "2"', "remove the quotes: 2"]),
    "boolean as number": ({"dsx.train.steps": True}, ["dsx.train.steps = true", "a whole number"]),
    "number as boolean": (
        {"dsx.parallel.sequence_parallel": 1},
        ["dsx.parallel.sequence_parallel = 1", "true or false"],
    ),
    "float as int": ({"dsx.train.log_every": 2.0}, ["dsx.train.log_every = 2.0", "a whole number"]),
    "zero steps": ({"dsx.train.steps": 0}, ["dsx.train.steps = 0", "of at least 1"]),
    "no sequence": ({"dsx.data.sequence_length": 0}, ["dsx.data.sequence_length = 0", "of at least 1"]),
    "all held out": ({"dsx.data.held_out": 1.0}, ["dsx.data.held_out = 1.0", "not including, 1"]),
    "empty output": ({"dsx.train.output": ""}, ['dsx.train.output = ""', "not empty"]),
    "degree zero": ({"dsx.parallel.pipeline": 0}, ["dsx.parallel.pipeline = 0", "at least 1", '"auto"']),
    "misspelt auto": ({"dsx.parallel.tensor": "atuo"}, ['dsx.parallel.tensor = "atuo"', '"auto"']),
    "misspelt schedule": (
        {"dsx.schedule.name": "interleave"},
        ['dsx.schedule.name = "interleave"', 'write "interleaved"'],
    ),
    "unknown schedule": ({"dsx.schedule.name": "zb"}, ['dsx.schedule.name = "zb"', '"gpipe"', '"1f1b"']),
    "unknown recompute": ({"dsx.recompute": "some"}, ['dsx.recompute = "some"', '"selective"']),
    "unknown wandb mode": ({"dsx.tracking.wandb.mode": "on"}, ['dsx.tracking.wandb.mode = "on"', '"online"']),
    "unknown partition": (
        {"dsx.partition.method": "speed"},
        ['dsx.partition.method = "speed"', '"flops"', "type:<regex>"],
    ),
    "partition of nothing": ({"dsx.partition.method": []}, ["dsx.partition.method = []", "a list"]),
    "partition with a zero": (
        {"dsx.partition.method": [3, 0, 4]},
        ["dsx.partition.method[1] = 0", "at least 1"],
    ),
    "unknown resume": ({"dsx.train.resume": "yes"}, ['dsx.train.resume = "yes"', '"never"']),
    # The model.
    "no model": ({"dsx.model": {}}, ["dsx.model = {}", "none of them is given", "exactly one"]),
    "two models": (
        {"dsx.model.path": "some/folder"},
        ["dsx.model", "preset and path are given", "give exactly one"],
    ),
    "modules that are gone": (
        {"dsx.model.family": "gpt2", "dsx.model.implementation": "dsx"},
        ["that an earlier dsx had are gone", "remove the key"],
    ),
    "recompute of attention past the registry": (
        {"dsx.model": {"config": {"model_type": "bloom"}}, "dsx.recompute": "selective"},
        ['dsx.recompute = "selective"', "bloom: no block", "registry of attention", '"full"'],
    ),
    "recompute of attention that goes by its function's name": (
        {"dsx.model": {"config": {"model_type": "falcon"}}, "dsx.recompute": "selective"},
        ["falcon: block 0.self_attention chooses by the name"],
    ),
    "unknown preset": ({"dsx.model.preset": "tinny"}, ['dsx.model.preset = "tinny"', '"tiny"']),
    "ambiguous preset": (
        {"dsx.model": {"preset": "tiny"}},
        [
            'dsx.model.preset = "tiny"',
            "dsx.model.family to gpt2, llama, mistral, qwen2, qwen3, gpt_neox or gemma2",
        ],
    ),
    "preset of the other family": (
        {"dsx.model": {"family": "gpt2", "preset": "llama-3-8b"}},
        ['dsx.model.family = "gpt2"', '"llama"'],
    ),
    "a model without its type": (
        {"dsx.model": {"family": "llama", "config": {"hidden_size": 64}}},
        ['dsx.model.family = "llama"', "no model_type", 'add "model_type": "llama"'],
    ),
    "no such model folder": (
        {"dsx.model": {"path": "/nowhere/model"}},
        [
            'dsx.model.path = "/nowhere/model"',
            "/nowhere/model/config.json",
            "local Hugging Face model folder",
        ],
    ),
    "weights of a preset": ({"dsx.model.weights": "load"}, ['dsx.model.weights = "load"', "dsx.model.path"]),
    "unknown override": (
        {"dsx.model.overrides": {"num_hidden_layer": 8}},
        ["dsx.model.overrides.num_hidden_layer = 8", '"num_hidden_layers"'],
    ),
    "unsupported model": (
        {"dsx.model": {"config": {"model_type": "t5"}}},
        ["dsx.model.config", "t5", "an encoder and a decoder"],
    ),
    "vocabulary below bytes": (
        {"dsx.model.overrides": {"vocab_size": 200}},
        ["vocab_size = 200", "at least 257"],
    ),
    # Degrees.
    "tensor does not divide the world": (
        {"dsx.parallel.tensor": 4},
        ["dsx.parallel.tensor = 4", "world size 6", "use 1 or 2"],
        6,
    ),
    "heads not divisible": (
        {"dsx.parallel.tensor": 3},
        ["dsx.parallel.tensor = 3", "attention heads = 8", "use 1 or 2"],
        6,
    ),
    "kv heads not divisible": (
        {
            "dsx.parallel.tensor": 6,
            "dsx.model.overrides": {"num_attention_heads": 12, "hidden_size": 144, "intermediate_size": 360},
        },
        ["dsx.parallel.tensor = 6", ": key/value heads = 4", "use 1 or 2"],
        6,
    ),
    "mlp not divisible": (
        {"dsx.parallel.tensor": 4, "dsx.model.overrides": {"intermediate_size": 350}},
        ["dsx.parallel.tensor = 4", "MLP width = 350", "use 1 or 2"],
        8,
    ),
    "sequence not divisible": (
        {"dsx.parallel.tensor": 2, "dsx.data.sequence_length": 255},
        ["dsx.parallel.tensor = 2", "sequence length = 255", "use 1", "sequence_parallel = false"],
        2,
    ),
    "pipeline does not divide the world": (
        {"dsx.parallel.pipeline": 3},
        ["dsx.parallel.pipeline = 3", "world size 8", "use 1, 2 or 4"],
        8,
    ),
    "product does not divide the world": (
        {"dsx.parallel.pipeline": 4, "dsx.parallel.tensor": 4},
        ["dsx.parallel.pipeline = 4", "tensor 4 x pipeline 4", "use 1 or 2"],
        8,
    ),
    "more stages than layers": (
        {"dsx.parallel.pipeline": 8},
        ["dsx.parallel.pipeline = 8", "more stages than layers", "has 7", "use 1, 2 or 4"],
        8,
    ),
    "more virtual stages than layers": (
        {"dsx.parallel.pipeline": 2, "dsx.parallel.chunks": 4},
        ["dsx.parallel.chunks = 4", "more stages than layers", "use at most 3"],
        2,
    ),
    "interleaved on too few layers": (
        {"dsx.parallel.pipeline": 4, "dsx.schedule.name": "interleaved"},
        ['dsx.schedule.name = "interleaved"', '"1f1b"'],
        4,
    ),
    "interleaved with one chunk": (
        {"dsx.parallel.pipeline": 2, "dsx.parallel.chunks": 1, "dsx.schedule.name": "interleaved"},
        ["dsx.parallel.chunks = 1", "at least 2 chunks", '"1f1b"'],
        2,
    ),
    "1f1b with chunks": (
        {"dsx.parallel.pipeline": 2, "dsx.parallel.chunks": 2, "dsx.schedule.name": "1f1b"},
        ["dsx.parallel.chunks = 2", "1f1b has one chunk", '"interleaved"'],
        2,
    ),
    "gpipe with chunks": (
        {"dsx.parallel.pipeline": 2, "dsx.parallel.chunks": 2, "dsx.schedule.name": "gpipe"},
        ["dsx.parallel.chunks = 2", "gpipe has one chunk", "use 1"],
        2,
    ),
    "partition of other stages": (
        {"dsx.parallel.pipeline": 2, "dsx.partition.method": [3, 2, 2]},
        ["dsx.partition.method = [3, 2, 2]", "lists 3 stages", "list 4 numbers"],
        2,
    ),
    "partition of other layers": (
        {"dsx.parallel.pipeline": 2, "dsx.parallel.chunks": 1, "dsx.partition.method": [3, 3]},
        ["dsx.partition.method = [3, 3]", "7 layers"],
        2,
    ),
    "partition by no type": (
        {"dsx.parallel.pipeline": 2, "dsx.partition.method": "type:Mamba"},
        ['dsx.partition.method = "type:Mamba"', "Block"],
        2,
    ),
    # Combinations.
    "sequence beyond positions": (
        {"dsx.data.sequence_length": 2048},
        ["dsx.data.sequence_length = 2048", "1024 positions", "at most 1024"],
    ),
    "output of an unknown name": (
        {"dsx.train.output": "runs/a-{layot}"},
        ['dsx.train.output = "runs/a-{layot}"', "{layout}"],
    ),
    "evaluation without text": (
        {"dsx.train.eval_every": 5, "dsx.data.held_out": 0.0},
        ["dsx.train.eval_every = 5", "dsx.data.held_out"],
    ),
    "muon with tensor parallelism": (
        {"optimizer.type": "Muon", "dsx.parallel.tensor": 2},
        ['optimizer.type = "Muon"', "dsx.parallel.tensor = 2", '"AdamW"'],
        2,
    ),
    "hpz with model parallelism": (
        {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}, "dsx.parallel.tensor": 2},
        ["zero_optimization.zero_hpz_partition_size = 2", "use 1"],
        4,
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_refused(name):
    check_refused(*WRONG[name])


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
