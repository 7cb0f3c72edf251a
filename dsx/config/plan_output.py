"""A planned layout as a config, and the memory that it takes."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

from dsx.config.batch import MICRO
from dsx.config.memory_job import job_of
from dsx.config.plan_inputs import PlanInputs
from dsx.config.resolve import resolve
from dsx.config.run import RunConfig
from dsx.plan.memory.estimate import estimate
from dsx.plan.planner.layout import Layout
from dsx.plan.planner.step_time import Predictor

_ALL_LIVE = ("gpipe", "looped_bfs")  # Their activations grow with the number of micro-batches.
_ROUNDS = 3  # Micro-batches per rank, after which a pipeline keeps no more than it did.


def layout_config(inputs: PlanInputs, layout: Layout, predictor: Predictor) -> dict[str, Any]:
    """The DeepSpeed JSON of a layout, ``dsx`` block and all: what :func:`~dsx.config.resolve.resolve` takes.

    The cut into stages is written out, as the plan's times are for that one.
    """
    content = copy.deepcopy(inputs.content)
    content[MICRO] = layout.micro_batch
    zero = content.pop("zero_optimization", {})
    content["zero_optimization"] = zero | {"stage": layout.zero_stage}
    block = content["dsx"]
    block["parallel"] = {
        "tensor": layout.tensor,
        "pipeline": layout.pipeline,
        "chunks": layout.chunks,
        "sequence_parallel": layout.sequence_parallel,
    }
    if layout.pipeline > 1:
        stages = predictor.stages(layout)
        counts = [len(stages.layers(stage)) for stage in range(stages.num_stages)]
        block["schedule"], block["partition"] = {"name": layout.schedule}, {"method": counts}
    block["recompute"] = layout.recompute
    if layout.reduces_micro_batches:
        block["zero"] = block.get("zero", {}) | {"reduce": "micro_batch"}
    elif layout.zero_stage != 2 and "zero" in block:
        block["zero"].pop("reduce", None)
    return content


@dataclass(frozen=True, slots=True)
class LayoutMemory:
    """Peak memory of layouts, by the ledger.

    Attributes:
        inputs: What is trained.
        predictor: Cuts it into stages.
        on_cpu: Whether the ranks are CPU processes.
    """

    inputs: PlanInputs
    predictor: Predictor
    on_cpu: bool

    def __call__(self, layout: Layout) -> int:
        """Bytes of the fullest of the first, the last and the heaviest pipeline rank.

        Raises:
            DsxError: The layout cannot be run.
        """
        config = layout_config(self.inputs, layout, self.predictor)
        run = resolve(config, world_size=self.inputs.gpus)
        job = job_of(_shorter(run), device="cpu" if self.on_cpu else "cuda")
        last = layout.pipeline - 1
        heaviest = max(range(layout.pipeline), key=run.local_parameters)
        ranks = sorted({0, last, heaviest})
        peaks = [estimate(job, run.mesh.rank(pp=rank)).peak.peak_bytes for rank in ranks]
        return max(peaks)


def _shorter(run: RunConfig) -> RunConfig:
    """The run with as many micro-batches as tell its peak.

    Groups of interleaved schedules keep their size: with r of m left over they have r / (m / p) more.
    """
    ranks, count = run.mesh.pp, run.accumulation
    if run.program.name in _ALL_LIVE:
        return run
    rounds = max(1, count // ranks)
    more = -(-(count % ranks) // rounds)
    return replace(run, accumulation=min(count, _ROUNDS * (ranks + more)))
