"""A config as :mod:`dsx.plan.memory` takes it."""

from __future__ import annotations

from dsx.config.memory_offload import offload_of
from dsx.config.memory_optimizer import optimizer_of
from dsx.config.memory_unlearned import require_learned
from dsx.config.memory_zero3 import elements, gathering_of
from dsx.config.problems import at
from dsx.config.run import RunConfig
from dsx.errors import ConfigError
from dsx.plan.memory.estimate import Job
from dsx.plan.memory.ops import DeviceKind
from dsx.plan.memory.states import StateSettings
from dsx.plan.memory.steady import enough_micro_batches
from dsx.plan.transfers import lower
from dsx.spec.layout import Layout

_WIDTHS = {"fp32": 4, "float32": 4, "fp16": 2, "float16": 2, "bf16": 2, "bfloat16": 2}
"""Bytes of DeepSpeed's names of dtypes."""


def job_of(config: RunConfig, *, device: DeviceKind = "cuda", capacity_bytes: int | None = None) -> Job:
    """The run that ``config`` describes, on a kind of device.

    Args:
        config: Resolved.
        device: Whose code paths it takes.
        capacity_bytes: What a device has for tensors: ZeRO-1 and 2 flatten parameters on the host if it is
            too little for two copies. None for enough.

    Raises:
        ConfigError: Something whose memory dsx does not know: an optimizer that nobody has declared
            (``dsx.optimizer_bytes``), NVMe.
    """
    mesh, stages, recompute = config.mesh, config.stage_map, config.dsx.recompute
    if recompute == "auto":
        raise ConfigError(
            at("dsx.recompute", recompute),
            "what is computed again is chosen when the layers have been measured, at the start of a run",
            'use "none", "selective" or "full" for the estimate',
        )
    require_learned(config)
    count = enough_micro_batches(config.program, stages.num_ranks, config.accumulation)
    schedule = config.program.build(stages.num_ranks, stages.num_chunks, count)
    return Job(
        model=config.model,
        layout=Layout(mesh=mesh, stages=stages, params=config.param_specs, zero_stage=config.zero_stage),
        schedule=lower(schedule),
        left_out=config.accumulation - count,
        micro_batch=config.micro_batch_size,
        sequence_length=config.sequence_length,
        sequence_parallel=config.dsx.parallel.sequence_parallel,
        recompute=recompute,
        states=_states(config, device),
        device=device,
        capacity_bytes=capacity_bytes,
    )


def _states(config: RunConfig, device: DeviceKind) -> StateSettings:
    deepspeed = config.deepspeed
    zero = deepspeed.get("zero_optimization", {})
    chosen = optimizer_of(deepspeed["optimizer"], device, config.dsx.optimizer_bytes)
    width = 2 if config.precision == "bf16" else 4
    bucket = elements(zero, "reduce_bucket_size")
    accumulate = deepspeed.get("data_types", {}).get("grad_accum_dtype")
    return StateSettings(
        width=width,
        accumulate=width if accumulate is None else _WIDTHS[accumulate],
        optimizer=chosen.rule,
        bucket=500_000_000 if bucket is None else bucket,
        communication=_WIDTHS.get(deepspeed.get("communication_data_type", "")),
        reduce=config.dsx.zero.reduce,
        offload=offload_of(zero, deepspeed["optimizer"], config.dsx.optimizer_bytes, device),
        fused=chosen.fused,
        gathering=gathering_of(zero, config.dsx.zero.keep_gathered_bytes) if config.zero_stage == 3 else None,
    )
