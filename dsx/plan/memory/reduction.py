"""Gradients over data parallelism as dsx/runtime/zero_adapters/reduction.py sends them: chunk by chunk.

P: parameters of a bucket; w: bytes of an element on the wire; N: data-parallel degree.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from dsx.plan.memory.tape import Label, Leaf, Ledger, Storage, Tensor

AT_ONCE = 2
"""Buckets under way where gradients stay in place (zero_adapters/reduction.py)."""


class GradientStore(Protocol):
    """Where an optimizer accumulates gradients, and where it wants the averaged ones.

    Attributes:
        in_place: Gradients stay in the store's memory.
    """

    in_place: bool

    def take(self, leaf: Leaf) -> Tensor | None:
        """The gradient of this step, which the store forgets; None if there is none or it stays in place."""

    def put(self, leaf: Leaf, gradient: Tensor) -> None:
        """The average, a view on its bucket."""


class _Piece(NamedTuple):
    """Elements of a parameter's gradient."""

    leaf: Leaf
    length: int


@dataclass(frozen=True, slots=True)
class _Bucket:
    pieces: Sequence[_Piece]
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
        bucket: Elements that close a bucket; 0 for the largest parameter's.
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
        self._width = width
        self._bucket_elements = bucket or max((leaf.numel for leaf in leaves), default=1)
        self._users: dict[str, set[int]] = {leaf.name: set() for leaf in leaves}
        self._leaves = list(leaves)
        for stage, used in uses.items():
            for leaf in used:
                self._users[leaf.name].add(stage)
        self._done: set[int] = set()
        self._left: set[str] = set()
        self._waiting: deque[list[_Piece]] = deque()
        self._flying: deque[_Bucket] = deque()

    def chunk_done(self, stage: int) -> None:
        """A virtual stage has nothing more to do in this step."""
        self._done.add(stage)
        self._start([leaf for leaf in self._leaves if self._users[leaf.name] <= self._done])

    def advance(self) -> None:
        """Before an action: the next bucket, in the place of the oldest one if there are enough."""
        if self._waiting:
            if self._is_full:
                self._land(self._flying.popleft())
            self._send(self._waiting.popleft())

    def finish(self) -> None:
        """Before the update: the rest, then the averages go to the store, bucket by bucket."""
        self._start(self._leaves)
        while self._waiting:
            self.advance()
        while self._flying:
            self._land(self._flying.popleft())
        self._done.clear()
        self._left.clear()

    def _start(self, leaves: Sequence[Leaf]) -> None:
        filling: list[_Piece] = []
        room = self._bucket_elements
        for leaf in leaves:
            if leaf.name in self._left:
                continue
            self._left.add(leaf.name)
            if self._store.in_place and self._dp == 1:
                continue
            for piece in self._cut(leaf, room):
                filling.append(piece)
                room -= piece.length
                if self._dp == 1 or room <= 0:
                    self._waiting.append(filling)
                    filling, room = [], self._bucket_elements
        if filling:
            self._waiting.append(filling)
        while self._waiting and not self._is_full:
            self._send(self._waiting.popleft())

    def _cut(self, leaf: Leaf, room: int) -> Iterator[_Piece]:
        """All of it; in place, as much as the bucket has room for, then buckets full of it."""
        left = leaf.numel
        while left:
            length = min(room, left) if self._store.in_place else left
            yield _Piece(leaf, length)
            left, room = left - length, self._bucket_elements

    @property
    def _is_full(self) -> bool:
        return self._store.in_place and len(self._flying) >= AT_ONCE

    def _send(self, pieces: Sequence[_Piece]) -> None:
        if self._dp == 1:
            gradient = self._store.take(pieces[0].leaf)
            self._flying.append(_Bucket(pieces, gradient or self._flat(0)))
            return
        flat = self._flat(sum(piece.length for piece in pieces))
        for piece in pieces:
            self._store.take(piece.leaf)
        self._flying.append(_Bucket(pieces, flat))

    def _flat(self, elements: int) -> Tensor:
        what = Label(
            "buckets", "gradients under way", "P w, P of a chunk", "dsx zero_adapters/reduction.py _send"
        )
        storage = Storage(self._ledger, what, elements * self._width)
        return Tensor((elements,), self._width, storage)

    def _land(self, bucket: _Bucket) -> None:
        for piece in bucket.pieces:
            self._store.put(piece.leaf, bucket.flat)
