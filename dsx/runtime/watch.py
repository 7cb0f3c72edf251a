"""A thread beside the training: it sees peers fail, runs hang and signals come, and ends the process.

Ranks speak to each other through a folder below the run's output, so that no rank, the host of torch's store
included, is needed for the others to learn what has happened. In a healthy run nothing is written there; each
rank lists the (empty) folder about once a second and looks at the processes of its machine.

A main thread that waits in a collective cannot be interrupted, neither gloo's nor NCCL's. So a watch ends
its process by ``os._exit``, after the report.
"""

from __future__ import annotations

import faulthandler
import json
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dsx.config.faults import FaultsConfig
from dsx.plan.waits import RankState, chain, diagnose, named, waits
from dsx.runtime.peers import Peer, place
from dsx.runtime.whereabouts import Whereabouts

INTERRUPTED = 130  # 128 + SIGINT

_POLL_SECONDS = 0.5
_RANKS_PER_SECOND = 500  # that look into the shared folder, so that many ranks do not wear its server out
_SPEAK_SECONDS = 1.0  # a rank that fails gets so long to say why before the others end
_LOOK_SECONDS = 0.1
_SETTLE_SECONDS = 5.0  # what ranks get to tell where they are
_SHOWN_RANKS = 16
_LAST_STEPS = 5


@dataclass(frozen=True, slots=True)
class Notice:
    """That a rank has failed.

    Attributes:
        rank: Which.
        text: What has become of it.
        code: What it exits with.
        shared: Whether every rank fails of this by itself, so that one report is enough.
    """

    rank: int
    text: str
    code: int = 1
    shared: bool = False


