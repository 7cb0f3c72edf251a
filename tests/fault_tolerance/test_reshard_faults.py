"""Conversions that are killed, fed damaged checkpoints, or run out of disk."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import random
import signal
import socket
import subprocess
import sys
import zipfile
import zlib
from dataclasses import replace
from pathlib import Path

import pytest
from filelock import FileLock

import made
from dsx.checkpoint import staging, store
from dsx.checkpoint.catalog import Catalog, Checksum, Crc32Field, Entry, Piece, Skeleton, Target
from dsx.checkpoint.copy_plan import plan
from dsx.checkpoint.execute import ConversionOptions, execute
from dsx.checkpoint.formats import native
from dsx.checkpoint.open import open_checkpoint
from dsx.checkpoint.read import DamagedError, verify
from dsx.errors import CheckpointError

TO = {"dp": 2, "tp": 2, "zero": 3}


@pytest.fixture
def saved(tmp_path):
    """A dsx checkpoint, pp 2 x dp 2, ZeRO-1, by tiles of 500 elements."""
    first = made.layout("qwen2", pp=2, dp=2, zero=1)
    made.reshard(made.plain(tmp_path / "plain", first.params, made.BF16), tmp_path / "A", first, tile=500)
    return tmp_path / "A"


def convert(source, target, **options):
    conversion = made.prepared(source, target, made.layout("qwen2", **TO))
    return conversion.run(ConversionOptions(workers=2, **options))


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# Run in a process of its own: converts, and kills itself when that many bytes are written.
KILLED = """
import os, signal, sys
from pathlib import Path
import made
from dsx.checkpoint.execute import ConversionOptions
from dsx.checkpoint.open import open_checkpoint
source, target, limit = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
done = 0
def progress(count):
    global done
    done += count
    if done >= limit:
        os.kill(os.getpid(), signal.SIGKILL)
layout = made.layout("qwen2", dp=2, tp=2, zero=3)
conversion = made.prepared(open_checkpoint(source), target, layout)
conversion.run(ConversionOptions(workers=2, progress=progress))
"""

# Kills conversions at random moments, from outside; prints how it found the target each time.
KILLED_AT_RANDOM = """
import json, os, random, signal, sys, time
from pathlib import Path
import made
from dsx.checkpoint.execute import ConversionOptions
from dsx.checkpoint.open import open_checkpoint
source, folder, times = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
layout = made.layout("qwen2", dp=2, tp=2, zero=3)
def convert(target):
    conversion = made.prepared(open_checkpoint(source), target, layout)
    return conversion.run(ConversionOptions(workers=2, point_latest=True))
began = time.monotonic()
convert(folder / "reference")
length = time.monotonic() - began
names = sorted(path.name for path in (folder / "reference").iterdir())
chance, found, target = random.Random(0), [], 0
while len(found) < times:
    child = os.fork()
    if child == 0:
        try:
            convert(folder / str(target))
        finally:
            os._exit(0)
    time.sleep(chance.uniform(0, length))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    made_it = (folder / str(target)).exists()
    whole = made_it and sorted(path.name for path in (folder / str(target)).iterdir()) == names
    latest = (folder / "latest").read_text()
    found.append(("whole" if whole else "torn") if made_it else "absent")
    assert (folder / latest).is_dir()
    target += made_it
    length *= 0.5 if made_it else 1.5  # so that some come too early and some too late, however loaded we are
if not made_it:
    convert(folder / str(target))
