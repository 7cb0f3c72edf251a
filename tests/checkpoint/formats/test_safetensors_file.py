"""safetensors headers: what the library refuses is refused, and what it reads is read as the library does."""

from __future__ import annotations

import json
import random
import struct

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

import mutants
from dsx.checkpoint.formats.safetensors_file import NAMES, contents
from dsx.errors import CheckpointError

_TENSORS = {
    "a.weight": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "b.weight": torch.arange(4, dtype=torch.bfloat16),
    "c": torch.tensor(7, dtype=torch.int64),
    "none": torch.zeros(0, 3),
}
_F32 = {"dtype": "F32", "shape": [1]}


def _file(header: str, tensors: bytes = bytes(8)) -> bytes:
    return struct.pack("<Q", len(header)) + header.encode() + tensors


def _header(**tensors: object) -> str:
    return json.dumps(tensors)


CASES = {
    "whole": _file(_header(a=_F32 | {"data_offsets": [0, 4]}, b=_F32 | {"data_offsets": [4, 8]})),
    "overlapping": _file(_header(a=_F32 | {"data_offsets": [0, 4]}, b=_F32 | {"data_offsets": [0, 4]})),
    "a gap between": _file(
        _header(a=_F32 | {"data_offsets": [0, 4]}, b=_F32 | {"data_offsets": [8, 12]}), bytes(12)
    ),
    "a gap before": _file(_header(a=_F32 | {"data_offsets": [4, 8]})),
    "bytes of none": _file(_header(a=_F32 | {"data_offsets": [0, 4]})),
    "past the end": _file(_header(a=_F32 | {"data_offsets": [0, 4]}, b=_F32 | {"data_offsets": [4, 12]})),
    "duplicate key": _file(
        '{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, '
        '"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}'
    ),
    "another length than its shape's": _file(_header(a=_F32 | {"shape": [3], "data_offsets": [0, 8]})),
    "negative extent": _file(_header(a=_F32 | {"shape": [-2], "data_offsets": [0, 8]})),
    "extents that overflow": _file(_header(a=_F32 | {"shape": [1 << 62, 16], "data_offsets": [0, 8]})),
    "offsets as floats": _file(_header(a=_F32 | {"data_offsets": [0.0, 8.0]})),
    "unknown dtype": _file(_header(a={"dtype": "F33", "shape": [2], "data_offsets": [0, 8]})),
    "header too long": struct.pack("<Q", 100_000_001) + b"{}",
    "header longer than the file": struct.pack("<Q", 1 << 20) + b"{}",
    "header of 2^63": struct.pack("<Q", 1 << 63) + b"{}",
    "NaN": _file('{"a": {"dtype": "F32", "shape": [NaN], "data_offsets": [0, 8]}}'),
    "metadata of another type": _file(
        _header(__metadata__={"a": 1}, a=_F32 | {"shape": [2], "data_offsets": [0, 8]})
    ),
    "nested": _file('{"a": ' + "[" * 5000 + "]" * 5000 + "}"),
    "a list": _file("[]"),
    "no UTF-8": struct.pack("<Q", 8) + b'{"\xff": 1}' + bytes(8),
    "empty": b"",
}


def _by_library(path):
    """Bytes of every tensor, by the library; None if it refuses the file."""
    try:
        with safe_open(path, framework="pt") as file:
            found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no dict)
    except (SafetensorError, OSError):
        return None
    return {
        name: (tuple(one.shape), str(one.dtype).removeprefix("torch."), _bytes(one))
        for name, one in found.items()
    }


def _bytes(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def _by_dsx(path):
    try:
        entries, _ = contents(path.parent, path.name)
    except CheckpointError:
        return None
    data = path.read_bytes()
    return {
        one.name: (
            one.shape,
            one.dtype,
            b"".join(data[p.offset : p.stop(one.item_bytes)] for p in one.pieces),
        )
        for one in entries
    }


@pytest.mark.parametrize("name", CASES)
def test_a_header_has_the_librarys_verdict(name, tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(CASES[name])
    assert _by_dsx(path) == _by_library(path)
    assert (_by_dsx(path) is None) is (name != "whole")


def test_mutants_have_the_librarys_verdict_and_its_bytes(tmp_path):
    good, path = save(_TENSORS, {"format": "pt"}), tmp_path / "model.safetensors"
    refused = 0
    for seed in range(400):
        rng = random.Random(seed)
        bad = mutants.mutated_safetensors(good, rng)[0] if seed % 4 else mutants.mutated_bytes(good, rng)
        path.write_bytes(bad)
        theirs, ours = _by_library(path), _by_dsx(path)
        if theirs is not None and any(dtype not in NAMES for _, dtype, _ in theirs.values()):
            theirs = None  # complex numbers, say, which no catalog can have
        assert ours == theirs, f"seed {seed}"
        refused += ours is None
    assert 150 < refused < 390
