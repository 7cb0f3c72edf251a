"""Kills a real process before every file operation of a save and looks at what is left."""

import errno
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dsx.checkpoint import store
from dsx.errors import CheckpointError

FILES = ("dsx.json", "mp_rank_00_model_states.pt", "shards/part.bin")


def save(root, tag, content):
    """A save as the engine does it: stage, write the files, commit, point latest."""
    staged = store.stage(root, tag)
    for name in FILES:
        path = staged / name
        path.parent.mkdir(exist_ok=True)
        with path.open("w") as file:
            for _ in range(3):
                file.write(content)
                file.flush()
                path.stat()
    store.commit(root, tag)
    store.point_latest(root, tag)


def content_of(folder):
    """What ``save`` wrote. Fails unless every file is there, whole, and of one save."""
    texts = {name: (folder / name).read_text() for name in FILES}
    (text,) = set(texts.values())
    assert sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()) == sorted(FILES)
    content = text[: len(text) // 3]
    assert text == content * 3
    return content


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def killed_before(operation, work):
    """Fork, run ``work`` and kill -9 the child before its ``operation``-th file operation.

    Every opening, writing, renaming, deleting, listing and syncing counts. False once there are fewer.
    """
    pid = os.fork()
    if pid == 0:
        try:
            _die_before(operation)
            work()
        except BaseException:  # noqa: BLE001 (the child must not return into pytest)
            sys.excepthook(*sys.exc_info())
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.WEXITSTATUS(status) == 0
    return False


def _die_before(operation):
    left = operation

    def count(*_):
        nonlocal left
        left -= 1
        if left == -1:
            os.kill(os.getpid(), signal.SIGKILL)

    def audit(event, _):
        if event.split(".")[0] in {"open", "os", "shutil"}:
            count()

    for name in ("fsync", "stat"):  # not audited; save calls stat after every write
        real = getattr(os, name)
        setattr(os, name, lambda *args, real=real, **kwargs: (count(), real(*args, **kwargs))[1])
    sys.addaudithook(audit)


@pytest.mark.parametrize("tag", ["step1", "step2"], ids=["over-the-same-tag", "beside-an-older-tag"])
def test_kill_at_every_file_operation_leaves_a_complete_checkpoint(tmp_path, tag):
    seen = []
    while True:
        root = tmp_path / str(len(seen))
        save(root, "step1", "old")
        killed = killed_before(len(seen), lambda root=root: save(root, tag, "new"))
        found = content_of(store.find(root))
        for name in store.tags(root):
            assert content_of(store.find(root, name)) in {"old", "new"}
        save(root, "step3", "newest")
        assert content_of(store.find(root)) == "newest"
        assert not [name for name in names(root) if name.startswith(".")]
        seen.append(found)
        shutil.rmtree(root)
        if not killed:
            break
    assert len(seen) > 30
    assert seen == ["old"] * seen.count("old") + ["new"] * seen.count("new")
    assert seen[0] == "old"
    assert seen[-1] == "new"


def test_kill_of_the_first_save_leaves_a_clear_error_or_the_checkpoint(tmp_path):
    operation, missing = 0, 0
    root = tmp_path / "run"
    while killed_before(operation, lambda: save(root, "step1", "new")):
        try:
            found = store.find(root)
        except CheckpointError:
            missing += 1
        else:
            assert content_of(found) == "new"
        operation += 1
        shutil.rmtree(root, ignore_errors=True)
    assert 0 < missing < operation
    assert content_of(store.find(root)) == "new"


@pytest.mark.slow
def test_kill_of_a_recovery_and_of_the_save_after_it(tmp_path):
    """Two kills in a row: the second save starts from whatever the first kill left."""
    first = second = 0
    root = tmp_path / "run"
    save(root, "step1", "0")
    while killed_before(first, lambda: save(root, "step1", "1")):
        killed_before(second, lambda: save(root, "step1", "2"))
        assert content_of(store.find(root)) in {"0", "1", "2"}
        first, second = first + 1, second + 7
        if second > first:
            second -= first
        shutil.rmtree(root)
        save(root, "step1", "0")
    assert first > 30


def test_a_half_deleted_checkpoint_never_comes_back(tmp_path):
    operation, root = 0, tmp_path / "run"
    save(root, "step1", "old")
    while killed_before(operation, lambda: save(root, "step1", "new")):
        shutil.rmtree(root / "step1", ignore_errors=True)  # by its owner; leftovers of the save stay hidden
        for tag in store.tags(root):
            assert content_of(store.find(root, tag)) == "old"
        shutil.rmtree(root)
        save(root, "step1", "old")
        operation += 1


def test_a_save_of_another_tag_keeps_an_interrupted_replacement(tmp_path):
    save(tmp_path, "step1", "old")
    (tmp_path / "step1").rename(tmp_path / ".step1.replaced")
    save(tmp_path, "step2", "new")
    assert content_of(store.find(tmp_path, "step1")) == "old"


def test_nothing_is_renamed_before_it_is_on_the_disk(tmp_path, monkeypatch):
    """A power cut loses what was not synced: files before their folder's rename, both before the old goes."""
    save(tmp_path, "step1", "old")
    staged = store.stage(tmp_path, "step1")
    for name in FILES:
        (staged / name).parent.mkdir(exist_ok=True)
        (staged / name).write_text("new")
    log = []

    def logged(owner, name, describe):
        real = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args: (log.append(describe(*args)), real(*args))[1])

    logged(os, "fsync", lambda descriptor: ("sync", str(Path(f"/proc/self/fd/{descriptor}").readlink())))
    logged(Path, "rename", lambda source, target: ("rename", str(source), str(target)))
    logged(shutil, "rmtree", lambda path: ("delete", str(path)))
    store.commit(tmp_path, "step1")
    into_place = log.index(("rename", str(staged), str(tmp_path / "step1")))
    for path in (staged, staged / "shards", *(staged / name for name in FILES)):
        assert log.index(("sync", str(path))) < into_place
    (deletion,) = [at for at, entry in enumerate(log) if entry[0] == "delete"]
    assert into_place < log.index(("sync", str(tmp_path))) < deletion
    assert not (tmp_path / ".step1.replaced").exists()


