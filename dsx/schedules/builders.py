"""Pipeline schedules as data: who runs which forward and backward in which order.

Rows hold compute actions only; :func:`dsx.schedules.schedule.lower` adds the transfers. Every builder takes
any number of micro-batches. In formulas p is the number of ranks, m that of micro-batches.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal, get_args

from dsx.errors import ScheduleError
from dsx.parallel import stages as placements
from dsx.parallel.stages import Placement, stages_of
from dsx.schedules.interleaved import (
    Unit,
    alternate,
    by_group,
    check_numbers,
    check_one_chunk,
    check_two_chunks,
    groups,
    interleaved,
    interleaved_zb,
    zb_h1,
)
from dsx.schedules.schedule import Action, Op, Schedule
from dsx.schedules.simulate import Costs, peak_activations
from dsx.schedules.weight_fill import fill, run_ahead, without_weights

_Step = tuple[int, Op]
"""(chunk, op); the micro-batch is the number of earlier steps of the same kind."""

_F0, _F1 = (0, Op.FORWARD), (1, Op.FORWARD)
_I0, _I1 = (0, Op.BACKWARD_INPUT), (1, Op.BACKWARD_INPUT)
_B0, _B1 = (0, Op.BACKWARD), (1, Op.BACKWARD)
_W = (-1, Op.BACKWARD_WEIGHT)
"""The oldest weight gradient that waits, of whichever chunk."""

_PERIOD = 6
_Ticks = tuple[int, int, int, int]
"""When a rank runs the first micro-batch: forwards of its chunks, then their input gradients, reversed.

arXiv:2405.15362 lays these out on a V so that none of them meets those of the micro-batches that begin 6
ticks earlier and later: each of two chunks takes a tick for its forward, its input gradient and its weight
gradient. A rank keeps as many activations as blocks begin while a micro-batch stays.
"""


def zbv(num_ranks: int, num_chunks: int, num_micro_batches: int, *, costs: Costs | None = None) -> Schedule:
    """ZB-V (arXiv:2401.10241, section 6): a V of forwards and input gradients, weight gradients between.

    The order of forwards and ``I`` is the paper's (that of torch's ScheduleZBVZeroBubble); ``W`` are placed
    by :func:`dsx.schedules.weight_fill.fill` within the paper's memory, ``2 p`` chunk activations on every
    rank, that of 1F1B. With a forward, an ``I`` and a ``W`` of the same length the bubble is (p - 1) / (6 m)
    of the ideal time for m >= p: what the last rank waits for at the start.
    """
    check_numbers("zbv", num_ranks, num_chunks, num_micro_batches)
    check_two_chunks("zbv", num_chunks)
    rows = tuple(
        _row(_zbv_steps(r, num_ranks, num_micro_batches), r, num_ranks, num_micro_batches)
        for r in range(num_ranks)
    )
    order = Schedule("zbv", num_ranks, 2, num_micro_batches, rows, "v")
    return fill(order, [2 * num_ranks] * num_ranks, costs)


def v_half(
    num_ranks: int, num_chunks: int, num_micro_batches: int, *, costs: Costs | None = None
) -> Schedule:
    """V-half (arXiv:2405.15362): at most ``p // 2 + 1`` micro-batches' activations, half of 1F1B's.

    A block of actions, repeated. Its offsets are the paper's, as its reference code spells them out (the file
    zbv_greedy.py of github.com/sail-sg/zero-bubble-pipeline-parallelism). While the pipeline fills and
    drains, ranks wait with memory to spare: there they run ahead
    (:func:`dsx.schedules.weight_fill.run_ahead`), which takes the place of the paper's reordering.
    With parts of equal length and m >= p the bubble is at most p / (2 m) of the ideal time.
    """
    p, gap = num_ranks, 0 if num_ranks % 2 else 3
    block = [(2 * r, 3 * p - r - 2, 3 * p + gap + 2 * r - 1, 6 * p + gap - r - 2) for r in range(p)]
    return _repeated("v_half", block, num_chunks, num_micro_batches, costs)


def v_min(num_ranks: int, num_chunks: int, num_micro_batches: int, *, costs: Costs | None = None) -> Schedule:
    """V-min (arXiv:2405.15362): at most ``(p + 4) // 3`` micro-batches' activations, a third of 1F1B's.

    With parts of equal length and m >= p the bubble is at most 2 p / (3 m) of the ideal time. Where lengths
    differ, the block holds ranks up more than that of :func:`v_half`, whose arguments and errors it has.
    """
    p, gap = num_ranks, 0 if num_ranks % 3 else 2
    block = [(r, 2 * p - r - 1, 2 * p + gap + r, 4 * p + gap - r - 1) for r in range(p)]
    return _repeated("v_min", block, num_chunks, num_micro_batches, costs)


def dualpipev(num_ranks: int, num_chunks: int, num_micro_batches: int) -> Schedule:
    """DualPipeV (github.com/deepseek-ai/DualPipe), equal to torch's ScheduleDualPipeV action by action.

    Its authors run a forward and a backward of the main phase as one overlapped kernel sequence, to hide
    expert-parallel all-to-alls. Here they are two actions, forward first, and what remains is the order:
    whole backwards in the main phase, split ones where the pipeline fills and drains. Where there is
    nothing to overlap, :func:`zbv` is faster in less memory. Torch and DeepSeek want m >= 2p; with fewer, the
    order is that of 2p micro-batches, leaving out those that do not exist.
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


