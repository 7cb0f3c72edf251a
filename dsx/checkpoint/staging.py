"""A checkpoint while it is being made: ``OUT.partial``, then ``OUT``, whole.

::

    OUT.partial/conversion.lock      held and signed by the conversion that writes
    OUT.partial/data.HOST.PID.WORD/  its files, renamed to OUT at the end

A kill at any moment leaves either no OUT or a complete one. What it leaves in OUT.partial the next conversion
to OUT removes, and begins anew. Some file systems have no locks, or none that hold between machines. There
no conversion gives OUT's name to the files of another, because the folder's name is its own: the worst that
two can do to each other is to end with an error.
"""

from __future__ import annotations

import errno
import os
import secrets
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Self

from filelock import FileLock, Timeout

from dsx.checkpoint import store
from dsx.checkpoint.catalog import Target, leads_out
from dsx.checkpoint.file_io import blamed, write_from
from dsx.errors import CheckpointError

AGAIN = "free space, or choose another target, and run the same command again: nothing was left behind"
_ELSEWHERE = "choose another target"
_LOCK = "conversion.lock"
_DATA = "data"
_RECENT_SECONDS = 300.0  # one that works writes more often than that
_NO_LOCKS = {errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP}


def partial_of(final: Path) -> Path:
    """Where a target is while it is being made."""
    return final.with_name(f"{final.name}.partial")


def claimed(final: Path, known: Callable[[str], bool]) -> FileLock:
    """The lock, held, of ``OUT.partial``, which is made: for an export, whose ranks write their files there.

    ``known`` says whether a file of a name may be what an export left that was killed.
    """
    check_absent(final)
    aside = partial_of(final)
    lock = _lock_of(aside)
    with blamed(aside, "the folder", "making", _ELSEWHERE):
        aside.mkdir(parents=True, exist_ok=True)
        _require_free(aside)
        strange = sorted(path.name for path in aside.iterdir() if path.name != _LOCK and not known(path.name))
        if strange:
            raise CheckpointError(
                str(aside / strange[0]),
                "it is in the way: no export left it",
                "remove it, or choose another target",
            )
        try:
            _take(lock, aside, "folder")
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
    return lock


def _lock_of(aside: Path) -> FileLock:
    return FileLock(aside / _LOCK, timeout=0, thread_local=False, fallback_to_soft=False)


def _take(lock: FileLock, aside: Path, what: str) -> None:
    """Take a lock. Raises CheckpointError if somebody has it, and OSError where there are none."""
    try:
        lock.acquire()
    except Timeout:
        raise CheckpointError(
            str(aside), f"another process is writing this {what} now", "wait for it, or choose another target"
        ) from None


def _require_free(aside: Path) -> None:
    """Raise CheckpointError if an export or a conversion holds the lock that is in this folder."""
    if (aside / _LOCK).exists():
        lock = _lock_of(aside)
        with suppress(OSError):  # no locks here, or none that this user may take
            _take(lock, aside, "folder")
        lock.release()


