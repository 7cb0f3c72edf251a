"""Tokenised text: prepared once per machine and cached, then read as packed sequences.

On disk a corpus is token files and a JSON, complete or absent. ``train.bin`` and ``held_out.bin`` are
little-endian ids, every document of text followed by its end token; ``corpus.json`` (:class:`CorpusInfo`)
says what they hold. Chats and completions have two files more for each split: ``.trained.bin``, a byte for
each token that is 1 if it is trained on, and ``.sizes.bin``, the tokens and the labels of each document
(uint32); with pictures also ``.pictures.bin``, a line of JSON for each (:mod:`dsx.data.pictures`). All are
written into a folder beside the final one, synced, and renamed into place at once.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import secrets
import shutil
import socket
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt
import psutil

from dsx.config.schema import DataConfig
from dsx.data.order import is_held_out
from dsx.data.packs import Fill, Packs, Sequences, fill_of, require_some
from dsx.errors import DataError
from dsx.waiting import Waiting

if TYPE_CHECKING:  # loaded where text is prepared
    from dsx.data.masks import Encoded, Masks
    from dsx.data.pictures import Chat, PictureRows
    from dsx.data.tokenizers import Tokenizer

VERSION = 1
INFO = "corpus.json"
SPLITS = ("train", "held_out")
_TRAINED, _SIZES, _PICTURES, _SIZE_BYTES = ".trained", ".sizes", ".pictures", 8


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitInfo:
    """The counts of one split.

    Args:
        documents: Number of documents.
        tokens: Number of tokens, end tokens included.
        text_bytes: UTF-8 bytes of the documents.
        digest: BLAKE2b of the token file, or of all files.
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
        held_out_byte_counts: How often each of the 256 bytes occurs in the held-out text; empty for chats and
            completions.
        masked: Whether there are files that say what is trained on.
        pictures: Whether there are files that say which pictures chats have.
        bad_records: Records that were skipped.
        first_bad_record: What is wrong with the first of them.
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
    masked: bool = False
    pictures: bool = False
    bad_records: int = 0
    first_bad_record: str = ""
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
        for name, split in splits.items():
            sizes = {"": split.tokens * np.dtype(info.dtype).itemsize}
            if info.masked:
                sizes |= {_TRAINED: split.tokens, _SIZES: split.documents * _SIZE_BYTES}
            for kind, want in sizes.items():
                file = folder / f"{name}{kind}.bin"
                have = file.stat().st_size if file.exists() else 0
                if have != want:
                    raise DataError(str(file), f"{have} bytes, but {INFO} says {want}", fix)
        return info

    def _check(self) -> None:
        """Raise ValueError for what no writer writes, because the files are read by these values."""
        whole = {"vocab_size": self.vocab_size, "end_id": self.end_id, "bad_records": self.bad_records}
        for name in SPLITS:
            split: SplitInfo = getattr(self, name)
            whole |= {f"{name}.{key}": getattr(split, key) for key in ("documents", "tokens", "text_bytes")}
        whole |= {f"held_out_byte_counts[{at}]": n for at, n in enumerate(self.held_out_byte_counts)}
        wrong = next((key for key, n in whole.items() if type(n) is not int or not 0 <= n < 1 << 62), None)
        if wrong is not None:
            raise ValueError(f"{wrong} = {whole[wrong]!r}")
        kinds = isinstance(self.settings, dict), isinstance(self.masked, bool)
        if self.dtype not in ("<u2", "<u4") or not all(kinds):
            raise ValueError(
                f"dtype = {self.dtype!r}, masked = {self.masked!r}, settings = {self.settings!r}"
            )

    def save(self, folder: Path) -> None:
        with (folder / INFO).open("w") as file:
            json.dump(asdict(self), file, indent=1)
            file.flush()
            os.fsync(file.fileno())


