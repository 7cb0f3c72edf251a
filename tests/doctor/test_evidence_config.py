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
from evidence import ENGINES, REFUSED, SILENT

from dsx.doctor import examine
from dsx.doctor.run import check_locks

BATCH = {"train_micro_batch_size_per_gpu": 1}


def theirs(config):
    """DeepSpeed's view of ``config`` with one rank."""
    from deepspeed.runtime.config import DeepSpeedConfig

    return DeepSpeedConfig(json.loads(json.dumps(config)))


def ours(config, **more):
    return {(f.check, ".".join(map(str, f.path))): f for f in examine(config, world_size=1, **more).findings}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    _, error, words, check, key, config = REFUSED[name]
    with pytest.raises(Exception, match=words) as caught:
        theirs(config)
    assert type(caught.value).__name__ == error
    assert ours(config)[check, key].severity == "error"


@pytest.mark.parametrize("name", SILENT)
def test_silent(name):
    _, kept, may_be, check, key, config = SILENT[name]
    path, _, value = kept.partition(" = ")
    made = theirs(config)
    for word in path.split("."):
        made = made[word] if isinstance(made, dict) else getattr(made, word)
    assert json.dumps(made) == value
    assert ours(config)[check, key].severity in may_be.split(" or ")


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
    shown = {case[0] for case in (*REFUSED.values(), *SILENT.values())}
    shown |= {case.number for case in ENGINES.values()}
    # 0: not of that list.
    assert shown | {0, 18, 19} == set(range(27))
