"""Files of torch.save, read without torch, against what torch wrote; and files made to do harm."""

import argparse
import io
import os
import pickle
import random
import struct
import zipfile
from collections import Counter, OrderedDict, defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch

import made
from dsx.checkpoint.file_io import numpy_dtype
from dsx.checkpoint.formats.torch_file import PickledObject, TensorRef, read_torch_file
from dsx.errors import CheckpointError

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
INTEGERS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]
FORMATS = pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])


def save(folder: Path, value, zipped: bool = True) -> Path:
    torch.save(value, folder / "a.pt", _use_new_zipfile_serialization=zipped)
    return folder / "a.pt"


def stored(path: Path, ref: TensorRef) -> torch.Tensor:
    """The tensor, by its description alone."""
    data = path.read_bytes()[ref.offset :]
    dtype = numpy_dtype(ref.dtype)
    strides = [step * dtype.itemsize for step in ref.strides]
    array = np.ndarray(ref.shape, dtype, data, strides=strides).copy()
    return torch.from_numpy(array).view(getattr(torch, ref.dtype))


@FORMATS
@pytest.mark.parametrize("dtype", FLOATS + INTEGERS, ids=str)
def test_tensors_of_every_kind(tmp_path, zipped, dtype):
    torch.manual_seed(1)
    base = (torch.rand(6, 5) * 100).to(dtype)
    values = {
        "plain": base.clone(),
        "transposed": base.clone().t(),
        "view": base[2:4, 1:],  # shares a storage with the next
        "row": base[3],
        "scalar": torch.tensor(3).to(dtype),
        "empty": torch.empty(0, 4, dtype=dtype),
        "scale": torch.nn.Parameter(base.clone()) if dtype.is_floating_point else base.clone(),
    }
    path = save(tmp_path, values, zipped)
    content = read_torch_file(tmp_path, "a.pt")
    for name, expected in values.items():
        ref = content.content[name]
        assert (ref.shape, ref.dtype) == (tuple(expected.shape), str(expected.dtype).removeprefix("torch."))
        assert ref.contiguous == expected.is_contiguous()
        if expected.numel():
            assert torch.equal(stored(path, ref), expected)
    assert content.value(content.content["scalar"]) == values["scalar"].item()
    assert content.content["view"].storage == content.content["row"].storage
    made.check_storages(content)


@FORMATS
def test_plain_values_come_as_they_are(tmp_path, zipped):
    values = {
        "numbers": [1, -5, 2**40, 2**80, 1.5, float("inf"), True, None, 3 + 4j],
        "texts": ["a", "ü" * 300, b"\x00\xff" * 200],
        "nested": OrderedDict([("x", ((1, 2), [3])), (5, {"y": {1, 2}})]),
        "size": torch.Size([3, 4]),
        "counter": Counter("aab"),
        "default": defaultdict(list, {"k": [1]}),
        "path": Path("/a/b"),
        "arguments": argparse.Namespace(lr=0.1, tp=2),
        "numpy": np.random.default_rng(1).integers(0, 9, 5),
    }
    save(tmp_path, values, zipped)
    content = read_torch_file(tmp_path, "a.pt").content
    for key in ("numbers", "texts", "nested", "counter", "default"):
        assert content[key] == values[key]
    assert content["size"] == (3, 4)
    assert content["path"] == "/a/b"
    assert content["arguments"].kind == "argparse.Namespace"
    assert content["arguments"].state == {"lr": 0.1, "tp": 2}
    assert isinstance(content["numpy"], PickledObject)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_protocols(tmp_path, protocol):
    values = {
        "t": torch.arange(6.0),
        "s": frozenset([1]),
        "b": bytearray(b"ab"),
        "n": [(), (1,), (1, 2, 3, 4)],
    }
    torch.save(values, tmp_path / "a.pt", pickle_protocol=protocol)
    content = read_torch_file(tmp_path, "a.pt").content
    assert content["s"] == {1}
    assert content["b"] == b"ab"
    assert content["n"] == values["n"]
    assert torch.equal(stored(tmp_path / "a.pt", content["t"]), values["t"])


class Harm:
    """Makes a file when it is unpickled."""

    def __init__(self, function, *args):
        self.call = (function, args)

    def __reduce__(self):
        return self.call


def mark(path: str) -> None:
    Path(path).touch()


