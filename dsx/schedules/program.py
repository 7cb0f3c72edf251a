"""Which training schedule a pipeline runs: a builder's with options, or one written by hand, as CSV."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise

from dsx.errors import ScheduleError
from dsx.parallel.stages import Placement
from dsx.schedules.builders import Options, build, default_chunks, divides_backward, placement_of
from dsx.schedules.interleaved import check_numbers
from dsx.schedules.schedule import Action, Op, Schedule
from dsx.schedules.simulate import validate
from dsx.terminal import shortened


def parse(text: str, *, name: str, placement: Placement = "loop") -> Schedule:
    """The schedule whose rows ``text`` lists, one line per rank.

    The numbers of stages and micro-batches are read off the actions. Empty cells, which torch writes where a
    rank idles, are skipped. :func:`load` also proves that the result can run.
    """
    lines = text.rstrip().splitlines()
    blank = next((number for number, line in enumerate(lines) if line.strip()), 0)
    rows = tuple(
        _row(line, f"schedule {name}, row {number}") for number, line in enumerate(lines[blank:], blank + 1)
    )
    actions = [action for row in rows for action in row]
    if not actions:
        raise ScheduleError(f"schedule {name}", "it has no actions", "write one line of actions per rank")
    num_stages = 1 + max(action.stage for action in actions)
    num_chunks, rest = divmod(num_stages, len(rows))
    if rest:
        raise ScheduleError(
            f"schedule {name}",
            f"its {num_stages} virtual stages do not divide over its {len(rows)} rows",
            "write one line per pipeline rank",
        )
    num_micro_batches = 1 + max(action.micro_batch for action in actions)
    check_numbers(name, len(rows), num_chunks, num_micro_batches)
    return Schedule(name, len(rows), num_chunks, num_micro_batches, rows, placement)


def _row(line: str, where: str) -> tuple[Action, ...]:
    row = []
    for cell, text in enumerate(line.split(","), 1):
        try:
            row += [Action.parse(text)] if text.strip() else []
        except ScheduleError as error:
            raise ScheduleError(
                f"{where}, cell {cell}", f"{shortened(text.strip(), 40)!r} is no action", error.fix
            ) from None
    return tuple(row)


def load(text: str, *, name: str, placement: Placement | None = None) -> Schedule:
    """The schedule that ``text`` lists, after :func:`dsx.schedules.simulate.validate` has passed it.

    Args:
        text: One line of actions per rank.
        name: What errors and tables call it: a file name, say.
        placement: How stages lie on ranks. By default what the rows show: ``v`` if the first rank's second
            chunk is the last stage, else ``loop``.
    """
    schedule = parse(text, name=name, placement=placement or "loop")
    first = {action.stage for action in schedule.rows[0]}
    if placement is None and schedule.num_chunks > 1 and schedule.num_ranks not in first:
        mirrored = replace(schedule, placement="v")
        schedule = mirrored if mirrored.stages_of(0)[1] in first else schedule
    validate(schedule)
    return schedule


@cache
def _small(name: str) -> Schedule:
    """A builder's schedule for two ranks."""
    return build(name, 2, default_chunks(name), 4, Options())


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A schedule for any number of micro-batches, or, if it is written by hand, for one number alone.

    Attributes:
        name: One of :data:`dsx.schedules.builders.NAMES`, or the name that errors give a schedule written by
            hand.
        rows: The schedule written by hand, proved to run; None for a builder's.

    >>> Program(name="zbv").placement, Program(name="zbv").divides
    ('v', True)
    """

    name: str
    options: Options = field(default_factory=Options)
    rows: Schedule | None = None

    @classmethod
    def read(cls, text: str, *, name: str) -> Program:
        """A schedule from CSV (:mod:`dsx.schedules.program`). Raises ScheduleError unless it can run."""
        return cls(name=name, rows=load(text, name=name))

    @property
    def placement(self) -> Placement:
        return placement_of(self.name) if self.rows is None else self.rows.placement

    @property
    def divides(self) -> bool:
        """Whether weight gradients are computed apart from the rest of a backward."""
        if self.rows is None:
            return divides_backward(self.name)
        return any(action.op is Op.BACKWARD_WEIGHT for row in self.rows.rows for action in row)

    @property
    def piles_up(self) -> bool:
        """Whether the last stage runs a forward before the backward of the one before, as GPipe does."""
        made = _small(self.name) if self.rows is None else self.rows
        last = made.num_stages - 1
        ops = [action.op for action in made.rows[made.rank_of(last)] if action.stage == last]
        done = [op for op in ops if op is not Op.BACKWARD_WEIGHT]
        return any(one is two is Op.FORWARD for one, two in pairwise(done))

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
