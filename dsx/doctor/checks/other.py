"""The file itself, defaults that surprise, legal numbers that are hardly meant, what needs the script."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from dsx.doctor.context import Context
from dsx.doctor.finding import ABSENT, Edit, Finding
from dsx.doctor.key import Version, shown, version

# Optimizers whose step is about as large as the learning rate, whatever the gradient.
_NORMALIZED: Final = frozenset({"adam", "adamw", "adamax", "nadam", "radam", "lamb", "lion"})
_ADAM_LIKE: Final = _NORMALIZED - {"lion"}
_LARGE_RATE: Final = 0.01  # for them
_RATES: Final = ("optimizer.params.lr", "scheduler.params.warmup_max_lr", "scheduler.params.cycle_max_lr")
_METRICS: Final = ("data_efficiency", "data_sampling", "curriculum_learning", "curriculum_metrics")
# Key, least number that can be meant, what is counted.
_COUNTS: Final = (
    ("zero_optimization.reduce_bucket_size", 1000, "elements, not megabytes"),
    ("zero_optimization.allgather_bucket_size", 1000, "elements, not megabytes"),
    ("zero_optimization.stage3_prefetch_bucket_size", 1000, "elements, not megabytes"),
    ("aio.block_size", 4096, "bytes, not kilobytes or megabytes"),
)


def check_learning_rate(context: Context) -> Iterator[Finding]:
    """A learning rate above 1 where each weight moves by about that much per step."""
    kind = context.text("optimizer.type").lower()
    for name in _RATES:
        rate = context.number(name)
        if kind in _NORMALIZED and rate is not None and rate > 1 and context.written(name):
            why = f"each step of {kind} moves a weight by about this much: the run diverges at once"
            yield context.find("unit", "warning", name, why, f"write {_inverted(rate)}, if that is meant")
    rate = context.number(_RATES[0])
    if rate == 0 and context.written(_RATES[0]) and not context.written("scheduler"):
        fix = "write a learning rate, or a scheduler that sets it"
        yield context.find("unit", "warning", _RATES[0], "nothing is learned", fix)


def check_weight_decay(context: Context) -> Iterator[Finding]:
    """A weight decay that holds no weight, or that stands where the learning rate should."""
    name = "optimizer.params.weight_decay"
    decay, rate = context.number(name), context.number(_RATES[0])
    if decay is None or context.text("optimizer.type").lower() not in _NORMALIZED:
        return
    if decay > 1:
        why = "far above what is in use (0 to 0.3): the weights shrink faster than they learn"
        yield context.find("unit", "warning", name, why, "write 0.1, if that is meant")
    elif rate is not None and 0 < decay <= 1e-3 and rate >= max(_LARGE_RATE, 10 * decay):
        why = f"with lr = {rate:g} the two look exchanged"
        yield context.find("unit", "warning", name, why, f'write "lr": {decay:g}, "weight_decay": {rate:g}')


def check_epsilon(context: Context) -> Iterator[Finding]:
    """An epsilon that outweighs the root of the squared gradients' average."""
    name = "optimizer.params.eps"
    epsilon = context.number(name)
    if context.text("optimizer.type").lower() in _ADAM_LIKE and epsilon is not None and epsilon >= 0.01:
        why = "larger than most gradients: steps are then lr / eps times the gradient, as SGD's"
        yield context.find("unit", "warning", name, why, "write 1e-8, or leave it out")


def _inverted(rate: float) -> str:
    """The number whose exponent has the other sign: 1e-4 for 1e4."""
    mantissa, exponent = f"{rate:e}".split("e")
    return f"{float(mantissa):g}e-{int(exponent)}" if int(exponent) else "1e-4"


def check_betas_order(context: Context) -> Iterator[Finding]:
    """The decay of the gradient's average comes first, and is the shorter memory."""
    name = "optimizer.params.betas"
    betas = context.value(name)
    if context.text("optimizer.type").lower() not in _ADAM_LIKE or not isinstance(betas, list):
        return
    if len(betas) == 2 and all(isinstance(beta, float) for beta in betas) and betas[0] > betas[1]:
        path = context.path(name)
        why = "the first is larger: they are the decay of the gradient's average, then of its square's"
        edit = Edit("set", path, [betas[1], betas[0]])
        yield context.find("unit", "warning", path, why, f"write [{betas[1]:g}, {betas[0]:g}]", edit)


def check_counts(context: Context) -> Iterator[Finding]:
    """Sizes that are written in a larger unit than DeepSpeed counts in."""
    for name, least, unit in _COUNTS:
        size = context.number(name)
        # 0 has meanings of its own, or is out of range.
        if size is not None and 0 < size < least and context.written(name):
            why = f"it counts {unit}: so few make every transfer wait for its latency"
            yield context.find("unit", "warning", name, why, "leave it out, or write the whole number")


def check_difficulties(context: Context) -> Iterator[Finding]:
    """Curricula, of the former and the present kind, that begin with what they should end with."""
    metrics = context.at(_METRICS)
    names = metrics if isinstance(metrics, dict) else {}
    for block in (("curriculum_learning",), *((*_METRICS, name) for name in names)):
        paths = (*block, "min_difficulty"), (*block, "max_difficulty")
        low, high = map(context.at, paths)
        if isinstance(low, int | float) and isinstance(high, int | float) and low > high:
            edits = Edit("set", paths[0], high), Edit("set", paths[1], low)
            why = f"above max_difficulty = {high:g}: what is learned becomes easier"
            yield context.find("unit", "warning", paths[0], why, "swap the two", *edits)


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
