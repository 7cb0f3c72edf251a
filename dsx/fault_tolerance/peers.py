"""The processes of a run, as one of them sees itself and those on its machine."""

from __future__ import annotations

import linecache
import os
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import psutil
import torch.distributed as dist

from dsx.fault_tolerance.waits import ENDED
from dsx.launch.entry import boot_id

_TRANSFERS = ("send", "recv", "isend", "irecv")
_DISTRIBUTED = "torch.distributed.distributed_c10d"
_POINT_TO_POINT = ("dsx.engine.p2p", "threading")
_DATA = ("dsx.engine.micro_batches", "_pull")


@dataclass(frozen=True, slots=True)
class Peer:
    """One process of the run.

    Attributes:
        rank: Global rank.
        machine: The running kernel and its process table; empty if unknown.
        pid: Process id there.
        host: The machine's name.
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

    @classmethod
    def here(cls, rank: int, addresses: tuple[str, ...] = (), port: int = 0, secret: str = "") -> Peer:
        """This process as a peer."""
        pid, host = os.getpid(), socket.gethostname()
        return cls(rank, _machine(), pid, host, addresses, port, secret)


class LocalPeer:
    """A peer on this machine, alive when this is made.

    Args:
        peer: The process.
    """

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


@dataclass(frozen=True, slots=True)
class Place:
    """Where in its program a thread of this process is.

    Attributes:
        collective: Name of the torch.distributed call that it is in; empty if in none.
        members: Global ranks of that collective.
        where: The innermost line of its own program, e.g. ``reading data, sources.py:120``.
    """

    collective: str
    members: tuple[int, ...]
    where: str


def place(thread: int) -> Place:
    """Where the thread ``thread`` is now."""
    collective, where, reads = "", "", False
    members: tuple[int, ...] = ()
    for frame in _frames(thread):
        code, module = frame.f_code, str(frame.f_globals.get("__name__"))
        if module == _DISTRIBUTED and code.co_name not in _TRANSFERS:
            # The outermost call is the one that the program made.
            collective, members = code.co_name, _members(frame.f_locals.get("group")) or members
        if not where and module.partition(".")[0] not in ("torch", "deepspeed"):
            where = f"{Path(code.co_filename).name}:{frame.f_lineno} {code.co_name}"
            if not collective and module not in _POINT_TO_POINT and _waits(frame):
                collective = "the wait for a collective"
                members = _members(getattr(frame.f_locals.get("self"), "_group", None))
        reads = reads or (module, code.co_name) == _DATA
    return Place(collective, members if collective else (), f"reading data, {where}" if reads else where)


def _frames(thread: int) -> Iterator[FrameType]:
    frame = sys._current_frames().get(thread)  # noqa: SLF001 - the documented way
    while frame is not None:
        yield frame
        frame = frame.f_back


def _waits(frame: FrameType) -> bool:
    """Whether the line waits for something asynchronous."""
    return ".wait(" in linecache.getline(frame.f_code.co_filename, frame.f_lineno)


def _members(group: object) -> tuple[int, ...]:
    with suppress(Exception):  # a group of another kind, or torn down
        return tuple(dist.get_process_group_ranks(group if isinstance(group, dist.ProcessGroup) else None))
    return ()


def _machine() -> str:
    """The running kernel and the namespace of process ids, because a container has its own."""
    with suppress(OSError):
        return f"{boot_id()} {Path('/proc/self/ns/pid').readlink()}"
    return ""
