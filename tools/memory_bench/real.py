"""Traced peaks against real gloo ranks: the same steps, the same meter, once without and once with peers."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

_BASE = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_clipping": 1.0,
    "zero_allow_untested_optimizer": True,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "dsx": {
        "model": {"family": "llama", "preset": "tiny"},
        "parallel": {"tensor": 1, "pipeline": 1},
        "data": {"sequence_length": 64},
        "train": {"steps": 2, "output": "runs/memory"},
    },
}

_GPT2 = ["dsx.model.family=gpt2"]
_TP = "dsx.parallel.tensor=2"
_PP = "dsx.parallel.pipeline=2"

CASES: dict[str, tuple[int, list[str]]] = {
    "ZeRO-0, 2 data-parallel": (2, ["zero_optimization.stage=0", "gradient_accumulation_steps=2"]),
    "ZeRO-1, bf16": (2, ["zero_optimization.stage=1", "bf16.enabled=true", "gradient_accumulation_steps=2"]),
    "ZeRO-2 per micro-batch, bf16, GPT-2": (
        2,
        [
            "zero_optimization.stage=2",
            "zero_optimization.reduce_bucket_size=50000",
            "dsx.zero.reduce=micro_batch",
            "bf16.enabled=true",
            "gradient_accumulation_steps=3",
            *_GPT2,
        ],
    ),
    "ZeRO-3, recompute full": (
        2,
        ["zero_optimization.stage=3", "dsx.recompute=full", "gradient_accumulation_steps=2"],
    ),
    "ZeRO-1, bf16 summed in fp32, pp 2": (
        4,
        [
            "zero_optimization.stage=1",
            "zero_optimization.reduce_bucket_size=20000",
            "bf16.enabled=true",
            "data_types.grad_accum_dtype=fp32",
            "gradient_accumulation_steps=4",
            _PP,
        ],
    ),
    "ZeRO-3, pp 2, zero-bubble": (
        4,
        [
            "zero_optimization.stage=3",
            "zero_optimization.reduce_bucket_size=100000",
            "dsx.schedule.name=zb_h1",
            "gradient_accumulation_steps=4",
            _PP,
        ],
    ),
    "ZeRO-2, tp 2 with sequence parallelism, GPT-2, recompute full": (
        4,
        [
            "zero_optimization.stage=2",
            "dsx.parallel.sequence_parallel=true",
            "dsx.recompute=full",
            "gradient_accumulation_steps=2",
            _TP,
            *_GPT2,
        ],
    ),
    "ZeRO-1, tp 2, pp 2, interleaved, dp 2": (
        8,
        [
            "zero_optimization.stage=1",
            "dsx.parallel.chunks=2",
            "dsx.schedule.name=interleaved",
            "gradient_accumulation_steps=4",
            _TP,
            _PP,
        ],
    ),
    "ZeRO-3, tp 2, pp 2, dp 2, bf16": (
        8,
        ["zero_optimization.stage=3", "bf16.enabled=true", "gradient_accumulation_steps=4", _TP, _PP],
    ),
    "ZeRO-3, optimizer and parameters offloaded, bf16": (
        2,
        [
            "zero_optimization.stage=3",
            "zero_optimization.reduce_bucket_size=50000",
            "zero_optimization.offload_optimizer.device=cpu",
            "zero_optimization.offload_param.device=cpu",
            "zero_force_ds_cpu_optimizer=false",
            "bf16.enabled=true",
            "gradient_accumulation_steps=2",
        ],
    ),
    "ZeRO-2, optimizer offloaded, pp 2, GPT-2": (
        4,
        [
            "zero_optimization.stage=2",
            "zero_optimization.reduce_bucket_size=50000",
            "zero_optimization.offload_optimizer.device=cpu",
            "zero_force_ds_cpu_optimizer=false",
            "gradient_accumulation_steps=4",
            _PP,
            *_GPT2,
        ],
    ),
}
"""Name -> ranks, and what is set. 42 rank-runs."""


def compare(wanted: Sequence[str] = ()) -> int:
    """Print each rank's peaks and the worst relative difference; 1 if that is above 0.1 %.

    Args:
        wanted: Run the cases alone whose names have one of these in them; all if there are none.
    """
    worst = 0.0
    count = 0
    for name, (world, sets) in CASES.items():
        if wanted and not any(words in name for words in wanted):
            continue
        begin = time.perf_counter()
        real = ranks(_config(world, sets))
        traced = [_alone(_traced, rank, world, sets) for rank in range(world)]
        for rank, (ours, theirs) in enumerate(zip(traced, real, strict=True)):
            count += 1
            steps = ("engine", "step 1", "step 2")
            off = {step: ours["phases"][step] - theirs["phases"][step] for step in steps}
            peak, truth = (max(side["phases"][step] for step in steps) for side in (ours, theirs))
            worst = max(worst, abs(peak / truth - 1))
            print(f"{name:58} rank {rank}: traced {peak:>10} real {truth:>10} by phase {off}", flush=True)
        print(f"  {time.perf_counter() - begin:.0f} s", flush=True)
    print(f"{count} rank-runs, worst difference of a peak {100 * worst:.5f} %")
    return int(worst > 0.001)


def _config(world: int, sets: list[str]) -> Any:
    from dsx.config.resolve import resolve

    return resolve(_BASE, world_size=world, overrides=sets)


def _traced(connection: Any, rank: int, world: int, sets: list[str]) -> None:
    from meta_engine.run import trace

    _quiet(rank, world)
    peaks = trace(_config(world, sets), rank, device="cpu")
    connection.send({"phases": peaks.phases, "steady": peaks.steady_bytes})
    os._exit(0)  # fake tensors outlive their mode


def _real(connection: Any, rank: int, world: int, config: Any, make: Any, folder: str) -> None:
    import deepspeed
    import torch.distributed as dist

    from meta_engine.run import measure

    _quiet(rank, world)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # would be compiled, for a minute
    store = dist.FileStore(str(Path(folder) / "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    deepspeed.init_distributed(dist_backend="gloo", verbose=False, auto_mpi_discovery=False)
    peaks = measure(config, make)
    dist.barrier()
    connection.send({"phases": peaks.phases, "steady": peaks.steady_bytes})
    os._exit(0)


def _quiet(rank: int, world: int) -> None:
    import logging

    import deepspeed
    import torch

    torch.set_num_threads(1)
    deepspeed.utils.logger.setLevel(logging.ERROR)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), DS_ACCELERATOR="cpu")


def _alone(target: Any, *args: Any) -> Any:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=target, args=(theirs, *args))
    process.start()
    theirs.close()
    result = ours.recv()
    process.join()
    return result


def ranks(config: Any, make: Callable[[Any], Any] | None = None) -> list[Any]:
    """The peaks of each of a run's ranks on this machine, by phase, and what is held between steps.

    Args:
        config: Resolved.
        make: As of ``meta_engine.run.measure``.
    """
    world = config.mesh.size
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        pipes = []
        for rank in range(world):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_real, args=(theirs, rank, world, config, make, folder))
            process.start()
            theirs.close()
            stack.callback(process.join)
            pipes.append(ours)
        return [pipe.recv() for pipe in pipes]
