"""What runs behind exchanges of experts' rows: weight gradients, by counts and never by the clock.

Between the start of an exchange (:mod:`dsx.nn.experts`) and the wait for it, a divided backward computes
weight gradients that wait, those of the layers above of the same micro-batch. Other micro-batches' would
hide nothing on the rank that sets the pace: zb_h1's first one and all of zbv's have computed them by then.
Who runs a step, replays its memory and prices it follows one rule.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from dsx.parallel.reduction import last_backwards
from dsx.schedules.schedule import Action, Op

T = TypeVar("T")


@dataclass(slots=True)
class Fillers(Generic[T]):
    """What waits in one backward, shared out evenly over the exchanges of the block that is next.

    How many these are is known of the block before, whose first one gets all.

    >>> fillers = Fillers[str]()
    >>> fillers.block("ab"), fillers.exchange(), fillers.exchange()
    (None, ['a', 'b'], [])
    >>> fillers.block("abc"), fillers.exchange(), fillers.exchange()
    (None, ['a', 'b'], ['c'])
    """

    _waiting: deque[T] = field(default_factory=deque)
    _exchanges: int = 1
    _met: int = 0
    _share: int = 0

    def block(self, waiting: Iterable[T]) -> None:
        """The backward of a block with exchanges begins; ``waiting`` is what those before it have left."""
        self._exchanges, self._met = self._met or self._exchanges, 0
        self._waiting = deque(waiting)
        self._share = -(-len(self._waiting) // self._exchanges)

    def exchange(self) -> list[T]:
        """What runs while the rows of the next exchange travel."""
        self._met += 1
        return [self._waiting.popleft() for _ in range(min(self._share, len(self._waiting)))]


def in_parts(row: Sequence[Action]) -> frozenset[int]:
    """Positions of a rank's whole backwards that run in two parts, one right after the other, for this.

    In a row that divides others (DualPipeV); layers of other rows cannot. In a stage's last one gradients
    leave as they come, so that it stays whole.
    """
    if not any(action.op is Op.BACKWARD_WEIGHT for action in row):
        return frozenset()
    whole = {position for position, action in enumerate(row) if action.op is Op.BACKWARD}
    return frozenset(whole - last_backwards(row).keys())
