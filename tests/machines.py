"""Several machines in one: each has a network, a process table, a host name and an sshd of its own.

with machines.started(3, folder) as (node1, node2, node3):
    running = node1.run(["hostname"])         # a console, line by line, with the time that each line came
    node2.kill()                              # a power cut: all its processes end
    node3.cut()                               # its cable pulled: nothing comes and nothing is refused

They are namespaces of this kernel (network, pid, mount, UTS) on a bridge in a network namespace of its own,
with addresses 10.77.0.1 and up, which exist nowhere else. Needs root, iproute2, util-linux and openssh.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

_NEEDED = ("ip", "unshare", "nsenter", "mount", "ssh-keygen", "ssh")
_SSHD = "/usr/sbin/sshd"
_START_SECONDS = 20.0

_BOOT = """
set -e
ip link set lo up
hostname {name}
mount --make-rprivate /
mount -t tmpfs tmpfs /run
mkdir -p /run/sshd
mount --bind {folder}/hosts /etc/hosts
mount --bind {folder}/ssh_config /etc/ssh/ssh_config
{mounts}
{sshd} -f {folder}/sshd_config -E {folder}/{name}.sshd
touch {folder}/{name}.up
exec sleep infinity
"""


def missing(*, networks_alone: bool = False) -> str:
    """What this machine lacks for it, or for :func:`bridge` and :func:`cabled` alone; empty if nothing."""
    if os.geteuid() != 0:
        return "needs root, for network namespaces"
    needed = ("ip", "tc", "unshare") if networks_alone else _NEEDED
    lacking = [name for name in needed if shutil.which(name) is None]
    lacking += [] if networks_alone or Path(_SSHD).exists() else [_SSHD]
    if lacking:
        return f"needs {', '.join(lacking)}"
    tried = subprocess.run(["unshare", "--net", "--pid", "--fork", "true"], check=False)
    return "" if tried.returncode == 0 else "namespaces are not permitted here"


@dataclass(frozen=True)
class Line:
    """A line on a console, and when it came (``time.monotonic``)."""

    text: str
    at: float


class Console:
    """A command at work on a machine."""

    def __init__(self, process: subprocess.Popen[str], name: str) -> None:
        self._process, self.name = process, name
        self.lines: list[Line] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for text in self._process.stdout:
            self.lines.append(Line(text.rstrip("\n"), time.monotonic()))

    @property
    def text(self) -> str:
        """All that it has said."""
        return "\n".join(line.text for line in self.lines)

    @property
    def code(self) -> int | None:
        """Its exit code; None while it runs."""
        return self._process.poll()

    def wait_for(self, wanted: Callable[[str], bool], seconds: float, *, after: float = 0.0) -> Line:
        """The first line that is ``wanted`` and came later than ``after``."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            for line in [*self.lines]:
                if line.at > after and wanted(line.text):
                    return line
            time.sleep(0.02)
        raise AssertionError(f"{self.name}: no such line in {seconds:.0f} s:\n{self.text}")

    def end(self, seconds: float) -> int:
        """Wait for its end; gives its exit code."""
        code = self._process.wait(seconds)
        self._reader.join(seconds)
        return code

    def close(self) -> None:
        """Kill it."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._reader.join(5)


@dataclass
class Machine:
    """One of them.

    Attributes:
        name: Its host name.
        address: Its IP address.
        pid: Of its process 1, as seen from outside.
    """

    name: str
    address: str
    pid: int
    _hub: str
    _consoles: list[Console] = field(default_factory=list)

    def run(self, command: Sequence[str], environment: Mapping[str, str] | None = None) -> Console:
        """Start a command there."""
        inside = ["nsenter", "-t", str(self.pid), "--net", "--pid", "--mount", "--uts", f"--wd={Path.cwd()}"]
        process = subprocess.Popen(
            [*inside, *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=os.environ | dict(environment or {}),
            text=True,
            start_new_session=True,
        )
        self._consoles.append(Console(process, self.name))
        return self._consoles[-1]

    def kill(self) -> float:
        """End its process 1, and with it all others there; gives the time (``time.monotonic``)."""
        at = time.monotonic()
        os.kill(self.pid, signal.SIGKILL)
        return at

    def cut(self) -> float:
        """Take it off the network, without a word to anybody; gives the time (``time.monotonic``)."""
        at = time.monotonic()
        cut(self._hub, self.name)
        return at

    def close(self) -> None:
        """End all that runs there."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        for console in self._consoles:
            console.close()


