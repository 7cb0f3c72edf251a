"""What a rank of an island keeps for the steps that islands take together, and takes for a round.

It lies on the host: that of a GPU, or, in a run on CPUs, the rank's own memory. At ZeRO-0 replicas hold the
same masters, and each exchanges its part of a share of the model (dsx.outer.shares).
"""

from __future__ import annotations

from dataclasses import dataclass

from dsx.memory.ledger import Ledger, Tensor
from dsx.memory.states import States, free
from dsx.parallel.islands import OUTER_ERROR, OUTER_MOMENTUM, OUTER_WEIGHTS, SEGMENT, Wire, cut, wire_bytes

OUTER_STEP = "outer step"
"""Name of the phase in which islands average their movements."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IslandSettings:
    """The config's part in it (``dsx.outer``).

    Attributes:
        count: How many islands there are.
        shares: Parts of the model that have rounds of their own.
        wire: How a number travels.
        goes_on: Whether inner steps go on while a round is under way (``delay``).
    """

    count: int
    shares: int = 1
    wire: Wire = "fp32"
    goes_on: bool = False


class IslandMemory:
    """Common weights, their momentum, and rounds, of one rank.

    Attributes:
        goes_on: Whether inner steps go on while a round is under way.
    """

    def __init__(self, settings: IslandSettings, states: States, *, unified: bool) -> None:
        self._settings, self._device, self.goes_on = settings, states.ledger, settings.goes_on
        self._host: Ledger = states.ledger if unified else states.host.ledger
        self._reads_device = not (unified or states.offload.optimizer)
        buffers = states.plan.buffers(states.dp_rank)
        self._held = sum(buffer.numel for buffer in buffers)
        last = settings.shares - 1  # the largest of the parts that `cut` makes
        lengths = [piece.stop - piece.start for buffer in buffers for piece in buffer.pieces]
        bounds = [cut(0, length, last, settings.shares) for length in lengths]
        self._pieces = [high - low for low, high in bounds if high > low]
        self._share = sum(self._pieces)
        self._replicas = states.plan.dp if states.plan.stage == 0 else 1
        self._rounds = settings.wire == "int8"
        self._kept: list[Tensor] = []
        self._flight: list[Tensor] = []

    def start(self) -> None:
        """Before the first step: the states, and the masters as they are to fill them."""
        names = (OUTER_WEIGHTS, OUTER_MOMENTUM, *((OUTER_ERROR,) if self._rounds else ()))
        for name in names:
            self._kept.append(self._hold("optimizer", name.replace("_", " "), 4 * self._held))
        free(self._read("masters"))

    def launch(self) -> None:
        """A round begins: the masters as they are, and what they have moved."""
        self._flight.append(self._read("weights that were sent"))
        self._flight.append(self._hold("temporaries", "movement", 4 * self._share))

    def exchange(self) -> None:
        """The mean, segment by segment, as the first island makes it for the others."""
        of, mine = self._settings.count, -(-self._share // self._replicas)
        if self._rounds:
            self._flight.append(self._hold("temporaries", "what is kept back", 4 * mine))
        self._flight.append(self._hold("temporaries", "mean movement", 4 * mine))
        wired = sum(wire_bytes(size, self._settings.wire) for size in self._pieces) // self._replicas
        messages = self._hold("transfers", "means on their way", wired)
        # Of each other island two that wait and one that comes; the sum, and what is said of it.
        size = (12 * (of - 1) + 8) * min(mine, SEGMENT)
        free(self._hold("temporaries", "movements and mean", size), messages)

    def land(self) -> None:
        """The outer optimizer moves the common weights, and the masters follow."""
        size, largest = 4 * self._share, max(self._pieces, default=0)
        if self._replicas > 1:
            through = self._hold("temporaries", "parts of the mean", size + size * 2 // self._replicas)
            self._flight.append(self._hold("temporaries", "mean movement, whole", size))
            free(through)
        free(self._hold("temporaries", "in float64", 24 * largest))
        now = self._read("masters")
        moved = self._hold("temporaries", "masters to be", size)
        together = self._hold("temporaries", "the same in one tensor", size)
        if self._reads_device:
            free(self._on_device())
        free(now, moved, together, *self._flight)
        self._flight = []

    def _read(self, name: str) -> Tensor:
        """A copy of a share of the masters on the host, by way of the device if that has them."""
        passing = [self._on_device()] if self._reads_device else []
        copy = self._hold("temporaries", name, 4 * self._share)
        free(*passing)
        return copy

    def _on_device(self) -> Tensor:
        return self._device.tensor("temporaries", "masters on their way", self._share, 4)

    def _hold(self, category: str, name: str, size_bytes: int) -> Tensor:
        return self._host.tensor(category, name, size_bytes, 1)
