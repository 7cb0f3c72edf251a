"""Searches for an order of actions that is shorter than every named schedule's, within a rank's memory.

A pipeline's step is a job shop: every rank is a machine, every micro-batch a chain of forwards and input
gradients through all of them, and memory bounds what a rank may have begun. So the search is that of job
shops: a tabu search over moves of actions on the critical path (Nowicki and Smutnicki 1996, *A fast taboo
search algorithm for the job shop problem*; insertions as in Balas and Vazacopoulos 1998), from the best of
many greedy orders and of those that are given. What cannot be undercut is Jackson's preemptive schedule of
one rank (Carlier and Pinson 1989), and what memory alone demands. AdaPtis (arXiv:2509.23722) tunes greedy
rules in the same way, OptPipe (arXiv:2510.05186) solves an integer program.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from random import Random

from dsx.errors import ScheduleError
from dsx.parallel.stages import Placement, rank_of
from dsx.schedules.schedule import Action, Op, Schedule
from dsx.schedules.simulate import Costs, validate

_OPS = (Op.FORWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)
_FORWARD, _INPUT, _WEIGHT = range(3)
_SAME = 1 + 1e-9
_WINDOW = 16  # Actions that a move passes at most.
_STARTS = 4  # Orders that the tabu search starts from.
_PATIENCE = 60  # Moves without a shorter step after which it goes back to the shortest.

Rows = list[list[int]]
"""Per rank, its actions by number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLimit:
    """Memory for activations, in any unit, with one figure per virtual stage.

    Attributes:
        most: What a rank may keep at once; None: any.
        kept: What a forward leaves behind.
        pending: What of it is left between the two parts of a backward.
        working: What a backward holds beside while it runs.
    """

    most: float | None
    kept: Sequence[float]
    pending: Sequence[float]
    working: Sequence[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """What a search ends with.

    Attributes:
        schedule: The shortest order that was found; every backward in two parts.
        seconds: Its simulated step.
        bound: No order of these stages on these ranks, within this memory, is shorter.
    """

    schedule: Schedule
    seconds: float
    bound: float


class SchedulingProblem:
    """One size of pipeline with its times and its memory: all actions, numbered.

    Args:
        size: Ranks, chunks per rank, micro-batches.
        placement: How virtual stages lie on ranks.
        costs: Lengths of actions and transfers.
    """

    def __init__(
        self, size: tuple[int, int, int], placement: Placement, costs: Costs, limit: MemoryLimit
    ) -> None:
        self.size, self.placement, self.limit = size, placement, limit
        self.num_ranks, num_chunks, self.count = size
        self.stages = self.num_ranks * num_chunks
        self.hop = costs.transfer_seconds
        by_op = costs.by_op(self.stages)
        self.seconds = [by_op[op] for op in _OPS]
        self.owner = [rank_of(stage, self.num_ranks, placement) for stage in range(self.stages)]
        kinds = [(op, stage) for op in range(3) for stage in range(self.stages)]
        self.length = [self.seconds[op][stage] for op, stage in kinds for _ in range(self.count)]
        self.rank = [self.owner[stage] for _, stage in kinds for _ in range(self.count)]
        changes = (
            limit.kept,
            [p - k for p, k in zip(limit.pending, limit.kept, strict=True)],
            [-p for p in limit.pending],
        )
        self.change = [changes[op][stage] for op, stage in kinds for _ in range(self.count)]
        self.extra = [
            limit.working[stage] if op == _INPUT else 0.0 for op, stage in kinds for _ in range(self.count)
        ]
        self.need = [self._need(op, stage, m) for op, stage in kinds for m in range(self.count)]
        self.delay = [
            self.hop if need >= 0 and self.rank[need] != self.rank[action] else 0.0
            for action, need in enumerate(self.need)
        ]
        self.users: list[list[int]] = [[] for _ in self.need]
        for action, need in enumerate(self.need):
            if need >= 0:
                self.users[need].append(action)

    def number(self, op: int, stage: int, micro_batch: int) -> int:
        return (op * self.stages + stage) * self.count + micro_batch

    def _need(self, op: int, stage: int, micro_batch: int) -> int:
        if op == _FORWARD:
            return self.number(op, stage - 1, micro_batch) if stage else -1
        if op == _WEIGHT:
            return self.number(_INPUT, stage, micro_batch)
        if stage == self.stages - 1:
            return self.number(_FORWARD, stage, micro_batch)
        return self.number(_INPUT, stage + 1, micro_batch)

    def rows_of(self, schedule: Schedule) -> Rows:
        """The numbers of a schedule's actions, a whole backward as its two parts."""
        rows: Rows = []
        for row in schedule.rows:
            rows.append([])
            for action in row:
                ops = (_INPUT, _WEIGHT) if action.op is Op.BACKWARD else (_OPS.index(action.op),)
                rows[-1] += [self.number(op, action.stage, action.micro_batch) for op in ops]
        return rows

    def schedule_of(self, rows: Rows, name: str) -> Schedule:
        """The schedule that runs these rows, proved to run."""
        ranks, chunks, count = self.size
        actions = tuple(
            tuple(Action(a // count % self.stages, _OPS[a // count // self.stages], a % count) for a in row)
            for row in rows
        )
        schedule = Schedule(name, ranks, chunks, count, actions, self.placement)
        validate(schedule)
        return schedule

    def fits(self, rows: Rows) -> bool:
        return all(self.fits_from(0.0, row) for row in rows)

    def fits_from(self, live: float, actions: Iterable[int]) -> bool:
        """Whether actions fit beside what is alive before them."""
        if self.limit.most is None:
            return True
        most = self.limit.most * _SAME
        for action in actions:
            change = self.change[action]
            if live + max(change, self.extra[action]) > most:
                return False
            live += change
        return True

    def run(self, rows: Rows) -> tuple[list[float], list[int]]:
        """When every action ends, and all in an order in which they can run; fewer if they deadlock."""
        need, delay, length = self.need, self.delay, self.length
        ends, order = [-1.0] * len(need), []
        heads, clocks = [0] * len(rows), [0.0] * len(rows)
        waiting: dict[int, list[int]] = {}
        ready = [*range(len(rows))]
        while ready:
            rank = ready.pop()
            row, at, clock = rows[rank], heads[rank], clocks[rank]
            for action in row[at:]:
                before = need[action]
                if before >= 0:
                    end = ends[before]
                    if end < 0:
                        waiting.setdefault(before, []).append(rank)
                        break
                    clock = max(clock, end + delay[action])
                clock += length[action]
                ends[action] = clock
                order.append(action)
                if action in waiting:
                    ready += waiting.pop(action)
                at += 1
            heads[rank], clocks[rank] = at, clock
        return ends, order

    def bound(self) -> float:
        """A lower bound of the step of all orders within the memory limit."""
        return max(
            bound
            for rank in range(self.num_ranks)
            for bound in (self._one_rank(rank, True), self._one_rank(rank, False), self._memory(rank))
        )

    def _chain(self, stage: int) -> Iterator[tuple[float, float]]:
        """Length, and way to the next, of every action that a micro-batch needs from a stage's forward on."""
        for at in range(stage, self.stages):
            last = at == self.stages - 1
            yield (
                self.seconds[_FORWARD][at],
                0.0 if last or self.owner[at] == self.owner[at + 1] else self.hop,
            )
        for at in range(self.stages - 1, -1, -1):
            yield (
                self.seconds[_INPUT][at],
                0.0 if not at or self.owner[at] == self.owner[at - 1] else self.hop,
            )

    def _one_rank(self, rank: int, by_heads: bool) -> float:
        """Jackson's preemptive schedule: a rank's actions, when each can begin at least, what is left after.

        Micro-batches are alike: the n-th that comes to an action has n - 1 before it in every earlier one,
        and the n-th from the end as many after it in every later one. Of both facts a bound uses one.
        """
        chain = [*self._chain(0)]
        tasks = []
        for stage in (s for s in range(self.stages) if self.owner[s] == rank):
            for at in (stage, 2 * self.stages - 1 - stage):
                head = sum(a + b for a, b in chain[:at])
                tail = (
                    sum(b for _, b in chain[at:])
                    + sum(a for a, _ in chain[at + 1 :])
                    + self.seconds[_WEIGHT][0]
                )
                length = chain[at][0]
                ahead = max((a for a, _ in chain[:at]), default=0.0)
                after = max((a for a, _ in chain[at + 1 :]), default=0.0)
                tasks += [
                    (head + n * ahead * by_heads, length, tail + n * after * (not by_heads))
                    for n in range(self.count)
                ]
                if at >= self.stages:
                    ahead = max(ahead, length)
                    weight = self.seconds[_WEIGHT][stage]
                    tasks += [(head + length + n * ahead * by_heads, weight, 0.0) for n in range(self.count)]
        return _jackson(tasks)

    def _memory(self, rank: int) -> float:
        """What a rank's memory limit alone demands.

        First, all micro-batches together take its memory for so long, over how much of it there is. Second,
        before its first input gradient, which comes late, a rank has no more work than forwards that fit, and
        after its last forward, which has a long way to the end, no more than what they leave to do.
        """
        most = self.limit.most
        if not most:
            return 0.0
        chain, mine = [*self._chain(0)], [s for s in range(self.stages) if self.owner[s] == rank]
        taken = work = forwards = left = 0.0
        first, last = float("inf"), float("inf")
        for stage in mine:
            kept, pending = self.limit.kept[stage], self.limit.pending[stage]
            lengths = [seconds[stage] for seconds in self.seconds]
            back = 2 * self.stages - 1 - stage
            way = chain[stage : back + 1]
            taken += kept * (sum(a + b for a, b in way) - way[-1][1]) + pending * lengths[_WEIGHT]
            work += self.count * sum(lengths)
            first = min(first, sum(a + b for a, b in chain[:back]))
            last = min(
                last, sum(a + b for a, b in chain[stage + 1 :]) + chain[stage][1] + self.seconds[_WEIGHT][0]
            )
            forwards = max(forwards, most / kept * lengths[_FORWARD] if kept else float("inf"))
            parts = [(kept, lengths[_INPUT] + lengths[_WEIGHT]), (pending, lengths[_WEIGHT])]
            left = max(
                left, *(most / size * seconds if size else float("inf") for size, seconds in parts if seconds)
            )
        by_size = sum(a + b for a, b in chain[: mine[0]]) + self.count * taken / most
        if self.count * sum(self.limit.kept[stage] for stage in mine) <= most:
            return by_size
        return max(by_size, first + work - forwards - left + last)


def _jackson(tasks: Sequence[tuple[float, float, float]]) -> float:
    """Length of the preemptive schedule that runs what has most left after it.

    Args:
        tasks: (when it can begin, its length, what is left after it), in any order.
    """
    waiting: list[list[float]] = []
    clock = longest = 0.0
    todo = sorted(tasks, reverse=True)
    while todo or waiting:
        if not waiting:
            clock = max(clock, todo[-1][0])
        while todo and todo[-1][0] <= clock:
            _, length, tail = todo.pop()
            heapq.heappush(waiting, [-tail, length])
        task = waiting[0]
        step = min(task[1], todo[-1][0] - clock) if todo else task[1]
        clock += step
        task[1] -= step
        if task[1] <= 1e-12:
            heapq.heappop(waiting)
            longest = max(longest, clock - task[0])
    return longest


@dataclass(frozen=True, slots=True)
class _Rule:
    """How a greedy order prefers actions.

    Attributes:
        share: Part of the room that forwards of a first chunk may take.
        slope: How much less of it each further rank may take.
        deep: Whether later chunks' forwards go before earlier ones'.
        eager: Whether forwards go before input gradients while there is memory.
        patience: A weight gradient is not begun if an input is known to come within this part of its length.
    """

    share: float
    slope: float
    deep: bool
    eager: bool
    patience: float


def _rules() -> Iterator[_Rule]:
    shares, slopes = (1.0, 0.9, 0.8, 0.65, 0.5, 0.35), (0.0, 0.5, 1.0)
    for share, slope, deep, eager, patience in product(
        shares, slopes, (True, False), (False, True), (0.0, 0.5, 1.0)
    ):
        yield _Rule(share, slope, deep, eager, patience)


class _Greedy:
    """Builds an order by a rule, moment by moment; it may get stuck for lack of memory."""

    def __init__(self, problem: SchedulingProblem, rule: _Rule) -> None:
        self._problem, self._rule = problem, rule
        most = problem.limit.most
        total = max(
            problem.count * sum(k for s, k in enumerate(problem.limit.kept) if problem.owner[s] == r)
            for r in range(problem.num_ranks)
        )
        self._most = (total if most is None else most) * _SAME
        self._rows: Rows = [[] for _ in range(problem.num_ranks)]
        self._ready: list[list[int]] = [[] for _ in self._rows]
        self._live, self._clocks = [0.0] * len(self._rows), [0.0] * len(self._rows)
        self._moments: list[tuple[float, int, int]] = []
        self._coming: list[list[float]] = [[] for _ in self._rows]

    def rows(self) -> Rows | None:
        """The order; None if stuck."""
        problem = self._problem
        self._moments = [
            (0.0, problem.owner[0], problem.number(_FORWARD, 0, m)) for m in range(problem.count)
        ]
        while self._moments:
            now, touched = self._moments[0][0], set()
            while self._moments and self._moments[0][0] == now:
                _, rank, action = heapq.heappop(self._moments)
                touched.add(rank)
                if action >= 0:
                    self._ready[rank].append(action)
            for rank in sorted(touched):
                if self._clocks[rank] <= now:
                    self._step(rank, now)
        return self._rows if sum(map(len, self._rows)) == len(problem.need) else None

    def _step(self, rank: int, now: float) -> None:
        problem, best, action = self._problem, None, -1
        for each in self._ready[rank]:
            key = self._key(rank, each, now)
            if key is not None and (best is None or key < best):
                best, action = key, each
        if action < 0:
            return
        self._ready[rank].remove(action)
        self._rows[rank].append(action)
        self._live[rank] += problem.change[action]
        end = self._clocks[rank] = now + problem.length[action]
        heapq.heappush(self._moments, (end, rank, -1))
        for user in problem.users[action]:
            arrival = end + problem.delay[user]
            heapq.heappush(self._moments, (arrival, problem.rank[user], user))
            if problem.delay[user] or problem.rank[user] != rank:
                self._coming[problem.rank[user]].append(arrival)

    def _key(self, rank: int, action: int, now: float) -> tuple[int, int, int] | None:
        """Smaller goes first; None for what may not run now."""
        problem, rule = self._problem, self._rule
        kind, micro_batch = divmod(action, problem.count)
        op, stage = divmod(kind, problem.stages)
        if op == _INPUT:
            return (1, micro_batch, -stage)
        if op == _FORWARD:
            depth = stage // problem.num_ranks
            limit = self._most
            if not depth:
                limit *= max(0.0, rule.share - rule.slope * rule.share * rank / max(1, problem.num_ranks))
                limit = max(limit, problem.change[action])
            if self._live[rank] + problem.change[action] > limit:
                return None
            return (0 if rule.eager else 2, -depth if rule.deep else depth, micro_batch)
        self._coming[rank] = [at for at in self._coming[rank] if at > now]
        soon = now + rule.patience * problem.length[action]
        full = self._live[rank] + max(problem.limit.kept) > self._most
        if rule.patience and not full and any(at < soon for at in self._coming[rank]):
            return None
        return (3, micro_batch, -stage)


_Move = tuple[float, float, int, int, int, bool]
"""(estimated step, chance, rank, first place, last place, whether the last goes to the front)."""


class _Tabu:
    """Moves actions of critical paths, the best move first, and does not take moves back for a while."""

    def __init__(self, problem: SchedulingProblem, rows: Rows, seed: int) -> None:
        self.problem, self.rows, self._random = problem, [row[:] for row in rows], Random(seed)  # noqa: S311
        self._forbidden: dict[tuple[int, int], int] = {}
        self._turn = 0
        self.best, self.best_rows = float("inf"), rows
        self._look()

    def _look(self) -> bool:
        """Time the rows; False if they deadlock."""
        problem = self.problem
        ends, order = problem.run(self.rows)
        if len(order) < len(ends):
            return False
        self.ends, self.seconds = ends, max(ends)
        after = [-1] * len(ends)
        self.place = [0] * len(ends)
        for row in self.rows:
            for at, action in enumerate(row):
                self.place[action] = at
            for one, other in pairwise(row):
                after[one] = other
        tails = [0.0] * len(ends)
        length, delay, users = problem.length, problem.delay, problem.users
        for action in reversed(order):
            tail, follower = 0.0, after[action]
            if follower >= 0:
                tail = length[follower] + tails[follower]
            for user in users[action]:
                tail = max(tail, delay[user] + length[user] + tails[user])
            tails[action] = tail
        self.tails = tails
        if self.seconds < self.best * (1 - 1e-9):
            self.best, self.best_rows = self.seconds, [row[:] for row in self.rows]
        return True

    def step(self) -> None:
        """The best move that is not forbidden."""
        self._turn += 1
        for move in sorted(self._moves())[:8]:
            if self._take(move):
                return
        self._forbidden.clear()

    def restart(self) -> None:
        """Back to the best, then some moves at random."""
        self.rows = [row[:] for row in self.best_rows]
        self._forbidden.clear()
        self._look()
        for _ in range(self._random.randrange(2, 12)):
            moves = [*self._moves(self._random.random() < 0.5)]
            if moves:
                self._take(self._random.choice(moves))

    def _take(self, move: _Move) -> bool:
        """Make a move, and forbid to take it back; False if the rows would deadlock."""
        _, _, rank, first, last, left = move
        row = self.rows[rank]
        part = row[first : last + 1]
        moved = part[-1:] + part[:-1] if left else part[1:] + part[:1]
        row[first : last + 1] = moved
        if not self._look():
            row[first : last + 1] = part
            return False
        until = self._turn + 8 + self._random.randrange(10)
        others, mover = (moved[1:], moved[0]) if left else (moved[:-1], moved[-1])
        for other in others:
            self._forbidden[(other, mover) if left else (mover, other)] = until
        return True

    def _blocks(self) -> Iterator[tuple[int, int, int]]:
        """(rank, first, last) of the parts of one critical path that run without a wait on one rank."""
        problem, ends = self.problem, self.ends
        lasts = [row[-1] for row in self.rows if ends[row[-1]] >= self.seconds * (1 - 1e-12)]
        action = self._random.choice(lasts)
        while True:
            rank, last = problem.rank[action], self.place[action]
            row = self.rows[rank]
            at = last
            while True:
                start = ends[row[at]] - problem.length[row[at]]
                need = problem.need[row[at]]
                by_need = need >= 0 and ends[need] + problem.delay[row[at]] >= start - 1e-9
                by_rank = at > 0 and ends[row[at - 1]] >= start - 1e-9
                if by_need and by_rank and problem.rank[need] != rank:
                    by_rank = self._random.random() < 0.5
                if not by_rank:
                    break
                at -= 1
            yield rank, at, last
            if not by_need:
                return
            action = need

    def _moves(self, anywhere: bool = False) -> Iterator[_Move]:
        """Moves within blocks of a critical path, or of a random part of a random row."""
        blocks = self._blocks()
        if anywhere:
            rank = self._random.randrange(len(self.rows))
            first = self._random.randrange(len(self.rows[rank]))
            blocks = iter([(rank, first, min(first + _WINDOW, len(self.rows[rank]) - 1))])
        for rank, first, last in blocks:
            for at in range(first, last + 1):
                for to in {self._earliest(rank, at, first), at - 1}:
                    if first <= to < at and self._earliest(rank, at, to) == to:
                        yield from self._judged(rank, to, at, True)
                for to in {self._latest(rank, at, last), at + 1}:
                    if at < to <= last and self._latest(rank, at, to) == to:
                        yield from self._judged(rank, at, to, False)

    def _earliest(self, rank: int, at: int, first: int) -> int:
        """Where an action can be moved to the front without waiting for what it passes."""
        row, need = self.rows[rank], self.problem.need[self.rows[rank][at]]
        start = self.ends[need] if need >= 0 else -1.0
        to = at
        while to > max(first, at - _WINDOW) and start < self.ends[row[to - 1]] - 1e-12:
            to -= 1
        return to

    def _latest(self, rank: int, at: int, last: int) -> int:
        """Where an action can be moved to the back without what it passes waiting for it."""
        problem, row, ends = self.problem, self.rows[rank], self.ends
        used = min((ends[user] for user in problem.users[row[at]]), default=float("inf"))
        to = at
        while to < min(last, at + _WINDOW) and used > ends[row[to + 1]] - problem.length[row[to + 1]] + 1e-12:
            to += 1
        return to

    def _judged(self, rank: int, first: int, last: int, left: bool) -> Iterator[_Move]:
        problem, ends, tails, row = self.problem, self.ends, self.tails, self.rows[rank]
        part = row[first : last + 1]
        mover = part[-1] if left else part[0]
        others = part[:-1] if left else part[1:]
        moved = [mover, *others] if left else [*others, mover]
        if problem.limit.most is not None and any(problem.change[a] or problem.extra[a] for a in part):
            live = sum(problem.change[a] for a in row[:first])
            if not problem.fits_from(live, moved):
                return
        clock = ends[row[first - 1]] if first else 0.0
        done = []
        for action in moved:
            need = problem.need[action]
            if need >= 0:
                clock = max(clock, ends[need] + problem.delay[action])
            clock += problem.length[action]
            done.append(clock)
        estimate, tail = 0.0, 0.0
        if last + 1 < len(row):
            tail = problem.length[row[last + 1]] + tails[row[last + 1]]
        for action, end in zip(reversed(moved), reversed(done), strict=True):
            for user in problem.users[action]:
                tail = max(tail, problem.delay[user] + problem.length[user] + tails[user])
            estimate = max(estimate, end + tail)
            tail += problem.length[action]
        pairs = ((mover, other) if left else (other, mover) for other in others)
        if estimate >= self.best and any(self._forbidden.get(pair, 0) > self._turn for pair in pairs):
            return
        yield estimate, self._random.random(), rank, first, last, left


def search(
    problem: SchedulingProblem,
    starts: Iterable[Schedule] = (),
    *,
    name: str = "searched",
    most_actions: int = 20_000_000,
    progress: Callable[[int], None] = lambda _: None,
) -> SearchResult:
    """The shortest order that a search finds; the same for the same arguments.

    Orders of ``starts`` that do not fit are left out. ``most_actions`` bounds the actions that are timed in
    all, about two microseconds each; ``progress`` is told how many more were.
    """
    bound = problem.bound()
    pool: list[tuple[float, int, Rows]] = []
    given = [problem.rows_of(start) for start in starts]
    made = (_Greedy(problem, rule).rows() for rule in _rules())
    for rows in (*given, *made):
        if rows is not None and problem.fits(rows):
            ends, _ = problem.run(rows)
            pool.append((max(ends), len(pool), rows))
    if not pool:
        raise ScheduleError("the search", "no order was found within this memory", "allow more activations")
    pool.sort(key=lambda each: each[:2])
    distinct = [each for at, each in enumerate(pool) if not at or each[0] > pool[at - 1][0] * _SAME]
    best = _Tabu(problem, pool[0][2], 0)
    turns = max(1, most_actions // len(problem.need) // _STARTS)
    for number, (_, _, rows) in enumerate(distinct[:_STARTS]):
        tabu = _Tabu(problem, rows, number)
        since = 0
        for _ in range(turns):
            if min(best.best, tabu.best) <= bound * _SAME:
                break
            before = tabu.best
            tabu.step()
            progress(len(problem.need))
            since = 0 if tabu.best < before else since + 1
            if since > _PATIENCE:
                tabu.restart()
                since = 0
        best = tabu if tabu.best < best.best else best
    schedule = problem.schedule_of(best.best_rows, name)
    return SearchResult(schedule=schedule, seconds=best.best, bound=bound)
