"""Plain numbers of quantised tensors, box by box: what has to be read for a box, and what it makes.

A scale is of a block of numbers, and a box may cut blocks: numbers are those of the box alone, scales those
of all blocks that it reaches into. Products are in float32, as in every implementation that is named here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from dsx.checkpoint.catalog import Entry, Packed, Piece
from dsx.checkpoint.file_io import Array, convert
from dsx.checkpoint.pieces import contiguous, corner_of, flat_offset
from dsx.models.param import Box

ReadPart: TypeAlias = Callable[[Entry, Box], Array]
"""Gives a box of a stored tensor as :func:`~dsx.checkpoint.file_io.numpy_dtype` holds it."""

MOST_UNPACKING_BYTES = 28
"""Memory for each number that is unpacked: of 4 bits two places of 8 bytes, itself, its bits, its scale."""

_E4M3_NAN = 0x7F
_E2M1 = np.array((0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6), np.float32)
"""Numbers of 4 bits (OCP Microscaling Formats 1.0, section 5.3.3; FP4_VALUES of transformers' mxfp4.py)."""


def unpack(piece: Piece, box: Box, item_bytes: int, read: ReadPart) -> Array:
    """What a piece with ``packed`` holds of a box.

    Offset and strides of ``piece`` are those of the tensor that the packed parts make, whose elements have
    ``item_bytes``. ``read`` reads stored tensors.

    Returns:
        float32, of the box's shape.
    """
    packed = piece.packed
    assert packed is not None
    first = corner_of(piece.offset // item_bytes + flat_offset(piece, box), packed.shape)
    steps, spans, dims = contiguous(packed.shape), [(low, low + 1) for low in first], []
    for (low, high), step in zip(box, piece.strides, strict=True):
        if high - low > 1:
            told = enumerate(zip(packed.shape, steps, strict=True))
            dim = next(dim for dim, (extent, own) in told if own == step and extent > 1)
            spans[dim] = (first[dim], first[dim] + high - low)
            dims.append(dim)
    values = _METHODS[packed.method](packed, tuple(spans), read)
    rest = [dim for dim in range(len(spans)) if dim not in dims]
    return values.transpose(*dims, *rest).reshape([high - low for low, high in box])


def _fp8(packed: Packed, box: Box, read: ReadPart) -> Array:
    """A number times its block's scale (DeepSeek-V3's inference/kernel.py, ``weight_dequant_kernel``)."""
    values = _E4M3.take(read(packed.part("numbers"), box))
    blocks = zip(box, packed.block, strict=True)
    covered = tuple((low // size, -(-high // size)) for (low, high), size in blocks)
    scales = _scales(packed.part("scales"), covered, read)
    for dim, ((low, high), size) in enumerate(zip(box, packed.block, strict=True)):
        if scales.shape[dim] > 1:
            scales = scales.take(np.arange(low, high) // size - low // size, axis=dim)
    values *= scales
    return values


def _mxfp4(packed: Packed, box: Box, read: ReadPart) -> Array:
    """Two numbers in a byte, the lower bits first (transformers' mxfp4.py, convert_moe_packed_tensors)."""
    *outer, (low, high) = box
    size = packed.block[-1]
    covered = (*outer, (low // size, -(-high // size)))
    numbers = read(packed.part("numbers"), (*covered, (0, size // 2)))
    values = _E2M1.take(np.stack((numbers & 15, numbers >> 4), axis=-1)).reshape(*numbers.shape[:-1], size)
    with np.errstate(over="ignore", invalid="ignore"):
        values *= _scales(packed.part("scales"), covered, read)[..., None]
    first = low - covered[-1][0] * size
    return values.reshape(*values.shape[:-2], -1)[..., first : first + high - low]


def _four_bits(packed: Packed, box: Box, read: ReadPart) -> Array:
    """Two numbers in a byte, the higher bits first, by a table; blocks go on from one row to the next.

    As in bitsandbytes' ``_dequantize_4bit_compute`` (backends/default/ops.py). Scales may be of 8 bits
    themselves, by another table, in blocks of their own, less their mean: QLoRA's double quantisation
    (arXiv:2305.14314, section 3).
    """
    (top, bottom), (low, high) = box
    columns, shift = packed.shape[1], packed.block[1].bit_length() - 1
    begin = low // 2
    numbers = read(packed.part("numbers"), ((top, bottom), (begin, -(-high // 2))))
    pairs = np.stack((numbers >> 4, numbers & 15), axis=-1).reshape(len(numbers), -1)
    values = _whole(packed, "table", read).take(pairs[:, low - 2 * begin : high - 2 * begin])
    flat = np.arange(top, bottom)[:, None] * columns + np.arange(low, high)
    homes = flat >> shift
    first, last = int(homes[0, 0]), int(homes[-1, -1]) + 1
    scales = read(packed.part("scales"), ((first, last),))
    if packed.block[2]:
        own = np.arange(first, last) // packed.block[2]
        outer = read(packed.part("outer_scales"), ((int(own[0]), int(own[-1]) + 1),))
        scales = _whole(packed, "outer_table", read)[scales] * outer[own - own[0]]
        scales = scales + np.float32(packed.mean)
    homes -= first
    values *= scales.take(homes)
    return values


def _int8(packed: Packed, box: Box, read: ReadPart) -> Array:
    """A number times 1 / 127 of the largest of its row (bitsandbytes' ``int8_vectorwise_dequant``)."""
    values = read(packed.part("numbers"), box).astype(np.float32)
    values *= read(packed.part("scales"), box[:1])[:, None]
    values *= np.float32(1 / 127)
    return values


_METHODS = {"fp8": _fp8, "mxfp4": _mxfp4, "4bit": _four_bits, "int8": _int8}


def _whole(packed: Packed, role: str, read: ReadPart) -> Array:
    entry = packed.part(role)
    return read(entry, tuple((0, extent) for extent in entry.shape))


def _scales(entry: Entry, box: Box, read: ReadPart) -> Array:
    """Scales in float32; those of 8 bits are exponents of two (E8M0: 2 ** (bits - 127))."""
    values = read(entry, box)
    if entry.dtype in ("uint8", "float8_e8m0fnu"):
        return np.ldexp(np.float32(1), values.astype(np.int32) - 127)
    return convert(values, entry.dtype, "float32")


def _e4m3() -> Array:
    """The number of each byte (OCP FP8 1.0, table 1): sign, exponent of 4 bits, 3 more; no infinity."""
    bits = np.arange(256)
    exponent, more = bits >> 3 & 15, (bits & 7).astype(np.float32)
    numbers = np.where(exponent == 0, np.ldexp(more, -9), np.ldexp(more + 8, exponent - 10))
    numbers[bits & _E4M3_NAN == _E4M3_NAN] = np.nan
    return np.where(bits >> 7, -numbers, numbers).astype(np.float32)


_E4M3 = _e4m3()