def test_members_of_enumerations_by_name(tmp_path):
    """As Python 3.11.0 to 3.11.3 write them."""
    from deepspeed.runtime.zero.config import ZeroStageEnum

    stages = [stage for stage in ZeroStageEnum.__members__.items() if stage[0] != "max_stage"]
    save(tmp_path, [Harm(getattr, ZeroStageEnum, name) for name, _ in stages])
    assert read_torch_file(tmp_path, "a.pt").content == [int(stage) for _, stage in stages]
    for owner, name in ((ZeroStageEnum, "mro"), (dict, "fromkeys")):
        save(tmp_path, Harm(getattr, owner, name))
        with pytest.raises(CheckpointError, match="its pickle"):
            read_torch_file(tmp_path, "a.pt")


@FORMATS
def test_harmful_pickles_are_refused_and_not_run(tmp_path, zipped):
    marker = tmp_path / "marker"
    harms = [
        (Harm(os.system, f"touch {marker}"), "posix.system"),
        (Harm(eval, f"open({str(marker)!r}, 'w')"), "builtins.eval"),
        (Harm(getattr, 1, "real"), "builtins.getattr"),
        (Harm(torch.load, str(marker)), "torch.serialization.load"),
        (Harm(mark, str(marker)), "test_torch_file.mark"),
    ]
    for harm, name in harms:
        save(tmp_path, {"module": torch.ones(2), "client_state": [harm]}, zipped)
        with pytest.raises(CheckpointError, match=name.replace(".", r"\.")) as caught:
            read_torch_file(tmp_path, "a.pt")
        assert "a.pt" in str(caught.value)
        assert not marker.exists()


HAND_MADE = {
    "INST": b"(S'touch x'\nios\nsystem\n.",
    "OBJ": b"(cos\nsystem\nS'x'\no.",
    "EXT1": b"\x82\x01.",
    "PERSID": b"Pabc\n.",
    "calls a value": b"\x80\x02K\x01K\x02\x85R.",
    "calls its own tensor class": b"ctorch\nTensor\n)R.",
    "attributes for a class": b"ccollections\nOrderedDict\n}U\x01aK\x01sb.",
    "attributes for a list": b"](K\x01e}U\x01aK\x01sb.",
    "a reference that is no storage": b"\x80\x02X\x01\x00\x00\x00aQ.",
    "an empty stack": b"\x80\x020.",
    "no mark": b"\x80\x02t.",
    "no such memo": b"\x80\x02h\x05.",
    "no end": b"\x80\x02K\x01",
    "deep key": b"\x80\x02}K\x01" + b"\x85" * 100_000 + b"K\x02s.",
    "a list as a key": b"\x80\x02}]K\x02s.",
    "dotted name": b"\x80\x04\x8c\x0bcollections\x8c\x14OrderedDict.__init__\x93.",
}


@pytest.mark.parametrize("program", HAND_MADE.values(), ids=HAND_MADE.keys())
def test_programs_that_torch_does_not_write(tmp_path, program):
    with zipfile.ZipFile(tmp_path / "a.pt", "w") as archive:
        archive.writestr("archive/data.pkl", program)
    with pytest.raises(CheckpointError, match=r"a\.pt"):
        read_torch_file(tmp_path, "a.pt")


def test_values_nested_without_end(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.pt", "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02K\x01" + b"\x85" * 500 + b".")
    with pytest.raises(CheckpointError, match="nested"):
        read_torch_file(tmp_path, "a.pt")


def test_a_few_bytes_that_stand_for_many(tmp_path):
    """Forty lists, each holding the last one twice: 2**40 elements if they were written out."""
    program = b"\x80\x02]q\x00" + b"".join(
        b"]q" + bytes([n]) + b"(h" + bytes([n - 1]) + b"h" + bytes([n - 1]) + b"e" for n in range(1, 41)
    )
    with zipfile.ZipFile(tmp_path / "a.pt", "w") as archive:
        archive.writestr("archive/data.pkl", program + b".")
    content = read_torch_file(tmp_path, "a.pt").content
    assert content[0] is content[1]


@FORMATS
def test_a_file_cut_short_anywhere(tmp_path, zipped):
    path = save(tmp_path, {"w": torch.arange(50.0), "n": {"lr": 0.1}}, zipped)
    data = path.read_bytes()
    for length in [*range(0, 400, 7), *range(400, len(data), 41), len(data) - 1]:
        path.write_bytes(data[:length])
        with pytest.raises(CheckpointError, match=r"a\.pt"):
            read_torch_file(tmp_path, "a.pt")


def test_every_flipped_bit_of_a_storage_is_found(tmp_path):
    path = save(tmp_path, {"w": torch.arange(16.0), "v": torch.ones(3)})
    data = path.read_bytes()
    file = read_torch_file(tmp_path, "a.pt")
    assert {c.algorithm for c in file.checksums} == {"crc32"}
    assert [c.stop - c.start for c in file.checksums] == [64, 12]
    for storage in file.storages.values():
        for at in range(storage.start, storage.stop):
            path.write_bytes(data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :])
            assert torch.load(path)  # torch does not see it
            with pytest.raises(CheckpointError, match=r"all of it: bytes \d+ to \d+ .* crc32"):
                made.check_storages(read_torch_file(tmp_path, "a.pt"))


