"""``dsx.data.source`` -> documents: the standard library, text files, tables, or data sets of the hub.

Tables are jsonl, json, parquet and csv. Whether the Hugging Face hub answers is asked first: on their own,
``datasets`` and ``transformers`` retry a name that does not resolve for 24 seconds, and one that never
answers for minutes (datasets 5.2, transformers 5.23), before they look into their caches.
"""

from __future__ import annotations

import csv
import glob
import hashlib
import json
import os
import re
import ssl
import sysconfig
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from dsx.config.schema import DataConfig
from dsx.config.sources import PATTERN, STANDARD_LIBRARY, TABLES, TEXTS, is_hub_name
from dsx.data.units import TO_UTF8, FilePart, Stamp, Unit, file_parts, pieces, to_name
from dsx.errors import DataError
from dsx.models.transformers_settings import first_line
from dsx.terminal import full_disk

T = TypeVar("T")


def reachable(*, timeout_seconds: float = 5.0) -> bool:
    """Whether the hub's endpoint (``HF_ENDPOINT``) answers at all.

    False in offline mode (``HF_HUB_OFFLINE``). The request uses the environment's proxies, as Hugging Face's
    client does.
    """
    from huggingface_hub import constants

    if constants.is_offline_mode():
        return False
    request = urllib.request.Request(constants.ENDPOINT, method="HEAD")  # noqa: S310 (the user's own endpoint)
    try:
        urllib.request.urlopen(request, timeout=timeout_seconds).close()  # noqa: S310
    except urllib.error.HTTPError:
        return True  # an error page is an answer
    except urllib.error.URLError as error:
        # Only Hugging Face's client may know the certificates. Something answers; that client shall judge.
        return isinstance(error.reason, ssl.SSLError)
    except (OSError, ValueError):
        return False
    return True


def tokenizer_problem(name: str) -> tuple[str, bool]:
    """Why the hub's tokenizer ``name`` cannot be had here, and whether another machine may have it.

    Returns:
        The problem, empty if there is none, and whether it may be this machine's alone: one that checks
        configs may have no network where those that train do.
    """
    from huggingface_hub import repo_exists, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    files = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
    try:
        if any(isinstance(try_to_load_from_cache(name, file), str) for file in files):
            return "", False
        if not reachable():
            why = "it is no folder, not in this machine's cache, and the Hugging Face hub cannot be reached"
            return why, "/" in name  # names without an owner are a few old ones
        return ("" if repo_exists(name) else "the Hugging Face hub has no such model"), False
    except HFValidationError:
        return "it is no folder, and no name that the Hugging Face hub could have", False
    except (HfHubHTTPError, OSError):
        return "", False  # the hub answers with something else: let the run ask again


@contextmanager
def offline_unless(online: bool) -> Iterator[None]:
    """Inside, if not ``online``, ``datasets`` and ``transformers`` read their caches and try no network."""
    import datasets
    from huggingface_hub import constants

    if online:
        yield
        return
    before = constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = before


# With fewer files than this a file is too large a unit to hold out, so files are cut into documents.
_FEW_FILES = 64
_DOCUMENTS_OF_FEW_FILES = 128
_SMALLEST_CUT, _LARGEST_CUT = 1 << 10, 4 << 20

_PACKED = (".gz", ".bz2", ".xz", ".zst", ".zip")

_NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})


