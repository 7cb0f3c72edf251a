"""``dsx.data.source`` -> documents: the standard library, text files, tables, or a hub data set."""

from __future__ import annotations

import glob
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from dsx.config.schema import DataConfig
from dsx.config.sources import PATTERN, STANDARD_LIBRARY, TABLES, TEXTS, is_hub_name
from dsx.data.files import HubData, TableFiles, TextFiles, standard_library
from dsx.data.units import Unit
from dsx.errors import DataError

_CARD = re.compile(r"readme|license|\.gitattributes", re.IGNORECASE)
_KNOWN = ", ".join(sorted(TEXTS | TABLES.keys()))


class DocumentSource(Protocol):
    """A corpus of documents in a fixed order."""

    def identity(self) -> dict[str, object]:
        """JSON of what the cache recognises the corpus by."""

    def documents(self) -> Iterator[str]:
        """Documents in order."""

    def units(self, lanes: int) -> tuple[Unit, ...]:
        """Parts that can be read on their own, for so many lanes."""


def documents(data: DataConfig) -> Iterator[str]:
    """Documents of ``data.source`` in order, up to about ``data.max_bytes`` of UTF-8.

    Raises:
        DataError: The source is missing, unreadable, not UTF-8 or without the text column.
    """
    left = data.max_bytes
    for document in open_source(data).documents():
        if not document:
            continue
        yield document
        if left is not None:
            left -= len(document.encode())
            if left <= 0:
                return


def open_source(data: DataConfig) -> DocumentSource:
    """The reader of ``data.source``: "python-stdlib", a file, a folder, a glob, or else a hub name.

    Raises:
        DataError: Nothing there, or files of several kinds.
    """
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
    return HubData(
        dataset=source,
        name=data.name,
        split=data.split,
        text_column=data.text_column,
        stream=data.max_bytes is not None,
    )


def _folder(root: Path, data: DataConfig) -> DocumentSource:
    inside = sorted((path.relative_to(root) for path in root.rglob("*") if path.is_file()), key=Path.as_posix)
    seen = [path for path in inside if not any(part.startswith(".") for part in path.parts)]
    tables = [path for path in seen if path.suffix in TABLES]
    texts = [path for path in seen if path.suffix in TEXTS]
    if not tables:
        return _files(root, texts, data)
    if any(not _CARD.match(path.name) for path in texts):
        return _files(root, tables + texts, data)  # refuses the mixture
    return TableFiles(
        root=root,
        paths=tuple(seen),
        builder=None,
        name=data.name,
        split=data.split,
        text_column=data.text_column,
    )


def _files(root: Path, paths: list[Path], data: DataConfig) -> DocumentSource:
    kinds = {TABLES.get(path.suffix, "text" if path.suffix in TEXTS else "") for path in paths}
    if not paths:
        raise DataError(_where(data), f"no file of a known kind is there ({_KNOWN})", "check the path")
    if "" in kinds:
        odd = next(path for path in paths if path.suffix not in TEXTS | TABLES.keys())
        raise DataError(
            _where(data), f"{root / odd} is of no known kind ({_KNOWN})", "rename it or name other files"
        )
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
    return TableFiles(
        root=root,
        paths=tuple(paths),
        builder=kinds.pop(),
        name=None,
        split=data.split,
        text_column=data.text_column,
    )


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
