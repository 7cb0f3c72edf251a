"""A thread beside the training that sees peers fail, runs hang and signals come, and ends the process.

Each rank hears through its connections that another is lost (:mod:`dsx.fault_tolerance.keepalive`). Where
each is in a run that hangs, the ranks tell each other through a folder below the run's output. No rank, the
host of torch's store included, is needed for the others to learn what has happened, and in a healthy run
nothing is sent or written.

A main thread that waits in a collective of gloo or NCCL cannot be interrupted, so a watch ends its process by
``os._exit``, after the report.
"""

from __future__ import annotations

import faulthandler
import json
import linecache
import os
import re
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed as dist

from dsx.config.schema import FaultsConfig
from dsx.engine.rank_progress import RankProgress
from dsx.fault_tolerance.keepalive import Keepalive, LocalPeer, Peer, hosts_of
from dsx.fault_tolerance.waits import (
    Notice,
    RankState,
    chain,
    clock,
    diagnose,
    first,
    located,
    messages,
    sentence,
    waits,
)
from dsx.launch.entry import launched
from dsx.terminal import complain


class Board:
    """The folder through which ranks tell each other. What cannot be written or read is skipped."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def names(self) -> frozenset[str]:
        """The names that have been put up. Listing the folder makes network file systems ask for it anew."""
        with suppress(OSError):
            return frozenset(entry.name for entry in os.scandir(self.folder) if entry.name[0] != ".")
        return frozenset()

    def put_text(self, name: str, text: str) -> None:
        aside = self.folder / f".{name}.{os.getpid()}"
        with suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            aside.write_text(text)
            aside.replace(self.folder / name)

    def text(self, name: str) -> str:
        """A text; empty if it cannot be read."""
        with suppress(OSError):
            return (self.folder / name).read_text(errors="replace")
        return ""

    def put_stacks(self, name: str) -> None:
        with suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            with (self.folder / name).open("w") as file:
                faulthandler.dump_traceback(file, all_threads=True)


_SHOWN_RANKS = 16
_LAST_STEPS = 5
_OWN_THREAD = "Current thread"
"""How faulthandler heads the stack of the thread that calls it, which is not shown."""


def report_of(told: Mapping[int, RankState], speaker: int, hosts: Sequence[str], board: Board) -> str:
    """The report: who holds the run up, since when, where the ranks are, and stacks."""
    found = diagnose(told, hosts)
    since = clock(time.time() - max(state.idle_seconds for state in told.values()))
    lines = [f"error: the run does not go on since {since}: {found.text}"]
    culprits = [rank for rank in found.culprits if rank in told]
    path = chain(told, found.culprits[0])
    first = dict.fromkeys((*path, *culprits, *told))
    lines += [f"  {told[rank]}" for rank in [*first][:_SHOWN_RANKS] if rank in told]
    if len(told) > _SHOWN_RANKS:
        lines.append(f"  and {len(told) - _SHOWN_RANKS} more ranks")
    own = told[speaker]
    if own.step_seconds:
        times = ", ".join(f"{seconds:.3g}" for seconds in own.step_seconds[-_LAST_STEPS:])
        lines.append(f"  last steps of {own.name} took {times} s")
    shown = culprits[0] if culprits else path[0] if path[0] in told else speaker
    stacks = board.text(f"stacks-{shown}.txt")
    if not stacks:
        return "\n".join([*lines, f"  {board.folder} cannot be written: no stacks, no other ranks"])
    lines.append(f"  stacks of {located([shown], hosts)}:")
    threads = [thread for thread in stacks.split("\n\n") if not thread.startswith(_OWN_THREAD)]
    lines += [f"    {line}" for thread in threads for line in thread.splitlines()]
    lines.append(f"  stacks of {located(told, hosts)} are in {board.folder}")
    return "\n".join(lines)


INTERRUPTED = 130  # 128 + SIGINT
_SAVES_FIRST = (
    'Ctrl-C ends a run at once; with dsx.faults.stop_signals = ["SIGTERM", "SIGINT"] it saves before it ends'
)

_POLL_SECONDS = 0.5
_SPEAK_SECONDS = 1.0  # in this time it is heard who else is lost, and why
_SILENT_SPEAK_SECONDS = 0.3  # the others have known of a machine that does not answer for as long
_OWN_WORD_SECONDS = 0.3  # an error that only follows from a lost rank yields to the loss for so long
_LOOK_SECONDS = 0.1
_SETTLE_SECONDS = 5.0  # the time that ranks get to tell where they are
_STOPPED_SECONDS = 5.0  # a debugger that stops a rank for less is not worth a line


class Watch:
    """Watches one rank's main thread and the other ranks."""

    def __init__(
        self,
        config: FaultsConfig,
        board: Board,
        peers: Sequence[Peer],
        rank: int,
        thread: int,
        keepalive: Keepalive,
    ) -> None:
        self._config, self._board, self._peers, self._rank = config, board, peers, rank
        self._keepalive, self._hosts = keepalive, hosts_of(peers)
        self._launcher, self._orphaned = os.getppid(), False
        self._stopped: dict[int, float] = {}
        here = peers[rank].machine
        others = [peer for peer in peers if peer.rank != rank and peer.machine == here and here]
        self._local = [LocalPeer(peer) for peer in others]
        self._main = thread
        self._rank_progress: RankProgress | None = None
        self._pipe_peer: Callable[[int], int] = int
        self._pp_rank = 0
        self._seen: tuple[int, ...] = ()
        self._since = self._looked = time.monotonic()
        self._signalled: tuple[int, float] | None = None
        self._interrupted = self._closed = False
        self._standing: Callable[[], str] | None = None
        self._own_error = ""
        self._awake, self._wake = socket.socketpair()
        self._awake.setblocking(False)
        self._wake.setblocking(False)
        self._keepalive.wake_by(self._awake)
        self._wanted = {getattr(signal, name).value for name in config.stop_signals}
        self._handlers: dict[int, Any] = {}
        self._held: set[int] = set()
        self._thread = threading.Thread(target=self._run, name="dsx watch", daemon=True)

    @property
    def signal(self) -> int | None:
        """The signal that asks this rank to stop, if one has come."""
        return None if self._signalled is None else self._signalled[0]

    def start(self) -> None:
        """Install the signal handlers, if this is the main thread, and begin."""
        if threading.current_thread() is threading.main_thread():
            # The C handler writes the signal's number there at once, even while the main thread is in a
            # collective, where Python's own handlers have to wait.
            signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
            for number in self._wanted:
                self._handlers[number] = signal.signal(number, _noted)
            os.register_at_fork(
                before=self._hold_signals, after_in_parent=self._let_signals, after_in_child=self._forget
            )
        self._thread.start()

    def follow(
        self,
        rank_progress: RankProgress,
        pp_rank: int,
        pipe_peer: Callable[[int], int],
        standing: Callable[[], str] | None = None,
    ) -> None:
        """From now on, learn from ``rank_progress`` where the main thread is.

        ``standing`` gives the line that Ctrl-C ends with, on the rank that prints it.
        """
        self._standing = standing
        self._pp_rank, self._pipe_peer, self._rank_progress = pp_rank, pipe_peer, rank_progress

    def failed(self, text: str, *, code: int, shared: bool, at: float) -> None:
        """Have the other ranks end: this one is about to. See :class:`Notice`."""
        self._keepalive.tell(
            Notice(rank=self._rank, by=self._rank, since=at, text=text, code=code, shared=shared)
        )

    def give_way(self, text: str, *, at: float, seconds: float = _OWN_WORD_SECONDS) -> None:
        """Before an error is reported: if it only follows from another rank's loss, end because of that.

        ``text`` says why this rank failed, if that is new, and ``at`` when, in seconds since the epoch. News
        of such a loss is waited for ``seconds``.
        """
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            lost = [notice for notice in self._keepalive.lost().values() if notice.rank != self._rank]
            if lost and not first(lost).shared and (first(lost).since <= at + _LOOK_SECONDS or not text):
                self._own_error = text
                self._thread.join()  # it ends this process
            time.sleep(_LOOK_SECONDS / 10)

    def end_disconnected(self, error: BaseException, *, at: float) -> None:
        """End because a connection to another rank broke, of which nothing more is known. Does not return."""
        lines = str(error).splitlines()
        found = [
            located([peer.rank], self._hosts)
            for peer in self._peers
            if any(
                re.search(rf"(?<![\d.]){re.escape(address)}(?![\d.])", lines[0]) for address in peer.addresses
            )
        ]
        text = f"lost its connection to {' or '.join(found) or 'another rank'}"
        self.failed(text, code=1, shared=False, at=at)
        self._say(f"ended because it {text} (at {clock(at)}): {lines[0]}")
        self._leave(1)

    def close(self) -> None:
        """End the thread and restore the signal handlers, but not for signals that have come, as more may."""
        self._closed = True
        with suppress(OSError):
            self._wake.send(b"\0")
        self._thread.join()
        if self._handlers:
            signal.set_wakeup_fd(-1)
            for number, handler in self._handlers.items():
                if self._signalled is None:
                    signal.signal(number, handler)
        self._handlers = {}
        self._keepalive.close()
        self._awake.close()
        self._wake.close()

    def _hold_signals(self) -> None:
        """Before a fork: signals to the child wait until it has forgotten the run."""
        if self._handlers:
            self._held = signal.pthread_sigmask(signal.SIG_BLOCK, self._handlers)

    def _let_signals(self) -> None:
        if self._handlers:
            signal.pthread_sigmask(signal.SIG_SETMASK, self._held)

    def _forget(self) -> None:
        """In a forked child: make a signal to it none to the run."""
        if self._handlers:
            signal.set_wakeup_fd(-1)
            for number, handler in self._handlers.items():
                signal.signal(number, handler)
        self._let_signals()

    def _run(self) -> None:
        try:
            while not self._closed:
                self._look()
                self._sleep(_POLL_SECONDS)
        except Exception:  # noqa: BLE001 - a run must not end because of who watches it
            self._say(f"the watch has failed and looks no more:\n{traceback.format_exc()}")

    def _sleep(self, seconds: float) -> None:
        """Wait until a signal or news of the others come, or for so long."""
        self._keepalive.wait(seconds)
        with suppress(BlockingIOError):
            for number in self._awake.recv(64):
                if number == signal.SIGINT and number not in self._wanted:
                    self.interrupted()
                if number in self._wanted and self._signalled is None:
                    self._signalled = number, time.monotonic()

    def interrupted(self) -> None:
        """Ctrl-C has come: say once where the run stands, and how another one would save first."""
        self._interrupted, standing, self._standing = True, self._standing, None
        if standing is not None:
            complain(f"{standing()}\n{_SAVES_FIRST}", raw=True)

    def _look(self) -> None:
        now = time.monotonic()
        if self._keepalive.lost() and not self._closed:
            self._end_after_loss()
        self._look_around()
        warnings = self._keepalive.warnings
        while warnings:
            text = warnings.pop(0)
            if self._speaks():
                self._say(f"warning: {text}")
        idle = self._idle_seconds(now)
        if self._keepalive.hung or 0 < self._config.hang_seconds < idle:
            self._end_hung(idle)
        if self._signalled is not None and now - self._signalled[1] > self._config.grace_seconds:
            self._end_unsaved(idle)
        self._looked = now

    def _look_around(self) -> None:
        """Find what ends nothing by itself but should be known on every console."""
        if not self._speaks():
            return
        now = time.time()
        for peer in self._local:
            stopped = "stopped" in peer.fate()
            since = self._stopped.setdefault(peer.rank, now) if stopped else self._stopped.pop(peer.rank, now)
            name = located([peer.rank], self._hosts)
            if now - since > _STOPPED_SECONDS:
                self._keepalive.warn(
                    f"{name} is stopped since {clock(since)} (SIGSTOP, a debugger?): the others wait for it"
                    if stopped
                    else f"{name}, which was stopped at {clock(since)}, goes on"
                )
        if os.getppid() != self._launcher and launched() and not self._orphaned:
            self._orphaned = True
            ranks = [self._rank, *(peer.rank for peer in self._local)]
            self._keepalive.warn(
                f"the launcher of {located(ranks, self._hosts)} (process {self._launcher}) has ended at "
                f"{clock(now)}: they train on, but nothing will end or restart them when one fails"
            )

    def _speaks(self) -> bool:
        """Whether this rank prints on its machine's console."""
        lost = self._keepalive.lost()
        return not any(
            peer.rank < self._rank and peer.rank not in lost and not peer.fate() for peer in self._local
        )

    def _idle_seconds(self, now: float) -> float:
        """How long the main thread has not moved since it was followed."""
        here = self._rank_progress
        seen = () if here is None else (here.moves, here.at, here.position())
        # A watch that was stopped itself has seen nothing in that time.
        was_stopped = now - self._looked > _POLL_SECONDS + _SETTLE_SECONDS
        if here is None or seen != self._seen or was_stopped:
            self._seen, self._since = seen, now
        return now - self._since

    def _end_after_loss(self) -> None:
        """Hear who else is lost, print in one line why this run ends, and end."""
        cause, speaks = first(self._keepalive.lost().values()), self._speaks()
        seconds = _SILENT_SPEAK_SECONDS if cause.silent else _SPEAK_SECONDS
        deadline = time.monotonic() + (_SETTLE_SECONDS if cause.shared else seconds)
        while not self._closed and time.monotonic() < deadline:
            self._sleep(_LOOK_SECONDS)
        lost = self._keepalive.lost()
        cause = first(lost.values())
        if self._closed or cause.rank == cause.by == self._rank:
            return
        if not self._interrupted and not cause.shared and (speaks or self._own_error):
            after = f"; then this rank {self._own_error.splitlines()[0]}" if self._own_error else ""
            self._say(f"ended because {sentence(lost, self._hosts, self._hosts[self._rank])}{after}")
        self._leave(INTERRUPTED if self._interrupted else cause.code)

    def _end_unsaved(self, idle: float) -> None:
        assert self._signalled is not None
        number, since = self._signalled
        name, passed = signal.Signals(number).name, time.monotonic() - since
        text = f"could not save in time after {name}"
        self.failed(text, code=128 + number, shared=False, at=time.time())
        self._say(
            f"{name} came {passed:.0f} s ago, dsx.faults.grace_seconds = {self._config.grace_seconds:g}: "
            f"ended without saving ({self._state(idle)})"
        )
        self._leave(128 + number)

    def _end_hung(self, idle: float) -> None:
        """Tell where this rank is, hear the others, report and end."""
        self._keepalive.tell_hung()
        self._board.put_stacks(f"stacks-{self._rank}.txt")
        here = self._state(idle)
        self._board.put_text(f"rank-{self._rank}", json.dumps(asdict(here)))
        # Where nothing can be written, because the disk is full, each rank knows of itself alone.
        alone, told = self._rank not in self._told(), {self._rank: here}
        deadline = time.monotonic() + _SETTLE_SECONDS + 2 * _POLL_SECONDS
        stopped = {peer.rank for peer in self._local if peer.fate()}
        while time.monotonic() < deadline and len(told) + len(stopped) < len(self._peers):
            time.sleep(_LOOK_SECONDS)
            told |= self._told()
        if min(told) == self._rank:
            report = report_of(told, self._rank, self._hosts, self._board)
            self._board.put_text("report.txt", report)
            complain(report, raw=True)
        else:
            while time.monotonic() < deadline + _SETTLE_SECONDS and "report.txt" not in self._board.names():
                time.sleep(_LOOK_SECONDS)
            if self._hosts[min(told)] != self._hosts[self._rank] and self._speaks():
                text = self._board.text("report.txt") or report_of(told, self._rank, self._hosts, self._board)
                complain(text.splitlines()[0], raw=True)
        for peer in self._local:
            if peer.fate() if alone else peer.rank not in told:  # it cannot end by itself
                peer.kill()
        self._leave(1)

    def _told(self) -> dict[int, RankState]:
        found = []
        for name in self._board.names():
            if name.startswith("rank-"):
                with suppress(ValueError):  # it cannot be read
                    found.append(_decoded(json.loads(self._board.text(name))))
        return {state.rank: state for state in sorted(found, key=lambda state: state.rank)}

    def _state(self, idle: float) -> RankState:
        found, here = place(self._main), self._rank_progress
        action, says, ranks = "", "", tuple[int, ...]()
        awaits, sent, sending = "", tuple[str, ...](), ""
        schedule, at = (None, 0) if here is None else (here.schedule, here.position())
        if schedule is not None:
            row = schedule.rows[self._pp_rank]
            action = str(row[at]) if at < len(row) else ""
            says, stages = waits(schedule, self._pp_rank, at)
            ranks = tuple(self._pipe_peer(stage) for stage in stages)
            says = says.format(located(ranks, self._hosts))
            awaits, sent, sending = messages(schedule, self._pp_rank, at)
        return RankState(
            rank=self._rank,
            host=self._hosts[self._rank],
            runs=0 if here is None else here.runs,
            awaits=awaits,
            sent=sent,
            sending=sending,
            step=0 if here is None else here.step,
            phase="start" if here is None else here.phase,
            action=action,
            says=says,
            waits_for=ranks,
            collective=found.collective,
            members=found.members,
            where=found.where,
            idle_seconds=idle,
            step_seconds=() if here is None else tuple(here.step_seconds),
            saw={peer.rank: fate for peer in self._local if (fate := peer.fate())},
        )

    def _say(self, text: str) -> None:
        name = located([self._rank], self._hosts)
        complain(f"[{name}] {text}", raw=True)

    def _leave(self, code: int) -> None:
        self._keepalive.close()
        os._exit(code)