class Board:
    """The folder that ranks tell each other through. What cannot be written or read is passed over."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def names(self) -> frozenset[str]:
        """What has been put up. Lists the folder, which network file systems then ask for anew."""
        with suppress(OSError):
            return frozenset(entry.name for entry in os.scandir(self.folder) if entry.name[0] != ".")
        return frozenset()

    def put(self, name: str, data: Any) -> None:
        """Put up a JSON value, at once whole."""
        self.put_text(name, json.dumps(data))

    def put_text(self, name: str, text: str) -> None:
        """Put up a text, at once whole."""
        aside = self.folder / f".{name}.{os.getpid()}"
        with suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            aside.write_text(text)
            aside.replace(self.folder / name)

    def get(self, name: str) -> Any:
        """A JSON value; None if it cannot be read."""
        with suppress(OSError, ValueError):
            return json.loads((self.folder / name).read_text())
        return None

    def text(self, name: str) -> str:
        """A text; empty if it cannot be read."""
        with suppress(OSError):
            return (self.folder / name).read_text(errors="replace")
        return ""

    def notices(self) -> list[Notice]:
        """Ranks that have failed, the first to fail first."""
        names = [name for name in self.names() if name.startswith("failed-")]
        found = [self.get(name) for name in names]
        found = sorted((data for data in found if data), key=lambda data: (data["at"], data["rank"]))
        return [Notice(**{key: data[key] for key in data if key != "at"}) for data in found]


class Watch:
    """Watches one rank's main thread and the other ranks.

    Args:
        config: ``dsx.faults``.
        board: Where ranks meet.
        peers: Every rank's process, by rank.
        rank: This one.
        thread: The main thread's identity.
    """

    def __init__(
        self, config: FaultsConfig, board: Board, peers: Sequence[Peer], rank: int, thread: int
    ) -> None:
        self._config, self._board, self._peers, self._rank = config, board, peers, rank
        here = peers[rank].machine
        self._local = [peer for peer in peers if peer.rank != rank and peer.machine == here and here]
        self._main = thread
        self._whereabouts: Whereabouts | None = None
        self._pipe_peer: Callable[[int], int] = int
        self._pp_rank = 0
        self._poll_seconds = max(_POLL_SECONDS, len(peers) / _RANKS_PER_SECOND)
        self._seen: tuple[int, ...] = ()
        self._since = self._looked = time.monotonic()
        self._signalled: tuple[int, float] | None = None
        self._interrupted = self._closed = False
        self.finishing = False
        """Set when ranks may end one after the other."""
        self._awake, self._wake = socket.socketpair()
        self._awake.setblocking(False)
        self._wake.setblocking(False)
        self._wanted = {getattr(signal, name).value for name in config.stop_signals}
        self._handlers: dict[int, Any] = {}
        self._held: set[int] = set()
        self._thread = threading.Thread(target=self._run, name="dsx watch", daemon=True)

    @property
    def signal(self) -> int | None:
        """The signal that asks this rank to stop, if one has come."""
        return None if self._signalled is None else self._signalled[0]

    def start(self) -> None:
        """Take the signals over, if this is the main thread, and begin."""
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

    def follow(self, whereabouts: Whereabouts, pp_rank: int, pipe_peer: Callable[[int], int]) -> None:
        """From here on read where the main thread is from ``whereabouts``.

        Args:
            whereabouts: The engine's.
            pp_rank: This rank's pipeline coordinate.
            pipe_peer: Global rank of a pipeline coordinate.
        """
        self._pp_rank, self._pipe_peer, self._whereabouts = pp_rank, pipe_peer, whereabouts

    def failed(self, text: str, *, code: int, shared: bool) -> None:
        """Have the other ranks end: this one is about to. See :class:`Notice`."""
        self._put_notice(Notice(self._rank, text, code, shared))

    def close(self) -> None:
        """End the thread and give the signals back, but those that have come: more of them may."""
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
        self._awake.close()
        self._wake.close()

    def _hold_signals(self) -> None:
        """Before a fork: until the child has forgotten the run, a signal to it waits."""
        if self._handlers:
            self._held = signal.pthread_sigmask(signal.SIG_BLOCK, self._handlers)

    def _let_signals(self) -> None:
        if self._handlers:
            signal.pthread_sigmask(signal.SIG_SETMASK, self._held)

    def _forget(self) -> None:
        """In a forked child: a signal to it is none to the run."""
        if self._handlers:
            signal.set_wakeup_fd(-1)
            for number, handler in self._handlers.items():
                signal.signal(number, handler)
        self._let_signals()

    def _run(self) -> None:
        try:
            while not self._closed:
                self._look()
                self._sleep(self._poll_seconds)
        except Exception:  # noqa: BLE001 - a run must not end because of who watches it
            self._say(f"the watch has failed and looks no more:\n{traceback.format_exc()}")

    def _sleep(self, seconds: float) -> None:
        """Wait, or until a signal comes."""
        select.select([self._awake], [], [], seconds)
        with suppress(BlockingIOError):
            for number in self._awake.recv(64):
                self._interrupted |= number == signal.SIGINT and number not in self._wanted
                if number in self._wanted and self._signalled is None:
                    self._signalled = number, time.monotonic()

    def _look(self) -> None:
        now = time.monotonic()
        notices = self._board.notices()
        if not notices and not self.finishing:
            notices = self._gone()
        if notices and not self._closed:
            self._end_after(notices[0])
        idle = self._idle_seconds(now)
        stalled = 0 < self._config.hang_seconds < idle
        if stalled or any(name.startswith("rank-") for name in self._board.names()):
            self._end_hung(idle)
        if self._signalled is not None and now - self._signalled[1] > self._config.grace_seconds:
            self._end_unsaved(idle)
        self._looked = now

    def _gone(self) -> list[Notice]:
        """Peers on this machine whose process has ended; told to the others, unless they say why."""
        gone = [Notice(peer.rank, fate) for peer in self._local if "gone" in (fate := peer.fate())]
        found = self._board.notices() if gone else []
        if not found:
            for notice in gone:
                self._put_notice(notice)
        return found or gone

    def _idle_seconds(self, now: float) -> float:
        """How long the main thread has not moved since it was followed."""
        here = self._whereabouts
        seen = () if here is None else (here.moves, here.at, here.position())
        # A watch that was stopped itself has seen nothing meanwhile.
        was_stopped = now - self._looked > self._poll_seconds + _SETTLE_SECONDS
        if here is None or seen != self._seen or was_stopped:
            self._seen, self._since = seen, now
        return now - self._since

    def _end_after(self, notice: Notice) -> None:
        deadline = time.monotonic() + (_SETTLE_SECONDS if notice.shared else _SPEAK_SECONDS)
        while not self._closed and time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS)
        if self._closed or notice.rank == self._rank:
            return
        if not self._interrupted and not notice.shared:
            lines = notice.text.splitlines()
            self._say(f"ended because rank {notice.rank} {lines[0]}")
        self._leave(INTERRUPTED if self._interrupted else notice.code)

    def _end_unsaved(self, idle: float) -> None:
        assert self._signalled is not None
        number, since = self._signalled
        name, passed = signal.Signals(number).name, time.monotonic() - since
        self._put_notice(Notice(self._rank, f"could not save in time after {name}", 128 + number))
        self._say(
            f"{name} came {passed:.0f} s ago, dsx.faults.grace_seconds = {self._config.grace_seconds:g}: "
            f"ended without saving ({self._state(idle)})"
        )
        self._leave(128 + number)

    def _end_hung(self, idle: float) -> None:
        """Tell where this rank is, hear the others, report and end."""
        self._put_stacks()
        here = self._state(idle)
        self._board.put(f"rank-{self._rank}", asdict(here))
        # Where nothing can be written, the disk being full, each knows of itself alone.
        alone, told = self._rank not in self._told(), {self._rank: here}
        deadline = time.monotonic() + _SETTLE_SECONDS + 2 * self._poll_seconds
        stopped = {peer.rank for peer in self._local if peer.fate()}
        while time.monotonic() < deadline and len(told) + len(stopped) < len(self._peers):
            time.sleep(_LOOK_SECONDS)
            told |= self._told()
        if min(told) == self._rank:
            report = self._report(told)
            self._board.put_text("report.txt", report)
            os.write(sys.stderr.fileno(), f"{report}\n".encode())
        else:
            while time.monotonic() < deadline + _SETTLE_SECONDS and "report.txt" not in self._board.names():
                time.sleep(_LOOK_SECONDS)
        for peer in self._local:
            if peer.fate() if alone else peer.rank not in told:  # it cannot end by itself
                peer.kill()
        self._leave(1)

    def _told(self) -> dict[int, RankState]:
        names = [name for name in self._board.names() if name.startswith("rank-")]
        found = [_decoded(data) for data in map(self._board.get, names) if data]
        return {state.rank: state for state in sorted(found, key=lambda state: state.rank)}

    def _report(self, told: Mapping[int, RankState]) -> str:
        """Who holds the run up, where the ranks are, and stacks."""
        found = diagnose(told, len(self._peers))
        lines = [f"error: the run does not go on: {found.text}"]
        culprits = [rank for rank in found.culprits if rank in told]
        path = chain(told, found.culprits[0])
        first = dict.fromkeys((*path, *culprits, *told))
        lines += [f"  {told[rank]}" for rank in [*first][:_SHOWN_RANKS] if rank in told]
        if len(told) > _SHOWN_RANKS:
            lines.append(f"  and {len(told) - _SHOWN_RANKS} more ranks")
        speaker = told[self._rank]
        if speaker.step_seconds:
            times = ", ".join(f"{seconds:.3g}" for seconds in speaker.step_seconds[-_LAST_STEPS:])
            lines.append(f"  last steps of rank {self._rank} took {times} s")
        shown = culprits[0] if culprits else path[0] if path[0] in told else self._rank
        stacks = self._board.text(f"stacks-{shown}.txt")
        if not stacks:
            return "\n".join([*lines, f"  {self._board.folder} cannot be written: no stacks, no other ranks"])
        lines.append(f"  stacks of rank {shown}:")
        threads = [thread for thread in stacks.split("\n\n") if Path(__file__).name not in thread]
        lines += [f"    {line}" for thread in threads for line in thread.splitlines()]
        lines.append(f"  stacks of {named(tuple(told))} are in {self._board.folder}")
        return "\n".join(lines)

    def _state(self, idle: float) -> RankState:
        found, here = place(self._main), self._whereabouts
        action, says, ranks = "", "", tuple[int, ...]()
        schedule, at = (None, 0) if here is None else (here.schedule, here.position())
        if schedule is not None:
            row = schedule.rows[self._pp_rank]
            action = str(row[at]) if at < len(row) else ""
            says, stages = waits(schedule, self._pp_rank, at)
            ranks = tuple(self._pipe_peer(stage) for stage in stages)
            says = says.format(", ".join(map(str, ranks)))
        return RankState(
            rank=self._rank,
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

    def _put_notice(self, notice: Notice) -> None:
        self._board.put(f"failed-{notice.rank}", {**asdict(notice), "at": time.time()})

    def _put_stacks(self) -> None:
        with suppress(OSError):
            self._board.folder.mkdir(parents=True, exist_ok=True)
            with (self._board.folder / f"stacks-{self._rank}.txt").open("w") as file:
                faulthandler.dump_traceback(file, all_threads=True)

    def _say(self, text: str) -> None:
        """Past Python's buffers, whose locks the main thread may hold."""
        os.write(sys.stderr.fileno(), f"[rank {self._rank}] {text}\n".encode())

    def _leave(self, code: int) -> None:
        os._exit(code)


def _noted(number: int, frame: object) -> None:
    """Python's half of a stop signal: nothing, as the watch has its number."""


def _decoded(data: Mapping[str, Any]) -> RankState:
    """What :func:`dataclasses.asdict` and JSON made of a state."""
    lists = {key: tuple(value) for key, value in data.items() if isinstance(value, list)}
    return RankState(**{**data, **lists, "saw": {int(rank): fate for rank, fate in data["saw"].items()}})
