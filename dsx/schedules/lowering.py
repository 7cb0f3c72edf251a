"""The transfers that a schedule's compute actions imply, and the order of messages on every channel.

A channel is directed: forward activations (kind ``F``) or backward gradients (``B``) from one pipeline rank
to another. NCCL matches the transfers of a channel by order alone, so a receiver must post its receives in
the order in which the sender sends: :func:`receive_order`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from dsx.errors import ScheduleError
from dsx.schedules.schedule import TRANSFERS, Action, Op, Schedule

Kind = Literal["F", "B"]
Message = tuple[int, int]
"""(virtual stage that receives, micro-batch)."""

_SENDS: dict[Op, tuple[Kind, int]] = {Op.SEND_F: ("F", 1), Op.SEND_B: ("B", -1)}


def lower(schedule: Schedule) -> Schedule:
    """The schedule with each receive just before its use and each send just after its producer.

    The gradient that a stage returns leaves after its ``B``, or after its ``I``; ``W`` moves nothing.
    Neighbouring virtual stages on one rank hand over locally and get no transfer.

    Raises:
        ScheduleError: The schedule has transfers already.
    """
    if has_transfers(schedule):
        raise ScheduleError(f"schedule {schedule.name}", "it has transfers already", "lower it once")
    rows = tuple(
        tuple(out for action in row for out in _with_transfers(schedule, action)) for row in schedule.rows
    )
    return replace(schedule, rows=rows)


def channels(schedule: Schedule) -> dict[tuple[Kind, int, int], tuple[Message, ...]]:
    """Messages of every channel (kind, source, destination) of a lowered schedule, in sending order.

    Raises:
        ScheduleError: The schedule is not lowered.
    """
    _require_lowered(schedule)
    found: dict[tuple[Kind, int, int], list[Message]] = {}
    for source, row in enumerate(schedule.rows):
        for action in row:
            if action.op in _SENDS:
                kind, step = _SENDS[action.op]
                key = (kind, source, schedule.rank_of(action.stage + step))
                found.setdefault(key, []).append((action.stage + step, action.micro_batch))
    return {key: tuple(messages) for key, messages in found.items()}


def receive_order(schedule: Schedule, rank: int, kind: str, source: int) -> tuple[Message, ...]:
    """Messages of kind ``F`` or ``B`` that ``rank`` receives from ``source``, in ``source``'s sending order.

    Reads one row of the lowered schedule; empty when ``source`` sends ``rank`` nothing of the kind.
    """
    op, step = (Op.SEND_F, 1) if kind == "F" else (Op.SEND_B, -1)
    return tuple(
        (a.stage + step, a.micro_batch)
        for a in schedule.rows[source]
        if a.op is op and schedule.rank_of(a.stage + step) == rank
    )


def crosses(schedule: Schedule, stage: int) -> bool:
    """Whether what ``stage`` hands to ``stage + 1`` goes to another rank; not after the last stage."""
    return stage < schedule.num_stages - 1 and schedule.rank_of(stage) != schedule.rank_of(stage + 1)


def _with_transfers(schedule: Schedule, action: Action) -> tuple[Action, ...]:
    stage, micro_batch = action.stage, action.micro_batch
    above, below = crosses(schedule, stage), stage > 0 and crosses(schedule, stage - 1)
    match action.op:
        case Op.FORWARD:
            receive, send, receive_op, send_op = below, above, Op.RECV_F, Op.SEND_F
        case Op.BACKWARD | Op.BACKWARD_INPUT:
            receive, send, receive_op, send_op = above, below, Op.RECV_B, Op.SEND_B
        case _:
            return (action,)
    return (
        *([Action(stage, receive_op, micro_batch)] if receive else []),
        action,
        *([Action(stage, send_op, micro_batch)] if send else []),
    )


def has_transfers(schedule: Schedule) -> bool:
    """Whether the schedule holds sends or receives."""
    return any(action.op in TRANSFERS for row in schedule.rows for action in row)


def _require_lowered(schedule: Schedule) -> None:
    if schedule.num_ranks > 1 and not has_transfers(schedule):
        raise ScheduleError(
            f"schedule {schedule.name}", "it has no transfers yet", "call dsx.schedules.lowering.lower first"
        )
