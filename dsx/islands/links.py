"""Messages between islands: a JSON header and bytes over TCP, with TLS where there are keys.

A process group of torch ends with its first lost member; these connections come and go one by one. Nothing
is read beyond what is due, and one thread at an end uses a connection at a time, as OpenSSL wants it. The
keys are a certificate for each island, all signed by a key that nobody keeps.
"""

from __future__ import annotations

import json
import select
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from dsx.errors import ConfigError, DataError
from dsx.parallel.islands import place_of
from dsx.terminal import with_room

AUTHORITY = "ca.pem"
_NAME, _AUTHORITY_NAME = "dsx island ", "dsx islands"
_YEARS = 10
_USAGES = (
    "digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement",
    "key_cert_sign", "crl_sign", "encipher_only", "decipher_only",
)  # fmt: skip


def key_file(folder: Path, island: int) -> Path:
    """Where the private key and the certificate of an island lie."""
    return folder / f"island{island}.pem"


def write_keys(folder: Path, count: int) -> list[Path]:
    """Make keys for so many islands.

    Args:
        folder: Is made. ``ca.pem`` in it is for every site, ``island0.pem`` and so on are secret.
        count: How many islands there are.

    Raises:
        DataError: There are keys in the folder already, or it cannot be written.
    """
    # Here: nothing else of dsx needs it.
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    def named(words: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, words)])

    def certificate(words: str, key: ec.EllipticCurvePrivateKey, *, signs: bool) -> x509.Certificate:
        public, now = key.public_key(), datetime.now(UTC)
        usage = dict.fromkeys(_USAGES, False)
        builder = (
            x509.CertificateBuilder()
            .subject_name(named(words))
            .issuer_name(named(_AUTHORITY_NAME))
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(days=1))  # clocks of sites differ
            .not_valid_after(now + timedelta(days=365 * _YEARS))
        )
        key_usage = x509.KeyUsage(**usage | {"key_cert_sign" if signs else "digital_signature": True})
        for extension, critical in (
            (x509.BasicConstraints(ca=signs, path_length=0 if signs else None), True),
            (key_usage, True),
            (x509.SubjectKeyIdentifier.from_public_key(public), False),
            (x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), False),
        ):
            builder = builder.add_extension(extension, critical=critical)
        return builder.sign(signer, hashes.SHA256())

    pem, signer = serialization.Encoding.PEM, ec.generate_private_key(ec.SECP256R1())
    files = [folder / AUTHORITY, *(key_file(folder, island) for island in range(count))]
    begun: list[Path] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if (known := next((file for file in files if file.exists()), None)) is not None:
            raise DataError(
                str(known), "there are keys already, which islands may use", "name another folder"
            )
        begun.append(files[0])
        files[0].write_bytes(certificate(_AUTHORITY_NAME, signer, signs=True).public_bytes(pem))
        for island, file in enumerate(files[1:]):
            key = ec.generate_private_key(ec.SECP256R1())
            secret = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
            begun.append(file)
            file.touch(mode=0o600)
            file.write_bytes(secret + certificate(f"{_NAME}{island}", key, signs=False).public_bytes(pem))
    except OSError as error:
        for file in begun:
            with suppress(OSError):
                file.unlink()
        fix = with_room(error, "name a folder that can be written")
        raise DataError(str(folder), f"keys cannot be written there: {error}", fix) from error
    return files


