"""ZeRO: offload, what the stages do not do together with other keys, bucket sizes."""

from __future__ import annotations

from collections.abc import Iterator

from dsx.config.wording import either
from dsx.doctor.context import STAGE, Context
from dsx.doctor.finding import ABSENT, Edit, Finding, Path, Severity
from dsx.doctor.source import same
from dsx.doctor.table import Slot

_ZERO = "zero_optimization"
_OFFLOADS = (
    ("param", 3, "only ZeRO-3 partitions parameters"),
    ("optimizer", 1, "only ZeRO partitions the optimizer"),
)
# 4e9 elements are 8 GB in bf16, and overlap_comm makes two such buckets.
_LARGE_BUCKET = 4_000_000_000
_BUCKETS = ("reduce_bucket_size", "allgather_bucket_size", "stage3_prefetch_bucket_size")


def check_old_form(context: Context) -> Iterator[Finding]:
    """``"zero_optimization": true``, which means stage 1."""
    value = context.at((_ZERO,))
    if isinstance(value, bool) and context.runner != "dsx":
        edits = (Edit("set", (_ZERO,), {"stage": int(value)}),)
        why = f"the form of before 2020; DeepSpeed takes it for stage {int(value)}"
        yield context.find(
            "deprecated", "warning", (_ZERO,), why, f'write {{"stage": {int(value)}}}', *edits, safe=True
        )


def check_stage(context: Context) -> Iterator[Finding]:
    """A block without a stage, which does nothing."""
    block = context.at((_ZERO,))
    if isinstance(block, dict) and "stage" not in block:
        why = "without a stage it is 0: ZeRO is off, and nothing in the block has an effect"
        severity: Severity = "error" if any(block.values()) else "warning"
        yield context.find(
            "zero-stage", severity, (_ZERO,), why, 'write "stage": 1, 2 or 3, or remove the block'
        )


def check_deprecated(context: Context) -> Iterator[Finding]:
    """Keys that still work under a new name (bfloat16 is precision's)."""
    for slot in context.slots:
        key = slot.key
        if key is None or key.status != "deprecated" or key.path == "bfloat16":
            continue
        target = tuple(key.replacement.split(".")) if key.replacement else ()
        if target and context.at(target) is not ABSENT:
            why = f"{key.replacement} replaces it, and is given too: DeepSpeed stops with an assertion"
            gone, safe = Edit("remove", slot.path), _says_the_same(slot, context.at(target))
            yield context.find("deprecated", "error", slot.path, why, "remove it", gone, safe=safe)
            continue
        fix = f"use {key.replacement}" if key.replacement else "remove it"
        why = "deprecated; DeepSpeed still reads it"
        yield context.find("deprecated", "warning", slot.path, why, fix, *_renewed(slot, target), safe=True)


def _says_the_same(slot: Slot, new: object) -> bool:
    """Whether the replacement of a deprecated key, which is there too, holds what the key asks for."""
    if isinstance(slot.value, bool) and isinstance(new, dict):
        return slot.value == (new.get("device", "none") not in ("none", None))
    return same(slot.value, new)


def _renewed(slot: Slot, target: tuple[str, ...]) -> tuple[Edit, ...]:
    """Edits from a deprecated key to its replacement, where their values mean the same."""
    if not target:
        return ()
    if target[-1] in ("offload_optimizer", "offload_param"):
        gone = Edit("remove", slot.path)
        if slot.value is not True:
            return (gone,) if slot.value is False else ()
        return (
            (gone, Edit("set", target, {"device": "cpu"}))
            if slot.path[-1] != "cpu_offload_use_pin_memory"
            else ()
        )
    if slot.path[:-1] == target[:-1]:
        return (Edit("rename", slot.path, target[-1]),)
    return (Edit("remove", slot.path), Edit("set", target, slot.value))


def check_offload(context: Context) -> Iterator[Finding]:
    """Offload at a stage that has nothing to offload, or to a disk without a path."""
    stage = context.stage
    for what, least, why in _OFFLOADS:
        name = f"{_ZERO}.offload_{what}"
        device = context.value(f"{name}.device")
        if device not in ("cpu", "nvme") or stage is None:
            continue
        old = (_ZERO, "cpu_offload" if what == "optimizer" else "cpu_offload_param")
        shown: Path = (*name.split("."), "device")
        shown = shown if context.at(shown) is not ABSENT else old
        if stage < least:
            legal = either(list(range(least, 4)))
            fix = f"set {STAGE} to {legal}, or remove offload_{what}"
            yield context.find("offload-stage", "error", shown, f"{why}, and {STAGE} = {stage}", fix)
        elif device == "nvme" and not context.value(f"{name}.nvme_path"):
            yield context.find("nvme-path", "error", shown, "nvme_path is missing", f"set {name}.nvme_path")
        elif device == "nvme" and stage < 3:
            why_cpu = (
                f"below stage 3 DeepSpeed offloads to the CPU whatever is written, and {STAGE} = {stage}"
            )
            yield context.find("offload-stage", "error", shown, why_cpu, f'set {STAGE} to 3, or use "cpu"')


