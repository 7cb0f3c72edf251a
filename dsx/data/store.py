"""A prepared corpus on disk: token files and a JSON, complete or absent.

``train.bin`` and ``held_out.bin`` are little-endian ids, every document followed by its end token;
``corpus.json`` (:class:`CorpusInfo`) says what they hold. All three are written into a folder beside the
final one, synced, and renamed into place at once.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from dsx.errors import DataError

VERSION = 1
INFO = "corpus.json"
SPLITS = ("train", "held_out")


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitInfo:
    """One split.

    Args:
        documents: Number of documents.
        tokens: Number of tokens, end tokens included.
        text_bytes: UTF-8 bytes of the documents.
        digest: BLAKE2b of the token file.
    """

    documents: int
    tokens: int
    text_bytes: int
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusInfo:
    """What ``corpus.json`` holds.

    Args:
        source: ``dsx.data.source`` as configured.
        settings: Everything that decides the tokens; its hash names the folder.
        tokenizer: Name of the tokenizer.
        vocab_size: Ids are below this.
        end_id: Id that ends every document.
        dtype: NumPy name of the id type on disk.
        train: The training split.
        held_out: The held-out split.
        held_out_byte_counts: How often each of the 256 bytes occurs in the held-out text.
        version: Version of this format.
    """

    source: str
    settings: dict[str, Any]
    tokenizer: str
    vocab_size: int
    end_id: int
    dtype: str
    train: SplitInfo
    held_out: SplitInfo
    held_out_byte_counts: list[int]
    version: int = VERSION

    @classmethod
    def load(cls, folder: Path) -> CorpusInfo:
        """Read and check ``folder``. Raises DataError if it is absent, of another version or incomplete."""
        fix = f"remove the folder {folder} and run again"
        if (folder / INFO).exists() and not (folder / INFO).is_file():  # a device has no end
            raise DataError(str(folder / INFO), "it is no file", fix)
        try:
            raw = json.loads((folder / INFO).read_text())
            if raw.get("version") != VERSION:
                raise DataError(str(folder / INFO), f"version {raw.get('version')}, not {VERSION}", fix)
            splits: dict[str, Any] = {name: SplitInfo(**raw.pop(name)) for name in SPLITS}
            info = cls(**raw, **splits)
            info._check()
        except FileNotFoundError as error:
            raise DataError(str(folder), "no corpus has been prepared here", "call prepare first") from error
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise DataError(str(folder / INFO), f"cannot be read ({error})", fix) from error
        for name in SPLITS:
            want = getattr(info, name).tokens * np.dtype(info.dtype).itemsize
            have = (folder / f"{name}.bin").stat().st_size if (folder / f"{name}.bin").exists() else 0
            if have != want:
                raise DataError(str(folder / f"{name}.bin"), f"{have} bytes, but {INFO} says {want}", fix)
        return info

    def _check(self) -> None:
        """Raise ValueError for what no writer writes: the files are read by these."""
        whole = {"vocab_size": self.vocab_size, "end_id": self.end_id}
        for name in SPLITS:
            split: SplitInfo = getattr(self, name)
            whole |= {f"{name}.{key}": getattr(split, key) for key in ("documents", "tokens", "text_bytes")}
        whole |= {f"held_out_byte_counts[{at}]": n for at, n in enumerate(self.held_out_byte_counts)}
        wrong = next((key for key, n in whole.items() if type(n) is not int or not 0 <= n < 1 << 62), None)
        if wrong is not None:
            raise ValueError(f"{wrong} = {whole[wrong]!r}")
        if self.dtype not in ("<u2", "<u4") or not isinstance(self.settings, dict):
            raise ValueError(f"dtype = {self.dtype!r}, settings = {self.settings!r}")

    def save(self, folder: Path) -> None:
        """Write ``corpus.json``, synced."""
        with (folder / INFO).open("w") as file:
            json.dump(asdict(self), file, indent=1)
            file.flush()
            os.fsync(file.fileno())


class SplitWriter:
    """Appends documents to a token file; a context manager that syncs it.

    Args:
        path: The file to write.
        dtype: Id type on disk.
        end_id: Id appended to every document.
    """

    def __init__(self, path: Path, dtype: np.dtype[Any], end_id: int) -> None:
        self._file = path.open("wb")
        self._hash = hashlib.blake2b(digest_size=16)
        self._dtype, self._end = dtype, np.array([end_id], dtype).tobytes()
        self.documents = self.tokens = self.text_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._file:
            self._file.flush()
            os.fsync(self._file.fileno())

    def append(self, ids: npt.NDArray[np.integer[Any]], text_bytes: int) -> None:
        """Write one document's ids and the end token."""
        chunk = ids.astype(self._dtype).tobytes() + self._end
        self._file.write(chunk)
        self._hash.update(chunk)
        self.documents += 1
        self.tokens += len(ids) + 1
        self.text_bytes += text_bytes

    def info(self) -> SplitInfo:
        """Counts so far."""
        return SplitInfo(
            documents=self.documents,
            tokens=self.tokens,
            text_bytes=self.text_bytes,
            digest=self._hash.hexdigest(),
        )


@contextmanager
def written_aside(target: Path) -> Iterator[Path]:
    """A new folder that becomes ``target`` when the block ends well, and vanishes when it raises.

    Of several processes that write the same target, the first to finish wins; the others' work is dropped.
    What killed processes of this machine left beside the target is removed.
    """
    prefix = f".{target.name}.{_process_space()}."
    _remove_abandoned(target.parent, prefix)
    aside = target.parent / f"{prefix}{os.getpid()}.{secrets.token_hex(4)}"
    aside.mkdir()
    try:
        yield aside
        _sync_folder(aside)
        try:
            aside.rename(target)
        except OSError:
            if not (target / INFO).is_file():  # not merely another process that was first
                raise
        _sync_folder(target.parent)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _process_space() -> str:
    """Within this, a process id means one process: the host, and the container's process namespace."""
    try:
        space = Path("/proc/self/ns/pid").stat().st_ino
    except OSError:  # not Linux
        space = 0
    return f"{socket.gethostname()}-{space}"


def _remove_abandoned(folder: Path, prefix: str) -> None:
    for left in folder.glob(f"{prefix}*"):
        process = left.name.removeprefix(prefix).partition(".")[0]
        try:
            os.kill(int(process), 0)
        except ProcessLookupError:
            shutil.rmtree(left, ignore_errors=True)
        except (PermissionError, ValueError):
            continue


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
