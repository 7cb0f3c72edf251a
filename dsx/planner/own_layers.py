"""Plans for a layer list of a user's own: pipeline and data degree, ZeRO stage, schedule and chunks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from dsx.config.batch import ACCUMULATION, MICRO, TRAIN, Batch
from dsx.config.deepspeed import deepspeed_problems
from dsx.config.load import raise_all
from dsx.errors import ConfigError
from dsx.memory.estimate import Job
from dsx.memory.layer_list import (
    LayerList,
    ListRecords,
    declared_bytes,
    layers_job,
    record_list,
    require_optimizer,
)
from dsx.models.flops import WIDTHS
from dsx.planner.cluster import Cluster, read_cluster
from dsx.planner.costs import Network, Software
from dsx.planner.inputs import Calibration, PinnedChoices, PlanInputs, plan_search
from dsx.planner.layer_times import Machine
from dsx.planner.layers import OwnLayers
from dsx.planner.layout import Candidate, Task
from dsx.planner.plan import Plan
from dsx.planner.step_time import Predictor


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnInputs(PlanInputs):
    """Inputs of a plan for a layer list of one's own; ``content`` has DeepSpeed's keys alone.

    Attributes:
        recorded: The list with and without ZeRO-3's gathers, recorded when it is first needed.
    """

    make: Callable[[], LayerList]
    recorded: dict[bool, ListRecords] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        name: str,
        make: Callable[[], LayerList],
        config: Mapping[str, Any],
        *,
        cluster: Cluster,
        gpus: int,
        global_batch: int | None,
    ) -> OwnInputs:
        """Check what a plan needs. Raises ConfigError if something is missing or cannot be."""
        if cluster.sites > 1:
            raise ConfigError(
                f"cluster {cluster.name}: sites = {cluster.sites}",
                "a layer list is planned for one of them",
                "remove sites and across, and plan for the GPUs of one site",
            )
        cluster = cluster.holding(gpus)
        raise_all("the config", deepspeed_problems(config))
        declared_bytes(config)
        batch = global_batch or config.get(TRAIN)
        if not isinstance(batch, int):
            raise ConfigError("--global-batch", "it is needed", f"give it, or {TRAIN} in CONFIG")
        require_optimizer(config)
        content = {key: value for key, value in config.items() if key not in (MICRO, ACCUMULATION, TRAIN)}
        return cls(name=name, make=make, content=content, cluster=cluster, gpus=gpus, global_batch=batch)

    @property
    def num_parameters(self) -> int:
        held = self.list_for(0).elements()
        return sum(held) - (held[-1] if self.list_for(0).ties else 0)

    @property
    def batch_words(self) -> str:
        return f"{self.global_batch} samples"

    @property
    def decided(self) -> dict[str, Any]:
        return {
            "tensor": (1,),
            "micro_batches": (self.list_for(0).samples,),
            "recompute": ("none",),
            "names": ("1f1b", "interleaved"),  # Plain layers have no weight gradients that could wait.
            "zero_stages": tuple(stage for stage in (0, 1, 3) if stage >= self.lowest_zero_stage),
        }

    def list_for(self, zero_stage: int) -> ListRecords:
        hooked = zero_stage == 3
        if hooked not in self.recorded:
            self.recorded[hooked] = record_list(self.make, self.precision, self.device, hooked=hooked)
        return self.recorded[hooked]

    def no_share(self, micro_batch: str, shares: str) -> ConfigError:
        return ConfigError(
            f"the layers' micro-batch = {micro_batch}",
            f"it divides no rank's share of the global batch ({shares} samples)",
            "use a multiple of it for every rank as --global-batch, or more --pipeline ranks",
        )

    def check(self, pinned: PinnedChoices) -> None:
        super(OwnInputs, self).check(pinned)
        if pinned.zero == 2:
            raise ConfigError(
                "--zero 2",
                "a pipeline of your own layers takes as long and as much memory with it as with 1",
                f"use {'1 or 3' if self.lowest_zero_stage < 2 else '3'}",
            )
        samples = self.list_for(0).samples
        if self.global_batch % samples:
            raise ConfigError(
                f"global batch {self.global_batch}",
                f"it is no multiple of the {samples} samples of the list's micro-batch",
                f"use a multiple of {samples}",
            )

    def task(self, rates: Calibration) -> Task:
        machine = Machine(
            network=Network(rates.cluster, rates.efficiency), software=Software(), precision=self.precision
        )
        layers = OwnLayers(self.list_for(0), WIDTHS[self.precision])
        return Task(layers=layers, machine=machine, global_batch=self.global_batch)

    def job(self, layout: Candidate, predictor: Predictor, capacity_bytes: int) -> Job:
        return layers_job(
            self.make,
            self.config_of(layout, predictor),
            world_size=self.gpus,
            pipeline=layout.pipeline,
            chunks=layout.chunks,
            schedule=layout.schedule,
            partition_method=_counts(layout, predictor),
            device=self.device,
            capacity_bytes=capacity_bytes,
            recorded=self.list_for(layout.zero_stage),
        )

    def config_of(self, layout: Candidate, predictor: Predictor) -> dict[str, Any]:
        del predictor
        zero = dict(self.content.get("zero_optimization") or {}) | {"stage": layout.zero_stage}
        batch = Batch(self.global_batch, layout.micro_batch, layout.micro_batches(self.global_batch))
        return self.content | batch.keys() | {"zero_optimization": zero}

    def module_words(self, layout: Candidate, predictor: Predictor) -> str:
        return (
            f"dsx.PipelineModule(layers, num_stages={layout.pipeline}, num_chunks={layout.chunks}, "
            f'schedule="{layout.schedule}", partition_method={_counts(layout, predictor)})'
        )


def _counts(layout: Candidate, predictor: Predictor) -> list[int]:
    return [b - a for a, b in pairwise(predictor.stages(layout).bounds)]


def plan_layers(
    make: Callable[[], LayerList],
    config: Mapping[str, Any],
    *,
    cluster: str,
    gpus: int,
    global_batch: int | None = None,
    pipeline: int | None = None,
    zero: int | None = None,
    gpu_memory: float | None = None,
    top: int = 5,
) -> Plan:
    """The layouts that train a layer list fastest, as ``dsx plan --layers`` ranks them.

    Args:
        make: Makes the list and its micro-batch, on whatever device torch is told to.
        config: DeepSpeed's keys.
        cluster: A known cluster's name, or the file of one.
        gpus: How many of its GPUs.
        global_batch: Samples per step; None for ``train_batch_size`` of the config.
        pipeline: Pipeline degree; None for any.
        zero: ZeRO stage; None for any.
        gpu_memory: All GiB of a GPU; None for the cluster's.
        top: How many pipeline degrees to rank.

    Raises:
        ConfigError: Something that is missing or cannot be.
        LayoutError: Nothing fits.
        ModelError: A layer that dsx cannot record.
    """
    inputs = OwnInputs.of(
        getattr(make, "__name__", "layers"),
        make,
        config,
        cluster=read_cluster(cluster),
        gpus=gpus,
        global_batch=global_batch,
    )
    pinned = PinnedChoices(pipeline=pipeline, zero=zero, gpu_memory=gpu_memory)
    return plan_search(inputs, pinned).run(top)
