"""Schedules from CSV, in the form that ``Schedule.to_csv`` and torch.distributed.pipelining write."""

from __future__ import annotations

from dsx.errors import ScheduleError
from dsx.spec.schedule import Action, Schedule


def parse(text: str, *, name: str) -> Schedule:
    """The schedule whose rows ``text`` lists, one line per rank.

    The numbers of stages and micro-batches are read off the actions. Empty cells, which torch writes where a
    rank idles, are skipped. :func:`dsx.plan.validate.validate` says whether the result can run.

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
    return Schedule(name, len(rows), num_chunks, 1 + max(action.micro_batch for action in actions), rows)
