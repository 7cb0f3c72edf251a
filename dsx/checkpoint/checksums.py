"""Checksums of parts of files: xxh3 of whole regions, CRC32 put together from parts read in any order."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import TypeAlias

import xxhash

Buffer: TypeAlias = bytes | bytearray | memoryview
Summed: TypeAlias = tuple[str, int, int, int]
"""A file, bytes ``start`` to ``stop`` of it, and their CRC32."""

_POLYNOMIAL = 0xEDB88320  # of CRC-32/ISO-HDLC, bit-reversed: bit 31 is x^0
_ONE = 1 << 31


def digest(data: Buffer) -> str:
    """xxh3_128 of ``data``, hexadecimal."""
    return xxhash.xxh3_128_hexdigest(data)


def crc32_joined(first: int, second: int, second_bytes: int) -> int:
    """CRC32 of two stretches one after the other, from their own.

    Appending n bytes multiplies the first CRC, as a polynomial over GF(2), by x^(8n) modulo the CRC's own.

    >>> import zlib
    >>> crc32_joined(zlib.crc32(b"check"), zlib.crc32(b"point"), 5) == zlib.crc32(b"checkpoint")
    True
    """
    return _product(_power_of_x(8 * second_bytes), first) ^ second


def crc32_of_zeros(num_bytes: int) -> int:
    """CRC32 of ``num_bytes`` zero bytes, without making them.

    >>> import zlib
    >>> crc32_of_zeros(1000) == zlib.crc32(bytes(1000))
    True
    """
    # CRC32 starts from, and ends with, all ones.
    return _product(_power_of_x(8 * num_bytes), 0xFFFFFFFF) ^ 0xFFFFFFFF


class Crc32Parts:
    """CRC32s of parts of files, collected by several threads, joined at the end."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._parts: dict[str, list[tuple[int, int, int]]] = defaultdict(list)

    def add(self, parts: Iterable[Summed]) -> None:
        """Take note of parts."""
        with self._lock:
            for file, start, stop, crc in parts:
                self._parts[file].append((start, stop, crc))

    def stretches(self, file: str, start: int, stop: int) -> Iterator[tuple[int, int, int | None]]:
        """Parts of bytes ``start`` to ``stop`` in order, without gaps: (start, stop, CRC32, None in a gap).

        What was noted twice, because it was read twice, comes once. Parts that reach over the bounds or
        into each other count as gaps.
        """
        at = start
        for low, high, crc in sorted(self._parts.get(file, ())):
            if low < at or high > stop:
                continue
            if low > at:
                yield at, low, None
            yield low, high, crc
            at = high
        if at < stop:
            yield at, stop, None


def _product(a: int, b: int) -> int:
    """Product of two polynomials modulo the CRC's."""
    result = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            result ^= b
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return result


@lru_cache(maxsize=256)
def _power_of_x(exponent: int) -> int:
    """``x ** exponent`` modulo the CRC's polynomial, by squaring."""
    result, square = _ONE, _ONE >> 1
    while exponent:
        if exponent & 1:
            result = _product(square, result)
        square = _product(square, square)
        exponent >>= 1
    return result
