"""Ordinary DeepSpeed JSONs, the Trainer's too, completed by a model."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace

import pytest
from sample_config import AUTO_DECAY
from transformers import LlamaConfig, TrainingArguments
from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

from dsx.config.keys import reference
from dsx.config.ordinary import complete
from dsx.config.resolve import resolve
from dsx.errors import ConfigError
from dsx.models.presets import find_preset

AUTO = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 16},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto", "torch_adam": True},
    },
    "scheduler": AUTO_DECAY,
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": True,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_gather_16bit_weights_on_model_save": "auto",
    },
}


class Theirs(HfTrainerDeepSpeedConfig):
    """transformers' class, with what it inherits from accelerate, which is not installed."""

    def __init__(self, config):
        self.config, self.mismatches = config, []

    def find_config_node(self, key):
        *blocks, last = key.split(".")
        node = self.config
        for block in blocks:
            node = node.get(block)
            if node is None:
                return None, last
        return node, last

    def is_true(self, key):
        node, last = self.find_config_node(key)
        return bool(node and node.get(last))

    def is_auto(self, key):
        node, last = self.find_config_node(key)
        return node is not None and node.get(last) == "auto"

    def is_zero3(self):
        return self.config["zero_optimization"]["stage"] == 3


def test_what_is_auto_becomes_what_the_trainer_makes_of_it():
    """transformers' own filling, with --bf16 as the only argument and 40 steps."""
    defaults = {
        field.name: field.default
        for field in dataclasses.fields(TrainingArguments)
        if field.default is not dataclasses.MISSING
    }
    arguments = SimpleNamespace(**defaults | {"bf16": True}, world_size=1, get_warmup_steps=lambda steps: 0)
    theirs = Theirs(json.loads(json.dumps(AUTO)))
    theirs.trainer_config_process(arguments)
    hf_config = LlamaConfig(**find_preset("llama", "tiny").config)
    theirs.trainer_config_finalize(arguments, SimpleNamespace(config=hf_config), 40)
    ours = complete(AUTO, "llama/tiny", steps=40)
    found = {key: value for key, value in ours.content.items() if key != "dsx"}
    expected = dict(theirs.config)
    del expected["fp16"], expected["train_batch_size"]
    gather = "stage3_gather_16bit_weights_on_model_save"  # not theirs to fill in
    del expected["zero_optimization"][gather], found["zero_optimization"][gather]
    warm_up = expected["scheduler"]["params"]
    # transformers below 5.18 writes 0, which DeepSpeed reads as it reads 1 (lr_schedules.py, WarmupLR).
    warm_up["warmup_num_steps"] = max(1, warm_up["warmup_num_steps"])
    assert found == expected
    run = resolve(ours.content, world_size=2)
    assert (run.global_batch_size, run.mesh.dp, run.zero_stage, run.precision) == (16, 2, 3, "bf16")
    told = {each.key: each.value for each in ours.assumed}
    assert told["train_micro_batch_size_per_gpu"] == 8
    assert told["dsx.data.sequence_length"] == 1024
    assert list(told)[:2] == ["train_micro_batch_size_per_gpu", "gradient_accumulation_steps"]


# The Trainer does not fill these in: they are asked for, or DeepSpeed drops them.
ASKED = {
    "zero_optimization.stage",
    "zero_optimization.offload_param.device",
    "zero_optimization.offload_optimizer.device",
}
DROPPED = {"zero_optimization.offload_param.nvme_path", "zero_optimization.offload_optimizer.nvme_path"}


