"""Run a schedule on paper: prove that it can run, and say when every action that computes starts and ends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from dsx.errors import ScheduleError
from dsx.schedules.schedule import (
    BACKWARDS,
    TRANSFERS,
    Action,
    Op,
    Schedule,
    crosses,
    has_transfers,
    lower,
)

Seconds = float | tuple[float, ...]
"""The same for every virtual stage, or one per stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """The durations of actions on one micro-batch.

    Attributes:
        backward_seconds: A whole backward. By default its two parts together; two forwards are usual without
            recompute.
        backward_input_seconds: The gradient of the input. By default half of the whole backward, 1 without.
        backward_weight_seconds: The gradients of the weights. By default the rest of the whole backward, 1
            without.
        transfer_seconds: From the end of an action to the arrival of its result on another rank. Transfers
            overlap with computation and with each other.
        exchange_seconds: What a forward takes longer for rows that travel to experts of other ranks and back.
        backward_exchange_seconds: The same of a whole backward, and of the first part of a divided one.
        hidden_seconds: How much of that is hidden behind weight gradients (:mod:`dsx.schedules.hiding`).
        ahead_seconds: Weight gradients that run there, in the first part of a divided backward.

    >>> Costs(backward_seconds=3.0).by_op(2)[Op.BACKWARD_WEIGHT]
    (1.5, 1.5)
    """

    forward_seconds: Seconds = 1.0
    backward_seconds: Seconds | None = None
    backward_input_seconds: Seconds | None = None
    backward_weight_seconds: Seconds | None = None
    transfer_seconds: float = 0.0
    exchange_seconds: Seconds = 0.0
    backward_exchange_seconds: Seconds = 0.0
    hidden_seconds: Seconds = 0.0
    ahead_seconds: Seconds = 0.0

    def exchanges(self, num_stages: int) -> dict[Op, tuple[tuple[float, float, float], ...]]:
        """Per virtual stage: seconds that it waits for rows, hidden ones, weight gradients that run there."""
        names = ("exchange_seconds", "backward_exchange_seconds", "hidden_seconds", "ahead_seconds")
        stages = [
            *zip(*(_per_stage(num_stages, each, getattr(self, each)) or () for each in names), strict=True)
        ]
        return {
            Op.FORWARD: tuple((there, 0.0, 0.0) for there, *_ in stages),
            Op.BACKWARD: tuple((back - hidden, hidden, 0.0) for _, back, hidden, _ in stages),
            Op.BACKWARD_INPUT: tuple((back - hidden, hidden, ahead) for _, back, hidden, ahead in stages),
            Op.BACKWARD_WEIGHT: tuple((0.0, 0.0, -ahead) for *_, ahead in stages),
        }

    def by_op(self, num_stages: int) -> dict[Op, tuple[float, ...]]:
        """Seconds of every op that computes, per virtual stage."""
        whole = _per_stage(num_stages, "backward_seconds", self.backward_seconds)
        first = _per_stage(num_stages, "backward_input_seconds", self.backward_input_seconds)
        second = _per_stage(num_stages, "backward_weight_seconds", self.backward_weight_seconds)
        if whole is None:
            first = first or (1.0,) * num_stages
            second = second or (1.0,) * num_stages
            whole = tuple(a + b for a, b in zip(first, second, strict=True))
        if first is None:
            known = second or tuple(total / 2 for total in whole)
            first = tuple(total - part for total, part in zip(whole, known, strict=True))
        second = second or tuple(total - part for total, part in zip(whole, first, strict=True))
        found = {
            Op.FORWARD: _per_stage(num_stages, "forward_seconds", self.forward_seconds) or (),
            Op.BACKWARD: whole,
            Op.BACKWARD_INPUT: first,
            Op.BACKWARD_WEIGHT: second,
        }
        for op, more in self.exchanges(num_stages).items():
            found[op] = tuple(each + wait + run for each, (wait, _, run) in zip(found[op], more, strict=True))
        for op, values in found.items():
            if min(values, default=0.0) < 0:
                raise ScheduleError(f"costs of {op}", f"{min(values):g} seconds", "give none below 0")
        return found


Span = tuple[Action, float, float]
"""A compute action with its start and end in seconds."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """When each action runs: ``spans[rank]`` has that rank's computations in order."""

    spans: tuple[tuple[Span, ...], ...]

    @property
    def seconds(self) -> float:
        """From the start of the first action to the end of the last."""
        return max(row[-1][2] for row in self.spans)

    @property
    def busy_seconds(self) -> tuple[float, ...]:
        return tuple(sum(end - start for _, start, end in row) for row in self.spans)

    @property
    def bubble(self) -> float:
        """Idle time over ideal time, where ideal is the computation spread evenly over the ranks.

        (p - 1) / m for GPipe and 1F1B, (p - 1) / (v m) interleaved, with equal stages and free transfers
        (arXiv:2104.04473, section 2.2).
        """
        return self.seconds * len(self.spans) / sum(self.busy_seconds) - 1.0


