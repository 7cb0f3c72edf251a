"""The planner's step time of a config, whatever chose its layout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Self

from dsx.config.run import RunConfig
from dsx.errors import ConfigError
from dsx.memory.estimate import estimate_run
from dsx.memory.job import job_of
from dsx.planner.cluster import Cluster
from dsx.planner.costs import Efficiency, Network, Software
from dsx.planner.layer_times import Machine
from dsx.planner.layers import model_task
from dsx.planner.layout import Candidate, Task
from dsx.planner.step_time import Predictor, StepTime
from dsx.terminal import amount


def task_of(
    run: RunConfig, cluster: Cluster, efficiency: Efficiency | None = None, imbalance: float = 1.0
) -> Task:
    """The task of a run on ``cluster``; ``imbalance`` as :func:`~dsx.memory.job.job_of` has it."""
    cluster.peak(run.precision)
    return model_task(
        run.model,
        machine=Machine(
            network=Network(cluster, efficiency or Efficiency.of(cluster)),
            software=Software(compiled=run.dsx.compile == "blocks" and not cluster.is_host),
            precision=run.precision,
        ),
        global_batch=run.global_batch_size,
        sequence_length=run.sequence_length,
        vocab_multiple=run.dsx.model.vocab_multiple,
        documents=run.dsx.data.keeps_apart,
        chunk_tokens=run.dsx.loss.chunk_tokens,
        imbalance=imbalance,
    )


def layout_of(run: RunConfig) -> Candidate:
    """The layout of a run; a schedule from a file counts as 1f1b, or as interleaved if it has chunks."""
    usual = "interleaved" if run.chunks > 1 else "1f1b"
    return Candidate(
        mesh=run.mesh,
        schedule=usual if run.program.rows is not None else run.program.name,
        chunks=run.chunks,
        micro_batch=run.micro_batch_size,
        recompute="none" if run.dsx.recompute == "auto" else run.dsx.recompute,
        sequence_parallel=run.dsx.parallel.sequence_parallel,
        context_method=run.dsx.parallel.method if run.mesh.cp > 1 else "all_gather",
        mlp_tiles=run.dsx.mlp_tiles,
        zero_stage=run.zero_stage,
        reduces_micro_batches=run.reduces_micro_batches,
        bounds=tuple(run.stage_map.bounds),
    )


def predicted_step(run: RunConfig, cluster: Cluster) -> StepTime:
    """The time of a training step of ``run`` on ``cluster``; offload counts as nothing."""
    return Predictor(task_of(run, cluster)).predict(layout_of(run))


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutScorer:
    """What whole runs are compared by.

    Attributes:
        peak_bytes: Gives the estimated peak of a run's fullest rank.
        seconds: Gives the predicted time of a run's step.
    """

    name: str
    capacity_bytes: int
    peak_bytes: Callable[[RunConfig], int]
    seconds: Callable[[RunConfig], float]

    @classmethod
    def of(cls, cluster: Cluster, capacity_bytes: int | None = None) -> Self:
        """The scorer by a cluster's rates and memory, or by ``capacity_bytes`` in place of its memory."""
        if cluster.sites > 1 and not cluster.gpus_per_site:
            raise ConfigError(
                f"cluster {cluster.name}: sites = {cluster.sites}",
                "runs are compared on one of them",
                "remove sites and across",
            )
        capacity = cluster.usable_bytes if capacity_bytes is None else capacity_bytes
        job = partial(job_of, device="cpu" if cluster.is_host else "cuda", capacity_bytes=capacity)
        return cls(
            name=cluster.name,
            capacity_bytes=capacity,
            peak_bytes=lambda run: estimate_run(job(run)).peak_bytes,
            seconds=lambda run: predicted_step(run, cluster).seconds,
        )

    def too_large(self, peak_bytes: int) -> ConfigError:
        """The error when no layout fits, with the peak of the smallest."""
        need, have = amount(peak_bytes), amount(self.capacity_bytes)
        return ConfigError(
            f"dsx.elastic.cluster {self.name}",
            f"at least an estimated {need} per rank do not fit its {have}",
            "see `dsx estimate`",
        )
