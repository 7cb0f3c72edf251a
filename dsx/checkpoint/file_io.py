"""Boxes of tensors from and to files as numpy arrays, without torch, and checksums of parts of files.

Never more of a file is in memory than a tile. numpy has no bfloat16 and no float8: they are held as unsigned
integers of their width. The CRC32 of a whole is put together from those of parts, read in any order.
"""

from __future__ import annotations

import ctypes
import io
import os
import threading
import zlib
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, lru_cache
from itertools import product
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash

from dsx.checkpoint.catalog import Piece
from dsx.checkpoint.pieces import Blocks, dense_blocks, flat_offset
from dsx.errors import CheckpointError
from dsx.models.param import Box

Buffer: TypeAlias = bytes | bytearray | memoryview
Summed: TypeAlias = tuple[str, int, int, int]
"""A file, bytes ``start`` to ``stop`` of it, and their CRC32."""

_POLYNOMIAL = 0xEDB88320  # of CRC-32/ISO-HDLC, bit-reversed: bit 31 is x^0
_ONE = 1 << 31


def digest(data: Buffer) -> str:
    """xxh3_128 of ``data``, hexadecimal."""
    return xxhash.xxh3_128_hexdigest(data)


def crc32_joined(first: int, second: int, second_bytes: int) -> int:
    """CRC32 of two consecutive stretches, from those of the two.

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
        with self._lock:
            for file, start, stop, crc in parts:
                self._parts[file].append((start, stop, crc))

    def stretches(self, file: str, start: int, stop: int) -> Iterator[tuple[int, int, int | None]]:
        """Parts of bytes ``start`` to ``stop`` in order, without gaps: (start, stop, CRC32, None in a gap).

        A part that was noted twice, because it was read twice, comes once. Parts that cross the bounds or
        overlap count as gaps.
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


Array: TypeAlias = npt.NDArray[Any]

_STORED: Mapping[str, str] = {
    "bfloat16": "<u2",
    **dict.fromkeys(("float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"), "u1"),
}
_QUIET_NAN = 0x7FC0


def numpy_dtype(dtype: str) -> np.dtype[Any]:
    """The numpy dtype that holds elements of torch's ``dtype``, little-endian as files are."""
    return np.dtype(_STORED.get(dtype, dtype)).newbyteorder("<")


def convert(array: Array, dtype: str, wanted: str) -> Array:
    """Elements of ``dtype`` as ``wanted``, both float types; rounded to nearest even, as torch does."""
    if dtype == wanted:
        return array
    wide = array if dtype == "float64" else _to_float32(array, dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        if wanted != "bfloat16":
            return wide.astype(numpy_dtype(wanted), copy=False)
        narrow = wide.astype(np.float32, copy=False)
        bits = np.ascontiguousarray(narrow).view(np.uint32)
        rounded = ((bits + (0x7FFF + ((bits >> 16) & 1)).astype(np.uint32)) >> 16).astype(np.uint16)
        return np.where(np.isnan(narrow), np.uint16(_QUIET_NAN), rounded)


def ulps(a: Array, b: Array, dtype: str) -> npt.NDArray[np.uint64]:
    """How many representable numbers lie between each two elements of ``dtype``.

    -0 and +0 are one apart from nothing: 0. A NaN beside anything but the same bits counts as the largest
    value.
    """
    same = a.view(_unsigned(a)) == b.view(_unsigned(b))
    if dtype.startswith(("int", "uint", "bool")):
        steps = np.abs(a.astype(np.int64) - b.astype(np.int64)).astype(np.uint64)
        return np.where(same, np.uint64(0), steps)
    # Python's bool() of NaN comparisons aside, ordered integers turn distance into subtraction.
    high, low = _ordered(a), _ordered(b)
    steps = (np.maximum(high, low) - np.minimum(high, low)).view(np.uint64)
    broken = _is_nan(a, dtype) | _is_nan(b, dtype)
    return np.where(same, np.uint64(0), np.where(broken, np.uint64(2**64 - 1), steps))


def _to_float32(array: Array, dtype: str) -> Array:
    if dtype == "bfloat16":
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32, copy=False)


def _unsigned(array: Array) -> np.dtype[Any]:
    return np.dtype(f"u{array.dtype.itemsize}")