def _repeated(
    name: str, block: Sequence[_Ticks], num_chunks: int, num_micro_batches: int, costs: Costs | None
) -> Schedule:
    """The block for every micro-batch; its waits used within the memory that it takes anyway."""
    check_numbers(name, len(block), num_chunks, num_micro_batches)
    check_two_chunks(name, num_chunks)
    rows = tuple(_block_row(rank, ticks, len(block), num_micro_batches) for rank, ticks in enumerate(block))
    plain = Schedule(name, len(block), 2, num_micro_batches, rows, "v")
    most_live = [max(peak_activations(plain))] * len(block)
    return fill(without_weights(run_ahead(plain, most_live)), most_live, costs)


def _block_row(rank: int, ticks: _Ticks, num_ranks: int, num_micro_batches: int) -> tuple[Action, ...]:
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
    """Give steps their micro-batches; those from ``num_micro_batches`` on are left out."""
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


ScheduleName = Literal[
    "gpipe",
    "1f1b",
    "looped_bfs",
    "interleaved",
    "interleaved_zb",
    "zb_h1",
    "zbv",
    "v_half",
    "v_min",
    "dualpipev",
]

NAMES: tuple[ScheduleName, ...] = get_args(ScheduleName)
"""What :func:`build` knows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What some schedules can be told besides their size. None means the schedule's own default.

    Attributes:
        group_size: Least micro-batches per group (interleaved, interleaved_zb).
        warmup_per_rank: Forwards that a rank starts ahead of the next one (interleaved, interleaved_zb).
        most_live: Chunk activations alive at once on a rank (interleaved_zb, zb_h1).
        costs: What to place weight gradients by (interleaved_zb, zb_h1, zbv, v_half, v_min); the others
            ignore it, because their order does not depend on time.
    """

    group_size: int | None = None
    warmup_per_rank: int | None = None
    most_live: int | None = None
    costs: Costs | None = None


