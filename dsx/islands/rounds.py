"""A round: the first island adds up the others' movements, segment by segment, and gives each the mean.

Rank r of an island sends its movement to rank r of the first one, and gets the mean of a segment as soon as
all have sent that, on a connection of its own. An island that fails on the way is missing in the segments
that follow, and the others go on; it takes the weights that they came to in its next round. What the ranks of
one island do for it together, on the host, is here too.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from dsx.errors import DsxError
from dsx.islands.coordinator import CoordinatorServer, IslandNode, parsed
from dsx.islands.links import Connection, Header, LinkError
from dsx.islands.standing import Ready, Round, Standing
from dsx.launch.entry import AGREED
from dsx.parallel.groups import Groups
from dsx.parallel.islands import BLOCK, SEGMENT, Wire, cut, wire_bytes

T = TypeVar("T")


class IslandRanks:
    """Groups of an island's ranks over gloo, for what lies on the host. Every rank makes one. Collective.

    They are of this alone, because a thread may use them while training uses others.

    Args:
        replicated: Whether ranks of the data group hold the same masters (ZeRO-0). Each then exchanges a part
            of them with the other islands, and they share what they got.
    """

    def __init__(self, groups: Groups, *, replicated: bool) -> None:
        mesh = groups.mesh
        self.rank, self.size = groups.rank, mesh.size
        self._all = _host_group(range(mesh.size))
        self._replica, self._replicas = groups.replica, mesh.num_replicas if replicated else 1
        self._alike = _host_group(mesh.group_of(groups.rank, *mesh.replica_axes)) if replicated else None

    @property
    def first_replica(self) -> bool:
        """Whether this rank is the first of those with the same masters."""
        return self._replicas == 1 or self._replica == 0

    def agree(self, action: Callable[[], T]) -> T:
        """What rank 0 gets from ``action``, or its DsxError, on every rank."""
        found: list[Any] = [None, None]
        if self.rank == 0:
            try:
                found[0] = action()
            except DsxError as error:
                found[1] = error
        dist.broadcast_object_list(found, src=0, group=self._all)
        if found[1] is not None:
            found[1].add_note(AGREED)
            raise found[1]
        return found[0]  # type: ignore[no-any-return]

    def everybody(self, well: bool) -> bool:
        said = torch.tensor([int(well)])
        dist.all_reduce(said, op=dist.ReduceOp.MIN, group=self._all)
        return bool(said)

    def told(self, mine: T) -> list[T]:
        said: list[Any] = [None] * self.size
        dist.all_gather_object(said, mine, group=self._all)
        return said

    def sums(self, *mine: float) -> list[float]:
        total = torch.tensor(mine, dtype=torch.float64)
        dist.all_reduce(total, group=self._all)
        return [float(value) for value in total]

    def digest(self, text: str) -> str:
        """A short name for what all ranks say, in their order."""
        said = self.told(hashlib.sha256(text.encode()).hexdigest())
        return hashlib.sha256(json.dumps(said).encode()).hexdigest()[:16]

    def mine(self, pieces: Sequence[Tensor]) -> list[Tensor]:
        """This replica's part of each piece: views."""
        return [piece[slice(*cut(0, piece.numel(), *self._place))] for piece in pieces]

    def whole(self, parts: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        """Pieces of these sizes, of which each replica has its part. Collective over replicas."""
        if self._alike is None:
            return list(parts)
        bounds = [[cut(0, size, r, self._replicas) for size in sizes] for r in range(self._replicas)]
        longest = max(sum(high - low for low, high in its) for its in bounds)
        flat = torch.zeros(longest)
        filled = torch.cat([*parts, torch.zeros(0)])
        flat[: filled.numel()] = filled
        gathered = [torch.empty(longest) for _ in bounds]
        dist.all_gather(gathered, flat, group=self._alike)
        pieces = [torch.empty(size) for size in sizes]
        for its, values in zip(bounds, gathered, strict=True):
            at = 0
            for piece, (low, high) in zip(pieces, its, strict=True):
                piece[low:high] = values[at : at + high - low]
                at += high - low
        return pieces

    @property
    def _place(self) -> tuple[int, int]:
        return (self._replica, self._replicas) if self._replicas > 1 else (0, 1)


def _host_group(ranks: Sequence[int]) -> dist.ProcessGroup:
    group: dist.ProcessGroup | None = dist.new_group(
        list(ranks), backend="gloo", use_local_synchronization=True
    )
    assert group is not None, "this rank is one of them"
    return group


_AHEAD = 2
"""Segments that an island may be ahead of the slowest."""
_TICK_SECONDS = 0.25
_LARGEST_INT8 = 127

Segment = list[tuple[int, int, int]]
"""Parts of pieces: which piece, and from which element to which."""

State = tuple[Standing, Tensor]
"""The state of an island: what it is, and this rank's part of weights and momentum, flat."""


@dataclass(slots=True, kw_only=True)
class PendingRound:
    """A round under way.

    Attributes:
        step: The inner step after which it began.
        share: The share of the model that this island thinks it is about.
        sent: This rank's weights then, fp32 on the host, by piece.
        movement: What they have moved since the last round.
        stood_seconds: How long training stood still until its thread went on by itself.
        outcome: What came of it; None if this island was left out.
    """

    step: int
    share: int
    sent: list[Tensor]
    movement: list[Tensor]
    ready: Ready
    began: float
    stood_seconds: float = 0.0
    thread: threading.Thread = field(init=False)
    outcome: RoundOutcome | None = None
    error: Exception | None = None


@dataclass(slots=True, kw_only=True)
class RoundOutcome:
    """A round that counts.

    Attributes:
        means: The mean movement of this rank's part, a tensor for each piece.
        errors: What rounding has kept back, for each piece; empty if nothing is carried on.
        members: Islands that took part.
        moved: Those of them that had a movement.
        sent_bytes: Sent to other islands.
        standing: Of the weights that the round leads to.
        adopted: The state that this island had to take first; None if it had it.
    """

    means: list[Tensor]
    errors: list[Tensor]
    members: list[int] = field(default_factory=list)
    moved: list[int] = field(default_factory=list)
    sent_bytes: int = 0
    standing: Standing = field(default_factory=Standing)
    adopted: State | None = None


Share = tuple[list[Tensor], list[Tensor]]
"""What a rank brings to a round: the pieces of its movement (of an island that has none, what has the same
sizes), and what rounding kept back of each before; nothing for wires that carry nothing on."""


class RoundProtocol:
    """Takes an island through its rounds. Every rank makes one, and calls it alike.

    Args:
        layout: Equal for islands whose ranks hold the same parts.
        gives_up: Whether this island is to end, and waits for the others no more.
        standing: Gives what the common weights are.
        state: Gives this rank's part of these weights and their momentum, a copy; None before there are any.
        elements: Gives how many numbers that is.

    Attributes:
        news: Sentences for people.
    """

    def __init__(
        self,
        node: IslandNode,
        ranks: IslandRanks,
        *,
        layout: str,
        shares: int,
        wire: Wire,
        last_step: int,
        gives_up: Callable[[], bool],
        standing: Callable[[], Standing],
        state: Callable[[], State | None],
        elements: Callable[[], int],
    ) -> None:
        self.node, self.wire, self.standing, self.state = node, wire, standing, state
        self._elements = elements
        self._ranks, self._shares, self._last_step, self._gives_up = ranks, shares, last_step, gives_up
        self.news: list[str] = []
        addresses = ranks.told(node.address)
        if node.server is not None:
            node.server.start(layout, addresses, self)
        if node.client is not None:
            node.client.start(layout, gives_up, self.news)

    def newest(self) -> tuple[Standing, list[str]] | None:
        """What the first island holds, and where its ranks listen; None if it is not there. Collective.

        Raises:
            RunError: It has another layout, or knows another launch that is this island.
        """
        client = self.node.client
        return self._ranks.agree(lambda: None if client is None else client.newest())

    def fetched(self, addresses: Sequence[str]) -> State | None:
        """The first island's state, if every rank got its part, of one and the same. Collective."""
        found: State | None = None
        try:
            with closing(self.opened(addresses, {"kind": "state"})) as link:
                found = self.adoptable(link)
        except LinkError as error:
            self.news.append(f"the weights of island 0 cannot be taken: {error}")
        names = self._ranks.told(None if found is None else found[0].name)
        return found if len(set(names)) == 1 else None

    def go_through(self, pending: PendingRound, share_of: Callable[[int], Share]) -> RoundOutcome | None:
        """The round; None if it was without this island. Collective.

        ``share_of`` gives what this rank brings to a round about a share.

        Raises:
            RunError: The first island has another layout, or knows another launch that is this island.
        """
        if self.node.server is not None:
            return self._lead(self.node.server, pending.ready, share_of)
        return self._come(pending.ready, share_of)

    def wrong(self, ready: Ready) -> str:
        """Why no island of this run can hold what one says, in words; empty if one can."""
        now = Standing(facts=ready.facts)
        limits = {"last_step": self._last_step, "shares": self._shares}
        return ready.standing.impossible(**limits) or now.impossible(**limits)

    def opened(self, addresses: Sequence[str], header: Header) -> Connection:
        """A connection with this rank's peer in the first island, and a first word. Raises LinkError."""
        if len(addresses) != self._ranks.size:
            raise LinkError(f"the first island has {len(addresses)} ranks, and this one {self._ranks.size}")
        link = self.node.connection(addresses[self._ranks.rank])
        link.send({**header, "island": self.node.islands.index})
        return link

    def following(self, link: Connection) -> tuple[Header, int]:
        """The next message, however often it is said that it is yet to come. Raises LinkError."""
        while True:
            header, size = link.receive()
            self.node.moved(1)
            if header.get("kind") != "wait":
                return header, size
            link.payload(size, 0)

    def adoptable(self, link: Connection, heard: Callable[[int], None] | None = None) -> State:
        """A state that is to come next, of whose bytes ``heard`` is told. Raises LinkError."""
        header, size = self.following(link)
        standing = parsed(Standing, header.get("standing"))
        if wrong := standing.impossible(last_step=self._last_step, shares=self._shares):
            raise LinkError(f"it says that it is at {wrong}")
        whole = [(0, 0, self._elements())]
        (flat,) = decode(
            link.payload(size, bytes_due(whole, "fp32"), heard or self.node.moved), whole, "fp32"
        )
        if not flat.isfinite().all():
            raise LinkError("its weights are not finite")
        return standing, flat

    def give_state(self, link: Connection, state: State | None) -> int:
        """Send this rank's part of a state; the bytes. Raises LinkError."""
        if state is None:
            raise LinkError("there is no state yet")
        standing, flat = state
        return link.send(
            {"kind": "state", "standing": standing.plain()}, encode([flat], "fp32"), self.node.moved
        )

    def _lead(
        self, server: CoordinatorServer, ready: Ready, share_of: Callable[[int], Share]
    ) -> RoundOutcome | None:
        meeting: Round | None = self._ranks.agree(partial(server.gathered, ready, self._gives_up))
        self.node.moved(1)
        if meeting is None:
            return None
        here = LedRound(self, meeting, share_of(meeting.standing.version % self._shares))
        server.begin(meeting.name, here)
        outcome = None
        try:
            if self._ranks.everybody(here.adopts()):
                outcome = here.averaged()
                outcome = outcome if self._ranks.everybody(outcome is not None) else None
            lost: dict[int, str] = {}
            for its in self._ranks.told(here.failed):
                lost |= its
            for island, why in sorted(lost.items()):
                self.news.append(f"island {island} is left out of a round: {why}")
            if outcome is not None:
                outcome.members = [island for island in meeting.members if island not in lost]
                outcome.moved = [island for island in meeting.moved if island not in lost]
                outcome.standing = meeting.after(outcome.moved)
                here.end({"kind": "end", "members": outcome.members, "moved": outcome.moved})
            return outcome
        finally:
            here.end({"kind": "out"})

    def _come(self, ready: Ready, share_of: Callable[[int], Share]) -> RoundOutcome | None:
        client = self.node.client
        told = self._ranks.agree(lambda: None if client is None else client.ask(ready))
        self.node.moved(1)
        if told is None:
            return None
        meeting, addresses = told
        found: RoundOutcome | None = None
        try:
            self._require_possible(meeting, ready)
            here = ComingRound(self, meeting, share_of(meeting.standing.version % self._shares))
            found = here.gone_through(addresses)
        except LinkError as error:
            self.news.append(f"this island is left out of a round: {error}")
        return found if self._ranks.everybody(found is not None) else None

    def _require_possible(self, meeting: Round, ready: Ready) -> None:
        me, other = self.node.islands.index, meeting.standing.name != ready.standing.name
        if me not in meeting.members or other != (me in meeting.behind) or self.wrong(meeting.ready):
            raise LinkError("it is about weights that there cannot be")


class LedRound:
    """A round at a rank of the first island, of which the threads that serve the others take part.

    Attributes:
        failed: Why islands are left out.
    """

    def __init__(self, protocol: RoundProtocol, meeting: Round, mine: Share) -> None:
        self._protocol, self._node, self._wire = protocol, protocol.node, protocol.wire
        self._meeting, (self._pieces, self._kept) = meeting, mine
        self._patience = self._node.islands.patience_seconds
        self._segments = segments([piece.numel() for piece in self._pieces])
        self._came: dict[int, dict[int, list[Tensor]]] = {island: {} for island in meeting.moved if island}
        self._heard = dict.fromkeys(meeting.members, time.monotonic())
        self._changed = threading.Condition()
        # What those that are behind take, as it is before the round moves it.
        self._state = protocol.state() if meeting.behind and not meeting.source else None
        self._means: list[bytearray] = []
        self._owed = {*meeting.members[1:]}
        self._end: Header | None = None
        self.failed: dict[int, str] = {}

    def take(self, link: Connection, island: int) -> None:
        """Take an island's state, if that is due, and its movement. Raises LinkError."""

        def heard(count: int) -> None:
            self._node.moved(count)
            self._heard[island] = time.monotonic()

        if island == self._meeting.source:
            state = self._protocol.adoptable(link, heard)
            _require_told(self._meeting, state)
            with self._changed:
                self._state = state
                self._changed.notify_all()
        for number, segment in enumerate(self._segments if island in self._came else ()):
            _, size = link.receive()
            values = decode(link.payload(size, bytes_due(segment, self._wire), heard), segment, self._wire)
            if not _finite(values):
                raise LinkError("its movement is not finite")
            with self._changed:
                while number - len(self._means) >= _AHEAD and self._end is None:
                    self._changed.wait()
                heard(0)
                self._came[island][number] = values
                self._changed.notify_all()

    def give(self, link: Connection, island: int) -> None:
        """Give an island the weights, if it is behind, and the mean. Raises LinkError."""
        number = -1 if island in self._meeting.behind else 0

        def is_due() -> bool:
            return self._state is not None if number < 0 else number < len(self._means)

        traffic, since = self._node.traffic, time.monotonic()
        while True:
            with self._changed:
                if not is_due() and self._end is None:
                    self._changed.wait(self._patience / 8)
                due, end = is_due(), self._end
            if due:
                if number < 0:
                    self._protocol.give_state(link, self._state)
                else:
                    link.send({"kind": "mean"}, self._means[number], self._node.moved)
                number += 1
            elif end is not None:
                link.send(end)
                with self._changed:
                    self._owed.discard(island)
                    if not self._owed:
                        self._means, self._state = [], None
                return
            elif self._node.traffic == traffic and time.monotonic() - since > 2 * self._patience:
                raise LinkError("nothing moves at the first island")
            else:
                if self._node.traffic != traffic:
                    traffic, since = self._node.traffic, time.monotonic()
                link.send({"kind": "wait"})

    def fails(self, island: int, why: str) -> None:
        with self._changed:
            if self._end is None and island in self._heard:
                self.failed.setdefault(island, why)
            self._changed.notify_all()

    def end(self, said: Header) -> None:
        """Say how it has ended, once."""
        with self._changed:
            self._end = said if self._end is None else self._end
            self._changed.notify_all()

    def adopts(self) -> bool:
        """Whether this rank has the newest weights, once they have come, if another island has them."""
        source = self._meeting.source
        if not source:
            return True
        with self._changed:
            while self._state is None and source not in self.failed:
                self._look_for([source])
            return self._state is not None

    def averaged(self) -> RoundOutcome | None:
        """The mean of the movements that come; None if that is not finite."""
        pieces, errors = self._pieces, self._kept
        moved = 0 in self._meeting.moved
        means = [torch.empty_like(piece) for piece in pieces]
        left = [torch.zeros_like(error) if moved else error.clone() for error in errors]
        for number, segment in enumerate(self._segments):
            mean, count = self._summed(number, moved=moved)
            for total in mean:
                total.div_(max(1, count))
            data = encode(mean, self._wire)
            said = decode(data, segment, self._wire)
            if not _finite(said):
                return None
            for place, value in zip(taken(means, segment), said, strict=True):
                place.copy_(value)
            # All miss what rounding takes from the mean: the next time this island adds it for all.
            for kept, exact, value in zip(taken(left, segment) if errors else (), mean, said, strict=False):
                kept.add_(exact - value, alpha=count)
            self._node.moved(1)
            with self._changed:
                self._means.append(data)
                self._changed.notify_all()
        sent_bytes = len(self._owed) * sum(map(len, self._means))
        adopted = self._state if self._meeting.source else None
        self._pieces, self._kept = [], []
        return RoundOutcome(means=means, errors=left, sent_bytes=sent_bytes, adopted=adopted)

    def _summed(self, number: int, *, moved: bool) -> tuple[list[Tensor], int]:
        """The sum of a segment's movements, in the order of islands, and how many they are."""
        segment, came = self._segments[number], self._came
        with self._changed:
            while missing := [i for i, its in came.items() if number not in its and i not in self.failed]:
                self._look_for(missing)
            parts = [its.pop(number) for island, its in came.items() if island not in self.failed]
        if moved:
            parts.insert(0, _added(self._pieces, self._kept, segment))
        total = [torch.zeros(high - low) for _, low, high in segment]
        for part in parts:
            for place, value in zip(total, part, strict=True):
                place.add_(value)
        return total, len(parts)

    def _look_for(self, islands: Sequence[int]) -> None:
        """Wait a little, and leave out islands of which nothing has come for too long."""
        self._changed.wait(_TICK_SECONDS)
        for island in islands:
            if time.monotonic() - self._heard[island] > self._patience:
                self.failed.setdefault(island, f"nothing came for {self._patience:g} s")


class ComingRound:
    """A round at a rank of another island."""

    def __init__(self, protocol: RoundProtocol, meeting: Round, mine: Share) -> None:
        self._protocol, self._meeting, (self._pieces, self._kept) = protocol, meeting, mine
        self._me, self._wire = protocol.node.islands.index, protocol.wire
        self._segments = segments([piece.numel() for piece in self._pieces])
        self._errors = self._kept
        self._sent_bytes = 0
        self._up: Connection | None = None

    def gone_through(self, addresses: Sequence[str]) -> RoundOutcome:
        """Send this rank's part, and take the mean. Raises LinkError."""
        protocol, meeting, me = self._protocol, self._meeting, self._me
        with closing(protocol.opened(addresses, {"kind": "down", "round": meeting.name})) as down:
            sender = threading.Thread(
                target=self._send, args=(addresses, down), name="islands send", daemon=True
            )
            sender.start()
            try:
                adopted = protocol.adoptable(down) if me in meeting.behind else None
                if adopted is not None:
                    _require_told(meeting, adopted)
                means = self._means(down)
                header, size = protocol.following(down)
                down.payload(size, 0)
            finally:
                while sender.is_alive():
                    if self._up is not None:  # what has not been taken by now is not waited for
                        self._up.shut()
                    sender.join(_TICK_SECONDS)
                if self._up is not None:
                    self._up.close()
        moved = parsed(list[int], header.get("moved", []))
        if header.get("kind") != "end" or (me in meeting.moved and me not in moved):
            raise LinkError("the first island has gone on without it")
        return RoundOutcome(
            means=means,
            errors=self._errors,
            members=parsed(list[int], header.get("members")),
            moved=moved,
            sent_bytes=self._sent_bytes,
            standing=meeting.after([island for island in meeting.moved if island in moved]),
            adopted=adopted,
        )

    def _means(self, down: Connection) -> list[Tensor]:
        means = [torch.empty_like(piece) for piece in self._pieces]
        for segment in self._segments:
            header, size = self._protocol.following(down)
            if header.get("kind") != "mean":
                raise LinkError("the first island has ended the round")
            data = down.payload(size, bytes_due(segment, self._wire), self._protocol.node.moved)
            values = decode(data, segment, self._wire)
            if not _finite(values):
                raise LinkError("the mean that came is not finite")
            for place, value in zip(taken(means, segment), values, strict=True):
                place.copy_(value)
        return means

    def _send(self, addresses: Sequence[str], down: Connection) -> None:
        """Send what is due, which takes as long as the slowest island does."""
        node, source = self._protocol.node, self._me == self._meeting.source
        if self._me not in self._meeting.moved and not source:
            return
        try:
            # It is closed when the first island has said that it has all of it.
            up = self._up = self._protocol.opened(addresses, {"kind": "up", "round": self._meeting.name})
            up.patience_seconds = None  # the slowest island is waited for, as the other connection says
            if source:
                self._sent_bytes += self._protocol.give_state(up, self._protocol.state())
            if self._me not in self._meeting.moved:
                return
            self._errors = [torch.empty_like(error) for error in self._kept]
            for segment in self._segments:
                exact = _added(self._pieces, self._kept, segment)
                data = encode(exact, self._wire)
                self._sent_bytes += up.send({"kind": "part"}, data, node.moved)
                said = decode(data, segment, self._wire) if self._errors else []
                for kept, value, rounded in zip(
                    taken(self._errors, segment) if said else (), exact, said, strict=False
                ):
                    torch.sub(value, rounded, out=kept)
        except LinkError:
            down.shut()


def _require_told(meeting: Round, state: State) -> None:
    """Raises LinkError unless the state is what was said of it."""
    if state[0] != meeting.standing:
        raise LinkError("its weights are others than it has said")


def _added(pieces: list[Tensor], kept: list[Tensor], segment: Segment) -> list[Tensor]:
    """A segment of a movement, with what rounding kept back before."""
    exact = taken(pieces, segment)
    return [m + e for m, e in zip(exact, taken(kept, segment), strict=True)] if kept else exact


def _finite(values: Sequence[Tensor]) -> bool:
    return all(bool(value.isfinite().all()) for value in values)


def segments(sizes: Sequence[int]) -> list[Segment]:
    """Pieces of these sizes in segments, which are sent one by one and begin at blocks.

    >>> segments([3, 2 * SEGMENT, 1]) == [
    ...     [(0, 0, 3), (1, 0, SEGMENT)], [(1, SEGMENT, 2 * SEGMENT)], [(2, 0, 1)]]
    True
    """
    found: list[Segment] = []
    room = 0
    for piece, size in enumerate(sizes):
        for low in range(0, size, SEGMENT):
            if room <= 0:
                found.append([])
                room = SEGMENT
            found[-1].append((piece, low, min(low + SEGMENT, size)))
            room -= min(SEGMENT, size - low)
    return found


def bytes_due(segment: Segment, wire: Wire) -> int:
    """How many bytes a segment is."""
    return sum(wire_bytes(high - low, wire) for _, low, high in segment)


def taken(pieces: Sequence[Tensor], segment: Segment) -> list[Tensor]:
    """The parts of a segment: views."""
    return [pieces[piece][low:high] for piece, low, high in segment]


def encode(pieces: Sequence[Tensor], wire: Wire) -> bytearray:
    """The bytes of ``pieces``, fp32 on the host, one after the other.

    Scales of int8, one for every :data:`~dsx.parallel.islands.BLOCK`, begin anew with every piece, so that a
    parameter that several ranks hold is rounded alike by each of them, whatever else they hold.
    """
    parts = (part.contiguous() for piece in pieces for part in _parts(piece, wire))
    return bytearray(b"".join(part.view(torch.uint8).numpy().tobytes() for part in parts))


def decode(data: bytearray, segment: Segment, wire: Wire) -> list[Tensor]:
    """The parts of a segment, fp32, that :func:`encode` made ``data`` of."""
    pieces, at, view = [], 0, memoryview(data)
    for size in (high - low for _, low, high in segment):
        end = at + wire_bytes(size, wire)
        pieces.append(_decoded(view[at:end], size, wire))
        at = end
    return pieces


def _parts(piece: Tensor, wire: Wire) -> tuple[Tensor, ...]:
    if not piece.numel():
        return ()
    if wire == "fp32":
        return (piece,)
    if wire == "bf16":
        return (piece.bfloat16(),)
    blocks = _blocks(piece)
    # A block of zeros has no scale to divide by; one that is not finite stays so, and is heard of.
    scale_B = blocks.abs().amax(dim=1) / _LARGEST_INT8
    rounded = (
        (blocks / torch.where(scale_B > 0, scale_B, 1.0)[:, None])
        .round_()
        .clamp_(-_LARGEST_INT8, _LARGEST_INT8)
    )
    return scale_B, rounded.nan_to_num_(0.0).to(torch.int8).view(-1)[: piece.numel()]


def _decoded(data: memoryview, size: int, wire: Wire) -> Tensor:
    if not size:
        return torch.zeros(0)
    if wire == "fp32":
        return torch.frombuffer(data, dtype=torch.float32).clone()
    if wire == "bf16":
        return torch.frombuffer(data, dtype=torch.bfloat16).float()
    count = -(-size // BLOCK)
    scale_B = torch.frombuffer(data[: 4 * count], dtype=torch.float32)
    blocks = _blocks(torch.frombuffer(data[4 * count :], dtype=torch.int8).float())
    return (blocks * scale_B[:, None]).view(-1)[:size].clone()


def _blocks(flat: Tensor) -> Tensor:
    """Rows of :data:`BLOCK` elements, the last one filled up with zeros; one short row if that is all."""
    size = flat.numel()
    if size <= BLOCK:
        return flat.view(1, -1)
    return torch.nn.functional.pad(flat, (0, -size % BLOCK)).view(-1, BLOCK)
