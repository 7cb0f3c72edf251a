"""Let ranks that would wait run later actions of their rows, within a bound on live activations."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from dsx.schedules.schedule import Action, Op, Schedule
from dsx.schedules.simulate import RELEASES, Costs, Dependencies


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
class _Rank:
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
        """The input of an action is there."""
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
        self.ranks = [_Rank(row, most) for row, most in zip(schedule.rows, most_live, strict=True)]
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
