"""Batch keys, pipelines and AutoTP against each other and the ranks, and what dsx refuses of them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import reduce
from typing import Any

from dsx.config.batch import resolve_batch
from dsx.config.wording import at, either
from dsx.doctor.checks.precision import dtype
from dsx.doctor.context import ACCUMULATION, MICRO, STAGE, TRAIN, UNKNOWN, Context, step
from dsx.doctor.finding import ABSENT, Edit, Finding, Severity
from dsx.errors import ConfigError

_SEQUENCE = "sequence_parallel_size"
_ASSERTS = "DeepSpeed stops with an assertion"


def data_parallel_size(context: Context) -> int | None:
    """Ranks that DeepSpeed multiplies the micro-batch with (runtime/config.py); None if it cannot be said.

    AutoTP's degree is not divided out: DeepSpeed makes its groups after this.
    """
    if context.world_size is None or context.runner == "dsx":
        return None
    shared = (context.pipeline or 1) * int(context.number(_SEQUENCE) or 1)
    return context.world_size // shared if context.world_size % shared == 0 else None


def check_world(context: Context) -> Iterator[Finding]:
    """Parallel degrees divide the number of ranks."""
    world = context.world_size
    if world is None or context.runner == "dsx":
        return
    yield from _grid(context, world)
    names = (_SEQUENCE, "tensor_parallel.autotp_size", "zero_optimization.zero_hpz_partition_size")
    switched = ("expert_parallel.autoep_size", "hybrid_engine.inference_tp_size")
    on = [name for name in switched if context.is_on(f"{name.partition('.')[0]}.enabled")]
    for name in (*names, *on):
        size = context.number(name)
        if size and context.written(name) and world % min(int(size), world):
            fix = f"use {_divisors(world)}"
            yield context.find("degree", "error", name, f"it does not divide {world} ranks", fix)
        elif size and context.written(name) and size > world:
            fix = f"use at most {world}"
            if name != names[2]:
                yield context.find("degree", "error", name, f"there are only {world} ranks", fix)
            elif context.stage == 3:
                why = f"there are only {world} ranks: DeepSpeed takes {world}, in silence"
                yield context.find("degree", "warning", name, why, fix)


def _grid(context: Context, world: int) -> Iterator[Finding]:
    """Pipeline stages, and the mesh of data and sequence parallelism (pipe/module.py; initialize)."""
    stages = context.pipeline or 1
    if world % stages:
        why = f"PipelineModule refuses {stages} stages on {world} ranks: they do not divide them"
        yield context.find("degree", "error", ("pipeline",), why, f"use {_divisors(world)} stages")
    data, sequence = context.number("data_parallel_size"), context.number(_SEQUENCE)
    if data and sequence and context.written(_SEQUENCE) and data * sequence != world:
        why = f"times {_SEQUENCE} = {sequence} it is not {world} ranks: no mesh can be made"
        fix = (
            f"use {world // int(sequence)}"
            if world % sequence == 0
            else f"use a {_SEQUENCE} that divides {world}"
        )
        yield context.find("degree", "error", "data_parallel_size", why, fix)


def _divisors(world: int) -> str:
    return either([n for n in range(1, world + 1) if world % n == 0])


def check_batch_missing(context: Context) -> Iterator[Finding]:
    """A batch size is given."""
    if any(context.value(name) is not None for name in (TRAIN, MICRO)):
        return
    if context.tunes:
        why = "left out, `deepspeed --autotuning` tries several; without that flag DeepSpeed stops"
        yield context.find("batch-missing", "note", MICRO, why, f"write {MICRO} once the best is known")
        return
    if context.runner == "trainer":
        why = f'no batch size is given: the Trainer fills in what is "auto", and adds no keys; {_ASSERTS}'
        edit = Edit("set", (MICRO,), "auto")
        yield context.find(
            "batch-missing", "warning", MICRO, why, f'write "{MICRO}": "auto"', edit, safe=True
        )
        return
    only = context.value(ACCUMULATION) is not None
    said = f"only {ACCUMULATION} is given" if only else "no batch size is given"
    why = f"{said}: {_ASSERTS}"
    yield context.find("batch-missing", "error", MICRO, why, f"write {MICRO}, or {TRAIN}")


def check_batch_triple(context: Context) -> Iterator[Finding]:
    """The product of micro-batch, accumulation and data-parallel ranks is the batch."""
    given = {name: context.value(name) for name in (TRAIN, MICRO, ACCUMULATION)}
    if any(value is UNKNOWN or (value is not None and not _is_count(value)) for value in given.values()):
        return
    if given[TRAIN] is None and given[MICRO] is None:
        return
    dp = data_parallel_size(context)
    if dp is not None:
        yield from _with_ranks(context, given, dp)
        return
    train = given[TRAIN]
    per_rank = math.prod(given[name] or 1 for name in (MICRO, ACCUMULATION))
    if train is None or (given[MICRO] is None and given[ACCUMULATION] is None):
        return
    names = [name for name in (MICRO, ACCUMULATION) if given[name]]
    factors = " x ".join(at(name, given[name]) for name in names)
    if train % per_rank:
        low, high = train // per_rank * per_rank, -(-train // per_rank) * per_rank
        legal = " or ".join(str(n) for n in (low, high) if n)
        fix = f"write {TRAIN} = {legal}, or leave it out: DeepSpeed computes it"
        why = f"no multiple of {factors}, so that no number of ranks fits"
        yield context.find("batch-triple", "error", TRAIN, why, fix)
    elif len(names) == 2:
        ranks = train // per_rank
        why = f"with {factors} it is right for {ranks} data-parallel rank{'s' * (ranks != 1)} only"
        fix = f"leave {TRAIN} or {ACCUMULATION} out to run on any number; say --gpus to check one"
        yield context.find("batch-triple", "note", TRAIN, why, fix)


def _with_ranks(context: Context, given: dict[str, int | None], dp: int) -> Iterator[Finding]:
    try:
        resolve_batch(given, dp)
    except ConfigError as error:
        name = next(name for name in (TRAIN, MICRO) if given[name] is not None)
        why = f"{error.what} ({error.where})" if "," in error.where else error.what
        yield context.find("batch-triple", "error", name, why, error.fix)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


_AUTOTP = "tensor_parallel.autotp_size"


def _has_pipeline(context: Context) -> bool:
    """Whether the model is a pipeline: said, or implied by a ``pipeline`` block."""
    if context.runner == "dsx":
        return False
    if context.pipeline is not None:
        return context.pipeline > 1
    return isinstance(context.at(("pipeline",)), dict) and bool(context.at(("pipeline",)))


def _place(context: Context, otherwise: str) -> str:
    return "pipeline" if context.at(("pipeline",)) is not ABSENT else otherwise


def check_zero(context: Context) -> Iterator[Finding]:
    """ZeRO-2 and 3 under the PipelineEngine."""
    if not _has_pipeline(context) or context.stage not in (2, 3):
        return
    why = f"DeepSpeed's PipelineEngine asserts a stage below 2, and {STAGE} = {context.stage}"
    if context.pipeline is None:
        why += "; for a model that is no PipelineModule the pipeline block does nothing"
    fix = f"set {STAGE} to 1, remove the pipeline, or run it with dsx, which pipelines at every stage"
    yield context.find("pipeline-zero", "error", STAGE, why, fix)


def check_block(context: Context) -> Iterator[Finding]:
    """The ``pipeline`` block of a model without stages."""
    if context.runner == "dsx" or context.at(("pipeline",)) is ABSENT:
        return
    if context.pipeline == 1:
        why = "the model has no pipeline stages: DeepSpeed ignores the block in silence"
        yield context.find("pipeline-block", "error", "pipeline", why, "remove it")
    elif context.pipeline is None:
        why = "it does nothing unless the model is a PipelineModule, whose num_stages makes the stages"
        fix = "remove it for other models; say --pipeline STAGES to check for yours"
        yield context.find("pipeline-block", "note", "pipeline", why, fix)


def check_autotp(context: Context) -> Iterator[Finding]:
    """AutoTP and a pipeline."""
    size = context.number(_AUTOTP)
    if _has_pipeline(context) and size is not None and size > 1:
        why = "AutoTP does not go with a PipelineModule: DeepSpeed stops with a bare AssertionError"
        yield context.find("autotp", "error", _AUTOTP, why, "remove one of the two; dsx does both")


def check_autotp_off(context: Context) -> Iterator[Finding]:
    """Options of AutoTP without the size that switches it on (runtime/engine.py: autotp_size() > 1)."""
    block = context.at(("tensor_parallel",))
    size = context.number(_AUTOTP)
    if context.runner == "dsx" or not isinstance(block, dict) or size is None or size > 1:
        return
    why = "autotp_size above 1 alone switches AutoTP on: without it nothing is divided, in silence"
    inner = context.number("tensor_parallel.tp.tp_size")
    if inner is not None and inner > 1:
        fix = f'write "tensor_parallel": {{"autotp_size": {inner}}}'
        yield context.find("autotp", "error", "tensor_parallel.tp.tp_size", why, fix)
    elif any(block.values()):
        fix = "add autotp_size, or remove the block, unless the script calls deepspeed.tp_model_init"
        yield context.find("no-effect", "warning", "tensor_parallel", why, fix)


# What starts DeepSpeed's timers of a backward pass (runtime/engine.py: EngineTimers).
_TIMERS = ("wall_clock_breakdown", "flops_profiler.enabled", "autotuning.enabled")


def check_timers(context: Context) -> Iterator[Finding]:
    """The timers of the engine's backward, which the PipelineEngine starts a second time."""
    if not _has_pipeline(context):
        return
    for name in _TIMERS:
        if context.value(name) is True:
            why = (
                "the PipelineEngine starts the backward's timer twice: AssertionError at the first backward "
                "(timer has already been started), while other ranks wait for ever"
            )
            if context.pipeline is None:
                why += "; a model that is no PipelineModule runs"
            fix = "remove it for a pipeline, or run it with dsx, whose engine has these timers"
            yield context.find("pipeline-timers", "error", name, why, fix)


def check_clipping(context: Context) -> Iterator[Finding]:
    """fp32 and ZeRO-0: each stage clips by its own norm (docs/adr; DESIGN 12.12)."""
    clips = (context.number("gradient_clipping") or 0) > 0
    if not (_has_pipeline(context) and clips and context.stage == 0 and dtype(context) == "fp32"):
        return
    why = (
        "in fp32 without ZeRO the PipelineEngine clips by the norm of one stage's gradients, not of all: "
        "weights differ from those of a run without a pipeline"
    )
    fix = f"set {STAGE} to 1, use bf16, or set gradient_clipping to 0"
    severity: Severity = "error" if context.pipeline else "warning"
    place = (
        "gradient_clipping" if context.written("gradient_clipping") else _place(context, "gradient_clipping")
    )
    yield context.find("clipping-fp32-pipeline", severity, place, why, fix)


def check_accumulation(context: Context) -> Iterator[Finding]:
    """The PipelineEngine counts micro-batches itself."""
    if _has_pipeline(context) and context.value("managed_gradient_accumulation") is False:
        why = "false does not go with a pipeline: DeepSpeed stops with an assertion"
        yield context.find("pipeline-block", "error", "managed_gradient_accumulation", why, "remove it")


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
