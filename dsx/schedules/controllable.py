"""V-half and V-min (arXiv:2405.15362): a block, repeated, in a half and a third of 1F1B's activations.

The paper lays out one micro-batch's forwards and input gradients on a V, one tick each, so that none of them
meets those of the micro-batches that begin 6 ticks earlier and later: each of a rank's two chunks takes a
tick for its forward, its input gradient and its weight gradient. A rank keeps as many activations as blocks
begin while a micro-batch stays. The offsets are the paper's, as its reference code spells them out (the file
zbv_greedy.py of github.com/sail-sg/zero-bubble-pipeline-parallelism). While the pipeline fills and drains,
ranks wait with memory to spare: there they run ahead (:func:`dsx.schedules.run_ahead.run_ahead`), which takes
the place of the paper's reordering.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from dsx.parallel.stages import stages_of
from dsx.schedules.interleaved import check_numbers, check_two_chunks
from dsx.schedules.run_ahead import run_ahead
from dsx.schedules.schedule import Action, Op, Schedule
from dsx.schedules.simulate import Costs, peak_activations
from dsx.schedules.weight_fill import fill, without_weights

_PERIOD = 6
_Ticks = tuple[int, int, int, int]
"""When a rank runs the first micro-batch: forwards of its chunks, then their input gradients, reversed."""


def v_half(
    num_ranks: int, num_chunks: int, num_micro_batches: int, *, costs: Costs | None = None
) -> Schedule:
    """V-half: at most ``p // 2 + 1`` micro-batches' activations on every rank, about half of 1F1B's.

    With parts of equal length and m >= p the bubble is at most p / (2 m) of the ideal time.

    Args:
        num_ranks: Pipeline degree p.
        num_chunks: Virtual stages per rank, 2.
        num_micro_batches: Micro-batches m.
        costs: Lengths of actions and transfers by which to place the weight gradients.

    Raises:
        ScheduleError: Another number of chunks, or a number below 1.
    """
    p, gap = num_ranks, 0 if num_ranks % 2 else 3
    block = [(2 * r, 3 * p - r - 2, 3 * p + gap + 2 * r - 1, 6 * p + gap - r - 2) for r in range(p)]
    return _repeated("v_half", block, num_chunks, num_micro_batches, costs)


def v_min(num_ranks: int, num_chunks: int, num_micro_batches: int, *, costs: Costs | None = None) -> Schedule:
    """V-min: at most ``(p + 4) // 3`` micro-batches' activations on every rank, about a third of 1F1B's.

    With parts of equal length and m >= p the bubble is at most 2 p / (3 m) of the ideal time. Where lengths
    differ, the block holds ranks up more than that of :func:`v_half`, whose arguments and errors it has.
    """
    p, gap = num_ranks, 0 if num_ranks % 3 else 2
    block = [(r, 2 * p - r - 1, 2 * p + gap + r, 4 * p + gap - r - 1) for r in range(p)]
    return _repeated("v_min", block, num_chunks, num_micro_batches, costs)


def _repeated(
    name: str, block: Sequence[_Ticks], num_chunks: int, num_micro_batches: int, costs: Costs | None
) -> Schedule:
    """The block for every micro-batch; its waits used within the memory that it takes anyway."""
    check_numbers(name, len(block), num_chunks, num_micro_batches)
    check_two_chunks(name, num_chunks)
    rows = tuple(_row(rank, ticks, len(block), num_micro_batches) for rank, ticks in enumerate(block))
    plain = Schedule(name, len(block), 2, num_micro_batches, rows, "v")
    most_live = [max(peak_activations(plain))] * len(block)
    return fill(without_weights(run_ahead(plain, most_live)), most_live, costs)


def _row(rank: int, ticks: _Ticks, num_ranks: int, num_micro_batches: int) -> tuple[Action, ...]:
    """What a rank does tick by tick: what the block says, and in free ticks the oldest weight gradient."""
    first, second = stages_of(rank, num_ranks, 2, "v")
    parts = (
        (first, Op.FORWARD),
        (second, Op.FORWARD),
        (second, Op.BACKWARD_INPUT),
        (first, Op.BACKWARD_INPUT),
    )
    at = {
        tick + _PERIOD * m: Action(stage, op, m)
        for tick, (stage, op) in zip(ticks, parts, strict=True)
        for m in range(num_micro_batches)
    }
    row: list[Action] = []
    pending: deque[Action] = deque()
    for tick in range(max(at) + 1):
        if tick in at:
            row.append(at[tick])
            if at[tick].op is Op.BACKWARD_INPUT:
                pending.append(replace(at[tick], op=Op.BACKWARD_WEIGHT))
        elif pending:
            row.append(pending.popleft())
    return (*row, *pending)
