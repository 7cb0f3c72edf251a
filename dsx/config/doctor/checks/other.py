"""The file itself, defaults that surprise, and blocks that need help from the script."""

from __future__ import annotations

from collections.abc import Iterator

from dsx.config.doctor.context import Context
from dsx.config.doctor.finding import ABSENT, Finding
from dsx.config.doctor.versions import Version, shown, version

_CLIPPING_SINCE: Version = (0, 19, 3)


def check_duplicates(context: Context) -> Iterator[Finding]:
    """Keys written twice, which DeepSpeed refuses and other readers take the last of."""
    for path, lines in context.source.twice():
        where = ", ".join(map(str, lines))
        why = f"the key is written twice (lines {where}): DeepSpeed refuses it, others take the last"
        yield context.find("duplicate-key", "error", path, why, "keep one of them")


def check_syntax(context: Context) -> Iterator[Finding]:
    """HJSON, which DeepSpeed and dsx read and others do not."""
    document = context.source.document
    if document is None or context.runner == "dsx" or not context.source.text.strip():
        return
    kinds: list[str] = list(dict.fromkeys(kind for kind, _ in document.relaxed))
    if context.source.text.startswith("\ufeff"):
        kinds.append("byte order mark")
    if not kinds:
        return
    line = context.source.line_column(document.relaxed[0][1])[0] if document.relaxed else 1
    what = f"{', '.join(kinds)}, first on line {line}"
    if context.runner == "trainer":
        why = f"no strict JSON ({what}), which the Trainer and Accelerate refuse"
        yield context.find("syntax", "error", (), why, "write strict JSON")
    else:
        why = f"no strict JSON ({what}): DeepSpeed reads it, but transformers, Accelerate and jq refuse it"
        yield context.find("syntax", "note", (), why, "write strict JSON if another tool reads the file")


def check_clipping_default(context: Context) -> Iterator[Finding]:
    """Since 0.19.3 gradients are clipped unless the config says 0."""
    if context.runner != "deepspeed" or context.version < _CLIPPING_SINCE:
        return
    if context.at(("gradient_clipping",)) is ABSENT:
        why = "left out, it is 1.0 since DeepSpeed 0.19.3 (before: no clipping)"
        fix = "write 1.0 to say so, or 0 for no clipping"
        yield context.find("clipping-default", "note", "gradient_clipping", why, fix)


def check_activation_checkpointing(context: Context) -> Iterator[Finding]:
    """The block does nothing by itself."""
    block = context.at(("activation_checkpointing",))
    if not isinstance(block, dict) or not any(block.values()) or context.runner == "dsx":
        return
    why = "it sets up deepspeed.checkpointing, which the model must call by itself; DeepSpeed does not for it"
    fix = "call deepspeed.checkpointing in the model, or use the model's own checkpointing"
    yield context.find("activation-checkpointing", "note", "activation_checkpointing", why, fix)
    name = "activation_checkpointing.contiguous_memory_optimization"
    if context.is_on(name):
        for needed in ("partition_activations", "number_checkpoints"):
            if not context.value(f"activation_checkpointing.{needed}"):
                why = f"it needs {needed}, here or from the script: else DeepSpeed stops with an assertion"
                yield context.find("activation-checkpointing", "note", name, why, f"set {needed}")


def check_profiler(context: Context) -> Iterator[Finding]:
    """The profiler of one step, which times all of them (runtime/config.py: wall_clock_breakdown)."""
    if not context.is_on("flops_profiler.enabled") or context.is_on("wall_clock_breakdown"):
        return
    why = "the profiler also switches wall_clock_breakdown on, which waits for the device in every step"
    fix = "switch the profiler off once profile_step is behind"
    if context.written("wall_clock_breakdown"):
        why = f"false is overruled by flops_profiler.enabled: {why}"
        yield context.find("profiler-timers", "warning", "wall_clock_breakdown", why, fix)
    else:
        yield context.find("profiler-timers", "note", "flops_profiler.enabled", why, fix)


def check_newer(context: Context) -> Iterator[Finding]:
    """Keys that came after the DeepSpeed that is asked about."""
    for slot in context.slots:
        if slot.key is not None and slot.key.since and version(slot.key.since) > context.version:
            does = "refuses" if slot.block.unknown == "refused" else "ignores"
            why = f"it came with DeepSpeed {slot.key.since}; {shown(context.version)} {does} it"
            yield context.find("version", "error", slot.path, why, f"use DeepSpeed {slot.key.since} or newer")