print(json.dumps(found))
"""


def run(code, *arguments):
    path = os.pathsep.join([str(Path(made.__file__).parent), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": path},
    )


def test_killed_at_random_moments_the_target_is_absent_or_whole(saved, tmp_path):
    """What the kill before left is removed by each, and nothing of it gets into the target."""
    ended = run(KILLED_AT_RANDOM, saved, tmp_path, 15)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert "torn" not in found
    assert found.count("absent") > 2
    targets = [path for path in tmp_path.iterdir() if path.name.isdecimal()]
    assert targets
    for target in targets:
        assert contents(target) == contents(tmp_path / "reference")
        assert not list(verify(open_checkpoint(target)))


@pytest.mark.parametrize("digests", ["of tiles", "of stretches"])
def test_every_bit_flipped_in_the_source_is_found_and_named(saved, tmp_path, digests):
    """By the digests of tiles, which conversions leave, or by those of what each rank wrote, as runs do."""
    catalog = open_checkpoint(saved)
    if digests == "of stretches":
        catalog = replace(catalog, tile_digests={})
    chance = random.Random(2)
    for _ in range(15):
        entry = chance.choice(catalog.entries)
        piece = chance.choice(entry.pieces)
        file = saved / piece.file
        before = file.read_bytes()
        data = bytearray(before)
        data[chance.randrange(piece.offset, piece.stop(entry.item_bytes))] ^= 1 << chance.randrange(8)
        times = file.stat()
        file.write_bytes(data)
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
        with pytest.raises(DamagedError) as error:
            convert(catalog, tmp_path / "out")
        assert str(file) in error.value.where
        assert str(entry) in error.value.where
        assert not list(tmp_path.glob("out*"))
        (found,) = verify(catalog)
        assert str(file) in found.where
        assert str(entry) in found.where
        file.write_bytes(before)
    report = convert(catalog, tmp_path / "out")
    assert report.tiles_checked == sum(len(found) for found in open_checkpoint(saved).tile_digests.values())


def test_flips_under_crc32_are_found_also_in_bytes_that_nobody_needs(saved, tmp_path):
    """Sources without tile digests: members of zip files, here two halves of a file and padding after."""
    layout = made.layout("llama")
    source = made.plain(tmp_path / "source", layout.params, {"weight": "bfloat16", "master": "float32"})
    file = tmp_path / "source" / "all.bin"
    data = file.read_bytes() + bytes(100)
    file.write_bytes(data)
    half = len(data) // 3
    sums = tuple(
        Checksum("all.bin", low, high, "crc32", f"{zlib.crc32(data[low:high]):08x}")
        for low, high in [(0, half), (half, len(data))]
    )
    source = replace(source, checksums=sums)
    to = made.layout("llama", tp=2, pp=2, zero=1)
    assert made.reshard(source, tmp_path / "good", to).sums_checked == 2
    for at in (0, half - 1, half, len(data) - 3):
        bad = bytearray(data)
        bad[at] ^= 4
        file.write_bytes(bad)
        with pytest.raises(DamagedError, match=r"all.bin: tensor .* crc32"):
            made.reshard(source, tmp_path / "bad", to)
        assert not list(tmp_path.glob("bad*"))


def test_files_cut_short_or_missing_are_found_before_anything_is_written(saved, tmp_path):
    catalog = open_checkpoint(saved)
    file = saved / "rank_00002.safetensors"
    data = file.read_bytes()
    for change, what in [(lambda: file.write_bytes(data[:-1]), "cut short"), (file.unlink, "is missing")]:
        change()
        with pytest.raises(CheckpointError, match=what) as error:
            convert(catalog, tmp_path / "out")
        assert f"{file}: tensor " in error.value.where
        assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize("name", ["../plain/all.bin", "/etc/passwd", "link", "a\\b", ""])
def test_paths_out_of_the_folder_are_refused(saved, tmp_path, name):
    (saved / "link").symlink_to(tmp_path / "plain" / "all.bin")
    catalog = open_checkpoint(saved)
    first = catalog.entries[0]
    bad = replace(first, pieces=tuple(replace(piece, file=name) for piece in first.pieces))
    with pytest.raises(CheckpointError, match="leads out of the checkpoint's folder"):
        convert(replace(catalog, entries=(bad, *catalog.entries[1:])), tmp_path / "out")
    assert not list(tmp_path.glob("out*"))


def test_links_into_a_cache_are_followed_where_the_format_has_them(tmp_path):
    layout = made.layout("qwen2")
    source = made.plain(tmp_path / "source", layout.params, {"weight": "bfloat16"})
    (tmp_path / "source" / "all.bin").rename(tmp_path / "blob")
    (tmp_path / "source" / "all.bin").symlink_to(tmp_path / "blob")
    made.reshard(replace(source, links_allowed=True), tmp_path / "out", layout)


def test_what_a_kill_left_is_not_taken_from_a_conversion_that_runs(saved, tmp_path):
    target, partial = tmp_path / "out", tmp_path / "out.partial"
    assert run(KILLED, saved, target, made.num_bytes(saved) // 2).returncode == -signal.SIGKILL
    assert not target.exists()
    (data,) = partial.glob("data.*")
    left = contents(data)
    with (partial / "conversion.lock").open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(CheckpointError, match="another process is writing this checkpoint now"):
            convert(open_checkpoint(saved), target)
    assert contents(data) == left
    other = made.prepared(open_checkpoint(saved), target, made.layout("qwen2", dp=3))
    other.run(ConversionOptions())
    assert not partial.exists()
    other = made.prepared(open_checkpoint(saved), tmp_path / "other", made.layout("qwen2", dp=3))
    other.run(ConversionOptions())
    assert contents(target) == contents(tmp_path / "other")


@pytest.mark.parametrize("silent", [False, True])
def test_without_locks_between_machines_no_conversion_names_the_files_of_another(
    saved, tmp_path, monkeypatch, silent
):
    """The second leaves the first alone if it wrote lately; else it takes over, and the first ends."""
    convert(open_checkpoint(saved), tmp_path / "whole")
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)
    if silent:
        monkeypatch.setattr(staging, "_RECENT_SECONDS", -1e9)
    first, target, ended = os.getpid(), tmp_path / "out", []

    def second(_):
        if ended:
            return
        ended.append(None)
        monkeypatch.setattr(socket, "gethostname", lambda: "elsewhere")
        try:
            convert(open_checkpoint(saved), target)
        except CheckpointError as error:
            ended[0] = str(error)

    if silent:
        with pytest.raises(CheckpointError, match=r"out\.partial"):
            convert(open_checkpoint(saved), target, progress=second)
        assert ended == [None]
    else:
        convert(open_checkpoint(saved), target, progress=second)
        assert f"process {first} on " in ended[0]
    assert contents(target) == contents(tmp_path / "whole")
    assert not (tmp_path / "out.partial").exists()


def test_a_folder_of_files_that_another_made_is_not_named(saved, tmp_path, monkeypatch):
    """Not even under the very name of the conversion's own."""

    def exchanged(folder, wanted):
        folder.rename(tmp_path / "away")
        folder.mkdir()

    conversion = made.prepared(open_checkpoint(saved), tmp_path / "out", made.layout("qwen2", **TO))
    with pytest.raises(CheckpointError, match="another process removed it"):
        execute(conversion.source, conversion.target, conversion.plan, ConversionOptions(), check=exchanged)
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EIO])
def test_a_file_system_without_locks_has_conversions_that_say_so(saved, tmp_path, monkeypatch, code):
    def refused(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", refused)
    if code == errno.EIO:
        with pytest.raises(CheckpointError, match=r"out\.partial: the folder: .*Input/output error"):
            convert(open_checkpoint(saved), tmp_path / "out")
        assert not list(tmp_path.glob("out*"))
        return
    report = convert(open_checkpoint(saved), tmp_path / "out")
    assert sum("has no file locks" in note for note in report.notes) == 1
    assert [path.name for path in tmp_path.glob("out*")] == ["out"]
    assert not list(verify(open_checkpoint(tmp_path / "out")))


def test_nothing_is_left_where_an_open_file_keeps_a_name_after_its_end(saved, tmp_path, monkeypatch):
    """As NFS does: ``.nfsXXXX`` until it is closed."""
    unlink, release, kept = Path.unlink, FileLock.release, []

    def renamed(path, missing_ok=False):
        if path.name != "conversion.lock":
            return unlink(path, missing_ok)
        kept.append(path.rename(path.with_name(".nfs0001")))
        return None

    def closed(lock, *arguments, **options):
        release(lock, *arguments, **options)
        while kept:
            unlink(kept.pop())

    monkeypatch.setattr(Path, "unlink", renamed)
    monkeypatch.setattr(FileLock, "release", closed)
    convert(open_checkpoint(saved), tmp_path / "out")
    assert [path.name for path in tmp_path.glob("out*")] == ["out"]


def test_targets_whose_name_no_folder_can_take_are_refused_at_once(saved, tmp_path, monkeypatch):
    here = tmp_path / "here"
    here.mkdir()
    (tmp_path / "link").symlink_to(here)
    monkeypatch.chdir(here)
    is_mount = Path.is_mount
    monkeypatch.setattr(Path, "is_mount", lambda path: path.name == "disk" or is_mount(path))
    (tmp_path / "disk").mkdir()
    before = sorted(tmp_path.iterdir())
    for target, what in [
        (Path(), "name a new folder inside it"),
        (Path("gone/.."), "name a new folder inside it"),
        (here, "it is the current folder.*name a new folder inside it"),
        (tmp_path / "disk", "a disk is mounted there.*name a new folder inside it"),
        (tmp_path / "link", "exists already"),
    ]:
        with pytest.raises(CheckpointError, match=what):
            made.prepared(open_checkpoint(saved), target, made.layout("qwen2", **TO)).run(ConversionOptions())
    assert sorted(tmp_path.iterdir()) == before
    assert not list(here.iterdir())


def test_a_folder_in_the_way_is_not_touched(saved, tmp_path):
    partial = tmp_path / "out.partial"
    partial.mkdir()
    (partial / "thesis.tex").write_text("x")
    with pytest.raises(CheckpointError, match="it is in the way"):
        convert(open_checkpoint(saved), tmp_path / "out")
    (partial / "data").mkdir()
    with pytest.raises(CheckpointError, match="it is in the way"):
        convert(open_checkpoint(saved), tmp_path / "out")
    assert sorted(path.name for path in partial.iterdir()) == ["data", "thesis.tex"]
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="exists already"):
        convert(open_checkpoint(saved), tmp_path / "file")