def _ordered(array: Array) -> npt.NDArray[np.int64]:
    """Integers in the order of the floats whose sign and magnitude bits ``array`` holds."""
    width = 8 * array.dtype.itemsize
    bits = array.view(_unsigned(array)).astype(np.uint64)
    sign = np.uint64(1) << np.uint64(width - 1)
    magnitude = (bits & (sign - np.uint64(1))).view(np.int64)
    return np.where(bits & sign, -magnitude, magnitude)


def _is_nan(array: Array, dtype: str) -> npt.NDArray[np.bool_]:
    if dtype.startswith("float8"):
        return np.zeros(array.shape, np.bool_)
    return np.isnan(_to_float32(array, dtype) if dtype == "bfloat16" else array)


_OPEN_FILES = 128
_SYNC_FILE_RANGE_WRITE = 2  # linux/fs.h
_MOST_READ_BYTES = 1 << 28
_CRC32_STEP_BYTES = 1 << 20


class FilePool:
    """Open files of a folder, shared by threads; at most 128 stay open.

    Args:
        path_of: Checks a file's name and says where it is; called once per opening.
    """

    def __init__(self, path_of: Callable[[str], Path], flags: int) -> None:
        self._path_of = path_of
        self._flags = flags | os.O_CLOEXEC
        self._lock = threading.Lock()
        self._idle: OrderedDict[str, list[int]] = OrderedDict()

    @contextmanager
    def lend(self, file: str) -> Iterator[int]:
        """A descriptor that nobody else uses inside the block."""
        with self._lock:
            waiting = self._idle.get(file)
            descriptor = waiting.pop() if waiting else None
        if descriptor is None:
            descriptor = os.open(self._path_of(file), self._flags)
        try:
            yield descriptor
        finally:
            with self._lock:
                self._idle.setdefault(file, []).append(descriptor)
                self._idle.move_to_end(file)
                closing: list[int] = []
                while sum(map(len, self._idle.values())) > _OPEN_FILES:
                    closing += self._idle.popitem(last=False)[1]
            for old in closing:
                os.close(old)

    def close(self) -> None:
        with self._lock:
            closing = [descriptor for waiting in self._idle.values() for descriptor in waiting]
            self._idle.clear()
        for descriptor in closing:
            os.close(descriptor)


class FileWindow(io.RawIOBase):
    """A part of a file as a file, from which no read takes more than there is.

    A pickle may ask for 2^63 bytes, for which Python would allocate memory before it reads.
    """

    def __init__(self, file: BinaryIO, start: int, length: int) -> None:
        self._file, self._start, self.length, self._at = file, start, length, 0

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """As any file's; the part begins at 0."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self.length}[whence]
        self._at = max(0, base + offset)
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        """As any file's, but never more than 256 MiB."""
        return self._taken(self._file.read, size)

    def readline(self, size: int | None = -1) -> bytes:
        return self._taken(self._file.readline, size)

    def _taken(self, read: Callable[[int], bytes], size: int | None) -> bytes:
        left = min(max(0, self.length - self._at), _MOST_READ_BYTES)
        self._file.seek(self._start + self._at)
        data = read(left if size is None or size < 0 else min(size, left))
        self._at += len(data)
        return data


def read_into(descriptor: int, view: memoryview, offset: int) -> None:
    """Fill ``view`` (bytes) from a file. Raises EOFError if the file ends first."""
    done = 0
    while done < len(view):
        count = os.preadv(descriptor, [view[done:]], offset + done)
        if not count:
            raise EOFError
        done += count


def write_from(descriptor: int, view: memoryview, offset: int) -> None:
    """Write all of ``view`` (bytes) into a file."""
    done = 0
    while done < len(view):
        done += os.pwrite(descriptor, view[done:], offset + done)


def start_writeback(descriptor: int, start: int, stop: int) -> None:
    """Have the system begin to bring written bytes to the disk, without waiting for it.

    The disk then works while the next tiles are copied, and the flush at the end has little left to do. Only
    Linux has a call for this (sync_file_range(2)); elsewhere it does nothing.
    """
    call = _sync_file_range()
    if call is not None:
        call(descriptor, ctypes.c_int64(start), ctypes.c_int64(stop - start), _SYNC_FILE_RANGE_WRITE)


@cache
def _sync_file_range() -> Callable[..., int] | None:
    return getattr(ctypes.CDLL(None), "sync_file_range", None)


