"""Connections among the ranks, by which all learn at once that one has ended, whatever its main thread does.

The kernel keeps them, not the process: it answers the other side's probes also while the process computes,
compiles, is swapped out or stopped, closes them when the process ends in whatever way, and gives up when
nothing comes from the other machine any more (tcp(7): SO_KEEPALIVE, TCP_USER_TIMEOUT). So a connection says
that a process lives, never that it makes progress, and costs nothing while all is well.

Rank r is connected with r ± 1, 2, 4, 8 and so on: no rank has a special part, and what one of them hears
reaches all in log2(ranks) hops, even when some are lost.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from dsx.fault_tolerance.waits import ENDED, Notice, better
from dsx.launch.entry import boot_id

_MEET_SECONDS = 10.0
_DIAL_SECONDS = 2.0
_GREETING_BYTES = 4096
_LONGEST_BYTES = 1 << 20
_LAST_ACK = slice(56, 60)  # struct tcp_info, linux/tcp.h: tcpi_last_ack_recv, in milliseconds
_PROBE_SECONDS = 1
_UNHEARD_SECONDS = 1.9  # a machine that is alive has answered a probe in this time
_NO_ANSWER = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN)


@dataclass(frozen=True, slots=True)
class Peer:
    """One process of the run.

    Attributes:
        rank: Global rank.
        machine: The running kernel and its process table; empty if unknown.
        addresses: Where other processes may reach this one, the likeliest first.
        port: Where it listens there; 0 if it does not.
        secret: What others greet it with there.
    """

    rank: int
    machine: str
    pid: int
    host: str = ""
    addresses: tuple[str, ...] = ()
    port: int = 0
    secret: str = ""


class LocalPeer:
    """A peer on this machine, alive when this is made."""

    def __init__(self, peer: Peer) -> None:
        self.rank = peer.rank
        self._process: psutil.Process | None = None  # which tells a later process with its id from it
        with suppress(psutil.NoSuchProcess):
            self._process = psutil.Process(peer.pid)

    def fate(self) -> str:
        """What keeps the process from speaking for itself; empty if nothing does."""
        status = psutil.STATUS_DEAD
        if self._process is not None and self._process.is_running():
            with suppress(psutil.NoSuchProcess):
                status = self._process.status()
        if status in (psutil.STATUS_DEAD, psutil.STATUS_ZOMBIE):
            return f"is gone: {ENDED}"
        is_stopped = status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
        return "is stopped (SIGSTOP, a debugger?)" if is_stopped else ""

    def kill(self) -> None:
        """Send SIGKILL, if it is still the same process."""
        if self._process is not None:
            with suppress(psutil.Error):
                self._process.kill()


def hosts_of(peers: Sequence[Peer]) -> tuple[str, ...]:
    """Name of each rank's machine, with its address where two machines have the same name."""
    machines: dict[str, set[str]] = {}
    for peer in peers:
        machines.setdefault(peer.host, set()).add(peer.machine)
    return tuple(
        f"{peer.host} ({peer.addresses[0]})" if len(machines[peer.host]) > 1 and peer.addresses else peer.host
        for peer in peers
    )


@dataclass(slots=True)
class _Line:
    """One connection, and the part of the other side's next message that has come."""

    rank: int
    socket: socket.socket
    unread: bytearray = field(default_factory=bytearray)
    ended: bool = False
    """Whether the other side has said that it ends."""


