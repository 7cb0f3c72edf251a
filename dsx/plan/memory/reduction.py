"""Gradients over data parallelism as dsx/runtime/zero_adapters/reduction.py sends them: chunk by chunk.

P: parameters of a bucket; w: bytes of an element on the wire; N: data-parallel degree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from dsx.plan.memory.tape import Label, Leaf, Ledger, Storage, Tensor


class GradientStore(Protocol):
    """Where an optimizer accumulates gradients, and where it wants the averaged ones."""

    def take(self, leaf: Leaf) -> Tensor | None:
        """The gradient of this step, which the store forgets; None if there is none or it stays in place."""

    def put(self, leaf: Leaf, gradient: Tensor) -> None:
        """The average, a view on its bucket."""


@dataclass(frozen=True, slots=True)
class _Bucket:
    leaves: Sequence[Leaf]
    flat: Tensor


class ChunkReduction:
    """Reduces every parameter once per step, each chunk's after its last action.

    Args:
        ledger: Counts.
        store: Of the optimizer.
        leaves: All parameters, in the module's order.
        uses: Virtual stage -> parameters that its layers use.
        dp: Data-parallel degree.
        width: Bytes of an element on the wire.
        bucket: Elements that close a bucket.
    """

    def __init__(
        self,
        ledger: Ledger,
        store: GradientStore,
        *,
        leaves: Sequence[Leaf],
        uses: Mapping[int, Sequence[Leaf]],
        dp: int,
        width: int,
        bucket: int,
    ) -> None:
        self._ledger, self._store, self._dp = ledger, store, dp
        self._width, self._bucket_elements = width, bucket
        self._users: dict[str, set[int]] = {leaf.name: set() for leaf in leaves}
        self._leaves = list(leaves)
        for stage, used in uses.items():
            for leaf in used:
                self._users[leaf.name].add(stage)
        self._done: set[int] = set()
        self._left: set[str] = set()
        self._flying: list[_Bucket] = []

    def chunk_done(self, stage: int) -> None:
        """A virtual stage has nothing more to do in this step."""
        self._done.add(stage)
        self._start([leaf for leaf in self._leaves if self._users[leaf.name] <= self._done])

    def finish(self) -> None:
        """Before the update: the rest, then the averages go to the store, bucket by bucket."""
        self._start(self._leaves)
        while self._flying:
            self._land(self._flying.pop(0))
        self._done.clear()
        self._left.clear()

    def _start(self, leaves: Sequence[Leaf]) -> None:
        waiting: list[Leaf] = []
        elements = 0
        for leaf in leaves:
            if leaf.name in self._left:
                continue
            self._left.add(leaf.name)
            waiting.append(leaf)
            elements += leaf.numel
            if self._dp == 1 or elements >= self._bucket_elements:
                self._send(waiting)
                waiting, elements = [], 0
        if waiting:
            self._send(waiting)

    def _send(self, leaves: list[Leaf]) -> None:
        if self._dp == 1:
            gradient = self._store.take(leaves[0])
            self._flying.append(_Bucket(leaves, gradient or self._flat(0)))
            return
        flat = self._flat(sum(leaf.numel for leaf in leaves))
        for leaf in leaves:
            self._store.take(leaf)
        self._flying.append(_Bucket(leaves, flat))

    def _flat(self, elements: int) -> Tensor:
        what = Label(
            "buckets", "gradients under way", "P w, P of a chunk", "dsx zero_adapters/reduction.py _send"
        )
        storage = Storage(self._ledger, what, elements * self._width)
        return Tensor((elements,), self._width, storage)

    def _land(self, bucket: _Bucket) -> None:
        for leaf in bucket.leaves:
            self._store.put(leaf, bucket.flat)
