"""A folder of checkpoints in which every name stands for a complete checkpoint, whatever is killed when.

Standard library only. A checkpoint is a sub-folder, its *tag*, and the file ``latest`` holds the tag to
load, as DeepSpeed writes it (deepspeed/runtime/engine.py, save_checkpoint). One saved over another passes
through these states; a kill between any two leaves the old or the new checkpoint to be found::

    stage    .TAG.partial being written       TAG old
    commit   .TAG.partial synced              TAG old
             .TAG.partial synced              .TAG.replaced old, no TAG: find() renames it back
             TAG new                          .TAG.replaced old
             TAG new                          .TAG.removed being deleted
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from dsx.errors import CheckpointError
from dsx.terminal import amount, with_room

CHECKPOINTS = "checkpoints"  # below the folder of a run of dsx
LATEST = "latest"
MANIFEST = "dsx.json"
UNIVERSAL_FILE = "zero/optimizer_state.pt"  # in every checkpoint of DeepSpeed's universal format
_DEEPSPEED_FILES = "*_states.pt"  # in every checkpoint that DeepSpeed writes, with or without a manifest
_LONGEST_TAG_BYTES = 4096
_CHOOSE = "choose another folder (dsx.train.output, or the save and load arguments)"


def write_atomically(path: Path, data: bytes) -> None:
    """Write ``path`` so that it holds, at any moment, all of its old or all of its new content.

    It is written aside, synced and renamed, and the folder is synced. Raises CheckpointError if that is
    impossible.
    """
    aside = path.with_name(f".{path.name}.partial")
    with _explained(path):
        try:
            with aside.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            aside.replace(path)
        except OSError:
            with suppress(OSError):
                aside.unlink()
            raise
        sync_file(path.parent)


def opened(path: Path) -> BinaryIO:
    """A file to read. Raises OSError for a pipe or a device too, from which one could read for ever."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return os.fdopen(descriptor, "rb")


def content_of(path: Path, most_bytes: int) -> bytes:
    """All of a file. Raises OSError as :func:`opened`, and for one of more than ``most_bytes``."""
    with opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most_bytes:
            raise OSError(errno.EFBIG, f"it has {size:,} bytes, more than {most_bytes:,}", str(path))
        return file.read(size)


def stage(root: Path, tag: str) -> Path:
    """An empty folder to write checkpoint ``tag`` of ``root`` into, hidden until :func:`commit`.

    What killed saves of any tag left in ``root`` is deleted, because only one run at a time may save there.
    Raises CheckpointError for a bad tag or an unwritable root.
    """
    _check_tag(f"checkpoint tag {tag!r}", root, tag)
    staged = _aside(root, tag, "partial")
    with _explained(root):
        _make(root)
        _tidy(root)
        staged.mkdir()
    return staged


def give_up(root: Path, tag: str) -> None:
    """Take the staged folder away from those who write into it. This needs no disk space and never raises."""
    with suppress(OSError):
        _aside(root, tag, "partial").rename(_aside(root, tag, "removed"))


def abandon(root: Path, tag: str) -> None:
    """Delete what was staged, given up or not, once nobody writes there any more. Never raises."""
    for state in ("partial", "removed"):
        with suppress(OSError):
            remove(_aside(root, tag, state))


def commit(root: Path, tag: str) -> Path:
    """Make the staged folder the checkpoint ``tag``, on the disk and in place of any of that name.

    The files of every rank must be written and closed; ranks on other machines call :func:`sync` on what
    they wrote first. Returns the checkpoint's folder. Raises CheckpointError if nothing was staged.
    """
    _check_tag(f"checkpoint tag {tag!r}", root, tag)
    staged, final, replaced = _aside(root, tag, "partial"), root / tag, _aside(root, tag, "replaced")
    with _explained(root):
        if not staged.is_dir():
            raise CheckpointError(str(staged), "nothing is staged under this tag", "call stage first")
        sync(staged)
        if _exists(final):
            final.rename(replaced)
        staged.rename(final)
        sync_file(root)
        sync_file(root.absolute().parent)
        if _exists(replaced):
            _discard(root, tag, replaced)
    return final


