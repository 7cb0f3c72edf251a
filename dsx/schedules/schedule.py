"""A pipeline schedule is data: for each rank, the ordered actions of one training step.

:mod:`dsx.schedules.builders` writes the compute rows, :func:`lower` adds the transfers that they imply. The
engine, the simulator, the memory estimator and the plots all read the same :class:`Schedule`.

A channel is directed: forward activations (kind ``F``) or backward gradients (``B``) from one pipeline rank
to another. NCCL matches the transfers of a channel by order alone, so a receiver must post its receives in
the order in which the sender sends: :func:`receive_order`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Literal

from dsx.errors import ScheduleError
from dsx.parallel import stages as placements
from dsx.parallel.stages import Placement


class Op(StrEnum):
    """What an action does, spelled as in torch.distributed.pipelining's CSV (schedules.py, _Action)."""

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"


TRANSFERS = frozenset({Op.SEND_F, Op.RECV_F, Op.SEND_B, Op.RECV_B})
"""Ops that move data between ranks; the others compute."""

BACKWARDS = frozenset({Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT})
"""A backward, and the two parts of a split one."""

_TOKEN = re.compile(r"(\d{1,15})(SEND_F|RECV_F|SEND_B|RECV_B|F|B|I|W)(\d{1,15})")


@dataclass(frozen=True, slots=True)
class Action:
    """One instruction: ``op`` on micro-batch ``micro_batch`` of virtual stage ``stage``.

    ``B`` is a whole backward. ``I`` and ``W`` are its two parts: the gradient of the stage's input, which the
    stage before waits for, and the gradients of its weights, which nobody waits for before the step.
    ``SEND_F`` sends the stage's output to stage + 1, ``RECV_F`` receives its input from stage - 1,
    ``SEND_B`` sends the gradient of its input to stage - 1, ``RECV_B`` receives that of its output.

    >>> str(Action(2, Op.FORWARD, 0)), Action.parse("3SEND_B12")
    ('2F0', Action(stage=3, op=<Op.SEND_B: 'SEND_B'>, micro_batch=12))
    """

    stage: int
    op: Op
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.op}{self.micro_batch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Read an action as :meth:`__str__` writes it. Raises ScheduleError on anything else."""
        match = _TOKEN.fullmatch(text.strip())
        if match is None:
            raise ScheduleError(f"action {text!r}", "not an action", "write stage, op and micro-batch: 2F0")
        return cls(int(match[1]), Op(match[2]), int(match[3]))


@dataclass(frozen=True, slots=True)
class Schedule:
    """Actions of one step, one row per pipeline rank.

    Virtual stage ``s`` is chunk ``s // num_ranks`` of the rank that :mod:`dsx.parallel.stages` assigns it to.

    >>> Schedule("x", 2, 2, 1, (), placement="v").stages_of(0)
    (0, 3)
    """

    name: str
    num_ranks: int
    num_chunks: int
    num_micro_batches: int
    rows: tuple[tuple[Action, ...], ...]
    placement: Placement = "loop"

    @property
    def num_stages(self) -> int:
        return self.num_ranks * self.num_chunks

    def rank_of(self, stage: int) -> int:
        return placements.rank_of(stage, self.num_ranks, self.placement)

    def chunk_of(self, stage: int) -> int:
        return stage // self.num_ranks

    def stages_of(self, rank: int) -> tuple[int, ...]:
        return placements.stages_of(rank, self.num_ranks, self.num_chunks, self.placement)

    def to_csv(self) -> str:
        """One line per rank, actions separated by commas, as torch.distributed.pipelining writes it."""
        return "".join(",".join(map(str, row)) + "\n" for row in self.rows)


Kind = Literal["F", "B"]
Message = tuple[int, int]
"""(virtual stage that receives, micro-batch)."""


def lower(schedule: Schedule) -> Schedule:
    """The schedule with each receive just before its use and each send just after its producer.

    The gradient that a stage returns leaves after its ``B``, or after its ``I``; ``W`` moves nothing.
    Neighbouring virtual stages on one rank hand over locally and get no transfer.
    """
    if has_transfers(schedule):
        raise ScheduleError(f"schedule {schedule.name}", "it has transfers already", "lower it once")
    rows = tuple(
        tuple(out for action in row for out in _with_transfers(schedule, action)) for row in schedule.rows
    )
    return replace(schedule, rows=rows)


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
