"""The planner's step time of a config, whatever chose its layout."""

from __future__ import annotations

from dsx.config.run import RunConfig
from dsx.planner.cluster import Cluster
from dsx.planner.costs import Efficiency, Network, Software
from dsx.planner.layer_times import Machine
from dsx.planner.layout import PlannedLayout
from dsx.planner.step_time import Predictor, StepTime, Task


def predicted_step(config: RunConfig, cluster: Cluster) -> StepTime:
    """What a training step of ``config`` would take on ``cluster``.

    A schedule from a file counts as 1f1b, or as interleaved where it has chunks; offload counts as none.

    Raises:
        ConfigError: The cluster has no rate for the config's precision.
    """
    task = Task(
        model=config.model,
        machine=Machine(
            network=Network(cluster, Efficiency.of(cluster)), software=Software(), precision=config.precision
        ),
        global_batch=config.global_batch_size,
        sequence_length=config.sequence_length,
        vocab_multiple=config.dsx.model.vocab_multiple,
    )
    cluster.peak(config.precision)
    usual = "interleaved" if config.chunks > 1 else "1f1b"
    layout = PlannedLayout(
        tensor=config.mesh.tp,
        pipeline=config.mesh.pp,
        data=config.mesh.dp,
        schedule=usual if config.program.rows is not None else config.program.name,
        chunks=config.chunks,
        micro_batch=config.micro_batch_size,
        recompute="none" if config.dsx.recompute == "auto" else config.dsx.recompute,
        sequence_parallel=config.dsx.parallel.sequence_parallel,
        zero_stage=config.zero_stage,
        reduces_micro_batches=config.dsx.zero.reduce == "micro_batch",
        bounds=tuple(config.stage_map.bounds),
    )
    return Predictor(task).predict(layout)
