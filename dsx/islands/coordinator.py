"""A rank's connections with other islands: the first island leads rounds, and the others come to it.

Rank r of an island talks to rank r of the first one. Its first rank has one connection more, for as long as
it trains, by which either side knows that the other is there.
"""

from __future__ import annotations

import queue
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol, TypeVar

from pydantic import TypeAdapter

from dsx.errors import ConfigError, RunError
from dsx.islands.links import Connection, Header, LinkError, Listener, context_of, own_address
from dsx.islands.standing import Membership, Ready, Round, Standing
from dsx.launch.entry import local_world_size
from dsx.parallel.islands import Islands, is_loopback, place_of

T = TypeVar("T")

_TICK_SECONDS = 0.25
_CONNECT_SECONDS = 5.0


def parsed(kind: type[T], said: Any) -> T:
    """What another island has said, as one of the messages that there are. Raises LinkError."""
    try:
        return TypeAdapter(kind).validate_python(said)
    except (ValueError, TypeError, RecursionError) as error:
        raise LinkError(f"what came is no {kind.__name__}: {error}") from error


class AtRound(Protocol):
    """What a rank of the first island does with the others' parts of a round (:mod:`dsx.islands.rounds`)."""

    def take(self, link: Connection, island: int) -> None: ...

    def give(self, link: Connection, island: int) -> None: ...

    def fails(self, island: int, why: str) -> None: ...


class AtHome(Protocol):
    """What a rank of the first island has for others between rounds."""

    news: list[str]

    def state(self) -> Any: ...

    def give_state(self, link: Connection, state: Any) -> int: ...

    def standing(self) -> Standing: ...

    def wrong(self, said: Ready) -> str: ...


class IslandNode:
    """A rank's side of it, for as long as the run lasts.

    Args:
        rank: Rank in the island.
        shared: ``set`` and ``get`` of the launcher's store, by which ranks of one launch find the first
            island; None if each island has a launcher of its own.
        launcher: Host and port at which ranks of one launch have met.

    Attributes:
        address: Where this rank listens, if it is one of the first island.
        server: On ranks of the first island, what serves the others.
        client: On first ranks of the others, the conversation with the first island.
        traffic: Bytes and signs of life that have come and gone so far.

    Raises:
        ConfigError: The address of ``dsx.outer.meet`` cannot be had, or whoever reaches it could read and
            change the weights.
    """

    def __init__(self, islands: Islands, rank: int, *, shared: Any = None, launcher: str = "") -> None:
        self.islands, self.rank, self.traffic = islands, rank, 0
        meet, leads = islands.meet, islands.index == 0
        if islands.together:
            one_machine = local_world_size() >= islands.count * islands.ranks
            host, port = "127.0.0.1" if one_machine else own_address(launcher), 0
        else:
            host, port = place_of(meet)
        if not (islands.keys or islands.insecure or is_loopback(host)):
            raise ConfigError(
                f"dsx.outer, which meets at {host}",
                "whoever reaches that address could read the weights and change them",
                "make keys (dsx islands keys FOLDER) and name them as dsx.outer.keys, or say insecure: true",
            )
        folder = None if islands.keys is None else Path(islands.keys)
        self._keys = None if folder is None else context_of(folder, islands.index, serves=leads)
        self.address = ""
        self.server: CoordinatorServer | None = None
        self.client: CoordinatorClient | None = None
        self._listener: Listener | None = None
        if leads:
            if rank and meet and not is_loopback(host):  # it may be on another machine than the first rank
                host = own_address(meet)
            self._listener = Listener(host, 0 if rank else port, self._keys, islands.patience_seconds)
            self.server = CoordinatorServer(islands, self._listener)
            self.address = (
                f"[{host}]:{self._listener.port}" if ":" in host else f"{host}:{self._listener.port}"
            )
            if islands.together and rank == 0:
                shared.set("outer/meet", self.address)
        elif rank == 0:
            self.client = CoordinatorClient(
                self, shared.get("outer/meet").decode() if islands.together else meet
            )

    def connection(self, address: str) -> Connection:
        """A new connection with a rank of the first island. Raises LinkError."""
        patience = self.islands.patience_seconds
        return Connection.to(address, self._keys, patience_seconds=patience, connect_seconds=_CONNECT_SECONDS)

    def moved(self, count: int) -> None:
        self.traffic += count

    def close(self, patience_seconds: float | None = None) -> None:
        """Take leave. The first island stays until the others have left it, or for that long."""
        if self.client is not None:
            self.client.close()
        if self._listener is not None and self.server is not None:
            patience = self.islands.patience_seconds if patience_seconds is None else patience_seconds
            deadline = time.monotonic() + patience
            while self._listener.connected and time.monotonic() < deadline:
                time.sleep(_TICK_SECONDS / 10)
            self._listener.close()


