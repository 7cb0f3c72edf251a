"""Elements of checkpoints as numpy arrays, by torch's dtype names, without torch.

numpy has no bfloat16 and no float8: they are held as unsigned integers of their width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[Any]

_STORED: Mapping[str, str] = {"bfloat16": "<u2", "float8_e4m3fn": "u1", "float8_e5m2": "u1"}
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
        if wanted == "bfloat16":
            return _to_bfloat16(wide.astype(np.float32, copy=False))
        return wide.astype(numpy_dtype(wanted), copy=False)


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


def _to_bfloat16(array: Array) -> Array:
    bits = np.ascontiguousarray(array).view(np.uint32)
    rounded = ((bits + (0x7FFF + ((bits >> 16) & 1)).astype(np.uint32)) >> 16).astype(np.uint16)
    return np.where(np.isnan(array), np.uint16(_QUIET_NAN), rounded)


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
