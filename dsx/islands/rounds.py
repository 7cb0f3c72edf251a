"""A round as an island's ranks go through it: be told who takes part, exchange, be told whether it counts."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dsx.errors import RunError
from dsx.islands.exchange import Exchanged, Meeting, MissedError, exchange
from dsx.islands.links import Header, LinkError
from dsx.islands.ranks import IslandRanks
from dsx.islands.standing import Standing
from dsx.islands.state import OuterState
from dsx.islands.station import RefusedError, Station
from dsx.parallel.islands import Wire

_MOST_ATTEMPTS = 8

Taken = tuple[Standing, Tensor]
"""The state of another island: what it is, and this rank's part of weights and momentum, flat."""


@dataclass(slots=True)
class Flight:
    """A round under way.

    Attributes:
        step: The inner step after which it began.
        share: The share of the model that this island thinks it is about.
        sent: This rank's weights then, fp32 on the host, by piece.
        movement: What they have moved since the last round.
        moved: Whether that is to be counted.
        facts: Of :class:`~dsx.islands.standing.Standing`.
        samples: Samples that this island had trained on by then.
        began: When.
        stood_seconds: How long training stood still until its thread went on by itself.
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
    samples: int
    began: float = field(default_factory=time.perf_counter)
    stood_seconds: float = 0.0
    thread: threading.Thread = field(init=False)
    outcome: RoundOutcome | None = None
    error: Exception | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundOutcome:
    """A round that counts.

    Attributes:
        members: Islands that took part.
        moved: Those of them that had a movement.
        share: The share of the model that it was about.
        exchanged: The means of this rank's part, and what rounding kept back.
        standing: Of the weights that the round leads to.
        taken: The state that this island had to take first; None if it had it.
    """

    members: tuple[int, ...]
    moved: tuple[int, ...]
    share: int
    exchanged: Exchanged
    standing: Standing
    taken: Taken | None


class Talk:
    """The island's side of the conversation with the others. Every rank makes one, and calls it alike.

    Args:
        station: This rank's connections.
        ranks: The island's ranks.
        layout: Equal for islands whose ranks hold the same parts.
        shares: Number of shares of the model.
        wire: How numbers travel.
        samples: How many samples this island has trained on.

    Attributes:
        turns: Grows with everything that this island's ranks have waited for together, each of which takes no
            longer than the others' patience unless bytes move.
    """

    def __init__(
        self,
        station: Station,
        ranks: IslandRanks,
        *,
        layout: str,
        shares: int,
        wire: Wire,
        samples: Callable[[], int],
    ) -> None:
        self._station, self._ranks = station, ranks
        self._layout, self._shares, self._wire, self._samples = layout, shares, wire, samples
        self._addresses = ranks.told(station.address)
        self.turns = 0

    def newest(self, standing: Standing) -> Header | None:
        """What is known of the island that is furthest ahead; None if no other is known. Collective.

        Raises:
            RunError: It has another layout.
        """

        def ask() -> Header | None:
            delegate = self._station.delegate
            assert delegate is not None, "rank 0 asks"
            try:
                found = delegate.newest(self._about(standing))
            except LinkError:
                return None
            except RefusedError as error:
                raise self._refused(error.args[0]) from None
            if found is not None and found["layout"] != self._layout:
                raise self._other_layout(found["island"])
            return found

        return self._ranks.agree(ask)

    def fetched(self, addresses: Sequence[str]) -> Taken | None:
        """An island's state, if every rank got its part, of one and the same. Collective.

        Args:
            addresses: Of that island's ranks.
        """
        found: Taken | None = None
        try:
            header, payload = self._station.fetch(addresses[self._ranks.rank])
            if header["standing"] is not None:
                flat = torch.frombuffer(payload, dtype=torch.float32) if payload else torch.zeros(0)
                found = Standing(**header["standing"]), flat
        except LinkError:
            found = None
        names = self._ranks.told(None if found is None else found[0].name)
        return found if len(set(names)) == 1 else None

    def go_through(self, flight: Flight, standing: Standing, state: OuterState) -> RoundOutcome | None:
        """Try until a round counts, or this island is left out of it: None then. Collective.

        Raises:
            RunError: Another island has another layout.
        """
        ready = {**self._about(standing), "kind": "ready", "moved": flight.moved, "facts": flight.facts}
        ready["samples"] = flight.samples
        for _ in range(_MOST_ATTEMPTS):
            decision = self._ranks.agree(partial(self._asked, ready, standing))
            self.turns += 1
            if decision is None:
                if self._ranks.agree(self._gives_up):
                    return None
                continue
            exchanged, taken, missed = self._tried(flight, decision, state)
            well = self._ranks.everybody(exchanged is not None)
            self.turns += 1
            version = decision["version"] + 1
            progress = decision["progress"] + len(decision["moved"])
            done = {
                "kind": "done",
                "attempt": decision["attempt"],
                "well": well,
                "missed": sorted({island for island in self._ranks.told(missed) if island is not None}),
                "progress": progress,
                "version": version,
            }
            verdict = self._ranks.agree(partial(self._asked, done, standing))
            self.turns += 1
            if verdict is not None and verdict["kind"] == "again":
                continue
            if verdict is None or verdict["kind"] == "left":
                return None
            assert exchanged is not None, "it counts for those that came through"
            seen = {str(island): decision["seen"][str(island)] for island in decision["moved"]}
            return RoundOutcome(
                members=tuple(decision["members"]),
                moved=tuple(decision["moved"]),
                share=decision["version"] % self._shares,
                exchanged=exchanged,
                standing=Standing(
                    name=verdict["name"],
                    version=version,
                    progress=progress,
                    facts=decision["facts"],
                    seen=decision["earlier_seen"] | seen,
                ),
                taken=taken,
            )
        return None

    def _tried(
        self, flight: Flight, decision: Header, state: OuterState
    ) -> tuple[Exchanged | None, Taken | None, int | None]:
        """One try on this rank: what was exchanged, what had to be taken, which island was missed."""
        self._station.inbox.begin(decision["attempt"])
        over = self._say_busy(decision["attempt"])
        taken: Taken | None = None
        try:
            sponsor = decision["takes_from"].get(str(self._station.islands.index))
            if sponsor is not None:
                taken = self.fetched(decision["addresses"][str(sponsor)])
                if taken is None or taken[0].name != decision["name"]:
                    return None, None, sponsor
            meeting = Meeting(
                attempt=decision["attempt"],
                members=tuple(decision["members"]),
                moved=tuple(decision["moved"]),
                addresses={
                    int(island): its[self._ranks.rank] for island, its in decision["addresses"].items()
                },
            )
            share = decision["version"] % self._shares
            # An island that is behind adds nothing: its pieces give their sizes alone.
            pieces = self._ranks.mine(flight.movement if share == flight.share else state.weights(share))
            errors = self._ranks.mine(state.errors(share))
            return exchange(self._station, meeting, pieces, errors, self._wire), taken, None
        except MissedError as error:
            return None, None, int(error.args[0])
        finally:
            over.set()

    def _asked(self, message: Header, standing: Standing) -> Header | None:
        delegate = self._station.delegate
        assert delegate is not None, "rank 0 asks"
        try:
            return delegate.ask(message, self._about(standing))
        except RefusedError as error:
            raise self._refused(error.args[0]) from None

    def _gives_up(self) -> bool:
        delegate = self._station.delegate
        return delegate is not None and delegate.gives_up()

    def _say_busy(self, attempt: str) -> threading.Event:
        """Say now and then that this rank is exchanging, until the event is set."""
        over, delegate = threading.Event(), self._station.delegate
        every = self._station.islands.patience_seconds / 8
        if delegate is not None:

            def say() -> None:
                while not over.wait(every):
                    delegate.say({"kind": "busy", "attempt": attempt})

            threading.Thread(target=say, name="islands busy", daemon=True).start()
        return over

    def _about(self, standing: Standing) -> Header:
        """What a council needs to know of this island."""
        return {
            "island": self._station.islands.index,
            "layout": self._layout,
            "addresses": self._addresses,
            "name": standing.name,
            "version": standing.version,
            "progress": standing.progress,
            "samples": self._samples(),
            "seen": standing.seen,
        }

    def _refused(self, answer: Header) -> RunError:
        if "twin" in answer:
            return RunError(
                f"dsx.outer.island = {self._station.islands.index}",
                f"another launch, at {answer['twin']}, is this island and is there",
                "give each launch a number of its own",
            )
        return self._other_layout(answer["island"])

    def _other_layout(self, other: int) -> RunError:
        return RunError(
            f"dsx.outer, island {self._station.islands.index}",
            "its model, frozen weights, layout, batch, dsx.data.seed or dsx.outer is not that of "
            f"island {other}",
            "start all islands from the same config, on as many ranks, with the same version of dsx",
        )
