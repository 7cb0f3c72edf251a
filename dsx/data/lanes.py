"""Text read as the run goes: lanes side by side, shuffled in blocks, mixed in exact shares, numbered samples.

Global sample ``g`` is row ``g // V`` of lane ``g % V``. Which source it is of follows from lane and row
(:class:`dsx.data.order.Shares`); so a lane takes sequence after sequence of each source.

They are shuffled in blocks of N: while block b is handed out, block b + 1 is read, one sequence for each. So
reading is even, 2 N sequences are in memory, and a checkpoint needs only the place where a block began: a
resumed run reads that block again. A buffer refilled slot by slot would have to be stored whole.

A source is cut into units (:mod:`dsx.data.units`) and read in lanes side by side. Of n units, lane
``v`` of V reads the stretch ``[v * n / V, (v + 1) * n / V)``, document by document where a unit is shared.
What a lane reads depends on the source and V alone, so a layout decides only who reads it. Before a run,
:func:`prepare_stream` looks for everything about a source that can be wrong, and writes its held-out text.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from itertools import chain
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import numpy.typing as npt

from dsx.config.schema import DataConfig
from dsx.data.corpus import VERSION, CorpusInfo, too_long, write_corpus, write_examples, write_once
from dsx.data.files import LocalFiles, Tables, open_source
from dsx.data.masks import Encoded, Masks
from dsx.data.order import Shares, keyed_hash, permute
from dsx.data.packs import Packs, Sample, Sequences, require_some
from dsx.data.records import example, record_units
from dsx.data.tokenizers import TokenIds, Tokenizer, load_tokenizer
from dsx.data.units import Unit
from dsx.errors import DataError
from dsx.terminal import seconds

Tokens = npt.NDArray[np.unsignedinteger[Any]]
"""Ids [tokens]; of chats and completions ids and whether each is trained on [tokens, 2]."""

Read = Tokens | tuple[Packs, int]
"""What is read at a time: a sequence, or a pack by its number in a window."""
Document = tuple[Unit, int, str]
"""Unit, place in it, and text, of a record JSON."""

_POINTS = 1 << 64
_PACKED_TOGETHER = 32  # sequences: a lane's last pack, which stays half empty, is one of so many
_FEWEST_CHARACTERS, _MOST_CHARACTERS = 4 << 10, 64 << 10  # tokenised at once: little when a lane is opened


@dataclass(frozen=True, slots=True)
class StreamPlace:
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
        """The place as plain data for a checkpoint: ``StreamPlace(*place.plain()) == place``."""
        return list(astuple(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamedSource:
    """A source and all that decides what is read of it.

    Args:
        name: What the config calls it.
        units: Its parts.
        tokenizer: Text -> ids.
        data: Its settings: those of records, and which share of the documents is never trained on.
        masks: Makes documents of chats and completions; None for text.
        skipped: Records that could not be used.
    """

    name: str
    units: tuple[Unit, ...]
    tokenizer: Tokenizer
    data: DataConfig
    masks: Masks | None
    skipped: list[str] = field(default_factory=list)

    def is_held_out(self, unit: Unit, offset: int) -> bool:
        """Whether a document is kept for evaluation, by its place, so that nothing needs to be counted."""
        return keyed_hash("held-out", self.data.seed, unit.name, offset) < self.data.held_out * _POINTS

    def encode(self, documents: Sequence[Document]) -> list[list[Tokens]]:
        """The tokens of each: text and its end token, or of a record its documents, perhaps none."""
        dtype = np.uint16 if self.tokenizer.vocab_size <= 1 << 16 else np.uint32
        if self.masks is not None:
            each = self.examples(documents, self.masks)
            return [[np.stack([one.ids, one.trained], 1).astype(dtype) for one in found] for found in each]
        encoded: list[TokenIds] = self.tokenizer.encode([text for *_, text in documents])
        return [[np.append(ids, self.tokenizer.end_id).astype(dtype)] for ids in encoded]

    def examples(self, documents: Sequence[Document], masks: Masks) -> list[list[Encoded]]:
        """The documents of each record. Raises DataError for what is refused, with its place."""
        found: list[list[Encoded]] = [[] for _ in documents]
        read = (example(self.data, str(number), text) for number, (*_, text) in enumerate(documents))
        for one in chain.from_iterable(masks.encode(read)):
            problem = one if isinstance(one, DataError) else too_long(one, self.data)
            unit, at, _ = documents[int(one.where)]
            if not isinstance(one, DataError) and problem is None:
                found[int(one.where)].append(one)
            elif problem is one and self.data.bad_records == "skip":
                self.skipped.append(problem.what)
            elif problem is not None:
                raise DataError(unit.place(at), problem.what, problem.fix)
        return found

    def lane(self, lane: int, lanes: int) -> tuple[LaneUnit, ...]:
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
        shared = self._lane_of(0) != self._lane_of(_POINTS - 1)
        for offset, text in self.unit.documents(start):
            if self.source.is_held_out(self.unit, offset):
                continue
            if not shared or self._lane_of(keyed_hash("lane", self.unit.name, offset)) == self.lane:
                yield offset, text

    def _lane_of(self, point: int) -> int:
        return (self.index * _POINTS + point) * self.lanes // (len(self.source.units) * _POINTS)


class LaneReader:
    """The endless sequences, or packs, of one lane of one source, in reading order.

    To be packed, records are read until their documents would fill some sequences, and packed together. A
    place is then the first record of such a window, and how many of its packs have been read (``skip``).

    Args:
        source: The source.
        lane: The lane's number.
        lanes: How many there are.
        sequence_length: S.
        place: Where to begin.
        packed: Pack documents whole instead of cutting their stream into sequences.
    """

    def __init__(
        self,
        source: StreamedSource,
        lane: int,
        lanes: int,
        *,
        sequence_length: int,
        place: StreamPlace,
        packed: bool = False,
    ) -> None:
        self._source, self._lane, self._length = source, lane, sequence_length
        self._units, self._begun = source.lane(lane, lanes), place
        self._documents = chain.from_iterable(self._encoded())
        self._read: Iterator[Read] = self._packs() if packed else self._sequences()
        self.place = place
        """Where the next sequence begins."""

    def read(self) -> Read:
        """The next sequence, S + 1 tokens of which the last is the next one's first; or the next pack."""
        return next(self._read)

    def _sequences(self) -> Iterator[Tokens]:
        pending, skip = deque[tuple[StreamPlace, Tokens]](), self._begun.skip
        held = -skip
        for place, found in self._documents:
            pending += [(place, np.concatenate(found))] if found else []
            held += sum(map(len, found))
            if pending and skip >= len(pending[0][1]):  # nothing has been read yet
                raise DataError(
                    f"{self._source.name}, document at {self._begun.offset}",
                    f"it has {len(pending[0][1])} tokens, the checkpoint was at token {skip}",
                    "restore the text and the tokenizer of that run",
                )
            while held > self._length:
                parts = [tokens for _, tokens in pending]
                whole = parts[0] if len(parts) == 1 else np.concatenate(parts)
                sequence = whole[skip : skip + self._length + 1].copy()
                skip, held = skip + self._length, held - self._length
                while skip >= len(pending[0][1]):
                    skip -= len(pending.popleft()[1])
                self.place = replace(pending[0][0], skip=skip)
                yield sequence

    def _packs(self) -> Iterator[tuple[Packs, int]]:
        skip, data = self._begun.skip, self._source.data
        while True:
            begun, found = next(self._documents)
            while sum(map(len, found)) < _PACKED_TOGETHER * self._length:
                found += next(self._documents)[1]
            tokens, sizes = np.concatenate(found), np.array([[len(one), one[1:, 1].sum()] for one in found])
            packs = Packs(
                tokens[:, 0],
                tokens[:, 1],
                sizes,
                self._length,
                pad_id=self._source.tokenizer.end_id,
                drop=data.too_long == "drop",
            )
            require_some(packs, len(tokens), "training")
            for index in range(skip, len(packs)):
                self.place = replace(begun, skip=index + 1)
                yield packs, index
            skip = 0

    def _encoded(self) -> Iterator[list[tuple[StreamPlace, list[Tokens]]]]:
        """Places, each with the tokens of what begins there, some at a time. Raises DataError."""
        begun = self._begun
        while True:
            found = (begun.unit, begun.offset) != (0, None)
            for batch in self._batches(begun):
                made = self._source.encode(
                    [(self._units[at.unit].unit, at.offset or 0, text) for at, text in batch]
                )
                found = found or any(made)
                yield [(at, tokens) for (at, _), tokens in zip(batch, made, strict=True)]
            if not found:
                raise DataError(
                    f'source "{self._source.name}"',
                    f"lane {self._lane} of dsx.data.lanes has no document to train on",
                    "use fewer dsx.data.lanes, or prepare so little text beforehand (streaming: false)",
                )
            begun = StreamPlace(begun.turn + 1)

    def _batches(self, begun: StreamPlace) -> Iterator[list[tuple[StreamPlace, str]]]:
        """The documents from a place to the end of its turn."""
        batch: list[tuple[StreamPlace, str]] = []
        length, wanted, offset = 0, _FEWEST_CHARACTERS, begun.offset
        for number in range(begun.unit, len(self._units)):
            for position, text in self._units[number].documents(offset):
                batch.append((StreamPlace(begun.turn, number, position), text))
                length += len(text)
                if length >= wanted:
                    yield batch
                    batch, length, wanted = [], 0, min(2 * wanted, _MOST_CHARACTERS)
            offset = None
        if batch:
            yield batch


