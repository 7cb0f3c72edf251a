"""Keyed orders that need no state and no memory: what sample ``i`` is follows from (seed, i) alone.

The arithmetic is our own instead of ``numpy.random``'s: NumPy does not promise the same stream from a later
version (NEP 19), and a resumed run must see the order that it began with. And a trillion-token corpus needs
no permutation array in every process.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from fractions import Fraction
from math import isqrt

_ROUNDS = 8

_PHASES = 1 << 64
_GOLDEN = 0x9E3779B97F4A7C15  # 2**64 / golden ratio: its multiples fill the circle evenly, however many


def keyed_hash(*key: int | str) -> int:
    """A 64-bit number that depends on every part of ``key``, the same on every machine.

    >>> keyed_hash("held-out", 0) == keyed_hash("held-out", 0) != keyed_hash("held-out", 1)
    True
    """
    text = "/".join(map(str, key)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def permute(index: int, size: int, key: int) -> int:
    """The place to which the permutation number ``key`` of ``range(size)`` takes ``index``.

    An unbalanced Feistel network on a rectangle of at least ``size`` cells, walked until it is back inside
    (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002).

    Raises:
        IndexError: ``index`` is outside ``range(size)``.

    >>> [permute(i, 10, key=7) for i in range(10)]
    [8, 5, 7, 3, 2, 9, 0, 1, 4, 6]
    """
    if not 0 <= index < size:
        raise IndexError(f"{index} is outside range({size})")
    rows = isqrt(size - 1) + 1
    columns = -(-size // rows)
    while True:
        row, column = divmod(index, columns)
        for turn in range(_ROUNDS):
            # Each turn moves one half by an amount that the other half decides, so it can be undone.
            if turn % 2 == 0:
                row = (row + keyed_hash(key, turn, column)) % rows
            else:
                column = (column + keyed_hash(key, turn, row)) % columns
        index = row * columns + column
        if index < size:
            return index


def is_held_out(document: int, fraction: float, seed: int) -> bool:
    """Whether document number ``document`` belongs to the held-out split.

    By systematic sampling, at least one of any ``ceil(1 / fraction)`` documents in a row is held out, and of
    n documents ``n * fraction``, give or take one; the seed decides where the count starts.

    >>> sum(is_held_out(i, 0.05, seed=3) for i in range(1000))
    50
    """
    start = keyed_hash("held-out", seed) / 2**64
    return int((document + 1) * fraction + start) > int(document * fraction + start)


class Shares:
    """Which source each place of a mixture is taken from, so that shares are exact at every length.

    The first source takes the places where ``floor(i * share + phase)`` steps up, the second those of the
    rest, and so on; So any n places in a row have ``n * share`` of a source, give or take less than the
    number of sources, and a place is found without those before it. All numbers are whole: nothing is
    rounded, at any length.

    Args:
        weights: One for each source, above 0, in any unit; taken as the decimals they are written as.
        seed: Decides the phases.

    >>> shares = Shares([3, 1], seed=0)
    >>> [shares.locate(i)[0] for i in range(8)]
    [0, 1, 0, 0, 0, 1, 0, 0]
    """

    def __init__(self, weights: Sequence[float], *, seed: int) -> None:
        exact = [Fraction(repr(weight)) for weight in weights]
        self.shares = tuple(weight / sum(exact) for weight in exact)
        self._of_rest = [weight / sum(exact[level:]) for level, weight in enumerate(exact)]
        self._keys = [keyed_hash("mixture", seed, level) for level in range(len(exact))]

    def locate(self, place: int, lane: int = 0) -> tuple[int, int]:
        """Source of a place, and how many places before it are of that source.

        Args:
            place: From 0.
            lane: Independent sequences of places, out of step with each other, so that one place of many
                lanes together has the shares too.
        """
        for level in range(len(self.shares)):
            before = self._count(level, place, lane)
            if self._count(level, place + 1, lane) > before:
                return level, before
            place -= before
        raise AssertionError("the last source takes all that is left")

    def counts(self, length: int, lane: int = 0) -> tuple[int, ...]:
        """How many of the first ``length`` places are of each source."""
        counts = []
        for level in range(len(self.shares)):
            counts.append(self._count(level, length, lane))
            length -= counts[-1]
        return tuple(counts)

    def _count(self, level: int, length: int, lane: int) -> int:
        share = self._of_rest[level]
        phase = (self._keys[level] + lane * (2 * level + 1) * _GOLDEN) % _PHASES
        scaled = length * share.numerator * _PHASES + phase * share.denominator
        return scaled // (share.denominator * _PHASES)
