"""What this rank does in a step of so many micro-batches: built, lowered and proved once for each number."""

from __future__ import annotations

from dataclasses import dataclass, field

from dsx.plan.builders import forward_only
from dsx.plan.program import Program
from dsx.plan.receives import ReceivePlan, receive_plan
from dsx.plan.transfers import lower
from dsx.plan.validate import validate
from dsx.spec.schedule import Schedule
from dsx.spec.stages import StageMap

Step = tuple[Schedule, ReceivePlan]
"""A lowered schedule, and when this rank posts its receives."""


@dataclass(slots=True)
class Programs:
    """The steps of one pipeline rank.

    Args:
        program: Schedule of the training steps.
        stages: The pipeline's virtual stages.
        pp_rank: This rank's pipeline coordinate.
    """

    program: Program
    stages: StageMap
    pp_rank: int
    _steps: dict[tuple[bool, int], Step] = field(default_factory=dict)

    def step(self, num_micro_batches: int, *, training: bool) -> Step:
        """A training step, or the forwards of an evaluation. Raises ScheduleError if there is none."""
        key = (training, num_micro_batches)
        if key not in self._steps:
            self._steps[key] = self._made(self._built(num_micro_batches, training))
        return self._steps[key]

    def put(self, schedule: Schedule) -> None:
        """Train with ``schedule``, of compute actions, whenever a step has so many micro-batches."""
        self._steps[True, schedule.num_micro_batches] = self._made(schedule)

    def _built(self, num_micro_batches: int, training: bool) -> Schedule:
        ranks, chunks = self.stages.num_ranks, self.stages.num_chunks
        if training:
            return self.program.build(ranks, chunks, num_micro_batches)
        return forward_only(ranks, chunks, num_micro_batches, self.stages.placement)

    def _made(self, schedule: Schedule) -> Step:
        lowered = lower(schedule)
        validate(lowered)
        return lowered, receive_plan(lowered, self.pp_rank)
