"""What a family keeps in fp32 beside bf16: estimates against the tensors of real ranks."""

from __future__ import annotations

import pytest

import ranks
from dsx.config.resolve import resolve
from dsx.memory.estimate import estimate
from dsx.memory.job import job_of
from float32_families import FAMILIES
from often import often

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "bf16": {"enabled": True},
    "zero_force_ds_cpu_optimizer": False,
    "zero_optimization": {"reduce_bucket_size": 100_000},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "dsx": {
        "model": {"config": {**FAMILIES["ernie4_5_moe"], "model_type": "ernie4_5_moe", "vocab_size": 300}},
        "data": {"sequence_length": 64},
        "train": {"steps": 2, "output": "runs/float32"},
        "memory_check": "off",
    },
}
OFFLOAD = "zero_optimization.offload_optimizer.device=cpu"
CASES = {
    "ZeRO-3": ["zero_optimization.stage=3"],
    "ZeRO-0": ["zero_optimization.stage=0"],
    "ZeRO-1, offloaded": ["zero_optimization.stage=1", OFFLOAD],
    "ZeRO-2": ["zero_optimization.stage=2"],
    "ZeRO-2, offloaded": ["zero_optimization.stage=2", OFFLOAD],
    "ZeRO-3, offloaded": [
        "zero_optimization.stage=3",
        OFFLOAD,
        "zero_optimization.offload_param.device=cpu",
    ],
    "ZeRO-3, sums in fp32": ["zero_optimization.stage=3", "data_types.grad_accum_dtype=fp32"],
    "ZeRO-3, sent in fp32": ["zero_optimization.stage=3", "communication_data_type=fp32"],
    "BF16_Optimizer": ["zero_optimization.stage=1", "data_types.grad_accum_dtype=fp32"],
    "tensor": ["zero_optimization.stage=1", "dsx.parallel.tensor=2"],
    "pipeline": ["zero_optimization.stage=2", "dsx.parallel.pipeline=2"],
}


def counted(_rank, world_size, sets):
    """Peaks of this rank's phases."""
    from meta_engine.run import measure

    return measure(resolve(CONFIG, world_size=world_size, overrides=sets)).phases


@pytest.mark.parametrize("name", often(CASES, 5))
def test_peaks_are_those_that_are_estimated(name):
    config = resolve(CONFIG, world_size=2, overrides=CASES[name])
    real = ranks.run(counted, 2, CASES[name])
    found = {phase.name: phase.peak_bytes for phase in estimate(job_of(config, device="cpu"), 0).phases}
    for phase in ("engine", "step 1", "step 2"):
        least = min(each[phase] for each in real)  # gloo's threads let go of what they sent whenever they run
        assert found[phase] == pytest.approx(least, rel=0.001), phase
