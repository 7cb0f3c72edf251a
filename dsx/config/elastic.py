"""The layout that a run takes on however many ranks it is started again (``dsx.elastic``)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, TypeAlias

from dsx.config.batch import ACCUMULATION, MICRO, TRAIN
from dsx.config.load import at, raise_all
from dsx.config.run import RunConfig
from dsx.config.schema import Degree, DsxConfig, ElasticConfig
from dsx.errors import ConfigError, DsxError
from dsx.memory.estimate import estimate_run
from dsx.memory.job import job_of
from dsx.memory.ops import DeviceKind
from dsx.planner.cluster import Cluster, read_cluster
from dsx.planner.predicted import predicted_step

Attempt: TypeAlias = Callable[[dict[str, Any], DsxConfig, int], RunConfig]
"""(DeepSpeed's keys, dsx block, ranks) -> the run, or a DsxError."""


@dataclass(frozen=True, slots=True)
class _Layout:
    """A candidate: degrees as in ``dsx.parallel``, and a micro-batch (None: what the config says)."""

    tensor: Degree
    pipeline: Degree
    micro: int | None


def lay_out(deepspeed: dict[str, Any], dsx: DsxConfig, world_size: int, attempt: Attempt) -> RunConfig:
    """The run on as many of ``world_size`` ranks as a legal layout can use.

    Most ranks go first. Among the layouts of as many, the order of ``dsx.elastic`` decides (tensor, then
    pipeline), or with ``dsx.elastic.cluster`` the shortest predicted step that fits its memory. The
    micro-batch is the largest divisor of the config's that keeps the global batch. The choice depends on
    the arguments alone, so that every rank makes the same.

    Args:
        deepspeed: DeepSpeed's keys, checked.
        dsx: The block; its ``elastic`` is not None.
        world_size: Ranks that were started.
        attempt: Resolves a config for a number of ranks.

    Raises:
        ConfigError: A key that contradicts elasticity, or no layout within its limits, with a reason.
    """
    limits = dsx.elastic
    assert limits is not None
    raise_all("config", list(_problems(deepspeed, dsx)))
    cluster = None if limits.cluster is None else read_cluster(limits.cluster)
    illegal: DsxError | None = None
    too_large: DsxError | None = None
    for ranks in range(world_size, limits.min_ranks - 1, -1):
        found: list[RunConfig] = []
        for layout in _layouts(deepspeed, dsx, limits):
            try:
                found.append(_take(layout, deepspeed, dsx, ranks, attempt))
            except DsxError as error:
                illegal = illegal or error
                continue
            if cluster is None:
                break
        chosen = _choose(found, cluster)
        if chosen is not None:
            return _noted(chosen, world_size)
        if found and cluster is not None:
            too_large = too_large or _too_large(found, cluster)
    raise _nothing(limits, world_size, too_large or illegal)


def _problems(deepspeed: Mapping[str, Any], dsx: DsxConfig) -> Iterator[ConfigError]:
    if TRAIN not in deepspeed:
        yield ConfigError(
            "dsx.elastic",
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


def _layouts(deepspeed: Mapping[str, Any], dsx: DsxConfig, limits: ElasticConfig) -> Iterator[_Layout]:
    """Candidates, the preferred first."""
    tensor: Sequence[Degree] = limits.tensor or (dsx.parallel.tensor,)
    pipeline: Sequence[Degree] = limits.pipeline or (dsx.parallel.pipeline,)
    written = deepspeed.get(MICRO)
    micros = (
        [n for n in range(written, 0, -1) if written % n == 0]
        if isinstance(written, int) and not isinstance(written, bool) and written > 0
        else [None]
    )
    for tp, pp, micro in product(tensor, pipeline, micros):
        yield _Layout(tp, pp, micro)


def _take(
    layout: _Layout, deepspeed: dict[str, Any], dsx: DsxConfig, ranks: int, attempt: Attempt
) -> RunConfig:
    parallel = dsx.parallel.model_copy(update={"tensor": layout.tensor, "pipeline": layout.pipeline})
    keys = deepspeed if layout.micro is None else deepspeed | {MICRO: layout.micro}
    return attempt(keys, dsx.model_copy(update={"parallel": parallel}), ranks)


def _choose(found: list[RunConfig], cluster: Cluster | None) -> RunConfig | None:
    if cluster is None:
        return found[0] if found else None
    fits = [run for run in found if _peak_bytes(run, cluster) <= cluster.usable_bytes]
    return min(fits, key=lambda run: predicted_step(run, cluster).seconds, default=None)


def _peak_bytes(run: RunConfig, cluster: Cluster) -> int:
    device: DeviceKind = "cpu" if cluster.is_host else "cuda"
    return estimate_run(job_of(run, device=device, capacity_bytes=cluster.usable_bytes)).peak_bytes


def _noted(run: RunConfig, world_size: int) -> RunConfig:
    spare = world_size - run.mesh.size
    waiting = f"; {spare} more wait as spares" if spare else ""
    mesh = run.mesh
    note = (
        f"dsx.elastic: {mesh.words}, micro-batch "
        f"{run.micro_batch_size} x {run.accumulation}, on {mesh.size} of {world_size} ranks{waiting}"
    )
    return replace(run, spare_ranks=spare, notes=(*run.notes, note))


def _too_large(found: Sequence[RunConfig], cluster: Cluster) -> ConfigError:
    need, have = min(_peak_bytes(run, cluster) for run in found) / 2**30, cluster.usable_bytes / 2**30
    return ConfigError(
        f"dsx.elastic.cluster {cluster.name}",
        f"at least an estimated {need:.1f} GiB per rank do not fit its {have:.1f} GiB",
        "see `dsx estimate`",
    )


def _nothing(limits: ElasticConfig, world_size: int, reason: DsxError | None) -> ConfigError:
    if world_size < limits.min_ranks:
        return ConfigError(
            at("dsx.elastic.min_ranks", limits.min_ranks),
            f"{world_size} ranks were started",
            "start more, or lower it",
        )
    allowed = f"tensor {limits.tensor or 'as written'}, pipeline {limits.pipeline or 'as written'}"
    return ConfigError(
        f"dsx.elastic ({allowed})",
        f"no layout on {limits.min_ranks} to {world_size} ranks; for example: {reason}",
        "allow other degrees, or change the batch",
    )