@pytest.mark.parametrize(
    "key", sorted({key.path for key in reference().rows if key.trainer_auto} - {"train_batch_size"})
)
def test_every_auto_is_filled_in_or_asked_for(key):
    """Of all keys for which dsx check lets the Trainer's "auto" stand."""
    content = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW", "params": {"lr": 5e-5}}}
    content["scheduler"] = {"type": "WarmupDecayLR", "params": {"total_num_steps": 10, "warmup_max_lr": 5e-5}}
    content["zero_optimization"] = {
        "stage": 3,
        "offload_optimizer": {"device": "cpu"},
        "offload_param": {"device": "cpu"},
    }
    node = content
    *blocks, last = key.split(".")
    for block in blocks:
        node = node.setdefault(block, {})
    node[last] = "auto"
    whole = complete(content, "llama/tiny", steps=10)
    if key in ASKED:
        with pytest.raises(ConfigError, match=f'{key} = "auto".*Fix: '):
            resolve(whole.content, world_size=1)
    else:
        resolve(whole.content, world_size=1)
        assert key in DROPPED or '"auto"' not in json.dumps(
            {name: value for name, value in whole.content.items() if name != "dsx"}
        )


@pytest.mark.parametrize(
    ("content", "overrides", "batch", "assumed"),
    [
        ({}, [], (1, 1, 4), {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1}),
        ({}, ["train_batch_size=32"], (8, 1, 32), {}),
        ({}, ["train_micro_batch_size_per_gpu=2"], (2, 1, 8), {}),
        ({"gradient_accumulation_steps": 4}, [], (1, 4, 16), {"train_micro_batch_size_per_gpu": 1}),
        ({"train_batch_size": 32, "gradient_accumulation_steps": "auto"}, [], (8, 1, 32), {}),
        ({"train_batch_size": 32, "train_micro_batch_size_per_gpu": 2}, [], (2, 4, 32), {}),
        (
            {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto"},
            ["gradient_accumulation_steps=2"],
            (8, 2, 64),
            {"train_micro_batch_size_per_gpu": 8},
        ),
    ],
)
def test_the_batch_that_is_assumed_is_told(content, overrides, batch, assumed):
    whole = complete(content, "gpt2/tiny", overrides=overrides)
    run = resolve(whole.content, world_size=4)
    assert (run.micro_batch_size, run.accumulation, run.global_batch_size) == batch
    told = {each.key: each.value for each in whole.assumed}
    assert {key: value for key, value in told.items() if "batch" in key or "accumulation" in key} == assumed


@pytest.mark.parametrize(
    ("content", "precision"),
    [
        ({"bf16": {"enabled": "auto"}}, "bf16"),
        ({"fp16": {"enabled": "auto"}}, "fp16"),
        ({"bf16": {"enabled": False}, "fp16": {"enabled": "auto"}}, "fp16"),
        ({"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}, "bf16"),
        ({"bf16": {"enabled": "auto"}, "fp16": {"enabled": True}}, "fp16"),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": "auto"}}, "bf16"),
        ({"steps_per_print": 10}, "fp32"),  # as DeepSpeed does
        ({}, "bf16"),
    ],
)
def test_precision(content, precision):
    assert resolve(complete(content, "gpt2/tiny").content, world_size=1).precision == precision


def test_a_dsx_block_stays_as_it_is_but_for_the_model():
    block = {
        "model": {"preset": "tiny", "family": "gpt2"},
        "data": {"sequence_length": 8},
        "train": {"steps": 1, "output": "x"},
    }
    content = {"train_batch_size": "auto", "dsx": block}
    assert complete(content, None).content == content
    whole = complete(content, "llama/tiny")
    assert whole.content["dsx"] == block | {"model": whole.content["dsx"]["model"]}
    assert whole.content["dsx"]["model"]["family"] == "llama"
    assert whole.content["train_batch_size"] == "auto"
    assert whole.assumed == ()
    assert block["model"]["family"] == "gpt2"  # the caller's is not written to


@pytest.mark.parametrize("block", [{"data": 5}, {"train": []}, {"parallel": "x"}])
def test_blocks_that_are_none_are_left_to_the_strict_reader(block):
    (key, value) = next(iter(block.items()))
    whole = complete({}, "gpt2/tiny", overrides=[f"dsx.{key}={json.dumps(value)}"])
    with pytest.raises(ConfigError, match=rf"dsx\.{key}"):
        resolve(whole.content, world_size=1)


def test_without_a_block_a_model_is_needed():
    with pytest.raises(ConfigError, match=r"ds\.json: dsx: .*give --model"):
        complete({}, None, where="ds.json")
