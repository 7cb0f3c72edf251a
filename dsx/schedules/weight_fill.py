"""Use idle time of a schedule for weight gradients or later actions, within a bound on live activations."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import inf

from dsx.schedules.schedule import Action, Op, Schedule
from dsx.schedules.simulate import RELEASES, Costs, Dependencies, execution_order


@dataclass(frozen=True, slots=True)
class _Policy:
    """When a rank prefers a pending ``W`` to the next action of its row.

    Attributes:
        least_wait: A ``W`` goes first if the next action would wait for at least this part of its length.
        hold: A ``W`` goes first if more are pending than the rank's number, as in torch's
            ScheduleInterleavedZeroBubble.
    """

    least_wait: float
    hold: bool = False


# With parts of equal length the first reaches the floor, and the others are not tried. With unequal ones no
# single policy is the best everywhere: a W longer than its wait delays other ranks, or saves time at the end.
_POLICIES = (_Policy(0.5), _Policy(1.0), _Policy(1e-6), _Policy(inf, hold=True))


def fill(schedule: Schedule, most_live: Sequence[int], costs: Costs | None = None) -> Schedule:
    """Put every ``W`` of ``schedule``, whose backwards are ``I``, where it costs least.

    The order of forwards and input gradients stays: they are the critical path. The schedule is run on paper,
    and a rank runs its oldest pending ``W`` when it would otherwise wait, when one more forward would exceed
    its bound, or when nothing else is left. So a schedule that is complete and free of deadlock stays so. How
    long a wait must be is tried out; the shortest step wins.

    Args:
        schedule: Not lowered; forwards, ``I`` and ``B`` in the order that they are to have.
        most_live: Per rank, stage activations alive at once
            (:func:`dsx.schedules.simulate.peak_activations`). The peak is higher only where the order of
            forwards alone demands it.
        costs: What to fill for; by default a forward, an ``I`` and a ``W`` of the same length and free
            transfers, as in arXiv:2401.10241.
    """
    costs = costs or Costs()
    floor = _floor(schedule, costs) * (1 + 1e-9)
    best: _Filler | None = None
    for policy in _POLICIES:
        filler = _Filler(schedule, most_live, costs, policy)
        filler.run()
        if best is None or filler.seconds < best.seconds * (1 - 1e-9):
            best = filler
        if best.seconds <= floor:
            break
    assert best is not None
    return replace(schedule, rows=best.rows())


def without_weights(schedule: Schedule) -> Schedule:
    """The schedule without its ``W``: what :func:`fill` wants."""
    rows = (tuple(a for a in row if a.op is not Op.BACKWARD_WEIGHT) for row in schedule.rows)
    return replace(schedule, rows=tuple(rows))


def _floor(schedule: Schedule, costs: Costs) -> float:
    """A lower bound of the step: no rank ends before its first input has come and all of its work is done."""
    seconds = costs.by_op(schedule.num_stages)
    arrival, reached = 0.0, [0.0] * schedule.num_ranks
    for stage in range(schedule.num_ranks):
        reached[schedule.rank_of(stage)] = arrival
        arrival += seconds[Op.FORWARD][stage] + costs.transfer_seconds
    for rank, row in enumerate(schedule.rows):
        for action in row:
            reached[rank] += seconds[action.op][action.stage]
            if action.op is Op.BACKWARD_INPUT:
                reached[rank] += seconds[Op.BACKWARD_WEIGHT][action.stage]
    return max(reached)


@dataclass(slots=True)
class _Rank:
    """One rank on its way through its row."""

    todo: deque[Action]
    most_live: int
    most_pending: int | None
    clock: float = 0.0
    live: int = 0
    pending: deque[Action] = field(default_factory=deque)
    done: list[Action] = field(default_factory=list)


class _Filler:
    """Runs the schedule on paper under one policy."""

    def __init__(self, schedule: Schedule, most_live: Sequence[int], costs: Costs, policy: _Policy) -> None:
        self._schedule, self._depends, self._policy = schedule, Dependencies(schedule), policy
        self._lengths, self._hop = costs.by_op(schedule.num_stages), costs.transfer_seconds
        self._ends: dict[Action, float] = {}
        self._ranks = [
            _Rank(deque(row), most_live[r], r if policy.hold else None) for r, row in enumerate(schedule.rows)
        ]

    @property
    def seconds(self) -> float:
        return max(rank.clock for rank in self._ranks)

    def rows(self) -> tuple[tuple[Action, ...], ...]:
        return tuple(tuple(rank.done) for rank in self._ranks)

    def run(self) -> None:
        running = [rank for rank in self._ranks if rank.todo]
        while running:
            # The rank whose clock is lowest knows everything that can arrive up to now.
            running.sort(key=lambda rank: rank.clock)
            if not any(map(self._step, running)):
                deque(execution_order(self._schedule), maxlen=0)  # raises, saying where it deadlocks
                raise AssertionError("only the fill deadlocks")
            running = [rank for rank in running if rank.todo or rank.pending]

    def _step(self, rank: _Rank) -> bool:
        """Run one action of ``rank``; False if it can only wait."""
        if not rank.todo:
            return self._weight(rank)
        action = rank.todo[0]
        ready = self._ready(rank, action)
        if rank.pending and self._prefers_weight(rank, action, ready):
            return self._weight(rank)
        if ready is None:
            return False
        self._run(rank, rank.todo.popleft(), max(rank.clock, ready))
        return True

    def _prefers_weight(self, rank: _Rank, action: Action, ready: float | None) -> bool:
        if ready is None or (action.op is Op.FORWARD and rank.live >= rank.most_live):
            return True
        if rank.most_pending is not None and len(rank.pending) > rank.most_pending:
            return True
        oldest = rank.pending[0]
        wait, length = ready - rank.clock, self._lengths[oldest.op][oldest.stage]
        return wait > 0 and wait >= self._policy.least_wait * length

    def _weight(self, rank: _Rank) -> bool:
        self._run(rank, rank.pending.popleft(), rank.clock)
        return True

    def _ready(self, rank: _Rank, action: Action) -> float | None:
        need = self._depends.on(action)
        if need is None:
            return 0.0
        if need not in self._ends:
            return None
        local = self._ranks[self._schedule.rank_of(need.stage)] is rank
        return self._ends[need] + (0.0 if local else self._hop)

    def _run(self, rank: _Rank, action: Action, start: float) -> None:
        rank.clock = self._ends[action] = start + self._lengths[action.op][action.stage]
        rank.done.append(action)
        rank.live += _change(action)
        if action.op is Op.BACKWARD_INPUT:
            rank.pending.append(replace(action, op=Op.BACKWARD_WEIGHT))


def run_ahead(schedule: Schedule, most_live: Sequence[int], costs: Costs | None = None) -> Schedule:
    """The schedule with later actions moved into the waits of a rank.

    The schedule is run on paper. A rank whose next action lacks its input runs the first later one of its row
    that has its own, if the others up to there still stay within the rank's bound beside it.
    Everything that such an action needs has ended, and the others keep their order: what could run can still
    run.

    Args:
        schedule: Not lowered, complete and free of deadlock.
        most_live: Per rank, stage activations alive at once
            (:func:`dsx.schedules.simulate.peak_activations`). A row that needs more itself keeps doing so.
        costs: What to run by; by default a forward, an ``I`` and a ``W`` of the same length and free
            transfers.
    """
    runner = _Runner(schedule, most_live, costs or Costs())
    runner.run()
    return replace(schedule, rows=tuple(tuple(rank.done) for rank in runner.ranks))


@dataclass(slots=True)
class _Lane:
    """One rank on its way through its row. Places are those of the row; heaps hold what has its input."""

    row: Sequence[Action]
    most_live: int
    next: int = 0
    clock: float = 0.0
    live: int = 0
    forwards: list[int] = field(default_factory=list)
    others: list[int] = field(default_factory=list)
    gone: set[int] = field(default_factory=set)
    done: list[Action] = field(default_factory=list)

    def arrived(self, place: int) -> None:
        heapq.heappush(self.forwards if self.row[place].op is Op.FORWARD else self.others, place)

    def take(self) -> Action | None:
        """The first action that has its input and may run; it leaves the row."""
        forward = self.forwards[0] if self.forwards else len(self.row)
        other = self.others[0] if self.others else len(self.row)
        if forward < other and self._has_room(forward):
            heapq.heappop(self.forwards)
        elif self.others:
            forward = heapq.heappop(self.others)
        else:
            return None
        self.gone.add(forward)
        action = self.row[forward]
        self.live += _change(action)
        self.done.append(action)
        while self.next in self.gone:
            self.gone.remove(self.next)
            self.next += 1
        return action

    def _has_room(self, forward: int) -> bool:
        """Whether a forward may go in front: it would be alive beside all that is alive until its place."""
        live = self.live
        for place in range(self.next, forward):
            if live >= self.most_live:
                return False
            if place not in self.gone:
                live += _change(self.row[place])
        return live < self.most_live or forward == self.next


class _Runner:
    """Runs the schedule on paper, moment by moment."""

    def __init__(self, schedule: Schedule, most_live: Sequence[int], costs: Costs) -> None:
        self._lengths, self._hop = costs.by_op(schedule.num_stages), costs.transfer_seconds
        self.ranks = [_Lane(row, most) for row, most in zip(schedule.rows, most_live, strict=True)]
        self._users: dict[Action, list[tuple[int, int]]] = {}
        self._moments: list[tuple[float, int, int]] = []  # (time, rank, place whose input comes; -1 for none)
        depends = Dependencies(schedule)
        for number, rank in enumerate(self.ranks):
            for place, action in enumerate(rank.row):
                need = depends.on(action)
                if need is None:
                    self._moments.append((0.0, number, place))
                else:
                    self._users.setdefault(need, []).append((number, place))

    def run(self) -> None:
        while self._moments:
            now, touched = self._moments[0][0], set()
            while self._moments and self._moments[0][0] == now:
                _, number, place = heapq.heappop(self._moments)
                touched.add(number)
                if place >= 0:
                    self.ranks[number].arrived(place)
            for number in sorted(touched):
                rank = self.ranks[number]
                if rank.clock <= now and (action := rank.take()) is not None:
                    self._start(number, action, now)

    def _start(self, number: int, action: Action, now: float) -> None:
        end = self.ranks[number].clock = now + self._lengths[action.op][action.stage]
        heapq.heappush(self._moments, (end, number, -1))
        for user, place in self._users.get(action, ()):
            heapq.heappush(self._moments, (end if user == number else end + self._hop, user, place))


def _change(action: Action) -> int:
    """How many activations more are alive."""
    return (action.op is Op.FORWARD) - (action.op in RELEASES)
