"""Legal numbers that are hardly meant: a unit or an exponent's sign that slipped, two that changed places."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from dsx.config.doctor.context import Context
from dsx.config.doctor.finding import Edit, Finding

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
