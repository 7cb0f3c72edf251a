"""The ledger of ZeRO-1 and 2 with the optimizer on the host against DeepSpeed on paper, both sides of it.

And of parameters that are flattened on the host, because the device has no room for two copies of them.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from dsx.config.resolve import resolve
from dsx.memory.estimate import estimate
from dsx.memory.job import job_of
from meta_engine import programs
from often import often

RANK, WORLD = 1, 4

# Clipped: the norm, a number on the device, scales gradients that are on the host.
CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 1.0,
    "bf16": {"enabled": True},
    "zero_force_ds_cpu_optimizer": False,
    "zero_optimization": {
        "reduce_bucket_size": 20000,
        "offload_optimizer": {"device": "cpu", "pin_memory": False},
    },
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "dsx": {
        "model": {"family": "gpt2", "preset": "tiny"},
        "parallel": {"pipeline": 2, "tensor": 1},
        "data": {"sequence_length": 32},
        "train": {"steps": 2, "output": "runs/paper"},
    },
}

# What is set, and whether the device is short of memory.
CASES = {
    "zero1": (["zero_optimization.stage=1", "data_types.grad_accum_dtype=fp32"], False),
    "zero2": (["zero_optimization.stage=2", "dsx.schedule.name=zb_h1"], False),
    "zero2_once": (["zero_optimization.stage=2", "dsx.zero.reduce=step"], False),
    "zero2_one_micro_batch": (["zero_optimization.stage=2", "gradient_accumulation_steps=1"], False),
    "zero2_short": (["zero_optimization.stage=2"], True),
    "zero1_on_the_device_short": (
        ["zero_optimization.stage=1", "zero_optimization.offload_optimizer=null"],
        True,
    ),
    "zero1_fp32_sums_short": (
        [
            "zero_optimization.stage=1",
            "zero_optimization.offload_optimizer=null",
            "data_types.grad_accum_dtype=fp32",
        ],
        True,
    ),
}


def too_little(job):
    """Room for the parameters and half a flat copy of the largest group."""
    plan = job.layout.zero_plan(job.layout.mesh.coords(RANK)["pp"])
    flat = max(2 * buffer.numel * plan.dp for buffer in plan.buffers(0))
    return next(p.peak_bytes for p in estimate(job, RANK).phases if p.name == "build") + flat // 2


@pytest.mark.parametrize("name", often(CASES, 2))
def test_device_and_host_hold_what_the_trace_holds(name):
    sets, short = CASES[name]
    job = job_of(resolve(CONFIG, world_size=WORLD, overrides=sets))
    usual = estimate(job, RANK)
    job = replace(job, capacity_bytes=too_little(job) if short else None)
    real = programs.traced(CONFIG, RANK, WORLD, sets, host=True, capacity_bytes=job.capacity_bytes)
    if job.states.offload is not None:
        job = replace(job, states=replace(job.states, offload=replace(job.states.offload, rounds=False)))
    found = estimate(job, RANK)
    # What is left out: scalars, at 512 bytes each; token ids on the host.
    for phase in found.phases:
        assert real.phases[phase.name] - phase.peak_bytes in range(-8 * 512, 16 * 512)
    assert max(real.host_phases.values()) - found.host_bytes in range(10_000)
    at = [phase.name for phase in found.phases].index("engine")
    assert (found.phases[at].peak_bytes < usual.phases[at].peak_bytes) == (name == "zero2_short")
    # BF16_Optimizer flattens on the device, come what may.
    assert (found.host_bytes > 0) == ("fp32_sums" not in name)
