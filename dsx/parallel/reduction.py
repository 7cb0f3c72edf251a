"""When gradients leave over data parallelism, and in which buckets: once per step, each chunk's by itself.

DeepSpeed reduces in the backward that ends the step: the whole rank's gradients at once (ZeRO-0, 1) when
nothing is left to hide the communication behind, or after every micro-batch (ZeRO-2), m times the traffic.
Here a chunk's gradients leave during its last backward, bucket after bucket as they come, asynchronously.
What does not come one by one leaves after the last action of the chunk, while the rank goes on with its other
chunks: a split backward's, and, in the first step, whatever stands in the order behind a parameter without a
gradient. From then on such parameters stand last. All are waited for before the step.

A bucket takes the place of the gradients that it was filled from. Where averages have memory of their own,
and where gradients stay in theirs, :data:`AT_ONCE` buckets are under way at most.

One class decides all of that for the engine, which sends tensors (dsx/engine/zero/reduction.py), and for the
memory estimate, which counts their bytes (dsx/memory/states.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from dsx.schedules.schedule import BACKWARDS, Action, Op, Schedule

AT_ONCE = 2
"""Buckets under way where they need not stay until the step: one is summed while the next is filled."""

PARTS = 32
"""Buckets of a chunk, or more: its last backward hides the communication of all but the last, and a bucket is
a copy of what it is filled from while it is filled."""

LEAST = 1 << 22
"""Elements that are worth a bucket of their own; torch's DistributedDataParallel has 25 MB."""


def reduces_micro_batches(asked: str | None, stage: int, *, offloads: bool, micro_batches: int) -> bool:
    """Whether DeepSpeed reduces after every backward; ``asked`` is ``dsx.zero.reduce`` (docs/adr/0008)."""
    chosen = asked or ("micro_batch" if offloads and micro_batches > 1 else "step")
    return stage == 2 and chosen == "micro_batch"


