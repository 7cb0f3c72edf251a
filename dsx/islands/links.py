"""Messages between processes of different islands: a JSON header and bytes over TCP, watched for progress.

A process group of torch ends with its first lost member; these connections come and go one by one.
"""

from __future__ import annotations

import json
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from dsx.errors import ConfigError

_MARK = b"dsx1"
_SIZES = struct.Struct("!4sIQ")
_PIECE = 1 << 18
_LONGEST_HEADER = 1 << 26
_LOOK_SECONDS = 0.5

Header = dict[str, Any]
Moved = Callable[[int], None]
"""Told of bytes that have just been sent or received."""


class LinkError(Exception):
    """A connection broke, could not be made, or nothing came through it for too long."""


def address_of(text: str) -> tuple[str, int]:
    """Host and port of ``host:port``; an IPv6 host may stand in brackets. Raises ValueError."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise ValueError(text)
    return host.removeprefix("[").removesuffix("]"), int(port)


def own_address(towards: str) -> str:
    """The address from which this machine reaches ``host:port``; nothing is sent."""
    host, port = address_of(towards)
    with suppress(OSError), socket.socket(_family(host), socket.SOCK_DGRAM) as asking:
        asking.connect((host, port))
        return str(asking.getsockname()[0])
    return socket.gethostname()


def doubts(meet: Sequence[str], own: int) -> list[str]:
    """What of ``dsx.outer.meet`` looks wrong from this machine, in words; island ``own`` is to run here.

    None of it is an error: names come and go with the machines that they name, and an address may be
    translated on the way.
    """
    found = []
    for island, address in enumerate(meet):
        host, _ = address_of(address)
        place = f"dsx.outer.meet[{island}] = {address}"
        try:
            places = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)
        except OSError as error:
            why = error.strerror or str(error)
            found.append(
                f"{place}: {host} is not known here ({why}); rounds are without that island until it is"
            )
            continue
        if island == own and not any(map(_is_own, places)):
            found.append(
                f"{place}: that is no address of this machine. If it is not translated to one, the others "
                f"cannot find this island: is dsx.outer.island = {own} meant?"
            )
    return found


def _is_own(place: tuple[Any, ...]) -> bool:
    """Whether an address that ``getaddrinfo`` has given is one of this machine's."""
    family, kind, _, _, address = place
    try:
        with socket.socket(family, kind) as tried:
            tried.bind(address)
    except OSError:
        return False
    return True


class Connection:
    """One connection, on which whole messages are sent and received.

    Args:
        connection: The connected socket.
        patience_seconds: How long nothing may come through while a message is under way.

    Attributes:
        since: When it was made (``time.monotonic``).
    """

    def __init__(self, connection: socket.socket, patience_seconds: float) -> None:
        self.since = time.monotonic()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket, self._patience = connection, patience_seconds
        self._sending = threading.Lock()

    @classmethod
    def to(cls, address: str, *, patience_seconds: float, connect_seconds: float) -> Connection:
        """Connect. Raises LinkError."""
        try:
            connection = socket.create_connection(address_of(address), timeout=connect_seconds)
        except (OSError, ValueError) as error:
            raise LinkError(f"{address} cannot be connected: {error}") from error
        return cls(connection, patience_seconds)

    def send(self, header: Header, payload: bytes | bytearray = b"", moved: Moved | None = None) -> int:
        """Send a message; the bytes on the wire. Raises LinkError."""
        head = json.dumps(header).encode()
        data = [_SIZES.pack(_MARK, len(head), len(payload)) + head, payload]
        with self._sending:
            try:
                self._socket.settimeout(self._patience)
                for part in data:
                    view = memoryview(part)
                    while view:
                        sent = self._socket.send(view[:_PIECE])
                        view = view[sent:]
                        if moved is not None:
                            moved(sent)
            except (OSError, ValueError) as error:  # a closed socket has no descriptor to be asked
                raise LinkError(f"sending broke off: {error}") from error
        return sum(map(len, data))

    def receive(
        self, *, within_seconds: float | None = None, moved: Callable[[Header, int], None] | None = None
    ) -> tuple[Header, bytearray]:
        """The next message.

        Args:
            within_seconds: How long it may take to begin; None waits for ever.
            moved: Told of its header and the bytes that have come, again and again.

        Raises:
            LinkError: The connection is closed, or it has taken too long.
        """
        mark, head_size, size = _SIZES.unpack(self._read(_SIZES.size, within_seconds))
        if mark != _MARK or head_size > _LONGEST_HEADER:
            raise LinkError("what came is no message of dsx's")
        try:
            header: Header = json.loads(self._read(head_size, self._patience))
        except (ValueError, RecursionError) as error:
            raise LinkError("what came is no message of dsx's") from error
        if not isinstance(header, dict):
            raise LinkError("what came is no message of dsx's")
        return header, self._read(size, self._patience, None if moved is None else lambda n: moved(header, n))

    def close(self) -> None:
        """Close it, whoever waits on it."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _read(self, size: int, within_seconds: float | None, moved: Moved | None = None) -> bytearray:
        try:
            data = bytearray(size)
        except (MemoryError, OverflowError) as error:
            raise LinkError(f"a message of {size} bytes is too large") from error
        view = memoryview(data)
        try:
            while view:
                # Sending threads set the same socket's timeout, so it is set anew for every piece.
                self._wait(within_seconds)
                count = self._socket.recv_into(view[:_PIECE])
                if not count:
                    raise LinkError("the other side has closed the connection")
                view, within_seconds = view[count:], self._patience
                if moved is not None:
                    moved(count)
        except (OSError, ValueError) as error:
            raise LinkError(f"receiving broke off: {error}") from error
        return data

    def _wait(self, seconds: float | None) -> None:
        """Until there is something to read."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        if not poll.poll(None if seconds is None else seconds * 1000):
            raise LinkError(f"nothing came for {seconds:g} s")


