"""What the islands' common weights are, what islands say of them, and what came of a round. Pure data."""

from __future__ import annotations

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
