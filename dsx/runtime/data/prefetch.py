"""Micro-batches made ahead of their use, by a thread."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from typing import Self

import torch

from dsx.runtime.data.batches import Batches, MicroBatch


class _Shelf:
    """Between the thread that fills it and the one that takes from it."""

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._items: deque[tuple[MicroBatch, int]] = deque()
        self._failure: BaseException | None = None
        self._closed = False
        self._changed = threading.Condition()

    def has_room(self) -> bool:
        """Wait for room. False when nothing more is wanted."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or len(self._items) < self._depth)
            return not self._closed

    def put(self, batch: MicroBatch, cursor: int) -> None:
        with self._changed:
            self._items.append((batch, cursor))
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        with self._changed:
            self._failure = error
            self._changed.notify_all()

    def take(self) -> tuple[MicroBatch, int]:
        """The next micro-batch and the cursor behind it; what was made before an error comes first."""
        with self._changed:
            self._changed.wait_for(lambda: self._items or self._failure is not None)
            if not self._items:
                assert self._failure is not None
                raise self._failure
            item = self._items.popleft()
            self._changed.notify_all()
            return item

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()


class Prefetched:
    """The same micro-batches, up to ``depth`` of them made ahead.

    The thread begins with the first micro-batch that is asked for: ranks that need no data read none. Reading
    and tokenising release Python's lock for the most part, so training goes on meanwhile.

    Args:
        batches: Makes the micro-batches; belongs to the thread from the first on.
        depth: How many may wait.
        pin: Put them into page-locked memory, from which a GPU copies while it computes.
    """

    def __init__(self, batches: Batches, *, depth: int, pin: bool) -> None:
        self._batches, self._shelf, self._pin = batches, _Shelf(depth), pin
        self._cursor = batches.cursor
        self._thread: threading.Thread | None = None
        self._finalizer = weakref.finalize(self, self._shelf.close)

    @property
    def cursor(self) -> int:
        """Next global sample of the whole job: behind the micro-batches that were taken, not those made."""
        return self._cursor

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> MicroBatch:
        if self._thread is None:
            # It must not keep this object alive, which ends it when it goes.
            self._thread = threading.Thread(
                target=_fill, args=(self._batches, self._shelf, self._pin), name="dsx-data", daemon=True
            )
            self._thread.start()
        batch, self._cursor = self._shelf.take()
        return batch

    def close(self) -> None:
        """End the thread, after the micro-batch that it is making."""
        self._finalizer()
        if self._thread is not None:
            self._thread.join()


def _fill(batches: Batches, shelf: _Shelf, pin: bool) -> None:
    try:
        while shelf.has_room():
            batch = next(batches)
            shelf.put(_pinned(batch) if pin else batch, batches.cursor)
    except BaseException as error:  # noqa: BLE001 - the thread that asks for data raises it
        shelf.fail(error)


def _pinned(batch: MicroBatch) -> MicroBatch:
    inputs, labels = batch
    return inputs.pin_memory(), labels.pin_memory()


def pins() -> bool:
    """Whether page-locked memory helps here."""
    return torch.cuda.is_available()
