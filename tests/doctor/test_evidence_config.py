"""What DeepSpeed's own reading of a config does with what is wrong in it, beside what the doctor says.

DeepSpeedConfig alone shows these, or the object that the value reaches; engines are in
test_evidence_engines.py. What this machine cannot run (fp16, NVMe, a hanging build) is shown where the value
is used: the test says so. Numbers are those of the design's list of checks (section 12).
"""

from __future__ import annotations

import inspect
import json
import os
import time

import pytest

from dsx.doctor import examine
from dsx.doctor.run import check_locks

BATCH = {"train_micro_batch_size_per_gpu": 1}


def theirs(config):
    """DeepSpeed's view of ``config`` with one rank."""
    from deepspeed.runtime.config import DeepSpeedConfig

    return DeepSpeedConfig(json.loads(json.dumps(config)))


def ours(config, **more):
    return {(f.check, ".".join(map(str, f.path))): f for f in examine(config, world_size=1, **more).findings}


# What DeepSpeed refuses at once: number, config, its error, words of its message, the doctor's check and key.
REFUSED = {
    "triple": (
        1,
        {"train_batch_size": 10, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2},
        (AssertionError, "10 != 4 \\* 2 \\* 1"),
        ("batch-triple", "train_batch_size"),
    ),
    "does not divide": (
        1,
        {"train_batch_size": 9, "train_micro_batch_size_per_gpu": 2},
        (AssertionError, "9 != 2 \\* 4 \\* 1"),
        ("batch-triple", "train_batch_size"),
    ),
    "only accumulation": (
        2,
        {"gradient_accumulation_steps": 4},
        (AssertionError, "Either train_batch_size or train_micro_batch_size_per_gpu"),
        ("batch-missing", "train_micro_batch_size_per_gpu"),
    ),
    "auto batch": (3, {"train_batch_size": "auto"}, (TypeError, "str"), ("auto", "train_batch_size")),
    "quoted batch": (5, {"train_batch_size": "8"}, (TypeError, "str"), ("quoted", "train_batch_size")),
    "unknown zero key": (
        6,
        {**BATCH, "zero_optimization": {"stage": 2, "overlap_com": True}},
        (ValueError, "overlap_com\n  Extra inputs"),
        ("unknown-key", "zero_optimization.overlap_com"),
    ),
    "stage 4": (
        6,
        {**BATCH, "zero_optimization": {"stage": 4}},
        (ValueError, "Input should be 0, 1, 2"),
        ("not-a-choice", "zero_optimization.stage"),
    ),
    "bucket 0": (
        18,
        {**BATCH, "zero_optimization": {"stage": 2, "reduce_bucket_size": 0}},
        (ValueError, "greater than 0"),
        ("out-of-range", "zero_optimization.reduce_bucket_size"),
    ),
    "fp16 and bf16": (
        20,
        {**BATCH, "fp16": {"enabled": True}, "bf16": {"enabled": True}},
        (AssertionError, "cannot be simultaneously enabled"),
        ("precision-both", "fp16.enabled"),
    ),
    "bf16 true": (20, {**BATCH, "bf16": True}, (TypeError, "must be a mapping"), ("wrong-type", "bf16")),
    "elasticity": (
        24,
        {**BATCH, "elasticity": {"enabled": False}},
        (Exception, "has been removed"),
        ("removed", "elasticity"),
    ),
    "amp": (24, {**BATCH, "amp": {"enabled": True}}, (Exception, "has been removed"), ("removed", "amp")),
    "compression": (
        24,
        {**BATCH, "compression_training": {}},
        (Exception, "has been removed"),
        ("removed", "compression_training"),
    ),
    "MiCS": (
        24,
        {**BATCH, "zero_optimization": {"stage": 3, "mics_shard_size": 8}},
        (Exception, "has been removed"),
        ("removed", "zero_optimization.mics_shard_size"),
    ),
    "wandb name": (
        25,
        {**BATCH, "wandb": {"enabled": True, "name": "run"}},
        (ValueError, "name\n  Extra inputs"),
        ("unknown-key", "wandb.name"),
    ),
    "wandb entity": (
        25,
        {**BATCH, "wandb": {"enabled": True, "entity": "me"}},
        (ValueError, "entity\n  Extra inputs"),
        ("unknown-key", "wandb.entity"),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    _, config, (error, message), finding = REFUSED[name]
    with pytest.raises(error, match=message):
        theirs(config)
    assert ours(config)[finding].severity == "error"


# What DeepSpeed takes in silence: number, config, what it makes of it, the doctor's check, key, severities.
SILENT = {
    "auto fp16": (
        4,
        {**BATCH, "fp16": {"enabled": "auto"}},
        lambda c: c.float16_config.enabled is False,
        ("auto", "fp16.enabled", {"error"}),
    ),
    "auto stage": (
        4,
        {**BATCH, "zero_optimization": {"stage": "auto"}},
        lambda c: c.zero_optimization_stage == 0,
        ("auto", "zero_optimization.stage", {"error"}),
    ),
    "auto clipping": (
        3,
        {**BATCH, "gradient_clipping": "auto"},
        lambda c: c.gradient_clipping == "auto",
        ("auto", "gradient_clipping", {"error"}),
    ),
    "quoted clipping": (
        5,
        {**BATCH, "gradient_clipping": "1.0"},
        lambda c: c.gradient_clipping == "1.0",
        ("quoted", "gradient_clipping", {"error"}),
    ),
    "unknown key": (
        6,
        {**BATCH, "gradient_cliping": 0.5},
        lambda c: c.gradient_clipping == 1.0,
        ("unknown-key", "gradient_cliping", {"error"}),
    ),
    "key of another level": (
        6,
        {**BATCH, "stage": 3},
        lambda c: c.zero_optimization_stage == 0,
        ("misplaced-key", "stage", {"error"}),
    ),
    "wrong case": (
        6,
        {**BATCH, "Gradient_Clipping": 0.5},
        lambda c: c.gradient_clipping == 1.0,
        ("wrong-case", "Gradient_Clipping", {"error"}),
    ),
    "unknown pipeline key": (
        7,
        {**BATCH, "pipeline": {"activation_checkpoint_intervall": 1}},
        lambda c: c.pipeline["activation_checkpoint_interval"] == 0,
        ("unknown-key", "pipeline.activation_checkpoint_intervall", {"error", "warning"}),
    ),
    "pipeline stages": (
        7,
        {**BATCH, "pipeline": {"stages": 4}},
        lambda c: (
            c.pipeline["stages"] == 4
        ),  # kept, and asked for by nobody: test_dead_keys_are_read_by_nothing
        ("no-effect", "pipeline.stages", {"error", "warning"}),
    ),
    "clipping left out": (
        11,
        BATCH,
        lambda c: c.gradient_clipping == 1.0,
        ("clipping-default", "gradient_clipping", {"note"}),
    ),
    "nvme without a path": (
        16,
        {**BATCH, "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}},
        lambda c: c.zero_config.offload_param.nvme_path is None,
        ("nvme-path", "zero_optimization.offload_param.device", {"error"}),
    ),
    "stage3 key below 3": (
        17,
        {**BATCH, "zero_optimization": {"stage": 2, "stage3_prefetch_bucket_size": 1000}},
        lambda c: c.zero_config.prefetch_bucket_size == 1000,
        ("no-effect", "zero_optimization.stage3_prefetch_bucket_size", {"error", "warning"}),
    ),
    "ZeRO++ below 3": (
        17,
        {**BATCH, "zero_optimization": {"stage": 2, "zero_quantized_weights": True}},
        lambda c: c.zero_config.zero_quantized_weights is True,
        ("no-effect", "zero_optimization.zero_quantized_weights", {"error", "warning"}),
    ),
    "activation checkpointing": (
        21,
        {**BATCH, "activation_checkpointing": {"partitioned_activations": True}},
        lambda c: c.activation_checkpointing_config.partition_activations is False,
        ("unknown-key", "activation_checkpointing.partitioned_activations", {"error", "warning"}),
    ),
    "universal": (
        25,
        {**BATCH, "checkpoint": {"load_universal_checkpoint": True}},
        lambda c: c.load_universal_checkpoint is False,
        ("unknown-key", "checkpoint.load_universal_checkpoint", {"error", "warning"}),
    ),
    "steps_per_print 0": (
        26,
        {**BATCH, "steps_per_print": 0},
        lambda c: c.steps_per_print == 0,
        ("out-of-range", "steps_per_print", {"error"}),
    ),
}


@pytest.mark.parametrize("name", SILENT)
def test_silent(name):
    _, config, holds, (check, key, severities) = SILENT[name]
    assert holds(theirs(config))
    assert ours(config)[check, key].severity in severities


def test_nvme_path_that_is_none():
    """16, by the lines that fail: a run would need a build of aio, and a drive."""
    from deepspeed.runtime.swap_tensor import partitioned_param_swapper
    from deepspeed.runtime.zero import stage3

    assert "os.path.join(self.swap_config.nvme_path, " in inspect.getsource(partitioned_param_swapper)
    assert "os.path.join(offload_optimizer_config.nvme_path, " in inspect.getsource(stage3)
    with pytest.raises(TypeError, match="NoneType"):
        os.path.join(None, "zero_stage_3")  # noqa: PTH118 (as DeepSpeed does)


def test_allgather_bucket_does_not_reach_stage_3():
    """18: the optimizer of ZeRO-3 has no such parameter, those of the other stages have."""
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    assert "allgather_bucket_size" in inspect.signature(DeepSpeedZeroOptimizer).parameters
    assert "allgather_bucket_size" not in inspect.signature(DeepSpeedZeroOptimizer_Stage3).parameters
    config = {**BATCH, "zero_optimization": {"stage": 3, "allgather_bucket_size": 1000}}
    assert ("no-effect", "zero_optimization.allgather_bucket_size") in ours(config)


def test_fp16_ends_at_the_floor_of_the_loss_scale(monkeypatch):
    """19, by the scaler that the config describes, since a CPU has no fp16: overflow at 1 is an error."""
    import torch
    from deepspeed.runtime.fp16 import loss_scaler

    monkeypatch.setattr(loss_scaler.dist, "get_rank", lambda: 1)  # it asks who may print
    config = {**BATCH, "fp16": {"enabled": True, "initial_scale_power": 1, "hysteresis": 1}}
    arguments = theirs(config).float16_config.dynamic_loss_scale_args()
    scaler = loss_scaler.CreateLossScaler(torch.half, 0, dynamic_scaling=True, dynamic_loss_args=arguments)
    scaler.update_scale(overflow=True)
    assert scaler.cur_scale == 1
    with pytest.raises(Exception, match="already at minimum"):
        scaler.update_scale(overflow=True)
    assert ours(config)["loss-scale", "fp16.enabled"].severity == "note"


def test_comments_are_taken_by_deepspeed_and_by_no_json_parser(tmp_path):
    """26"""
    from deepspeed.runtime.config import DeepSpeedConfig

    file = tmp_path / "config.json"
    file.write_text('{\n  # a comment\n  "train_micro_batch_size_per_gpu": 1\n}\n')
    assert DeepSpeedConfig(str(file)).train_batch_size == 1
    with pytest.raises(json.JSONDecodeError):
        json.loads(file.read_text())
    found = {finding.check: finding for finding in examine(file).findings}
    assert found["syntax"].severity == "note"


def test_duplicates_are_refused(tmp_path):
    """26: the last one would win in JSON."""
    from deepspeed.runtime.config import DeepSpeedConfig

    file = tmp_path / "config.json"
    file.write_text('{"train_micro_batch_size_per_gpu": 1, "train_micro_batch_size_per_gpu": 2}')
    with pytest.raises(ValueError, match="Duplicate keys"):
        DeepSpeedConfig(str(file))
    assert any(finding.check == "duplicate-key" for finding in examine(file).errors)


def test_a_lock_that_is_left_makes_a_build_wait(tmp_path):
    """26, by the baton that torch's cpp_extension takes: with the file there it is not to be had, ever."""
    from torch.utils.file_baton import FileBaton

    lock = tmp_path / "lock"
    first = FileBaton(str(lock))
    assert first.try_acquire()
    os.close(first.fd)  # a killed build leaves the file
    assert lock.exists()
    assert not FileBaton(str(lock)).try_acquire()
    assert "while os.path.exists" in inspect.getsource(FileBaton.wait)
    (tmp_path / "fused_adam").mkdir()
    lock.rename(tmp_path / "fused_adam" / "lock")
    (finding,) = check_locks(tmp_path, now_seconds=time.time() + 3600)
    assert (finding.check, finding.severity) == ("extensions-lock", "warning")
    assert "lock is 60 minutes old and no process of this machine builds there" in finding.why
    building = FileBaton(str(tmp_path / "fused_lion" / "lock"))
    (tmp_path / "fused_lion").mkdir()
    assert building.try_acquire()
    _, alive = check_locks(tmp_path)
    assert alive.severity == "note"
    assert f"process {os.getpid()} builds there" in alive.why
    building.release()


def test_every_check_of_the_design_has_its_evidence():
    from test_evidence_engines import CASES

    shown = {case[0] for case in (*CASES.values(), *REFUSED.values(), *SILENT.values())}
    # 0: not of that list.
    assert shown | {0, 18, 19} == set(range(27))
