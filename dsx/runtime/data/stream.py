"""A source read as the run goes: documents of one lane -> tokens -> sequences, from any place on.

A source is cut into units (:mod:`dsx.runtime.data.units`) and read in lanes side by side. Of n units, lane
``v`` of V reads the stretch ``[v * n / V, (v + 1) * n / V)``, document by document where a unit is shared.
What a lane reads depends on the source and V alone, so a layout decides only who reads it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dsx.errors import DataError
from dsx.runtime.data.order import keyed_hash
from dsx.runtime.data.tokenizers import TokenIds, Tokenizer
from dsx.runtime.data.units import Unit

_POINTS = 1 << 64
_FEWEST_CHARACTERS, _MOST_CHARACTERS = 4 << 10, 64 << 10  # tokenised at once: little when a lane is opened


@dataclass(frozen=True, slots=True)
class Place:
    """Where a sequence begins in a lane.

    Args:
        turn: How often the lane has been read to its end.
        unit: Number of the unit, from 0 in the lane.
        offset: Where its document begins in the unit; None for the unit's first.
        skip: Tokens of that document before the sequence.
    """

    turn: int = 0
    unit: int = 0
    offset: int | None = None
    skip: int = 0

    def plain(self) -> list[int | None]:
        """For a checkpoint: ``Place(*place.plain()) == place``."""
        return list(astuple(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamedSource:
    """A source and all that decides what is read of it.

    Args:
        name: What the config calls it.
        units: Its parts.
        tokenizer: Text -> ids.
        held_out: Share of the documents that are never trained on.
        seed: Decides which.
    """

    name: str
    units: tuple[Unit, ...]
    tokenizer: Tokenizer
    held_out: float
    seed: int

    def is_held_out(self, unit: Unit, offset: int) -> bool:
        """Whether a document is kept for evaluation: by its place, so that no count is needed."""
        return keyed_hash("held-out", self.seed, unit.name, offset) < self.held_out * _POINTS

    def lane(self, lane: int, lanes: int) -> tuple[LaneUnit, ...]:
        """What lane number ``lane`` of ``lanes`` reads."""
        count = len(self.units)
        first, last = lane * count // lanes, -((lane + 1) * count // -lanes)
        return tuple(
            LaneUnit(source=self, unit=self.units[index], index=index, lane=lane, lanes=lanes)
            for index in range(first, last)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneUnit:
    """One lane's training documents of one unit."""

    source: StreamedSource
    unit: Unit
    index: int
    lane: int
    lanes: int

    def documents(self, start: int | None) -> Iterator[tuple[int, str]]:
        """As :meth:`dsx.runtime.data.units.Unit.documents`."""
        shared = self._lane_of(0) != self._lane_of(_POINTS - 1)
        for offset, text in self.unit.documents(start):
            if self.source.is_held_out(self.unit, offset):
                continue
            if not shared or self._lane_of(keyed_hash("lane", self.unit.name, offset)) == self.lane:
                yield offset, text

    def _lane_of(self, point: int) -> int:
        return (self.index * _POINTS + point) * self.lanes // (len(self.source.units) * _POINTS)


class LaneReader:
    """Sequences of one lane of one source, in reading order, endless.

    Args:
        source: The source.
        lane: Number of the lane.
        lanes: Number of lanes.
        sequence_length: S.
        place: Where the first sequence begins.
    """

    def __init__(
        self, source: StreamedSource, lane: int, lanes: int, *, sequence_length: int, place: Place
    ) -> None:
        self._source, self._lane = source, lane
        self._units = source.lane(lane, lanes)
        self._length = sequence_length
        self._begun, self._skip = place, 0
        self._encoded = self._encode()
        self._pending: deque[tuple[Place, npt.NDArray[Any]]] = deque()
        self._held = 0
        self._dtype = np.uint16 if source.tokenizer.vocab_size <= 1 << 16 else np.uint32

    @property
    def place(self) -> Place:
        """Where the next sequence begins."""
        if not self._pending:
            return self._begun
        document = self._pending[0][0]
        return Place(document.turn, document.unit, document.offset, self._skip)

    def read(self) -> npt.NDArray[np.unsignedinteger[Any]]:
        """The next sequence: S + 1 ids; the last one is the next sequence's first.

        Raises:
            DataError: See :class:`dsx.runtime.data.units.Unit`; or no document is left to train on.
        """
        wanted = self._length + 1
        while self._held < wanted:
            self._refill()
        parts, skip = [], self._skip
        for _, ids in self._pending:
            parts.append(ids[skip : skip + wanted])
            wanted -= len(parts[-1])
            skip = 0
            if not wanted:
                break
        self._drop(self._length)
        return np.concatenate(parts)

    def _refill(self) -> None:
        first = not self._pending
        for place, ids in next(self._encoded):
            self._pending.append((place, ids))
            self._held += len(ids)
        if first:  # nothing has been read yet: take up where the place says
            if self._begun.skip >= len(self._pending[0][1]):
                tokens = len(self._pending[0][1])
                raise DataError(
                    f"{self._source.name}, document at {self._begun.offset}",
                    f"it has {tokens} tokens, the checkpoint was at token {self._begun.skip}",
                    "restore the text and the tokenizer of that run",
                )
            self._drop(self._begun.skip)

    def _drop(self, tokens: int) -> None:
        self._held -= tokens
        self._skip += tokens
        while self._pending and self._skip >= len(self._pending[0][1]):
            self._skip -= len(self._pending.popleft()[1])

    def _encode(self) -> Iterator[list[tuple[Place, npt.NDArray[Any]]]]:
        batch: list[tuple[Place, str]] = []
        length, wanted = 0, _FEWEST_CHARACTERS
        for place, text in self._documents():
            batch.append((place, text))
            length += len(text)
            if length >= wanted:
                yield self._ids(batch)
                batch, length, wanted = [], 0, min(2 * wanted, _MOST_CHARACTERS)

    def _ids(self, batch: list[tuple[Place, str]]) -> list[tuple[Place, npt.NDArray[Any]]]:
        tokenizer = self._source.tokenizer
        encoded: list[TokenIds] = tokenizer.encode([text for _, text in batch])
        return [
            (place, np.append(ids, tokenizer.end_id).astype(self._dtype))
            for (place, _), ids in zip(batch, encoded, strict=True)
        ]

    def _documents(self) -> Iterator[tuple[Place, str]]:
        turn, at, offset = self._begun.turn, self._begun.unit, self._begun.offset
        whole, found = at == 0 and offset is None, False
        while True:
            for number in range(at, len(self._units)):
                for position, text in self._units[number].documents(offset):
                    found = True
                    yield Place(turn, number, position), text
                offset = None
            if whole and not found:
                raise DataError(
                    f'source "{self._source.name}"',
                    f"lane {self._lane} of dsx.data.lanes has no document to train on",
                    "use fewer dsx.data.lanes, or prepare so little text beforehand (streaming: false)",
                )
            turn, at, whole, found = turn + 1, 0, True, False
