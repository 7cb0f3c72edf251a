"""The engines that are compared: dsx's, stock DeepSpeed's, torch.distributed.pipelining's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import DualPipeVModule, PipelineModule
from schedule_bench import schedules
from schedule_bench.workload import Workload
from torch.distributed import pipelining
from torch.distributed.pipelining.schedules import ScheduleDualPipeV, ScheduleZBVZeroBubble

import dsx
from dsx.nn.split import WeightGradients
from dsx.parallel.stages import stages_of
from dsx.schedules.builders import NAMES, Options, build, default_chunks, placement_of
from dsx.schedules.program import Program
from dsx.schedules.schedule import Schedule
from dsx.schedules.simulate import Costs

STOCK = "deepspeed 1f1b"
"""What every engine's speed is compared with."""

_TORCH: dict[str, Any] = {
    "gpipe": pipelining.ScheduleGPipe,
    "1f1b": pipelining.Schedule1F1B,
    "looped_bfs": pipelining.ScheduleLoopedBFS,
    "interleaved": pipelining.ScheduleInterleaved1F1B,
    "interleaved_zb": pipelining.ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
    "dualpipev": ScheduleDualPipeV,
}
_ONE_STAGE = ("gpipe", "1f1b")

CLIPPING = 1.0
"""Largest norm of the whole model's gradient, in every engine."""

WIDE = " wide"
"""Ends the names of dsx's schedules that are built for late messages, at the price of activations."""

_WIDE = ("interleaved", "interleaved_zb", "zbv")


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """One engine on one rank, ready to train.

    Attributes:
        name: Whose it is and which schedule it runs, as in "torch zbv".
        schedule: That schedule, as this engine runs it: its compute actions.
        step: Train one step over all micro-batches.
        num_parameters: On this rank.
    """

    name: str
    schedule: Schedule
    step: Callable[[], object]
    num_parameters: int


def names(
    num_ranks: int, num_micro_batches: int, only: tuple[str, ...] = (), *, wires: bool = False
) -> list[str]:
    """Engines that can run this size, stock 1F1B first; with ``only``, those that have one of the words.

    ``wires``: also dsx's schedules that are built for late messages.
    """
    found = [STOCK]
    if num_micro_batches >= 2 * num_ranks:  # deepspeed/runtime/pipe/schedule.py, DualPipeVSchedule
        found.append("deepspeed dualpipev")
    found += [f"torch {name}" for name in _TORCH if _torch_can(name, num_ranks, num_micro_batches)]
    found += [f"dsx {name}" for name in NAMES]
    found += [f"dsx {name}{WIDE}" for name in _WIDE if wires]
    return [name for name in found if not only or name == STOCK or any(_fits(name, word) for word in only)]


def make(
    name: str, workload: Workload, groups: dsx.Groups, costs: Callable[[int], Costs], *, uneven: bool = False
) -> Engine:
    """The engine ``name``; a collective call over all ranks.

    Args:
        name: One of :func:`names`.
        workload: What it trains.
        groups: The ranks.
        costs: Number of chunks -> what actions and late messages take, for schedules built for them.
        uneven: Stages differ: all of dsx's schedules are built for them.
    """
    whose, schedule = name.split(" ", 1)
    if whose == "dsx":
        return _dsx(schedule, workload, groups, costs, uneven=uneven)
    return {"deepspeed": _deepspeed, "torch": _torch}[whose](schedule, workload, groups)


def _fits(name: str, word: str) -> bool:
    """A word is a whole name, or a part of one: "torch", "zbv", "dsx zbv"."""
    return word == name or word in name.split(" ")


def _torch_can(name: str, num_ranks: int, num_micro_batches: int) -> bool:
    if name == "dualpipev":
        return num_micro_batches >= 2 * num_ranks
    if name in ("interleaved", "interleaved_zb"):
        return num_micro_batches % max(1, num_micro_batches // num_ranks) == 0
    return name != "1f1b" or num_micro_batches >= num_ranks


def _config(workload: Workload) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": workload.rows,
        "gradient_accumulation_steps": workload.num_micro_batches,
        "gradient_clipping": CLIPPING,
        "steps_per_print": 1 << 30,
        "zero_optimization": {"stage": 1},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True, "fused": True}},
    }