class SplitWriter:
    """Appends documents to the files of a split; a context manager that syncs them."""

    def __init__(
        self, folder: Path, split: str, dtype: np.dtype[Any], *, masked: bool = False, pictures: bool = False
    ) -> None:
        kinds = ("", *(_TRAINED, _SIZES) * masked, *(_PICTURES,) * pictures)
        self._files = [(folder / f"{split}{kind}.bin").open("wb") for kind in kinds]
        self._hash = hashlib.blake2b(digest_size=16)
        self._dtype = dtype
        self.documents = self.tokens = self.text_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        for file in self._files:
            with file:
                file.flush()
                os.fsync(file.fileno())

    def append(
        self,
        ids: npt.NDArray[np.integer[Any]],
        text_bytes: int,
        trained: npt.NDArray[np.bool_] | None = None,
        chat: Chat | None = None,
    ) -> None:
        """Write one document's ids, end token included, and in a masked split what is trained on."""
        chunks = [ids.astype(self._dtype).tobytes()]
        if trained is not None:
            chunks += [trained.tobytes(), np.array([len(ids), trained[1:].sum()], "<u4").tobytes()]
        if chat is not None:
            chunks.append(chat.line)
        for file, chunk in zip(self._files, chunks, strict=True):
            file.write(chunk)
            self._hash.update(chunk)
        self.documents += 1
        self.tokens += len(ids)
        self.text_bytes += text_bytes

    def info(self) -> SplitInfo:
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
    for left in target.parent.glob(f"{prefix}*"):
        process = left.name.removeprefix(prefix).partition(".")[0]
        if process.isdecimal() and not psutil.pid_exists(int(process)):
            shutil.rmtree(left, ignore_errors=True)
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
    """Where a process id means one process: the host, and the container's process namespace."""
    try:
        space = Path("/proc/self/ns/pid").stat().st_ino
    except OSError:  # not Linux
        space = 0
    return f"{socket.gethostname()}-{space}"


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class TokenFile:
    """A file of token ids, read as an array.

    It is read by ``pread``, not through a memory map: if the file loses a mapped page, SIGBUS ends the
    process, and a page fault that waits for the disk holds Python's lock. The open file outlives its name, so
    a deleted corpus can be read to the end of the run.
    """

    def __init__(self, path: Path, dtype: np.dtype[Any]) -> None:
        self._path, self._dtype = path, dtype
        try:
            self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise self._lost(f"cannot be opened ({error.strerror})") from error
        weakref.finalize(self, os.close, self._file)
        self._stamp = _stamp(os.fstat(self._file))

    def __len__(self) -> int:
        return self._stamp[0] // self._dtype.itemsize

    def __getitem__(self, part: slice) -> npt.NDArray[np.unsignedinteger[Any]]:
        """A copy of the ids in ``part`` (step 1). Raises DataError if the file is not what it was."""
        start, stop, _ = part.indices(len(self))
        wanted = max(0, stop - start) * self._dtype.itemsize
        try:
            read = os.pread(self._file, wanted, start * self._dtype.itemsize)
            now = _stamp(os.fstat(self._file))
        except OSError as error:
            raise self._lost(f"cannot be read any more ({error.strerror})") from error
        if now != self._stamp or len(read) < wanted:
            raise self._lost(
                f"has changed since it was opened ({self._stamp[0]:,} bytes then, {now[0]:,} now)"
            )
        return np.frombuffer(read, self._dtype)

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[Any]:
        del copy  # reading is copying
        return self[:].astype(dtype or self._dtype)

    def _lost(self, what: str) -> DataError:
        return DataError(
            str(self._path), what, f"remove the folder {self._path.parent}; the run prepares it again"
        )


def _stamp(stat: os.stat_result) -> tuple[int, int]:
    return stat.st_size, stat.st_mtime_ns


_BATCH_CHARACTERS = 8 << 20