Handler = Callable[[Connection, Header, bytearray], None]


class Listener:
    """Takes connections, and hands each of their messages to the handler of its kind, in a thread for each.

    Args:
        host_port: Where to listen; None for any free port.
        patience_seconds: As for :class:`Connection`.
        moved: Told of the header of a message under way and of the bytes that have come.
        lost: Told of a connection that has ended.

    Raises:
        ConfigError: Another program listens there.
    """

    def __init__(
        self,
        host_port: str | None,
        patience_seconds: float,
        *,
        moved: Callable[[Header, int], None],
        lost: Callable[[Connection], None],
    ) -> None:
        self._patience, self._moved, self._lost = patience_seconds, moved, lost
        self._handlers: dict[str, Handler] = {}
        self._links: set[Connection] = set()
        port = 0 if host_port is None else address_of(host_port)[1]
        try:
            self._socket = _listening(port)
        except OSError as error:
            raise ConfigError(
                f"port {port}, where this island is to listen (dsx.outer.meet)",
                f"it cannot be had: {error.strerror or error}",
                "give this island another port, in the config of every island",
            ) from None
        self.port = int(self._socket.getsockname()[1])

    def start(self, handlers: Mapping[str, Handler]) -> None:
        """Begin to take connections. Messages of other kinds end theirs."""
        self._handlers = dict(handlers)
        threading.Thread(target=self._accept, name="islands listen", daemon=True).start()

    def close(self) -> None:
        """End all connections."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        for link in list(self._links):
            link.close()

    @property
    def connected(self) -> int:
        """Connections at the moment."""
        return len(self._links)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            link = Connection(connection, self._patience)
            self._links.add(link)
            threading.Thread(target=self._serve, args=(link,), name="islands serve", daemon=True).start()

    def _serve(self, link: Connection) -> None:
        with suppress(LinkError, LookupError, TypeError):  # the latter two of what is no message of dsx's
            while True:
                header, payload = link.receive(moved=self._moved)
                self._handlers[header["kind"]](link, header, payload)
        self._links.discard(link)
        link.close()
        self._lost(link)


class Arrivals:
    """Parts of movements that have come, until somebody asks for them.

    Attributes:
        received_bytes: All that has come.
        growths: How often peers have said that more bytes have come and gone at their places.
    """

    def __init__(self) -> None:
        self._parts: dict[tuple[str, str, int], bytearray] = {}
        self._heard: dict[int, float] = {}
        self._told: dict[int, int] = {}
        self._changed = threading.Condition()
        self.received_bytes, self.growths = 0, 0

    def heard(self, header: Header, count: int) -> None:
        """Bytes of a message have come."""
        self.received_bytes += count
        if "island" in header:
            self._heard[header["island"]] = time.monotonic()

    def beat(self, _link: Connection, header: Header, _payload: bytearray) -> None:
        """A peer says how many bytes have come and gone at its place: it waits for others if they grow."""
        island, traffic = header["island"], header["traffic"]
        if self._told.get(island) != traffic:
            self._told[island], self._heard[island] = traffic, time.monotonic()
            self.growths += 1

    def put(self, _link: Connection, header: Header, payload: bytearray) -> None:
        """Keep a part."""
        with self._changed:
            self._parts[header["attempt"], header["phase"], header["island"]] = payload
            self._changed.notify_all()

    def take(
        self,
        attempt: str,
        phase: str,
        island: int,
        patience_seconds: float,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> bytearray:
        """A part, as soon as it has come.

        Args:
            attempt: Which try it is of.
            phase: Which part of it.
            island: Of which island.
            patience_seconds: How long that island may be silent.
            meanwhile: Called now and then; what it raises ends the waiting.

        Raises:
            LinkError: Nothing has been heard of that island for so long.
        """
        key, began = (attempt, phase, island), time.monotonic()
        with self._changed:
            while key not in self._parts:
                quiet_since = max(began, self._heard.get(island, began))
                left = quiet_since + patience_seconds - time.monotonic()
                if left <= 0:
                    raise LinkError(f"nothing came from island {island} for {patience_seconds:g} s")
                meanwhile()
                self._changed.wait(min(left, _LOOK_SECONDS))
            return self._parts.pop(key)

    def begin(self, attempt: str) -> None:
        """Drop what has come of other attempts: those are over."""
        with self._changed:
            self._parts = {key: part for key, part in self._parts.items() if key[0] == attempt}


def _listening(port: int) -> socket.socket:
    """On every address of this machine, whose peers come from others."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, backlog=128, dualstack_ipv6=True)
    return socket.create_server(("", port), backlog=128)


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