def point_latest(root: Path, tag: str) -> None:
    """Make ``tag`` what ``latest`` names. Raises CheckpointError unless it is a committed checkpoint."""
    find(root, tag)
    write_atomically(root / LATEST, tag.encode())


def find(root: Path, tag: str | None = None) -> Path:
    """Folder of checkpoint ``tag``, or of the one that ``latest`` names; always a complete one.

    An old checkpoint whose replacement was interrupted is put back. Any number of ranks may call this at
    once.
    """
    if not root.is_dir():
        what = "it is not a folder" if _exists(root) else "there is no such folder"
        raise CheckpointError(str(root), what, "give the folder that the checkpoints were saved in")
    where, named = f"checkpoint {tag!r}", tag
    if tag is None:
        where, tag = str(root / LATEST), _latest(root)
    _check_tag(where, root, tag)
    with _explained(root):
        _restore(root, tag)
        if (root / tag).is_dir():
            return root / tag
    fix = _to_point(root) if named is None else _available(root)
    raise CheckpointError(where, f"there is no folder {root / tag}", fix)


def place(folder: Path, tag: str | None = None) -> tuple[Path, str | None]:
    """The folder of checkpoints and the tag that a user means by ``folder``, for :func:`find`.

    A folder of checkpoints, that of a run, or without ``tag`` a checkpoint itself.
    """
    for root in (folder, folder / CHECKPOINTS):
        if (root / LATEST).is_file():
            return root, tag
    if tag is None and (_is_checkpoint(folder) or (folder / UNIVERSAL_FILE).is_file()):
        own = folder.resolve()
        return own.parent, own.name
    return folder, tag


def tags(root: Path) -> tuple[str, ...]:
    """Tags of the checkpoints in ``root``, numbers inside them in numeric order; empty without a folder."""
    if not root.is_dir():
        return ()
    found = {path.name for path in root.iterdir() if not path.name.startswith(".") and _is_checkpoint(path)}
    for path in root.glob(".*.replaced"):
        tag = path.name[1 : -len(".replaced")]
        if not _exists(root / tag) and _is_checkpoint(path):
            found.add(tag)
    return tuple(sorted(found, key=_natural))


def prune(root: Path, *, keep: int, spared: Collection[str] = ()) -> tuple[str, ...]:
    """Delete all but the newest ``keep`` checkpoints; gives their tags.

    The one that ``latest`` names and those in ``spared`` stay, and count. Each vanishes at once, by a rename,
    before its files are deleted. Raises CheckpointError.
    """
    if not _exists(root / LATEST):
        return ()
    with _explained(root):
        found = tags(root)
        kept = {_latest(root), *(tag for tag in found if tag in spared)}
        others = [tag for tag in found if tag not in kept]
        by_age = sorted(others, key=lambda tag: (root / tag).stat().st_mtime_ns)
        old = by_age[: max(0, len(by_age) - max(0, keep - len(kept)))]
        for tag in old:
            _discard(root, tag, root / tag)
    return tuple(old)


def sync(folder: Path) -> None:
    """Flush every file and folder under ``folder``, and itself, to the disk. Raises CheckpointError."""

    def refuse(error: OSError) -> None:
        raise error

    with _explained(folder):
        for at, _, names in os.walk(folder, topdown=False, onerror=refuse):
            for name in names:
                sync_file(Path(at, name))
            sync_file(Path(at))


def sync_folder(folder: Path) -> None:
    """Flush the names in ``folder``, not what they stand for. Raises CheckpointError."""
    with _explained(folder):
        sync_file(folder)


def require_space(root: Path, needed_bytes: int) -> None:
    """Raise CheckpointError unless ``needed_bytes`` more fit on the disk that holds ``root``."""
    at = root.absolute()
    while not at.exists():
        at = at.parent
    with _explained(root):
        disk = os.statvfs(at)
    free_bytes = disk.f_bavail * disk.f_frsize
    if free_bytes < needed_bytes:
        raise CheckpointError(
            str(root),
            f"a checkpoint takes {amount(needed_bytes)}, its disk has {amount(free_bytes)} free",
            f"free {amount(needed_bytes - free_bytes)} or {_CHOOSE}",
        )