@dataclass(frozen=True, slots=True)
class Corpus:
    """A prepared corpus, cut into sequences: no training sequence touches a held-out document."""

    path: Path
    info: CorpusInfo
    train: Sequences | Packs | PictureRows
    held_out: Sequences | Packs | PictureRows

    @classmethod
    def open(
        cls,
        path: str | Path,
        *,
        sequence_length: int,
        vocab_size: int | None = None,
        apart: bool = False,
        drop: bool = False,
    ) -> Self:
        """Open what :func:`prepare` returned; of text it reads no token.

        Args:
            path: The folder.
            sequence_length: S.
            vocab_size: The model's vocabulary.
            apart: Keep documents apart; chats and completions are then packed whole.
            drop: Leave those of them out that are longer than a sequence, instead of their ends.
        """
        folder = Path(path)
        info = CorpusInfo.load(folder)
        if vocab_size is not None and info.vocab_size > vocab_size:
            raise DataError(
                f'dsx.data.tokenizer = "{info.tokenizer}"',
                f"it has {info.vocab_size} ids, but the model's vocabulary is {vocab_size}",
                f"use the model's own tokenizer, or a model with vocab_size >= {info.vocab_size}",
            )
        train, held_out = (
            _windows(folder, split, info, sequence_length, apart=apart, drop=drop) for split in SPLITS
        )
        for name, counts, windows in (
            ("training", info.train, train),
            ("held-out", info.held_out, held_out),
        ):
            if counts.documents:
                require_some(windows, counts.tokens, name)
        return cls(folder, info, train, held_out)

    @property
    def digest(self) -> str:
        """Hash of all tokens: a resumed run on another digest does not continue on the same text."""
        return hashlib.blake2b(
            f"{self.info.train.digest}{self.info.held_out.digest}".encode(), digest_size=16
        ).hexdigest()

    @property
    def bytes_per_token(self) -> float:
        """UTF-8 bytes of held-out text per held-out token, end tokens counted."""
        self._need_held_out()
        return self.info.held_out.text_bytes / self.info.held_out.tokens

    @property
    def unigram_bits_per_byte(self) -> float:
        """Entropy of the held-out bytes' own frequencies: the best that a model without context can reach."""
        self._need_held_out()
        counts = np.array(self.info.held_out_byte_counts, np.float64)
        share = counts[counts > 0] / counts.sum()
        return float(-(share * np.log2(share)).sum())

    def bits_per_byte(self, loss: float) -> float:
        """Bits per held-out byte of a mean cross-entropy per token of ``loss`` nats.

        The bits spent on end-of-document tokens count, though they stand for no byte of text.
        """
        return loss / math.log(2) / self.bytes_per_token

    def fill(self) -> Fill | None:
        """How full the packs of the training split are; None for text, which fills all, and for streams."""
        counts = self.info.train
        return fill_of(self.train, counts.documents) if self.info.masked and counts.documents else None

    def _need_held_out(self) -> None:
        if not (self.info.held_out.text_bytes and self.info.held_out.tokens):
            raise DataError(
                f"dsx.data.held_out = {self.info.settings['held_out']}",
                f"nothing is held out of {self.info.train.documents} documents",
                "hold out a larger fraction, such as 0.05",
            )


def _windows(
    folder: Path, split: str, info: CorpusInfo, sequence_length: int, *, apart: bool, drop: bool
) -> Sequences | Packs | PictureRows:
    tokens = TokenFile(folder / f"{split}.bin", np.dtype(info.dtype))
    if not info.masked:
        return Sequences(tokens, sequence_length, end_id=info.end_id if apart else None)
    trained = TokenFile(folder / f"{split}{_TRAINED}.bin", np.dtype("u1"))
    if not apart and not info.pictures:
        return Sequences(tokens, sequence_length, trained)
    file = folder / f"{split}{_SIZES}.bin"
    sizes = np.asarray(TokenFile(file, np.dtype("<u4"))).reshape(-1, 2).astype(np.int64)
    if sizes[:, 0].sum() != len(tokens) or (sizes[:, 1] >= sizes[:, 0]).any():
        what = f"documents of these sizes are not those of {split}.bin"
        raise DataError(str(file), what, f"remove the folder {folder} and run again")
    packs = Packs(tokens, trained, sizes, sequence_length, pad_id=info.end_id, drop=drop or info.pictures)
    if not info.pictures:
        return packs
    from dsx.data.pictures import PictureRows  # here: other data need nothing of it

    return PictureRows(packs, folder / f"{split}{_PICTURES}.bin", info.tokenizer)