@contextmanager
def started(
    count: int, folder: Path, mounts: Mapping[str, Mapping[Path, Path]] | None = None
) -> Iterator[list[Machine]]:
    """So many machines, node1 and up, that reach each other by name and by ssh without a password.

    Args:
        count: How many.
        folder: For their keys and configurations.
        mounts: Machine -> path there -> what is to be seen at that path instead.
    """
    names = [f"node{index}" for index in range(1, count + 1)]
    addresses = [f"10.77.0.{index}" for index in range(1, count + 1)]
    _write_files(folder, names, addresses)
    with ExitStack() as stack:
        hub = stack.enter_context(bridge())
        found = []
        for name, address in zip(names, addresses, strict=True):
            binds = "\n".join(
                f"mount --bind {source} {path}" for path, source in (mounts or {}).get(name, {}).items()
            )
            script = _BOOT.format(name=name, folder=folder, sshd=_SSHD, mounts=binds)
            found.append(stack.enter_context(_machine(hub, name, address, script, folder)))
        yield found


@contextmanager
def bridge() -> Iterator[str]:
    """The name of a network namespace with nothing but a bridge, to which others are cabled."""
    hub = f"dsx{os.getpid()}"
    with _namespace(hub):
        _ip("-n", hub, "link", "add", "bridge", "type", "bridge")
        _ip("-n", hub, "link", "set", "bridge", "up")
        yield hub


@contextmanager
def cabled(hub: str, name: str, address: str) -> Iterator[str]:
    """The name of a network namespace whose eth0 is on the bridge, with that address."""
    with _namespace(f"{hub}{name}") as space:
        port = _port(name)
        _ip("-n", hub, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", space)
        _ip("-n", hub, "link", "set", port, "master", "bridge", "up")
        _ip("-n", space, "address", "add", f"{address}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            _ip("-n", space, "link", "set", device, "up")
        yield space


def cut(hub: str, name: str) -> None:
    """Pull the cable of :func:`cabled`: nothing comes and nothing is refused."""
    _ip("-n", hub, "link", "set", _port(name), "nomaster")


def mend(hub: str, name: str) -> None:
    """Put the cable back."""
    _ip("-n", hub, "link", "set", _port(name), "master", "bridge")


def limit(space: str, kbit: int) -> None:
    """Let no more than so many thousand bits a second leave a namespace."""
    bucket = ("tbf", "rate", f"{kbit}kbit", "burst", "4kb", "latency", "1s")
    subprocess.run(["tc", "-n", space, "qdisc", "replace", "dev", "eth0", "root", *bucket], check=True)


@contextmanager
def _machine(hub: str, name: str, address: str, script: str, folder: Path) -> Iterator[Machine]:
    boot = ["unshare", "--pid", "--fork", "--kill-child", "--mount", "--uts", "--mount-proc"]
    with (
        cabled(hub, name, address) as space,
        subprocess.Popen(["ip", "netns", "exec", space, *boot, "sh", "-c", script]) as outer,
    ):
        try:
            machine = Machine(name, address, _booted(outer.pid, folder / f"{name}.up"), hub)
            try:
                yield machine
            finally:
                machine.close()
        finally:
            outer.kill()


@contextmanager
def _namespace(name: str) -> Iterator[str]:
    _ip("netns", "add", name)
    try:
        yield name
    finally:
        _ip("netns", "del", name)


def _port(name: str) -> str:
    """The bridge's end of a cable."""
    return f"to-{name}"


def _booted(outer: int, sign: Path) -> int:
    """Process 1 of a machine, as seen from outside, once it is up."""
    deadline = time.monotonic() + _START_SECONDS
    while not sign.exists():
        assert time.monotonic() < deadline, f"no {sign}"
        time.sleep(0.02)
    return int(Path(f"/proc/{outer}/task/{outer}/children").read_text().split()[0])


def _write_files(folder: Path, names: list[str], addresses: list[str]) -> None:
    for key in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / key], check=True)
    places = "".join(f"{address} {name}\n" for address, name in zip(addresses, names, strict=True))
    (folder / "hosts").write_text(f"127.0.0.1 localhost\n{places}")
    (folder / "sshd_config").write_text(
        f"Port 22\nHostKey {folder}/host\nAuthorizedKeysFile {folder}/user.pub\nPermitRootLogin yes\n"
        "StrictModes no\nUsePAM no\nPidFile none\nMaxStartups 100\n"
    )
    (folder / "ssh_config").write_text(
        f"Host *\nIdentityFile {folder}/user\nStrictHostKeyChecking no\nUserKnownHostsFile /dev/null\n"
        "LogLevel ERROR\n"
    )


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)