class TimedOrder:
    """A schedule's order of actions, lowered or not, to be timed again and again with other costs.

    Each rank runs its row as early as its inputs allow.
    """

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        places: dict[Action, int] = {}
        self._steps: list[tuple[int, Op, int, int, bool]] = []
        for place, (rank, action, need) in enumerate(execution_order(schedule)):
            places[action] = place
            hops = need is not None and schedule.rank_of(need.stage) != rank
            self._steps.append((rank, action.op, action.stage, -1 if need is None else places[need], hops))
        self._actions = [*places]

    @property
    def num_actions(self) -> int:
        """The work of timing it once."""
        return len(self._steps)

    def seconds(self, costs: Costs) -> float:
        """Length of the step. Raises ScheduleError for per-stage costs that are not one per virtual stage."""
        return max(self._times(costs)[1])

    def timeline(self, costs: Costs) -> Timeline:
        """When each action that computes starts and ends; raises as :meth:`seconds`."""
        spans: list[list[Span]] = [[] for _ in range(self._schedule.num_ranks)]
        for action, (rank, op, *_), *span in zip(
            self._actions, self._steps, *self._times(costs), strict=True
        ):
            if op not in TRANSFERS:
                spans[rank].append((action, span[0], span[1]))
        return Timeline(tuple(map(tuple, spans)))

    def _times(self, costs: Costs) -> tuple[list[float], list[float]]:
        lengths, hop = costs.by_op(self._schedule.num_stages), costs.transfer_seconds
        free = (0.0,) * self._schedule.num_stages
        clocks = [0.0] * self._schedule.num_ranks
        starts: list[float] = []
        ends: list[float] = []
        for rank, op, stage, need, hops in self._steps:
            start = clocks[rank]
            if need >= 0:
                start = max(start, ends[need] + hop if hops else ends[need])
            starts.append(start)
            clocks[rank] = start + lengths.get(op, free)[stage]
            ends.append(clocks[rank])
        return starts, ends


