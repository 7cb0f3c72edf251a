"""Live bytes by what they are for, storages that live as long as somebody holds them, and steps that repeat.

A storage is given back to its :class:`Ledger` when the last of its holders goes, which is torch's own rule.
Who holds what during a layer is recorded (:mod:`dsx.memory.layer_record`); who holds what between layers
follows from the schedule (:mod:`dsx.memory.walk`).

An action's memory depends on its kind, its virtual stage and whether its parameters have gradients yet. So
the first two micro-batches of every (kind, stage) are walked storage by storage, the second one noted, and
all others are a :class:`~dsx.memory.ledger.Delta`. What goes from rank to rank lives as long as the channel
holds it, whatever the micro-batch; that is followed one by one (:class:`Replay`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import inf, prod
from typing import NamedTuple

from dsx.parallel.reduction import last_backwards
from dsx.schedules.schedule import TRANSFERS, Action, Op

__all__ = ["Label", "Leaf", "Ledger", "Storage", "Tensor"]


class Label(NamedTuple):
    """What a line of the ledger says of its bytes.

    Attributes:
        category: parameters, gradients, optimizer, buckets, activations, logits, transfers or temporaries.
        name: Of the tensor.
        formula: Shape and data type of what a layer makes.
        source: The operator that makes it there.
    """

    category: str
    name: str
    formula: str = ""
    source: str = ""


class AboveError(Exception):
    """More bytes are live than :attr:`Ledger.most_bytes`; the argument says how many."""


class Ledger:
    """Live bytes by label, and the highest total since :meth:`start` with what it consisted of.

    Args:
        rounding_bytes: Every storage counts as a multiple of this (CUDACachingAllocator.cpp: 512).

    Attributes:
        most_bytes: Above this total, whoever goes on to add up is stopped by :class:`AboveError`.
    """

    def __init__(self, rounding_bytes: int = 1) -> None:
        self.rounding_bytes = rounding_bytes
        self.most_bytes = inf
        self.current_bytes = 0
        self.peak_bytes = 0
        self.live: dict[Label, int] = {}
        self._rising = True
        self._at_peak: dict[Label, int] = {}

    def rounded(self, size_bytes: int) -> int:
        return -(-size_bytes // self.rounding_bytes) * self.rounding_bytes

    def start(self) -> None:
        """Forget the peak: from now on the highest is sought anew."""
        self.peak_bytes, self._rising = self.current_bytes, True

    def take(self, label: Label, size_bytes: int) -> None:
        """Bytes that are live from now on."""
        self.current_bytes += size_bytes
        self.live[label] = self.live.get(label, 0) + size_bytes
        if self.current_bytes > self.peak_bytes:
            self.peak_bytes, self._rising = self.current_bytes, True
            if self.current_bytes > self.most_bytes:
                raise AboveError(self.current_bytes)

    def new(self, label: Label, size_bytes: int) -> Storage:
        """A storage with one holder: ``Storage(self, label, size_bytes).hold()``.

        It is written out because a long replay makes millions of them.
        """
        storage = _unmade(Storage)
        size_bytes = -(-size_bytes // self.rounding_bytes) * self.rounding_bytes
        storage.ledger, storage.label, storage.size_bytes, storage.holders = self, label, size_bytes, 1
        live = self.live
        live[label] = live.get(label, 0) + size_bytes
        self.current_bytes = current_bytes = self.current_bytes + size_bytes
        if current_bytes > self.peak_bytes:
            self.peak_bytes, self._rising = current_bytes, True
            if current_bytes > self.most_bytes:
                raise AboveError(current_bytes)
        return storage

    def tensor(self, category: str, name: str, numel: int, width: int) -> Tensor:
        return Tensor((numel,), width, Storage(self, Label(category, name), numel * width))

    @contextmanager
    def aside(self, name: str, numel: int, width: int) -> Iterator[None]:
        """Inside, there is a temporary tensor too."""
        tensor = self.tensor("temporaries", name, numel, width)
        yield
        tensor.release()

    def passing(self, name: str, numel: int, width: int) -> None:
        """A temporary tensor that comes and goes."""
        self.tensor("temporaries", name, numel, width).release()

    def give(self, label: Label, size_bytes: int) -> None:
        """Bytes that no longer are."""
        if self._rising and self.current_bytes == self.peak_bytes:
            self._at_peak, self._rising = dict(self.live), False
        self.current_bytes -= size_bytes
        self.live[label] -= size_bytes

    @property
    def at_peak(self) -> dict[Label, int]:
        """Bytes by label at the highest total, zeros left out."""
        held = self.live if self._rising and self.current_bytes == self.peak_bytes else self._at_peak
        return {label: size for label, size in held.items() if size}

    def mark(self) -> Mark:
        """Where a stretch begins whose :class:`Delta` is wanted: see :meth:`since`."""
        if self._rising and self.current_bytes == self.peak_bytes:
            self._at_peak, self._rising = dict(self.live), False
        mark = Mark(self.current_bytes, self.peak_bytes, dict(self.live), self._at_peak)
        self.start()
        return mark

    def since(self, mark: Mark) -> Delta:
        """What has happened since ``mark``, to be done again by :meth:`again`."""
        summit, before = self.at_peak, mark.live
        delta = Delta(
            self.current_bytes - mark.current_bytes,
            self.peak_bytes - mark.current_bytes,
            _difference(self.live, before),
            _difference(summit, before),
        )
        if self.peak_bytes <= mark.peak_bytes:
            self.peak_bytes, self._at_peak, self._rising = mark.peak_bytes, mark.at_peak, False
        return delta

    def again(self, delta: Delta) -> None:
        """A stretch like one before, without its tensors."""
        live, top = self.live, self.current_bytes + delta.rise_bytes
        if top > self.peak_bytes:
            self.peak_bytes, self._rising = top, False
            self._at_peak = live | {label: live.get(label, 0) + size for label, size in delta.summit.items()}
            if top > self.most_bytes:
                raise AboveError(top)
        self.current_bytes += delta.net_bytes
        for label, size in delta.net.items():
            live[label] = live.get(label, 0) + size


class Mark(NamedTuple):
    """A ledger's state."""

    current_bytes: int
    peak_bytes: int
    live: dict[Label, int]
    at_peak: dict[Label, int]


