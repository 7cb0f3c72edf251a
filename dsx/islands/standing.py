"""What the islands' common weights are, who takes part in a round, and what came of it. No socket, no clock.

What islands hold has a name, new with every round that counts. Whoever holds another one than the first
island takes that island's before the round. Only where the first island has just begun it may be the one that
is behind: then it takes what most training has gone into.
"""

from __future__ import annotations

import secrets
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """What the islands' common weights are, as the island holds them.

    Attributes:
        name: Changes with every round; before the first it is of the weights to begin with.
        version: Rounds so far.
        progress: Movements of islands that have gone into them.
        facts: ``step``, the inner step of the round, and ``lr_scheduler``, the schedule's state then.
        seen: Samples that each island had trained on by then, by island.
    """

    name: str = ""
    version: int = 0
    progress: int = 0
    facts: dict[str, Any] = field(default_factory=lambda: {"step": 0, "lr_scheduler": None})
    seen: dict[str, int] = field(default_factory=dict)

    def plain(self) -> dict[str, Any]:
        """As JSON values, from which ``Standing(**plain)`` makes it again."""
        return asdict(self)

    def impossible(self, *, last_step: int, shares: int) -> str:
        """Why no run can have come to it after so many steps, in words; empty if one can."""
        step = self.facts.get("step")
        if not isinstance(step, int) or not 0 <= step <= last_step:
            return f"step {step!r}, and the last one is {last_step}"
        if not 0 <= self.version <= step * shares:
            return f"round {self.version}, and at step {step} there have been at most {step * shares}"
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """What an island says when it is ready for a round.

    Attributes:
        standing: Of its common weights.
        moved: Whether it has a movement that is to be counted.
        facts: Those of a standing, as they are now.
        samples: That it has trained on.
    """

    standing: Standing
    moved: bool
    facts: dict[str, Any]
    samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """What the first island has decided of a round.

    Attributes:
        name: Of the round, and of the weights that it leads to.
        members: Islands that take part.
        moved: Those that have a movement to add.
        behind: Those that hold other weights, and take the newest first.
        source: Who has these.
        standing: Of the newest weights.
        facts: Of the weights that it leads to.
        samples: Of each member.
    """

    name: str
    members: list[int]
    moved: list[int]
    behind: list[int]
    source: int
    standing: Standing
    facts: dict[str, Any]
    samples: dict[int, int]

    @property
    def ready(self) -> Ready:
        """What it says of the weights, as an island would."""
        return Ready(standing=self.standing, moved=False, facts=self.facts, samples=0)

    def after(self, moved: list[int]) -> Standing:
        """What the weights are once these have moved them."""
        seen = {str(island): self.samples.get(island, 0) for island in moved}
        return Standing(
            name=self.name,
            version=self.standing.version + 1,
            progress=self.standing.progress + len(moved),
            facts=self.facts,
            seen=self.standing.seen | seen,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterReport:
    """One round of this island, over all of its ranks.

    Attributes:
        step: The inner step after which it began.
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
    islands: tuple[int, ...] = ()
    moved: tuple[int, ...] = ()
    version: int
    sent_bytes: int = 0
    seconds: float
    waited_seconds: float
    drift: float | None = None
    movement: float = 0.0
    caught_up: bool = False

    def metrics(self) -> dict[str, float | int]:
        """Metrics by name; what is unknown is left out."""
        values: dict[str, float | int | None] = {
            "outer/round": self.version,
            "outer/share": self.share,
            "outer/islands": len(self.islands),
            "outer/bytes_sent": self.sent_bytes,
            "outer/seconds": self.seconds,
            "outer/waited_seconds": self.waited_seconds,
            "outer/hidden": self.hidden,
            "outer/drift": self.drift,
            "outer/movement_norm": self.movement if self.moved else None,
            "outer/caught_up": int(self.caught_up),
        }
        return {name: value for name, value in values.items() if value is not None}

    @property
    def hidden(self) -> float:
        """Part of its time in which inner steps went on, 0 to 1."""
        return 1 - self.waited_seconds / self.seconds if self.seconds > 0 else 0.0


class Membership:
    """Which islands are there and which are ready.

    Args:
        count: Islands of the run; number 0 is the one that leads rounds.
        patience_seconds: How long one that is ready waits for another that is not.
    """

    def __init__(self, count: int, patience_seconds: float) -> None:
        self._count, self._patience = count, patience_seconds
        self._here: set[int] = set()
        self._ready: dict[int, tuple[Ready, float]] = {}
        self._silent: set[int] = set()
        self._since: float | None = None
        self._met = False

    def comes(self, island: int) -> None:
        self._here.add(island)

    def goes(self, island: int) -> None:
        """Its connection has ended, or the first island ends and waits for nobody any more."""
        self._here.discard(island)
        self._ready.pop(island, None)
        if island == 0:
            self._since = None

    def ready(self, island: int, said: Ready, now: float) -> None:
        """An island, the first one included, is ready."""
        self._silent.discard(island)
        self._ready[island] = said, now
        if island == 0:
            self._since = now

    def called(self, island: int, now: float) -> bool:
        """Whether an island that is not ready is to come with the steps that it has."""
        others = (since for other, (_, since) in self._ready.items() if other)
        since = min(others, default=None) if island == 0 else self._since
        late = since is not None and now - since >= self._patience / 2
        return late and island not in self._ready and island not in self._silent

    @property
    def gathering(self) -> bool:
        """Whether the first island is at a round, for which islands are awaited."""
        return self._since is not None

    def begun(self, now: float) -> Round | None:
        """The round, once all that are waited for are ready, or have been waited for long enough."""
        if self._since is None:
            return None
        expected = self._here - self._silent if self._met else set(range(1, self._count))
        missing = expected - self._ready.keys()
        if missing and now - self._since < self._patience:
            return None
        self._silent |= missing
        said = {island: self._ready[island][0] for island in sorted(self._ready)}
        self._ready, self._since, fresh = {}, None, not self._met
        self._met = True
        return decided(said, fresh=fresh)


def decided(ready: dict[int, Ready], *, fresh: bool) -> Round:
    """The round of islands that are ready; ``fresh`` if the first one may be behind the others."""
    source = 0
    if fresh:
        source = max(ready, key=lambda island: (ready[island].standing.progress, -island))
    newest = ready[source].standing
    holders = [island for island in ready if ready[island].standing.name == newest.name]
    source = 0 if 0 in holders else source
    facts = max((ready[island].facts for island in holders), key=lambda facts: int(facts["step"]))
    return Round(
        name=secrets.token_hex(8),
        members=[*ready],
        moved=[island for island in holders if ready[island].moved],
        behind=[island for island in ready if island not in holders],
        source=source,
        standing=newest,
        facts=facts,
        samples={island: said.samples for island, said in ready.items()},
    )
