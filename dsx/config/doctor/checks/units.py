"""Legal numbers that are hardly meant: a unit or an exponent's sign that slipped, two that changed places."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from dsx.config.doctor.context import Context
from dsx.config.doctor.finding import Edit, Finding

# Optimizers whose step is about as large as the learning rate, whatever the gradient.
_NORMALIZED: Final = frozenset({"adam", "adamw", "adamax", "nadam", "radam", "lamb", "lion"})
_ADAM_LIKE: Final = _NORMALIZED - {"lion"}
_RATES: Final = ("optimizer.params.lr", "scheduler.params.warmup_max_lr", "scheduler.params.cycle_max_lr")
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