def _noted(number: int, frame: object) -> None:
    """Python's half of a stop signal, which does nothing because the watch has the signal's number."""


def _decoded(data: Mapping[str, Any]) -> RankState:
    """A state from what :func:`dataclasses.asdict` and JSON have made of it."""
    lists = {key: tuple(value) for key, value in data.items() if isinstance(value, list)}
    return RankState(**{**data, **lists, "saw": {int(rank): fate for rank, fate in data["saw"].items()}})


_TRANSFERS = ("send", "recv", "isend", "irecv")
_DISTRIBUTED = "torch.distributed.distributed_c10d"
_POINT_TO_POINT = ("dsx.engine.p2p", "threading")
_DATA = ("dsx.engine.micro_batches", "_next")


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
            line = linecache.getline(code.co_filename, frame.f_lineno)
            if not collective and module not in _POINT_TO_POINT and ".wait(" in line:
                collective = "the wait for a collective"
                members = _members(getattr(frame.f_locals.get("self"), "_group", None))
        reads = reads or (module, code.co_name) == _DATA
    return Place(collective, members if collective else (), f"reading data, {where}" if reads else where)


def _frames(thread: int) -> Iterator[FrameType]:
    frame = sys._current_frames().get(thread)  # noqa: SLF001 - the documented way
    while frame is not None:
        yield frame
        frame = frame.f_back


def _members(group: object) -> tuple[int, ...]:
    with suppress(Exception):  # a group of another kind, or torn down
        return tuple(dist.get_process_group_ranks(group if isinstance(group, dist.ProcessGroup) else None))
    return ()
