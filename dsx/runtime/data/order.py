"""Keyed orders that need no state and no memory: what sample ``i`` is follows from (seed, i) alone.

Own arithmetic rather than ``numpy.random``: NumPy does not promise the same stream from a later version
(NEP 19), and a resumed run must see the order it began with. Nor does a trillion-token corpus need a
permutation array in every process.
"""

from __future__ import annotations

import hashlib
from math import isqrt

_ROUNDS = 8


def keyed_hash(*key: int | str) -> int:
    """A 64-bit number that depends on every part of ``key``, the same on every machine.

    >>> keyed_hash("held-out", 0) == keyed_hash("held-out", 0) != keyed_hash("held-out", 1)
    True
    """
    text = "/".join(map(str, key)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def permute(index: int, size: int, key: int) -> int:
    """Where the permutation number ``key`` of ``range(size)`` takes ``index``.

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

    Systematic sampling: of any ``ceil(1 / fraction)`` documents in a row at least one is held out, and of n
    documents ``n * fraction`` give or take one; the seed decides where the count starts.

    >>> sum(is_held_out(i, 0.05, seed=3) for i in range(1000))
    50
    """
    start = keyed_hash("held-out", seed) / 2**64
    return int((document + 1) * fraction + start) > int(document * fraction + start)
