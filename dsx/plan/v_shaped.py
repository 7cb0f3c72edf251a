"""Schedules on the V placement: two chunks per rank, the first rank holds both ends of the model."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable

from dsx.plan.simulate import Costs
from dsx.plan.sizes import check_numbers, check_two_chunks
from dsx.plan.weight_fill import fill
from dsx.spec.placement import stages_of
from dsx.spec.schedule import Action, Op, Schedule

_Step = tuple[int, Op]
"""(chunk, op); the micro-batch follows from the count of steps of that kind before."""

_F0, _F1 = (0, Op.FORWARD), (1, Op.FORWARD)
_I0, _I1 = (0, Op.BACKWARD_INPUT), (1, Op.BACKWARD_INPUT)
_B0, _B1 = (0, Op.BACKWARD), (1, Op.BACKWARD)
_W = (-1, Op.BACKWARD_WEIGHT)
"""The oldest pending weight gradient, of whichever chunk."""


def zbv(num_ranks: int, num_chunks: int, num_micro_batches: int, *, costs: Costs | None = None) -> Schedule:
    """ZB-V (arXiv:2401.10241, section 6): a V of forwards and input gradients, weight gradients between.

    The order of forwards and ``I`` is the paper's (that of torch's ScheduleZBVZeroBubble); ``W`` are placed
    by :func:`dsx.plan.weight_fill.fill` within the paper's memory, ``2 p`` chunk activations on every rank,
    that of 1F1B. With a forward, an ``I`` and a ``W`` of the same length the bubble is (p - 1) / (6 m) of the
    ideal time for m >= p: what the last rank waits for at the start.

    Args:
        num_ranks: Pipeline degree.
        num_chunks: 2.
        num_micro_batches: Any number.
        costs: What to place the weight gradients for.

    Raises:
        ScheduleError: Another number of chunks, or a number below 1.
    """
    check_numbers("zbv", num_ranks, num_chunks, num_micro_batches)
    check_two_chunks("zbv", num_chunks)
    rows = tuple(
        _row(_zbv_steps(r, num_ranks, num_micro_batches), r, num_ranks, num_micro_batches)
        for r in range(num_ranks)
    )
    order = Schedule("zbv", num_ranks, 2, num_micro_batches, rows, "v")
    return fill(order, [2 * num_ranks] * num_ranks, costs)


def dualpipev(num_ranks: int, num_chunks: int, num_micro_batches: int) -> Schedule:
    """DualPipeV (github.com/deepseek-ai/DualPipe), action for action torch's ScheduleDualPipeV.

    Its authors run a forward and a backward of the main phase as one overlapped kernel sequence, to hide
    expert-parallel all-to-alls. Here they are two actions, forward first, so what remains is its order:
    whole backwards in the main phase, divided ones where the pipeline fills and drains. Where there is
    nothing to overlap, :func:`zbv` is faster in less memory. Torch and DeepSeek want m >= 2p; with fewer, the
    order is that of 2p micro-batches without those that do not exist.

    Raises:
        ScheduleError: Chunks other than 2, or a number below 1.
    """
    check_numbers("dualpipev", num_ranks, num_chunks, num_micro_batches)
    check_two_chunks("dualpipev", num_chunks)
    rows = tuple(
        _row(_dualpipev_steps(r, num_ranks, num_micro_batches), r, num_ranks, num_micro_batches)
        for r in range(num_ranks)
    )
    return Schedule("dualpipev", num_ranks, 2, num_micro_batches, rows, "v")


def _zbv_steps(rank: int, num_ranks: int, num_micro_batches: int) -> list[_Step]:
    """Forwards and input gradients of at least the micro-batches that fill the pipeline."""
    after = num_ranks - rank
    count = max(num_micro_batches, 2 * num_ranks - 1)
    late = count - (2 * num_ranks - 1 - rank)  # forwards of chunk 0 left when the pipeline is full
    return [
        *[_F0] * (2 * after - 1),
        *[_F1, _F0] * rank,
        *[_F1, _I1] * after,
        *[_F0, _I0, _F1, _I1] * late,
        *[_I0, _F1, _I1] * (count - num_ranks - late),
        *[_I0, _I1] * rank,
        *[_I0] * after,
    ]


def _dualpipev_steps(rank: int, num_ranks: int, num_micro_batches: int) -> list[_Step]:
    """The eight steps of DeepSeek's dualpipev.py."""
    before, after = rank + 1, num_ranks - rank - 1
    main = max(num_micro_batches, 2 * num_ranks) - 2 * num_ranks + before
    # The last rank and its odd neighbours start to divide the backward half way through the drain.
    whole_1 = before // 2 + (0 if rank % 2 else 1)
    whole_0 = before // 2
    drain = [
        step for i in range(before) for step in (_B1 if i < whole_1 else _I1, _B0 if i < whole_0 else _I0)
    ]
    return [
        *[_F0] * (2 * after),
        *[_F0, _F1] * before,
        *[_I1, _W, _F1] * after,
        *[_F0, _B1, _F1, _B0] * main,
        *[_B1, _F1, _B0] * after,
        *drain,
        *[_W, _I0] * after,
        *[_W] * before,
    ]


def _row(steps: Iterable[_Step], rank: int, num_ranks: int, num_micro_batches: int) -> tuple[Action, ...]:
    """Steps with their micro-batches; those from ``num_micro_batches`` on are left out."""
    stages = stages_of(rank, num_ranks, 2, "v")
    counts: Counter[tuple[int, bool]] = Counter()
    pending: deque[tuple[int, int]] = deque()
    row = []
    for chunk, op in steps:
        if op is Op.BACKWARD_WEIGHT:
            if not pending:
                continue
            stage, micro_batch = pending.popleft()
        else:
            kind = (chunk, op is Op.FORWARD)
            stage, micro_batch = stages[chunk], counts[kind]
            counts[kind] += 1
            if op is Op.BACKWARD_INPUT:
                pending.append((stage, micro_batch))
        if micro_batch < num_micro_batches:
            row.append(Action(stage, op, micro_batch))
    return tuple(row)
