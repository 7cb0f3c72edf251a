"""Keys of DeepSpeed's: wrong ones, one message each; names of optimizers and batches against its own."""

from __future__ import annotations

import json
import pickle
import re
from pathlib import Path

import pytest
import torch
from sample_config import REMOVE, changed, check_refused

from dsx.config.batch import resolve_batch
from dsx.config.refusals import names, refused
from dsx.config.resolve import resolve
from dsx.errors import ConfigError
from loaded import loaded_by

# (edits, words that the message must hold: key, value, fix; world size, 1 if left out)
WRONG = {
    # DeepSpeed's batch keys.
    "batch triple": (
        {"train_batch_size": 20, "dsx.parallel": {"tensor": 1, "pipeline": 1}},
        ["train_batch_size = 20", "2 data-parallel ranks", "train_batch_size 16 = ", "steps 5 x 2"],
        2,
    ),
    "batch does not divide": (
        {"train_batch_size": 9, "gradient_accumulation_steps": REMOVE},
        ["train_batch_size = 9", "train_micro_batch_size_per_gpu = 2", "train_batch_size 8 = "],
        2,
    ),
    "no batch": (
        {"train_micro_batch_size_per_gpu": REMOVE},
        ["only gradient_accumulation_steps = 4", "write train_micro_batch_size_per_gpu"],
    ),
    "batch of zero": (
        {"train_micro_batch_size_per_gpu": 0},
        ["train_micro_batch_size_per_gpu = 0", "at least 1"],
    ),
    # DeepSpeed's other keys.
    "auto batch": (
        {"train_batch_size": "auto"},
        ['train_batch_size = "auto"', "Trainer", "leave the key out"],
    ),
    "auto stage": (
        {"zero_optimization.stage": "auto"},
        ['zero_optimization.stage = "auto"', "write the value"],
    ),
    "auto learning rate": ({"optimizer.params.lr": "auto"}, ['optimizer.params.lr = "auto"']),
    "quoted learning rate": ({"optimizer.params.lr": "3e-4"}, ['optimizer.params.lr = "3e-4"', "write 3e-4"]),
    "negative learning rate": ({"optimizer.params.lr": -1}, ["optimizer.params.lr = -1", "at least 0"]),
    "quoted clipping": ({"gradient_clipping": "1.0"}, ['gradient_clipping = "1.0"', "write 1.0"]),
    "negative clipping": ({"gradient_clipping": -1.0}, ["gradient_clipping = -1.0", "0 for no clipping"]),
    "unknown deepspeed key": (
        {"gradient_cliping": 1.0},
        ["gradient_cliping = 1.0", "ignore", '"gradient_clipping"'],
    ),
    "dsx key at the top": ({"dxs": 1}, ["dxs = 1", 'write "dsx"']),
    "removed block": ({"elasticity": {}}, ["elasticity = {}", "0.19.8 has removed", "batch keys"]),
    "amp": ({"amp": {"enabled": True}}, ["amp", "removed", "use bf16"]),
    "pipeline block": ({"pipeline": {"stages": 2}}, ["pipeline", "dsx.parallel.pipeline"]),
    "autotp": (
        {"tensor_parallel": {"autotp_size": 2}},
        ["tensor_parallel", '"autotp_size": 2', "dsx.parallel.tensor"],
        2,
    ),
    "activation checkpointing": (
        {"activation_checkpointing": {"cpu_checkpointing": True}},
        ["activation_checkpointing", "dsx.recompute"],
    ),
    "autocast": ({"torch_autocast": {"enabled": True}}, ["torch_autocast.enabled = true", '"bf16"']),
    "fp16 masters": (
        {"fp16": {"enabled": True, "fp16_master_weights_and_grads": True}},
        ["fp16.fp16_master_weights_and_grads = true", "in fp32", "remove it"],
    ),
    "scale below the least": (
        {"fp16": {"enabled": True, "initial_scale_power": 2, "min_loss_scale": 8}},
        ["fp16.min_loss_scale = 8", "above the initial scale 2^2"],
    ),
    "fp16 and bf16": (
        {"fp16": {"enabled": True}, "bf16": {"enabled": True}},
        ["fp16.enabled = true", "fp16 and bf16 are both enabled", "keep bf16"],
    ),
    "bf16 true": ({"bf16": True}, ["bf16 = true", '"bf16": {"enabled": true}']),
    "unknown bf16 key": ({"bf16": {"enable": True}}, ["bf16.enable = true", '"enabled"']),
    "stage 4": ({"zero_optimization.stage": 4}, ["zero_optimization.stage = 4", "0, 1, 2 or 3"]),
    "old zero": ({"zero_optimization": True}, ["zero_optimization = true", '{"stage": 3}']),
    "unknown zero key": (
        {"zero_optimization.overlap_com": True},
        ["zero_optimization.overlap_com = true", '"overlap_comm"'],
    ),
    "removed zero key": (
        {"zero_optimization.mics_shard_size": 2},
        ["zero_optimization.mics_shard_size = 2", "removed"],
    ),
    "offload_param below 3": (
        {"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}},
        ["zero_optimization.offload_param.device", "stage = 2", "stage to 3"],
    ),
    "offload_optimizer at 0": (
        {"zero_optimization": {"stage": 0, "offload_optimizer": {"device": "cpu"}}},
        ["zero_optimization.offload_optimizer.device", "stage = 0", "1, 2 or 3"],
    ),
    "nvme without path": (
        {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}},
        ['offload_param.device = "nvme"', "set zero_optimization.offload_param.nvme_path"],
    ),
    "no optimizer": ({"optimizer": REMOVE}, ["optimizer", "has none", '"AdamW"']),
    "unknown optimizer": ({"optimizer.type": "AdamV"}, ['optimizer.type = "AdamV"', '"Adam']),
    "removed optimizer": (
        {"optimizer.type": "OneBitAdam"},
        ['optimizer.type = "OneBitAdam"', "removed", '"AdamW"'],
    ),
    "clipping in the optimizer": (
        {"optimizer.params.max_grad_norm": 1.0},
        ["optimizer.params.max_grad_norm = 1.0", '"gradient_clipping": 1.0'],
    ),
    "untested optimizer": (
        {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}},
        ['optimizer.type = "SGD"', "stage = 1", '"zero_allow_untested_optimizer": true'],
    ),
    "unknown scheduler": (
        {"scheduler": {"type": "WarmupCosine"}},
        ['scheduler.type = "WarmupCosine"', '"WarmupCosineLR"'],
    ),
    "scheduler parameter": (
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_steps": 5}}},
        ["scheduler.params.warmup_steps = 5", '"warmup_num_steps"'],
    ),
    "scheduler without length": (
        {"scheduler": {"type": "WarmupCosineLR", "params": {}}},
        ["scheduler.params.total_num_steps", "needs it"],
    ),
    "no printing": ({"steps_per_print": 0}, ["steps_per_print = 0", "leave it out"]),
}


