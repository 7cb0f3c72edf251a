"""Pipeline schedules as data: who runs which forward and backward in which order.

Rows hold compute actions only; :func:`dsx.plan.transfers.lower` adds the transfers. Every builder takes any
number of micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from dsx.errors import ScheduleError
from dsx.spec.schedule import Action, Op, Schedule

NAMES = ("gpipe", "1f1b", "interleaved")

Unit = tuple[int, int]
"""(virtual stage, micro-batch)."""


def build(name: str, num_ranks: int, num_chunks: int, num_micro_batches: int) -> Schedule:
    """The training schedule ``name``.

    Args:
        name: ``gpipe``, ``1f1b`` or ``interleaved``.
        num_ranks: Pipeline degree.
        num_chunks: Virtual stages per rank; ``gpipe`` and ``1f1b`` take 1, unless there is one rank.
        num_micro_batches: Micro-batches per step.

    Raises:
        ScheduleError: An unknown name, a number below 1, or chunks that the schedule cannot have.

    >>> print(build("1f1b", 2, 1, 2).to_csv(), end="")
    0F0,0F1,0B0,0B1
    1F0,1B0,1F1,1B1
    """
    if name == "gpipe":
        return gpipe(num_ranks, num_micro_batches, num_chunks=num_chunks)
    if name == "1f1b":
        return one_f_one_b(num_ranks, num_micro_batches, num_chunks=num_chunks)
    if name == "interleaved":
        return interleaved(num_ranks, num_chunks, num_micro_batches)
    raise ScheduleError(f"schedule {name!r}", "no such schedule", f"use one of {', '.join(NAMES)}")


def gpipe(num_ranks: int, num_micro_batches: int, *, num_chunks: int = 1) -> Schedule:
    """GPipe: all forwards, then all backwards in the same order (arXiv:1811.06965, fig. 2c)."""
    _check("gpipe", num_ranks, num_chunks, num_micro_batches)
    _check_chunks("gpipe", num_ranks, num_chunks)
    rows = []
    for rank in range(num_ranks):
        forwards, backwards = _through(rank, num_ranks, num_chunks, num_micro_batches)
        rows.append(_row(forwards, backwards, warmup=len(forwards)))
    return Schedule("gpipe", num_ranks, num_chunks, num_micro_batches, tuple(rows))


def one_f_one_b(num_ranks: int, num_micro_batches: int, *, num_chunks: int = 1) -> Schedule:
    """1F1B with a flush (arXiv:2006.09503, PipeDream-flush): at most ``num_ranks - rank`` activations live.

    One rank with several chunks takes each micro-batch through all of them and back before the next.
    """
    _check("1f1b", num_ranks, num_chunks, num_micro_batches)
    _check_chunks("1f1b", num_ranks, num_chunks)
    rows = []
    for rank in range(num_ranks):
        forwards, backwards = _through(rank, num_ranks, num_chunks, num_micro_batches)
        if num_chunks == 1:
            row = _row(forwards, backwards, warmup=min(num_micro_batches, num_ranks - 1 - rank))
        else:
            each = range(0, len(forwards), num_chunks)
            parts = [slice(start, start + num_chunks) for start in each]
            row = tuple(a for part in parts for a in _row(forwards[part], backwards[part], warmup=num_chunks))
        rows.append(row)
    return Schedule("1f1b", num_ranks, num_chunks, num_micro_batches, tuple(rows))


def interleaved(num_ranks: int, num_chunks: int, num_micro_batches: int) -> Schedule:
    """Interleaved 1F1B (arXiv:2104.04473, section 2.2 and fig. 4 bottom), for any number of micro-batches.

    Micro-batches go in groups, each group through a rank's chunks in turn. The paper and Megatron want groups
    of exactly ``num_ranks``, torch wants groups of equal size. Here there are max(1, floor(m / p)) groups of
    nearly equal size, the larger ones first: the warm-up is sized by the first group, and with a larger group
    behind it a backward would stand in front of the forwards that it waits for. With m >= p the bubble is
    (p - 1) / (v m) of the ideal time. With one chunk this is 1F1B with a doubled warm-up: more activations
    live, and time on the wire hidden.
    """
    _check("interleaved", num_ranks, num_chunks, num_micro_batches)
    groups = _groups(num_ranks, num_micro_batches)
    total = num_chunks * num_micro_batches
    rows = []
    for rank in range(num_ranks):
        forwards = _by_group(rank, num_ranks, range(num_chunks), groups)
        backwards = _by_group(rank, num_ranks, range(num_chunks - 1, -1, -1), groups)
        warmup = min(total, 2 * (num_ranks - 1 - rank) + (num_chunks - 1) * len(groups[0]))
        rows.append(_row(forwards, backwards, warmup=warmup))
    return Schedule("interleaved", num_ranks, num_chunks, num_micro_batches, tuple(rows))


def forward_only(num_ranks: int, num_chunks: int, num_micro_batches: int) -> Schedule:
    """Forwards alone (evaluation), in the order of :func:`interleaved`."""
    _check("forward_only", num_ranks, num_chunks, num_micro_batches)
    groups = _groups(num_ranks, num_micro_batches)
    rows = tuple(
        tuple(Action(s, Op.FORWARD, m) for s, m in _by_group(rank, num_ranks, range(num_chunks), groups))
        for rank in range(num_ranks)
    )
    return Schedule("forward_only", num_ranks, num_chunks, num_micro_batches, rows)


def _groups(num_ranks: int, num_micro_batches: int) -> tuple[range, ...]:
    """Consecutive micro-batches in max(1, floor(m / p)) nearly equal groups, larger first."""
    count = max(1, num_micro_batches // num_ranks)
    each, more = divmod(num_micro_batches, count)
    stops = [*accumulate(each + (i < more) for i in range(count))]
    return tuple(range(start, stop) for start, stop in zip([0, *stops], stops, strict=False))


def _by_group(rank: int, num_ranks: int, chunks: Sequence[int], groups: Sequence[range]) -> list[Unit]:
    return [(chunk * num_ranks + rank, m) for group in groups for chunk in chunks for m in group]


def _through(
    rank: int, num_ranks: int, num_chunks: int, num_micro_batches: int
) -> tuple[list[Unit], list[Unit]]:
    """Forwards, each micro-batch through all of the rank's chunks in turn; backwards, chunks reversed."""
    stages = range(rank, num_ranks * num_chunks, num_ranks)
    forwards = [(stage, m) for m in range(num_micro_batches) for stage in stages]
    backwards = [(stage, m) for m in range(num_micro_batches) for stage in reversed(stages)]
    return forwards, backwards


