"""Micro-batches that do what one before them did, as bytes alone: a thousand actions in milliseconds.

An action's memory depends on its kind, its virtual stage and whether its parameters have gradients yet. So
the first two micro-batches of every (kind, stage) are walked tensor by tensor, the second one noted, and all
others are a :class:`~dsx.plan.memory.ledger.Delta`. What goes from rank to rank lives as long as the channel
holds it, whatever the micro-batch; that is followed one by one (:class:`Replay`).
"""

from __future__ import annotations

from collections.abc import Sequence

from dsx.plan.memory.ledger import Delta, Ledger, Storage
from dsx.plan.memory.tape import Tensor
from dsx.spec.schedule import TRANSFERS, Action, Op

Kind = tuple[Op, int]
"""What an action does and for which virtual stage."""


def walked(row: Sequence[Action]) -> frozenset[int]:
    """Micro-batches that are among the first two of some kind of computation in a rank's row."""
    seen: dict[Kind, list[int]] = {}
    for action in row:
        if action.op not in TRANSFERS:
            seen.setdefault((action.op, action.stage), []).append(action.micro_batch)
    return frozenset(micro_batch for found in seen.values() for micro_batch in found[:2])


class Replay:
    """What is known of a rank's actions.

    Args:
        ledger: Counts.
        row: The rank's, lowered.
    """

    def __init__(self, ledger: Ledger, row: Sequence[Action]) -> None:
        self.ledger, self.walked = ledger, walked(row)
        self._deltas: dict[Kind, Delta] = {}
        self._seen: dict[Kind, int] = {}
        self._sent: dict[tuple[str, int], Storage] = {}
        self._loss: Storage | None = None
        self._losses = 0

    def begin(self) -> None:
        """Before a step."""
        self._seen.clear()

    def wants(self, action: Action) -> bool:
        """Whether this one, walked now, is to be noted."""
        kind = (action.op, action.stage)
        self._seen[kind] = self._seen.get(kind, 0) + 1
        return kind not in self._deltas and self._seen[kind] == 2

    def note(self, action: Action, delta: Delta) -> None:
        """What it did."""
        self._deltas[action.op, action.stage] = delta

    def sends(self, kind: str, stage: int, tensor: Tensor) -> None:
        """Note what a walked action sends."""
        assert tensor.storage is not None
        self._sent[kind, stage] = tensor.storage

    def like_sent(self, kind: str, stage: int, like: Tensor) -> Tensor:
        """What another micro-batch sends; :meth:`again` has counted it."""
        known = self._sent[kind, stage]
        storage = Storage.counted(self.ledger, known.label, known.size_bytes)
        return Tensor(like.shape, like.width, storage)

    def again(self, action: Action) -> None:
        """A computation without its tensors."""
        self.ledger.again(self._deltas[action.op, action.stage])

    def keeps_loss(self, loss: Tensor | None) -> None:
        """A walked loss, or with None one more like it, is kept until the step is over."""
        if loss is None:
            self._losses += 1
        else:
            self._loss = loss.storage

    def end(self) -> None:
        """The step's losses go."""
        if self._loss is not None:
            self.ledger.give(self._loss.label, self._loss.size_bytes * self._losses)
        self._losses = 0


def leave(tensor: Tensor) -> None:
    """Drop a received tensor whose bytes an action's delta gives back."""
    assert tensor.storage is not None
    tensor.storage.holders += 1
