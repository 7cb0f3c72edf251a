"""What dsx refuses in DeepSpeed's keys: blocks whose work it does itself, and what it does not run."""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from typing import Any

from dsx.config.doctor.context import Context, step
from dsx.config.doctor.finding import ABSENT, Edit, Finding

# Blocks of DeepSpeed that would do dsx's work a second time, or not at all: key -> why and what instead.
_TAKEN_OVER = {
    "activation_checkpointing": (
        "dsx's models do not call DeepSpeed's activation checkpointing",
        'remove it; dsx.recompute ("selective" or "full") saves activations',
    ),
    "data_parallel_size": ("the degree follows from the world size", "remove it; see dsx.parallel"),
    "expert_parallel": ("dsx's models have no experts", "remove it"),
    "pipeline": (
        "dsx runs the pipeline itself",
        "remove it; use dsx.parallel.pipeline, dsx.schedule and dsx.partition",
    ),
    "sequence_parallel_size": (
        "DeepSpeed-Ulysses does not combine with dsx's mesh",
        "remove it; dsx.parallel.tensor with sequence_parallel shards the sequence",
    ),
    "tensor_parallel": (
        "DeepSpeed's AutoTP would cut the already cut layers again",
        "remove it; use dsx.parallel.tensor",
    ),
}
# The same, for blocks that do nothing unless enabled.
_TAKEN_OVER_IF_ENABLED = {
    "data_efficiency": ("dsx feeds the batches itself", "set it to false; see dsx.data"),
    "hybrid_engine": ("it replaces the engine that dsx builds on", "set it to false"),
    "torch_autocast": ("dsx's layers choose their own precision", 'set it to false and use "bf16"'),
}


def check_taken_over(context: Context) -> Iterator[Finding]:
    """Blocks whose work dsx does."""
    for key, (why, fix) in _TAKEN_OVER.items():
        if context.at((key,)) is not ABSENT:
            yield context.find("under-dsx", "error", (key,), why, fix, Edit("remove", (key,)))
    for key, (why, fix) in _TAKEN_OVER_IF_ENABLED.items():
        # Anything that DeepSpeed would take for true.
        if context.value(f"{key}.enabled"):
            path = (key, "enabled")
            yield context.find("under-dsx", "error", path, why, fix, Edit("set", path, False))


def check_precision(context: Context) -> Iterator[Finding]:
    """bf16 or fp32: fp16 would scale the loss again at every pipeline stage."""
    if context.is_on("fp16.enabled"):
        also = " and bf16 is enabled too" if context.is_on("bf16.enabled") else ""
        fix = 'remove fp16 and write "bf16": {"enabled": true}'
        yield context.find("under-dsx", "error", "fp16.enabled", f"dsx trains in bf16 or fp32{also}", fix)


def check_zenflow(context: Context) -> Iterator[Finding]:
    """ZenFlow."""
    path = ("zero_optimization", "zenflow")
    if context.at(path) not in (ABSENT, None):
        why = "it steps the optimizer outside dsx's schedule"
        yield context.find("under-dsx", "error", path, why, "remove it", Edit("remove", path))


def check_schedule_length(context: Context) -> Iterator[Finding]:
    """A learning-rate schedule that has come to its end before the run has."""
    steps: Any = reduce(step, ("dsx", "train", "steps"), context.source.config)
    name = "scheduler.params.total_num_steps"
    total = context.number(name)
    if isinstance(steps, int) and total is not None and context.written(name) and steps > total:
        why = f"dsx.train.steps is {steps}: the last {steps - total:g} run at the least learning rate"
        yield context.find("schedule-length", "warning", name, why, f"write {steps}, if that is not meant")


def check_optimizer(context: Context) -> Iterator[Finding]:
    """An optimizer, which dsx makes from the config."""
    if context.at(("optimizer",)) is ABSENT:
        fix = 'add "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "torch_adam": true}}'
        yield context.find("under-dsx", "error", ("optimizer",), "the config has none", fix)
