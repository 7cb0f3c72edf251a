"""Who takes part in a round: the first island's rules, without a socket or a clock.

What islands hold has a name, new with every round that counts. Whoever holds another one than the first
island takes that island's before the round. Only where the first island has just begun it may be the one that
is behind: then it takes what most training has gone into.
"""

from __future__ import annotations

import secrets

from dsx.islands.standing import Ready, Round


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