class Staging:
    """The folder that a target is made in; a context manager that removes it unless it was committed."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self.final = target.catalog.root
        check_absent(self.final)
        self._partial = partial_of(self.final)
        self._lock_path = self._partial / _LOCK
        self._host = socket.gethostname().replace("/", "_")
        self._sign = f"{self._host} {os.getpid()} {secrets.token_hex(8)}"
        self.data = self._partial / ".".join([_DATA, *self._sign.split(" ")])
        self.notes: tuple[str, ...] = ()
        self._descriptor: int | None = None
        # Names of tensors and states become those of files.
        outside = next((one.file for one in target.skeletons if leads_out(one.file)), None)
        if outside is not None:
            raise CheckpointError(
                f"{self.final}: {outside!r}",
                "a tensor's name would lead out of the folder",
                "do not trust this checkpoint",
            )
        self._check_leftover()
        self._lock = _lock_of(self._partial)
        try:
            with blamed(self._partial, "the folder", "making", _ELSEWHERE):
                self._partial.mkdir(parents=True, exist_ok=True)
                self._acquire()
                self.data.mkdir()
                self._descriptor = os.open(self.data, os.O_RDONLY | os.O_CLOEXEC)
            with blamed(self._partial, "what a kill left", "removing", _ELSEWHERE):
                self._take_over()
            total_bytes = sum(skeleton.num_bytes for skeleton in target.skeletons)
            store.require_space(self.final.absolute().parent, total_bytes)
            self._make_files()
        except BaseException:
            self._discard()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._discard()

    def path_of(self, file: str) -> Path:
        return self.data / file

    def commit(self, *, point_latest: bool) -> None:
        """Flush everything, give the folder its name, and make it what ``latest`` names if wanted."""
        self.require_own()
        store.sync(self.data)
        self.require_own()
        with blamed(self.final, "the folder", "renaming", _ELSEWHERE):
            self.data.rename(self.final)
        store.sync_folder(self.final.absolute().parent)
        if point_latest:
            store.point_latest(self.final.absolute().parent, self.final.name)

    def require_own(self) -> None:
        """Raise CheckpointError if the folder of the files is no longer the one that was made."""
        with suppress(OSError):
            # By the open folder: where a file system makes inode numbers up, they stay while it is open.
            if self._descriptor is not None and os.path.samestat(
                os.fstat(self._descriptor), self.data.lstat()
            ):
                return
        raise CheckpointError(
            str(self.data),
            "another process removed it while this conversion wrote into it",
            f"let one conversion at a time make {self.final}",
        )

    def _discard(self) -> None:
        """Delete what is this conversion's own. What cannot be deleted the next conversion finds."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
        with suppress(OSError):
            store.remove(self.data)  # first: what is left is known by its lock
            if self._holder() in (self._sign, None) and (self._lock.is_locked or self.notes):
                self._lock_path.unlink(missing_ok=True)
        self._lock.release()
        # After the release: NFS keeps a file that is deleted while it is open, under another name.
        with suppress(OSError):
            self._partial.rmdir()

    def _acquire(self) -> None:
        try:
            _take(self._lock, self._partial, "checkpoint")
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                if self._holder() is None:
                    self._lock_path.unlink(missing_ok=True)
                raise
            where = f"{self._partial.parent} has no file locks"
            self.notes = (f"{where}: nothing keeps a second conversion from making {self.final.name} too",)

    def _holder(self) -> str | None:
        """What the lock is signed with; None if nobody has."""
        with suppress(OSError, ValueError):
            return store.content_of(self._lock_path, 4096).decode() or None
        return None

    def _take_over(self) -> None:
        """Sign the lock and remove what others left, unless one on another machine may still be at work."""
        others = [path for path in self._partial.iterdir() if path.name not in (self.data.name, _LOCK)]
        holder = self._holder()
        host, process, *_ = *(holder or "").split(" "), ""
        if others and holder is not None and (host != self._host or self.notes):
            now = self.data.stat().st_mtime  # by the clock of the disk's machine
            places = (path for other in others for path in (other, *other.rglob("*")))
            age = now - max(path.lstat().st_mtime for path in places)
            if age < _RECENT_SECONDS:
                raise CheckpointError(
                    str(self._partial),
                    f"process {process} on {host} wrote this checkpoint {max(0.0, age):.0f} s ago, and no "
                    "lock says whether it still does",
                    f"wait for its end; if it was killed, try again in {_RECENT_SECONDS - age:.0f} s or "
                    "choose another target",
                )
        with suppress(OSError):  # a disk that is full takes nothing from the lock
            self._lock_path.write_text(self._sign)
        for other in others:
            # Renamed first: one that is at work after all cannot give a half deleted folder its name.
            gone = self._partial / f"{_DATA}.{secrets.token_hex(8)}.removed"
            other.rename(gone)
            store.remove(gone)

    def _check_leftover(self) -> None:
        if not os.path.lexists(self._partial):
            return
        with blamed(self._partial, "the folder", "looking into", _ELSEWHERE):
            is_folder = self._partial.is_dir() and not self._partial.is_symlink()
            names = {path.name for path in self._partial.iterdir()} if is_folder else {""}
        strange = any(name != _LOCK and name.split(".")[0] != _DATA for name in names)
        if names and (_LOCK not in names or strange):
            _require_free(self._partial)
            raise CheckpointError(
                str(self._partial),
                "it is in the way: no conversion of this version of dsx left it",
                "remove it, or choose another target",
            )

    def _make_files(self) -> None:
        for skeleton in self._target.skeletons:
            path = self.path_of(skeleton.file)
            with blamed(path, "its header", "writing", AGAIN):
                path.parent.mkdir(parents=True, exist_ok=True)
                descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
                try:
                    os.ftruncate(descriptor, skeleton.num_bytes)
                    for offset, data in skeleton.parts:
                        write_from(descriptor, memoryview(data), offset)
                finally:
                    os.close(descriptor)


def check_absent(final: Path) -> None:
    """Raise CheckpointError if a folder cannot be made under this name; an empty one may be there."""
    if final.name in ("", ".."):
        raise CheckpointError(str(final), "it is no name of a folder to make", "name a new folder inside it")
    if not os.path.lexists(final):
        return
    with blamed(final, "the folder", "looking into", _ELSEWHERE):
        if final.is_symlink() or not final.is_dir() or any(final.iterdir()):
            raise CheckpointError(str(final), "it exists already", "remove it or choose another target")
        for is_it, what in (
            (_is_mounted(final), "a disk is mounted there"),
            (final.samefile("."), "it is the current folder"),
        ):
            if is_it:
                raise CheckpointError(
                    str(final),
                    f"{what}: no finished folder can take its place",
                    "name a new folder inside it",
                )


def _is_mounted(folder: Path) -> bool:
    """Whether something is mounted there: a folder of the same disk too, which ``is_mount`` does not see."""
    places, name = set[str](), str(folder.resolve())
    with suppress(OSError):  # Linux alone tells
        told = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace")
        places = {line.split()[4] for line in told.splitlines()}
    escaped = name.translate({ord(each): f"\\{ord(each):03o}" for each in " \t\n\\"})
    return folder.is_mount() or escaped in places