class Keepalive:
    """This rank's connections. Every rank makes one, and calls :meth:`meet` with all ranks' :attr:`peer`.

    Args:
        silent_seconds: A machine from which nothing has come for so long is lost; 0 never concludes that.

    Attributes:
        hung: Whether a rank has found that the run does not go on.
        warnings: What every machine's console should say, in order; whoever prints one takes it out.
    """

    def __init__(self, rank: int, silent_seconds: int) -> None:
        self._silent_seconds = silent_seconds
        self._listener: socket.socket | None = None
        self.hung = False
        self.warnings: list[str] = []
        port, secret = 0, secrets.token_hex(16)
        with suppress(OSError):
            self._listener = _listening()
            self._keep(self._listener)
            port = self._listener.getsockname()[1]
        pid, host = os.getpid(), socket.gethostname()
        self.peer = Peer(rank, _machine(), pid, host, own_addresses(), port, secret)
        self._hosts: tuple[str, ...] = ()
        self._lines: list[_Line] = []
        self._lost: dict[int, Notice] = {}
        self._said: set[str] = set()
        self._lock = threading.RLock()
        self._selector = selectors.PollSelector()  # unlike epoll's, nothing of it is shared with a fork
        os.register_at_fork(after_in_child=self._forget)

    def meet(self, peers: Sequence[Peer]) -> tuple[int, ...]:
        """Connect with this rank's neighbours, who are in this call too.

        Returns:
            Neighbours that it could not be connected with: their loss will be noticed late.
        """
        self._hosts, me = hosts_of(peers), self.peer.rank
        wanted = neighbours(me, len(peers))
        deadline = time.monotonic() + _MEET_SECONDS
        expected = {rank for rank in wanted if rank > me and peers[rank].port}
        answering = threading.Thread(target=self._answer, args=(peers, expected, deadline), daemon=True)
        answering.start()
        for rank in wanted:
            if rank < me and peers[rank].port:
                self._dial(peers[rank], deadline)
        answering.join()
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        for line in self._lines:
            line.socket.setblocking(False)
            self._selector.register(line.socket, selectors.EVENT_READ, line)
        return tuple(sorted(set(wanted) - {line.rank for line in self._lines}))

    def wake_by(self, awake: socket.socket) -> None:
        """Have :meth:`wait` return when there is something to read from a file descriptor."""
        self._selector.register(awake, selectors.EVENT_READ, None)

    def wait(self, seconds: float) -> None:
        """Listen to the others for so long, or until one of them has said something or is lost."""
        for key, _ in self._selector.select(seconds):
            if key.data is not None:
                self._hear(key.data)

    def lost(self) -> dict[int, Notice]:
        """Each lost rank, with the best that is known of it."""
        with self._lock:
            return dict(self._lost)

    def tell(self, notice: Notice) -> None:
        """Tell every rank of a lost rank; called from any thread."""
        with self._lock:
            known = self._lost.get(notice.rank)
            if not better(notice, known, self._hosts):
                return
            if known is not None:
                notice = Notice(**{**asdict(notice), "since": min(known.since, notice.since)})
            self._lost[notice.rank] = notice
            # Clocks of machines differ, so a message says how long ago it was.
            data = asdict(notice)
            data["since"] = time.time() - notice.since
            self._send({"lost": data})

    def tell_hung(self) -> None:
        with self._lock:
            if not self.hung:
                self.hung = True
                self._send({"hung": True})

    def warn(self, text: str) -> None:
        """Have every machine's console say this, once."""
        with self._lock:
            if text not in self._said:
                self._said.add(text)
                self.warnings.append(text)
                self._send({"warning": text})

    def close(self) -> None:
        """Say that this rank ends and should not be missed, and disconnect."""
        with self._lock:
            self._send({"ends": True})
            self._selector.close()
            self._drop_all()

    def _send(self, message: dict[str, Any]) -> None:
        """Send to all neighbours; one that has no room for so short a message is lost anyway."""
        data = json.dumps(message).encode() + b"\n"
        for line in self._lines:
            with suppress(OSError):
                line.socket.send(data)

    def _hear(self, line: _Line) -> None:
        try:
            while data := line.socket.recv(65536):
                line.unread += data
                self._take(line)
        except BlockingIOError:
            return
        except OSError as error:
            self._lose(line, silent=error.errno in _NO_ANSWER)
            return
        self._lose(line, silent=False)

    def _take(self, line: _Line) -> None:
        *messages, rest = line.unread.split(b"\n")
        line.unread = bytearray() if len(rest) > _LONGEST_BYTES else rest
        for message in messages:
            with suppress(ValueError, TypeError, KeyError, IndexError):  # of another version: passed over
                self._understand(line, json.loads(message))

    def _understand(self, line: _Line, message: dict[str, Any]) -> None:
        line.ended |= "ends" in message
        if "lost" in message:
            data = message["lost"]
            self.tell(Notice(**{**data, "since": time.time() - data["since"]}))
        if "hung" in message:
            self.tell_hung()
        if "warning" in message:
            self.warn(str(message["warning"]))

    def _lose(self, line: _Line, *, silent: bool) -> None:
        """The connection has ended, and with it the other side or its machine."""
        unheard = _unheard_seconds(line.socket) if silent else 0.0
        with self._lock:
            self._selector.unregister(line.socket)
            self._lines.remove(line)
            line.socket.close()
        if line.ended:
            return
        self.tell(self._notice(line.rank, unheard, silent=silent))
        if silent:
            # Others that are silent too differ by less than a probe, so that none needs a wait of its own.
            for other in list(self._lines):
                seconds = _unheard_seconds(other.socket)
                if seconds > _UNHEARD_SECONDS and not other.ended:
                    self.tell(self._notice(other.rank, seconds, silent=True))

    def _notice(self, rank: int, unheard_seconds: float, *, silent: bool) -> Notice:
        return Notice(rank=rank, by=self.peer.rank, since=time.time() - unheard_seconds, silent=silent)

    def _keep(self, connection: socket.socket) -> None:
        """Have the kernel find out by itself when nothing comes from the other side any more."""
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._silent_seconds:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _PROBE_SECONDS)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_SECONDS)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, self._silent_seconds * 1000)

    def _answer(self, peers: Sequence[Peer], expected: set[int], deadline: float) -> None:
        """Accept the calls of the ranks above this one, and hang up on strangers."""
        while expected and self._listener is not None and (left := deadline - time.monotonic()) > 0:
            self._listener.settimeout(left)
            with suppress(OSError):
                connection, _ = self._listener.accept()
                rank = self._caller(connection, expected, peers, deadline)
                if rank is None:
                    connection.close()
                    continue
                expected.discard(rank)
                self._lines.append(_Line(rank, connection))

    def _caller(
        self, connection: socket.socket, expected: set[int], peers: Sequence[Peer], deadline: float
    ) -> int | None:
        """The rank that calls; None if it is not one of ``expected``."""
        with suppress(OSError, ValueError, KeyError, TypeError):
            caller = _greeting(connection, min(deadline, time.monotonic() + _DIAL_SECONDS))
            rank = int(caller["rank"])
            if caller["secret"] == self.peer.secret and rank in expected:
                self._keep(connection)
                _greet(connection, self.peer.rank, peers[rank].secret)
                return rank
        return None

    def _dial(self, peer: Peer, deadline: float) -> None:
        """Call a rank below this one, wherever it may be reached."""
        local = ("127.0.0.1",) if peer.machine == self.peer.machine and peer.machine else ()
        for address in (*local, *peer.addresses):
            left = min(_DIAL_SECONDS, deadline - time.monotonic())
            if left <= 0:
                return
            connection: socket.socket | None = None
            try:
                connection = socket.create_connection((address, peer.port), timeout=left)
                self._keep(connection)
                _greet(connection, self.peer.rank, peer.secret)
                answer = _greeting(connection, deadline)
                if answer["secret"] == self.peer.secret and answer["rank"] == peer.rank:
                    self._lines.append(_Line(peer.rank, connection))
                    return
            except (OSError, ValueError, KeyError, TypeError):
                pass  # not there: perhaps at its next address
            if connection is not None:
                connection.close()

    def _drop_all(self) -> None:
        for line in self._lines:
            line.socket.close()
        self._lines.clear()

    def _forget(self) -> None:
        """In a forked child, which must not keep a connection of its parent's open."""
        if self._listener is not None:
            self._listener.close()
        self._drop_all()