@dataclass(frozen=True, slots=True, kw_only=True)
class TextFiles:
    """UTF-8 text files.

    From 64 files on, a file is a document. A corpus of fewer files is cut into about 128 documents, at blank
    lines where there are any, so that some can be held out. No document is much over 4 Mi characters.

    Args:
        root: Folder that ``paths`` are relative to.
        paths: Files, in the order in which they are read.
        timestamps: Whether a changed modification time makes another corpus.
    """

    root: Path
    paths: tuple[Path, ...]
    timestamps: bool = True

    def identity(self) -> dict[str, object]:
        """What the cache recognises this corpus by, as JSON."""
        return file_identity(self.root, self.paths, timestamps=self.timestamps)

    def documents(self) -> Iterator[str]:
        """Documents in order. Raises DataError naming the file that is not UTF-8 or cannot be read."""
        cut = _LARGEST_CUT
        if len(self.paths) < _FEW_FILES:
            total_bytes = sum((self.root / path).stat().st_size for path in self.paths)
            cut = min(cut, max(_SMALLEST_CUT, total_bytes // _DOCUMENTS_OF_FEW_FILES))
        for path in (self.root / path for path in self.paths):
            try:
                with path.open(encoding="utf-8", newline="") as file:  # the bytes as they are
                    yield from pieces(file, cut)
            except UnicodeDecodeError as error:
                raise not_utf8(path) or error from error
            except OSError as error:
                what = f"cannot be read ({error.strerror})"
                raise DataError(str(path), what, "check the file") from error

    def units(self, lanes: int) -> tuple[Unit, ...]:
        """Parts for streaming; a corpus of few files is cut into more and smaller documents than here."""
        whole = len(self.paths) >= _FEW_FILES
        return file_parts(self.root, self.paths, lanes=lanes, whole_files=whole)


def standard_library() -> TextFiles:
    """The ``*.py`` files of this Python's standard library, without tests and installed packages."""
    root = Path(sysconfig.get_paths()["stdlib"])
    kept: list[Path] = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in _NOT_LIBRARY]  # packages hold most of the files
        kept += [Path(folder, name).relative_to(root) for name in files if name.endswith(".py")]
    kept.sort(key=Path.as_posix)
    if not kept:
        raise DataError(
            'dsx.data.source = "python-stdlib"',
            f"this Python has no source files in {root}",
            "name a text file or folder instead",
        )
    # The file times of an installation say nothing about its text.
    return TextFiles(root=root, paths=tuple(kept), timestamps=False)


def file_identity(root: Path, paths: Iterable[Path], *, timestamps: bool = True) -> dict[str, object]:
    """Number and bytes of files, and a hash of their names, sizes and modification times."""
    stats = [(path.as_posix(), (root / path).stat()) for path in paths]
    rows = [(name, stat.st_size, stat.st_mtime_ns if timestamps else 0) for name, stat in stats]
    return {
        "files": len(rows),
        "bytes": sum(size for _, size, _ in rows),
        "stamp": hashlib.sha256(json.dumps(rows).encode()).hexdigest(),
    }


_BATCH_ROWS = 1000
_TEXT = {"string", "large_string", "string_view", "null"}
_SHARDS_OF_CACHED = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalFiles:
    """Local tables.

    Args:
        root: Folder that ``paths`` are relative to.
        paths: All files, in order.
        builder: Builder of ``datasets`` for the files; None leaves the folder ``root``, its splits and its
            dataset card to ``datasets``.
    """

    root: Path
    paths: tuple[Path, ...]
    builder: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tables:
    """What ``datasets`` reads: local files, streamed without a copy in its cache, or a data set of the hub.

    Args:
        source: A data set of the hub, ``owner/name`` or ``name``, from the network or from the cache of
            ``datasets``; or local files.
        name: Configuration of the data set, or of the folder's dataset card, if there are several.
        split: Split; of a data set of the hub slices such as ``train[:10%]`` too. Files on their own have
            "train" alone.
        text_column: Column that holds the text; none if whole rows are records.
        stream: Read over the network instead of downloading the whole first.
    """

    source: str | LocalFiles
    name: str | None
    split: str
    text_column: str
    stream: bool = True

    def identity(self) -> dict[str, object]:
        """What the cache recognises this corpus by: of the hub no more than names, which need no network."""
        where: dict[str, object] = {"hub": self.source}
        if isinstance(self.source, LocalFiles):
            where = file_identity(self.source.root, self.source.paths)
        return {**where, "name": self.name, "split": self.split, "text_column": self.text_column}

    def documents(self) -> Iterator[str]:
        """Documents in order, empty ones for rows without text."""

        def of(table: Any, where: str) -> Iterator[str]:
            for batch in table.with_format("arrow").iter(batch_size=_BATCH_ROWS):
                yield from (cell or "" for cell in _cells(batch, self.text_column, where))

        for part in self._parts():
            lines = part._has_lines  # noqa: SLF001 - its own kind
            for unit in part._lines(1) if lines else ():  # noqa: SLF001
                yield from (text for _, text in replace(unit, blank=True).documents(None))
            yield from () if lines else part._read(of)  # noqa: SLF001

    def rows(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Rows as objects, each with its place. Raises DataError, as :meth:`documents` does."""
        return self._read(
            lambda table, where: (
                (f"{where}, row {number}", _without_nulls(row)) for number, row in enumerate(table, 1)
            )
        )

    def _parts(self) -> list[Tables]:
        """Each of the files that are named, as their columns may differ."""
        if not isinstance(self.source, LocalFiles) or self.source.builder is None:
            return [self]
        each = (replace(self.source, paths=(path,)) for path in self.source.paths)
        return [replace(self, source=source) for source in each]

    def _read(self, of: Callable[[Any, str], Iterator[T]]) -> Iterator[T]:
        """What ``of`` gives of each table and its place."""
        for part in self._parts():
            table = part._table(stream=part.stream)  # noqa: SLF001 - its own kind
            try:
                yield from () if table is None else of(table, part._where)  # noqa: SLF001
            except _read_errors() as error:
                raise _unreadable(part._where, error, part._files) from error  # noqa: SLF001

    def units(self, lanes: int) -> tuple[Unit, ...]:
        """Byte ranges of JSON lines; else what ``datasets`` can read on its own: row groups, or files."""
        if self._has_lines:
            return self._lines(lanes)
        stamps = tuple(Stamp.of(path) for path in self._files)
        return _shards(self._table(stream=True), self.text_column, self._where, stamps)

    @property
    def _has_lines(self) -> bool:
        """Whether it is files of JSON lines, which need no schema: each line may have columns of its own."""
        named = isinstance(self.source, LocalFiles) and self.source.builder == "json"
        return named and all(path.suffix == ".jsonl" and _begins_with_line(path) for path in self._files)

    def _lines(self, lanes: int) -> tuple[FilePart, ...]:
        assert isinstance(self.source, LocalFiles)
        return file_parts(self.source.root, self.source.paths, lanes=lanes, column=self.text_column)

    @property
    def _where(self) -> str:
        if isinstance(self.source, str):
            return f'dsx.data.source = "{self.source}"'
        root, paths = self.source.root, self.source.paths
        return str(root / paths[0] if len(paths) == 1 else root)

    @property
    def _files(self) -> list[Path]:
        return [] if isinstance(self.source, str) else [self.source.root / path for path in self.source.paths]

    def _table(self, *, stream: bool) -> Any:
        """The data set of ``datasets``; None if all local files are empty."""
        import datasets

        if isinstance(self.source, str):
            online = reachable()
            source, options, stream = self.source, {}, stream and online
        else:
            # An empty file stops the readers of datasets; it holds no document.
            every = [self.source.root / path for path in self.source.paths]
            files = [str(path) for path in every if path.stat().st_size]
            if not files:
                return None
            online, source, options, stream = False, *_local_options(self.source, files), True
        try:
            with offline_unless(online):
                return datasets.load_dataset(source, self.name, split=self.split, streaming=stream, **options)
        except _read_errors() as error:
            if isinstance(self.source, str) and not online:
                reason = first_line(error).rstrip(".")
                raise DataError(
                    self._where,
                    "is no local path, the Hugging Face hub cannot be reached (no network, or "
                    f"HF_HUB_OFFLINE is set), and it cannot be read from the cache ({reason})",
                    'name a local file or folder, use "python-stdlib", or download it where there is network',
                ) from error
            raise _unreadable(self._where, error, self._files) from error


def _begins_with_line(path: Path) -> bool:
    """Whether a file is no list, no objects that span lines, and not several objects in a line."""
    with path.open("rb") as file:
        line = next((line.strip() for line in file if line.strip()), b"{}")
    try:
        return not isinstance(json.loads(line), list)
    except json.JSONDecodeError as error:  # at the end of the line, where what began in it goes on
        return error.msg != "Extra data" and error.pos < len(error.doc) - 1
    except (ValueError, RecursionError):
        return True  # as is then said of that line


def _local_options(source: LocalFiles, files: list[str]) -> tuple[str, dict[str, Any]]:
    if source.builder is None:
        return str(source.root), {}
    # By default parquet is read a whole row group at once, for each that is open.
    sizes = {"batch_size": _BATCH_ROWS} if source.builder == "parquet" else {}
    return source.builder, {"data_files": files, **sizes}


@dataclass(frozen=True, slots=True, kw_only=True)
class TableShard:
    """A shard of a data set that ``datasets`` streams; positions are rows, records without a column.

    Rows before a position are read again and dropped without being decoded: the ``state_dict`` of
    ``datasets`` remembers a shard and a row too, and skips rows in the same way.
    """

    table: Any
    index: int
    count: int
    column: str
    where: str
    stamps: tuple[Stamp, ...]

    @property
    def name(self) -> str:
        sizes = "-".join(str(stamp.size_bytes) for stamp in self.stamps)
        return f"shard {self.index} of {self.count}, {sizes}"

    def documents(self, start: int | None) -> Iterator[tuple[int, str]]:
        row, skip = 0, start or 0
        for stamp in self.stamps:
            stamp.check()
        try:
            shard = self.table.shard(self.count, self.index).with_format("arrow")
            for batch in shard.iter(batch_size=_BATCH_ROWS):
                if row + len(batch) > skip:
                    for offset, cell in enumerate(self._documents(batch), row):
                        if cell and offset >= skip:
                            yield offset, cell
                row += len(batch)
        except _read_errors() as error:
            for stamp in self.stamps:
                stamp.check()
            files = [stamp.path for stamp in self.stamps]
            raise _unreadable(self.where, error, files, streamed=True) from error
        if row < skip:
            raise DataError(self.where, f"has {row} rows left of more than {skip}", "restore the data")

    def place(self, at: int) -> str:
        """The shard and the row in it, from 1."""
        return f"{self.where}, {self.name}, row {at + 1}"

    def _documents(self, batch: Any) -> Iterable[str | None]:
        if self.column:
            return _cells(batch, self.column, self.where)
        return (json.dumps(_without_nulls(row), default=str) for row in batch.to_pylist())


def _without_nulls(value: Any) -> Any:
    """Without keys whose value is null: tables give every object of a column the keys of all of them."""
    if isinstance(value, dict):
        return {key: _without_nulls(one) for key, one in value.items() if one is not None}
    return [_without_nulls(one) for one in value] if isinstance(value, list) else value


def _shards(table: Any, column: str, where: str, stamps: tuple[Stamp, ...]) -> tuple[TableShard, ...]:
    if table is None:
        return ()
    if not hasattr(table, "reshard"):  # prepared in the cache of datasets, as without network
        table = table.to_iterable_dataset(num_shards=min(len(table), _SHARDS_OF_CACHED) or 1)
    table = table.reshard()
    return tuple(
        TableShard(
            table=table, index=index, count=table.num_shards, column=column, where=where, stamps=stamps
        )
        for index in range(table.num_shards)
    )


def _cells(batch: Any, column: str, where: str) -> list[str | None]:
    key = f'dsx.data.text_column = "{column}"'
    if column not in batch.column_names:
        what = f"{where} has no such column; it has {', '.join(batch.column_names)}"
        raise DataError(key, what, _to_name(batch.schema))
    kind = str(batch.schema.field(column).type)
    if kind not in _TEXT:
        raise DataError(key, f"that column of {where} holds {kind}, not text", _to_name(batch.schema))
    return list(batch.column(column).to_pylist())


def _to_name(schema: Any) -> str:
    if len(schema) == 1 and any(mark in schema[0].name for mark in ";\t|"):
        return "write the file with a comma between the cells of a line"
    texts = [field.name for field in schema if str(field.type) in _TEXT - {"null"}]
    chats = [field.name for field in schema if re.search("struct<.*(role|from):", str(field.type))]
    return to_name(texts, chats)


def _read_errors() -> tuple[type[Exception], ...]:
    from datasets.exceptions import DatasetsError

    # pyarrow's errors are ValueErrors or OSErrors; json.JSONDecodeError and UnicodeDecodeError ValueErrors.
    return (DatasetsError, OSError, ValueError, RuntimeError, StopIteration, TypeError, json.JSONDecodeError)


def not_utf8(path: Path) -> DataError | None:
    """What to say of the first line of a file that is not UTF-8 text; None if all are."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                byte = f"byte 0x{line[error.start]:02x}"
                what = f"is not UTF-8 text ({error.reason}: {byte}), line {number}"
                return DataError(str(path), what, TO_UTF8)
    return None


def not_csv(path: Path, error: csv.Error, lines: int) -> DataError:
    """What to say of an error of :mod:`csv` after so many lines: it does not count one that is too long."""
    number = lines + ("field limit" in str(error))
    what = f"cannot be read as CSV ({error}), line {number}"
    return DataError(str(path), what, "mend it, or write jsonl")


def _csv_fault(path: Path) -> DataError | None:
    """What pandas cannot read in a CSV file, with its line: more cells than columns, or an open quote."""
    fault = not_utf8(path)
    if fault is not None:
        return fault
    for strict in (False, True):
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, strict=strict)
            try:
                columns = 0
                for cells in reader:
                    columns = columns or len(cells)
                    if len(cells) > columns:
                        what = f"line {reader.line_num} has {len(cells)} cells, the first one {columns}"
                        return DataError(str(path), f"cannot be read: {what}", "mend the line")
            except csv.Error as error:
                if "end of data" in str(error):  # pandas takes what else is said of quotes and lengths
                    return not_csv(path, error, reader.line_num)
    return None


def _unreadable(
    where: str, error: Exception, files: Sequence[Path] = (), *, streamed: bool = False
) -> DataError:
    reason = first_line(error).rstrip(".")
    if full := full_disk(error) or ("Not enough disk space" in reason and reason):
        fix = "make room on that disk, or name another with HF_HOME or HF_DATASETS_CACHE"
        return DataError(where, f"cannot be read ({full})", fix)
    with suppress(OSError):
        for fault in filter(None, (_csv_fault(file) for file in files if file.suffix == ".csv")):
            return fault
    if "Couldn't cast" in str(error):
        what = "its parts have other columns, or other types in them"
        suffix = next((file.suffix for file in files if file.suffix in TABLES), ".jsonl")
        if streamed or len(files) < 2:  # which are one table
            return DataError(where, what, 'write jsonl, and name the files: "folder/*.jsonl"')
        return DataError(where, what, f'name the files: "{where}/**/*{suffix}"')
    if isinstance(error, UnicodeDecodeError):
        return DataError(where, f"is not UTF-8 text ({error.reason})", TO_UTF8)
    if "split" in str(error).lower():
        return DataError(f"dsx.data.split of {where}", reason, "name a split that it has")
    return DataError(where, f"cannot be read ({reason})", "check the name and the files")


_CARD = re.compile(r"readme|license|\.gitattributes", re.IGNORECASE)
_KNOWN = ", ".join(sorted(TEXTS | TABLES.keys()))


DocumentSource = TextFiles | Tables
"""A corpus of documents in a fixed order."""


def documents(data: DataConfig, blank: list[int] | None = None) -> Iterator[str]:
    """Documents of ``data.source`` in order, up to about ``data.max_bytes`` of UTF-8.

    Rows without text, which are left out, are noted in ``blank``, counted from 1.
    """
    left = data.max_bytes
    for row, document in enumerate(open_source(data).documents(), 1):
        if document:
            yield document
        elif blank is not None:
            blank.append(row)
        if left is not None:
            left -= len(document.encode())
            if left <= 0:
                return


def open_source(data: DataConfig) -> DocumentSource:
    """The reader of ``data.source``: "python-stdlib", a file, a folder, a glob, or else a hub name."""
    source = data.source
    if source == STANDARD_LIBRARY:
        _refuse_table_keys(data)
        return standard_library()
    path = Path(source).expanduser()
    if path.is_dir():
        return _folder(path, data)
    if path.is_file():
        return _files(path.parent, [Path(path.name)], data)
    if PATTERN.search(source):
        # glob.glob rather than Path.glob: the pattern may be absolute.
        found = [Path(name) for name in sorted(glob.glob(str(path), recursive=True))]  # noqa: PTH207
        return _files(Path(), [name for name in found if name.is_file()], data)
    if not is_hub_name(source):
        raise DataError(
            _where(data),
            f"there is no such file or folder (looked for {path.absolute()})",
            'check the path, or use "python-stdlib", which is always there',
        )
    return _tables(source, data)


def _folder(root: Path, data: DataConfig) -> DocumentSource:
    if any((root / name).is_file() for name in ("dataset_dict.json", "state.json")):
        what = "it is a folder of datasets' save_to_disk, which is a cache"
        fix = f'write a table: datasets.load_from_disk("{root}").to_parquet("text.parquet")'
        raise DataError(_where(data), what, f"{fix}, for each split")
    inside = sorted((path.relative_to(root) for path in root.rglob("*") if path.is_file()), key=Path.as_posix)
    seen = [path for path in inside if not any(part.startswith(".") for part in path.parts)]
    tables = [path for path in seen if path.suffix in TABLES]
    texts = [path for path in seen if path.suffix in TEXTS]
    if not tables:
        return _files(root, texts, data)
    if any(not _CARD.match(path.name) for path in texts):
        return _files(root, tables + texts, data)  # refuses the mixture
    return _tables(LocalFiles(root=root, paths=tuple(seen), builder=None), data)


def _files(root: Path, paths: list[Path], data: DataConfig) -> DocumentSource:
    kinds = {TABLES.get(path.suffix, "text" if path.suffix in TEXTS else "") for path in paths}
    if not paths:
        raise DataError(_where(data), f"no file of a known kind is there ({_KNOWN})", "check the path")
    if "" in kinds:
        odd = next(path for path in paths if path.suffix not in TEXTS | TABLES.keys())
        fix = "unpack it first" if odd.suffix in _PACKED else "rename it or name other files"
        raise DataError(_where(data), f"{root / odd} is of no known kind ({_KNOWN})", fix)
    if len(kinds) > 1:
        raise DataError(
            _where(data),
            f"files of several kinds: {', '.join(sorted(kinds))}",
            'name one, such as "folder/*.jsonl"',
        )
    if kinds == {"text"}:
        _refuse_table_keys(data)
        return TextFiles(root=root, paths=tuple(paths))
    _refuse_keys(data, "name")
    if data.split != "train":
        what = f'source "{data.source}" is files, which have the split "train" alone'
        raise DataError(f'dsx.data.split = "{data.split}"', what, "leave this key out")
    return _tables(LocalFiles(root=root, paths=tuple(paths), builder=kinds.pop()), data)


def _tables(source: str | LocalFiles, data: DataConfig) -> Tables:
    stream = data.max_bytes is not None or not isinstance(source, str)
    column = data.text_column if data.format == "text" else ""
    return Tables(source=source, name=data.name, split=data.split, text_column=column, stream=stream)


def _refuse_table_keys(data: DataConfig) -> None:
    _refuse_keys(data, "name", "split", "text_column")


def _refuse_keys(data: DataConfig, *keys: str) -> None:
    """Keys that would silently do nothing for this source."""
    for key in keys:
        value = getattr(data, key)
        if value != DataConfig.model_fields[key].default:
            raise DataError(
                f'dsx.data.{key} = "{value}"', f'source "{data.source}" has no {key}', "leave this key out"
            )


def _where(data: DataConfig) -> str:
    return f'dsx.data.source = "{data.source}"'
