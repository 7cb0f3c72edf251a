"""Micro-batches of one data-parallel rank, in an order that no layout changes, made ahead of their use."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from queue import SimpleQueue
from typing import Any, Protocol, Self

import torch
from torch.utils._pytree import tree_map

from dsx.data.order import Shares, keyed_hash, permute
from dsx.data.packs import Sample, Seen, Windows
from dsx.errors import DataError
from dsx.nn.documents import MicroBatch
from dsx.parallel.islands import Islands


class Samples(Protocol):
    """Training sequences by their number in the whole job."""

    def take(self, sample: int) -> Sample:
        """Global sample number ``sample``."""

    @property
    def epoch(self) -> Windows | None:
        """Of which a step must not take more than all; None if any step can be made."""


class Shuffled:
    """One corpus, shuffled anew in every epoch.

    Global sample ``g`` is sequence ``permute(g % n)`` of epoch ``g // n``, n sequences an epoch; the
    permutation follows from the seed and the epoch.
    """

    def __init__(self, sequences: Windows, *, seed: int) -> None:
        self.epoch, self._seed = sequences, seed

    def place(self, sample: int) -> tuple[Windows, int]:
        """Where the sample of that number is; any order of numbers will do."""
        epoch, place = divmod(sample, len(self.epoch))
        key = keyed_hash("train", self._seed, epoch)
        return self.epoch, permute(place, len(self.epoch), key)

    def take(self, sample: int) -> Sample:
        """The sample itself."""
        sequences, place = self.place(sample)
        return sequences.window(place)


class Mixed:
    """Several corpora in exact shares, each shuffled anew whenever it begins again.

    Args:
        parts: Name and training sequences of each.
        shares: Which source each sample is taken from.
        seed: Seed of the orders; each corpus has its own, by its name.
    """

    epoch = None  # a source that ends begins again

    def __init__(self, parts: Mapping[str, Windows], shares: Shares, *, seed: int) -> None:
        self._parts, self._shares, self._seed = list(parts.items()), shares, seed

    def place(self, sample: int) -> tuple[Windows, int]:
        """Where the sample of that number is; any order of numbers will do."""
        source, local = self._shares.locate(sample)
        name, sequences = self._parts[source]
        epoch, place = divmod(local, len(sequences))
        key = keyed_hash("train", self._seed, name, epoch)
        return sequences, permute(place, len(sequences), key)

    def take(self, sample: int) -> Sample:
        """The sample itself."""
        sequences, place = self.place(sample)
        return sequences.window(place)


class Batches:
    """Endless training micro-batches of one data-parallel rank.

    The ranks' next micro-batches take the next ``dp * B`` global samples, rank ``d`` the rows ``d * B`` to
    ``(d + 1) * B`` of them. So step ``t`` covers samples ``t * G`` to ``(t + 1) * G`` with
    ``G = B * accumulation * dp``, whatever the layout. Chats with pictures are rows of their own lengths: in
    a step the longest come first, so that rows, and ranks, have about as many tokens as those beside them.

    Args:
        samples: Training sequences by global number.
        micro_batch_size: B.
        accumulation: Micro-batches per optimizer step.
        dp: Data-parallel degree.
        dp_rank: This rank's place in it.
        cursor: First global sample, as a checkpoint stored it.
        islands: Of which this job is one, whose own samples are then numbered from 0.
        multiple_of: What lengths of rows are multiples of.

    Raises:
        DataError: Fewer sequences than one optimizer step takes, or a cursor that no micro-step begins at.
    """

    def __init__(
        self,
        samples: Samples,
        *,
        micro_batch_size: int,
        accumulation: int,
        dp: int,
        dp_rank: int,
        cursor: int = 0,
        islands: Islands | None = None,
        multiple_of: int = 1,
    ) -> None:
        self._multiple_of = multiple_of
        self._batch, whole = micro_batch_size * accumulation * dp, samples.epoch
        taken = self._batch * (1 if islands is None else islands.count)
        if whole is not None and len(whole) < taken:
            made_of = f"{micro_batch_size} per micro-batch x {accumulation} micro-batches x {dp}"
            raise DataError(
                "train_batch_size",
                f"one step takes {taken} sequences ({made_of} data-parallel ranks"
                + ("" if islands is None else f" x {islands.count} islands")
                + f"), the training text has {len(whole)} of {whole.sequence_length} tokens",
                "use more text, a smaller batch or a smaller dsx.data.sequence_length",
            )
        self._samples, self._islands = samples, islands
        self._rows = micro_batch_size
        self._dp, self._dp_rank = dp, dp_rank
        self.cursor = cursor

    @property
    def step(self) -> int:
        """Global samples that the next micro-batches of all ranks take together."""
        return self._rows * self._dp

    @property
    def cursor(self) -> int:
        """Next global sample of the whole job, the same on ranks that have taken as many micro-batches."""
        return self._cursor

    @cursor.setter
    def cursor(self, value: int) -> None:
        if value < 0 or value % self.step:
            raise DataError(
                f"data cursor {value}",
                f"no micro-batch begins there with {self._rows} sequences x {self._dp} data-parallel ranks",
                f"resume with micro-batch size x data parallelism dividing {value}",
            )
        self._cursor, self._first = value, value
        self._ordered: tuple[int, Sequence[int]] = (-1, ())

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> MicroBatch:
        step, done = divmod(self._cursor - self._first, self._batch)
        if self._ordered[0] != step:
            begin = self._first + step * self._batch
            self._ordered = step, self._in_order(range(begin, begin + self._batch))
        first = done + self._dp_rank * self._rows
        rows = [self._samples.take(self._number(at)) for at in self._ordered[1][first : first + self._rows]]
        self._cursor += self.step
        return _micro_batch(rows, self._multiple_of)

    def _number(self, own: int) -> int:
        """The number in the whole job of a sample of this one."""
        return own if self._islands is None else self._islands.global_sample(own, self._batch)

    def _in_order(self, step: range) -> Sequence[int]:
        """The samples of a step as ranks read them."""
        place: Callable[[int], tuple[Any, int]] | None = getattr(self._samples, "place", None)
        if place is None or not hasattr(place(self._number(step[0]))[0], "chat_length"):
            return step
        held = {own: place(self._number(own)) for own in step}
        return sorted(held, key=lambda own: -held[own][0].chat_length(held[own][1]))


class EvaluationBatches:
    """The same held-out micro-batches at every evaluation, as many on every data-parallel rank.

    They are a prefix of one fixed shuffle of the held-out sequences, so that a short evaluation samples the
    whole split, and layouts that divide alike evaluate the same sequences. Of packs, every layout evaluates
    the same ones: packs without a label fill up the last micro-batches, which a mean over tokens ignores.

    Args:
        sequences: Held-out sequences.
        micro_batch_size: B.
        dp: Data-parallel degree.
        dp_rank: This rank's place in it.
        max_tokens: Take about this many label tokens over all ranks, in whole micro-batches; None: all.
        multiple_of: As for :class:`Batches`.

    Raises:
        DataError: Too few held-out sequences for one micro-batch on every rank.
    """

    def __init__(
        self,
        sequences: Windows,
        *,
        micro_batch_size: int,
        dp: int,
        dp_rank: int,
        max_tokens: int | None = None,
        multiple_of: int = 1,
    ) -> None:
        self._multiple_of = multiple_of
        unit = micro_batch_size * dp
        empty: Callable[[], Sample] | None = getattr(sequences, "empty", None)
        self._empty = None if empty is None else cache(empty)  # with pictures it takes a processor's run
        if len(sequences) < unit and self._empty is None:
            raise DataError(
                "dsx.data.held_out",
                f"the held-out text has {len(sequences)} sequences of {sequences.sequence_length} tokens, "
                f"one evaluation takes {unit} ({micro_batch_size} per micro-batch x {dp} "
                "data-parallel ranks)",
                "hold out more, use more text, a smaller batch or a smaller dsx.data.sequence_length",
            )
        wanted, least = len(sequences), unit if self._empty is None else 1
        if max_tokens is not None:
            wanted = min(wanted, max(least, max_tokens // sequences.sequence_length))
        self._sequences = sequences
        self._rows, self._dp, self._dp_rank = micro_batch_size, dp, dp_rank
        self._count = wanted // unit if self._empty is None else -(-wanted // unit)
        self._wanted = wanted

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[MicroBatch]:
        for number in range(self._count):
            first = (number * self._dp + self._dp_rank) * self._rows
            places = range(first, first + self._rows)
            yield _micro_batch([self._at(place) for place in places], self._multiple_of)

    def _at(self, place: int) -> Sample:
        if self._empty is not None and place >= self._wanted:
            return self._empty()
        return self._sequences.window(permute(place, len(self._sequences), keyed_hash("evaluation")))


def _micro_batch(rows: list[Sample], multiple_of: int) -> MicroBatch:
    if isinstance(rows[0][-1], Seen):
        from dsx.data.pictures import together  # here: other data need nothing of it

        return together(rows, multiple_of)
    inputs, labels, *positions = map(torch.stack, zip(*rows, strict=True))
    return MicroBatch((inputs, *positions) if positions else inputs, labels)


class Prefetched:
    """The same micro-batches, up to ``depth`` of them made ahead.

    The thread begins with the first micro-batch that is asked for: ranks that need no data read none. Reading
    and tokenising release Python's lock for the most part, so training goes on meanwhile.

    Args:
        batches: Makes the micro-batches; belongs to the thread from the first on.
        depth: How many may wait.
        pin: Put them into page-locked memory, from which a GPU copies while it computes.

    Attributes:
        cursor: Next global sample of the whole job, behind the micro-batches that were taken, not those made.
    """

    def __init__(self, batches: Batches, *, depth: int, pin: bool) -> None:
        self._batches, self._pin = batches, pin
        self._made: SimpleQueue[tuple[MicroBatch, int] | BaseException] = SimpleQueue()
        self._room, self._closed = threading.Semaphore(depth), threading.Event()
        self.cursor = batches.cursor
        self._thread: threading.Thread | None = None
        self._finalizer = weakref.finalize(self, _end, self._room, self._closed)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> MicroBatch:
        if self._thread is None:
            # The thread must not keep this object alive, whose end ends the thread.
            work = (self._batches, self._made, self._room, self._closed, self._pin)
            self._thread = threading.Thread(target=_fill, args=work, name="dsx-data", daemon=True)
            self._thread.start()
        found = self._made.get()  # micro-batches that were made before an error come before it
        if isinstance(found, BaseException):
            self._made.put(found)
            raise found
        self._room.release()
        batch, self.cursor = found
        return batch

    def close(self) -> None:
        """End the thread, after the micro-batch that it is making."""
        self._finalizer()
        if self._thread is not None:
            self._thread.join()


def _fill(
    batches: Batches,
    made: SimpleQueue[tuple[MicroBatch, int] | BaseException],
    room: threading.Semaphore,
    closed: threading.Event,
    pin: bool,
) -> None:
    try:
        while room.acquire() and not closed.is_set():
            batch = next(batches)
            made.put((_pinned(batch) if pin else batch, batches.cursor))
    except BaseException as error:  # noqa: BLE001 - the thread that asks for data raises it
        made.put(error)


def _end(room: threading.Semaphore, closed: threading.Event) -> None:
    closed.set()
    room.release()


def _pinned(batch: MicroBatch) -> MicroBatch:
    return MicroBatch(*(tree_map(torch.Tensor.pin_memory, each) for each in batch))