def test_flipped_bits_of_the_structure_never_pass(tmp_path):
    """Anywhere in the file: an error, or the same description, never another tensor."""
    path = save(tmp_path, {"w": torch.arange(16.0)})
    data = path.read_bytes()
    file = read_torch_file(tmp_path, "a.pt")
    choose = random.Random(1)
    refused = 0
    for _ in range(300):
        at = choose.randrange(len(data))
        path.write_bytes(data[:at] + bytes([data[at] ^ 1 << choose.randrange(8)]) + data[at + 1 :])
        try:
            found = read_torch_file(tmp_path, "a.pt")
            made.check_storages(found)
        except CheckpointError:
            refused += 1
        else:
            assert found.content == file.content
    assert refused > 100


def test_without_checksums(tmp_path):
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        save(tmp_path, {"w": torch.arange(16.0)})
    finally:
        torch.serialization.set_crc32_options(before)
    file = read_torch_file(tmp_path, "a.pt")
    made.check_storages(file)
    assert torch.equal(stored(file.path, file.content["w"]), torch.arange(16.0))


def forged(tmp_path, old: bytes, new: bytes) -> None:
    """Replace a part of the structure of a good file."""
    buffer = io.BytesIO()
    torch.save({"w": torch.arange(10.0)}, buffer)
    with zipfile.ZipFile(buffer) as good, zipfile.ZipFile(tmp_path / "a.pt", "w") as bad:
        for member in good.infolist():
            data = good.read(member)
            if member.filename.endswith("data.pkl"):
                assert data.count(old) == 1, data
                data = data.replace(old, new)
            bad.writestr(member.filename, data)


def test_tensors_outside_their_storage(tmp_path):
    forged(tmp_path, b"QK\x00K\n\x85", b"QK\x00K\x0b\x85")  # 11 of 10 elements
    with pytest.raises(CheckpointError, match=r"storage 0: a tensor .11,. that begins at its element 0"):
        read_torch_file(tmp_path, "a.pt")
    forged(tmp_path, b"QK\x00K\n\x85", b"QJ\xff\xff\xff\xffK\n\x85")  # begins at -1
    with pytest.raises(CheckpointError, match=r"does not lie within|strides"):
        read_torch_file(tmp_path, "a.pt")
    forged(tmp_path, b"X\x01\x00\x00\x000", b"X\x01\x00\x00\x007")  # a storage that is not there
    with pytest.raises(CheckpointError, match="storage 7: the file does not have it"):
        read_torch_file(tmp_path, "a.pt")


def test_other_files(tmp_path):
    (tmp_path / "a.pt").write_text("hello")
    with pytest.raises(CheckpointError, match=r"no file of torch.save"):
        read_torch_file(tmp_path, "a.pt")
    (tmp_path / "a.pt").write_bytes(pickle.dumps({"a": 1}, protocol=2))
    with pytest.raises(CheckpointError, match=r"a\.pt"):
        read_torch_file(tmp_path, "a.pt")
    with pytest.raises(CheckpointError, match="missing"):
        read_torch_file(tmp_path, "b.pt")
    with zipfile.ZipFile(tmp_path / "a.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", pickle.dumps({}, protocol=2))
    with pytest.raises(CheckpointError, match="compressed"):
        read_torch_file(tmp_path, "a.pt")
    with zipfile.ZipFile(tmp_path / "a.pt", "w") as archive:
        archive.writestr("archive/data.pkl", struct.pack("<B", 46))
        with pytest.warns(UserWarning, match="Duplicate"):
            archive.writestr("archive/data.pkl", pickle.dumps({}, protocol=2))
    with pytest.raises(CheckpointError, match=r"not those of torch.save"):
        read_torch_file(tmp_path, "a.pt")