def test_a_disk_without_room_is_noticed_before_anything_is_written(saved, tmp_path, monkeypatch):
    real = os.statvfs

    def small(path):
        found = real(path)
        return os.statvfs_result((found[0], 512, *found[2:4], 10, *found[5:]))

    monkeypatch.setattr(store.os, "statvfs", small)
    with pytest.raises(CheckpointError, match=r"its disk has 5.00 KiB free"):
        convert(open_checkpoint(saved), tmp_path / "out")
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize("call", ["pwrite", "fsync"])
def test_a_disk_that_fills_up_is_given_back(saved, tmp_path, monkeypatch, call):
    real, left = getattr(os, call), [30 if call == "pwrite" else 0]

    def full(*arguments):
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*arguments)

    monkeypatch.setattr(os, call, full)
    with pytest.raises(CheckpointError, match=r"No space left on device") as error:
        convert(open_checkpoint(saved), tmp_path / "out")
    assert "out.partial/" in error.value.where
    assert not list(tmp_path.glob("out*"))
    monkeypatch.undo()
    convert(open_checkpoint(saved), tmp_path / "out")


def test_a_limit_of_the_system_on_file_sizes_is_one_message(saved, tmp_path):
    code = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000))\n" + KILLED
    ended = run(code, saved, tmp_path / "out", 1 << 60)
    assert ended.returncode == 1
    assert "CheckpointError" in ended.stderr
    assert "File too large" in ended.stderr
    assert not list(tmp_path.glob("out*"))