def build(
    name: str, num_ranks: int, num_chunks: int, num_micro_batches: int, options: Options | None = None
) -> Schedule:
    """The training schedule ``name``.

    Args:
        name: One of ``NAMES``.
        num_ranks: Pipeline degree.
        num_chunks: Virtual stages per rank. ``gpipe``, ``1f1b`` and ``zb_h1`` take 1, unless there is one
            rank; ``zbv``, ``v_half``, ``v_min`` and ``dualpipev`` take 2.
        num_micro_batches: Micro-batches per step.
        options: What to change in the schedule.

    >>> print(build("1f1b", 2, 1, 2).to_csv(), end="")
    0F0,0F1,0B0,0B1
    1F0,1B0,1F1,1B1
    >>> print(build("zb_h1", 2, 1, 2).to_csv(), end="")
    0F0,0F1,0I0,0W0,0I1,0W1
    1F0,1I0,1F1,1I1,1W0,1W1
    """
    entry = _known(name)
    check_numbers(name, num_ranks, num_chunks, num_micro_batches)  # before options ask what size allows
    given = {}
    for field in fields(Options):
        value = getattr(options, field.name, None)
        if value is None or (field.name == "costs" and "costs" not in entry.options):
            continue
        if field.name not in entry.options:
            having = ", ".join(other for other in NAMES if field.name in _BUILDERS[other].options)
            raise ScheduleError(
                f"schedule {name}, {field.name} = {value}", "it has no such option", f"use one of {having}"
            )
        given[field.name] = value
    return entry.build(num_ranks, num_chunks, num_micro_batches, **given)


def placement_of(name: str) -> Placement:
    """How the schedule ``name`` assigns virtual stages to ranks. Raises ScheduleError for an unknown name."""
    return _known(name).placement


def default_chunks(name: str) -> int:
    """Virtual stages per rank of the schedule ``name`` by default: 2 where it can have several."""
    return _known(name).chunks


def divides_backward(name: str) -> bool:
    """Whether the schedule ``name`` splits backwards. Raises ScheduleError for an unknown name."""
    return _known(name).divides


def gpipe(num_ranks: int, num_chunks: int, num_micro_batches: int) -> Schedule:
    """GPipe: all forwards, then all backwards in the same order (arXiv:1811.06965, fig. 2c)."""
    check_numbers("gpipe", num_ranks, num_chunks, num_micro_batches)
    check_one_chunk("gpipe", num_ranks, num_chunks)
    rows = []
    for rank in range(num_ranks):
        forwards, backwards = _through(rank, num_ranks, num_chunks, num_micro_batches)
        rows.append(alternate(forwards, backwards, warmup=len(forwards)))
    return Schedule("gpipe", num_ranks, num_chunks, num_micro_batches, tuple(rows))


def one_f_one_b(num_ranks: int, num_chunks: int, num_micro_batches: int) -> Schedule:
    """1F1B with a flush (arXiv:2006.09503, PipeDream-flush): at most ``num_ranks - rank`` activations live.

    One rank with several chunks takes each micro-batch through all of them and back before the next.
    """
    check_numbers("1f1b", num_ranks, num_chunks, num_micro_batches)
    check_one_chunk("1f1b", num_ranks, num_chunks)
    rows = []
    for rank in range(num_ranks):
        forwards, backwards = _through(rank, num_ranks, num_chunks, num_micro_batches)
        if num_chunks == 1:
            row = alternate(forwards, backwards, warmup=min(num_micro_batches, num_ranks - 1 - rank))
        else:
            each = range(0, len(forwards), num_chunks)
            parts = [slice(start, start + num_chunks) for start in each]
            row = tuple(
                a for part in parts for a in alternate(forwards[part], backwards[part], warmup=num_chunks)
            )
        rows.append(row)
    return Schedule("1f1b", num_ranks, num_chunks, num_micro_batches, tuple(rows))


def looped_bfs(num_ranks: int, num_chunks: int, num_micro_batches: int) -> Schedule:
    """Breadth-first looping (arXiv:2211.05953): every micro-batch through a chunk before the next chunk.

    GPipe's memory and (p - 1) / (v m) of bubble for m >= p. Each chunk's gradients are complete early and all
    at once, and its parameters are needed in one stretch each way, which suits ZeRO-2 and 3. Backwards run
    from the last micro-batch to the first, as in torch's ScheduleLoopedBFS.
    """
    check_numbers("looped_bfs", num_ranks, num_chunks, num_micro_batches)
    rows = []
    for rank in range(num_ranks):
        forwards = by_group(rank, num_ranks, range(num_chunks), [range(num_micro_batches)])
        rows.append(alternate(forwards, forwards[::-1], warmup=len(forwards)))
    return Schedule("looped_bfs", num_ranks, num_chunks, num_micro_batches, tuple(rows))


