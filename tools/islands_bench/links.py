"""Two machines with a slow link between them: network namespaces of this kernel. Needs root and iproute2.

The kernel's token bucket (tc's tbf) limits what each end sends. It has no delay of its own where netem is not
built in, so a link with delay is a pair of TUN devices, between which a thread of this process carries
packets, each so many milliseconds after it came.
"""

from __future__ import annotations

import fcntl
import os
import select
import shutil
import struct
import subprocess
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

ADDRESSES = ("10.78.0.1", "10.78.0.2")

_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_BURST_BYTES = 128 * 1024
_MOST_PACKET = 65536
_TUN_MTU = 16000  # a thread of Python passes some 10,000 packets a second


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Of a link, in each direction.

    Attributes:
        mbit: 10^6 bits a second that each end may send; None is as fast as the machine.
        delay_ms: From one end to the other.
    """

    mbit: float | None = None
    delay_ms: float = 0.0

    def __str__(self) -> str:
        rate = "no limit" if self.mbit is None else f"{self.mbit:g} Mbit/s"
        return rate + (f", {self.delay_ms:g} ms" if self.delay_ms else "")


def missing() -> str:
    """What this machine lacks for it; empty if nothing."""
    if os.geteuid() != 0:
        return "needs root, for network namespaces"
    lacking = [name for name in ("ip", "tc", "unshare") if shutil.which(name) is None]
    if lacking:
        return f"needs {', '.join(lacking)}"
    tried = subprocess.run(["unshare", "--net", "true"], check=False)  # noqa: S607
    return "" if tried.returncode == 0 else "network namespaces are not permitted here"


def inside(space: str, host: str, command: Sequence[str]) -> list[str]:
    """The command line that runs ``command`` in a namespace, as a machine of that host name."""
    named = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', host]
    return ["ip", "netns", "exec", space, *named, *command]


def bytes_sent() -> int:
    """What this namespace's end of the link has sent so far, headers included."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, figures = line.partition(":")
        if name.strip() == "eth0":
            return int(figures.split()[8])
    raise RuntimeError("not in one of the two namespaces")


@contextmanager
def connected(pace: Pace) -> Iterator[tuple[str, str]]:
    """The names of two namespaces, in which eth0 has an address each of :data:`ADDRESSES`."""
    spaces = f"dsxa{os.getpid()}", f"dsxb{os.getpid()}"
    with ExitStack() as stack:
        for space in spaces:
            stack.enter_context(alone(space))
        if pace.delay_ms:
            stack.enter_context(_carried(spaces, pace.delay_ms / 1000))
        else:
            end = ("link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", spaces[1])
            _ip("-n", spaces[0], *end)
        for space, address in zip(spaces, ADDRESSES, strict=True):
            _ip("-n", space, "address", "add", f"{address}/24", "dev", "eth0")
            _ip("-n", space, "link", "set", "eth0", "up")
            if pace.mbit is not None:
                _limit(space, pace.mbit)
        yield spaces


@contextmanager
def alone(space: str) -> Iterator[str]:
    """A namespace with a loopback of its own, where every port is free."""
    _ip("netns", "add", space)
    try:
        _ip("-n", space, "link", "set", "lo", "up")
        yield space
    finally:
        _ip("netns", "del", space)


def _limit(space: str, mbit: float) -> None:
    bucket = ("tbf", "rate", f"{mbit:g}mbit", "burst", str(_BURST_BYTES), "latency", "300ms")
    _run("tc", "-n", space, "qdisc", "add", "dev", "eth0", "root", *bucket)


@contextmanager
def _carried(spaces: tuple[str, str], delay_seconds: float) -> Iterator[None]:
    """A TUN device as eth0 in each namespace, and threads that carry packets between the two."""
    over, threads, ends = threading.Event(), [], []
    try:
        for place, space in enumerate(spaces):
            ends.append(_tun(f"dsxt{place}x{os.getpid()}"[:15], space))
        for source, target in (ends, ends[::-1]):
            carry = threading.Thread(target=_carry, args=(source, target, delay_seconds, over), daemon=True)
            carry.start()
            threads.append(carry)
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()
        for end in ends:
            os.close(end)


def _tun(name: str, space: str) -> int:
    end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(end, _TUNSETIFF, struct.pack("16sH14x", name.encode(), _IFF_TUN | _IFF_NO_PI))
    _ip("link", "set", name, "netns", space)
    _ip("-n", space, "link", "set", name, "name", "eth0", "mtu", str(_TUN_MTU))
    return end


def _carry(source: int, target: int, delay_seconds: float, over: threading.Event) -> None:
    """Write each packet that comes from ``source`` to ``target``, so much later."""
    under_way: deque[tuple[float, bytes]] = deque()
    while not over.is_set():
        wait = max(0.0, under_way[0][0] - time.monotonic()) if under_way else 0.2
        if select.select([source], [], [], wait)[0]:
            with suppress(BlockingIOError):
                while True:
                    packet = os.read(source, _MOST_PACKET)
                    under_way.append((time.monotonic() + delay_seconds, packet))
        while under_way and under_way[0][0] <= time.monotonic():
            with suppress(OSError):  # as a cable loses what nobody takes
                os.write(target, under_way.popleft()[1])


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*command: str) -> None:
    subprocess.run(command, check=True)  # noqa: S603