def _deepspeed(name: str, workload: Workload, groups: dsx.Groups) -> Engine:
    ranks = groups.mesh.pp
    kind, chunks = (DualPipeVModule, 2) if name == "dualpipev" else (PipelineModule, 1)
    net = kind(
        workload.layers(chunks, None),
        num_stages=ranks,
        loss_fn=workload.loss_fn,
        partition_method=workload.partition_method,
    )
    parameters = list(net.parameters())
    engine = deepspeed.initialize(model=net, model_parameters=parameters, config=_config(workload))[0]
    batches = workload.batches()
    count = workload.num_micro_batches
    return Engine(
        name=f"deepspeed {name}",
        schedule=schedules.deepspeed_dualpipev(ranks, count) if chunks == 2 else build(name, ranks, 1, count),
        step=lambda: engine.train_batch(data_iter=iter(batches)),
        num_parameters=sum(p.numel() for p in parameters),
    )


def _options(name: str, num_ranks: int, costs: Callable[[int], Costs], *, uneven: bool) -> Options:
    """The schedule's own, or what hides late messages: larger groups, a longer warm-up, W placed for them."""
    known = name.removesuffix(WIDE)
    if known == name:
        return Options(costs=costs(default_chunks(name))) if uneven else Options()
    options = {
        "interleaved": Options(group_size=num_ranks + 1),
        "interleaved_zb": Options(group_size=num_ranks + 1, warmup_per_rank=2, costs=costs(2)),
        "zbv": Options(costs=costs(2)),
    }
    return options[known]


def _dsx(
    name: str, workload: Workload, groups: dsx.Groups, costs: Callable[[int], Costs], *, uneven: bool
) -> Engine:
    if name.endswith(".csv"):
        program = Program.read(Path(name).read_text(encoding="utf-8"), name=name)
        assert program.rows is not None
        chunks = program.rows.num_chunks
    else:
        program = Program(
            name=name.removesuffix(WIDE), options=_options(name, groups.mesh.pp, costs, uneven=uneven)
        )
        chunks = default_chunks(program.name)
    split = WeightGradients() if program.divides else None
    net = dsx.PipelineModule(
        workload.layers(chunks, split),
        loss_fn=workload.loss_fn,
        partition_method=workload.partition_method,
        num_chunks=chunks,
        schedule=program,
        groups=groups,
        split=split,
    )
    engine = dsx.initialize(model=net, config=_config(workload))[0]
    batches = workload.batches()
    return Engine(
        name=f"dsx {name}",
        schedule=program.build(groups.mesh.pp, chunks, workload.num_micro_batches),
        step=lambda: engine.train_batch(data_iter=iter(batches)),
        num_parameters=sum(p.numel() for p in net.parameters()),
    )


def _torch(name: str, workload: Workload, groups: dsx.Groups) -> Engine:
    """A schedule of torch's, then what the others do in their step: clip by the whole model's norm, AdamW."""
    ranks, rank = groups.mesh.pp, groups.pp_rank
    chunks, placement = default_chunks(name), placement_of(name)
    num_stages = ranks * chunks
    stages = [
        pipelining.PipelineStage(
            workload.module(stage, num_stages), stage, num_stages, torch.device("cpu"), group=groups.pipe
        )
        for stage in stages_of(rank, ranks, chunks, placement)
    ]
    runner = _TORCH[name](
        stages[0] if name in _ONE_STAGE else stages, workload.num_micro_batches, loss_fn=workload.loss_fn
    )
    parameters = [p for stage in stages for p in stage.submod.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, fused=True)
    first = any(stage.is_first for stage in stages)
    target = workload.labels if any(stage.is_last for stage in stages) else None

    def step() -> None:
        runner.step(*([workload.inputs] if first else []), target=target, losses=[], return_outputs=False)
        gradients = [p.grad for p in parameters if p.grad is not None]
        square = torch.nn.utils.get_total_norm(gradients).square()
        dist.all_reduce(square, group=groups.pipe)
        torch.nn.utils.clip_grads_with_norm_(parameters, CLIPPING, square.sqrt())
        optimizer.step()
        optimizer.zero_grad()

    count = workload.num_micro_batches
    return Engine(
        name=f"torch {name}",
        schedule=build(name, ranks, 1, count)
        if name in _ONE_STAGE
        else schedules.from_torch(runner.pipeline_order, name, placement),
        step=step,
        num_parameters=sum(p.numel() for p in parameters),
    )
