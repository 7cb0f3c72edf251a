"""Interleaved schedules: several chunks per rank, micro-batches in groups, backwards whole or split."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from dsx.errors import ScheduleError
from dsx.schedules.schedule import Action, Op, Schedule
from dsx.schedules.simulate import Costs
from dsx.schedules.weight_fill import fill

MOST_FORWARDS = 1 << 20
"""Of all virtual stages: 128 ranks x 2 chunks x 4,096 micro-batches. An action takes half a kilobyte."""


def check_numbers(name: str, num_ranks: int, num_chunks: int, num_micro_batches: int) -> None:
    """Raise ScheduleError unless all are at least 1, and the schedule of that size can be held."""
    numbers = {"pipeline ranks": num_ranks, "chunks": num_chunks, "micro-batches": num_micro_batches}
    for what, number in numbers.items():
        if number < 1:
            raise ScheduleError(
                f"schedule {name}, {what} = {number}", "it must be at least 1", "use 1 or more"
            )
    forwards, sizes = num_ranks * num_chunks * num_micro_batches, numbers.items()
    if forwards > MOST_FORWARDS:
        raise ScheduleError(
            f"schedule {name}",
            f"{' x '.join(f'{what} {number:,}' for what, number in sizes)} = {forwards:,} forwards, "
            f"and {MOST_FORWARDS:,} are the most",
            "use fewer",
        )


def check_one_chunk(name: str, num_ranks: int, num_chunks: int) -> None:
    """Raise ScheduleError for several chunks on several ranks."""
    if num_chunks > 1 and num_ranks > 1:
        raise ScheduleError(
            f"schedule {name}, chunks = {num_chunks}",
            f"{name} runs one chunk per rank on {num_ranks} pipeline ranks",
            "use 1 chunk, or schedule interleaved or interleaved_zb",
        )


def check_two_chunks(name: str, num_chunks: int) -> None:
    """Raise ScheduleError for a number of chunks other than 2."""
    if num_chunks != 2:
        raise ScheduleError(
            f"schedule {name}, chunks = {num_chunks}",
            f"{name} folds the stages once, into two chunks per rank",
            "use 2 chunks, or schedule interleaved_zb",
        )


Unit = tuple[int, int]
"""(virtual stage, micro-batch)."""


def interleaved(
    num_ranks: int,
    num_chunks: int,
    num_micro_batches: int,
    *,
    group_size: int | None = None,
    warmup_per_rank: int = 2,
) -> Schedule:
    """Interleaved 1F1B (arXiv:2104.04473, section 2.2 and fig. 4 bottom), for any number of micro-batches.

    Micro-batches go in groups, each group through a rank's chunks in turn. The paper and Megatron want groups
    of exactly ``num_ranks``, torch wants groups of equal size. Here there are max(1, floor(m / group_size))
    groups of nearly equal size, the larger ones first: the warm-up is sized by the first group, and with a
    larger group behind it a backward would precede the forwards that it waits for. With m >= p the bubble is
    (p - 1) / (v m) of the ideal time. With one chunk this is 1F1B with a doubled warm-up, which keeps more
    activations and hides the time of transfers.

    Args:
        num_ranks: Pipeline degree p.
        num_chunks: Virtual stages per rank v.
        num_micro_batches: Micro-batches m.
        group_size: Least micro-batches per group, by default p (Megatron's
            microbatch_group_size_per_vp_stage). Larger ones hide the time of transfers and keep more
            activations.
        warmup_per_rank: Forwards that a rank starts ahead of the next one: 2 in the paper; 1 keeps fewer
            activations and waits longer; more hide the time of transfers if the groups are larger too.
    """
    check_numbers("interleaved", num_ranks, num_chunks, num_micro_batches)
    rows = _rows(
        "interleaved",
        (num_ranks, num_chunks, num_micro_batches),
        groups(num_ranks, num_micro_batches, group_size),
        warmup_per_rank,
        Op.BACKWARD,
    )
    return Schedule("interleaved", num_ranks, num_chunks, num_micro_batches, rows)


def interleaved_zb(
    num_ranks: int,
    num_chunks: int,
    num_micro_batches: int,
    *,
    group_size: int | None = None,
    warmup_per_rank: int = 1,
    most_live: int | None = None,
    costs: Costs | None = None,
) -> Schedule:
    """Zero-bubble interleaved: :func:`interleaved` with split backwards, half of the warm-up, less memory.

    The critical path of the backward is its input gradients, half as long, so a rank needs to start only one
    forward ahead of the next one; weight gradients fill the waits (:func:`dsx.schedules.weight_fill.fill`).
    With a forward, an ``I`` and a ``W`` of the same length and m >= p the bubble is (p - 1) / (3 v m) of the
    ideal time, the floor for an optimizer that waits for all ranks, at the p stage activations of 1F1B when
    the groups have p micro-batches. The idea is ZB-1p's of arXiv:2401.10241 and torch's
    ScheduleInterleavedZeroBubble, which delays every rank's weight gradients by a fixed count instead.

    Args:
        num_ranks: Pipeline degree p.
        num_chunks: Virtual stages per rank v.
        num_micro_batches: Micro-batches m.
        group_size: As for :func:`interleaved`.
        warmup_per_rank: As for :func:`interleaved`; 2 hides the time of transfers and keeps more
            activations.
        most_live: Chunk activations alive at once on any rank; by default the fewest that the first rank's
            forwards demand. More lets weight gradients wait longer.
        costs: Lengths of actions and transfers by which to place the weight gradients.
    """
    check_numbers("interleaved_zb", num_ranks, num_chunks, num_micro_batches)
    return _zero_bubble(
        "interleaved_zb",
        (num_ranks, num_chunks, num_micro_batches),
        groups(num_ranks, num_micro_batches, group_size),
        warmup_per_rank,
        most_live,
        costs,
    )


def zb_h1(
    num_ranks: int,
    num_chunks: int,
    num_micro_batches: int,
    *,
    most_live: int | None = None,
    costs: Costs | None = None,
) -> Schedule:
    """ZB-H1 (arXiv:2401.10241, section 2.1): 1F1B with split backwards, a third of its bubble.

    Forwards and input gradients keep 1F1B's order, weight gradients fill the waits, and every rank keeps p
    activations.
    The bubble is (p - 1) / (3 m) of the ideal time for m >= p and equal lengths.
    """
    check_numbers("zb_h1", num_ranks, num_chunks, num_micro_batches)
    check_one_chunk("zb_h1", num_ranks, num_chunks)
    one_by_one = groups(num_ranks, num_micro_batches, None)
    return _zero_bubble("zb_h1", (num_ranks, num_chunks, num_micro_batches), one_by_one, 1, most_live, costs)


def groups(num_ranks: int, num_micro_batches: int, group_size: int | None) -> tuple[range, ...]:
    """Consecutive micro-batches in max(1, floor(m / group_size)) nearly equal groups, larger first."""
    size = num_ranks if group_size is None else group_size
    if size < 1:
        raise ScheduleError(f"group_size = {size}", "it must be at least 1", f"use {num_ranks} or more")
    count = max(1, num_micro_batches // max(1, size))
    each, more = divmod(num_micro_batches, count)
    stops = [*accumulate(each + (i < more) for i in range(count))]
    return tuple(range(start, stop) for start, stop in zip([0, *stops], stops, strict=False))


def by_group(rank: int, num_ranks: int, chunks: Sequence[int], parts: Sequence[range]) -> list[Unit]:
    """Each group through ``chunks`` in turn, on loop placement."""
    return [(chunk * num_ranks + rank, m) for group in parts for chunk in chunks for m in group]


def alternate(
    forwards: Sequence[Unit], backwards: Sequence[Unit], *, warmup: int, backward: Op = Op.BACKWARD
) -> tuple[Action, ...]:
    """``warmup`` forwards, then one forward and one backward in turn, then the remaining backwards."""
    row = []
    for i in range(len(forwards) + warmup):
        if i < len(forwards):
            stage, micro_batch = forwards[i]
            row.append(Action(stage, Op.FORWARD, micro_batch))
        if i >= warmup:
            stage, micro_batch = backwards[i - warmup]
            row.append(Action(stage, backward, micro_batch))
    return tuple(row)


def _zero_bubble(
    name: str,
    size: tuple[int, int, int],
    parts: Sequence[range],
    warmup_per_rank: int,
    most_live: int | None,
    costs: Costs | None,
) -> Schedule:
    num_ranks, num_chunks, num_micro_batches = size
    rows = _rows(name, size, parts, warmup_per_rank, Op.BACKWARD_INPUT)
    total = num_chunks * num_micro_batches
    least = min(total, _warmup(0, size, parts, warmup_per_rank) + 1)
    if most_live is None:
        most_live = least
    elif most_live < least:
        raise ScheduleError(
            f"schedule {name}, most_live = {most_live}",
            f"its first rank starts {least} forwards before its first backward",
            f"use {least} to {total}",
        )
    order = Schedule(name, num_ranks, num_chunks, num_micro_batches, rows)
    return fill(order, [most_live] * num_ranks, costs)


def _warmup(rank: int, size: tuple[int, int, int], parts: Sequence[range], warmup_per_rank: int) -> int:
    num_ranks, num_chunks, num_micro_batches = size
    ahead = warmup_per_rank * (num_ranks - 1 - rank) + (num_chunks - 1) * len(parts[0])
    return min(num_chunks * num_micro_batches, ahead)


def _rows(
    name: str, size: tuple[int, int, int], parts: Sequence[range], warmup_per_rank: int, backward: Op
) -> tuple[tuple[Action, ...], ...]:
    num_ranks, num_chunks, _ = size
    _check_warmup(name, size, parts, warmup_per_rank)
    rows = []
    for rank in range(num_ranks):
        forwards = by_group(rank, num_ranks, range(num_chunks), parts)
        backwards = by_group(rank, num_ranks, range(num_chunks - 1, -1, -1), parts)
        warmup = _warmup(rank, size, parts, warmup_per_rank)
        rows.append(alternate(forwards, backwards, warmup=warmup, backward=backward))
    return tuple(rows)


def _check_warmup(
    name: str, size: tuple[int, int, int], parts: Sequence[range], warmup_per_rank: int
) -> None:
    """Reject warm-ups that deadlock: rank 0 would wait for what the last rank does two groups later.

    The condition is sufficient. It was found by trying all sizes up to p = 6, v = 3, m = 20;
    tests/schedules/test_zero_bubble.py tries a part of them.
    """
    num_ranks, num_chunks, _ = size
    smallest = min(map(len, parts))
    if warmup_per_rank < 0:
        raise ScheduleError(
            f"schedule {name}, warmup_per_rank = {warmup_per_rank}", "it is negative", "use 0 or more"
        )
    if num_chunks > 1 and len(parts) > 1 and 2 * smallest < warmup_per_rank * (num_ranks - 1):
        least = -(-warmup_per_rank * (num_ranks - 1) // 2)
        raise ScheduleError(
            f"schedule {name}, groups of {smallest} micro-batches",
            f"a warm-up of {warmup_per_rank} per rank on {num_ranks} ranks can deadlock",
            f"use group_size {least} or more, or warmup_per_rank {2 * smallest // (num_ranks - 1)} or less",
        )
