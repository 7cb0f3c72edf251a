"""Files laid out for torch.load: torch reads them, with and without trust, and so does our reader."""

from __future__ import annotations

import random
import zipfile
import zlib
from collections import OrderedDict
from pathlib import Path

import pytest
import torch

import made
from dsx.checkpoint.catalog import Skeleton
from dsx.checkpoint.formats.torch_file import PickledObject, read_torch_file
from dsx.checkpoint.formats.torch_target import Hole, Ordered, number, size_of, torch_skeleton


def make(folder: Path, skeleton: Skeleton, tensors: dict[Hole, torch.Tensor]) -> Path:
    """What the executor does."""
    path = folder / skeleton.file
    data = bytearray(skeleton.num_bytes)
    for offset, part in skeleton.parts:
        data[offset : offset + len(part)] = part
    for hole, tensor in tensors.items():
        raw = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        data[hole.offset : hole.offset + len(raw)] = raw
    for field in skeleton.crc32_fields:
        crc = zlib.crc32(data[field.start : field.stop]).to_bytes(4, "little")
        for place in field.places:
            data[place : place + 4] = crc
    path.write_bytes(data)
    return path


VALUES = {
    "plain": [None, True, False, 0, -1, 2**31, -(2**70), 1.5, "ü", b"\x00\xff", (), (1, (2,)), [], {}],
    "nested": {"a": {1: [2.0]}, "b": ("x", {"y": None})},
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int64", "bool", "uint8", "float64"])
def test_torch_reads_what_was_laid_out(tmp_path: Path, dtype: str) -> None:
    kind = getattr(torch, dtype)
    expected = {
        "a": (torch.rand(5, 7) * 9).to(kind),
        "empty": torch.empty(0, 3).to(kind),
        "scalar": torch.ones(()).to(kind),
    }
    holes = {name: Hole(dtype, tuple(tensor.shape)) for name, tensor in expected.items()}
    content = {
        "tensors": Ordered({**holes, "again": holes["a"]}),
        "step": number(7),
        "shapes": {"a": size_of((5, 7))},
        **VALUES,
    }
    skeleton = torch_skeleton("folder_less.pt", content)
    path = make(tmp_path, skeleton, {holes[name]: tensor for name, tensor in expected.items()})
    for trusting in (True, False):
        loaded = torch.load(path, weights_only=not trusting)
        assert isinstance(loaded["tensors"], OrderedDict)
        for name, tensor in expected.items():
            assert torch.equal(loaded["tensors"][name], tensor)
        assert loaded["tensors"]["again"].data_ptr() == loaded["tensors"]["a"].data_ptr()
        assert loaded["step"].dtype == torch.float32
        assert loaded["step"] == 7
        assert loaded["shapes"]["a"].numel() == 35  # a torch.Size
        assert {key: loaded[key] for key in VALUES} == VALUES
    assert torch.load(path, mmap=True)["tensors"]["a"].equal(expected["a"])
    file = read_torch_file(tmp_path, path.name)
    made.check_storages(file)
    assert {key: file.content[key] for key in VALUES} == VALUES
    assert file.content["tensors"]["a"].offset == holes["a"].offset
    assert all(hole.offset % 64 == 0 for hole in holes.values())
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None


def test_same_members_as_torch(tmp_path: Path) -> None:
    """But for the identifier that torch gives to every file."""
    torch.save({"w": torch.arange(3.0)}, tmp_path / "theirs.pt")
    hole = Hole("float32", (3,))
    make(tmp_path, torch_skeleton("ours.pt", {"w": hole}), {hole: torch.arange(3.0)})
    with zipfile.ZipFile(tmp_path / "theirs.pt") as theirs, zipfile.ZipFile(tmp_path / "ours.pt") as ours:
        expected = {n.split("/", 1)[1]: theirs.read(n) for n in theirs.namelist()}
        found = {n.split("/", 1)[1]: ours.read(n) for n in ours.namelist()}
    assert expected.keys() - found.keys() <= {".data/serialization_id"}
    assert {name: expected[name] for name in found if name != "data.pkl"} == {
        name: data for name, data in found.items() if name != "data.pkl"
    }


def test_objects_are_deepspeeds(tmp_path: Path) -> None:
    from deepspeed.runtime.fp16.loss_scaler import LossScaler
    from deepspeed.utils.tensor_fragment import fragment_address

    content = {
        "at": PickledObject("deepspeed.utils.tensor_fragment.fragment_address", (), {"numel": 5, "start": 2}),
        "scaler": PickledObject(
            "deepspeed.runtime.fp16.loss_scaler.LossScaler", (), {"cur_scale": 1.0, "dynamic": False}
        ),
    }
    path = make(tmp_path, torch_skeleton("a.pt", content), {})
    loaded = torch.load(path, weights_only=False)
    assert loaded["at"] == fragment_address(numel=5, start=2)
    assert isinstance(loaded["scaler"], LossScaler)
    assert loaded["scaler"].cur_scale == 1.0


def test_more_than_four_gibibytes(tmp_path: Path) -> None:
    """Sparse files: zip64 in the member's header, in the directory and at the end."""
    large, after = Hole("bfloat16", (3, 2**30)), Hole("float32", (4,))
    skeleton = torch_skeleton("large.pt", {"large": large, "after": after})
    path = tmp_path / "large.pt"
    with path.open("wb") as file:
        file.truncate(skeleton.num_bytes)
        for offset, part in skeleton.parts:
            file.seek(offset)
            file.write(part)
        file.seek(after.offset)
        file.write(torch.arange(4.0).numpy().tobytes())
        file.seek(large.offset + 2 * (2**31 + 7))
        file.write(
            torch.tensor([random.Random(0).random()]).to(torch.bfloat16).view(torch.uint8).numpy().tobytes()
        )
    assert path.stat().st_size > 6 * 2**30
    loaded = torch.load(path, mmap=True)
    assert torch.equal(loaded["after"], torch.arange(4.0))
    assert loaded["large"].shape == (3, 2**30)
    assert loaded["large"].view(-1)[2**31 + 7] == torch.tensor(0.8444).to(torch.bfloat16)
    found = read_torch_file(tmp_path, path.name).content
    assert (found["large"].offset, found["after"].offset) == (large.offset, after.offset)
