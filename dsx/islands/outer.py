"""Outer steps of an island: after so many inner steps, all islands move by the mean of their movements.

DiLoCo (arXiv:2311.08105, algorithm 1): the movement of an island, its weights after the last round minus its
weights now, is a gradient for an outer optimizer, SGD with Nesterov momentum, which moves the weights that
all islands share. In shares, and while inner steps go on, as Streaming DiLoCo (arXiv:2501.18512) does it;
what inner steps have moved since a movement was sent is kept, and is part of the next movement.
Between rounds a rank keeps the weights that all islands had last, and their momentum (:class:`OuterState`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import xxhash
from torch import Tensor, nn

from dsx.checkpoint import plain
from dsx.checkpoint.claims import MISFITS
from dsx.config.schema import OuterConfig
from dsx.engine.rank_progress import RankProgress
from dsx.engine.zero.master_shards import MasterShard, master_shards, refresh_weights
from dsx.errors import RunError
from dsx.islands.coordinator import IslandNode
from dsx.islands.rounds import IslandRanks, PendingRound, RoundProtocol, Share, State
from dsx.islands.standing import OuterReport, Ready, Standing
from dsx.parallel.groups import Groups
from dsx.parallel.islands import OUTER_ERROR, OUTER_MOMENTUM, OUTER_STATES, OUTER_WEIGHTS, Rounds, cut


@dataclass(frozen=True, slots=True)
class Range:
    """Elements ``start`` to ``stop`` of master number ``part``, which are of one parameter."""

    part: int
    start: int
    stop: int
    parameter: nn.Parameter


class OuterState:
    """fp32 copies on the host of all masters of a rank, cut into the shares that have rounds of their own.

    Args:
        shares: Number of shares. Each has its part of every parameter.
        settings: Of the outer optimizer: lr, momentum, nesterov.
        carries_errors: Whether the wire rounds so that what it keeps back is carried on.

    Attributes:
        ranges: Of each share, the pieces of masters that it is made of.
        sizes: Elements of these.
        lock: Held while the states change.
    """

    def __init__(self, engine: Any, *, shares: int, settings: dict[str, Any], carries_errors: bool) -> None:
        self._parts: tuple[MasterShard, ...] = master_shards(engine)
        names = OUTER_STATES if carries_errors else (OUTER_WEIGHTS, OUTER_MOMENTUM)
        self._kept = {name: [torch.zeros(part.master.numel()) for part in self._parts] for name in names}
        self.ranges = tuple(self._ranges(share, shares) for share in range(shares))
        self.sizes = [[r.stop - r.start for r in ranges] for ranges in self.ranges]
        self.lock = threading.Lock()
        self._optimizer = torch.optim.SGD(
            [
                {"params": [nn.Parameter(view) for view in self._views(OUTER_WEIGHTS, ranges)]}
                for ranges in self.ranges
            ],
            **settings,
        )
        for group, ranges in zip(self._optimizer.param_groups, self.ranges, strict=True):
            for parameter, buffer in zip(group["params"], self._views(OUTER_MOMENTUM, ranges), strict=True):
                self._optimizer.state[parameter]["momentum_buffer"] = buffer

    def of(self, part: MasterShard) -> dict[str, Tensor]:
        """The states of one master, as large as it and flattened, by name."""
        at = next(at for at, mine in enumerate(self._parts) if mine.master is part.master)
        return {name: tensors[at] for name, tensors in self._kept.items()}

    def begin(self) -> None:
        """Take the weights of now for those that all islands had last, without momentum."""
        for share in range(len(self.ranges)):
            for view, value in zip(self.weights(share), self.read(share), strict=True):
                view.copy_(value)

    def digest(self) -> str:
        """A short name for the weights that all islands had last, as this rank holds them."""
        digest = xxhash.xxh3_128()
        for tensor in self._kept[OUTER_WEIGHTS]:
            digest.update(tensor.numpy().data)
        return digest.hexdigest()

    def read(self, share: int) -> list[Tensor]:
        """The masters of a share as they are, by piece: fp32 on the host, copies."""
        ranges = self.ranges[share]
        if not ranges:
            return []
        masters = self._masters()
        flat = torch.cat([masters[r.part][r.start : r.stop] for r in ranges]).float().cpu()
        return list(flat.split(self.sizes[share]))

    @torch.no_grad()
    def write(self, share: int, values: Sequence[Tensor]) -> None:
        """Set the masters of a share. What the model computes with is still to be made of them."""
        if not values:
            return
        masters = self._masters()
        moved = torch.cat(list(values)).to(masters[0].device).split(self.sizes[share])
        for r, value in zip(self.ranges[share], moved, strict=True):
            masters[r.part][r.start : r.stop].copy_(value)

    def shift(self, share: int, since: Sequence[Tensor]) -> None:
        """Put the common weights under what the masters of a share have moved since they were ``since``."""
        triples = zip(self.weights(share), self.read(share), since, strict=True)
        # What has not moved becomes the common weight itself, which a sum might round.
        moved = [torch.where(now == then, common, common + (now - then)) for common, now, then in triples]
        self.write(share, moved)

    def weights(self, share: int) -> list[Tensor]:
        """The weights that all islands had last: views."""
        return self._views(OUTER_WEIGHTS, self.ranges[share])

    def momentum(self, share: int) -> list[Tensor]:
        """The outer momentum: views."""
        return self._views(OUTER_MOMENTUM, self.ranges[share])

    def errors(self, share: int) -> list[Tensor]:
        """What rounding has kept back: views; empty if nothing is carried on."""
        return self._views(OUTER_ERROR, self.ranges[share]) if OUTER_ERROR in self._kept else []

    def step(self, share: int, gradients: Sequence[Tensor]) -> None:
        """Move the common weights of a share by the outer optimizer.

        ``gradients`` are weights before minus weights after, the mean over islands.
        """
        parameters = self._optimizer.param_groups[share]["params"]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def _masters(self) -> list[Tensor]:
        return [part.master.detach().view(-1) for part in self._parts]

    def _views(self, name: str, ranges: Sequence[Range]) -> list[Tensor]:
        tensors = self._kept[name]
        return [tensors[r.part][r.start : r.stop] for r in ranges]

    def _ranges(self, share: int, shares: int) -> tuple[Range, ...]:
        """A share's part of every span, so that ranks which hold the same parameter cut it alike."""
        found = []
        for index, part in enumerate(self._parts):
            for span in part.spans:
                low, high = cut(0, span.stop - span.start, share, shares)
                if high > low:
                    found.append(Range(index, span.offset + low, span.offset + high, span.parameter))
        return tuple(found)


