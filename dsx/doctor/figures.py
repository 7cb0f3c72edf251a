"""Checks that compute: ranks, batch, loss scale, rates, buckets; and names of optimizers and schedules."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import reduce
from typing import Any, Final

from dsx.config.batch import ACCUMULATION, MICRO, TRAIN, resolve_batch
from dsx.config.refusals import (
    ABSENT,
    Context,
    Edit,
    Finding,
    is_optimizer,
    names,
    step,
)
from dsx.config.wording import Path, at, either, plain, suggest
from dsx.doctor.unknown import optimizer_parts, other_names
from dsx.errors import ConfigError
from dsx.parallel.limits import divisors

_SEQUENCE = "sequence_parallel_size"


def data_parallel_size(context: Context) -> int | None:
    """The ranks by which DeepSpeed multiplies the micro-batch (runtime/config.py); None if unknown.

    AutoTP's degree is not divided out: DeepSpeed makes its groups after this.
    """
    if context.world_size is None or context.runner == "dsx":
        return None
    shared = (context.pipeline or 1) * int(context.number(_SEQUENCE) or 1)
    return context.world_size // shared if context.world_size % shared == 0 else None


def check_world(context: Context) -> Iterator[Finding]:
    """Check that the parallel degrees divide the number of ranks."""
    world = context.world_size
    if world is None or context.runner == "dsx":
        return
    yield from _grid(context, world)
    always = (_SEQUENCE, "tensor_parallel.autotp_size", "zero_optimization.zero_hpz_partition_size")
    switched = ("expert_parallel.autoep_size", "hybrid_engine.inference_tp_size")
    on = [name for name in switched if context.is_on(f"{name.partition('.')[0]}.enabled")]
    for name in (*always, *on):
        size = context.number(name)
        if size and context.written(name) and world % min(int(size), world):
            fix = f"use {either(divisors(world))}"
            yield context.find("degree", "error", name, f"it does not divide {world} ranks", fix)
        elif size and context.written(name) and size > world:
            fix = f"use at most {world}"
            if name != always[2]:
                yield context.find("degree", "error", name, f"there are only {world} ranks", fix)
            elif context.stage == 3:
                why = f"there are only {world} ranks: DeepSpeed takes {world}, in silence"
                yield context.find("degree", "warning", name, why, fix)


def _grid(context: Context, world: int) -> Iterator[Finding]:
    """Pipeline stages, and the mesh of data and sequence parallelism (pipe/module.py; initialize)."""
    stages = context.pipeline or 1
    if world % stages:
        why = f"PipelineModule refuses {stages} stages on {world} ranks: they do not divide them"
        yield context.find("degree", "error", ("pipeline",), why, f"use {either(divisors(world))} stages")
    data, sequence = context.number("data_parallel_size"), context.number(_SEQUENCE)
    if data and sequence and context.written(_SEQUENCE) and data * sequence != world:
        why = f"times {_SEQUENCE} = {sequence} it is not {world} ranks: no mesh can be made"
        fix = (
            f"use {world // int(sequence)}"
            if world % sequence == 0
            else f"use a {_SEQUENCE} that divides {world}"
        )
        yield context.find("degree", "error", "data_parallel_size", why, fix)


def check_batch_triple(context: Context) -> Iterator[Finding]:
    """Check that micro-batch x accumulation x data-parallel ranks is the batch."""
    given = {name: context.value(name) for name in (TRAIN, MICRO, ACCUMULATION)}
    if any(value is not None and (_whole(value) or 0) < 1 for value in given.values()):  # or UNKNOWN
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
        why = error.what if error.path else f"{error.what} ({error.where})"  # several keys
        yield context.find("batch-triple", "error", name, why, error.fix)


def check_schedule_length(context: Context) -> Iterator[Finding]:
    """Find a learning-rate schedule that ends before the run does."""
    steps: Any = reduce(step, ("dsx", "train", "steps"), context.source.config)
    name = "scheduler.params.total_num_steps"
    total = context.number(name)
    if isinstance(steps, int) and total is not None and context.written(name) and steps > total:
        why = f"dsx.train.steps is {steps}: the last {steps - total:g} run at the least learning rate"
        yield context.find("schedule-length", "warning", name, why, f"write {steps}, if that is not meant")


def check_rounds(context: Context) -> Iterator[Finding]:
    """Find islands (``dsx.outer``) that never meet before the end of the run."""
    every, steps = (_whole(reduce(step, ("dsx", *key), context.source.config)) for key in _EVERY)
    if every is not None and steps is not None and every > steps > 0:
        why = f"dsx.train.steps is {steps}: the islands average their weights once, after the last step"
        fix = f"use {steps} or less, if that is not meant"
        yield context.find("outer-rounds", "warning", ("dsx", "outer", "every"), why, fix)


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


_EVERY: Final[tuple[tuple[str, str], ...]] = (("outer", "every"), ("train", "steps"))


# Optimizers whose step is about as large as the learning rate, whatever the gradient.
_NORMALIZED: Final = frozenset({"adam", "adamw", "adamax", "nadam", "radam", "lamb", "lion"})
_ADAM_LIKE: Final = _NORMALIZED - {"lion"}
_LARGE_RATE: Final = 0.01  # for them
_RATES: Final = ("optimizer.params.lr", "scheduler.params.warmup_max_lr", "scheduler.params.cycle_max_lr")
_METRICS: Final = ("data_efficiency", "data_sampling", "curriculum_learning", "curriculum_metrics")


def check_learning_rate(context: Context) -> Iterator[Finding]:
    """Find a rate above 1 where weights move by about that much a step, or one that is the weight decay's."""
    kind = context.text("optimizer.type").lower()
    if kind not in _NORMALIZED:
        return
    for name in _RATES:
        rate = context.number(name)
        if rate is not None and rate > 1 and context.written(name):
            why = f"each step of {kind} moves a weight by about this much: the run diverges at once"
            yield context.find("unit", "warning", name, why, f"write {_inverted(rate)}, if that is meant")
    name = "optimizer.params.weight_decay"
    decay, rate = context.number(name), context.number(_RATES[0])
    if decay is not None and rate is not None and 0 < decay <= 1e-3 and rate >= max(_LARGE_RATE, 10 * decay):
        why = f"with lr = {rate:g} the two look exchanged"
        yield context.find("unit", "warning", name, why, f'write "lr": {decay:g}, "weight_decay": {rate:g}')


