"""Wrong configs: one message each, with the key, the value and the fix."""

from __future__ import annotations

import json
from pathlib import Path

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
    "unknown far key": ({"dsx.schedule.zzz": 1}, 1, ["dsx.schedule.zzz = 1", "use name"]),
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
        {"dsx.partition.method": "time"},
        1,
        ['dsx.partition.method = "time"', '"flops"', "type:<regex>"],
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
        ['dsx.model.preset = "tiny"', "dsx.model.family to gpt2 or llama"],
    ),
    "preset of the other family": (
        {"dsx.model": {"family": "gpt2", "preset": "llama-3-8b"}},
        1,
        ['dsx.model.family = "gpt2"', '"llama"'],
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
        {"dsx.model": {"config": {"model_type": "mamba"}}},
        1,
        ["dsx.model.config", "mamba", "gpt2"],
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
        {"dsx.parallel.tensor": 8},
        8,
        ["dsx.parallel.tensor = 8", "key/value heads = 4", "use 1, 2 or 4"],
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
    # DeepSpeed's batch keys.
    "batch triple": (
        {"train_batch_size": 20, "dsx.parallel": {"tensor": 1, "pipeline": 1}},
        2,
        ["train_batch_size = 20", "2 data-parallel ranks", "train_batch_size 16 = ", "steps 5 x 2"],
    ),
    "batch does not divide": (
        {"train_batch_size": 9, "gradient_accumulation_steps": REMOVE},
        2,
        ["train_batch_size = 9", "train_micro_batch_size_per_gpu = 2", "train_batch_size 8 = "],
    ),
    "no batch": (
        {"train_micro_batch_size_per_gpu": REMOVE},
        1,
        ["only gradient_accumulation_steps = 4", "write train_micro_batch_size_per_gpu"],
    ),
    "batch of zero": (
        {"train_micro_batch_size_per_gpu": 0},
        1,
        ["train_micro_batch_size_per_gpu = 0", "use 1 or more"],
    ),
    # DeepSpeed's other keys.
    "auto batch": (
        {"train_batch_size": "auto"},
        1,
        ['train_batch_size = "auto"', "Trainer", "leave the key out"],
    ),
    "auto stage": (
        {"zero_optimization.stage": "auto"},
        1,
        ['zero_optimization.stage = "auto"', "write the value"],
    ),
    "auto learning rate": ({"optimizer.params.lr": "auto"}, 1, ['optimizer.params.lr = "auto"']),
    "quoted learning rate": (
        {"optimizer.params.lr": "3e-4"},
        1,
        ['optimizer.params.lr = "3e-4"', "write 3e-4"],
    ),
    "negative learning rate": ({"optimizer.params.lr": -1}, 1, ["optimizer.params.lr = -1", "3e-4"]),
    "quoted clipping": ({"gradient_clipping": "1.0"}, 1, ['gradient_clipping = "1.0"', "write 1.0"]),
    "negative clipping": ({"gradient_clipping": -1.0}, 1, ["gradient_clipping = -1.0", "0 for none"]),
    "unknown deepspeed key": (
        {"gradient_cliping": 1.0},
        1,
        ["gradient_cliping = 1.0", "ignore", '"gradient_clipping"'],
    ),
    "dsx key at the top": ({"dxs": 1}, 1, ["dxs = 1", 'write "dsx"']),
    "removed block": ({"elasticity": {}}, 1, ["elasticity = {}", "0.19.8 has removed", "batch keys"]),
    "amp": ({"amp": {"enabled": True}}, 1, ["amp", "removed", "use bf16"]),
    "pipeline block": ({"pipeline": {"stages": 2}}, 1, ["pipeline", "dsx.parallel.pipeline"]),
    "autotp": (
        {"tensor_parallel": {"autotp_size": 2}},
        2,
        ["tensor_parallel", '"autotp_size": 2', "dsx.parallel.tensor"],
    ),
    "activation checkpointing": (
        {"activation_checkpointing": {"cpu_checkpointing": True}},
        1,
        ["activation_checkpointing", "dsx.recompute"],
    ),
    "autocast": ({"torch_autocast": {"enabled": True}}, 1, ["torch_autocast.enabled = true", '"bf16"']),
    "fp16": ({"fp16": {"enabled": True}}, 1, ["fp16.enabled = true", '"bf16": {"enabled": true}']),
    "fp16 and bf16": (
        {"fp16": {"enabled": True}, "bf16": {"enabled": True}},
        1,
        ["fp16.enabled = true", "bf16 is enabled too", "remove fp16"],
    ),
    "bf16 true": ({"bf16": True}, 1, ["bf16 = true", '"bf16": {"enabled": true}']),
    "unknown bf16 key": ({"bf16": {"enable": True}}, 1, ["bf16.enable = true", '"enabled"']),
    "stage 4": ({"zero_optimization.stage": 4}, 1, ["zero_optimization.stage = 4", "0, 1, 2 or 3"]),
    "old zero": ({"zero_optimization": True}, 1, ["zero_optimization = true", '{"stage": 3}']),
    "unknown zero key": (
        {"zero_optimization.overlap_com": True},
        1,
        ["zero_optimization.overlap_com = true", '"overlap_comm"'],
    ),
    "removed zero key": (
        {"zero_optimization.mics_shard_size": 2},
        1,
        ["zero_optimization.mics_shard_size = 2", "removed"],
    ),
    "offload_param below 3": (
        {"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}},
        1,
        ["zero_optimization.offload_param.device", "stage = 2", "stage to 3"],
    ),
    "offload_optimizer at 0": (
        {"zero_optimization": {"stage": 0, "offload_optimizer": {"device": "cpu"}}},
        1,
        ["zero_optimization.offload_optimizer.device", "stage = 0", "1, 2 or 3"],
    ),
    "nvme without path": (
        {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}},
        1,
        ['offload_param.device = "nvme"', "set zero_optimization.offload_param.nvme_path"],
    ),
    "no optimizer": ({"optimizer": REMOVE}, 1, ["optimizer", "has none", '"AdamW"']),
    "unknown optimizer": ({"optimizer.type": "AdamV"}, 1, ['optimizer.type = "AdamV"', '"Adam']),
    "removed optimizer": (
        {"optimizer.type": "OneBitAdam"},
        1,
        ['optimizer.type = "OneBitAdam"', "removed", '"AdamW"'],
    ),
    "clipping in the optimizer": (
        {"optimizer.params.max_grad_norm": 1.0},
        1,
        ["optimizer.params.max_grad_norm = 1.0", '"gradient_clipping": 1.0'],
    ),
    "untested optimizer": (
        {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}},
        1,
        ['optimizer.type = "SGD"', "stage = 1", '"zero_allow_untested_optimizer": true'],
    ),
    "unknown scheduler": (
        {"scheduler": {"type": "WarmupCosine"}},
        1,
        ['scheduler.type = "WarmupCosine"', '"WarmupCosineLR"'],
    ),
    "scheduler parameter": (
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_steps": 5}}},
        1,
        ["scheduler.params.warmup_steps = 5", '"warmup_num_steps"'],
    ),
    "scheduler without length": (
        {"scheduler": {"type": "WarmupCosineLR", "params": {}}},
        1,
        ["scheduler.params.total_num_steps", "needs it"],
    ),
    "no printing": ({"steps_per_print": 0}, 1, ["steps_per_print = 0", "leave it out"]),
}