class Stops(Protocol):
    """Whether a rank is to end."""

    @property
    def stop_wanted(self) -> Callable[[], bool] | None:
        """Says whether this rank wants no further step; None never does."""


class OuterRun(Protocol):
    """What outer steps ask of an engine; :class:`dsx.PipelineEngine` is one."""

    groups: Groups
    deepspeed_engine: Any
    rank_progress: RankProgress

    @property
    def step_control(self) -> Stops:
        """What its training steps ask."""


class Outer:
    """Takes an engine's outer steps. Every rank of the island makes one and calls it alike.

    ``fingerprint`` says what ranks with the same coordinates must have in common.

    Attributes:
        state: Common weights and momentum; None before the first step.
        standing: What the common weights are.
        reports: Rounds that nobody has asked for yet, the latest last.
        news: Sentences for people that nobody has asked for yet.
    """

    def __init__(
        self, run: OuterRun, node: IslandNode, settings: OuterConfig, *, last_step: int, fingerprint: str
    ) -> None:
        self._run, self._node, self._settings = run, node, settings
        self._engine = run.deepspeed_engine
        self.rounds = Rounds(every=settings.every, shares=settings.shares, last=last_step)
        self.state: OuterState | None = None
        self.standing = Standing()
        self.reports: list[OuterReport] = []
        self.news: list[str] = []
        mesh = run.groups.mesh
        whole = self._engine.zero_optimization_stage() == 0 and mesh.num_replicas > 1
        self._ranks = IslandRanks(run.groups, replicated=whole)
        self._members: Sequence[int] = range(node.islands.count)
        self._pending: PendingRound | None = None
        self._joined = False
        self._saved = frozenset(OUTER_STATES)
        self._steps_since = [0] * settings.shares
        self._protocol = RoundProtocol(
            node,
            self._ranks,
            layout=self._ranks.digest(fingerprint),
            shares=settings.shares,
            wire=settings.wire,
            last_step=last_step,
            gives_up=self._gives_up,
            standing=lambda: self.standing,
            state=self._given,
            elements=lambda: sum(part.numel() for part in self._parts(self._state)),
        )

    @property
    def called(self) -> bool:
        """Whether the other islands wait for this one's next round; known on rank 0."""
        server, client = self._node.server, self._node.client
        if server is not None:
            return server.called
        return client is not None and client.called.is_set()

    def join(self) -> None:
        """Take the weights of the first island, if as much training is in them. Collective.

        Called before the first step, once a checkpoint is loaded if there is one. What the optimizer keeps
        stays this island's own.

        Raises:
            RunError: The first island has another layout, or another schedule.
        """
        if self._joined:
            return
        self._joined = True
        if self.state is None:
            state = self._made_state()
            state.begin()
            # Other weights to begin with, of another seed or another kind of machine, have another name: the
            # first island gives its own to the others.
            self.standing = replace(self.standing, name=self._ranks.digest(state.digest()))
            self.state = state
        newest = self._protocol.newest()
        if newest is None or newest[0].name in ("", self.standing.name):
            return
        behind = newest[0].progress >= self.standing.progress
        if behind and (taken := self._protocol.fetched(newest[1])) is not None:
            self._adopt(taken)
            self._go_to_common_weights(range(self._settings.shares))
            self._follow(self.standing.facts)
            self.news.append(f"this island took the weights of island 0, of round {self.standing.version}")

    def after_step(self, *, called: bool) -> None:
        """Do what is due after an inner step. Collective over the island.

        Args:
            called: Whether other islands wait for this one; the same on every rank.

        Raises:
            RunError: The others have another layout.
        """
        step = int(self._engine.global_steps)
        self._steps_since = [count + 1 for count in self._steps_since]
        pending = self._pending
        due = self.rounds.after(step) or int(called and pending is None)
        if pending is not None and (due or step - pending.step >= self._settings.delay):
            self.settle()
        for _ in range(due):
            self._launch(step)
            if self._settings.delay == 0 or step >= self.rounds.last:
                self.settle()

    def settle(self) -> None:
        """Wait for a round that is under way, and let the weights move. Collective."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        # Where no step has gone on meanwhile, training has stood still all the time.
        goes_on = int(self._engine.global_steps) > pending.step
        waited = time.perf_counter() - pending.stood_seconds if goes_on else pending.began
        with self._run.rank_progress.doing("outer step"):
            traffic = self._node.traffic
            while pending.thread.is_alive():
                pending.thread.join(1.0)
                if self._node.traffic != traffic:  # long transfers and one wait after the other are no hang
                    traffic = self._node.traffic
                    self._run.rank_progress.moves += 1
            if pending.error is not None:
                raise pending.error
            self._land(pending, waited)

    def facts(self) -> dict[str, Any]:
        """What checkpoints keep of this, besides :class:`OuterState`: JSON values."""
        return {"islands": self._node.islands.count, **self.standing.plain()}

    def expect(self, states: AbstractSet[str]) -> None:
        """Have the states that a checkpoint is about to be loaded into, and no other."""
        self._saved = frozenset(states).intersection(OUTER_STATES)
        self.state = self._made_state() if OUTER_WEIGHTS in states else None

    def states_of(self, part: MasterShard) -> dict[str, Tensor]:
        """The states of one master for a checkpoint, by name; those in it while one is loaded."""
        found = {} if self.state is None else self.state.of(part)
        return {name: state for name, state in found.items() if name in self._saved}

    def restore(self, saved: dict[str, Any] | None) -> None:
        """Go on from a checkpoint that has been loaded; from its weights alone if it was of one job."""
        if saved is None or self.state is None:
            self.state, self.standing = None, Standing()
        else:
            count = self._node.islands.count
            standing = Standing(**{key: value for key, value in saved.items() if key != "islands"})
            if saved.get("islands") != count:  # what each has seen is as if there had always been so many
                each = int(self._engine.global_samples)
                standing = replace(standing, seen={str(island): each for island in range(count)})
            self.standing = standing
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

    def _gives_up(self) -> bool:
        """Whether this rank has been told to end, which is in a hurry: the others are not waited for."""
        wanted = self._run.step_control.stop_wanted
        return wanted is not None and wanted()

    def _launch(self, step: int) -> None:
        """Begin a round about the share whose turn it is."""
        began, share = time.perf_counter(), self.standing.version % self._settings.shares
        state, scheduler = self._state, self._engine.lr_scheduler
        sent = state.read(share)
        movement = [before - now for before, now in zip(state.weights(share), sent, strict=True)]
        sound = self._ranks.everybody(all(bool(piece.isfinite().all()) for piece in movement))
        pending = PendingRound(
            step=step,
            share=share,
            sent=sent,
            movement=movement,
            ready=Ready(
                standing=self.standing,
                moved=sound and self._steps_since[share] > 0,
                facts={
                    "step": step,
                    "lr_scheduler": None
                    if scheduler is None
                    else plain.encode(scheduler.state_dict(), "the learning-rate scheduler's state"),
                },
                samples=int(self._engine.global_samples),
            ),
            began=began,
        )
        pending.stood_seconds = time.perf_counter() - began
        self._steps_since[share] = 0

        def share_of(share: int) -> Share:
            pieces = pending.movement if share == pending.share else state.weights(share)
            return self._ranks.mine(pieces), self._ranks.mine(state.errors(share))

        def fly() -> None:
            try:
                pending.outcome = self._protocol.go_through(pending, share_of)
            except Exception as error:  # noqa: BLE001 - raised where the round is settled
                pending.error = error

        pending.thread = threading.Thread(target=fly, name="outer round", daemon=True)
        pending.thread.start()
        self._pending = pending

    def _land(self, pending: PendingRound, waited_since: float) -> None:
        """Let the weights move, if the round counts, and report. Collective."""
        outcome, state, length, drift = pending.outcome, self._state, 0.0, None
        if outcome is not None:
            share = (outcome.standing.version - 1) % self._settings.shares
            means = self._ranks.whole(outcome.means, state.sizes[share])
            errors = outcome.errors and self._ranks.whole(outcome.errors, state.sizes[share])
            if outcome.adopted is not None:
                self._adopt(outcome.adopted)
            elif pending.ready.moved:
                length, drift = self._distances(means, pending, share)
            with state.lock:
                state.step(share, means)
                for kept, error in zip(state.errors(share), errors, strict=True):
                    kept.copy_(error)
                self.standing = outcome.standing
            if outcome.adopted is not None:
                self._go_to_common_weights(range(self._settings.shares))
            elif not pending.ready.moved:
                self._go_to_common_weights([share])
            else:
                state.shift(share, pending.sent)
                refresh_weights(self._engine)
            self._follow(outcome.standing.facts)
        else:
            self._steps_since[pending.share] += pending.ready.moved  # for the next round it has moved still
        self._report(pending, waited_since, length, drift)

    def _go_to_common_weights(self, shares: Iterable[int]) -> None:
        for share in shares:
            self._state.write(share, self._state.weights(share))
            self._steps_since[share] = 0
        refresh_weights(self._engine)

    def _follow(self, facts: dict[str, Any]) -> None:
        """Go on with the step number and the learning rate of the others, if they are ahead."""
        engine = self._engine
        if int(facts["step"]) <= int(engine.global_steps):
            return
        engine.global_steps = int(facts["step"])
        if engine.lr_scheduler is not None and facts["lr_scheduler"] is not None:
            saved = plain.decode(facts["lr_scheduler"], "the islands' schedule")
            set_schedule(engine.lr_scheduler, engine.optimizer, saved)

    def _distances(
        self, means: Sequence[Tensor], pending: PendingRound, share: int
    ) -> tuple[float, float | None]:
        """Length of the mean movement over the whole share, and this island's distance from it over that."""
        squares, apart = 0.0, 0.0
        for mean, movement, counts in zip(means, pending.movement, self._counted(share), strict=True):
            if counts:
                squares += float(mean.double().square().sum())
                apart += float((movement.double() - mean.double()).square().sum())
        squares, apart = self._ranks.sums(squares, apart)
        return squares**0.5, (apart / squares) ** 0.5 if squares else None

    def _counted(self, share: int) -> list[bool]:
        """Whether each piece counts in a norm here: what several ranks hold alike counts once."""
        speaks = self._run.groups.tp_rank == 0
        return [
            self._ranks.first_replica
            and not getattr(r.parameter, "ds_pipe_replicated", False)
            and (speaks or bool(getattr(r.parameter, "tensor_model_parallel", False)))
            for r in self._state.ranges[share]
        ]

    def _report(self, pending: PendingRound, waited_since: float, length: float, drift: float | None) -> None:
        """Tell of a round, and for people who has come and gone since the last one."""
        outcome, now = pending.outcome, time.perf_counter()
        (sent_bytes,) = self._ranks.sums(0 if outcome is None else outcome.sent_bytes)
        self.reports.append(
            OuterReport(
                step=pending.step,
                share=pending.share
                if outcome is None
                else (outcome.standing.version - 1) % self._settings.shares,
                islands=() if outcome is None else tuple(outcome.members),
                moved=() if outcome is None else tuple(outcome.moved),
                version=self.standing.version,
                sent_bytes=round(sent_bytes),
                seconds=now - pending.began,
                waited_seconds=now - waited_since,
                drift=drift,
                movement=length,
                caught_up=outcome is not None and outcome.adopted is not None,
            )
        )
        self.news += self._protocol.news
        self._protocol.news.clear()
        if outcome is None:
            self.news.append(f"this island was left out of the round after step {pending.step}")
            return
        before, self._members = self._members, outcome.members
        for island in sorted({*before} - {*outcome.members}):
            self.news.append(f"island {island} is gone or silent: training goes on without it")
        for island in sorted({*outcome.members} - {*before}):
            self.news.append(f"island {island} is here")
        if outcome.adopted is not None:
            self.news.append(f"this island took the others' weights, of round {self.standing.version}")

    def _given(self) -> State | None:
        """What an island gets that comes, or comes back: this rank's part of weights and momentum, a copy."""
        state = self.state
        if state is None:
            return None
        with state.lock:
            return self.standing, torch.cat([*self._parts(state), torch.zeros(0)])

    def _parts(self, state: OuterState) -> list[Tensor]:
        """This rank's part of the weights of every share, then of their momentum: views."""
        return [
            part
            for pieces in (state.weights, state.momentum)
            for share in range(self._settings.shares)
            for part in self._ranks.mine(pieces(share))
        ]

    def _adopt(self, adopted: State) -> None:
        """Put another island's state in the place of this one's. Collective over replicas of ZeRO-0."""
        state, (standing, flat) = self._state, adopted
        parts, at = flat.split([part.numel() for part in self._parts(state)]), 0
        with state.lock:
            for pieces in (state.weights, state.momentum):
                for share, sizes in enumerate(state.sizes):
                    values = self._ranks.whole(parts[at : at + len(sizes)], sizes)
                    for view, value in zip(pieces(share), values, strict=True):
                        view.copy_(value)
                    at += len(sizes)
            for share in range(self._settings.shares):
                for error in state.errors(share):
                    error.zero_()
            self.standing = standing
        mine = standing.seen.get(str(self._node.islands.index), 0)
        self._engine.global_samples = max(int(self._engine.global_samples), mine)


def set_schedule(scheduler: Any, optimizer: Any, saved: dict[str, Any]) -> None:
    """Go on with a learning-rate schedule from its saved state, and with the rates that are in force then.

    Raises:
        RunError: The state is of another kind of schedule.
    """
    try:
        scheduler.load_state_dict(saved)
        # torch's schedules save these. DeepSpeed's do not, and compute what is in force at their step.
        rates = scheduler.get_last_lr() if "_last_lr" in saved else scheduler.get_lr()
    except MISFITS as error:
        raise RunError(
            f"scheduler {type(scheduler).__name__}",
            f"the other islands have another one ({type(error).__name__}: {error})",
            "start all islands from the same config",
        ) from error
    for group, rate in zip(optimizer.param_groups, rates, strict=False):
        group["lr"] = rate
