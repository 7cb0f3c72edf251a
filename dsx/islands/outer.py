"""Outer steps of an island: after so many inner steps, all islands move by the mean of their movements.

DiLoCo (arXiv:2311.08105, algorithm 1): the movement of an island, its weights after the last round minus its
weights now, is a gradient for an outer optimizer, SGD with Nesterov momentum, which moves the weights that
all islands share. In shares, and while inner steps go on, as Streaming DiLoCo (arXiv:2501.18512) does it;
what inner steps have moved since a movement was sent is kept, and is part of the next movement.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from dsx.checkpoint import plain
from dsx.config.schema import OuterConfig
from dsx.engine.whereabouts import Whereabouts
from dsx.engine.zero.held import Held, refresh_weights
from dsx.errors import RunError
from dsx.islands.exchange import Exchanged, Meeting, MissedError, exchange
from dsx.islands.links import Header, Link, LinkError
from dsx.islands.state import OuterState
from dsx.islands.station import RefusedError, Station
from dsx.launch.entry import AGREED
from dsx.parallel.groups import Groups
from dsx.parallel.islands import OUTER_STATES, OUTER_WEIGHTS, Rounds, cut

_MOST_ATTEMPTS = 8
_FETCHES = 5

T = TypeVar("T")


class OuterRun(Protocol):
    """What outer steps ask of an engine; :class:`dsx.PipelineEngine` is one."""

    groups: Groups
    deepspeed_engine: Any
    pipeline: Any
    whereabouts: Whereabouts


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterReport:
    """One round of this island, over all of its ranks.

    Attributes:
        step: The inner step after which it began.
        share: Which share of the model it was about.
        islands: Islands that took part; none if this one was left out.
        moved: Those that had a movement.
        version: Rounds that are in the common weights.
        sent_bytes: Sent to other islands.
        seconds: From its beginning until the weights had moved.
        waited_seconds: Of these, the time in which training stood still.
        drift: Distance of this island's movement from the mean, over the mean's own length; None if it had
            no movement, or the mean is zero.
        movement: Length of the mean movement, over the whole share.
        caught_up: Whether this island took the common weights in place of its own.
    """

    step: int
    share: int
    islands: tuple[int, ...]
    moved: tuple[int, ...]
    version: int
    sent_bytes: int
    seconds: float
    waited_seconds: float
    drift: float | None
    movement: float
    caught_up: bool

    @property
    def hidden(self) -> float:
        """Share of its time that inner steps covered."""
        return 1 - self.waited_seconds / self.seconds if self.seconds > 0 else 0.0


@dataclass(slots=True)
class Standing:
    """What the islands' common weights are, as the island holds them.

    Attributes:
        name: Changes with every round; empty before the first.
        version: Rounds so far.
        progress: Movements of islands that have gone into them.
        facts: Inner step and learning-rate schedule of the round.
        seen: Samples that each island had trained on by then, by island.
    """

    name: str = ""
    version: int = 0
    progress: int = 0
    facts: dict[str, Any] = field(default_factory=lambda: {"step": 0, "lr_scheduler": None})
    seen: dict[str, int] = field(default_factory=dict)

    def plain(self) -> dict[str, Any]:
        """As JSON values, from which ``Standing(**plain)`` makes it again."""
        return {
            "name": self.name,
            "version": self.version,
            "progress": self.progress,
            "facts": self.facts,
            "seen": dict(self.seen),
        }


@dataclass(slots=True)
class Flight:
    """A round under way.

    Attributes:
        step: The inner step after which it began.
        share: Its share of the model.
        sent: The weights whose movement was sent.
        movement: That movement.
        moved: Whether it is to be counted.
        facts: Inner step and learning-rate schedule.
        began: When.
        thread: What carries it on.
        outcome: What came of it; None if this island was left out.
        error: What went wrong in the thread.
    """

    step: int
    share: int
    sent: list[Tensor]
    movement: list[Tensor]
    moved: bool
    facts: dict[str, Any]
    began: float = field(default_factory=time.perf_counter)
    thread: threading.Thread = field(init=False)
    outcome: Outcome | None = None
    error: Exception | None = None


@dataclass(slots=True, kw_only=True)
class Outcome:
    """A round that counts.

    Attributes:
        exchanged: The means of this rank's part, and what rounding kept back.
        decision: The council's, with the members.
        standing: Of the weights that the round leads to.
        taken: The state that this island had to take first, weights and momentum; None if it had it.
    """

    exchanged: Exchanged
    decision: Header
    standing: Standing
    taken: Tensor | None


class Outer:
    """Takes an engine's outer steps. Every rank of the island makes one and calls it alike.

    Args:
        run: The engine.
        station: This rank's connections.
        settings: The block ``dsx.outer``.
        last_step: Number of the last inner step.
        fingerprint: Says what else the ranks with the same coordinates must have in common.

    Attributes:
        state: Common weights and momentum; None before the first step.
        standing: What the common weights are.
        reports: Rounds that nobody has asked for yet, the latest last.
        news: Sentences for people that nobody has asked for yet.
    """

    def __init__(
        self, run: OuterRun, station: Station, settings: OuterConfig, *, last_step: int, fingerprint: str
    ) -> None:
        self._run, self._station, self._settings = run, station, settings
        self.rounds = Rounds(every=settings.every, shares=settings.shares, last=last_step)
        self.state: OuterState | None = None
        self.standing = Standing()
        self.reports: list[OuterReport] = []
        self.news: list[str] = []
        mesh = run.groups.mesh
        self._members: tuple[int, ...] | None = None
        # gloo, because what is said and sent lies on the host; and their own, because a thread may use them.
        self._ranks = dist.new_group(list(range(mesh.size)), backend="gloo", use_local_synchronization=True)
        whole = run.deepspeed_engine.zero_optimization_stage() == 0 and mesh.num_replicas > 1
        alike = list(mesh.group_of(run.groups.rank, *mesh.replica_axes)) if whole else []
        # At ZeRO-0 replicas hold the same: each exchanges its part, and they share what they got.
        self._replicas = (
            dist.new_group(alike, backend="gloo", use_local_synchronization=True) if whole else None
        )
        self._layout = self._layout_name(fingerprint)
        addresses: list[str] = [""] * mesh.size
        dist.all_gather_object(addresses, station.address, group=self._ranks)
        self._addresses = addresses
        self._flight: Flight | None = None
        self._joined = False
        self._saved = frozenset(OUTER_STATES)
        self._steps_since = [0] * settings.shares
        station.start(self._give_state)

    @property
    def called(self) -> bool:
        """Whether the other islands wait for this one's next round; known on rank 0."""
        delegate = self._station.delegate
        return delegate is not None and delegate.called.is_set()

    def join(self) -> None:
        """Take the newest weights of other islands, if they have trained on more than this one. Collective.

        Called before the first step, once a checkpoint is loaded if there is one. What the optimizer keeps
        stays this island's own.

        Raises:
            RunError: The others have another layout.
        """
        if self._joined:
            return
        self._joined = True
        if self.state is None:
            self.state = self._made_state()
            self.state.begin()
        for _ in range(_FETCHES):
            newest = self._agree(self._ask_newest)
            if newest is None or newest["progress"] <= self.standing.progress:
                return
            if newest["layout"] != self._layout:
                raise _other_layout(self._station.islands.index, newest["island"])
            fetched = self._fetched(newest["addresses"])
            if fetched is not None:
                standing, flat = fetched
                self._take(flat)
                self.standing = standing
                self._go_to_common_weights(range(self._settings.shares))
                self._follow(standing.facts)
                mine = standing.seen.get(str(self._station.islands.index), 0)
                inner = self._run.deepspeed_engine
                inner.global_samples = max(int(inner.global_samples), int(mine))
                self.news.append(
                    f"this island took the weights of island {newest['island']}, after {standing.version} rounds"
                )
                return

    def after_step(self, *, called: bool) -> None:
        """Do what is due after an inner step. Collective over the island.

        Args:
            called: Whether other islands wait for this one; the same on every rank.

        Raises:
            RunError: The others have another layout.
        """
        step = int(self._run.deepspeed_engine.global_steps)
        self._steps_since = [count + 1 for count in self._steps_since]
        flight, due = self._flight, self.rounds.after(step)
        due = due or int(called and flight is None)
        landing = flight is not None and (due or step - flight.step >= self._settings.delay)
        if landing:
            self.settle()
        for _ in range(due):
            self._launch(step)
            if self._settings.delay == 0 or step >= self.rounds.last:
                self.settle()

    def settle(self) -> None:
        """Wait for a round that is under way, and let the weights move. Collective."""
        flight, self._flight = self._flight, None
        if flight is None:
            return
        waited = time.perf_counter()
        with self._run.whereabouts.doing("outer step"):
            traffic = self._station.traffic
            while flight.thread.is_alive():
                flight.thread.join(1.0)
                if self._station.traffic != traffic:  # a long transfer is no hang
                    traffic = self._station.traffic
                    self._run.whereabouts.moves += 1
            if flight.error is not None:
                raise flight.error
            self._land(flight, waited)

    def facts(self) -> dict[str, Any]:
        """What checkpoints keep of this, besides :class:`OuterState`: JSON values."""
        return self.standing.plain()

    def expect(self, states: Set[str]) -> None:
        """Have the states that a checkpoint is about to be loaded into, and no other."""
        self._saved = frozenset(states).intersection(OUTER_STATES)
        self.state = self._made_state() if OUTER_WEIGHTS in states else None

    def states_of(self, part: Held) -> dict[str, Tensor]:
        """The states of one master for a checkpoint, by name; those in it while one is loaded."""
        found = {} if self.state is None else self.state.of(part)
        return {name: state for name, state in found.items() if name in self._saved}

    def restore(self, saved: dict[str, Any] | None) -> None:
        """Go on from a checkpoint that has been loaded; from its weights alone if it was of one job."""
        if saved is None or self.state is None:
            self.state, self.standing = None, Standing()
        else:
            self.standing = Standing(**saved)
        self._saved = frozenset(OUTER_STATES)
        self._steps_since = [0] * self._settings.shares
        self._joined = False

    @property
    def _state(self) -> OuterState:
        assert self.state is not None, "made before"
        return self.state

    def _made_state(self) -> OuterState:
        optimizer = self._settings.optimizer
        return OuterState(
            self._run.deepspeed_engine,
            shares=self._settings.shares,
            settings={
                "lr": optimizer.lr,
                "momentum": optimizer.momentum,
                "nesterov": optimizer.nesterov and optimizer.momentum > 0,
            },
            carries_errors=self._settings.wire == "int8",
        )

    def _launch(self, step: int) -> None:
        """Begin a round about the share whose turn it is."""
        share = self.standing.version % self._settings.shares
        state = self._state
        sent = state.read(state.ranges[share])
        movement = [before - now for before, now in zip(state.weights(share), sent, strict=True)]
        sound = torch.tensor([float(all(bool(m.isfinite().all()) for m in movement))])
        dist.all_reduce(sound, op=dist.ReduceOp.MIN, group=self._ranks)
        moved = bool(sound) and self._steps_since[share] > 0
        facts = {"step": step, "lr_scheduler": self._schedule()}
        self._flight = flight = Flight(step, share, sent, movement, moved, facts)
        self._steps_since[share] = 0

        def fly() -> None:
            try:
                flight.outcome = self._round(flight)
            except Exception as error:  # noqa: BLE001 - raised where the round is settled
                flight.error = error

        flight.thread = threading.Thread(target=fly, name="outer round", daemon=True)
        flight.thread.start()

    def _round(self, flight: Flight) -> Outcome | None:
        """Try until a round counts, or this island is left out of it. Collective."""
        about = self._about()
        for _ in range(_MOST_ATTEMPTS):
            said = {**about, "kind": "ready", "moved": flight.moved, "facts": flight.facts}
            decision = self._agree(partial(self._ask, said))
            if decision is None:
                continue
            exchanged, taken, missed = self._tried(flight, decision)
            well = self._all(exchanged is not None)
            progress = decision["progress"] + len(decision["moved"])
            report = {
                "kind": "done", "attempt": decision["attempt"], "well": well, "missed": self._missed(missed),
                "progress": progress, "version": decision["version"] + 1,
            }  # fmt: skip
            verdict = self._agree(partial(self._ask, report))
            kind = "left" if verdict is None else verdict["kind"]
            if kind == "again":
                continue
            if kind == "left":
                return None
            assert exchanged is not None and verdict is not None, "it counts"
            moved = {str(island): decision["seen"][str(island)] for island in decision["moved"]}
            standing = Standing(
                name=verdict["name"],
                version=decision["version"] + 1,
                progress=progress,
                facts=decision["facts"],
                seen={**decision["earlier_seen"], **moved},
            )
            return Outcome(exchanged=exchanged, decision=decision, standing=standing, taken=taken)
        return None

    def _tried(
        self, flight: Flight, decision: Header
    ) -> tuple[Exchanged | None, Tensor | None, int | None]:
        """One try at a round on this rank: what was exchanged, what had to be taken, and who was missed."""
        rank, me = self._run.groups.rank, self._station.islands.index
        self._station.inbox.begin(decision["attempt"])
        busy = self._busy(decision["attempt"])
        taken = None
        try:
            sponsor = decision["takes_from"].get(str(me))
            if sponsor is not None:
                fetched = self._fetched(decision["addresses"][str(sponsor)])
                if fetched is None or fetched[0].name != decision["name"]:
                    return None, None, sponsor
                taken = fetched[1]
            meeting = Meeting(
                attempt=decision["attempt"],
                members=tuple(decision["members"]),
                moved=tuple(decision["moved"]),
                addresses={int(island): its[rank] for island, its in decision["addresses"].items()},
            )
            share = decision["version"] % self._settings.shares
            pieces = self._mine(flight.movement if share == flight.share else self._state.weights(share))
            errors = self._mine(self._state.errors(share))
            return exchange(self._station, meeting, pieces, errors, self._settings.wire), taken, None
        except MissedError as error:
            return None, None, int(error.args[0])
        finally:
            busy.set()

    def _land(self, flight: Flight, waited_since: float) -> None:
        """Let the weights move, if the round counts, and report. Collective."""
        outcome = flight.outcome
        if outcome is None:
            self._report(flight, None, waited_since, 0.0, None)
            self._tell(())
            return
        state, decision = self._state, outcome.decision
        share = decision["version"] % self._settings.shares
        means = self._whole(outcome.exchanged.means, share)
        errors = self._whole(outcome.exchanged.errors, share) if outcome.exchanged.errors else []
        caught_up = outcome.taken is not None or not flight.moved
        if outcome.taken is not None:
            self._take(outcome.taken)
        with state.lock:
            state.step(share, means)
            for kept, error in zip(state.errors(share), errors, strict=True):
                kept.copy_(error)
            self.standing = outcome.standing
        length, drift = self._distances(means, flight, share)
        if caught_up:
            self._go_to_common_weights(
                range(self._settings.shares) if outcome.taken is not None else [share]
            )
        else:
            now = state.read(state.ranges[share])
            common = state.weights(share)
            values = [
                # Where nothing has moved since, the common weights themselves: a sum would round.
                torch.where(here == before, after, after + (here - before))
                for after, here, before in zip(common, now, flight.sent, strict=True)
            ]
            state.write(state.ranges[share], values)
            refresh_weights(self._run.deepspeed_engine)
        self._follow(outcome.standing.facts)
        self._report(flight, outcome, waited_since, length, drift if flight.moved else None)
        self._tell(tuple(decision["members"]))

    def _go_to_common_weights(self, shares: Sequence[int]) -> None:
        state = self._state
        for share in shares:
            state.write(state.ranges[share], state.weights(share))
            self._steps_since[share] = 0
        refresh_weights(self._run.deepspeed_engine)

    def _follow(self, facts: dict[str, Any]) -> None:
        """Go on with the step number and the learning rate of the others, if they are ahead."""
        inner = self._run.deepspeed_engine
        if int(facts["step"]) <= int(inner.global_steps):
            return
        inner.global_steps = int(facts["step"])
        if inner.lr_scheduler is not None and facts["lr_scheduler"] is not None:
            inner.lr_scheduler.load_state_dict(plain.decode(facts["lr_scheduler"], "the islands' schedule"))
            for group, lr in zip(inner.optimizer.param_groups, inner.lr_scheduler.get_last_lr(), strict=False):
                group["lr"] = lr

    def _distances(self, means: Sequence[Tensor], flight: Flight, share: int) -> tuple[float, float | None]:
        """Length of the mean movement over the whole share, and this island's distance from it over that."""
        counted = self._counted(share)
        same = share == flight.share
        sums = torch.zeros(2, dtype=torch.float64)
        for mean, movement, counts in zip(means, flight.movement if same else means, counted, strict=True):
            if counts:
                sums[0] += mean.double().square().sum()
                sums[1] += (movement.double() - mean.double()).square().sum()
        dist.all_reduce(sums, group=self._ranks)
        length, apart = sums.sqrt().tolist()
        return length, apart / length if length else None

    def _counted(self, share: int) -> list[bool]:
        """Whether each piece counts in a norm here: what several ranks hold alike counts once."""
        run = self._run
        replica = run.groups.replica if self._replicas is not None else 0
        speaks = run.groups.tp_rank == 0
        return [
            replica == 0
            and not getattr(r.parameter, "ds_pipe_replicated", False)
            and (speaks or bool(getattr(r.parameter, "tensor_model_parallel", False)))
            for r in self._state.ranges[share]
        ]

    def _report(
        self, flight: Flight, outcome: Outcome | None, waited_since: float, length: float, drift: float | None
    ) -> None:
        now = time.perf_counter()
        sent = torch.tensor([0 if outcome is None else outcome.exchanged.sent_bytes])
        dist.all_reduce(sent, group=self._ranks)
        seconds = now - flight.began
        self.reports.append(
            OuterReport(
                step=flight.step,
                share=flight.share,
                islands=() if outcome is None else tuple(outcome.decision["members"]),
                moved=() if outcome is None else tuple(outcome.decision["moved"]),
                version=self.standing.version,
                sent_bytes=int(sent),
                seconds=seconds,
                waited_seconds=now - waited_since,
                drift=drift,
                movement=length,
                caught_up=outcome is not None and outcome.taken is not None,
            )
        )

    def _tell(self, members: tuple[int, ...]) -> None:
        """Note for people who has come and gone since the last round."""
        before = tuple(range(self._station.islands.count)) if self._members is None else self._members
        me = self._station.islands.index
        self._members = members
        if not members:
            self.news.append("this island was left out of a round, and trains on by itself")
            return
        for island in sorted(set(before) - set(members) - {me}):
            self.news.append(f"island {island} is gone or silent: training goes on without it")
        for island in sorted(set(members) - set(before) - {me}):
            self.news.append(f"island {island} is here")

    def _about(self) -> Header:
        """What the council needs to know of this island."""
        return {
            "layout": self._layout,
            "addresses": self._addresses,
            "name": self.standing.name,
            "version": self.standing.version,
            "progress": self.standing.progress,
            "samples": int(self._run.deepspeed_engine.global_samples),
            "seen": self.standing.seen,
            "island": self._station.islands.index,
        }

    def _ask(self, message: Header) -> Header | None:
        delegate = self._station.delegate
        assert delegate is not None, "rank 0 asks"
        try:
            return delegate.ask(message, self._about())
        except RefusedError as error:
            raise _other_layout(self._station.islands.index, error.args[0]["island"]) from None

    def _ask_newest(self) -> Header | None:
        delegate = self._station.delegate
        assert delegate is not None, "rank 0 asks"
        try:
            return delegate.newest(self._about())
        except LinkError:
            return None

    def _busy(self, attempt: str) -> threading.Event:
        """Say now and then that the exchange goes on, until the event is set."""
        over, delegate = threading.Event(), self._station.delegate
        if delegate is not None:
            every = self._station.islands.patience_seconds / 8

            def say() -> None:
                while not over.wait(every):
                    delegate.say({"kind": "busy", "attempt": attempt})

            threading.Thread(target=say, name="islands busy", daemon=True).start()
        return over

    def _agree(self, action: Callable[[], T]) -> T:
        """What rank 0 gets from ``action``, or its error, on every rank of the island."""
        held_: list[Any] = [None, None]
        if self._run.groups.rank == 0:
            try:
                held_[0] = action()
            except RunError as error:
                held_[1] = error
        dist.broadcast_object_list(held_, src=0, group=self._ranks)
        if held_[1] is not None:
            held_[1].add_note(AGREED)
            raise held_[1]
        return held_[0]  # type: ignore[no-any-return]

    def _all(self, well: bool) -> bool:
        said = torch.tensor([int(well)])
        dist.all_reduce(said, op=dist.ReduceOp.MIN, group=self._ranks)
        return bool(said)

    def _missed(self, island: int | None) -> list[int]:
        """Islands that any rank has missed."""
        said: list[int | None] = [None] * self._run.groups.mesh.size
        dist.all_gather_object(said, island, group=self._ranks)
        return sorted({other for other in said if other is not None})

    def _schedule(self) -> Any:
        scheduler = self._run.deepspeed_engine.lr_scheduler
        return None if scheduler is None else plain.encode(scheduler.state_dict(), "the schedule's state")

    def _layout_name(self, fingerprint: str) -> str:
        """Equal for islands whose ranks hold the same parts and average them alike."""
        mine = hashlib.sha256(fingerprint.encode()).hexdigest()
        all_of_them: list[str] = [""] * self._run.groups.mesh.size
        dist.all_gather_object(all_of_them, mine, group=self._ranks)
        return hashlib.sha256(json.dumps(all_of_them).encode()).hexdigest()[:16]

    # Replicas of ZeRO-0 hold the same pieces, and each speaks for its part of them.

    def _part_of(self, size: int) -> tuple[int, int]:
        if self._replicas is None:
            return 0, size
        return cut(0, size, self._run.groups.replica, self._run.groups.mesh.num_replicas)

    def _mine(self, pieces: Sequence[Tensor]) -> list[Tensor]:
        return [piece[slice(*self._part_of(piece.numel()))] for piece in pieces]

    def _whole(self, parts: Sequence[Tensor], share: int) -> list[Tensor]:
        """Whole pieces of a share, from the parts that replicas have. Collective over them."""
        if self._replicas is None:
            return list(parts)
        return self._gathered(torch.cat(list(parts)) if parts else torch.zeros(0), self._state.sizes[share])

    def _gathered(self, flat: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        replicas = self._run.groups.mesh.num_replicas
        counts = [sum(b - a for a, b in (cut(0, size, r, replicas) for size in sizes)) for r in range(replicas)]
        longest = max(counts)
        mine = torch.nn.functional.pad(flat, (0, longest - flat.numel()))
        all_of_them = [torch.empty(longest) for _ in range(replicas)]
        dist.all_gather(all_of_them, mine, group=self._replicas)
        pieces = [torch.empty(size) for size in sizes]
        for replica, (values, count) in enumerate(zip(all_of_them, counts, strict=True)):
            bounds = [cut(0, size, replica, replicas) for size in sizes]
            parts = values[:count].split([high - low for low, high in bounds])
            for piece, (low, high), part in zip(pieces, bounds, parts, strict=True):
                piece[low:high] = part
        return pieces

    # The state that an island which comes, or comes back, takes from another.

    def _give_state(self, link: Link, _header: Header, _payload: bytearray) -> None:
        state = self.state
        if state is None:
            link.send({"kind": "state", "standing": None})
            return
        with state.lock:
            standing = self.standing.plain()
            flat = torch.cat(self._state_pieces())
        link.send({"kind": "state", "standing": standing}, bytearray(flat.numpy().tobytes()))

    def _state_pieces(self) -> list[Tensor]:
        """This rank's part of weights and momentum of every share."""
        state = self._state
        shares = range(self._settings.shares)
        return [
            piece
            for of_share in (state.weights, state.momentum)
            for share in shares
            for piece in self._mine(of_share(share))
        ] or [torch.zeros(0)]

    def _fetched(self, addresses: Sequence[str]) -> tuple[Standing, Tensor] | None:
        """A peer's state, if every rank of this island got its part of the same one. Collective."""
        found: tuple[Standing, Tensor] | None = None
        try:
            header, payload = self._station.fetch(addresses[self._run.groups.rank])
            if header["standing"] is not None and payload:
                found = Standing(**header["standing"]), torch.frombuffer(payload, dtype=torch.float32)
            elif header["standing"] is not None:
                found = Standing(**header["standing"]), torch.zeros(0)
        except LinkError:
            found = None
        names: list[str | None] = [None] * self._run.groups.mesh.size
        dist.all_gather_object(names, None if found is None else found[0].name, group=self._ranks)
        return found if len(set(names)) == 1 else None

    def _take(self, flat: Tensor) -> None:
        """Put a fetched state in the place of this island's own. Collective over replicas of ZeRO-0."""
        state = self._state
        mine = [piece.numel() for piece in self._state_pieces()]
        parts = list(flat.split(mine)) if flat.numel() else []
        at = 0
        for of_share in (state.weights, state.momentum):
            for share in range(self._settings.shares):
                wanted = of_share(share)
                values = self._whole(parts[at : at + len(wanted)], share)
                at += len(wanted)
                with state.lock:
                    for view, value in zip(wanted, values, strict=True):
                        view.copy_(value)
        for share in range(self._settings.shares):
            for error in state.errors(share):
                error.zero_()


def _other_layout(island: int, other: int) -> RunError:
    return RunError(
        f"dsx.outer, island {island}",
        f"its ranks hold other parts of the model, or average otherwise, than those of island {other}",
        "start all islands from the same config, with as many ranks, and versions of dsx that are alike",
    )
