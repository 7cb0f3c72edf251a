"""The processes of a run, as one of them sees itself and those on its machine."""

from __future__ import annotations

import linecache
import os
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch.distributed as dist

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_PROC = Path("/proc")
_TRANSFERS = ("send", "recv", "isend", "irecv")
_DISTRIBUTED = "distributed_c10d.py"
_POINT_TO_POINT = ("p2p.py", "headers.py", "threading.py")
_DATA = ("micro_batches.py", "_pull")


@dataclass(frozen=True, slots=True)
class Peer:
    """One process of the run.

    Attributes:
        rank: Global rank.
        machine: The running kernel and its process table; empty if unknown.
        pid: Process id there.
        born: When the process began, in the kernel's ticks: a later process may have its id again.
        host: The machine's name.
        addresses: Where other processes may reach this one, the likeliest first.
        port: Where it listens there; 0 if it does not.
        secret: What others greet it with there.
    """

    rank: int
    machine: str
    pid: int
    born: str
    host: str = ""
    addresses: tuple[str, ...] = ()
    port: int = 0
    secret: str = ""

    @classmethod
    def here(cls, rank: int, addresses: tuple[str, ...] = (), port: int = 0, secret: str = "") -> Peer:
        """This process."""
        pid, host = os.getpid(), socket.gethostname()
        return cls(rank, _machine(), pid, _stat(pid)[1], host, addresses, port, secret)

    def fate(self) -> str:
        """What keeps the process from speaking for itself; empty if nothing does.

        Asked of a peer on the same machine.
        """
        state, born = _stat(self.pid)
        if born != self.born or state in "ZX":
            return "is gone: its process has ended without a word (killed?)"
        return "is stopped (SIGSTOP, a debugger?)" if state in "Tt" else ""

    def kill(self) -> None:
        """SIGKILL, if it is still this process."""
        if _stat(self.pid)[1] == self.born:
            with suppress(OSError):
                os.kill(self.pid, signal.SIGKILL)


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
    """Where a thread of this process is.

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
        code = frame.f_code
        file = Path(code.co_filename)
        if file.name == _DISTRIBUTED and code.co_name not in _TRANSFERS:
            # The outermost call is the one that the program made.
            collective, members = code.co_name, _members(frame.f_locals.get("group")) or members
        if not where and "torch" not in file.parts and "deepspeed" not in file.parts:
            where = f"{file.name}:{frame.f_lineno} {code.co_name}"
            if not collective and file.name not in _POINT_TO_POINT and _waits(frame):
                collective = "the wait for a collective"
                members = _members(getattr(frame.f_locals.get("self"), "_group", None))
        reads = reads or (file.name, code.co_name) == _DATA
    return Place(collective, members if collective else (), f"reading data, {where}" if reads else where)


def _frames(thread: int) -> Iterator[FrameType]:
    frame = sys._current_frames().get(thread)  # noqa: SLF001 - the documented way
    while frame is not None:
        yield frame
        frame = frame.f_back


def _waits(frame: FrameType) -> bool:
    """Whether the line is one that waits for something asynchronous."""
    return ".wait(" in linecache.getline(frame.f_code.co_filename, frame.f_lineno)


def _members(group: object) -> tuple[int, ...]:
    with suppress(Exception):  # a group of another kind, or torn down
        return tuple(dist.get_process_group_ranks(group if isinstance(group, dist.ProcessGroup) else None))
    return ()


def _machine() -> str:
    """The kernel that runs, and the namespace of process ids: a container has its own."""
    with suppress(OSError):
        return f"{_BOOT_ID.read_text().strip()} {Path('/proc/self/ns/pid').readlink()}"
    return ""


def _stat(pid: int) -> tuple[str, str]:
    """State letter and start time of a process (proc(5)); empty if there is none."""
    with suppress(OSError, IndexError):
        fields = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
        return fields[0], fields[19]
    return "X", ""
