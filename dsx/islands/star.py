"""Rounds of islands: the first one says who takes part, adds up their movements and gives each the mean.

Rank r of an island sends its movement to rank r of the first one, in segments, and gets the mean of each as
soon as all have sent that, on one link for the round. An island that fails on the way is missing in the
segments that follow, and the others go on; it takes the weights that they came to in its next round.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from pydantic import TypeAdapter
from torch import Tensor

from dsx.errors import RunError
from dsx.islands.links import Header, LinkError, PeerLink
from dsx.islands.membership import Membership
from dsx.islands.node import CONNECT_SECONDS, IslandNode
from dsx.islands.ranks import IslandRanks
from dsx.islands.standing import Ready, Round, Standing
from dsx.islands.wire import Segment, bytes_due, decode, encode, segments, taken
from dsx.parallel.islands import Wire

T = TypeVar("T")

_TICK_SECONDS = 0.25

State = tuple[Standing, Tensor]
"""The state of an island: what it is, and this rank's part of weights and momentum, flat."""

Share = tuple[list[Tensor], list[Tensor]]
"""What a rank brings to a round: the pieces of its movement (of an island that has none, what has the same
sizes), and what rounding kept back of each before; nothing for wires that carry nothing on."""


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


class Star:
    """Takes an island through its rounds. Every rank makes one, and calls it alike.

    Args:
        node: This rank's end.
        ranks: The island's ranks.
        layout: Equal for islands whose ranks hold the same parts.
        shares: Number of shares of the model.
        wire: How numbers travel.
        last_step: Number of the last inner step.
        gives_up: Whether this island is to end, and waits for the others no more.
        standing: Gives what the common weights are.
        state: Gives this rank's part of these weights and their momentum, a copy; None before there are any.
        elements: Gives how many numbers that is.

    Attributes:
        called: Whether others wait for this island's next round; known on rank 0.
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
        self.node, self.called, self.news = node, False, list[str]()
        self._ranks, self._layout, self._shares, self._wire = ranks, layout, shares, wire
        self._last_step, self._gives_up = last_step, gives_up
        self._standing, self._state, self._elements = standing, state, elements
        self._patience, self._me = node.islands.patience_seconds, node.islands.index
        self._beat_seconds = min(self._patience / 8, CONNECT_SECONDS)
        self._addresses = ranks.told(node.address)

    def _wrong(self, ready: Ready) -> str:
        """Why no island of this run can hold what one says, in words; empty if one can."""
        limits = {"last_step": self._last_step, "shares": self._shares}
        return ready.standing.impossible(**limits) or Standing(facts=ready.facts).impossible(**limits)

    async def _beat(self, link: PeerLink, said: Callable[[], Header]) -> None:
        """Say now and then that this island is there."""
        with suppress(LinkError):
            while True:
                await asyncio.sleep(self._beat_seconds)
                await link.send(said())
        link.shut()

    async def _adoptable(self, link: PeerLink) -> State:
        """A state that is to come next. Raises LinkError."""
        whole = [(0, 0, self._elements())]
        header, data = await link.receive(bytes_due(whole, "fp32"))
        standing = parsed(Standing, header.get("standing"))
        if wrong := standing.impossible(last_step=self._last_step, shares=self._shares):
            raise LinkError(f"it says that it is at {wrong}")
        (flat,) = decode(data, whole, "fp32")
        if not flat.isfinite().all():
            raise LinkError("its weights are not finite")
        return standing, flat

    async def _give(self, link: PeerLink, state: State | None) -> int:
        """Send this rank's part of a state; the bytes. Raises LinkError."""
        if state is None:
            raise LinkError("there is no state yet")
        standing, flat = state
        return await link.send({"kind": "state", "standing": standing.plain()}, encode([flat], "fp32"))


class _Meeting:
    """A round at a rank of the first island, in the links' loop.

    Attributes:
        round: What was decided.
        links: By island, once it has come.
        failed: Why islands are left out.
        over: Set at its end.
        end: What is said then.
    """

    def __init__(self, found: Round, patience_seconds: float) -> None:
        self.round, self.failed, self._patience = found, dict[int, str](), patience_seconds
        self.links = {island: asyncio.get_running_loop().create_future() for island in found.members[1:]}
        self.over, self.end = asyncio.Event(), Header()

    async def each(self, islands: Iterable[int], work: Callable[[PeerLink], Awaitable[T]]) -> dict[int, T]:
        """What comes of work with the links of islands, at once; those where it fails are left out."""

        async def one(island: int) -> T | None:
            try:
                link = await asyncio.wait_for(asyncio.shield(self.links[island]), self._patience)
                return await work(link)
            except TimeoutError:
                self.fail(island, f"nothing came for {self._patience:g} s")
            except LinkError as error:
                self.fail(island, str(error))
            return None

        left = [island for island in islands if island not in self.failed]
        found = dict(zip(left, await asyncio.gather(*map(one, left)), strict=True))
        return {island: result for island, result in found.items() if island not in self.failed}  # type: ignore[misc]

    def fail(self, island: int, why: str) -> None:
        """Leave an island out."""
        self.failed.setdefault(island, why)
        link = self.links[island]
        if link.done():
            link.result().shut()


