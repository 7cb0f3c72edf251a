"""Prove that a schedule is complete, ordered and free of deadlock, and count the activations it keeps."""

from __future__ import annotations

from collections import Counter

from dsx.errors import ScheduleError
from dsx.plan.order import execution_order
from dsx.plan.transfers import has_transfers, lower
from dsx.spec.schedule import Action, Op, Schedule


def validate(schedule: Schedule) -> None:
    """Check a schedule, lowered or not, for training or forward-only.

    Complete: every virtual stage runs every micro-batch forward exactly once, and backward exactly once
    unless the schedule has no backward at all, on the rank that holds it; a lowered schedule has exactly the
    transfers that these imply. Ordered and deadlock-free: run with receives that block and sends that do not,
    every action finds what it needs and every rank reaches its end. (Receives must be posted in the order of
    :func:`dsx.plan.transfers.receive_order`; then both ends of a channel agree by construction.)

    Raises:
        ScheduleError: Naming the actions at fault.
    """
    if len(schedule.rows) != schedule.num_ranks:
        raise ScheduleError(
            f"schedule {schedule.name}",
            f"{len(schedule.rows)} rows for {schedule.num_ranks} ranks",
            "give one row per pipeline rank",
        )
    expected = _expected(schedule)
    for rank, row in enumerate(schedule.rows):
        if len(row) == len(expected.rows[rank]) and set(row) == set(expected.rows[rank]):
            continue
        have, want = Counter(row), Counter(expected.rows[rank])
        _refuse(schedule, rank, "lacks", want - have, "add them")
        _refuse(schedule, rank, "repeats or does not own", have - want, "remove them")
    for _ in execution_order(schedule):
        pass


def peak_activations(schedule: Schedule) -> tuple[int, ...]:
    """Most stage activations alive at once, per rank: from a forward to its backward.

    A forward without a backward in the schedule keeps nothing beyond itself.
    """
    peaks = []
    for row in schedule.rows:
        returning = {(a.stage, a.micro_batch) for a in row if a.op is Op.BACKWARD}
        live = peak = 0
        for action in row:
            if action.op is Op.FORWARD:
                peak = max(peak, live + 1)
                live += (action.stage, action.micro_batch) in returning
            elif action.op is Op.BACKWARD:
                live -= 1
        peaks.append(peak)
    return tuple(peaks)


def _expected(schedule: Schedule) -> Schedule:
    """The actions that a complete schedule of this size holds, in any order."""
    training = any(a.op is Op.BACKWARD for row in schedule.rows for a in row)
    ops = (Op.FORWARD, Op.BACKWARD) if training else (Op.FORWARD,)
    rows = tuple(
        tuple(
            Action(stage, op, micro_batch)
            for stage in range(rank, schedule.num_stages, schedule.num_ranks)
            for op in ops
            for micro_batch in range(schedule.num_micro_batches)
        )
        for rank in range(schedule.num_ranks)
    )
    complete = Schedule(
        schedule.name, schedule.num_ranks, schedule.num_chunks, schedule.num_micro_batches, rows
    )
    return lower(complete) if has_transfers(schedule) else complete


def _refuse(schedule: Schedule, rank: int, verb: str, actions: Counter[Action], fix: str) -> None:
    if actions:
        shown = ", ".join(str(action) for action in [*actions][:8])
        more = f" and {len(actions) - 8} more" if len(actions) > 8 else ""
        raise ScheduleError(f"schedule {schedule.name}, rank {rank}", f"it {verb} {shown}{more}", fix)