def _row(forwards: Sequence[Unit], backwards: Sequence[Unit], *, warmup: int) -> tuple[Action, ...]:
    """``warmup`` forwards, then one forward and one backward in turn, then the remaining backwards."""
    row = []
    for i in range(len(forwards) + warmup):
        if i < len(forwards):
            stage, micro_batch = forwards[i]
            row.append(Action(stage, Op.FORWARD, micro_batch))
        if i >= warmup:
            stage, micro_batch = backwards[i - warmup]
            row.append(Action(stage, Op.BACKWARD, micro_batch))
    return tuple(row)


def _check(name: str, num_ranks: int, num_chunks: int, num_micro_batches: int) -> None:
    numbers = {"pipeline ranks": num_ranks, "chunks": num_chunks, "micro-batches": num_micro_batches}
    for what, number in numbers.items():
        if number < 1:
            raise ScheduleError(
                f"schedule {name}, {what} = {number}", "it must be at least 1", "use 1 or more"
            )


def _check_chunks(name: str, num_ranks: int, num_chunks: int) -> None:
    if num_chunks > 1 and num_ranks > 1:
        raise ScheduleError(
            f"schedule {name}, chunks = {num_chunks}",
            f"{name} runs one chunk per rank on {num_ranks} pipeline ranks",
            "use 1 chunk, or schedule interleaved",
        )
