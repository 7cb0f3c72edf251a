"""CRC32 put together from parts, against zlib; conversions and distances of numbers, against torch."""

from __future__ import annotations

import zlib

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dsx.checkpoint.file_io import Crc32Parts, convert, crc32_joined, crc32_of_zeros, numpy_dtype, ulps

FLOATS = ["float64", "float32", "bfloat16", "float16"]


@given(st.binary(max_size=50), st.binary(max_size=50), st.integers(0, 1 << 20))
def test_crc32_of_a_whole_from_its_parts(a, b, zeros):
    assert crc32_joined(zlib.crc32(a), zlib.crc32(b), len(b)) == zlib.crc32(a + b)
    assert crc32_of_zeros(zeros) == zlib.crc32(bytes(zeros))


def test_parts_come_in_order_with_their_gaps():
    parts = Crc32Parts()
    parts.add([("f", 30, 40, 3), ("f", 10, 20, 1), ("f", 10, 20, 1), ("f", 15, 25, 9), ("g", 0, 99, 7)])
    found = list(parts.stretches("f", 10, 50))
    assert found == [(10, 20, 1), (20, 30, None), (30, 40, 3), (40, 50, None)]


def bits(tensor: torch.Tensor) -> np.ndarray:
    """A torch tensor as the array that dsx holds it in."""
    name = str(tensor.dtype).removeprefix("torch.")
    return np.frombuffer(bytearray(tensor.contiguous().view(torch.uint8).numpy()), numpy_dtype(name))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("wanted", FLOATS)
def test_conversion_is_torchs_bit_for_bit(dtype, wanted):
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(0, 2**16, (4000, 4), generator=generator).to(torch.uint16)
    if dtype in ("bfloat16", "float16"):
        words = torch.arange(2**16).to(torch.uint16)  # all of them
    tensor = words.view(getattr(torch, dtype)).reshape(-1)
    extra = torch.tensor([0.0, -0.0, 1e-8, -1e-40, 65519.9, 65520.0, 1e38, 3.4e38, float("inf")])
    tensor = torch.cat([tensor, extra.to(tensor.dtype)])
    tensor = tensor[~tensor.isnan()]  # payloads of NaN are nobody's business; that they stay NaN is, below
    expected = tensor.to(getattr(torch, wanted))
    assert convert(bits(tensor), dtype, wanted).tobytes() == bits(expected).tobytes()
    nan = torch.tensor([float("nan")], dtype=tensor.dtype)
    again = torch.frombuffer(
        bytearray(convert(bits(nan), dtype, wanted).tobytes()), dtype=getattr(torch, wanted)
    )
    assert again.isnan().all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_ulps_count_the_numbers_between(dtype):
    torch_dtype = getattr(torch, dtype)
    a = torch.tensor([1.0, -1.0, 0.0, 0.0, 5.0, float("inf")], dtype=torch_dtype)
    zero = torch.zeros(1, dtype=torch_dtype)
    up = torch.nextafter(a, torch.tensor(float("inf"), dtype=torch_dtype))
    twice = torch.nextafter(up, torch.tensor(float("inf"), dtype=torch_dtype))
    assert ulps(bits(a), bits(a), dtype).tolist() == [0] * 6
    assert ulps(bits(a), bits(up), dtype).tolist() == [1, 1, 1, 1, 1, 0]
    assert ulps(bits(twice), bits(a), dtype).tolist() == [2, 2, 2, 2, 2, 0]
    assert ulps(bits(zero), bits(-zero), dtype).tolist() == [0]
    tiny = torch.nextafter(zero, torch.ones(1, dtype=torch_dtype))
    assert ulps(bits(tiny), bits(-tiny), dtype).tolist() == [2]
    nan = torch.full((1,), float("nan"), dtype=torch_dtype)
    assert ulps(bits(nan), bits(tiny), dtype).tolist() == [2**64 - 1]
    assert ulps(bits(nan), bits(nan), dtype).tolist() == [0]


def test_ulps_of_integers_are_differences():
    a, b = np.array([3, -5, 7], "<i8"), np.array([3, 5, 6], "<i8")
    assert ulps(a, b, "int64").tolist() == [0, 10, 1]
