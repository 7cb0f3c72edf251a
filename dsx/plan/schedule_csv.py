"""Schedules from CSV, in the form that ``Schedule.to_csv`` and torch.distributed.pipelining write."""

from __future__ import annotations

from dataclasses import replace

from dsx.errors import ScheduleError
from dsx.plan.validate import validate
from dsx.spec.placement import Placement
from dsx.spec.schedule import Action, Schedule


def parse(text: str, *, name: str, placement: Placement = "loop") -> Schedule:
    """The schedule whose rows ``text`` lists, one line per rank.

    The numbers of stages and micro-batches are read off the actions. Empty cells, which torch writes where a
    rank idles, are skipped. :func:`load` also proves that the result can run.

    Raises:
        ScheduleError: No action at all, one that cannot be read, or stages that the ranks do not divide.
    """
    lines = text.strip().splitlines()
    rows = tuple(tuple(Action.parse(cell) for cell in line.split(",") if cell.strip()) for line in lines)
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
    return Schedule(name, len(rows), num_chunks, num_micro_batches, rows, placement)


def load(text: str, *, name: str, placement: Placement | None = None) -> Schedule:
    """The schedule that ``text`` lists, with :func:`dsx.plan.validate.validate` passed.

    Args:
        text: One line of actions per rank.
        name: What errors and tables call it: a file name, say.
        placement: How stages lie on ranks. By default what the rows show: ``v`` where the second chunk of the
            first rank is the mirrored one, else ``loop``.

    Raises:
        ScheduleError: It cannot be read or cannot run, with the actions at fault.
    """
    schedule = parse(text, name=name, placement=placement or "loop")
    first = {action.stage for action in schedule.rows[0]}
    if placement is None and schedule.num_chunks > 1 and schedule.num_ranks not in first:
        mirrored = replace(schedule, placement="v")
        schedule = mirrored if mirrored.stages_of(0)[1] in first else schedule
    validate(schedule)
    return schedule
