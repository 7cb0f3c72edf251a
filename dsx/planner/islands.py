"""What islands cost over a slow link: seconds of a round, tokens per second, and when they pay. Pure.

A site is a cluster of its own for its layout (:mod:`dsx.planner.plan`). Between sites an island sends, for
each round, 2 (n-1)/n of the weights that are trained, in the bytes of its wire. Ranks of a site send their
parts at once and share its link, so that the fullest rank's part sets the time.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Self

from dsx.parallel.islands import Wire, wire_bytes
from dsx.planner.layout import Candidate
from dsx.planner.step_time import Predictor

USUAL = (10, 20, 50, 100, 200, 500)
"""Inner steps between rounds, of which one is chosen."""

NEAR = 0.95
"""Of the speed over a link that costs nothing, what counts as near."""

PAYS = 1.05
"""So many times the tokens per second of one job must islands have before they pay: their loss may be worse."""

_LATENCIES = 6
"""Of a round: two messages between peers, and two questions to a council with their answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class IslandTask:
    """Islands of one layout.

    Attributes:
        count: How many.
        step_seconds: Of an inner step.
        elements: Of masters on the fullest rank, by which replicas share what all of them hold.
        ranks: Of an island.
        bytes_per_second: What is reached of the rate of an island's link.
        latency_seconds: Of that link.
    """

    count: int
    step_seconds: float
    elements: int
    ranks: int
    bytes_per_second: float
    latency_seconds: float

    @classmethod
    def of(cls, predictor: Predictor, layout: Candidate, count: int, link: tuple[float, float]) -> Self:
        """Islands that have a layout each.

        Args:
            predictor: Of an island's task.
            layout: Of an island.
            count: How many there are.
            link: Bytes per second and seconds of latency of an island's link.
        """
        stages, trained = predictor.stages(layout), predictor.elements(layout.tensor, trained=True)
        fullest = max(
            sum(trained[layer] for stage in stages.stages_of(rank) for layer in stages.layers(stage))
            for rank in range(layout.pipeline)
        )
        network = predictor.task.machine.network
        return cls(
            count=count,
            step_seconds=predictor.predict(layout).seconds,
            elements=ceil(fullest / layout.data),
            ranks=layout.gpus,
            bytes_per_second=link[0] * network.efficiency.link,
            latency_seconds=link[1],
        )

    def sent_bytes(self, terms: Terms) -> float:
        """Bytes over the link of an island, in each direction, for a round about every share."""
        return 2 * (self.count - 1) / self.count * wire_bytes(self.elements, terms.wire) * self.ranks

    def round_seconds(self, terms: Terms) -> float:
        """A round about one share."""
        wire = self.sent_bytes(terms) / terms.shares / self.bytes_per_second
        return _LATENCIES * self.latency_seconds + wire

    def mean_step_seconds(self, terms: Terms) -> float:
        """An inner step with its part of the rounds, of which those are hidden that steps go on beside."""
        waits = max(0.0, self.round_seconds(terms) - terms.delay * self.step_seconds)
        # The link itself has to carry each round before the next begins.
        link = self.round_seconds(terms) * terms.shares / terms.every
        return max(self.step_seconds + waits * terms.shares / terms.every, link)

    def speed(self, terms: Terms) -> float:
        """Part of the speed over a link that costs nothing, 0 to 1."""
        return self.step_seconds / self.mean_step_seconds(terms)

    def near_from(self, terms: Terms) -> int:
        """The least ``every`` with which islands reach :data:`NEAR` of that speed."""
        round_seconds = self.round_seconds(terms) * terms.shares
        hidden = terms.delay * self.step_seconds * terms.shares
        waits = max(0.0, round_seconds - hidden) / self.step_seconds
        least = ceil(max(waits * NEAR / (1 - NEAR), round_seconds / self.step_seconds * NEAR))
        return max(least, terms.delay * terms.shares + 1, terms.shares)

    def chosen(self) -> Terms:
        """The most careful of the usual terms that come near: seldom rounds, then narrow wires, then delay.

        fp32 where rounds every 50 steps or more often are near enough, else bf16, else int8; where int8 is
        not near with the most seldom rounds, steps go on while a round is under way.
        """
        wires: tuple[Wire, ...] = ("fp32", "bf16", "int8")
        for wire in wires:
            least = self.near_from(Terms(wire=wire))
            most = USUAL[-1] if wire == wires[-1] else Terms().every
            if least <= most:
                return Terms(wire=wire, every=next(every for every in USUAL if every >= least))
        delay = ceil(self.round_seconds(Terms(wire=wires[-1])) / self.step_seconds)
        return Terms(wire=wires[-1], delay=delay, every=max(USUAL[-1], delay + 1))
