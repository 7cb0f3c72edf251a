"""The mean of the islands' movements: each island averages a slice of every piece and gives it to the others.

So an island sends 2 (n - 1) / n of its share of the model, as in a ring all-reduce, in two messages to each
other island, and what all of them get is the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from threading import Event, Thread
from typing import Self

import torch
from torch import Tensor

from dsx.islands.links import LinkError
from dsx.islands.station import Station
from dsx.islands.wire import decode, encode
from dsx.parallel.islands import Wire, cut

_TO_OWNER, _MEAN = "movement", "mean"


class MissedError(Exception):
    """An exchange failed for lack of an island, ``args[0]``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """The other side of an exchange, for one rank.

    Attributes:
        attempt: Name of the try.
        members: Islands that get the mean.
        moved: Those of them that have something to add; they average, each a slice.
        addresses: Where this rank's peer of each member listens.
    """

    attempt: str
    members: tuple[int, ...]
    moved: tuple[int, ...]
    addresses: dict[int, str]


@dataclass(slots=True)
class Exchanged:
    """What came of an exchange.

    Attributes:
        means: The mean movement, a tensor for each piece.
        errors: What rounding has kept back, for each piece; empty if nothing is carried on.
        sent_bytes: Sent to peers.
    """

    means: list[Tensor]
    errors: list[Tensor]
    sent_bytes: int = 0


def exchange(
    station: Station, meeting: Meeting, movements: Sequence[Tensor], errors: Sequence[Tensor], wire: Wire
) -> Exchanged:
    """The mean of the movements of those who have moved, the same bits for all members.

    Args:
        station: This rank's.
        meeting: Who takes part.
        movements: This rank's pieces, fp32 [n] each on the host. What they are is of no matter unless this
            island has moved.
        errors: What rounding kept back of each before, which is added; empty for wires that carry nothing on.
        wire: How numbers travel.

    Raises:
        MissedError: An island of the meeting broke off, or was silent for too long.
    """
    me, owners = station.islands.index, meeting.moved
    sizes = [movement.numel() for movement in movements]
    if not owners:
        return Exchanged([torch.zeros(size) for size in sizes], list(errors))
    spans = {owner: [cut(0, size, at, len(owners)) for size in sizes] for at, owner in enumerate(owners)}
    with (
        ThreadPoolExecutor(max(1, len(meeting.members)), "islands send") as senders,
        _Post(station, meeting, senders) as post,
    ):
        added = list(movements) if not errors else [m + e for m, e in zip(movements, errors, strict=True)]
        left = list(errors)
        own: list[Tensor] = []
        if me in owners:
            left = [torch.empty_like(piece) for piece in added] if errors else []
            for owner, its in spans.items():
                slices = [piece[low:high] for piece, (low, high) in zip(added, its, strict=True)]
                data = encode(slices, wire)
                post.send(owner, _TO_OWNER, data)
                if owner == me or errors:
                    rounded = decode(data, [s.numel() for s in slices], wire)
                    own = rounded if owner == me else own
                    _keep_back(left, its, slices, rounded)
            means = _averaged(post, meeting, own, spans[me], wire)
            data = encode(means, wire)
            for member in meeting.members:
                post.send(member, _MEAN, data)
            rounded = decode(data, [mean.numel() for mean in means], wire)
            # All have missed what rounding took from the mean; the next time one island adds it for all.
            for error, (low, high), mean, said in zip(left, spans[me], means, rounded, strict=False):
                error[low:high] += (mean - said) * len(owners)
            own = rounded
        result = [torch.empty(size) for size in sizes]
        for owner, its in spans.items():
            lengths = [high - low for low, high in its]
            got = own if owner == me else decode(post.take(_MEAN, owner), lengths, wire)
            for piece, (low, high), part in zip(result, its, got, strict=True):
                piece[low:high] = part
        post.finish()
    return Exchanged(result, left, post.sent_bytes)


class _Post:
    """Sends in the background, receives in order, and names the island that fails.

    While it is entered, the other members are told now and then how many bytes have come and gone here, so
    that an island which waits for one with a slow link is not taken for silent itself.
    """

    def __init__(self, station: Station, meeting: Meeting, senders: ThreadPoolExecutor) -> None:
        self._station, self._meeting, self._senders = station, meeting, senders
        self._sent: list[tuple[int, Future[int]]] = []
        self.sent_bytes = 0
        self._over = Event()

    def __enter__(self) -> Self:
        for island, address in self._meeting.addresses.items():
            if island != self._station.islands.index:
                Thread(target=self._beat, args=(address,), name="islands beat", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()

    def send(self, island: int, phase: str, data: bytearray) -> None:
        if island == self._station.islands.index:
            return
        header = {"kind": "part", "attempt": self._meeting.attempt, "phase": phase}
        task = self._senders.submit(self._station.send, self._meeting.addresses[island], header, data)
        self._sent.append((island, task))

    def take(self, phase: str, island: int) -> bytearray:
        patience = self._station.islands.patience_seconds
        try:
            return self._station.inbox.take(self._meeting.attempt, phase, island, patience, self._look)
        except LinkError as error:
            raise MissedError(island) from error

    def finish(self) -> None:
        """Wait until all is sent."""
        for island, task in self._sent:
            try:
                self.sent_bytes += task.result()
            except LinkError as error:
                raise MissedError(island) from error

    def _look(self) -> None:
        """Notice early what could not be sent: whoever did not get it will not answer."""
        for island, task in self._sent:
            if task.done() and task.exception() is not None:
                raise MissedError(island) from task.exception()

    def _beat(self, address: str) -> None:
        every = self._station.islands.patience_seconds / 8
        with suppress(LinkError):
            if not self._over.wait(every):  # most exchanges are over by then
                self._station.beat(address, self._over, every)


def _averaged(
    post: _Post, meeting: Meeting, own: list[Tensor], its: Sequence[tuple[int, int]], wire: Wire
) -> list[Tensor]:
    """This island's slices of the mean, added up in the order of the islands."""
    sums: list[Tensor] | None = None
    for island in meeting.moved:
        mine = island == post._station.islands.index  # noqa: SLF001 - of this module
        got = own if mine else decode(post.take(_TO_OWNER, island), [high - low for low, high in its], wire)
        sums = got if sums is None else [total + part for total, part in zip(sums, got, strict=True)]
    assert sums is not None, "somebody has moved"
    return [total / len(meeting.moved) for total in sums]


def _keep_back(
    left: list[Tensor], its: Sequence[tuple[int, int]], slices: Sequence[Tensor], rounded: Sequence[Tensor]
) -> None:
    for error, (low, high), exact, said in zip(left, its, slices, rounded, strict=False):
        error[low:high] = exact - said