@pytest.mark.parametrize("name", WRONG)
def test_refusal_names_key_value_and_fix(name):
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


def test_all_problems_of_deepspeeds_keys_come_at_once():
    with pytest.raises(ConfigError) as caught:
        resolve(changed({"fp16": {"enabled": True}, "steps_per_prnt": 5}), world_size=1)
    assert "2 problems" in str(caught.value)
    assert "fp16.enabled" in str(caught.value)
    assert '"steps_per_print"' in str(caught.value)


# Files and --set items.


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


def test_missing_file(tmp_path):
    with pytest.raises(ConfigError, match=r"absent\.json: there is no such file.*Fix"):
        resolve(tmp_path / "absent.json", world_size=1)


def test_folder_instead_of_file(tmp_path):
    with pytest.raises(ConfigError, match=r"a folder.*give the JSON file"):
        resolve(tmp_path, world_size=1)


def test_binary_file(tmp_path):
    (tmp_path / "x.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"x\.json: it cannot be read"):
        resolve(tmp_path / "x.json", world_size=1)


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
    with pytest.raises(ConfigError, match=r"dsx\.model\.weights.*no \*\.safetensors.*random"):
        resolve(changed({"dsx.model": model}), world_size=1)


def test_model_folder_with_a_broken_config(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"dsx\.model\.path.*cannot be read"):
        resolve(changed({"dsx.model": {"path": str(tmp_path)}}), world_size=1)