def test_a_full_disk_keeps_the_old_content(tmp_path):
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    (tmp_path / "file").write_bytes(b"old")
    (tmp_path / ".file.partial").symlink_to("/dev/full")
    with pytest.raises(CheckpointError, match="No space left on device"):
        store.write_atomically(tmp_path / "file", b"new" * 100)
    assert (tmp_path / "file").read_bytes() == b"old"
    store.write_atomically(tmp_path / "file", b"new")
    assert (tmp_path / "file").read_bytes() == b"new"
    assert names(tmp_path) == ["file"]


def test_latest_is_what_deepspeed_writes_and_reads(tmp_path):
    """deepspeed/runtime/engine.py: save writes the bare tag, load strips what it reads."""
    save(tmp_path, "global_step7", "x")
    assert (tmp_path / "latest").read_bytes() == b"global_step7"
    (tmp_path / "latest").write_text("global_step7\n")
    assert store.find(tmp_path) == tmp_path / "global_step7"


def test_tags_are_checkpoints_in_numeric_order(tmp_path):
    for tag in ("step10", "step9", "final", "step100"):
        save(tmp_path, tag, tag)
    (tmp_path / "wandb").mkdir()
    (tmp_path / "stock").mkdir()
    (tmp_path / "stock" / "layer_00-model_states.pt").touch()
    store.stage(tmp_path, "unfinished")
    assert store.tags(tmp_path) == ("final", "step9", "step10", "step100", "stock")
    assert store.tags(tmp_path / "nowhere") == ()


def test_an_interrupted_replacement_is_listed_and_found(tmp_path):
    save(tmp_path, "step1", "old")
    (tmp_path / "step1").rename(tmp_path / ".step1.replaced")
    assert store.tags(tmp_path) == ("step1",)
    assert content_of(store.find(tmp_path)) == "old"
    assert not (tmp_path / ".step1.replaced").exists()


@pytest.mark.parametrize(
    ("latest", "what"),
    [
        (None, "no such file"),
        ("", "the file is empty"),
        (" \n", "the file is empty"),
        ("step9", "no folder"),
        ("../elsewhere", "cannot be the name"),
        ("/etc", "cannot be the name"),
        ("step1\0", "cannot be the name"),
        (b"\xff\xfe", "cannot be read"),
    ],
)
def test_a_latest_that_leads_nowhere_names_the_tags_there_are(tmp_path, latest, what):
    root = tmp_path / "run"
    save(root, "step1", "x")
    save(tmp_path, "elsewhere", "x")
    if latest is None:
        (root / "latest").unlink()
    else:
        (root / "latest").write_bytes(latest if isinstance(latest, bytes) else latest.encode())
    with pytest.raises(CheckpointError, match=what) as caught:
        store.find(root)
    assert caught.value.where == str(root / "latest")
    assert "step1" in caught.value.fix


