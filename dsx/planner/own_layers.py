"""Plans for a layer list of a user's own: pipeline and data degree, ZeRO stage, schedule and chunks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from dsx.config.batch import ACCUMULATION, MICRO, TRAIN
from dsx.config.deepspeed import precision
from dsx.errors import ConfigError
from dsx.memory.estimate import estimate
from dsx.memory.layer_list import LayerList, RecordedList, list_job, record_list
from dsx.models.flops import WIDTHS, Precision
from dsx.planner.cluster import Cluster, gpu_memory, read_cluster
from dsx.planner.costs import Efficiency, Network, Software
from dsx.planner.inputs import PinnedChoices, fullest_ranks, lowest_stage, update_bytes
from dsx.planner.layer_times import Machine
from dsx.planner.layers import OwnLayers
from dsx.planner.layout import Candidate, Space, Task
from dsx.planner.plan import Looked, Plan, Search, looks_away
from dsx.planner.step_time import Predictor

if TYPE_CHECKING:
    from dsx.memory.layer_record import DeviceKind

_SCHEDULES = ("1f1b", "interleaved")  # Plain layers have no weight gradients that could wait.


@dataclass(frozen=True, slots=True)
class OwnInputs:
    """Inputs of a plan for a layer list of one's own.

    Attributes:
        name: How the list is called in the plan.
        make: Makes the list.
        content: DeepSpeed's keys, without a layout.
        cluster: The cluster to train on.
        gpus: Number of its GPUs.
        global_batch: Samples per step.
        recorded: The list with and without ZeRO-3's gathers, recorded when it is first needed.
    """

    name: str
    make: Callable[[], LayerList]
    content: Mapping[str, Any]
    cluster: Cluster
    gpus: int
    global_batch: int
    recorded: dict[bool, RecordedList] = field(default_factory=dict)

    sequence_length = None

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
        cluster.check_gpus(gpus)
        batch = global_batch or config.get(TRAIN)
        if not isinstance(batch, int):
            raise ConfigError("--global-batch", "it is needed", f"give it, or {TRAIN} in CONFIG")
        if "optimizer" not in config:
            raise ConfigError(
                "optimizer", "it is missing", "name the optimizer whose states are to be counted"
            )
        content = {key: value for key, value in config.items() if key not in (MICRO, ACCUMULATION, TRAIN)}
        return cls(name, make, content, cluster, gpus, batch)

    @property
    def device(self) -> DeviceKind:
        return "cpu" if self.cluster.is_host else "cuda"

    @property
    def precision(self) -> Precision:
        return precision(self.content)

    @property
    def num_parameters(self) -> int:
        """Of the whole list, tied ones once."""
        held = self._layers.elements(1)
        return sum(held) - (held[-1] if self._layers.records.ties else 0)

    @property
    def batch_words(self) -> str:
        return f"{self.global_batch} samples"

    @property
    def offloads(self) -> bool:
        return lowest_stage(self.content) > 0

    def list_for(self, zero_stage: int) -> RecordedList:
        """The list as it is recorded for a ZeRO stage."""
        hooked = zero_stage == 3
        if hooked not in self.recorded:
            self.recorded[hooked] = record_list(self.make, self.precision, self.device, hooked=hooked)
        return self.recorded[hooked]

    @property
    def _layers(self) -> OwnLayers:
        recorded = self.list_for(0)
        return OwnLayers(recorded.records, recorded.samples, WIDTHS[self.precision])

    def search(self, pinned: PinnedChoices, *, looked: Looked = looks_away) -> Search:
        """A search, ready to run.

        Args:
            pinned: What is not to be chosen.
            looked: Told how far the search is.

        Raises:
            ConfigError: A fixed value that cannot be.
            ModelError: A layer that dsx cannot record.
        """
        least = lowest_stage(self.content)
        if pinned.zero is not None and (pinned.zero == 2 or pinned.zero < least):
            why = f"the config offloads, which needs stage {least} or more"
            if pinned.zero == 2:
                why = "a pipeline of your own layers takes as long and as much memory with it as with 1"
            raise ConfigError(f"--zero {pinned.zero}", why, f"use {'1 or 3' if least < 2 else '3'}")
        layers = self._layers
        samples = layers.micro_batch
        if self.global_batch % samples:
            raise ConfigError(
                f"global batch {self.global_batch}",
                f"it is no multiple of the {samples} samples of the list's micro-batch",
                f"use a multiple of {samples}",
            )
        efficiency = Efficiency.of(self.cluster)
        machine = Machine(
            network=Network(self.cluster, efficiency), software=Software(), precision=self.precision
        )
        decided: dict[str, Any] = {
            "tensor": (1,),
            "micro_batches": (samples,),
            "recompute": ("none",),
            "names": _SCHEDULES,
            "zero_stages": tuple(stage for stage in (0, 1, 3) if stage >= least),
        }
        decided |= {} if pinned.pipeline is None else {"pipeline": (pinned.pipeline,)}
        decided |= {} if pinned.zero is None else {"zero_stages": (pinned.zero,)}
        cap = None if pinned.gpu_memory is None else gpu_memory(pinned.gpu_memory, self.cluster).usable_bytes
        found = Search(
            task=Task(layers=layers, machine=machine, global_batch=self.global_batch),
            space=Space.of(self.gpus, **decided),
            memory=lambda _: 0,
            cap_bytes=cap,
            update_bytes=update_bytes(self.content),
            looked=looked,
        )
        return replace(found, memory=lambda layout: self._peak(layout, found.predictor, found.cap))

    def _peak(self, layout: Candidate, predictor: Predictor, cap_bytes: int) -> int:
        """Bytes of the fullest pipeline rank, or of one above the cap; a DsxError if it cannot be run."""
        stages, mesh = predictor.stages(layout), layout.mesh
        recorded, config = self.list_for(layout.zero_stage), self.config_of(layout)
        job = list_job(
            recorded,
            config,
            world_size=self.gpus,
            pipeline=layout.pipeline,
            chunks=layout.chunks,
            schedule=layout.schedule,
            partition_method=[b - a for a, b in pairwise(stages.bounds)],
            device=self.device,
            capacity_bytes=cap_bytes,
        )
        elements = predictor.elements(1)
        peak = 0
        for rank in fullest_ranks(
            layout.pipeline, lambda rank: sum(elements[index] for index in stages.layers_of(rank))
        ):
            peak = max(peak, estimate(job, mesh.rank(pp=rank)).peak.peak_bytes)
            if peak > cap_bytes:
                break
        return peak

    def config_of(self, layout: Candidate) -> dict[str, Any]:
        """The DeepSpeed JSON of a layout."""
        zero = dict(self.content.get("zero_optimization") or {}) | {"stage": layout.zero_stage}
        return dict(self.content) | {
            TRAIN: self.global_batch,
            MICRO: layout.micro_batch,
            ACCUMULATION: layout.micro_batches(self.global_batch),
            "zero_optimization": zero,
        }

    def module_words(self, layout: Candidate, predictor: Predictor) -> str:
        """The layout as arguments of :class:`dsx.PipelineModule`."""
        bounds = predictor.stages(layout).bounds
        counts = [b - a for a, b in pairwise(bounds)]
        return (
            f"dsx.PipelineModule(layers, num_stages={layout.pipeline}, num_chunks={layout.chunks}, "
            f'schedule="{layout.schedule}", partition_method={counts})'
        )


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
    return inputs.search(PinnedChoices(pipeline=pipeline, zero=zero, gpu_memory=gpu_memory)).run(top)
