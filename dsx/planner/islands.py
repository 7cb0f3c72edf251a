"""What islands cost over a slow link: seconds of a round, tokens per second, and when they pay. Pure.

A site is a cluster of its own for its layout (:mod:`dsx.planner.plan`). For a round each of n islands but
the first sends that one the weights that are trained, in the bytes of its wire, and gets as many back: the
link of the first carries n-1 times that, in each direction at once. Ranks of a site send their parts at once
and share its link.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Self

from dsx.parallel.islands import Wire, wire_bytes
from dsx.planner.cluster import Link
from dsx.planner.layout import Candidate
from dsx.planner.step_time import Predictor

USUAL = (10, 20, 50, 100, 200, 500)
"""Inner steps between rounds, of which one is chosen."""

NEAR = 0.95
"""Of the speed over a link that costs nothing, what counts as near."""

PAYS = 1.05
"""So many times the tokens per second of one job islands must have before they pay: their loss may be worse.
"""

_LATENCIES = 8
"""Of a round: a question to the first island, a connection, its TLS and a movement, and each one's answer."""

_HOST_SECONDS = 30e-9
"""Of a core, for each element of a round's movement that a rank has: reading, rounding, averaging, the outer
step and the sockets. It is processor time by tools/bench_islands.py, links --mbit 0: that of rounds every 2
steps above that of rounds every 30 is 28 ns with fp32, and 33 with int8."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundSettings:
    """How islands meet, as ``dsx.outer`` has it.

    Attributes:
        every: Inner steps between two rounds about the same share.
        wire: How a number travels.
        shares: Parts of the model with rounds of their own.
        delay: Inner steps that go on while a round is under way.
    """

    every: int = 50
    wire: Wire = "fp32"
    shares: int = 1
    delay: int = 0

    @property
    def words(self) -> str:
        """In words.

        >>> RoundSettings(every=100, wire="int8", delay=3).words
        'every 100, wire int8, delay 3'
        """
        shares = f", shares {self.shares}" if self.shares > 1 else ""
        delay = f", delay {self.delay}" if self.delay else ""
        return f"every {self.every}, wire {self.wire}{shares}{delay}"


@dataclass(frozen=True, slots=True, kw_only=True)
class IslandTask:
    """Islands of one layout.

    Attributes:
        step_seconds: Of an inner step.
        elements: Trained parameters that an island sends the movement of, over all its ranks.
        bytes_per_second: What is reached of the rate of an island's link.
    """

    count: int
    step_seconds: float
    elements: int
    ranks: int
    bytes_per_second: float
    latency_seconds: float

    @classmethod
    def of(cls, predictor: Predictor, layout: Candidate, count: int, link: Link) -> Self:
        elements = sum(predictor.elements(layout.tensor, trained=True))
        if layout.pipeline == 1:  # where one rank has both, it sends a tied table once
            elements -= predictor.task.layers.shared_elements(layout.tensor)
        return cls(
            count=count,
            step_seconds=predictor.predict(layout).seconds,
            elements=elements * layout.tensor,
            ranks=layout.gpus,
            bytes_per_second=link.bytes_per_second * predictor.task.machine.network.efficiency.link,
            latency_seconds=link.latency_seconds,
        )

    def sent_bytes(self, settings: RoundSettings) -> float:
        """Bytes over the link of the first island, in each direction, for a round about every share."""
        return (self.count - 1) * wire_bytes(self.elements, settings.wire)

    def round_seconds(self, settings: RoundSettings) -> float:
        wire = self.sent_bytes(settings) / self.bytes_per_second
        host = _HOST_SECONDS * self.elements / self.ranks
        return _LATENCIES * self.latency_seconds + (wire + host) / settings.shares

    def mean_step_seconds(self, settings: RoundSettings) -> float:
        """Mean seconds of an inner step, with the part of the rounds that no step hides."""
        return self.step_seconds + self._waits(settings) * settings.shares / settings.every

    def speed(self, settings: RoundSettings) -> float:
        """Part of the speed over a link that costs nothing, 0 to 1."""
        return self.step_seconds / self.mean_step_seconds(settings)

    def near_from(self, settings: RoundSettings) -> int:
        """The least ``every`` with which islands reach :data:`NEAR` of that speed."""
        waits = self._waits(settings) * settings.shares / self.step_seconds
        return max(ceil(waits * NEAR / (1 - NEAR)), settings.delay * settings.shares + 1, settings.shares)

    def chosen(self) -> RoundSettings:
        """The most careful usual settings that come near: seldom rounds, then narrow wires, then delay.

        fp32 where rounds every 50 steps or more often are near enough, else bf16, else int8; where int8 is
        not near with the most seldom rounds, steps go on while a round is under way.
        """
        wires: tuple[Wire, ...] = ("fp32", "bf16", "int8")
        for wire in wires:
            least = self.near_from(RoundSettings(wire=wire))
            most = USUAL[-1] if wire == wires[-1] else RoundSettings().every
            if least <= most:
                return RoundSettings(wire=wire, every=next(every for every in USUAL if every >= least))
        delay = ceil(self.round_seconds(RoundSettings(wire=wires[-1])) / self.step_seconds)
        return RoundSettings(wire=wires[-1], delay=delay, every=max(USUAL[-1], delay + 1))

    def _waits(self, settings: RoundSettings) -> float:
        """Seconds of a round that no step hides."""
        return max(0.0, self.round_seconds(settings) - settings.delay * self.step_seconds)
