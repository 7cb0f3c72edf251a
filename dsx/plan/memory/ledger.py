"""Live bytes by what they are for, and the highest total with what it consisted of."""

from __future__ import annotations

from typing import NamedTuple


class Label(NamedTuple):
    """What a line of the ledger says of its bytes.

    Attributes:
        category: parameters, gradients, optimizer, buckets, activations, logits, transfers or temporaries.
        name: Of the tensor.
        formula: Its elements and width, in the shape letters of its source.
        source: The file and function that allocates it.
    """

    category: str
    name: str
    formula: str
    source: str


class Ledger:
    """Live bytes by label, and the highest total since :meth:`start` with what it consisted of.

    Args:
        rounding_bytes: Every storage counts as a multiple of this (CUDACachingAllocator.cpp: 512).
    """

    def __init__(self, rounding_bytes: int = 1) -> None:
        self.rounding_bytes = rounding_bytes
        self.current_bytes = 0
        self.peak_bytes = 0
        self.live: dict[Label, int] = {}
        self._rising = True
        self._at_peak: dict[Label, int] = {}

    def rounded(self, size_bytes: int) -> int:
        """What a storage of this size takes."""
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