def forward_only(
    num_ranks: int, num_chunks: int, num_micro_batches: int, placement: Placement = "loop"
) -> Schedule:
    """Forwards alone (evaluation): on loop placement in the order of :func:`interleaved`.

    On ``v`` placement every rank runs, of the micro-batches that have reached it, the one that is furthest
    on.
    """
    check_numbers("forward_only", num_ranks, num_chunks, num_micro_batches)
    if placement == "v":
        rows = _furthest_first(num_ranks, num_chunks, num_micro_batches)
    else:
        parts = groups(num_ranks, num_micro_batches, None)
        rows = tuple(
            tuple(Action(s, Op.FORWARD, m) for s, m in by_group(rank, num_ranks, range(num_chunks), parts))
            for rank in range(num_ranks)
        )
    return Schedule("forward_only", num_ranks, num_chunks, num_micro_batches, rows, placement)


def _furthest_first(
    num_ranks: int, num_chunks: int, num_micro_batches: int
) -> tuple[tuple[Action, ...], ...]:
    stages = [placements.stages_of(rank, num_ranks, num_chunks, "v") for rank in range(num_ranks)]
    last = num_ranks * num_chunks - 1
    finished = [-1] * (last + 1)  # the last micro-batch that each stage has run
    rows: list[list[Action]] = [[] for _ in stages]
    while finished[last] < num_micro_batches - 1:
        reached = [num_micro_batches - 1, *finished]  # per stage, the last micro-batch that has come to it
        for rank, owned in enumerate(stages):
            ready = [stage for stage in owned if finished[stage] < reached[stage]]
            if ready:
                stage = max(ready)
                finished[stage] += 1
                rows[rank].append(Action(stage, Op.FORWARD, finished[stage]))
    return tuple(map(tuple, rows))


def _through(
    rank: int, num_ranks: int, num_chunks: int, num_micro_batches: int
) -> tuple[list[Unit], list[Unit]]:
    """Forwards, each micro-batch through all of the rank's chunks in turn; backwards, chunks reversed."""
    stages = range(rank, num_ranks * num_chunks, num_ranks)
    forwards = [(stage, m) for m in range(num_micro_batches) for stage in stages]
    backwards = [(stage, m) for m in range(num_micro_batches) for stage in reversed(stages)]
    return forwards, backwards


def _known(name: str) -> _Entry:
    if name not in _BUILDERS:
        raise ScheduleError(f"schedule {name!r}", "no such schedule", f"use one of {', '.join(NAMES)}")
    return _BUILDERS[name]


@dataclass(frozen=True, slots=True)
class _Entry:
    """What :func:`build` needs to know of a schedule."""

    build: Callable[..., Schedule]
    chunks: int = 1
    placement: Placement = "loop"
    options: frozenset[str] = frozenset()
    divides: bool = False


_BUILDERS: dict[str, _Entry] = {
    "gpipe": _Entry(gpipe),
    "1f1b": _Entry(one_f_one_b),
    "looped_bfs": _Entry(looped_bfs, 2),
    "interleaved": _Entry(interleaved, 2, options=frozenset({"group_size", "warmup_per_rank"})),
    "interleaved_zb": _Entry(
        interleaved_zb,
        2,
        options=frozenset({"group_size", "warmup_per_rank", "most_live", "costs"}),
        divides=True,
    ),
    "zb_h1": _Entry(zb_h1, options=frozenset({"most_live", "costs"}), divides=True),
    "zbv": _Entry(zbv, 2, "v", frozenset({"costs"}), divides=True),
    "v_half": _Entry(v_half, 2, "v", frozenset({"costs"}), divides=True),
    "v_min": _Entry(v_min, 2, "v", frozenset({"costs"}), divides=True),
    "dualpipev": _Entry(dualpipev, 2, "v", divides=True),
}
