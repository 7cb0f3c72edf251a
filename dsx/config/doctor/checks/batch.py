"""The three batch keys against each other and the number of ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator

from dsx.config.batch import resolve_batch
from dsx.config.doctor.context import ACCUMULATION, MICRO, TRAIN, UNKNOWN, Context
from dsx.config.doctor.finding import Edit, Finding
from dsx.config.wording import at, either
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