def test_zip_members_get_their_crc32(tmp_path):
    """A target like torch's: stored members, their CRC32 in two places, padding that nothing writes."""
    layout = made.layout("qwen2")
    source = made.plain(tmp_path / "source", layout.params[:3], made.FP32)
    names = [entry.name for entry in source.entries]
    blank = tmp_path / "blank.zip"
    with zipfile.ZipFile(blank, "w") as archive:
        for name, entry in zip(names, source.entries, strict=True):
            archive.writestr(f"{name}-{entry.state}", bytes(entry.num_bytes + 12))
    data = blank.read_bytes()
    central = data.index(b"PK\x01\x02")
    fields, entries = [], []
    with zipfile.ZipFile(blank) as archive:
        for member, entry in zip(archive.infolist(), source.entries, strict=True):
            begin = member.header_offset + 30 + len(member.filename)
            second = data.index(b"PK\x01\x02", central)
            central = second + 1
            places = (member.header_offset + 14, second + 16)
            fields.append(Crc32Field(begin, begin + entry.num_bytes + 12, places))
            entries.append(replace(entry, pieces=(replace(entry.pieces[0], file="a.zip", offset=begin + 8),)))
    target = Target(
        catalog=Catalog(root=tmp_path / "out", format="zip", entries=tuple(entries)),
        skeletons=(
            Skeleton(file="a.zip", num_bytes=len(data), parts=((0, data),), crc32_fields=tuple(fields)),
        ),
        finish=lambda folder, written: None,
    )
    unread = {"check": lambda folder, wanted: None}  # a format of this test's own, which has no reader
    execute(source, target, plan(made.with_tiles(source, 100), target.catalog), ConversionOptions(), **unread)
    with zipfile.ZipFile(tmp_path / "out" / "a.zip") as archive:
        assert archive.testzip() is None
        whole = b"".join(archive.read(member)[8:-4] for member in archive.infolist())
    assert whole == (tmp_path / "source" / "all.bin").read_bytes()