class CoordinatorServer:
    """What a rank of the first island says to those of the others. Its first rank knows who is there."""

    def __init__(self, islands: Islands, listener: Listener) -> None:
        self._listener = listener
        self._islands, self._membership = islands, Membership(islands.count, islands.patience_seconds)
        self._lives: dict[int, tuple[str, Connection]] = {}
        self._decisions: dict[int, Round] = {}
        self._round: tuple[str, AtRound] | None = None
        self._changed = threading.Condition()
        self._beat_seconds = islands.patience_seconds / 8
        self._layout, self._addresses = "", list[str]()
        self._protocol: AtHome

    def start(self, layout: str, addresses: list[str], protocol: AtHome) -> None:
        """Begin to listen.

        ``layout`` is what the ranks of all islands must have in common,
        ``addresses`` where this island's listen.
        """
        self._layout, self._addresses, self._protocol = layout, addresses, protocol
        self._listener.start(self.serve)

    @property
    def called(self) -> bool:
        with self._changed:
            return self._membership.called(0, time.monotonic())

    def gathered(self, mine: Ready, gives_up: Callable[[], bool]) -> Round | None:
        """Wait for the other islands: the round; None if this island is to end."""
        with self._changed:
            self._membership.ready(0, mine, time.monotonic())
            while (found := self._membership.begun(time.monotonic())) is None:
                if gives_up():
                    self._membership.goes(0)
                    return None
                self._changed.wait(_TICK_SECONDS)
            self._decisions = dict.fromkeys(found.members[1:], found)
            self._changed.notify_all()
        return found

    def begin(self, name: str, round_here: AtRound) -> None:
        """From now on this rank is at a round, and no longer at another."""
        with self._changed:
            self._round = name, round_here
            self._changed.notify_all()

    def serve(self, link: Connection, header: Header, size: int) -> None:
        """Answer a connection's messages to its end. Raises LinkError."""
        link.payload(size, 0)
        island, kind = header.get("island"), header.get("kind")
        others = range(1, self._islands.count)
        if not isinstance(island, int) or island not in others or link.island not in (None, island):
            raise LinkError(f"island {link.island} says that it is island {island!r}")
        if kind == "hello":
            self._talk(link, island, header)
        elif kind == "state":
            self._protocol.give_state(link, self._protocol.state())
        elif kind in ("up", "down"):
            here = self._at(header.get("round"))
            try:
                (here.take if kind == "up" else here.give)(link, island)
            except LinkError as error:
                here.fails(island, str(error))
                raise
        else:
            raise LinkError("what came is no message of dsx's")

    def _at(self, name: Any) -> AtRound:
        """The round of this name, once this rank has come to it."""
        deadline = time.monotonic() + self._islands.patience_seconds
        with self._changed:
            while self._round is None or self._round[0] != name:
                if time.monotonic() > deadline:
                    raise LinkError(f"there is no round {name!r}")
                self._changed.wait(_TICK_SECONDS)
            return self._round[1]

    def _talk(self, link: Connection, island: int, hello: Header) -> None:
        life = str(hello.get("life"))
        with self._changed:
            known = self._lives.get(island)
            twin = known is not None and known[0] != life
            why = "twin" if twin else "layout" if hello.get("layout") != self._layout else ""
            if not why:
                self._lives[island] = life, link
                self._membership.comes(island)
        if why:
            link.send({"kind": "refused", "why": why})
            return
        try:
            standing = self._protocol.standing().plain()
            link.send({"kind": "welcome", "addresses": self._addresses, "standing": standing})
            while True:
                said = link.word()
                if said.get("kind") == "ready":
                    self._answer(link, island, parsed(Ready, said))
                    continue
                with self._changed:
                    call = self._membership.called(island, time.monotonic())
                link.send({"kind": "here", "call": call})
        finally:
            with self._changed:
                if self._lives.get(island) == (life, link):
                    del self._lives[island]
                    self._membership.goes(island)
                    self._changed.notify_all()

    def _answer(self, link: Connection, island: int, said: Ready) -> None:
        """Tell an island that is ready of the round, once there is one."""
        if wrong := self._protocol.wrong(said):
            self._protocol.news.append(f"island {island} says that it is at {wrong}: it is left out")
            link.send({"kind": "out"})
            return
        with self._changed:
            self._decisions.pop(island, None)
            self._membership.ready(island, said, time.monotonic())
            self._changed.notify_all()
        while True:
            with self._changed:
                if island not in self._decisions:
                    self._changed.wait(self._beat_seconds)
                found, gathering = self._decisions.pop(island, None), self._membership.gathering
            if found is not None:
                link.send({"kind": "round", **asdict(found)})
                return
            if link.stirs:  # it has nothing to say now: it has gone, or waits no longer
                raise LinkError("the other side has closed the connection")
            link.send({"kind": "wait", "gathering": gathering})