def check_partial_offload(context: Context) -> Iterator[Finding]:
    """Parts of the optimizer on the CPU, and Superchips: ZeRO-3 only."""
    ratio = context.number(f"{_ZERO}.offload_optimizer.ratio")
    if ratio is not None and ratio < 1 and context.stage in (0, 1, 2):
        fix = f"set {STAGE} to 3, or ratio to 1.0"
        why = f"partial offload is for ZeRO-3 only, and {STAGE} = {context.stage}: DeepSpeed refuses it"
        yield context.find("offload-stage", "error", f"{_ZERO}.offload_optimizer.ratio", why, fix)
    elif ratio is not None and ratio < 1 and context.value(f"{_ZERO}.offload_optimizer.device") == "nvme":
        why = "partial offload keeps a part on the GPU and the rest in CPU memory, not on NVMe"
        fix = 'use device "cpu", or ratio 1.0'
        yield context.find("offload-stage", "warning", f"{_ZERO}.offload_optimizer.ratio", why, fix)


def check_grad_norm(context: Context) -> Iterator[Finding]:
    """``compute_grad_norm: false`` (runtime/zero/config.py and stage_1_and_2.py)."""
    name = f"{_ZERO}.compute_grad_norm"
    if context.value(name) is not False:
        return
    if context.stage in (0, 3):
        yield context.find(
            "grad-norm",
            "error",
            name,
            "only ZeRO-1 and ZeRO-2 can leave it out: DeepSpeed refuses it",
            "remove it",
        )
    elif (context.number("gradient_clipping") or 0) > 0:
        default = "" if context.written("gradient_clipping") else ", its default"
        why = (
            f"clipping needs the norm, and gradient_clipping is {context.value('gradient_clipping')}{default}"
        )
        yield context.find("grad-norm", "error", name, why, "set gradient_clipping to 0, or remove this")
    elif context.offloads("optimizer"):
        yield context.find("grad-norm", "error", name, "optimizer offload needs the norm", "remove it")


def check_reduce_scatter(context: Context) -> Iterator[Finding]:
    """Gradient scaling that reduce-scatter cannot do (stage_1_and_2.py, stage3.py: assertions)."""
    if context.stage not in (2, 3) or not context.is_on(f"{_ZERO}.reduce_scatter"):
        return
    fix = f"remove it, or set {_ZERO}.reduce_scatter to false"
    end = f"at stage {context.stage} with reduce_scatter: DeepSpeed stops with an assertion"
    if context.is_on("prescale_gradients"):
        yield context.find("reduce-scatter", "error", "prescale_gradients", f"not possible {end}", fix)
    if context.written("gradient_predivide_factor") and context.number("gradient_predivide_factor") != 1:
        yield context.find("reduce-scatter", "error", "gradient_predivide_factor", f"must be 1 {end}", fix)


def check_buckets(context: Context) -> Iterator[Finding]:
    """Bucket sizes, which count elements and not bytes."""
    for last in _BUCKETS:
        name = f"{_ZERO}.{last}"
        size = context.number(name)
        if size is None or not context.written(name):
            continue
        if size > _LARGE_BUCKET:
            gigabytes = size * 2 / 1e9
            why = f"buckets count elements: in 16 bit this is {gigabytes:,.0f} GB of memory on each rank"
            yield context.find("bucket-size", "warning", name, why, "use 5e8 or less")
    even = context.number(f"{_ZERO}.allgather_bucket_size")
    if even is not None and even % 2 and context.stage in (1, 2):
        why = "DeepSpeed asserts an even number at ZeRO-1 and 2"
        yield context.find("bucket-size", "error", f"{_ZERO}.allgather_bucket_size", why, f"use {even + 1:g}")


def check_refused_together(context: Context) -> Iterator[Finding]:
    """Pairs of keys that DeepSpeed refuses."""
    if context.is_on(f"{_ZERO}.legacy_stage1") and context.stage != 0:
        yield context.find("zero-stage", "error", f"{_ZERO}.legacy_stage1", "gone since 0.5.9", "remove it")
    if context.is_on(f"{_ZERO}.elastic_checkpoint") and context.stage == 3:
        why = "ZeRO-3 has no elastic checkpoints any more"
        fix = "remove it; convert with DeepSpeed's ds_to_universal instead"
        yield context.find("zero-stage", "warning", f"{_ZERO}.elastic_checkpoint", why, fix)
    if context.value("gradient_allreduce_op") == "sum":
        for name, is_on in (
            (STAGE, context.stage == 3),
            (f"{_ZERO}.zenflow", context.value(f"{_ZERO}.zenflow") is not None),
            ("compile.deepcompile", context.is_on("compile.deepcompile")),
        ):
            if is_on:
                why = f'"sum" does not go with {name}: DeepSpeed raises ValueError'
                yield context.find("reduce-scatter", "error", "gradient_allreduce_op", why, 'use "mean"')
    if context.value("managed_gradient_accumulation") is False:
        overlap = context.value(f"{_ZERO}.overlap_comm")
        if (overlap is True or (overlap is None and context.stage == 3)) and context.stage != 2:
            why = "false goes with overlap_comm at ZeRO-2 only: DeepSpeed stops with an assertion"
            fix = f"set {_ZERO}.overlap_comm to false"
            yield context.find("reduce-scatter", "error", "managed_gradient_accumulation", why, fix)