def neighbours(rank: int, world_size: int) -> tuple[int, ...]:
    """Ranks that a rank is connected with: at distance 1, 2, 4, 8 and so on, either way round.

    >>> neighbours(0, 4), neighbours(0, 10)
    ((1, 2, 3), (1, 2, 4, 6, 8, 9))
    """
    powers = [1 << power for power in range(world_size.bit_length()) if 1 << power < world_size]
    found = {(rank + sign * power) % world_size for power in powers for sign in (1, -1)}
    return tuple(sorted(found - {rank}))


def own_addresses() -> tuple[str, ...]:
    """Addresses of this machine: the one towards rank 0's machine, then its name's, then all others."""
    found: dict[str, None] = {}
    for look in (_towards_master, _of_name, _of_interfaces):
        with suppress(OSError):
            found |= dict.fromkeys(look())
    return tuple(address for address in found if not address.startswith("127.") and address != "::1")


def _towards_master() -> Iterable[str]:
    master = os.environ.get("MASTER_ADDR", "")
    if master:
        family, kind, _, _, place = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(place)  # sends nothing
            yield str(probe.getsockname()[0])


def _of_name() -> Iterable[str]:
    return [str(found[4][0]) for found in socket.getaddrinfo(socket.gethostname(), None)]


def _of_interfaces() -> Iterable[str]:
    every = (one for found in psutil.net_if_addrs().values() for one in found)
    return [one.address for one in every if one.family is socket.AF_INET]


def _listening() -> socket.socket:
    if socket.has_dualstack_ipv6():
        with suppress(OSError):
            return socket.create_server(("", 0), family=socket.AF_INET6, backlog=128, dualstack_ipv6=True)
    return socket.create_server(("", 0), backlog=128)


def _greet(connection: socket.socket, rank: int, secret: str) -> None:
    connection.sendall(json.dumps({"rank": rank, "secret": secret}).encode() + b"\n")


def _greeting(connection: socket.socket, deadline: float) -> dict[str, Any]:
    """Read a line byte by byte, because what follows it is the next message."""
    read = bytearray()
    while not read.endswith(b"\n"):
        connection.settimeout(max(0.01, deadline - time.monotonic()))
        byte = connection.recv(1)
        if not byte or len(read) > _GREETING_BYTES:
            raise ValueError("no greeting")
        read += byte
    found: dict[str, Any] = json.loads(read)
    return found


def _unheard_seconds(connection: socket.socket) -> float:
    """How long nothing has come from the other side's kernel."""
    with suppress(OSError, struct.error):
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        return float(struct.unpack("I", info[_LAST_ACK])[0]) / 1000
    return 0.0


def _machine() -> str:
    """The running kernel and the namespace of process ids, because a container has its own."""
    with suppress(OSError):
        return f"{boot_id()} {Path('/proc/self/ns/pid').readlink()}"
    return ""
