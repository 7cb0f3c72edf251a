"""A pipeline schedule is data: for each rank, the ordered actions of one training step.

:mod:`dsx.schedules.builders` writes the compute rows, :mod:`dsx.schedules.lowering` adds the transfers that
they imply. The engine, the simulator, the memory estimator and the plots all read the same :class:`Schedule`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from dsx.errors import ScheduleError
from dsx.parallel import stages as placements
from dsx.parallel.stages import Placement


class Op(StrEnum):
    """What an action does. Spelled as in torch.distributed.pipelining's CSV (schedules.py, _Action)."""

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

_TOKEN = re.compile(r"(\d+)(SEND_F|RECV_F|SEND_B|RECV_B|F|B|I|W)(\d+)")


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

    Virtual stage ``s`` is chunk ``s // num_ranks`` of the rank that :mod:`dsx.parallel.stages` says.

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
        """Number of virtual stages."""
        return self.num_ranks * self.num_chunks

    def rank_of(self, stage: int) -> int:
        """Pipeline rank that holds virtual stage ``stage``."""
        return placements.rank_of(stage, self.num_ranks, self.placement)

    def chunk_of(self, stage: int) -> int:
        """Index of virtual stage ``stage`` among its rank's chunks."""
        return stage // self.num_ranks

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Virtual stages of pipeline rank ``rank``, chunk by chunk."""
        return placements.stages_of(rank, self.num_ranks, self.num_chunks, self.placement)

    def to_csv(self) -> str:
        """One line per rank, actions separated by commas, as torch.distributed.pipelining writes it."""
        return "".join(",".join(map(str, row)) + "\n" for row in self.rows)
