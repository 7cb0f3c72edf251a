"""Prove that a schedule is complete, ordered and free of deadlock, and count the activations it keeps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from dsx.errors import ScheduleError
from dsx.plan.order import execution_order
from dsx.plan.transfers import has_transfers, lower
from dsx.spec.schedule import Action, Op, Schedule

RELEASES = frozenset({Op.BACKWARD, Op.BACKWARD_WEIGHT})
"""Ops after which a stage's activation is no longer needed."""

_BACKWARDS = RELEASES | {Op.BACKWARD_INPUT}


def validate(schedule: Schedule) -> None:
    """Check a schedule, lowered or not, for training or forward-only.

    Complete: every virtual stage runs every micro-batch forward exactly once, and backward exactly once,
    whole (``B``) or as ``I`` and ``W``, unless the schedule has no backward at all, on the rank that holds
    it; a lowered schedule has exactly the transfers that these imply. Ordered and deadlock-free: run with
    receives that block and sends that do not, every action finds what it needs and every rank reaches its
    end. (Receives must be posted in the order of :func:`dsx.plan.transfers.receive_order`; then both ends of
    a channel agree by construction.)

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
        surplus = have - want
        _refuse(
            schedule, rank, "repeats", Counter({a: n for a, n in surplus.items() if a in want}), "keep one"
        )
        _refuse(schedule, rank, "does not own", surplus, _advice(next(iter(surplus)), want))
    for _ in execution_order(schedule):
        pass


def peak_activations(schedule: Schedule) -> tuple[int, ...]:
    """Most stage activations alive at once, per rank: from a forward to the end of its backward.

    Where the backward is divided, an activation counts in full until its ``W``: the weight gradients need the
    inputs of every linear. (``I`` frees a part of it, which this does not model.) A forward without a
    backward in the schedule keeps nothing beyond itself.
    """
    peaks = []
    for row in schedule.rows:
        ends = {(a.stage, a.micro_batch) for a in row if a.op in RELEASES}
        live = peak = 0
        for action in row:
            if action.op is Op.FORWARD:
                peak = max(peak, live + 1)
                live += (action.stage, action.micro_batch) in ends
            elif action.op in RELEASES:
                live -= 1
        peaks.append(peak)
    return tuple(peaks)


def _expected(schedule: Schedule) -> Schedule:
    """The actions that a complete schedule of this size holds, in any order."""
    training = any(a.op in _BACKWARDS for row in schedule.rows for a in row)
    rows = tuple(tuple(_of_rank(schedule, rank, training)) for rank in range(schedule.num_ranks))
    complete = replace(schedule, rows=rows)
    return lower(complete) if has_transfers(schedule) else complete


def _of_rank(schedule: Schedule, rank: int, training: bool) -> Iterator[Action]:
    parts = (Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)
    divided = {(a.stage, a.micro_batch) for a in schedule.rows[rank] if a.op in parts}
    for stage in schedule.stages_of(rank):
        for micro_batch in range(schedule.num_micro_batches):
            yield Action(stage, Op.FORWARD, micro_batch)
            if training:
                ops = parts if (stage, micro_batch) in divided else (Op.BACKWARD,)
                yield from (Action(stage, op, micro_batch) for op in ops)


def _advice(extra: Action, want: Counter[Action]) -> str:
    other = Action(extra.stage, Op.BACKWARD_INPUT, extra.micro_batch)
    if extra.op is Op.BACKWARD and other in want:
        return f"divide this backward into {other} and its W, or keep it whole: not both"
    return "remove them, or say the placement (loop or v) that the rows follow"


def _refuse(schedule: Schedule, rank: int, verb: str, actions: Counter[Action], fix: str) -> None:
    if actions:
        shown = ", ".join(str(action) for action in [*actions][:8])
        more = f" and {len(actions) - 8} more" if len(actions) > 8 else ""
        raise ScheduleError(f"schedule {schedule.name}, rank {rank}", f"it {verb} {shown}{more}", fix)