class First(Star):
    """The first island, which the others come to."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._membership = Membership(self.node.islands.count, self._patience)
        self._lives: dict[int, tuple[str, PeerLink]] = {}
        self._meeting: _Meeting | None = None
        self.node.serve(self._serve)

    def go_through(self, ready: Ready, share_of: Callable[[int], Share]) -> RoundOutcome | None:
        """A round; None if this island is to end. Collective.

        Args:
            ready: What this island says of itself.
            share_of: Gives what this rank brings to a round about a share.
        """
        found: Round | None = self._ranks.agree(lambda: self.node.call(self._gathered(ready)))
        self.node.moved(1)
        if found is None:
            return None
        mine = share_of(found.standing.version % self._shares)
        # What those that are behind take, as it is before the round moves it.
        state = self._state() if found.behind and not found.source else None
        meeting = self.node.call(self._begun(found))
        outcome = None
        try:
            state, well = self.node.call(self._caught_up(meeting, state))
            if self._ranks.everybody(well):
                outcome = self._averaged(meeting, *mine)
                outcome = outcome if self._ranks.everybody(outcome is not None) else None
            lost: dict[int, str] = {}
            for its in self._ranks.told(dict(meeting.failed)):
                lost |= its
            for island, why in sorted(lost.items()):
                self.news.append(f"island {island} is left out of a round: {why}")
            if outcome is not None:
                outcome.members = [island for island in found.members if island not in lost]
                outcome.moved = [island for island in found.moved if island not in lost]
                outcome.standing = found.after(outcome.moved)
                outcome.adopted = state if found.source else None
                meeting.end = {"kind": "end", "members": outcome.members, "moved": outcome.moved}
            return outcome
        finally:
            self.node.soon(meeting.over.set)

    async def _serve(self, link: PeerLink, header: Header) -> None:
        """Answer a link to its end. Raises LinkError."""
        island, kind = header.get("island"), header.get("kind")
        others = range(1, self.node.islands.count)
        if not isinstance(island, int) or island not in others or link.island not in (None, island):
            raise LinkError(f"island {link.island} says that it is island {island!r}")
        if kind == "hello":
            await self._converse(link, island, header)
        elif kind == "state":
            await self._give(link, await asyncio.to_thread(self._state))
            await link.ended()
        elif kind == "round":
            await self._meet(link, island, header.get("round"))
        else:
            raise LinkError("what came is no message of dsx's")

    async def _converse(self, link: PeerLink, island: int, hello: Header) -> None:
        life, known = str(hello.get("life")), self._lives.get(island)
        twin = known is not None and known[0] != life
        if why := "twin" if twin else "layout" if hello.get("layout") != self._layout else "":
            await link.send({"kind": "refused", "why": why})
            return
        self._lives[island] = life, link
        self._membership.comes(island)
        beats = asyncio.ensure_future(self._beat(link, lambda: self._here(island)))
        try:
            standing = self._standing().plain()
            await link.send({"kind": "welcome", "addresses": self._addresses, "standing": standing})
            while True:
                said, _ = await link.receive()
                if said.get("kind") != "ready":
                    continue
                ready = parsed(Ready, said)
                if wrong := self._wrong(ready):
                    self.news.append(f"island {island} says that it is at {wrong}: it is left out")
                    await link.send({"kind": "out"})
                else:
                    self._membership.ready(island, ready, time.monotonic())
        finally:
            beats.cancel()
            if self._lives.get(island) == (life, link):
                del self._lives[island]
                self._membership.goes(island)

    def _here(self, island: int) -> Header:
        now, rules = time.monotonic(), self._membership
        self.called = rules.called(0, now)
        return {"kind": "here", "call": rules.called(island, now), "gathering": rules.gathering}

    async def _gathered(self, mine: Ready) -> Round | None:
        """Wait for the other islands: the round; None if this island is to end."""
        self._membership.ready(0, mine, time.monotonic())
        while (found := self._membership.begun(time.monotonic())) is None:
            if self._gives_up():
                self._membership.goes(0)
                return None
            await asyncio.sleep(_TICK_SECONDS / 25)
        self.called = False
        for island in found.members[1:]:
            with suppress(LinkError):
                await self._lives[island][1].send({"kind": "round", **asdict(found)})
        return found

    async def _begun(self, found: Round) -> _Meeting:
        self._meeting = _Meeting(found, self._patience)
        return self._meeting

    async def _meet(self, link: PeerLink, island: int, name: Any) -> None:
        """Have a link in the round of this name, once this rank has come to it, until that is over."""
        deadline = time.monotonic() + self._patience
        while self._meeting is None or self._meeting.round.name != name:
            if time.monotonic() > deadline:
                raise LinkError(f"there is no round {name!r}")
            await asyncio.sleep(_TICK_SECONDS / 25)
        meeting = self._meeting
        if island not in meeting.links or meeting.links[island].done():
            raise LinkError(f"it is in round {name!r} already, or not of it")
        meeting.links[island].set_result(link)
        traffic, since = self.node.traffic, time.monotonic()
        while not meeting.over.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(meeting.over.wait(), self._beat_seconds)
                continue
            if self.node.traffic != traffic:
                traffic, since = self.node.traffic, time.monotonic()
            elif time.monotonic() - since > 2 * self._patience:
                raise LinkError("nothing moves at the first island")
            await link.send({"kind": "wait"})
        if meeting.end and island not in meeting.failed:
            await link.send(meeting.end)
            await link.ended()

    async def _caught_up(self, meeting: _Meeting, state: State | None) -> tuple[State | None, bool]:
        """Have those that are behind given the newest weights, once these are there; and whether they are."""
        found = meeting.round
        if found.source:

            async def given(link: PeerLink) -> State:
                came = await self._adoptable(link)
                _require_told(found, came)
                return came

            state = (await meeting.each([found.source], given)).get(found.source)
            if state is None:
                return None, False
        behind = [island for island in found.behind if island]
        await meeting.each(behind, lambda link: self._give(link, state))
        return state, True

    async def _turn(
        self, meeting: _Meeting, due: Sequence[int], mean: bytearray | None
    ) -> tuple[dict[int, tuple[Header, bytearray]], int]:
        """Send a mean while the next segment of every movement comes: that, and to how many it has gone."""
        tells = partial(PeerLink.send, header={"kind": "mean"}, payload=mean or b"")
        sending = asyncio.ensure_future(meeting.each(() if mean is None else meeting.links, tells))
        came: dict[int, tuple[Header, bytearray]] = {}
        for size in due:
            movers = (island for island in meeting.round.moved if island)
            came = await meeting.each(movers, partial(PeerLink.receive, due=size))
        return came, len(await sending)

    def _averaged(self, meeting: _Meeting, pieces: list[Tensor], kept: list[Tensor]) -> RoundOutcome | None:
        """The mean of the movements that come; None if that is not finite."""
        call, wire, found = self.node.call, self._wire, meeting.round
        moved, means = 0 in found.moved, [torch.empty_like(piece) for piece in pieces]
        left = [torch.zeros_like(error) if moved else error.clone() for error in kept]
        sent_bytes, cuts = 0, segments([piece.numel() for piece in pieces])
        dues = [bytes_due(segment, wire) for segment in cuts]
        came, _ = call(self._turn(meeting, dues[:1], None))
        for number, segment in enumerate(cuts):
            parts = [_added(pieces, kept, segment)] if moved else []
            for island, (_, data) in came.items():
                parts.append(decode(data, segment, wire))
                if not _finite(parts[-1]):
                    parts.pop()
                    self.node.soon(partial(meeting.fail, island, "its movement is not finite"))
            mean = [torch.zeros(high - low) for _, low, high in segment]
            for part in parts:
                for total, value in zip(mean, part, strict=True):
                    total.add_(value)
            for total in mean:
                total.div_(max(1, len(parts)))
            data = encode(mean, wire)
            said = decode(data, segment, wire)
            if not _finite(said):
                return None
            for place, value in zip(taken(means, segment), said, strict=True):
                place.copy_(value)
            # All miss what rounding takes from the mean: the next time this island adds it for all.
            for error, exact, value in zip(taken(left, segment) if kept else (), mean, said, strict=False):
                error.add_(exact - value, alpha=len(parts))
            came, sent = call(self._turn(meeting, dues[number + 1 : number + 2], data))
            sent_bytes += sent * len(data)
            self.node.moved(1)
        return RoundOutcome(means=means, errors=left, sent_bytes=sent_bytes)


class Other(Star):
    """Another island, which comes to the first one."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._life, self._refused, self._trouble = secrets.token_hex(8), "", ""
        self._tried, self._met = threading.Event(), False
        self._link: PeerLink | None = None
        self._first: tuple[Standing, list[str]] = Standing(), []
        self._answer: asyncio.Future[Round | None] | None = None
        self._waits_since = 0.0
        if self._ranks.rank == 0:
            self.node.start(self._keep())

    def newest(self) -> Standing | None:
        """What the first island holds; None if it is not there. Collective. Raises RunError."""

        def told() -> tuple[Standing, list[str]] | None:
            self._tried.wait()
            self._check()
            return None if self._link is None else self._first

        found = self._ranks.agree(told)
        if found is None:
            return None
        self._first = found
        return found[0]

    def fetched(self) -> State | None:
        """The first island's state, if every rank got its part, of one and the same. Collective."""
        found: State | None = None
        try:
            found = self.node.call(self._fetched())
        except LinkError as error:
            self.news.append(f"the weights of island 0 cannot be taken: {error}")
        names = self._ranks.told(None if found is None else found[0].name)
        return found if len(set(names)) == 1 else None

    def go_through(self, ready: Ready, share_of: Callable[[int], Share]) -> RoundOutcome | None:
        """As the first island does; None as well if the round was without this one.

        Raises:
            RunError: The first island has another layout, or knows another launch that is this island.
        """
        told = self._ranks.agree(lambda: self.node.call(self._asked(ready)))
        self.node.moved(1)
        if told is None:
            return None
        found, self._first = told
        outcome: RoundOutcome | None = None
        try:
            self._require_possible(found, ready)
            outcome = self.node.call(self._come(found, share_of(found.standing.version % self._shares)))
        except LinkError as error:
            self.news.append(f"this island is left out of a round: {error}")
        return outcome if self._ranks.everybody(outcome is not None) else None

    def _require_possible(self, found: Round, ready: Ready) -> None:
        behind, me = found.standing.name != ready.standing.name, self._me
        if me not in found.members or behind != (me in found.behind) or self._wrong(found.ready):
            raise LinkError("it is about weights that there cannot be")

    def _check(self) -> None:
        where = f"dsx.outer.island = {self._me}"
        if self._refused == "twin":
            what = "another launch is this island and is there"
            raise RunError(where, what, "give each launch a number of its own")
        if self._refused:
            raise RunError(
                where,
                "its model, frozen weights, layout, batch, dsx.data.seed or dsx.outer is not island 0's",
                "start all islands from the same config, on as many ranks, with the same version of dsx",
            )

    async def _keep(self) -> None:
        """Be linked with the first island, and link again, until this one ends."""
        deadline = time.monotonic() + self._patience
        while True:
            refused = ""
            try:
                refused = await self._converse(await self.node.linked(self.node.meet))
            except LinkError as error:
                self._trouble = str(error)
            self._link = None
            if self._answer is not None and not self._answer.done():
                self._answer.set_result(None)
            # Of a machine that has gone the first island may think for that long that it is there.
            if refused != "twin" or time.monotonic() >= deadline + self._beat_seconds:
                self._refused = refused
                self._tried.set()
                if refused:
                    return
            await asyncio.sleep(self._beat_seconds)

    async def _converse(self, link: PeerLink) -> str:
        """Until it breaks off, which is a LinkError, or the first island refuses this one: why."""
        beats = asyncio.ensure_future(self._beat(link, lambda: {"kind": "here"}))
        try:
            hello = {"kind": "hello", "island": self._me, "life": self._life, "layout": self._layout}
            await link.send(hello)
            said, _ = await link.receive(within_seconds=CONNECT_SECONDS)
            if said.get("kind") == "refused":
                return str(said.get("why"))
            self._first = parsed(Standing, said.get("standing")), parsed(list[str], said.get("addresses"))
            self._trouble, self._link = "", link
            self._tried.set()
            while True:
                said, _ = await link.receive()
                answers = self._answer is not None and not self._answer.done()
                if said.get("kind") == "here":
                    self.called = said.get("call") is True or self.called
                    if answers:
                        self.node.moved(1)
                        if said.get("gathering"):
                            self._waits_since = time.monotonic()
                elif answers:
                    found = parsed(Round, said) if said.get("kind") == "round" else None
                    self._answer.set_result(found)  # type: ignore[union-attr]
        finally:
            beats.cancel()
            link.close()

    async def _asked(self, ready: Ready) -> tuple[Round, tuple[Standing, list[str]]] | None:
        """Be ready for a round, and be told of it; None if it is without this island. Raises RunError."""
        # Only before its first round an island waits until the first one is there.
        deadline = time.monotonic() + (0.0 if self._met else self._patience)
        while self._link is None and time.monotonic() < deadline and not self._gives_up():
            self._check()
            await asyncio.sleep(_TICK_SECONDS)
        self._check()
        self._met, found = True, None
        if (link := self._link) is not None:
            self.called, self._waits_since = False, time.monotonic()
            self._answer = asyncio.get_running_loop().create_future()
            try:
                await link.send({"kind": "ready", **asdict(ready)})
            except LinkError:
                link.shut()
            while not (await asyncio.wait([self._answer], timeout=_TICK_SECONDS))[0]:
                if time.monotonic() - self._waits_since > self._patience or self._gives_up():
                    self._trouble = "it does not come to a round"
                    link.shut()
            found = self._answer.result()
        if found is None and self._trouble:
            self.news.append(f"the first island is not there: {self._trouble}")
        return None if found is None else (found, self._first)

    async def _opened(self, header: Header) -> PeerLink:
        """A link with this rank's peer in the first island, and a first word. Raises LinkError."""
        addresses = self._first[1]
        if len(addresses) != self._ranks.size:
            raise LinkError(f"the first island has {len(addresses)} ranks, and this one {self._ranks.size}")
        link = await self.node.linked(addresses[self._ranks.rank])
        await link.send({**header, "island": self._me})
        return link

    async def _fetched(self) -> State:
        link = await self._opened({"kind": "state"})
        try:
            return await self._adoptable(link)
        finally:
            link.close()

    async def _come(self, found: Round, mine: Share) -> RoundOutcome:
        """Send this rank's part, and take the mean. Raises LinkError."""
        (pieces, kept), wire, me = mine, self._wire, self._me
        outcome = RoundOutcome(means=[torch.empty_like(piece) for piece in pieces], errors=kept)
        cuts = segments([piece.numel() for piece in pieces])
        link = await self._opened({"kind": "round", "round": found.name})
        sending = asyncio.ensure_future(self._send(link, found, mine, cuts, outcome))
        try:
            if me in found.behind:
                outcome.adopted = await self._adoptable(link)
                _require_told(found, outcome.adopted)
            for segment in cuts:
                _, data = await link.receive(bytes_due(segment, wire))
                values = decode(data, segment, wire)
                if not _finite(values):
                    raise LinkError("the mean that came is not finite")
                for place, value in zip(taken(outcome.means, segment), values, strict=True):
                    place.copy_(value)
            header, _ = await link.receive()
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
            link.close()
        outcome.moved = parsed(list[int], header.get("moved", []))
        if header.get("kind") != "end" or (me in found.moved and me not in outcome.moved):
            raise LinkError("the first island has gone on without it")
        outcome.members = parsed(list[int], header.get("members"))
        outcome.standing = found.after([island for island in found.moved if island in outcome.moved])
        return outcome

    async def _send(
        self, link: PeerLink, found: Round, mine: Share, cuts: Sequence[Segment], outcome: RoundOutcome
    ) -> None:
        (pieces, kept), me = mine, self._me
        if me == found.source:
            outcome.sent_bytes += await self._give(link, await asyncio.to_thread(self._state))
        if me not in found.moved:
            return
        outcome.errors = [torch.empty_like(error) for error in kept]
        for segment in cuts:
            exact = _added(pieces, kept, segment)
            data = encode(exact, self._wire)
            outcome.sent_bytes += await link.send({"kind": "part"}, data)
            said = decode(data, segment, self._wire) if kept else []
            errors = taken(outcome.errors, segment) if said else []
            for error, value, rounded in zip(errors, exact, said, strict=False):
                torch.sub(value, rounded, out=error)


def parsed(kind: type[T], said: Any) -> T:
    """What another island has said, as one of the messages that there are. Raises LinkError."""
    try:
        return TypeAdapter(kind).validate_python(said)
    except (ValueError, TypeError, RecursionError) as error:
        raise LinkError(f"what came is no {kind.__name__}: {error}") from error


def _require_told(found: Round, state: State) -> None:
    """Raises LinkError unless the state is what was said of it."""
    if state[0] != found.standing:
        raise LinkError("its weights are others than it has said")


def _added(pieces: list[Tensor], kept: list[Tensor], segment: Segment) -> list[Tensor]:
    """A segment of a movement, with what rounding kept back before."""
    exact = taken(pieces, segment)
    return [m + e for m, e in zip(exact, taken(kept, segment), strict=True)] if kept else exact


def _finite(values: Sequence[Tensor]) -> bool:
    return all(bool(value.isfinite().all()) for value in values)
