"""When gradients leave over data parallelism, and in which buckets: once per step, each chunk's by itself.

DeepSpeed reduces in the backward that ends the step: the whole rank's gradients at once (ZeRO-0, 1) when
nothing is left to hide the communication behind, or after every micro-batch (ZeRO-2), m times the traffic.
Here a chunk's gradients leave as one asynchronous all-reduce (a few, if they are large) right after the last
action of that chunk, while the rank goes on with its other chunks. They are waited for before the step.

A bucket takes the place of the gradients that it was filled from, so that all buckets may be under way at
once. Where gradients stay in place, buckets come on top of them: then they are cut to size, and
:data:`AT_ONCE` of them are under way at most; the next leaves before one of the actions that follow.

One class decides all of that for the engine, which sends tensors (dsx/engine/zero/reduction.py), and for the
memory estimate, which counts their bytes (dsx/memory/states.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from dsx.schedules.schedule import Schedule

AT_ONCE = 2
"""Buckets under way where gradients stay in place: one is summed while the next is filled."""

P = TypeVar("P", bound=Hashable)
B = TypeVar("B")


@dataclass(frozen=True, slots=True)
class GradientPiece(Generic[P]):
    """Elements ``start`` to ``start + length`` of a parameter's flattened gradient."""

    parameter: P
    start: int
    length: int


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


class Transport(Protocol[P, B]):
    """What carries gradients of parameters ``P`` in buckets ``B``.

    Attributes:
        in_place: Gradients stay in memory of their own while they are under way, and averages go back there.
            Else a bucket takes the gradients' place, and nothing lands before all has been sent.
        alone: Whether there is no other rank to sum with: each gradient is a bucket, and averages itself.
    """

    in_place: bool
    alone: bool

    def leave(self, parameter: P) -> None:
        """Mark the gradient complete, where it is reduced in place: later ones are refused."""

    def send(self, pieces: Sequence[GradientPiece[P]]) -> B:
        """Fill a bucket, in the order of ``pieces``, and start summing it."""

    def land(self, bucket: B) -> None:
        """Wait for a bucket's sum, and hand the averages over."""

    def all_left(self) -> None:
        """Everything of the step has left. Raises what there is to say about gradients that came later."""

    def complete(self) -> None:
        """Everything of the step has landed."""


class ChunkReduction(Generic[P, B]):
    """Reduces every trainable parameter exactly once per step.

    A parameter that several chunks of this rank use (a tied weight) leaves after the last of them; one that
    no chunk claims (of the loss function) at the end. One without a gradient counts as zero, so that ranks
    agree on what they send whatever their micro-batches used.

    Args:
        transport: Carries the buckets.
        sizes: Everything to reduce, in the order of the module, with its number of elements.
        uses: Virtual stage -> parameters that its layers use.
        kinds: What a parameter shares a bucket by: its data type on the wire.
        bucket_elements: A bucket is closed once it has as many elements; 0 for the largest parameter's.
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
    ) -> None:
        self._transport, self._kinds = transport, kinds
        self._sizes = {parameter: size for parameter, size in sizes.items() if size}
        self._bucket_elements = bucket_elements or max(self._sizes.values(), default=1)
        self._users: dict[P, set[int]] = {parameter: set() for parameter in self._sizes}
        for stage, used in uses.items():
            for parameter in used:
                if parameter in self._users:
                    self._users[parameter].add(stage)
        self._done: set[int] = set()
        self._left: set[P] = set()
        self._waiting: deque[list[GradientPiece[P]]] = deque()
        self._flying: deque[B] = deque()

    def begin(self, schedule: Schedule) -> None:
        """Before a step: :meth:`finish` has left nothing of the last one."""

    def before_action(self, position: int) -> None:
        """Before an action: end the oldest reduction if others wait for its place, and send the next.

        On every data-parallel rank before the same action, whatever has arrived: collectives of one rank
        then come in one order.
        """
        del position
        if self._waiting:
            self._advance()

    def chunk_done(self, stage: int) -> None:
        """All backwards of virtual stage ``stage`` in this step are done: start what is complete now."""
        self._done.add(stage)
        self._start([p for p, users in self._users.items() if users and users <= self._done])

    def finish(self) -> None:
        """Before the update: start the rest, wait, and hand the averages over.

        Raises:
            ModelError: A parameter got a gradient after its reduction had begun.
        """
        self._start(list(self._users))
        self._transport.all_left()
        while self._waiting:
            self._advance()
        while self._flying:
            self._transport.land(self._flying.popleft())
        self._transport.complete()
        self._done.clear()
        self._left.clear()

    def _start(self, parameters: Sequence[P]) -> None:
        """Those of ``parameters`` that have not left: fill buckets, and send as many as may be under way."""
        transport = self._transport
        filling: dict[Hashable, list[GradientPiece[P]]] = {}
        room: dict[Hashable, int] = {}
        for parameter in parameters:
            if parameter in self._left:
                continue
            self._left.add(parameter)
            if transport.in_place:
                transport.leave(parameter)
                if transport.alone:
                    continue
            kind = self._kinds[parameter]
            for piece in self._cut(parameter, room.get(kind, self._bucket_elements)):
                filling.setdefault(kind, []).append(piece)
                room[kind] = room.get(kind, self._bucket_elements) - piece.length
                if transport.alone or room[kind] <= 0:
                    self._waiting.append(filling.pop(kind))
                    room[kind] = self._bucket_elements
        self._waiting.extend(filling.values())
        while self._waiting and not self._is_full:
            self._advance()

    def _cut(self, parameter: P, room: int) -> Iterator[GradientPiece[P]]:
        """All of ``parameter``; in place, as much as the bucket has room for, then buckets full of it."""
        start, numel = 0, self._sizes[parameter]
        while start < numel:
            length = min(room, numel - start) if self._transport.in_place else numel
            yield GradientPiece(parameter, start, length)
            start, room = start + length, self._bucket_elements

    @property
    def _is_full(self) -> bool:
        """Whether no more buckets may be under way."""
        return self._transport.in_place and len(self._flying) >= AT_ONCE

    def _advance(self) -> None:
        if self._is_full:
            self._transport.land(self._flying.popleft())
        self._flying.append(self._transport.send(self._waiting.popleft()))