_LONG_SECONDS = 1.0
StreamState = Mapping[str, Sequence[Any]]
"""``source/lane`` -> number of a block, and where it begins (:meth:`StreamPlace.plain`)."""


class _Shuffle:
    """Sequences of one lane of one source by number, shuffled within blocks; numbers must only grow."""

    def __init__(self, reader: LaneReader, size: int, key: Callable[[int], int], *, block: int) -> None:
        self._reader, self._size, self._key = reader, size, key
        self._block = block
        self._now: list[Read] = []
        self._next: list[Read] = []
        self.begins = {block: reader.place}

    def take(self, number: int) -> Read:
        block, place = divmod(number, self._size)
        if block < self._block:
            raise DataError(
                "data cursor", "a stream does not run backwards", "continue from a checkpoint before it"
            )
        while len(self._now) < self._size or self._block < block:
            self._fill(self._size)
            self._turn()
        self._fill(place + 1)
        return self._now[permute(place, self._size, self._key(block))]

    def _turn(self) -> None:
        self._block += bool(self._now)
        self._now, self._next = self._next, []
        self.begins[self._block + 1] = self._reader.place

    def _fill(self, count: int) -> None:
        while len(self._next) < count:
            self._next.append(self._reader.read())

    @property
    def turn(self) -> int:
        """How often the lane has been read to its end."""
        return self._reader.place.turn

    def forget(self, before: int) -> None:
        """Drop where blocks before number ``before`` begin, which is needed no more."""
        for block in [block for block in self.begins if block < min(before, self._block)]:
            del self.begins[block]