def prepare(data: DataConfig, cache_dir: str | Path, before: Callable[[], None] = lambda: None) -> Path:
    """Tokenise ``data.source`` into ``cache_dir`` unless that has been done, and return the corpus's folder.

    Called by one process per node; the others open the folder after a barrier. Several processes at once
    are safe: the first to finish wins.

    Args:
        data: The ``dsx.data`` block; its ``sequence_length`` does not matter here, unless records that are
            longer are refused.
        cache_dir: Folder for prepared corpora, made if missing.
        before: Called before anything is tokenised.
    """
    from dsx.data.files import documents, open_source
    from dsx.data.tokenizers import load_tokenizer

    tokenizer = load_tokenizer(data.tokenizer, trust_remote_code=data.trust_remote_code)
    settings: dict[str, Any] = {
        "version": VERSION,
        "source": open_source(data).identity(),
        "max_bytes": data.max_bytes,
        "tokenizer": tokenizer.identity(),
        "held_out": data.held_out,
        "seed": data.seed,
    }
    if data.format == "text":

        def write(folder: Path) -> CorpusInfo:
            blank: list[int] = []
            texts = _split(documents(data, blank), data)
            info = write_corpus(folder, texts, data.source, tokenizer, settings)
            first = f'row {blank[0]:,} has no "{data.text_column}"' if blank else ""
            return replace(info, bad_records=len(blank), first_bad_record=first)
    else:
        from dsx.data.masks import Masks

        masks = Masks(data, tokenizer)
        longest = data.sequence_length if data.too_long == "refuse" and data.keeps_whole else None
        settings |= {"format": data.format, "columns": data.columns, "masks": masks.identity()}
        settings |= {"bad_records": data.bad_records, "longest": longest}

        def write(folder: Path) -> CorpusInfo:
            return write_examples(folder, _split_examples(data, masks), data, tokenizer, settings)

    return write_once(cache_dir, settings, lambda folder: _checked(write(folder), data), before)


def write_once(
    cache_dir: str | Path,
    settings: object,
    write: Callable[[Path], CorpusInfo],
    before: Callable[[], None] = lambda: None,
) -> Path:
    """The folder named by ``settings``, written aside by ``write`` unless it exists. Raises DataError."""
    name = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:20]
    target = Path(cache_dir).expanduser() / name
    if (target / INFO).is_file():
        CorpusInfo.load(target)
        return target
    before()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with written_aside(target) as aside:
            write(aside).save(aside)
    except OSError as error:
        raise DataError(
            str(target), f"cannot be written ({error})", "free space or name another folder"
        ) from error
    return target


def _split(texts: Iterable[str], data: DataConfig) -> Iterator[tuple[str, bool]]:
    for number, document in enumerate(texts):
        yield document, is_held_out(number, data.held_out, data.seed)


def write_corpus(
    folder: Path,
    texts: Iterable[tuple[str, bool]],
    source: str,
    tokenizer: Tokenizer,
    settings: dict[str, Any],
) -> CorpusInfo:
    """Write the token files of ``texts``, each with whether it is held out."""
    dtype, byte_counts = _dtype_of(tokenizer), np.zeros(256, np.int64)
    with (
        SplitWriter(folder, "train", dtype) as train,
        SplitWriter(folder, "held_out", dtype) as held_out,
        Waiting(f"tokenising {source}", unit="bytes") as waiting,
    ):
        for batch in _batches(texts):
            encoded = tokenizer.encode([document for document, _ in batch])
            for (document, is_kept), ids in zip(batch, encoded, strict=True):
                text, ended = document.encode(), np.append(ids.astype(dtype), dtype.type(tokenizer.end_id))
                waiting.advance(len(text))
                if is_kept:
                    byte_counts += np.bincount(np.frombuffer(text, np.uint8), minlength=256)
                    held_out.append(ended, len(text))
                else:
                    train.append(ended, len(text))
    return _info(source, tokenizer, settings, train, held_out, held_out_byte_counts=byte_counts.tolist())


def _dtype_of(tokenizer: Tokenizer) -> np.dtype[Any]:
    return np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")


def _info(
    source: str,
    tokenizer: Tokenizer,
    settings: dict[str, Any],
    train: SplitWriter,
    held_out: SplitWriter,
    **more: Any,
) -> CorpusInfo:
    return CorpusInfo(
        source=source,
        settings=settings,
        tokenizer=tokenizer.name,
        vocab_size=tokenizer.vocab_size,
        end_id=tokenizer.end_id,
        dtype=_dtype_of(tokenizer).str,
        train=train.info(),
        held_out=held_out.info(),
        **more,
    )