def require_writable(folder: Path) -> None:
    """Make ``folder``, parents included, and raise CheckpointError unless a file can be written in it."""
    probe = folder / f".dsx-probe.{os.getpid()}"
    with _explained(folder):
        _make(folder)
        try:
            probe.write_bytes(b"dsx")
        finally:
            with suppress(OSError):
                probe.unlink()


def _make(folder: Path) -> None:
    if _exists(folder) and not folder.is_dir():
        raise CheckpointError(str(folder), "it is no folder, or a link to a place that is not there", _CHOOSE)
    folder.mkdir(parents=True, exist_ok=True)


def _aside(root: Path, tag: str, state: str) -> Path:
    """Where a checkpoint is while it is ``partial``, ``replaced`` or ``removed``."""
    return root / f".{tag}.{state}"


def _restore(root: Path, tag: str) -> None:
    """Undo a commit that was killed between its two renames. Another rank may be doing the same."""
    replaced, final = _aside(root, tag, "replaced"), root / tag
    if _exists(replaced) and not _exists(final):
        with suppress(FileNotFoundError):
            replaced.rename(final)
        sync_file(root)


def _discard(root: Path, tag: str, path: Path) -> None:
    """Delete a checkpoint, under another name: a half deleted one must never be found or restored."""
    removed = _aside(root, tag, "removed")
    path.rename(removed)
    remove(removed)


def _tidy(root: Path) -> None:
    """Leave in ``root`` no trace of killed saves."""
    for path in (*root.glob(".*.partial"), *root.glob(".*.removed")):
        remove(path)
    for path in root.glob(".*.replaced"):
        tag = path.name[1 : -len(".replaced")]
        _restore(root, tag)
        if _exists(path):
            _discard(root, tag, path)


def remove(path: Path) -> None:
    """Delete a folder with what is in it, a file, or a link; nothing if nothing is there. Raises OSError."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _exists(path: Path) -> bool:
    return os.path.lexists(path)


def sync_file(path: Path) -> None:
    """Flush one file, or the names in one folder, to the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network and user-space file systems cannot sync folders and say so; there is no other way.
        if error.errno not in {errno.EINVAL, errno.ENOTSUP} or not path.is_dir():
            raise
    finally:
        os.close(descriptor)


def _latest(root: Path) -> str:
    path = root / LATEST
    try:
        tag = content_of(path, _LONGEST_TAG_BYTES).decode().strip()
    except FileNotFoundError:
        raise CheckpointError(str(path), "there is no such file", _to_point(root)) from None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(str(path), f"cannot be read ({error})", _to_point(root)) from None
    if not tag:
        raise CheckpointError(str(path), "the file is empty", _to_point(root))
    return tag


def _to_point(root: Path) -> str:
    return _available(root, "write into it the name of one")


def _available(root: Path, to_do: str = "name one") -> str:
    found = tags(root)
    if not found:
        return f"give another folder: {root} holds no checkpoint"
    return f"{to_do} of the checkpoints in {root}: {', '.join(found)}"


def _check_tag(where: str, root: Path, tag: str) -> None:
    if tag == LATEST or tag.startswith(".") or not tag.isprintable() or not tag or Path(tag).name != tag:
        raise CheckpointError(
            where,
            f"{tag!r} cannot be the name of a checkpoint, a folder in {root}",
            "use a plain name such as step100: no '/', no leading '.', not 'latest'",
        )


def _is_checkpoint(path: Path) -> bool:
    return path.is_dir() and ((path / MANIFEST).exists() or any(path.glob(_DEEPSPEED_FILES)))


def _natural(tag: str) -> tuple[tuple[int, str], ...]:
    """Sort key that puts step9 before step10."""
    return tuple((int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", tag))


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Turn the operating system's refusals into a CheckpointError about ``path``."""
    try:
        yield
    except OSError as error:
        what = f"the system answers {error.strerror or error}"
        if error.filename and str(error.filename) != str(path):
            what += f" at {error.filename}"
        raise CheckpointError(str(path), what, with_room(error, _CHOOSE)) from error
