"""Who takes part in a round and whether it counts: the rules, without a socket or a clock.

One island's council decides for all that can reach it. Its state is worth nothing: everything that it needs
to know an island says when it is ready for a round, so that any other council can take its place. What
islands hold has a name, new with every round that counts; islands whose state has another name than the one
that most training has gone into take that one before the round. So whatever was lost on the way, a verdict
or a whole council, is mended in the next round.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

Said = tuple[int, dict[str, Any]]
"""An island, and what the council says to it."""


@dataclass(slots=True)
class Attempt:
    """One try at a round.

    Attributes:
        name: Tells its messages from those of other tries.
        members: Islands that take part.
        name_after: Name of the state that it leads to.
        done: What members have said of its end, by island.
        gone: Members that have begun anew since: of this one they will say nothing more.
        quiet_since: When something was last heard of it, once the first member is done.
    """

    name: str
    members: tuple[int, ...]
    name_after: str
    done: dict[int, dict[str, Any]] = field(default_factory=dict)
    gone: set[int] = field(default_factory=set)
    quiet_since: float | None = None


class Council:
    """Decides over rounds from what islands say.

    Islands say ``ready`` with what they hold and how far they have moved, are told the members of the round,
    exchange their movements, say ``done``, and are told whether the round counts, which it does if all of its
    members have come through. While a long transfer goes on they say ``busy``.

    Args:
        count: Islands of the run.
        patience_seconds: How long one island that is ready waits for another that says nothing.
    """

    def __init__(self, count: int, patience_seconds: float) -> None:
        self._count, self._patience = count, patience_seconds
        self._here: set[int] = set()
        self._silent: set[int] = set()
        self._about: dict[int, dict[str, Any]] = {}
        self._ready: dict[int, dict[str, Any]] = {}
        self._since: float | None = None
        self._called: set[int] = set()
        self._assembled = False
        self._attempt: Attempt | None = None

    def hear(self, island: int, message: dict[str, Any], now: float) -> list[Said]:
        """What to say after an island has said something.

        Args:
            island: Which.
            message: Its ``kind`` is hello, ready, busy or done.
            now: Seconds on any clock that only goes forward.
        """
        self._here.add(island)
        self._silent.discard(island)
        kind, attempt = message["kind"], self._attempt
        if kind in ("hello", "ready") and attempt is not None:
            attempt.gone.add(island)
        if kind == "hello":
            self._about[island] = message
            self._forget_ready(island)  # of its life before
            return [(island, {"kind": "welcome", "newest": self._newest(island)}), *self._go_on(now)]
        if kind == "ready":
            refusal = self._refusal(island, message)
            if refusal is not None:
                return [(island, refusal)]
            self._about[island] = self._ready[island] = message
            self._called.discard(island)
            self._since = now if self._since is None else self._since
        elif attempt is not None and message["attempt"] == attempt.name:
            if kind == "done":
                attempt.done[island] = message
            if attempt.done:
                attempt.quiet_since = now
        elif kind == "done":  # too late: it was not waited for any longer
            return [(island, {"kind": "again"}), *self._go_on(now)]
        return self._go_on(now)

    def lose(self, island: int, now: float) -> list[Said]:
        """What to say after the connection to an island has broken."""
        self._here.discard(island)
        self._about.pop(island, None)
        self._forget_ready(island)
        self._called.discard(island)
        return self._go_on(now)

    def tick(self, now: float) -> list[Said]:
        """What to say because time has passed. Called now and then."""
        return self._go_on(now)

    def _forget_ready(self, island: int) -> None:
        self._ready.pop(island, None)
        if not self._ready:
            self._since = None

    def _newest(self, island: int) -> dict[str, Any] | None:
        """What is known of the island with the most training in its state, the asking one aside."""
        others = [said for other, said in self._about.items() if other != island]
        return max(others, key=lambda said: (said["progress"], -said["island"]), default=None)

    def _refusal(self, island: int, message: dict[str, Any]) -> dict[str, Any] | None:
        """The answer to an island whose ranks hold other parts of the model than those of the others."""
        others = (said for other, said in self._about.items() if other in self._here and other != island)
        other = next((said for said in others if said["layout"] != message["layout"]), None)
        if other is None or other["island"] > island:  # the later one is refused, whoever is heard first
            return None
        return {"kind": "refused", "island": other["island"], "layout": other["layout"]}

    def _go_on(self, now: float) -> list[Said]:
        said = [*self._judged(now)]
        return [*said, *self._decided(now)] if self._attempt is None else said

    def _decided(self, now: float) -> Iterator[Said]:
        """Begin a round if everybody who is waited for is ready, or has been waited for long enough."""
        if self._since is None:
            return
        expected = self._here - self._silent if self._assembled else set(range(self._count))
        missing, waited = expected - self._ready.keys(), now - self._since
        if missing and waited < self._patience:
            if waited >= self._patience / 2:
                for island in sorted((missing & self._here) - self._called):
                    self._called.add(island)
                    yield island, {"kind": "call"}
            return
        self._silent |= missing
        self._assembled = True
        yield from self._begun()

    def _begun(self) -> Iterator[Said]:
        ready, self._ready, self._since = self._ready, {}, None
        best = max(ready.values(), key=lambda said: (said["progress"], -said["island"]))
        holders = [island for island in sorted(ready) if ready[island]["name"] == best["name"]]
        behind = [island for island in sorted(ready) if island not in holders]
        members = tuple(sorted(ready))
        self._attempt = Attempt(secrets.token_hex(8), members, secrets.token_hex(8))
        decision = {
            "kind": "round",
            "attempt": self._attempt.name,
            "members": list(members),
            "moved": [island for island in holders if ready[island]["moved"]],
            "takes_from": {str(island): holders[at % len(holders)] for at, island in enumerate(behind)},
            "addresses": {str(island): ready[island]["addresses"] for island in members},
            "name": best["name"],
            "version": best["version"],
            "progress": best["progress"],
            "facts": max((ready[island]["facts"] for island in holders), key=lambda facts: facts["step"]),
            "seen": {str(island): ready[island]["samples"] for island in members},
            "earlier_seen": best["seen"],
        }
        for island in members:
            yield island, decision

    def _judged(self, now: float) -> Iterator[Said]:
        """End the attempt once all of its members have said how it went, or are not waited for any more."""
        attempt = self._attempt
        if attempt is None:
            return
        open_ones = [island for island in attempt.members if island not in attempt.done]
        waited_for = [island for island in open_ones if island in self._here - attempt.gone]
        quiet = attempt.quiet_since is not None and now - attempt.quiet_since >= self._patience
        if waited_for and not quiet:
            return
        self._attempt = None
        # Who has been ready meanwhile waits for those who come out of it now, as for any others.
        self._since = now if self._ready else None
        self._silent.update(waited_for)
        well = not open_ones and all(said["well"] for said in attempt.done.values())
        out = None if well else self._left_out(attempt, open_ones)
        if out is not None:
            self._silent.add(out)  # it is not waited for until it says something
        for island, message in attempt.done.items():
            if well:
                if island in self._about:  # it may have gone since it was done
                    known = {"progress": message["progress"], "version": message["version"]}
                    self._about[island] = self._about[island] | known | {"name": attempt.name_after}
                yield island, {"kind": "counts", "name": attempt.name_after}
            else:
                yield island, {"kind": "left" if island == out else "again"}

    @staticmethod
    def _left_out(attempt: Attempt, open_ones: list[int]) -> int | None:
        """Who has to stay out of the next try: of those that are there, the one most others have missed."""
        if open_ones:
            return None  # they are gone, or silent: the others try again without them
        missed = [other for said in attempt.done.values() for other in said["missed"]]
        return max(attempt.done, key=lambda island: (missed.count(island), island)) if missed else None