def _split_examples(data: DataConfig, masks: Masks) -> Iterator[tuple[Encoded | DataError, bool]]:
    from dsx.data.records import examples

    number, before = -1, ""
    for one in chain.from_iterable(masks.encode(examples(data))):
        if not isinstance(one, DataError):
            number, before = number + (one.where != before), one.where  # a chat's documents stay together
        yield one, is_held_out(max(number, 0), data.held_out, data.seed)


def write_examples(
    folder: Path,
    encoded: Iterable[tuple[Encoded | DataError, bool]],
    data: DataConfig,
    tokenizer: Tokenizer,
    settings: dict[str, Any],
) -> CorpusInfo:
    """Write the files of chats or completions, each with whether it is held out.

    A record that cannot be used is an error, or counted.
    """
    dtype, left = _dtype_of(tokenizer), data.max_bytes
    bad, first_bad = 0, ""
    with (
        SplitWriter(folder, "train", dtype, masked=True, pictures=data.pictures) as train,
        SplitWriter(folder, "held_out", dtype, masked=True, pictures=data.pictures) as held_out,
        Waiting(f"tokenising {data.source}", unit="bytes") as waiting,
    ):
        for one, is_kept in encoded:
            if isinstance(one, DataError):
                if data.bad_records == "refuse":
                    raise one
                bad, first_bad = bad + 1, first_bad or f"{one.where}: {one.what}"
                continue
            if (problem := too_long(one, data)) is not None:
                raise problem
            waiting.advance(one.text_bytes)
            (held_out if is_kept else train).append(one.ids, one.text_bytes, one.trained, one.chat)
            left = None if left is None else left - one.text_bytes
            if left is not None and left <= 0:
                break
    if bad and not train.documents + held_out.documents:
        what = f"none of its {bad:,} records can be used; {first_bad}"
        raise DataError(f'dsx.data.source = "{data.source}"', what, "mend what is wrong with the first")
    return _info(
        data.source,
        tokenizer,
        settings,
        train,
        held_out,
        held_out_byte_counts=[],
        masked=True,
        pictures=data.pictures,
        bad_records=bad,
        first_bad_record=first_bad,
    )


def too_long(one: Encoded, data: DataConfig) -> DataError | None:
    """What is wrong with a document that ``dsx.data.too_long`` refuses."""
    longest = data.sequence_length
    if data.too_long != "refuse" or not data.keeps_whole or len(one.ids) <= longest:
        return None
    what = f"it has {len(one.ids):,} tokens, and dsx.data.too_long refuses more than {longest:,}"
    other = '"drop"' if data.pictures else '"truncate" or "drop"'
    fix = f"raise dsx.data.sequence_length, shorten it, or set too_long to {other}"
    return DataError(one.where, what, fix)


def _checked(info: CorpusInfo, data: DataConfig) -> CorpusInfo:
    """The counts, after a check that text is held out, and text left to train on, if both were asked for."""
    train, held_out = info.train.documents, info.held_out.documents
    total = train + held_out
    if not total:
        raise DataError(
            f'dsx.data.source = "{data.source}"', "it holds no text", "name files with text in them"
        )
    lacks_held_out = data.held_out > 0 and not held_out
    if lacks_held_out or not train:
        share = min(0.5, max(0.05, math.ceil(100 / total) / 100))
        raise DataError(
            f"dsx.data.held_out = {data.held_out}",
            f"of {total} document{'s' * (total > 1)} none is "
            f"{'held out' if lacks_held_out else 'left to train on'}",
            f"use {f'about {share}, or ' if total > 1 else ''}0 to hold out none (with dsx.train.eval_every "
            "= 0), or more documents",
        )
    return info


def _batches(texts: Iterable[tuple[str, bool]]) -> Iterator[list[tuple[str, bool]]]:
    """Documents in lists of about 8 Mi characters: enough for a tokenizer's threads, little for memory."""
    batch: list[tuple[str, bool]] = []
    length = 0
    for text in texts:
        batch.append(text)
        length += len(text[0])
        if length >= _BATCH_CHARACTERS:
            yield batch
            batch, length = [], 0
    if batch:
        yield batch
