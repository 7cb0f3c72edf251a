"""Published runs of several systems, from runs.toml, as the planner takes them."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from dsx.checkpoint.claims import model_of
from dsx.models.spec import Adapter
from dsx.parallel.mesh import Mesh
from dsx.planner.cluster import Cluster, ClusterConfig, described
from dsx.planner.costs import Efficiency, Network, Software
from dsx.planner.layer_times import Machine
from dsx.planner.layers import ModelLayers, model_task
from dsx.planner.layout import Candidate, Task
from dsx.planner.profile import LayerCost
from dsx.planner.step_time import Predictor

SOFTWARE = {
    "fsdp": Software(),
    "foundry, A100": Software(attention_share=0.537),
    "foundry, H100": Software(attention_share=0.760),
    "plain tensor": Software(hides_tensor_backward=False),
}
"""How the systems of the tables use the hardware, by the name that a table gives.

The kernel of attention of LLM Foundry's tables is not torch's: its share is fitted with the constants.
"""


@dataclass(frozen=True)
class HalfRecomputed(ModelLayers):
    """A model of which every second block, or every second product, is computed again."""

    def times(self, machine: Machine, layout: Candidate) -> tuple[LayerCost, ...]:
        """The mean of all and of nothing computed again."""
        nothing = super().times(machine, replace(layout, recompute="none"))
        return tuple(map(_mean, nothing, super().times(machine, replace(layout, recompute="full"))))


def _mean(one: LayerCost, other: LayerCost) -> LayerCost:
    names = (field.name for field in fields(LayerCost))
    return LayerCost(**{name: (getattr(one, name) + getattr(other, name)) / 2 for name in names})


@dataclass(frozen=True, kw_only=True)
class PublishedRun:
    """One row of a table.

    Attributes:
        table: The name of its table.
        model: Its key in the file's models.
        config: The same as a Hugging Face config.
        cluster: What it ran on.
        software: A key of :data:`SOFTWARE`.
        sequence: Tokens.
        gpus: How many.
        tensor: Tensor-parallel degree; the others are ZeRO-3's.
        context: Ranks of these that share each sequence.
        micro_batch: Sequences that a GPU computes at once.
        batch: Sequences per step, of all GPUs.
        recompute: What backward computes again: none, half or full.
        compiled: Whether blocks are compiled.
        adapter: Rank of the adapters that alone are trained, of all linears; 0 for all parameters.
        tokens: Published tokens per second and GPU.
        is_fitted: Whether the constants are fitted to it.
    """

    table: str
    model: str
    config: Mapping[str, Any]
    cluster: Cluster
    software: str = "fsdp"
    sequence: int
    gpus: int
    tensor: int = 1
    context: int = 1
    micro_batch: int
    batch: int
    recompute: str
    compiled: bool = False
    adapter: int = 0
    tokens: float
    is_fitted: bool = False

    def task(self, efficiency: Efficiency, software: Software) -> Task:
        """What the planner predicts."""
        machine = Machine(
            network=Network(self.cluster, efficiency),
            software=replace(software, compiled=self.compiled),
            precision="bf16",
        )
        task = model_task(
            self._spec,
            machine=machine,
            global_batch=self.batch,
            sequence_length=self.sequence,
        )
        if self.recompute != "half":
            return task
        layers = HalfRecomputed(self._spec, self.sequence, task.width)
        return replace(task, layers=layers)

    @cached_property
    def _spec(self) -> Any:
        model = model_of(self.config)
        return replace(model, adapter=Adapter(rank=self.adapter)) if self.adapter else model

    @property
    def layout(self) -> Candidate:
        """As the planner takes it."""
        return Candidate(
            mesh=Mesh.over(self.gpus, tp=self.tensor, cp=self.context),
            micro_batch=self.micro_batch,
            recompute="full" if self.recompute == "half" else self.recompute,  # type: ignore[arg-type]
            sequence_parallel=self.tensor > 1,
            zero_stage=3 if self.gpus > self.tensor else 0,
        )

    def predicted(self, efficiency: Efficiency, software: Software | None = None) -> float:
        """Tokens per second and GPU."""
        task = self.task(efficiency, software or SOFTWARE[self.software])
        seconds = Predictor(task).predict(self.layout).seconds
        return self.batch * self.sequence / seconds / self.gpus


@cache
def content() -> Mapping[str, Any]:
    """The file: models, tables, and what is left out, each with its source."""
    return tomllib.loads((Path(__file__).parent / "runs.toml").read_text(encoding="utf-8"))


@cache
def published() -> tuple[PublishedRun, ...]:
    """All rows of all tables."""
    models = content()["models"]
    return tuple(run for table in content()["table"] for run in _rows(table, models))


def _rows(table: Mapping[str, Any], models: Mapping[str, Any]) -> Iterator[PublishedRun]:
    cluster = described(table["name"], ClusterConfig.model_validate(table["cluster"]))
    for place, row in enumerate(table["rows"], 1):
        values = dict(zip(table["columns"], row, strict=True))
        if table.get("unit") == "tokens of all":
            values["tokens"] /= values["gpus"]
        yield PublishedRun(
            table=table["name"],
            config=models[values["model"]],
            cluster=cluster,
            software=table.get("software", "fsdp"),
            is_fitted=table.get("fitted") == "odd" and place % 2 == 1,
            **values,
        )