def _inverted(rate: float) -> str:
    """The number whose exponent has the other sign: 1e-4 for 1e4."""
    mantissa, exponent = f"{rate:e}".split("e")
    return f"{float(mantissa):g}e-{int(exponent)}" if int(exponent) else "1e-4"


def check_betas_order(context: Context) -> Iterator[Finding]:
    """Find betas in the wrong order: the gradient's average comes first, and has the shorter memory."""
    name = "optimizer.params.betas"
    betas = context.value(name)
    if context.text("optimizer.type").lower() not in _ADAM_LIKE or not isinstance(betas, list):
        return
    if len(betas) == 2 and all(isinstance(beta, float) for beta in betas) and betas[0] > betas[1]:
        path = context.path(name)
        why = "the first is larger: they are the decay of the gradient's average, then of its square's"
        edit = Edit("set", path, [betas[1], betas[0]])
        yield context.find("unit", "warning", path, why, f"write [{betas[1]:g}, {betas[0]:g}]", edit)


def check_difficulties(context: Context) -> Iterator[Finding]:
    """Find curricula, of the former and the present kind, that begin with what they should end with."""
    metrics = context.at(_METRICS)
    names = metrics if isinstance(metrics, dict) else {}
    for block in (("curriculum_learning",), *((*_METRICS, name) for name in names)):
        paths = (*block, "min_difficulty"), (*block, "max_difficulty")
        low, high = map(context.at, paths)
        if isinstance(low, int | float) and isinstance(high, int | float) and low > high:
            edits = Edit("set", paths[0], high), Edit("set", paths[1], low)
            why = f"above max_difficulty = {high:g}: what is learned becomes easier"
            yield context.find("unit", "warning", paths[0], why, "swap the two", *edits)


# 4e9 elements are 8 GB in bf16, and overlap_comm makes two such buckets.
_LARGE_BUCKET = 4_000_000_000
_BUCKETS = ("reduce_bucket_size", "allgather_bucket_size", "stage3_prefetch_bucket_size")


