"""A config as :mod:`dsx.plan.memory` takes it."""

from __future__ import annotations

from dsx.config.memory_offload import offload_of
from dsx.config.memory_zero3 import gathering_of
from dsx.config.run import RunConfig
from dsx.plan.memory.estimate import Job
from dsx.plan.memory.ops import DeviceKind
from dsx.plan.memory.states import Optimizer, StateSettings
from dsx.plan.memory.steady import enough_micro_batches
from dsx.plan.transfers import lower
from dsx.spec.layout import Layout


def job_of(config: RunConfig, *, device: DeviceKind = "cuda") -> Job:
    """The run that ``config`` describes, on a kind of device."""
    mesh, stages = config.mesh, config.stage_map
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
        recompute=config.dsx.recompute,
        states=_states(config, device),
        device=device,
    )


def _states(config: RunConfig, device: DeviceKind) -> StateSettings:
    deepspeed = config.deepspeed
    zero, block = deepspeed.get("zero_optimization", {}), deepspeed["optimizer"]
    kind, params = block["type"].lower(), block.get("params", {})
    # torch's optimizers update many tensors at a time on a GPU alone (torch/optim/optimizer.py).
    own = bool(params.get("torch_adam", False)) or kind == "sgd"
    foreach = own and device == "cuda"
    width = 2 if config.precision == "bf16" else 4
    accumulate = deepspeed.get("data_types", {}).get("grad_accum_dtype")
    if kind == "adam" and params.get("adam_w_mode", True):
        kind = "adamw"
    return StateSettings(
        width=width,
        accumulate={None: width, "fp32": 4, "float32": 4, "bf16": 2, "bfloat16": 2}[accumulate],
        optimizer=Optimizer.of(
            kind,
            foreach=foreach,
            weight_decay=bool(params.get("weight_decay", 0.0)),
            momentum=bool(params.get("momentum", 0.0)),
        ),
        bucket=int(zero.get("reduce_bucket_size", 500_000_000)),
        communication={None: None, "fp32": 4, "fp16": 2, "bf16": 2}[deepspeed.get("communication_data_type")],
        reduce=config.dsx.zero.reduce,
        offload=offload_of(
            zero,
            kind,
            torch_optimizer=own,
            decays=kind in ("adam", "sgd") and bool(params.get("weight_decay", 0.0)),
        ),
        fused=kind in ("adam", "adamw") and not own,
        gathering=gathering_of(zero, config.dsx.zero.keep_gathered_bytes) if config.zero_stage == 3 else None,
    )
