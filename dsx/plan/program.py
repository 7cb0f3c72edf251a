"""Which training schedule a pipeline runs: a builder with its options, or one written by hand."""

from __future__ import annotations

from dataclasses import dataclass, field

from dsx.errors import ScheduleError
from dsx.plan import schedule_csv
from dsx.plan.builders import Options, build, divides_backward, placement_of
from dsx.spec.placement import Placement
from dsx.spec.schedule import Op, Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A schedule for whatever number of micro-batches comes, or for one number alone if written by hand.

    Attributes:
        name: One of :data:`dsx.plan.builders.NAMES`; for a schedule written by hand, what errors call it.
        options: For the builder.
        rows: The schedule written by hand, proved to run; None for a builder's.

    >>> Program(name="zbv").placement, Program(name="zbv").divides
    ('v', True)
    """

    name: str
    options: Options = field(default_factory=Options)
    rows: Schedule | None = None

    @classmethod
    def read(cls, text: str, *, name: str) -> Program:
        """A schedule from CSV (:mod:`dsx.plan.schedule_csv`). Raises ScheduleError unless it can run."""
        return cls(name=name, rows=schedule_csv.load(text, name=name))

    @property
    def placement(self) -> Placement:
        """How virtual stages lie on ranks."""
        return placement_of(self.name) if self.rows is None else self.rows.placement

    @property
    def divides(self) -> bool:
        """Whether weight gradients are computed apart from the rest of a backward."""
        if self.rows is None:
            return divides_backward(self.name)
        return any(action.op is Op.BACKWARD_WEIGHT for row in self.rows.rows for action in row)

    def build(self, num_ranks: int, num_chunks: int, num_micro_batches: int) -> Schedule:
        """The schedule's compute actions for this size.

        Raises:
            ScheduleError: The builder cannot, or the schedule was written by hand for another size.
        """
        if self.rows is None:
            return build(self.name, num_ranks, num_chunks, num_micro_batches, self.options)
        have = (self.rows.num_ranks, self.rows.num_chunks, self.rows.num_micro_batches)
        if have != (num_ranks, num_chunks, num_micro_batches):
            raise ScheduleError(
                f"schedule {self.name}",
                "it is written for {} pipeline ranks x {} chunks and {} micro-batches, ".format(*have)
                + f"not for {num_ranks} x {num_chunks} and {num_micro_batches}",
                "write one for this size, or use a builder's: dsx.schedule.name",
            )
        return self.rows
