"""Weight gradients of a divided backward on the ledger, in the order of dsx/nn/split.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from dsx.memory.ledger import Leaf, Storage, Tensor
from dsx.schedules.hiding import Fillers

Use = tuple[Callable[[], None], Callable[[], Storage]]
"""Begins the communication of a gradient; finishes it, held once for the caller."""


@dataclass(slots=True)
class WaitingGradients:
    """Those of one micro-batch in one virtual stage.

    Attributes:
        hooked: Whether parameters' hooks (ZeRO-3's) wait for the second part; otherwise what is computed
            behind an exchange is added up at once.
    """

    hooked: bool
    _uses: dict[Leaf, list[Use]] = field(default_factory=dict)
    _totals: dict[Leaf, Storage] = field(default_factory=dict)
    _fillers: Fillers[Leaf] = field(default_factory=Fillers)

    def keep(self, leaf: Leaf, use: Use) -> None:
        """A use whose gradient is computed later."""
        self._uses.setdefault(leaf, []).append(use)

    def block(self) -> None:
        """The backward of a block with exchanges begins."""
        self._fillers.block(leaf for leaf, uses in self._uses.items() if uses)

    def meanwhile(self) -> None:
        """Compute what runs behind an exchange."""
        for leaf, total in self._computed(self._fillers.exchange()):
            if self.hooked:
                self._totals[leaf] = total
            else:
                _give(leaf, total)

    def rest(self) -> list[Leaf]:
        """The parameters that are to get something yet."""
        return [leaf for leaf, uses in self._uses.items() if uses or leaf in self._totals]

    def deliver(self) -> None:
        """Give all of them what waits."""
        for leaf, total in self._computed(self.rest()):
            _give(leaf, total)

    def _computed(self, leaves: Sequence[Leaf]) -> Iterator[tuple[Leaf, Storage]]:
        """Gradients, one after the other, each use's communication begun during the one before."""
        begins = [begin for leaf in leaves for begin, _ in self._uses[leaf]]
        begun = done = 0
        for leaf in leaves:
            total = self._totals.pop(leaf, None)
            for _, finish in self._uses[leaf]:
                while begun < min(done + 2, len(begins)):
                    begins[begun]()
                    begun += 1
                gradient, done = finish(), done + 1
                if total is None:
                    total = gradient
                else:
                    gradient.drop()
            self._uses[leaf] = []
            assert total is not None
            yield leaf, total


def _give(leaf: Leaf, total: Storage) -> None:
    leaf.receive(Tensor(leaf.shape, leaf.width, total))
    total.drop()