@pytest.mark.parametrize(
    "tag", ["", ".", "..", "../x", "a/b", "/etc", "latest", ".hidden", "x\ny", "x" * 300]
)
def test_tags_that_are_no_plain_name_are_refused(tmp_path, tag):
    save(tmp_path, "step1", "x")
    for work in (store.stage, store.commit, store.find, store.point_latest):
        with pytest.raises(CheckpointError):
            work(tmp_path, tag)
    assert names(tmp_path) == ["latest", "step1"]


def test_folders_that_are_none(tmp_path):
    with pytest.raises(CheckpointError, match="no such folder"):
        store.find(tmp_path / "nowhere")
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="not a folder"):
        store.find(tmp_path / "file")
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        store.find(tmp_path, "step1")
    with pytest.raises(CheckpointError, match="nothing is staged"):
        store.commit(tmp_path, "step1")
    with pytest.raises(CheckpointError, match="no folder"):
        store.point_latest(tmp_path, "step1")
    with pytest.raises(CheckpointError, match="No such file"):
        store.sync(tmp_path / "nowhere")


@pytest.mark.parametrize("work", [store.require_writable, lambda root: store.stage(root, "step1")])
def test_unwritable_folders_are_refused_with_a_fix(tmp_path, work):
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/dsx")):
        with pytest.raises(CheckpointError) as caught:
            work(folder)
        assert caught.value.where == str(folder)
        assert "choose another folder" in caught.value.fix


def said_behind_a_mount(mount: str, code: str) -> str:
    """What a child that fails says, in a mount namespace of its own."""
    done = subprocess.run(
        [
            "unshare",
            "--user",
            "--map-root-user",
            "--mount",
            "sh",
            "-c",
            f'{mount} && "{sys.executable}" -c "{code}"',
        ],
        env=os.environ | {"PYTHONPATH": str(Path(store.__file__).parents[2])},
        capture_output=True,
        text=True,
        check=False,
    )
    if "unshare" in done.stderr or "mount:" in done.stderr:
        pytest.skip(f"no mount namespaces here: {done.stderr.strip()}")
    assert done.returncode == 1
    assert "CheckpointError" in done.stderr
    return done.stderr


def test_a_read_only_file_system_is_refused(tmp_path):
    """Root ignores permissions, not a read-only mount."""
    code = "from pathlib import Path; from dsx.checkpoint import store; store.require_writable(Path('.'))"
    mount = f'mount -t tmpfs -o ro none "{tmp_path}" && cd "{tmp_path}"'
    assert "Read-only file system" in said_behind_a_mount(mount, code)


def test_a_folder_of_the_same_disk_that_is_mounted_is_no_place_for_a_new_one(tmp_path):
    code = "from pathlib import Path; from dsx.checkpoint import staging; staging.check_absent(Path('a b'))"
    mount = f'cd "{tmp_path}" && mkdir "a b" c && mount --bind c "a b"'
    assert "a disk is mounted there" in said_behind_a_mount(mount, code)


def test_require_writable_makes_the_folder_and_leaves_it_empty(tmp_path):
    store.require_writable(tmp_path / "a" / "b")
    assert names(tmp_path / "a" / "b") == []


def test_require_space_compares_with_the_disk(tmp_path):
    store.require_space(tmp_path / "not" / "yet", 1)
    free_bytes = shutil.disk_usage(tmp_path).free
    with pytest.raises(CheckpointError, match=r"takes .* GiB, its disk has .* GiB free"):
        store.require_space(tmp_path / "not" / "yet", 2 * free_bytes + 2**30)


def test_file_systems_that_cannot_sync_folders_are_tolerated(tmp_path, monkeypatch):
    fsync = os.fsync

    def no_folders(descriptor):
        if Path(f"/proc/self/fd/{descriptor}").is_dir():
            raise OSError(errno.EINVAL, "Invalid argument")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", no_folders)
    save(tmp_path, "step1", "x")
    assert content_of(store.find(tmp_path)) == "x"
    monkeypatch.setattr(
        os, "fsync", lambda _: (_ for _ in ()).throw(OSError(errno.EIO, "Input/output error"))
    )
    with pytest.raises(CheckpointError, match="Input/output error"):
        save(tmp_path, "step2", "x")
    assert content_of(store.find(tmp_path)) == "x"
