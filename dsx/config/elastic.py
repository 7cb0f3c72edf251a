"""The layout that a run takes when it is started again on some number of ranks (``dsx.elastic``)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from dsx.config.batch import ACCUMULATION, MICRO, TRAIN
from dsx.config.load import SeveralProblemsError, raise_all
from dsx.config.run import RunConfig
from dsx.config.schema import DsxConfig
from dsx.config.wording import at, key
from dsx.errors import ConfigError, DsxError
from dsx.parallel.limits import divisors
from dsx.planner.best_first import best_first

if TYPE_CHECKING:
    from dsx.planner.predicted import LayoutScorer

Attempt: TypeAlias = Callable[[dict[str, Any], DsxConfig, int], RunConfig]
"""(DeepSpeed's keys, dsx block, ranks) -> the run, or a DsxError."""


class _Option(NamedTuple):
    """A candidate number of ranks, with its cost and its resolved run once they are known."""

    ranks: int
    cost: float = 0.0
    run: RunConfig | None = None


def lay_out(
    deepspeed: dict[str, Any],
    dsx: DsxConfig,
    world_size: int,
    attempt: Attempt,
    scorer: LayoutScorer | None = None,
) -> RunConfig:
    """The run on as many of ``world_size`` ranks as a legal layout can use.

    The largest number of ranks wins. Among its layouts, the order of ``dsx.elastic`` decides (tensor, then
    pipeline), or, with a scorer, the shortest predicted step that fits its memory. The micro-batch is the
    largest divisor of the config's that keeps the global batch. The choice depends on the arguments alone, so
    that every rank makes the same choice.
    """
    limits = dsx.elastic
    assert limits is not None
    raise_all("config", list(_problems(deepspeed, dsx)))
    refusals: list[DsxError] = []
    too_large: list[tuple[int, int]] = []

    def options(ranks: int) -> Iterator[_Option]:
        for place, (keys, block) in enumerate(_layouts(deepspeed, dsx)):
            try:
                run = attempt(keys, block, ranks)
            except DsxError as error:
                refusals.append(error)
                continue
            if scorer is None:
                yield _Option(ranks, place, run)
                return
            peak_bytes = scorer.peak_bytes(run)
            if peak_bytes <= scorer.capacity_bytes:
                yield _Option(ranks, scorer.seconds(run), run)
            else:
                too_large.append((-ranks, peak_bytes))

    found = best_first(
        map(_Option, range(world_size, limits.min_ranks - 1, -1)),
        cost=lambda option: (-option.ranks, option.cost),
        grow=lambda option: None if option.run is not None else options(option.ranks),
    )
    chosen = next(found, _Option(0)).run
    if chosen is not None:
        return _noted(chosen, world_size)
    reason = refusals[0] if refusals else None
    if too_large and scorer is not None:
        reason = scorer.too_large(min(too_large)[1])
    raise _nothing(dsx, world_size, reason)


def _problems(deepspeed: Mapping[str, Any], dsx: DsxConfig) -> Iterator[ConfigError]:
    if TRAIN not in deepspeed:
        yield ConfigError(
            key("dsx.elastic"),
            f"without {TRAIN} the global batch would change with the number of ranks",
            f"write {TRAIN}",
        )
    if ACCUMULATION in deepspeed:
        yield ConfigError(
            at(ACCUMULATION, deepspeed[ACCUMULATION]),
            "dsx.elastic changes it with the number of ranks",
            "remove it: it follows from the other two batch keys",
        )
    if "{layout}" in dsx.train.output:
        yield ConfigError(
            at("dsx.train.output", dsx.train.output),
            "dsx.elastic changes the layout, and the run would not find its checkpoints",
            "write a name without {layout}",
        )
    if dsx.profile is not None:
        yield ConfigError(
            at("dsx.profile", dsx.profile),
            "a profile is of one layout, which dsx.elastic changes",
            "remove one of the two; dsx.elastic.cluster chooses by predicted times",
        )
    if dsx.schedule.file is not None:
        yield ConfigError(
            at("dsx.schedule.file", dsx.schedule.file),
            "a file is of one layout, which dsx.elastic changes",
            "use dsx.schedule.name",
        )


def _layouts(deepspeed: dict[str, Any], dsx: DsxConfig) -> Iterator[tuple[dict[str, Any], DsxConfig]]:
    """DeepSpeed's keys and the block of every layout that may be taken, the preferred ones first."""
    limits, written = dsx.elastic, deepspeed.get(MICRO)
    assert limits is not None
    micros: list[dict[str, int]] = [{}]
    if isinstance(written, int) and not isinstance(written, bool) and written > 0:
        micros = [{MICRO: size} for size in reversed(divisors(written))]
    for tensor, pipeline, micro in product(
        limits.tensor or (dsx.parallel.tensor,), limits.pipeline or (dsx.parallel.pipeline,), micros
    ):
        parallel = dsx.parallel.model_copy(update={"tensor": tensor, "pipeline": pipeline})
        yield deepspeed | micro, dsx.model_copy(update={"parallel": parallel})


def _noted(run: RunConfig, world_size: int) -> RunConfig:
    spare = world_size - run.mesh.size
    waiting = f"; {spare} more wait as spares" if spare else ""
    note = (
        f"dsx.elastic: {run.mesh.words}, micro-batch {run.micro_batch_size} x {run.accumulation}, "
        f"on {run.mesh.size} of {world_size} ranks{waiting}"
    )
    return replace(run, spare_ranks=spare, notes=(*run.notes, note))


def _nothing(dsx: DsxConfig, world_size: int, reason: DsxError | None) -> ConfigError:
    limits = dsx.elastic
    assert limits is not None
    if world_size < limits.min_ranks:
        return ConfigError(
            at("dsx.elastic.min_ranks", limits.min_ranks),
            f"{world_size} ranks were started",
            "start more, or lower it",
        )
    if isinstance(reason, SeveralProblemsError):
        reason = reason.problems[0]
    allowed = f"tensor {limits.tensor or 'as written'}, pipeline {limits.pipeline or 'as written'}"
    return ConfigError(
        f"dsx.elastic ({allowed})",
        f"no layout on {limits.min_ranks} to {world_size} ranks"
        + ("" if reason is None else f"; for example, {reason.where}: {reason.what}"),
        "allow other degrees, or change the batch",
    )