def check_buckets(context: Context) -> Iterator[Finding]:
    """Check bucket sizes, which count elements and not bytes."""
    for last in _BUCKETS:
        name = f"zero_optimization.{last}"
        size = context.number(name)
        if size is None or not context.written(name):
            continue
        if size > _LARGE_BUCKET:
            gigabytes = size * 2 / 1e9
            why = f"buckets count elements: in 16 bit this is {gigabytes:,.0f} GB of memory on each rank"
            yield context.find("bucket-size", "warning", name, why, "use 5e8 or less")


# Whole numbers that are not converted: schedules and torch's DataLoader ask for an int.
_COUNTS: Final[tuple[Path, ...]] = (
    ("scheduler", "params", "warmup_num_steps"),
    ("scheduler", "params", "lr_range_test_step_size"),
    (TRAIN,),
    (MICRO,),
    (ACCUMULATION,),
)


def check_whole_numbers(context: Context) -> Iterator[Finding]:
    """Find 1e3 for steps: whole to DeepSpeed's own reader, a float to the Trainer's (lr_schedules.py)."""
    if context.runner != "trainer":
        return
    for path in _COUNTS:
        value, written = context.at(path), context.source.written(path)
        if value is not ABSENT and any(char in written for char in ".eE") and isinstance(value, int):
            why = f"the Trainer reads {written} as a float, where DeepSpeed and torch refuse one"
            edit = Edit("set", path, value)
            yield context.find("wrong-type", "error", path, why, f"write {value}", edit, safe=True)


def check_schedule(context: Context) -> Iterator[Finding]:
    """Find a name that neither DeepSpeed nor torch knows, also one in another case."""
    key, kind = context.table.key("scheduler.type"), context.at(("scheduler", "type"))
    if key is None or not isinstance(kind, str) or kind in (*key.choices, "auto"):
        return
    right = next((name for name in key.choices if plain(name) == plain(kind)), None)
    edits = (Edit("set", ("scheduler", "type"), right),) if right else ()
    other = other_names("schedules").get(plain(kind))
    fix = f'write "{right}"' if right else f'write "{other}", if that is meant' if other else ""
    why = "DeepSpeed and torch know no such schedule (names are case-sensitive)"
    fix = fix or suggest(kind, key.choices, otherwise=f"use {either(key.choices[:5])}")
    yield context.find("not-a-choice", "error", "scheduler.type", why, fix, *edits, safe=True)


def check_optimizer(context: Context) -> Iterator[Finding]:
    """Find a name that DeepSpeed does not know (runtime/engine.py)."""
    name = "optimizer.type"
    kind = context.at(("optimizer", "type"))
    if not isinstance(kind, str) or kind == "auto" or is_optimizer(kind):
        return
    if kind.lower() in names("removed"):
        why = "DeepSpeed 0.19.8 has removed it (since 0.19.7)"
        yield context.find("removed", "error", name, why, 'use "AdamW"')
        return
    known = {each.lower(): each for each in sorted(names("deepspeed") | names("torch"))}
    # adam_w and sgd are surely AdamW and SGD; DeepSpeedCPUAdam and adamw_8bit not quite.
    right = known.get(plain(kind))
    edits = (Edit("set", ("optimizer", "type"), right),) if right else ()
    bare = known.get(reduce(lambda word, part: word.replace(part, ""), optimizer_parts(), plain(kind)))
    fix = f'write "{right}"' if right else f'write "{bare}", if that is meant' if bare else ""
    fix = fix or suggest(kind, known.values(), otherwise='use "AdamW"')
    yield context.find("optimizer-name", "error", name, "no such optimizer", fix, *edits, safe=True)


def check_clipping(context: Context) -> Iterator[Finding]:
    """Find ``max_grad_norm`` among the parameters, which DeepSpeed refuses."""
    path = ("optimizer", "params", "max_grad_norm")
    value = context.at(path)
    if value is ABSENT:
        return
    edits = [Edit("remove", path)]
    clips = context.at(("gradient_clipping",))
    fix = f'remove it; "gradient_clipping": {clips} is set already'
    if clips is ABSENT:
        edits.append(Edit("set", ("gradient_clipping",), value))
        fix = f'remove it and write "gradient_clipping": {value} at the top level'
    yield context.find(
        "max-grad-norm",
        "error",
        path,
        "DeepSpeed refuses it here",
        fix,
        *edits,
        safe=clips in (ABSENT, value),
    )
