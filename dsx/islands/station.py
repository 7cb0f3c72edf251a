"""What a rank is to the other islands: it listens, sends to its peers, and on rank 0 asks a council.

The council that counts is that of the first island in ``dsx.outer.meet`` which can be reached, or the only
one where one launcher has started all islands. An island that can reach no other asks its own, and goes on
alone.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from dsx.islands.council import Council, Said
from dsx.islands.links import Arrivals, Connection, Header, LinkError, Listener, own_address
from dsx.parallel.islands import Islands

_TICK_SECONDS = 0.25
_MOST_CONNECT_SECONDS = 5.0
_ALIVE = {"kind": "alive"}
_SHARE_OF_PATIENCE = 0.25


class Chair:
    """Carries words between a :class:`~dsx.islands.council.Council` and the islands that have connected."""

    def __init__(self, islands: Islands) -> None:
        self._council = Council(islands.count, islands.patience_seconds)
        self._links: dict[int, Connection] = {}
        self._speakers: dict[int, ThreadPoolExecutor] = {}
        self._found_at: dict[int, str] = {}
        self._look_seconds = _connect_seconds(islands) / 2  # less than who says hello waits for an answer
        self._lock = threading.Lock()
        self._alive_every = islands.patience_seconds * _SHARE_OF_PATIENCE / 2
        self._closed = threading.Event()
        threading.Thread(target=self._keep_time, name="islands council", daemon=True).start()

    def hear(self, link: Connection, header: Header, _payload: bytearray) -> None:
        """Pass a message on to the council, and its words to whom they are for."""
        island = header["island"]
        twin = self._twin(header) if header["kind"] == "hello" else None
        if twin is not None:
            _send(link, {"kind": "refused", "island": island, "twin": twin})
            return
        with self._lock:
            # One that was given up may be heard late, after the one that took its place.
            if self._links.get(island, link).since > link.since:
                return
            self._links[island] = link
            if header["kind"] == "hello":
                self._found_at[island] = header["addresses"][0]
            self._say(self._council.hear(island, header, time.monotonic()))

    def lost(self, link: Connection) -> None:
        """A connection has ended."""
        with self._lock:
            for island in [island for island, its in self._links.items() if its is link]:
                del self._links[island]
                self._say(self._council.lose(island, time.monotonic()))

    def close(self) -> None:
        """Stop keeping the time."""
        self._closed.set()

    def _twin(self, header: Header) -> str | None:
        """Where another launch listens that is the same island and is there; None if there is none."""
        island, address = header["island"], header["addresses"][0]
        with self._lock:
            known = self._found_at.get(island) if island in self._links else None
        if known is None or known == address:
            return None
        try:  # of a machine that has gone the connection may be left
            Connection.to(known, patience_seconds=1.0, connect_seconds=self._look_seconds).close()
        except LinkError:
            return None
        return known

    def _keep_time(self) -> None:
        spoke = time.monotonic()
        while not self._closed.wait(_TICK_SECONDS):
            now = time.monotonic()
            with self._lock:
                self._say(self._council.tick(now))
                if now - spoke >= self._alive_every:
                    spoke = now
                    self._say([(island, _ALIVE) for island in self._links])

    def _say(self, said: list[Said]) -> None:
        """Send in the order in which things were said, without waiting for anybody."""
        for island, message in said:
            if island in self._links:
                speaker = self._speakers.setdefault(island, ThreadPoolExecutor(1, "islands speak"))
                speaker.submit(_send, self._links[island], message)


def _send(link: Connection, message: Header) -> None:
    with suppress(LinkError):
        link.send(message)


def _connect_seconds(islands: Islands) -> float:
    """How long a council may take to answer."""
    return min(_MOST_CONNECT_SECONDS, islands.patience_seconds * _SHARE_OF_PATIENCE)


class RefusedError(Exception):
    """The council refuses this island; ``args[0]`` is what it said."""


class Delegate:
    """Rank 0 of an island, in its conversation with the council.

    Attributes:
        called: Set when the others wait for this island's next round.
        gives_up: Whether this island is to end, and waits for the others no more.
    """

    def __init__(self, islands: Islands, addresses: tuple[str, ...], own: str | None) -> None:
        self._islands, self._addresses, self._own = islands, addresses, own
        self.called = threading.Event()
        self.gives_up: Callable[[], bool] = lambda: False
        self._link: Connection | None = None
        self._place = len(addresses)
        self._heard: queue.SimpleQueue[Header | None] = queue.SimpleQueue()
        self._shunned: dict[int, float] = {}
        self._newest: dict[str, Any] | None = None

    def newest(self, about: Header) -> dict[str, Any] | None:
        """What is known of the island with the most training in its state; None if of none.

        All councils are asked: while the first of them was away, the others have met at another one. The
        address of this island's own is asked too, where another launch may be that is the same island.

        Raises:
            RefusedError: There is one.
        """
        if self._own is not None:
            link, _ = self._welcomed(self._addresses[self._islands.index], self._connect_seconds, about)
            if link is not None:
                link.close()
        self._reach(about)
        known = [self._newest]
        for place, address in enumerate(self._addresses):
            if place not in (self._place, self._islands.index):
                link, newest = self._welcomed(address, self._connect_seconds, about)
                if link is not None:
                    link.close()
                    known.append(newest)
        return max(filter(None, known), key=lambda said: (said["progress"], -said["island"]), default=None)

    def ask(self, message: Header, about: Header) -> Header | None:
        """Say something that the council answers.

        Args:
            message: What; its kind is ready or done.
            about: What this island is, for a council that does not know it yet.

        Returns:
            The answer; None if the council that was asked has gone, or has nothing to say for too long, or if
            one that comes before it is there again: then it is to be asked.

        Raises:
            RefusedError: It refuses this island.
        """
        try:
            if message["kind"] == "ready":
                self.called.clear()
                self._reach(about)
            return self._asked(message, about)
        except LinkError:
            self._drop()
            return None

    def say(self, message: Header) -> None:
        """Say something that needs no answer."""
        with suppress(LinkError):
            if self._link is not None:
                self._link.send({**message, "island": self._islands.index})

    def close(self) -> None:
        """End the conversation."""
        self._drop(shun=False)

    def _asked(self, message: Header, about: Header) -> Header | None:
        message = {**message, "island": self._islands.index}
        if self._link is None:
            raise LinkError("the council has gone")
        self._link.send(message)
        patience = self._islands.patience_seconds
        looked = heard = time.monotonic()
        while True:
            with suppress(queue.Empty):
                reply = self._heard.get(timeout=_TICK_SECONDS)
                heard = time.monotonic()
                if reply is None or reply["kind"] == "refused":
                    break
                if reply["kind"] != "alive":
                    self.called.clear()  # whoever called has not waited in vain
                    return reply
            if message["kind"] == "ready" and self.gives_up():
                raise LinkError("this island ends")
            now = time.monotonic()
            if now - heard > patience:
                raise LinkError("the council is silent")
            if message["kind"] == "ready" and self._place and now - looked > patience * _SHARE_OF_PATIENCE:
                # One that comes first may have been started, or have come back, since.
                place, looked = self._place, now
                self._reach(about)
                if self._place != place:
                    return None
        if reply is None:
            raise LinkError("the council has gone")
        raise RefusedError(reply)

    def _reach(self, about: Header) -> None:
        """Be connected with the first council that answers; its own one always does."""
        for place in [*range(self._place), *range(self._place, len(self._addresses))]:
            if place == self._place and self._link is not None:
                return
            if self._shunned.get(place, 0.0) > time.monotonic():
                continue
            if self._connected(place, about):
                return
        raise LinkError("no council can be reached, not even this island's own")

    def _connected(self, place: int, about: Header) -> bool:
        own = self._own is not None and place == self._islands.index
        address = self._own if own and self._own is not None else self._addresses[place]
        seconds = self._connect_seconds
        if own:  # it is there, however busy this machine may be
            seconds = self._islands.patience_seconds
        link, newest = self._welcomed(address, seconds, about)
        if link is None:
            if not own:
                self._shunned[place] = time.monotonic() + seconds
            return False
        self._drop(shun=False)
        self._link, self._place, self._newest = link, place, newest
        self._heard = queue.SimpleQueue()
        threading.Thread(
            target=self._read, args=(link, self._heard), name="islands hear", daemon=True
        ).start()
        return True

    @property
    def _connect_seconds(self) -> float:
        return _connect_seconds(self._islands)

    def _welcomed(
        self, address: str, seconds: float, about: Header
    ) -> tuple[Connection | None, dict[str, Any] | None]:
        """A link to a council that has answered, and what it knows of the others; None if none answers.

        Raises:
            RefusedError: Another launch is the same island there.
        """
        link = None
        try:
            patience = self._islands.patience_seconds
            link = Connection.to(address, patience_seconds=patience, connect_seconds=seconds)
            link.send({**about, "kind": "hello", "island": self._islands.index})
            welcome, _ = link.receive(within_seconds=seconds)
            while welcome["kind"] not in ("welcome", "refused"):
                welcome, _ = link.receive(within_seconds=seconds)
        except LinkError:
            if link is not None:
                link.close()
            return None, None
        if welcome["kind"] == "refused":
            link.close()
            raise RefusedError(welcome)
        return link, welcome["newest"]

    def _read(self, link: Connection, heard: queue.SimpleQueue[Header | None]) -> None:
        with suppress(LinkError):
            while True:
                header, _ = link.receive()
                if header["kind"] == "call":
                    self.called.set()
                else:
                    heard.put(header)
        heard.put(None)

    def _drop(self, *, shun: bool = True) -> None:
        if self._link is not None:
            self._link.close()
            if shun and self._place != self._islands.index:
                self._shunned[self._place] = time.monotonic() + self._islands.patience_seconds
        self._link, self._place = None, len(self._addresses)


class Station:
    """A rank's connections with the other islands, for as long as the run lasts.

    Args:
        islands: Which island this is of.
        rank: Rank in the island.
        shared: ``set`` and ``get`` of the launcher's store, by which ranks of one launch find the council;
            None if each island has a launcher of its own.
        launcher: Host and port at which ranks of one launch have met.

    Attributes:
        islands: The same.
        inbox: What peers have sent.
        delegate: On rank 0, the conversation with the council.
        address: Where this rank's peers find it.

    Raises:
        ConfigError: The address of ``dsx.outer.meet`` is taken.
    """

    def __init__(self, islands: Islands, rank: int, *, shared: Any = None, launcher: str = "") -> None:
        self.islands, self.rank = islands, rank
        self.inbox = Arrivals()
        listens = None if rank or islands.together else islands.meet[islands.index]
        self._listener = Listener(listens, islands.patience_seconds, moved=self.inbox.heard, lost=self._lost)
        chairs = rank == 0 and (not islands.together or islands.index == 0)
        self._chair = Chair(islands) if chairs else None
        port = self._listener.port
        if islands.together:
            if self._chair is not None:
                shared.set("outer/meet", f"{own_address(launcher)}:{port}")
            meet = [shared.get("outer/meet").decode()]
        else:
            meet = [*islands.meet]
        host = own_address(meet[0] if islands.index or len(meet) == 1 else meet[1])
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        own = None if islands.together else f"127.0.0.1:{port}"
        self.delegate = Delegate(islands, tuple(meet), own) if rank == 0 else None
        self._links: dict[str, Connection] = {}
        self._lock = threading.Lock()
        self._sent_bytes = 0

    @property
    def traffic(self) -> int:
        """Bytes that have come and gone so far: while a transfer goes on, it grows."""
        return self._sent_bytes + self.inbox.received_bytes

    def start(self, give_state: Callable[[Connection, Header, bytearray], None]) -> None:
        """Begin to listen.

        Args:
            give_state: Answers an island that asks for what this rank holds.
        """
        council = {} if self._chair is None else dict.fromkeys(
            ("hello", "ready", "busy", "done"), self._chair.hear
        )  # fmt: skip
        own = {"part": self.inbox.put, "beat": self.inbox.beat, "state": give_state}
        self._listener.start({**own, **council})

    def send(self, address: str, header: Header, payload: bytearray) -> int:
        """Send to a peer, on the connection that is there or a new one; the bytes sent. Raises LinkError."""
        header = {**header, "island": self.islands.index}
        with self._lock:
            link = self._links.pop(address, None)
        if link is not None:
            try:
                return self._sent(address, link, header, payload)
            except LinkError:  # it may have been of the peer's life before
                link.close()
        return self._sent(address, self._connection(address), header, payload)

    def fetch(self, address: str) -> tuple[Header, bytearray]:
        """What a peer holds. Raises LinkError."""
        link = self._connection(address)
        try:
            link.send({"kind": "state"})
            return link.receive(within_seconds=self.islands.patience_seconds, moved=self.inbox.heard)
        finally:
            link.close()

    def beat(self, address: str, over: threading.Event, every_seconds: float) -> None:
        """Tell a peer now and then how many bytes have come and gone, until ``over``. Raises LinkError."""
        link = self._connection(address)
        try:
            while True:
                link.send({"kind": "beat", "island": self.islands.index, "traffic": self.traffic})
                if over.wait(every_seconds):
                    return
        finally:
            link.close()

    def close(self, patience_seconds: float | None = None) -> None:
        """Take leave. The council stays until the other islands have left it, or for that long."""
        if self.delegate is not None:
            self.delegate.close()
        with self._lock:
            links, self._links = self._links, {}
        for link in links.values():
            link.close()
        if self._chair is not None:
            patience = self.islands.patience_seconds if patience_seconds is None else patience_seconds
            deadline = time.monotonic() + patience
            while self._listener.connected and time.monotonic() < deadline:
                time.sleep(_TICK_SECONDS / 10)
            self._chair.close()
        self._listener.close()

    def _sent(self, address: str, link: Connection, header: Header, payload: bytearray) -> int:
        count = link.send(header, payload, self._count)
        with self._lock:
            self._links[address] = link
        return count

    def _count(self, sent: int) -> None:
        self._sent_bytes += sent

    def _connection(self, address: str) -> Connection:
        patience = self.islands.patience_seconds
        seconds = min(_MOST_CONNECT_SECONDS, patience)
        return Connection.to(address, patience_seconds=patience, connect_seconds=seconds)

    def _lost(self, link: Connection) -> None:
        if self._chair is not None:
            self._chair.lost(link)