@pytest.mark.parametrize("name", WRONG)
def test_refused(name):
    check_refused(*WRONG[name])


def test_all_problems_of_deepspeeds_keys_come_at_once():
    with pytest.raises(ConfigError) as caught:
        resolve(changed({"sequence_parallel_size": 2, "steps_per_prnt": 5}), world_size=1)
    assert "2 problems" in str(caught.value)
    assert "sequence_parallel_size" in str(caught.value)
    assert '"steps_per_print"' in str(caught.value)


def told(rule):
    """A row of dsx's own as the guide has it; a number that only a run knows is left out."""
    why = re.sub(r" = \{[\w.]+\}", "", rule.why)
    return f"| `{rule.key}` | {why} | {rule.fix} |"


def test_the_guide_lists_what_dsx_itself_refuses():
    """docs/guides/config.md has the rows of the table, in its order, and no others."""
    text = (Path(__file__).parents[2] / "docs/guides/config.md").read_text(encoding="utf-8")
    table = text.split("| key of DeepSpeed's | why | instead |\n|---|---|---|\n")[1].split("\n\n")[0]
    own = [rule for rule in refused() if rule.by != "deepspeed"]
    assert table.rstrip("\n").split("\n") == list(dict.fromkeys(map(told, own)))


def test_a_right_config_is_judged_without_the_doctor():
    """The doctor knows what may be meant by a wrong key, and a right config has none."""
    program = (
        "import json; from dsx.config.resolve import resolve; resolve(json.loads(sys.argv[1]), world_size=2)"
    )
    _, loaded = loaded_by(program, json.dumps(changed({})))
    assert not [name for name in loaded if name.startswith("dsx.doctor")]