class SampleStream:
    """Streamed training sequences by global number; the numbers asked of a lane must not fall.

    Thread-safe: one thread may take samples while another asks for the state.

    Args:
        names: What the sources that are mixed are called.
        open_source: Gives a source by its number, when its first sequence is taken.
        shares: The shares of the sources.
        data: The ``dsx.data`` block: lanes, shuffle buffer, sequence length and seed.
        in_flight: Global samples that may be taken and not yet trained on when the state is asked for.
        state: Where to continue: what :meth:`state` gave, of any layout's ranks together.
        end_id: The token that ends a document, if documents are kept apart.
    """

    epoch = None  # a source that ends begins again

    def __init__(
        self,
        names: Sequence[str],
        open_source: Callable[[int], StreamedSource],
        shares: Shares,
        data: DataConfig,
        *,
        in_flight: int,
        state: StreamState,
        end_id: int | None = None,
    ) -> None:
        self._names, self._open_source = list(names), open_source
        self._shares, self._data = shares, data
        # So many sequences of a lane are shuffled together, and as many are read meanwhile.
        self._block = max(1, data.shuffle_buffer // (2 * data.lanes))
        rows = in_flight // data.lanes + 2
        self._kept_blocks = rows // self._block + 2
        self._state, self._end_id = state, end_id
        self._lanes: dict[tuple[int, int], _Shuffle] = {}
        self._sources: dict[int, StreamedSource] = {}
        self._turns = dict.fromkeys(range(len(self._names)), 0)
        self._news: list[str] = []
        self._opened, self._opening_seconds, self._told_from = 0, 0.0, 0.0
        self._lock = Lock()

    def take(self, sample: int) -> Sample:
        """Global sample number ``sample``, as ``Sequences`` gives it. Raises DataError, as reading does."""
        row, lane = divmod(sample, self._data.lanes)
        with self._lock:
            source, number = self._shares.locate(row, lane)
            taken = self._take(source, lane, number)
        if isinstance(taken, tuple):
            packs, index = taken
            return packs.window(index)
        if taken.ndim > 1:
            return Sequences(taken[:, 0], self._data.sequence_length, taken[:, 1]).window(0)
        return Sequences(taken, self._data.sequence_length, end_id=self._end_id).window(0)

    def state(self, cursor: int) -> dict[str, list[Any]]:
        """What another run needs to continue with sample ``cursor``, for the lanes that were read here."""
        found = {}
        with self._lock:
            for (source, lane), shuffle in self._lanes.items():
                rows = -((lane - cursor) // self._data.lanes)  # rows of the lane before the cursor
                wanted = self._shares.counts(rows, lane)[source] // self._block
                block = max((block for block in shuffle.begins if block <= wanted), default=None)
                if block is not None:
                    found[self._name(source, lane)] = [block, shuffle.begins[block].plain()]
        return found

    def news(self) -> list[str]:
        """What has happened since the last call that a person should know."""
        with self._lock:
            news, self._news = self._news, []
            for number, source in self._sources.items():
                if source.skipped:
                    bad = f"{len(source.skipped):,} bad records skipped, the first: {source.skipped[0]}"
                    news.append(f'data: source "{self._names[number]}": {bad}')
                    source.skipped.clear()
            if self._opened and self._opening_seconds >= self._told_from:
                news.append(
                    f"data: {self._opened} lanes opened in {seconds(self._opening_seconds)}, "
                    f"{self._opened * self._block} sequences read to shuffle"
                )
                self._opened, self._opening_seconds, self._told_from = 0, 0.0, _LONG_SECONDS
        return news

    def _take(self, source: int, lane: int, number: int) -> Read:
        key = (source, lane)
        if key not in self._lanes:
            began = time.perf_counter()
            self._open(key)
            ids = self._lanes[key].take(number)
            self._opened += 1
            self._opening_seconds += time.perf_counter() - began
        else:
            ids = self._lanes[key].take(number)
        self._lanes[key].forget(number // self._block - self._kept_blocks)
        turn = self._lanes[key].turn
        if turn > self._turns[source]:
            self._turns[source] = turn
            self._news.append(
                f'data: source "{self._names[source]}" begins again, in lane {lane} first '
                f"(times so far: {turn})"
            )
        return ids

    def _open(self, key: tuple[int, int]) -> None:
        source, lane = key
        data, name = self._data, self._name(source, lane)
        if source not in self._sources:
            self._sources[source] = self._open_source(source)
        block, place = self._state.get(name, (0, StreamPlace().plain()))
        reader = LaneReader(
            self._sources[source],
            lane,
            data.lanes,
            sequence_length=data.sequence_length,
            place=StreamPlace(*place),
            packed=self._sources[source].masks is not None and data.keeps_apart,
        )
        self._lanes[key] = _Shuffle(
            reader,
            self._block,
            lambda block: keyed_hash("stream", data.seed, name, block),
            block=int(block),
        )

    def _name(self, source: int, lane: int) -> str:
        return f"{self._names[source]}/{lane}"


def merged(states: Sequence[StreamState]) -> dict[str, Sequence[Any]]:
    """The states of several ranks as one; of a lane that several have read, the furthest."""
    found: dict[str, Sequence[Any]] = {}
    for state in states:
        for name, value in state.items():
            if name not in found or value[0] > found[name][0]:
                found[name] = value
    return found


_PLACES = 64  # parts of a source that the held-out text is gathered from


def open_stream(data: DataConfig, name: str) -> StreamedSource:
    """The one source of ``data``, to be streamed."""
    units = open_source(data).units(data.lanes) if data.format == "text" else record_units(data)
    if not units:
        raise DataError(
            f'dsx.data.source = "{data.source}"', "it holds no text", "name files with text in them"
        )
    tokenizer = load_tokenizer(data.tokenizer, trust_remote_code=data.trust_remote_code)
    masks = None if data.format == "text" else Masks(data, tokenizer)
    return StreamedSource(name=name, units=units, tokenizer=tokenizer, data=data, masks=masks)


def order_digest(data: DataConfig, source: StreamedSource) -> str:
    """Hash of all that decides which tokens come when: names and sizes of the parts, not their contents."""
    settings = {
        "units": [unit.name for unit in source.units],
        "tokenizer": source.tokenizer.identity(),
        "held_out": data.held_out,
        "seed": data.seed,
        "lanes": data.lanes,
        "shuffle_buffer": data.shuffle_buffer,
        "sequence_length": data.sequence_length,
    }
    if source.masks is not None:
        settings["records"] = [data.format, data.columns, source.masks.identity()]
    return hashlib.blake2b(json.dumps(settings, sort_keys=True).encode(), digest_size=16).hexdigest()


def prepare_stream(data: DataConfig, name: str, cache_dir: str | Path, *, held_out_tokens: int) -> Path:
    """Write the held-out text of one source that is to be streamed, and return its folder.

    The folder is a corpus without training text. Its held-out documents come from all over the source; they
    are about as many as an evaluation reads, not all that training leaves out.
    """
    source, opened = open_stream(data, name), open_source(data)
    if not isinstance(opened, Tables) or isinstance(opened.source, LocalFiles):
        # A network's answer to each lane would take minutes.
        for lane in range(data.lanes):
            _require_text(source, lane, data.lanes)
    settings: dict[str, Any] = {
        "version": VERSION,
        "stream": order_digest(data, source),
        "held_out_tokens": held_out_tokens,
        "tokenizer": source.tokenizer.identity(),
        "held_out": data.held_out,
        "seed": data.seed,
    }

    def write(aside: Path) -> CorpusInfo:
        kept, masks = _held_out(source, held_out_tokens), source.masks
        if masks is None:
            texts = ((text, True) for *_, text in kept)
            info = write_corpus(aside, texts, data.source, source.tokenizer, settings)
        else:
            encoded = ((found, True) for one in kept for found in source.examples([one], masks)[0])
            info = write_examples(aside, encoded, data, source.tokenizer, settings)
        if data.held_out and not info.held_out.documents:
            raise DataError(
                f"dsx.data.held_out = {data.held_out}",
                f'no document of source "{name}" is held out',
                "use a larger fraction, 0 to hold out none, or more documents",
            )
        return info

    return write_once(cache_dir, settings, write)


def _require_text(source: StreamedSource, lane: int, lanes: int) -> None:
    """Raise DataError if a lane has no document, or its first one cannot be used."""
    documents = ((unit.unit, *one) for unit in source.lane(lane, lanes) for one in unit.documents(None))
    first = next(documents, None)
    if first is not None and source.masks is not None:
        source.encode([first])
    if first is None:
        raise DataError(
            f"dsx.data.lanes = {lanes}",
            f'source "{source.name}" has no document to train on for lane {lane}',
            "use fewer lanes, or leave streaming out: the text is small",
        )


def _held_out(source: StreamedSource, tokens: int) -> Iterator[Document]:
    """Held-out documents of about ``tokens`` tokens, evenly from all over the source if that will do."""
    if not source.data.held_out:
        return
    step = -(-len(source.units) // _PLACES)
    spread, rest = range(0, len(source.units), step), [i for i in range(len(source.units)) if i % step]
    quota = -(-tokens // len(spread))
    for index in [*spread, *rest]:
        unit, left = source.units[index], min(quota, tokens)
        for offset, text in unit.documents(None) if left > 0 else ():
            if source.is_held_out(unit, offset):
                yield unit, offset, text
                taken = sum(map(len, source.encode([(unit, offset, text)])[0]))
                left, tokens = left - taken, tokens - taken
                if left <= 0:
                    break
