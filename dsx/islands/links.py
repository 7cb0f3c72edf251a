"""Messages between islands: a JSON header and bytes over TCP, with TLS where there are keys.

A process group of torch ends with its first lost member; these links come and go one by one. Nothing is read
beyond what is due. All of it runs in one thread's loop, so that a link is used in both directions at once.
"""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import struct
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from dsx.errors import ConfigError
from dsx.islands.keys import island_of
from dsx.parallel.islands import place_of

_MARK = b"dsx3"
_SIZES = struct.Struct("!4sIQ")
_PIECE = 1 << 17
"""Bytes that go or come before it is looked whether any do; and that a buffer holds."""
_LONGEST_HEADER = 1 << 20
_STRANGER_SECONDS = 10.0
_MOST_STRANGERS = 64

Header = dict[str, Any]
Moved = Callable[[int], None]
"""Told of bytes that have just come or gone."""


class LinkError(Exception):
    """A link broke, could not be made, was silent for too long, or something came that was not due."""


def own_address(towards: str) -> str:
    """The address from which this machine reaches ``host:port``; nothing is sent."""
    host, port = place_of(towards)
    with suppress(OSError), socket.socket(_family(host), socket.SOCK_DGRAM) as asking:
        asking.connect((host, port))
        return str(asking.getsockname()[0])
    return socket.gethostname()