class Delta(NamedTuple):
    """What a stretch of operations does to a ledger.

    Attributes:
        net_bytes: More live bytes after it than before.
        rise_bytes: More at its highest.
        net: ``net_bytes`` by label.
        summit: ``rise_bytes`` by label.
    """

    net_bytes: int
    rise_bytes: int
    net: dict[Label, int]
    summit: dict[Label, int]


def _difference(after: dict[Label, int], before: dict[Label, int]) -> dict[Label, int]:
    more = {label: size - before.get(label, 0) for label, size in after.items()}
    more |= {label: -size for label, size in before.items() if label not in after}
    return {label: size for label, size in more.items() if size}


class Storage:
    """Bytes that live as long as a tensor holds them."""

    __slots__ = ("holders", "label", "ledger", "size_bytes")

    @classmethod
    def counted(cls, ledger: Ledger, label: Label, size_bytes: int) -> Storage:
        """One whose bytes are in the ledger already (:meth:`Ledger.again`); they are given back as ever."""
        storage = cls.__new__(cls)
        storage.ledger, storage.label, storage.size_bytes, storage.holders = ledger, label, size_bytes, 0
        return storage

    def __init__(self, ledger: Ledger, label: Label, size_bytes: int) -> None:
        self.ledger, self.label, self.size_bytes = ledger, label, ledger.rounded(size_bytes)
        self.holders = 0
        ledger.take(label, self.size_bytes)

    def hold(self) -> Storage:
        """One more holder."""
        self.holders += 1
        return self

    def drop(self) -> None:
        """One holder less; after the last one the bytes are given back."""
        self.holders -= 1
        if not self.holders:
            self.ledger.give(self.label, self.size_bytes)

    def overwrite(self) -> None:
        """Give the bytes back although somebody still holds it: another storage is in its place."""
        self.ledger.give(self.label, self.size_bytes)
        self.size_bytes = 0


_unmade = Storage.__new__


class Tensor:
    """A view on a storage, which it holds until :meth:`release`.

    Attributes:
        numel: Elements.
        width: Bytes an element.
        storage: What it holds on to; None for one whose memory is counted elsewhere (a parameter).
    """

    __slots__ = ("numel", "shape", "storage", "width")

    def __init__(self, shape: tuple[int, ...], width: int, storage: Storage | None) -> None:
        self.shape, self.width, self.storage = shape, width, storage
        self.numel = prod(shape)
        if storage is not None:
            storage.hold()

    def detach(self) -> Tensor:
        return Tensor(self.shape, self.width, self.storage)

    def release(self) -> None:
        """Let go of the memory (``tensor.data = ...``)."""
        if self.storage is not None:
            self.storage.drop()
            self.storage = None

    def hold(self, other: Tensor) -> None:
        """Lie in the memory of ``other`` from now on (``tensor.data = other``)."""
        self.release()
        self.storage = other.storage
        if self.storage is not None:
            self.storage.hold()