@pytest.mark.parametrize(
    ("edits", "key"),
    [
        ({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}}, "zero_hpz_partition_size"),
        ({"zero_optimization": {"stage": 3, "zero_quantized_gradients": True}}, "zero_quantized_gradients"),
        ({"zero_optimization.stage": 0, "optimizer.type": "Lamb"}, "type"),
    ],
)
def test_what_the_mesh_decides(edits, key):
    """Right on data-parallel ranks alone, and refused before anything is built where tensors are cut."""
    if "optimizer.type" in edits:
        edits |= {"zero_allow_untested_optimizer": True, "optimizer.params": {"lr": 1e-3}}
    for tensor, context, legal in ((1, 1, True), (1, 2, True), (2, 1, False)):
        config = changed(edits | {"dsx.parallel": {"tensor": tensor, "pipeline": 1, "context": context}})
        if legal:
            assert resolve(config, world_size=4).mesh.num_replicas == 4
            continue
        with pytest.raises(ConfigError) as caught:
            resolve(config, world_size=4)
        assert caught.value.path[-1] == key
        assert caught.value.value is not None


def test_an_error_carries_its_key_and_value_to_other_processes():
    with pytest.raises(ConfigError) as caught:
        resolve(changed({"zero_optimization.stage": 4}), world_size=1)
    for error in (caught.value, pickle.loads(pickle.dumps(caught.value))):
        assert (error.path, error.value) == (("zero_optimization", "stage"), 4)
    with pytest.raises(ConfigError) as caught:
        resolve(changed({}) | {"bf16.enabled": True}, world_size=1)
    assert caught.value.path == ("bf16.enabled",)  # one key that has a dot in it


def test_optimizers():
    from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS

    optimizers = {
        name
        for name, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, torch.optim.Optimizer)
    } - {"Optimizer"}
    assert {name.lower() for name in names("deepspeed")} == set(DEEPSPEED_OPTIMIZERS)
    assert optimizers == names("torch")


def test_zero_tested_optimizers():
    from deepspeed.runtime.zero.utils import ZERO_SUPPORTED_OPTIMIZERS

    theirs = {optimizer.__name__.lower() for optimizer in ZERO_SUPPORTED_OPTIMIZERS}
    theirs = {name.removeprefix("deepspeed").removeprefix("zenflow") for name in theirs}
    theirs = {name.removeprefix("cpu").removeprefix("fused") for name in theirs}
    # Muon joins the list inside is_zero_supported_optimizer.
    assert theirs | {"muon"} == names("tested")


def test_every_other_optimizer_is_said_to_be_untested():
    (row,) = [rule for rule in refused() if rule.check == "optimizer-untested"]
    (said,) = [condition.value for condition in row.when if condition.key == "optimizer.type"]
    known = {name.lower() for name in names("deepspeed") | names("torch")}
    assert set(said) == known - names("tested")


@pytest.mark.parametrize("train", [None, 8, 12, 64])
@pytest.mark.parametrize("micro", [None, 1, 3, 4])
@pytest.mark.parametrize("accumulation", [None, 1, 2, 8])
def test_batch_sizes_are_deepspeeds(train, micro, accumulation):
    """One data-parallel rank, where DeepSpeedConfig needs no process group."""
    from deepspeed.runtime.config import DeepSpeedConfig

    given = {
        "train_batch_size": train,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": accumulation,
    }
    given = {key: value for key, value in given.items() if value is not None}
    try:
        theirs = DeepSpeedConfig(dict(given))
    except AssertionError:
        with pytest.raises(ConfigError):
            resolve_batch(given, 1)
    else:
        ours = resolve_batch(given, 1)
        assert ours.train == theirs.train_batch_size
        assert ours.micro == theirs.train_micro_batch_size_per_gpu
        assert ours.accumulation == theirs.gradient_accumulation_steps