def read_box(descriptor: int, piece: Piece, box: Box, out: Array) -> Iterator[tuple[int, int, memoryview]]:
    """Read what a piece holds of ``box`` into ``out``, an array of the box's shape; runs when iterated over.

    Yields:
        (start, stop, bytes) of every stretch of the file that was read. The bytes are only valid meanwhile.

    Raises:
        EOFError: The file ends first.
    """
    blocks = dense_blocks(out.shape, piece.strides)
    direct = not blocks.outer and out.flags.c_contiguous and _row_major(blocks)
    stored = out if direct else np.empty(_stored_shape(blocks, out.shape), out.dtype)
    view, at = stored.reshape(-1).view(np.uint8).data, 0
    for start, stop in stretches(piece, box, out.dtype.itemsize):
        part = view[at : at + stop - start]
        read_into(descriptor, part, start)
        yield start, stop, part
        at += stop - start
    if not direct:
        out[...] = _as_box(stored, blocks, out.shape)


def write_box(
    descriptor: int, piece: Piece, box: Box, values: Array
) -> Iterator[tuple[int, int, memoryview]]:
    """Write ``values``, an array of the box's shape, where a piece has ``box``; runs when iterated over.

    Yields:
        (start, stop, bytes) of every stretch of the file that was written.
    """
    blocks = dense_blocks(values.shape, piece.strides)
    stored = values
    if blocks.outer or not values.flags.c_contiguous or not _row_major(blocks):
        stored = np.empty(_stored_shape(blocks, values.shape), values.dtype)
        _as_box(stored, blocks, values.shape)[...] = values
    view, at = stored.reshape(-1).view(np.uint8).data, 0
    for start, stop in stretches(piece, box, values.dtype.itemsize):
        part = view[at : at + stop - start]
        write_from(descriptor, part, start)
        yield start, stop, part
        at += stop - start


def crc32_of_file(descriptor: int, start: int, stop: int) -> int:
    """CRC32 of bytes ``start`` to ``stop`` of a file. Raises EOFError if it ends first."""
    crc = 0
    for low in range(start, stop, _CRC32_STEP_BYTES):
        buffer = memoryview(bytearray(min(_CRC32_STEP_BYTES, stop - low)))
        read_into(descriptor, buffer, low)
        crc = zlib.crc32(buffer, crc)
    return crc


def digest_of_file(descriptor: int, start: int, stop: int) -> str:
    """xxh3_128 of bytes ``start`` to ``stop`` of a file, a tile's worth. Raises EOFError if it ends first."""
    buffer = memoryview(bytearray(stop - start))
    read_into(descriptor, buffer, start)
    return digest(buffer)


@contextmanager
def blamed(path: Path, tensor: str, doing: str, fix: str) -> Iterator[None]:
    """Turn what the system says about a file into a CheckpointError with the file and the tensor."""
    try:
        yield
    except EOFError:
        raise CheckpointError(
            f"{path}: {tensor}", "the file ends before its last byte: it was cut short", fix
        ) from None
    except OSError as error:
        raise CheckpointError(
            f"{path}: {tensor}", f"{doing} it, the system answers {error.strerror or error}", fix
        ) from error


def _row_major(blocks: Blocks) -> bool:
    return list(blocks.inner) == sorted(blocks.inner)


def _stored_shape(blocks: Blocks, shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(shape[dim] for dim in (*blocks.outer, *blocks.inner))


def _as_box(stored: Array, blocks: Blocks, shape: tuple[int, ...]) -> Array:
    """An array in the order of the file, seen in the order of the tensor."""
    order = [*blocks.outer, *blocks.inner]
    missing = [dim for dim in range(len(shape)) if dim not in order]  # of extent 1
    wide = stored.reshape([*stored.shape, *[1] * len(missing)])
    return wide.transpose(np.argsort([*order, *missing])) if shape else stored.reshape(())


def stretches(piece: Piece, box: Box, item_bytes: int) -> Iterator[tuple[int, int]]:
    """First byte, and the one after the last, of each stretch of a piece's file that holds a box."""
    extents = tuple(high - low for low, high in box)
    blocks = dense_blocks(extents, piece.strides)
    size = blocks.elements * item_bytes
    first = piece.offset + flat_offset(piece, box) * item_bytes
    steps = [piece.strides[dim] * item_bytes for dim in blocks.outer]
    for index in product(*(range(extents[dim]) for dim in blocks.outer)):
        start = first + sum(at * step for at, step in zip(index, steps, strict=True))
        yield start, start + size