def elements_of_a_bucket(chunk: int, limit: int) -> int:
    """At how many elements a chunk of so many closes a bucket; ``limit`` is ``reduce_bucket_size``."""
    return min(limit, max(-(-chunk // PARTS), LEAST))


P = TypeVar("P", bound=Hashable)
B = TypeVar("B")


@dataclass(frozen=True, slots=True)
class GradientPiece(Generic[P]):
    """Elements ``start`` to ``start + length`` of a parameter's flattened gradient."""

    parameter: P
    start: int
    length: int


def last_backwards(row: Sequence[Action]) -> dict[int, int]:
    """Position of each virtual stage's last backward in a rank's row -> the stage, unless it is split."""
    last = {action.stage: position for position, action in enumerate(row) if action.op in BACKWARDS}
    return {position: stage for stage, position in last.items() if row[position].op is Op.BACKWARD}


Interval = tuple[int, int, int]
"""A data-parallel rank, the first element that it keeps of a flattened parameter, the one after its last."""


def by_owner(
    pieces: Iterable[GradientPiece[P]], owners: Mapping[P, Iterable[Interval]], ranks: int
) -> list[list[GradientPiece[P]]]:
    """What each of ``ranks`` data-parallel ranks keeps of ``pieces``, in their order."""
    found: list[list[GradientPiece[P]]] = [[] for _ in range(ranks)]
    for piece in pieces:
        for rank, start, stop in owners[piece.parameter]:
            first, last = max(start, piece.start), min(stop, piece.start + piece.length)
            if first < last:
                found[rank].append(GradientPiece(piece.parameter, first, last - first))
    return found


Bucket = list[GradientPiece[P]]


class Transport(Protocol[P, B]):
    """What carries gradients of parameters ``P`` in buckets ``B``.

    Attributes:
        in_place: Gradients stay in memory of their own while they are under way, and averages go back there.
            Else a bucket takes the gradients' place.
        apart: Averages go to memory of their own. Where they take the place of gradients that were let go of,
            nothing lands before all has been sent.
        alone: Whether there is no other rank to sum with: each gradient is a bucket, and averages itself.
        waits: Whether landing holds the caller up until the other ranks have sent. Then nothing lands within
            a backward, in which those may wait for this rank.
    """

    in_place: bool
    apart: bool
    alone: bool
    waits: bool

    def watch(self, parameters: Sequence[P], came: Callable[[P], None]) -> Callable[[], None]:
        """Have ``came`` called after a backward adds to the gradient of one of these, until the result is.

        It is called at once with those that are not trained any more.
        """

    def leave(self, parameter: P) -> None:
        """Mark the gradient complete, where it is reduced in place: later ones are refused."""

    def send(self, pieces: Bucket[P]) -> B:
        """Fill a bucket, in the order of ``pieces``, and start summing it."""

    def land(self, bucket: B) -> None:
        """Wait for a bucket's sum, and hand the averages over."""

    def lacking(self, parameters: Mapping[P, bool]) -> set[P]:
        """The parameters that are marked on any rank. Every rank asks with the same ones, in one order."""

    def all_left(self) -> None:
        """Everything of the step has left. Raises what there is to say about gradients that came later."""

    def complete(self) -> None:
        """Everything of the step has landed."""


class ChunkReduction(Generic[P, B]):
    """Reduces every trainable parameter exactly once per step.

    A parameter that several chunks of this rank use (a tied weight) leaves after the last of them; one that
    no chunk claims (of the loss function) at the end. One without a gradient counts as zero, so that ranks
    agree on what they send whatever their micro-batches used. A chunk's buckets leave in the same order on
    every rank: the reverse of the module's, in which gradients come, but last those that did not come in the
    first step on some rank.

    Args:
        sizes: Everything to reduce, in the order of the module, with its number of elements.
        uses: Virtual stage -> parameters that its layers use.
        kinds: What a parameter shares a bucket by: its data type on the wire.
        bucket_elements: A bucket is closed once it has as many elements, or fewer
            (:func:`elements_of_a_bucket`); 0 for the largest parameter's.
    """

    by_dsx = True

    def __init__(
        self,
        transport: Transport[P, B],
        *,
        sizes: Mapping[P, int],
        uses: Mapping[int, Iterable[P]],
        kinds: Mapping[P, Hashable],
        bucket_elements: int,
        rank: int,
    ) -> None:
        self._transport, self._kinds, self._rank = transport, kinds, rank
        self._sizes = {parameter: size for parameter, size in sizes.items() if size}
        self._bucket_elements = bucket_elements or max(self._sizes.values(), default=1)
        users: dict[P, list[int]] = {parameter: [] for parameter in self._sizes}
        for stage, used in uses.items():
            for parameter in used:
                if parameter in users:
                    users[parameter].append(stage)
        self._shared = {parameter: set(stages) for parameter, stages in users.items() if len(stages) != 1}
        own: dict[int, list[P]] = {}
        for parameter in reversed(users):
            if parameter not in self._shared:
                own.setdefault(users[parameter][0], []).append(parameter)
        self._buckets = {stage: self._cut(mine, self._limit(mine)) for stage, mine in own.items()}
        self._row: tuple[Schedule, dict[int, int]] | None = None
        self._due: dict[int, deque[Bucket[P]]] = {}
        self._unwatch: Callable[[], None] | None = None
        self._missing: dict[int, set[P]] = {}
        self._learned = False
        self._done: set[int] = set()
        self._left: set[P] = set()
        self._waiting: deque[Bucket[P]] = deque()
        self._flying: deque[B] = deque()

    def begin(self, schedule: Schedule) -> None:
        """Before a step: find each chunk's last backward, unless it is split; forget one that was cut off."""
        if self._done or self._left or self._due:
            self._end_watch()
            self._forget()
            self._waiting.clear()
            self._flying.clear()
        if self._row is None or self._row[0] is not schedule:
            self._row = schedule, last_backwards(schedule.rows[self._rank])

    def before_action(self, position: int) -> None:
        """Before an action: end the oldest reduction if others wait for its place, and send the next.

        On every data-parallel rank before the same action, whatever has arrived: collectives of one rank
        then come in one order.
        """
        if self._waiting:
            self._advance()
        self._end_watch()
        stage = self._row and self._row[1].get(position)
        if stage in self._buckets and not (self._transport.in_place and self._transport.alone):
            self._watch(stage, self._due.setdefault(stage, deque(self._buckets[stage])))

    def _watch(self, stage: int, due: deque[Bucket[P]]) -> None:
        """Send each of ``due`` as soon as it and those before it are complete."""
        missing = self._missing[stage] = {piece.parameter for bucket in due for piece in bucket}

        def came(parameter: P) -> None:
            missing.discard(parameter)
            while due and not any(piece.parameter in missing for piece in reversed(due[0])):
                self._start([due.popleft()])
                if self._waiting and not self._transport.waits:
                    self._advance()

        self._unwatch = self._transport.watch(tuple(missing), came)

    def _end_watch(self) -> None:
        if self._unwatch is not None:
            self._unwatch()
            self._unwatch = None

    def chunk_done(self, stage: int) -> None:
        """All backwards of virtual stage ``stage`` in this step are done: start what is complete now."""
        self._end_watch()
        self._done.add(stage)
        self._start(self._due.pop(stage, self._buckets.get(stage, ())))
        shared = (p for p, users in self._shared.items() if users and users <= self._done)
        self._start(self._cut(p for p in shared if p not in self._left))

    def finish(self) -> None:
        """Before the update: start the rest, wait, and hand the averages over.

        Raises:
            ModelError: A parameter got a gradient after its reduction had begun.
        """
        for stage, buckets in self._buckets.items():
            if stage not in self._done:
                self._start(self._due.pop(stage, buckets))
        self._start(self._cut(p for p in self._shared if p not in self._left))
        while self._waiting:
            self._advance()
        self._transport.all_left()
        while self._flying:
            self._transport.land(self._flying.popleft())
        self._transport.complete()
        if self._missing and not self._learned:
            self._learn()
        self._forget()

    def _learn(self) -> None:
        """Have what got no gradient leave by itself, behind all that did. On every rank in the same step."""
        self._learned = True
        orders = {
            stage: dict.fromkeys(piece.parameter for bucket in self._buckets[stage] for piece in bucket)
            for stage in self._missing
        }
        marks = {p: p in self._missing[stage] for stage, order in orders.items() for p in order}
        late = self._transport.lacking(marks)
        for stage, order in orders.items():
            if not late.isdisjoint(order):
                parts = [[p for p in order if (p in late) is last] for last in (False, True)]
                self._buckets[stage] = [b for part in parts for b in self._cut(part, self._limit(order))]

    def _forget(self) -> None:
        self._missing.clear()
        self._due.clear()
        self._done.clear()
        self._left.clear()

    def _start(self, buckets: Iterable[Bucket[P]]) -> None:
        """Send as many of ``buckets`` as may be under way; the others wait."""
        transport = self._transport
        for bucket in buckets:
            for piece in bucket:
                if piece.parameter not in self._left:
                    self._left.add(piece.parameter)
                    if transport.in_place:
                        transport.leave(piece.parameter)
            if not (transport.in_place and transport.alone):
                self._waiting.append(bucket)
        while self._waiting and not self._is_full:
            self._advance()

    def _limit(self, chunk: Iterable[P]) -> int:
        """Where nothing lands within a backward, all of a chunk is best sent at once: to all owners alike."""
        if self._transport.waits:
            return self._bucket_elements
        return elements_of_a_bucket(sum(map(self._sizes.__getitem__, chunk)), self._bucket_elements)

    def _cut(self, parameters: Iterable[P], limit: int | None = None) -> list[Bucket[P]]:
        """Buckets of ``parameters``, each of one kind; alone, one for each parameter."""
        limit = limit or self._bucket_elements
        found: list[Bucket[P]] = []
        filling: dict[Hashable, Bucket[P]] = {}
        room: dict[Hashable, int] = {}
        for parameter in parameters:
            kind = self._kinds[parameter]
            for piece in self._pieces(parameter, room.get(kind, limit), limit):
                filling.setdefault(kind, []).append(piece)
                room[kind] = room.get(kind, limit) - piece.length
                if self._transport.alone or room[kind] <= 0:
                    found.append(filling.pop(kind))
                    room[kind] = limit
        return [*found, *filling.values()]

    def _pieces(self, parameter: P, room: int, limit: int) -> Iterator[GradientPiece[P]]:
        """All of ``parameter``; in place, as much as the bucket has room for, then buckets full of it."""
        start, numel = 0, self._sizes[parameter]
        while start < numel:
            length = min(room, numel - start) if self._transport.in_place else numel
            yield GradientPiece(parameter, start, length)
            start, room = start + length, limit

    @property
    def _is_full(self) -> bool:
        """Whether no more buckets may be under way."""
        transport = self._transport
        return (transport.in_place or transport.apart) and len(self._flying) >= AT_ONCE

    def _advance(self) -> None:
        if self._is_full:
            self._transport.land(self._flying.popleft())
        self._flying.append(self._transport.send(self._waiting.popleft()))
