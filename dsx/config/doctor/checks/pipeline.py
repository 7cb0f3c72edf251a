"""Pipelines and AutoTP under stock DeepSpeed; under dsx other rules hold (under_dsx.py)."""

from __future__ import annotations

from collections.abc import Iterator

from dsx.config.doctor.checks.precision import dtype
from dsx.config.doctor.context import STAGE, Context
from dsx.config.doctor.finding import ABSENT, Finding, Severity

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
    """fp32 and ZeRO-0: each stage clips by its own norm (dsx/adr; DESIGN 12.12)."""
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