def simulate(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """Timeline of a schedule, lowered or not: each rank runs its row as early as its inputs allow."""
    return TimedOrder(schedule).timeline(costs or Costs())


def _per_stage(num_stages: int, name: str, value: Seconds | None) -> tuple[float, ...] | None:
    if value is None:
        return None
    if isinstance(value, int | float):
        return (float(value),) * num_stages
    if len(value) != num_stages:
        raise ScheduleError(
            f"costs.{name}",
            f"{len(value)} values for {num_stages} virtual stages",
            "give one number, or one per virtual stage",
        )
    return value


def execution_order(schedule: Schedule) -> Iterator[tuple[int, Action, Action | None]]:
    """Every action as ``(rank, action, what it waited for)``, each after what it needs.

    Ranks run their rows in order; receives block, sends never do. The schedule may be lowered or not: without
    transfers an action waits for its producer on the other rank directly.
    """
    depends = Dependencies(schedule)
    heads = [0] * schedule.num_ranks
    done: set[Action] = set()
    waiting: dict[Action, list[int]] = {}
    ready = list(range(schedule.num_ranks - 1, -1, -1))
    while ready:
        rank = ready.pop()
        row = schedule.rows[rank]
        while heads[rank] < len(row):
            action = row[heads[rank]]
            need = depends.on(action)
            if need is not None and need not in done:
                waiting.setdefault(need, []).append(rank)
                break
            yield rank, action, need
            heads[rank] += 1
            done.add(action)
            ready += waiting.pop(action, ())
    if waiting:
        raise _deadlock(schedule, heads, waiting)


class Dependencies:
    """What each action of one schedule, lowered or not, waits for."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._lowered = has_transfers(schedule)
        self._last = schedule.num_stages - 1
        self._divided = {
            (a.stage, a.micro_batch) for row in schedule.rows for a in row if a.op is Op.BACKWARD_INPUT
        }

    def on(self, action: Action) -> Action | None:
        """The action that must have ended before ``action``, besides those before it in its row."""
        stage, micro_batch = action.stage, action.micro_batch
        match action.op:
            case Op.FORWARD:
                return self._input(stage, micro_batch)
            case Op.BACKWARD | Op.BACKWARD_INPUT:
                return self._output_gradient(stage, micro_batch)
            case Op.BACKWARD_WEIGHT:
                return Action(stage, Op.BACKWARD_INPUT, micro_batch)
            case Op.SEND_F:
                return Action(stage, Op.FORWARD, micro_batch)
            case Op.SEND_B:
                return self._backward(stage, micro_batch)
            case Op.RECV_F:
                return Action(stage - 1, Op.SEND_F, micro_batch)
            case Op.RECV_B:
                return Action(stage + 1, Op.SEND_B, micro_batch)

    def _input(self, stage: int, micro_batch: int) -> Action | None:
        if stage == 0:
            return None
        if self._lowered and crosses(self._schedule, stage - 1):
            return Action(stage, Op.RECV_F, micro_batch)
        return Action(stage - 1, Op.FORWARD, micro_batch)

    def _output_gradient(self, stage: int, micro_batch: int) -> Action:
        if stage == self._last:
            return Action(stage, Op.FORWARD, micro_batch)
        if self._lowered and crosses(self._schedule, stage):
            return Action(stage, Op.RECV_B, micro_batch)
        return self._backward(stage + 1, micro_batch)

    def _backward(self, stage: int, micro_batch: int) -> Action:
        """The action that yields the gradient of the stage's input."""
        divided = (stage, micro_batch) in self._divided
        return Action(stage, Op.BACKWARD_INPUT if divided else Op.BACKWARD, micro_batch)


def _deadlock(schedule: Schedule, heads: list[int], waiting: dict[Action, list[int]]) -> ScheduleError:
    stuck = sorted((rank, need) for need, ranks in waiting.items() for rank in ranks)
    places = []
    for rank, need in stuck:
        row = schedule.rows[rank]
        where = ", misordered: that comes later in this row" if need in row[heads[rank] :] else ""
        places.append(f"rank {rank} at {row[heads[rank]]} for {need}{where}")
    more = f" and {len(places) - 8} more" if len(places) > 8 else ""
    return ScheduleError(
        f"schedule {schedule.name}",
        f"it deadlocks; waiting: {'; '.join(places[:8])}{more}",
        "reorder its rows, or use a builder of dsx.schedules.builders",
    )


RELEASES = frozenset({Op.BACKWARD, Op.BACKWARD_WEIGHT})
"""Ops after which a stage's activation is no longer needed."""


def validate(schedule: Schedule) -> None:
    """Check a schedule, lowered or not, for training or forward-only.

    Complete: every virtual stage runs every micro-batch forward exactly once, and backward exactly once,
    whole (``B``) or as ``I`` and ``W``, unless the schedule has no backward at all, on the rank that holds
    it; a lowered schedule has exactly the transfers that these imply. Ordered and deadlock-free: run with
    receives that block and sends that do not, every action finds what it needs and every rank reaches its
    end. (Receives must be posted in the order of :func:`dsx.schedules.schedule.receive_order`; then both ends
    of a channel agree by construction.)
    """
    if len(schedule.rows) != schedule.num_ranks:
        raise ScheduleError(
            f"schedule {schedule.name}",
            f"{len(schedule.rows)} rows for {schedule.num_ranks} ranks",
            "give one row per pipeline rank",
        )
    training = any(a.op in BACKWARDS for row in schedule.rows for a in row)
    rows = tuple(tuple(_of_rank(schedule, rank, training)) for rank in range(schedule.num_ranks))
    complete = replace(schedule, rows=rows)
    expected = lower(complete) if has_transfers(schedule) else complete
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


def peaks(
    schedule: Schedule, kept: Sequence[int], pending: Sequence[int], working: Sequence[int]
) -> tuple[int, ...]:
    """Most memory of activations at once, per rank, in any unit.

    A forward without a backward in the schedule keeps nothing beyond itself.

    Args:
        schedule: Lowered or not.
        kept: What a virtual stage's forward keeps until its backward.
        pending: What of it is left between the two parts of a divided backward.
        working: What is added while a backward, or the first part of one, runs.
    """
    found = []
    for row in schedule.rows:
        ends = {(a.stage, a.micro_batch) for a in row if a.op in RELEASES}
        live = peak = 0
        for action in row:
            stage = action.stage
            match action.op:
                case Op.FORWARD:
                    peak = max(peak, live + kept[stage])
                    live += kept[stage] if (stage, action.micro_batch) in ends else 0
                case Op.BACKWARD:
                    peak = max(peak, live + working[stage])
                    live -= kept[stage]
                case Op.BACKWARD_INPUT:
                    peak = max(peak, live + working[stage])
                    live += pending[stage] - kept[stage]
                    peak = max(peak, live)
                case Op.BACKWARD_WEIGHT:
                    live -= pending[stage]
        found.append(peak)
    return tuple(found)


def peak_activations(schedule: Schedule) -> tuple[int, ...]:
    """Most stage activations alive at once, per rank: from a forward to the end of its backward.

    Where the backward is split, an activation counts in full until its ``W``: the weight gradients need the
    inputs of every linear. (``I`` frees a part of it, which this does not model.)
    """
    ones = (1,) * schedule.num_stages
    return peaks(schedule, ones, ones, (0,) * schedule.num_stages)


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