def context_of(folder: Path, island: int, *, serves: bool) -> ssl.SSLContext:
    """What an island makes connections with, on which both ends have to show a certificate of these keys.

    Raises:
        ConfigError: Its key cannot be read.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if serves else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    if serves:
        # Nobody takes up a session again, and where an end closes without having read what came, such as
        # tickets, what it has sent is lost.
        context.num_tickets = 0
    context.check_hostname = False  # a certificate says which island it is, wherever that is
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_verify_locations(folder / AUTHORITY)
        context.load_cert_chain(key_file(folder, island))
    except OSError as error:
        raise ConfigError(
            f'dsx.outer.keys = "{folder}"',
            f"it has no {AUTHORITY} and {key_file(folder, island).name} that can be used: {error}",
            "make keys with dsx islands keys FOLDER, once, and copy these two files to this site",
        ) from error
    return context


def island_of(connection: ssl.SSLSocket) -> int:
    """Which island the other end has shown that it is. Raises ValueError."""
    shown = connection.getpeercert() or {}
    names = dict(pair for part in shown.get("subject", ()) for pair in part)  # type: ignore[misc]
    return int(str(names.get("commonName", "")).removeprefix(_NAME))


_MARK = b"dsx2"
_SIZES = struct.Struct("!4sIQ")
_PIECE = 1 << 14  # a record of TLS
_LONGEST_HEADER = 1 << 20
_STRANGER_SECONDS = 10.0
_MOST_STRANGERS = 64
_SWEEP_SECONDS = 0.5

Header = dict[str, Any]
Moved = Callable[[int], None]
"""Told of bytes that have just been sent or received."""


class LinkError(Exception):
    """A connection broke, could not be made, was silent for too long, or something came that was not due."""


def own_address(towards: str) -> str:
    """The address from which this machine reaches ``host:port``; nothing is sent."""
    host, port = place_of(towards)
    with suppress(OSError), socket.socket(_family(host), socket.SOCK_DGRAM) as asking:
        asking.connect((host, port))
        return str(asking.getsockname()[0])
    return socket.gethostname()


class Connection:
    """One connection, on which whole messages are sent and received.

    Args:
        patience_seconds: How long nothing may come through while a message is under way.

    Attributes:
        patience_seconds: The same; None waits for ever.
        since: When it was made (``time.monotonic``).
        island: Which island the other end has shown that it is; None without keys.
    """

    def __init__(self, connection: socket.socket, patience_seconds: float) -> None:
        self.since = time.monotonic()
        self.island: int | None = None
        self.patience_seconds: float | None = patience_seconds
        self._socket = connection

    @classmethod
    def to(
        cls, address: str, keys: ssl.SSLContext | None, *, patience_seconds: float, connect_seconds: float
    ) -> Connection:
        """Connect with the first island. Raises LinkError."""
        try:
            link = cls(socket.create_connection(place_of(address), timeout=connect_seconds), patience_seconds)
        except (OSError, ValueError) as error:
            raise LinkError(f"{address} cannot be connected: {error}") from error
        try:
            link.secure(keys, serves=False, within_seconds=connect_seconds)
        except LinkError:
            link.close()
            raise
        if link.island:
            link.close()
            raise LinkError(f"{address} is island {link.island}, not the first one")
        return link

    def secure(self, keys: ssl.SSLContext | None, *, serves: bool, within_seconds: float) -> None:
        """Encrypt it, and learn who the other end is. Raises LinkError."""
        try:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if keys is None:
                return
            wrapped = keys.wrap_socket(self._socket, server_side=serves, do_handshake_on_connect=False)
            self._socket = wrapped
            wrapped.settimeout(within_seconds)
            wrapped.do_handshake()
            self.island = island_of(wrapped)
        except (OSError, ValueError) as error:
            raise LinkError(f"the other side shows no key that is known: {error}") from error

    def send(self, header: Header, payload: bytes | bytearray = b"", moved: Moved | None = None) -> int:
        """Send a message; the bytes on the wire. Raises LinkError."""
        head = json.dumps(header).encode()
        data = [_SIZES.pack(_MARK, len(head), len(payload)) + head, payload]
        try:
            self._socket.settimeout(self.patience_seconds)
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

    def receive(self, *, within_seconds: float | None = None) -> tuple[Header, int]:
        """The next message's header, and the size of the payload, which is yet to be read.

        Args:
            within_seconds: How long it may take to begin, in place of the usual patience.

        Raises:
            LinkError: The connection is closed, it has taken too long, or what came is no message.
        """
        seconds = self.patience_seconds if within_seconds is None else within_seconds
        mark, head_size, size = _SIZES.unpack(self._read(_SIZES.size, seconds))
        if mark != _MARK or head_size > _LONGEST_HEADER:
            raise LinkError("what came is no message of dsx's")
        try:
            header = json.loads(self._read(head_size, self.patience_seconds))
        except (ValueError, RecursionError) as error:
            raise LinkError("what came is no message of dsx's") from error
        if not isinstance(header, dict):
            raise LinkError("what came is no message of dsx's")
        return header, size

    def word(self, *, within_seconds: float | None = None) -> Header:
        """The next message, which is to have no payload. Raises LinkError."""
        header, size = self.receive(within_seconds=within_seconds)
        self.payload(size, 0)
        return header

    def payload(self, size: int, due: int, moved: Moved | None = None) -> bytearray:
        """The bytes of a message that has ``size``, as it says, where ``due`` are due. Raises LinkError."""
        if size != due:
            raise LinkError(f"{size} bytes were to come, and {due} are due")
        return self._read(size, self.patience_seconds, moved)

    def shut(self) -> None:
        """End it from another thread than the one that uses it, which gets a LinkError.

        Its descriptor stays: once closed it is the next connection's, on which that thread would go on.
        """
        with suppress(OSError):  # ssl's own way lets the other thread read on without decrypting
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def close(self) -> None:
        """End it, when no other thread uses it."""
        self.shut()
        self._socket.close()

    @property
    def stirs(self) -> bool:
        """Whether something has come, or the other side has closed it."""
        poll = select.poll()
        with suppress(OSError, ValueError):
            poll.register(self._socket, select.POLLIN)
            return bool(poll.poll(0))
        return True

    def _read(self, size: int, within_seconds: float | None, moved: Moved | None = None) -> bytearray:
        data = bytearray(size)
        view = memoryview(data)
        try:
            self._socket.settimeout(within_seconds)
            while view:
                count = self._socket.recv_into(view[:_PIECE])
                if not count:
                    raise LinkError("the other side has closed the connection")
                self._socket.settimeout(self.patience_seconds)
                view = view[count:]
                if moved is not None:
                    moved(count)
        except TimeoutError:
            raise LinkError(f"nothing came for {within_seconds:g} s") from None
        except (OSError, ValueError) as error:
            raise LinkError(f"receiving broke off: {error}") from error
        return data


class Listener:
    """Takes connections, and serves each in a thread of its own.

    Whoever has said no whole message so many seconds after it has connected is a stranger, and loses its
    connection; so does the oldest of too many.

    Args:
        port: 0 for any free one.
        keys: With which both ends show who they are; None for nobody to be asked.
        patience_seconds: As for :class:`Connection`.

    Raises:
        ConfigError: It cannot be had.
    """

    def __init__(self, host: str, port: int, keys: ssl.SSLContext | None, patience_seconds: float) -> None:
        self._keys, self._patience = keys, patience_seconds
        self._strangers: dict[Connection, None] = {}
        self._links: set[Connection] = set()
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._thread: threading.Thread | None = None
        try:
            self._socket = socket.create_server((host, port), family=_family(host), backlog=128)
        except OSError as error:
            raise ConfigError(
                f"{host}:{port}, where the first island is to listen (dsx.outer.meet)",
                f"it cannot be had: {error.strerror or error}",
                "give an address of the first island's own machine and a free port, in every island's config",
            ) from None
        self._socket.settimeout(_SWEEP_SECONDS)
        self.port = int(self._socket.getsockname()[1])

    def start(self, serve: Callable[[Connection, Header, int], None]) -> None:
        """Begin to take connections.

        Args:
            serve: Given each with its first message, and the size of that one's payload. At its end, and with
                what it raises, the connection is closed.
        """
        self._thread = threading.Thread(
            target=self._accept, args=(serve,), name="islands listen", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        if self._thread is not None:
            self._thread.join()
        self._socket.close()
        for link in [*self._links]:
            link.shut()

    @property
    def connected(self) -> int:
        return len(self._links)

    def _accept(self, serve: Callable[[Connection, Header, int], None]) -> None:
        while not self._closed.is_set():
            connection = None
            try:
                connection, _ = self._socket.accept()
            except TimeoutError:
                pass
            except OSError:  # as where descriptors have run out: some may be free again
                self._closed.wait(_SWEEP_SECONDS)
            with self._lock:
                strangers = [*self._strangers]
            late = time.monotonic() - _STRANGER_SECONDS
            for place, link in enumerate(strangers):
                if link.since < late or place < len(strangers) - _MOST_STRANGERS:
                    link.shut()
            if connection is not None:
                self._take(Connection(connection, self._patience), serve)

    def _take(self, link: Connection, serve: Callable[[Connection, Header, int], None]) -> None:
        with self._lock:
            self._strangers[link] = None
            self._links.add(link)
        try:
            threading.Thread(
                target=self._serve, args=(link, serve), name="islands serve", daemon=True
            ).start()
        except RuntimeError:  # no further thread can be had
            self._end(link)

    def _serve(self, link: Connection, serve: Callable[[Connection, Header, int], None]) -> None:
        try:
            link.secure(self._keys, serves=True, within_seconds=_STRANGER_SECONDS)
            first = link.receive(within_seconds=_STRANGER_SECONDS)
            with self._lock:
                self._strangers.pop(link, None)
            serve(link, *first)
        except LinkError:
            pass
        finally:
            self._end(link)

    def _end(self, link: Connection) -> None:
        with self._lock:
            self._strangers.pop(link, None)
            self._links.discard(link)
        link.close()


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
