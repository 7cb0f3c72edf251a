"""A planned layout as a config, and the memory that it takes."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from dsx.config.batch import MICRO
from dsx.config.memory_job import job_of
from dsx.config.plan_inputs import PlanInputs
from dsx.config.resolve import resolve
from dsx.plan.memory.estimate import estimate
from dsx.plan.planner.layout import Layout
from dsx.plan.planner.step_time import Predictor


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


_ALL = 4
"""Pipeline ranks that are all looked at."""


@dataclass(frozen=True, slots=True)
class LayoutMemory:
    """Peak memory of layouts, by the ledger.

    Attributes:
        inputs: What is trained.
        predictor: Cuts it into stages.
        on_cpu: Whether the ranks are CPU processes.
        cap_bytes: Above this it does not matter how far above.
    """

    inputs: PlanInputs
    predictor: Predictor
    on_cpu: bool
    cap_bytes: int

    def __call__(self, layout: Layout) -> int:
        """Bytes of the fullest pipeline rank, or of one above the cap.

        Of many ranks the first two, the last and the one with most parameters are looked at: one of these is
        the fullest, or within a few per mille of it.

        Raises:
            DsxError: The layout cannot be run.
        """
        config = layout_config(self.inputs, layout, self.predictor)
        run = resolve(config, world_size=self.inputs.gpus)
        job = job_of(run, device="cpu" if self.on_cpu else "cuda", capacity_bytes=self.cap_bytes)
        ranks = list(range(layout.pipeline))
        if layout.pipeline > _ALL:
            ranks = list(dict.fromkeys((0, ranks[-1], max(ranks, key=run.local_parameters), 1)))
        peak = 0
        for rank in ranks:
            peak = max(peak, estimate(job, run.mesh.rank(pp=rank)).peak.peak_bytes)
            if peak > self.cap_bytes:
                break
        return peak