class CoordinatorClient:
    """The first rank of an island, in its conversation with the first island.

    Attributes:
        called: Set when the others wait for this island's next round.
    """

    def __init__(self, node: IslandNode, address: str) -> None:
        self._node, self._address, self._life = node, address, secrets.token_hex(8)
        self._patience = node.islands.patience_seconds
        self._layout, self._refused = "", ""
        self.called = threading.Event()
        self._welcome: tuple[Standing, list[str]] | None = None
        self._trouble = ""
        self._link: Connection | None = None
        self._tried, self._there, self._closed = threading.Event(), threading.Event(), threading.Event()
        self._asked: Ready | None = None
        self._wake, self._lock, self._met = threading.Event(), threading.Lock(), False
        self._answers: queue.SimpleQueue[Round | None] = queue.SimpleQueue()

    def start(self, layout: str, gives_up: Callable[[], bool], news: list[str]) -> None:
        """Begin to look for the first island.

        ``layout`` is what all islands must have in common, ``news`` gets sentences for people. Once
        ``gives_up`` says that this one is to end, it waits for the first one no more.
        """
        self._layout, self._gives_up, self._news = layout, gives_up, news
        threading.Thread(target=self._keep, name="islands talk", daemon=True).start()

    def newest(self) -> tuple[Standing, list[str]] | None:
        """What the first island holds, and where its ranks listen; None without it. Raises RunError."""
        self._tried.wait()
        self._check()
        return self._welcome if self._there.is_set() else None

    def ask(self, ready: Ready) -> tuple[Round, list[str]] | None:
        """Be ready for a round, and be told of it; None if it is without this island. Raises RunError."""
        # Only before its first round an island waits until the first one is there.
        deadline = time.monotonic() + (0.0 if self._met else self._patience)
        while not self._there.wait(_TICK_SECONDS) and time.monotonic() < deadline and not self._gives_up():
            self._check()
        self._check()
        self._met = True
        with self._lock:
            if self._there.is_set():
                self._asked = ready
            else:
                self._answers.put(None)
        self._wake.set()
        found = self._answers.get()
        if found is None and self._trouble:
            self._news.append(f"the first island is not there: {self._trouble}")
        return None if found is None or self._welcome is None else (found, self._welcome[1])

    def close(self) -> None:
        self._closed.set()
        self._wake.set()
        if self._link is not None:
            self._link.shut()

    def _check(self) -> None:
        where = f"dsx.outer.island = {self._node.islands.index}"
        if self._refused == "twin":
            what = "another launch is this island and is there"
            raise RunError(where, what, "give each launch a number of its own")
        if self._refused:
            raise RunError(
                where,
                "its model, frozen weights, layout, batch, dsx.data.seed or dsx.outer is not island 0's",
                "start all islands from the same config, on as many ranks, with the same version of dsx",
            )

    def _keep(self) -> None:
        """Be connected, and connect again, until it is closed."""
        beat = min(self._patience / 8, _CONNECT_SECONDS)
        deadline = time.monotonic() + self._patience
        while not self._closed.is_set():
            refused = ""
            try:
                self._link = self._node.connection(self._address)
                refused = self._converse(self._link, beat)
            except LinkError as error:
                self._trouble = str(error)
            if self._link is not None:
                self._link.close()
            with self._lock:
                self._there.clear()
                if self._asked is not None:
                    self._asked = None
                    self._answers.put(None)
            # Of a machine that has gone the first island may think for that long that it is there.
            if refused != "twin" or time.monotonic() >= deadline + beat:
                self._refused = refused
                self._tried.set()
                if refused:
                    return
            self._closed.wait(beat)

    def _converse(self, link: Connection, beat: float) -> str:
        """Until it breaks off, which is a LinkError, or the first island refuses this one: why."""
        hello = {
            "kind": "hello",
            "island": self._node.islands.index,
            "life": self._life,
            "layout": self._layout,
        }
        link.send(hello)
        said = link.word(within_seconds=_CONNECT_SECONDS)
        if said.get("kind") == "refused":
            return str(said.get("why"))
        standing = parsed(Standing, said.get("standing"))
        self._welcome = standing, parsed(list[str], said.get("addresses"))
        self._trouble = ""
        self._there.set()
        self._tried.set()
        while True:
            if self._asked is None:
                self._wake.wait(beat)
            self._wake.clear()
            if self._asked is not None:
                self.called.clear()
                answer = self._answer(link, self._asked)
                with self._lock:
                    self._asked = None
                    self._answers.put(answer)
                continue
            link.send({"kind": "here"})
            if link.word().get("call") is True:
                self.called.set()

    def _answer(self, link: Connection, ready: Ready) -> Round | None:
        link.send({"kind": "ready", **asdict(ready)})
        waits_since = time.monotonic()
        while True:
            said = link.word()
            if said.get("kind") == "round":
                return parsed(Round, said)
            if said.get("kind") != "wait":
                return None
            self._node.moved(1)
            now = time.monotonic()
            waits_since = now if said.get("gathering") else waits_since
            if now - waits_since > self._patience or self._gives_up():
                raise LinkError("the first island does not come to a round")