class Leaf(Tensor):
    """A parameter.

    Attributes:
        grad: What backwards have summed up.
        accumulate: Takes each gradient over as it comes; None sums them in :attr:`grad`, as torch does.
        came: Called after each, once nobody else has it, as a hook of torch's is; None for nobody.
        experts_over: Neighbours that hold the experts together of which it is; 1 for all other parameters.
    """

    __slots__ = ("accumulate", "came", "experts_over", "grad", "name")

    def __init__(
        self,
        name: str,
        shape: tuple[int, ...],
        width: int,
        *,
        storage: Storage | None = None,
        accumulate: Callable[[Leaf, Tensor], None] | None = None,
        experts_over: int = 1,
    ) -> None:
        super().__init__(shape, width, storage)
        self.name, self.accumulate, self.experts_over = name, accumulate, experts_over
        self.grad: Tensor | None = None
        self.came: Callable[[Leaf], None] | None = None

    def receive(self, gradient: Tensor) -> None:
        """Take over a gradient, or add and release it (torch/csrc/autograd/functions/accumulate_grad.h)."""
        if self.accumulate is not None:
            self.accumulate(self, gradient)
        elif self.grad is None:
            self.grad = gradient
        else:
            gradient.release()


Message = list[Storage]
"""Tensors between layers or ranks, in order; whoever has the list holds each once."""


def dropped(message: Message) -> None:
    """Let go of a message."""
    while message:
        message.pop(0).drop()


Kind = tuple[Op, int]
"""What an action does and for which virtual stage."""


def walked(row: Sequence[Action]) -> frozenset[int]:
    """Micro-batches that are among the first two of some kind of computation in a rank's row.

    And those of last backwards, in which gradients leave bucket by bucket.
    """
    seen: dict[Kind, list[int]] = {}
    for action in row:
        if action.op not in TRANSFERS:
            seen.setdefault((action.op, action.stage), []).append(action.micro_batch)
    first = {micro_batch for found in seen.values() for micro_batch in found[:2]}
    return frozenset(first.union(row[position].micro_batch for position in last_backwards(row)))


class Replay:
    """What is known of a rank's actions."""

    def __init__(self, ledger: Ledger, row: Sequence[Action]) -> None:
        self.ledger, self.walked = ledger, walked(row)
        self._deltas: dict[Kind, Delta] = {}
        self._seen: dict[Kind, int] = {}
        self._sent: dict[tuple[str, int], list[tuple[Label, int]]] = {}
        self._loss: Storage | None = None
        self._losses = 0

    def begin(self) -> None:
        self._seen.clear()

    def wants(self, action: Action) -> bool:
        """Whether to record the memory delta of this action: at its kind's second occurrence."""
        kind = (action.op, action.stage)
        self._seen[kind] = self._seen.get(kind, 0) + 1
        return kind not in self._deltas and self._seen[kind] == 2

    def note(self, action: Action, delta: Delta) -> None:
        """Record an action's memory delta."""
        self._deltas[action.op, action.stage] = delta

    def sends(self, kind: str, stage: int, message: Message) -> None:
        """Note what a walked action sends."""
        self._sent[kind, stage] = [(storage.label, storage.size_bytes) for storage in message]

    def like_sent(self, kind: str, stage: int) -> Message:
        """What another micro-batch sends; :meth:`again` has counted it."""
        sent = self._sent[kind, stage]
        return [Storage.counted(self.ledger, label, size).hold() for label, size in sent]

    def again(self, action: Action) -> None:
        """A computation without its tensors."""
        self.ledger.again(self._deltas[action.op, action.stage])

    def keeps_loss(self, loss: Storage | None) -> None:
        """A walked loss, or with None one more like it, is kept until the step is over."""
        if loss is None:
            self._losses += 1
        else:
            self._loss = loss

    def end(self) -> None:
        """The step's losses go."""
        if self._loss is not None:
            self.ledger.give(self._loss.label, self._loss.size_bytes * self._losses)
        self._losses = 0