def test_memory_stays_in_its_bounds_with_a_tensor_larger_than_them(tmp_path):
    """A tensor of 128 MiB, transposed on the way, within 100 MiB, Python included."""
    code = """
import sys
from pathlib import Path
from dsx.checkpoint.catalog import Catalog, Entry, Piece
from dsx.checkpoint.copy_plan import plan
from dsx.checkpoint.execute import ConversionOptions, execute
from dsx.checkpoint.catalog import Skeleton, Target
folder = Path(sys.argv[1])
rows, columns = 8192, 4096
def catalog(name, strides):
    piece = Piece("f", 0, (0, 0), (rows, columns), strides)
    entry = Entry(name="w", state="weight", shape=(rows, columns), dtype="float32", pieces=(piece,))
    return Catalog(root=folder / name, format="plain", entries=(entry,))
(folder / "a").mkdir()
with (folder / "a" / "f").open("wb") as file:
    file.truncate(4 * rows * columns)
a, b = catalog("a", (1, rows)), catalog("b", (columns, 1))
file = Skeleton(file="f", num_bytes=4 * rows * columns)
target = Target(catalog=b, skeletons=(file,), finish=lambda *_: None)
unread = lambda *_: None  # a format of this test's own, which has no reader
execute(a, target, plan(a, b), ConversionOptions(memory_bytes=100 << 20, workers=8), check=unread)
print(next(line for line in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in line))
"""
    ended = run(code, tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert int(ended.stdout.split()[1]) < 110 * 1024  # kB
    assert (tmp_path / "b" / "f").stat().st_size == 1 << 27


def test_an_entry_without_elements_and_one_without_dims(tmp_path):
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "f").write_bytes(b"\x01\x02\x03\x04")
    entries = (
        Entry(name="none", state="weight", shape=(0, 3), dtype="float32", pieces=()),
        Entry(name="one", state="weight", shape=(), dtype="float32", pieces=(Piece("f", 0, (), (), ()),)),
    )
    source = Catalog(root=tmp_path / "source", format="plain", entries=entries)
    from dsx.checkpoint.layouts import TargetDegrees, layout_like

    target = native.target_of(source, tmp_path / "out", layout_like(source, TargetDegrees()))
    execute(source, target, plan(source, target.catalog), ConversionOptions())
    read = native.catalog_of(tmp_path / "out")
    assert [entry.shape for entry in read.entries] == [(0, 3), ()]
    assert (tmp_path / "out" / "rank_00000.safetensors").read_bytes()[-4:] == b"\x01\x02\x03\x04"