class PeerLink:
    """One connection, on which whole messages are sent and received.

    Args:
        reader: What comes.
        writer: What goes.
        patience_seconds: How long nothing may come through while a message is under way.
        moved: Told of the bytes of payloads.

    Attributes:
        island: Which island the other end has shown that it is; None without keys.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        patience_seconds: float,
        moved: Moved = lambda _: None,
    ) -> None:
        self.island: int | None = None
        self._reader, self._writer, self._moved = reader, writer, moved
        self._patience, self._wire, self._sending = patience_seconds, writer.transport, asyncio.Lock()

    @classmethod
    async def to(
        cls,
        address: str,
        keys: ssl.SSLContext | None,
        *,
        patience_seconds: float,
        connect_seconds: float,
        moved: Moved = lambda _: None,
    ) -> PeerLink:
        """Connect with the first island. Raises LinkError."""
        try:
            async with asyncio.timeout(connect_seconds):
                link = cls(
                    *await asyncio.open_connection(*place_of(address), limit=_PIECE), patience_seconds, moved
                )
        except (OSError, ValueError) as error:
            why = str(error) or f"it does not answer for {connect_seconds:g} s"
            raise LinkError(f"{address} cannot be connected: {why}") from error
        try:
            await link.secure(keys, within_seconds=connect_seconds)
        except BaseException:
            link.shut()
            raise
        if link.island:
            link.shut()
            raise LinkError(f"{address} is island {link.island}, not the first one")
        return link

    async def secure(self, keys: ssl.SSLContext | None, *, within_seconds: float) -> None:
        """Encrypt it, and learn who the other end is. Raises LinkError."""
        if keys is None:
            return
        try:
            await self._writer.start_tls(keys, ssl_handshake_timeout=within_seconds)
            self.island = island_of(self._writer.get_extra_info("peercert"))
        except (OSError, ValueError) as error:
            raise LinkError(f"the other side shows no key that is known: {error}") from error
        self._writer.transport.set_write_buffer_limits(high=_PIECE)

    async def send(self, header: Header, payload: bytes | bytearray = b"") -> int:
        """Send a message; the bytes on the wire. Raises LinkError."""
        head = json.dumps(header).encode()
        parts = _SIZES.pack(_MARK, len(head), len(payload)) + head, payload
        try:
            async with self._sending:
                for part in parts:
                    view = memoryview(part)
                    for at in range(0, len(view), _PIECE):
                        self._writer.write(view[at : at + _PIECE])
                        await self._gone()
        except (OSError, RuntimeError) as error:
            raise LinkError(f"sending broke off: {error}") from error
        return sum(map(len, parts))

    async def receive(self, due: int = 0, *, within_seconds: float | None = None) -> tuple[Header, bytearray]:
        """The next message that says something.

        Args:
            due: Bytes that its payload is to have. Nothing else is read, nor memory taken for it.
            within_seconds: How long it may take to begin, in place of the usual patience.

        Raises:
            LinkError: The link is closed, it has taken too long, or what came is not what is due.
        """
        while True:
            mark, head_size, size = _SIZES.unpack(await self._read(_SIZES.size, within_seconds))
            if mark != _MARK or head_size > _LONGEST_HEADER:
                raise LinkError("what came is no message of dsx's")
            try:
                header = json.loads(await self._read(head_size))
            except (ValueError, RecursionError) as error:
                raise LinkError("what came is no message of dsx's") from error
            if not isinstance(header, dict):
                raise LinkError("what came is no message of dsx's")
            if header.get("kind") == "wait" and not size:
                self._moved(1)
                continue
            if size != due:
                raise LinkError(f"{size} bytes were to come, and {due} are due")
            return header, await self._read(size, moved=self._moved)

    async def ended(self) -> None:
        """Until the other side has closed it, for all that has been sent to be read."""
        with suppress(LinkError):
            await self.receive()

    def close(self) -> None:
        """End it, once what was sent has gone."""
        with suppress(OSError, RuntimeError):
            self._writer.close()

    def shut(self) -> None:
        """End it at once."""
        self._writer.transport.abort()

    async def _gone(self) -> None:
        """Until there is room for more; as long as bytes go, however slowly."""
        left = self._wire.get_write_buffer_size() + 1
        while left:
            try:
                async with asyncio.timeout(self._patience):
                    await self._writer.drain()
                left = 0
            except TimeoutError:
                before, left = left, self._wire.get_write_buffer_size()
                if left >= before:
                    raise LinkError(f"nothing was taken for {self._patience:g} s") from None
                self._moved(before - left)

    async def _read(
        self, size: int, within_seconds: float | None = None, moved: Moved = lambda _: None
    ) -> bytearray:
        data, at = bytearray(size), 0
        seconds = self._patience if within_seconds is None else within_seconds
        try:
            while at < size:
                async with asyncio.timeout(seconds):
                    piece = await self._reader.read(min(size - at, 2 * _PIECE))
                if not piece:
                    raise LinkError("the other side has closed the connection")
                data[at : at + len(piece)] = piece
                at, seconds = at + len(piece), self._patience
                moved(len(piece))
        except TimeoutError:
            raise LinkError(f"nothing came for {seconds:g} s") from None
        except OSError as error:
            raise LinkError(f"receiving broke off: {error}") from error
        return data


class Listener:
    """Takes connections, and serves each.

    Whoever has said no whole message so many seconds after it has connected is a stranger, and loses its
    connection; so does the oldest of too many.

    Args:
        host: The address at which to listen.
        port: 0 for any free one.
        keys: With which both ends show who they are; None for nobody to be asked.
        patience_seconds: As for :class:`PeerLink`.
        moved: As for it.

    Raises:
        ConfigError: It cannot be had.
    """

    def __init__(
        self, host: str, port: int, keys: ssl.SSLContext | None, patience_seconds: float, moved: Moved
    ) -> None:
        self._keys, self._patience, self._moved = keys, patience_seconds, moved
        self._strangers: dict[PeerLink, None] = {}
        self._links: set[PeerLink] = set()
        self._server: asyncio.Server | None = None
        try:
            self._socket = socket.create_server((host, port), family=_family(host), backlog=128)
        except OSError as error:
            raise ConfigError(
                f"{host}:{port}, where the first island is to listen (dsx.outer.meet)",
                f"it cannot be had: {error.strerror or error}",
                "give an address of the first island's own machine and a free port, in every island's config",
            ) from None
        port = int(self._socket.getsockname()[1])
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    async def start(self, serve: Callable[[PeerLink, Header], Awaitable[None]]) -> None:
        """Begin to take connections.

        Args:
            serve: Given each with its first message. At its end, and with what it raises, it is closed.
        """

        async def come(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            link = PeerLink(reader, writer, self._patience, self._moved)
            self._links.add(link)
            self._strangers[link] = None
            if len(self._strangers) > _MOST_STRANGERS:
                next(iter(self._strangers)).shut()
            try:
                async with asyncio.timeout(_STRANGER_SECONDS):
                    await link.secure(self._keys, within_seconds=_STRANGER_SECONDS)
                    header, _ = await link.receive()
                del self._strangers[link]
                await serve(link, header)
            except (LinkError, TimeoutError, asyncio.CancelledError):
                link.shut()
            finally:
                self._strangers.pop(link, None)
                self._links.discard(link)
                link.close()

        self._server = await asyncio.start_server(come, sock=self._socket, limit=_PIECE)

    def close(self) -> None:
        """End all connections."""
        if self._server is not None:
            self._server.close()
        self._socket.close()
        for link in [*self._links]:
            link.shut()

    @property
    def connected(self) -> int:
        """Connections at the moment."""
        return len(self._links)


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
