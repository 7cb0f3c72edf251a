"""A config file as the doctor reads it: its values, and the place of each key in the text."""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path as File
from typing import Any

import hjson

from dsx.config.doctor.finding import Path
from dsx.config.doctor.positions import Document, Member, Node, PositionError, parse
from dsx.config.doctor.unusable import Unusable, unusable
from dsx.config.wording import show
from dsx.errors import ConfigError

# Configs have kilobytes; a list of labels in a model's has a few hundred.
_MOST_BYTES = 4 << 20
# A word without quotes, not true, false or null, with a bracket behind it on its line.
_SWALLOWS = re.compile(r":[ \t]*(?!true|false|null)[A-Za-z_][^\n\"']*[}\]]")


@dataclass(frozen=True, slots=True)
class Source:
    """A config.

    Attributes:
        name: Of the file, for messages.
        text: Of the file; empty for a config that comes as a mapping.
        config: The values, as DeepSpeed reads them; of a key written twice, the last.
        document: The text with offsets; None for a mapping.
    """

    name: str
    text: str
    config: dict[str, Any]
    document: Document | None

    def line_column(self, offset: int) -> tuple[int, int]:
        """Line and column of ``offset``, both from 1."""
        return self.text.count("\n", 0, offset) + 1, offset - (self.text.rfind("\n", 0, offset) + 1) + 1

    def written(self, path: Path) -> str:
        """The text of the value at ``path``; empty if it is not known."""
        member = None if self.document is None else _member(self.document.root, path)
        return "" if member is None else self.text[member.node.start : member.node.end]

    def place(self, path: Path) -> tuple[int, int] | None:
        """Line and column of the key at ``path``, or of the nearest object around it; None if not known."""
        offset = None if self.document is None or not path else _offset(self.document.root, path)
        return None if offset is None else self.line_column(offset)

    def twice(self) -> Iterator[tuple[Path, list[int]]]:
        """Keys written more than once in one object, with their lines."""
        if self.document is not None:
            for path, offsets in _twice(self.document.root, ()):
                yield path, [self.line_column(offset)[0] for offset in offsets]


def read_text(path: File) -> str:
    """The text of a config file, with its line ends as they are. Raises ConfigError."""
    where = str(path)
    if path.is_dir():
        raise ConfigError(where, "it is a folder", "give the JSON file itself")
    try:
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            what = f"it has more than {_MOST_BYTES >> 20} MiB, which no config has"
            raise ConfigError(where, what, "give a DeepSpeed JSON")
        return content.decode()
    except FileNotFoundError:
        raise ConfigError(where, "there is no such file", "give the path of a DeepSpeed JSON") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(where, f"it cannot be read ({error})", "give a readable UTF-8 file") from None


def from_mapping(config: Mapping[str, Any], name: str = "config") -> Source:
    """A config that is no file. Raises ConfigError if a value in it is none of JSON's."""
    _refuse(Source(name, "", {}, None), unusable(config, infinite=True))
    return Source(name, "", copy.deepcopy(dict(config)), None)


def from_text(text: str, name: str = "config") -> Source:
    """The config in ``text``.

    Raises:
        ConfigError: It is no HJSON, or no object.
    """
    if not text.strip("\ufeff \t\r\n"):
        raise ConfigError(name, "the file is empty", 'write a config, {"train_batch_size": 8} at the least')
    try:
        config = hjson.loads(text, object_pairs_hook=dict)
    except (ValueError, OverflowError, IndexError, RecursionError) as error:
        # hjson's own error is a ValueError, and so is Python's about a number of too many digits.
        raise _syntax_error(text, name, error) from None
    if not isinstance(config, dict):
        raise ConfigError(name, f"it holds {show(config)}, not an object", "write {...}")
    source = Source(name, text, config, _document(text, config))
    _refuse(source, unusable(config))
    return source


def _refuse(source: Source, problems: Iterable[Unusable]) -> None:
    for problem in problems:
        line = source.place(problem.path)
        where = f"{source.name}, line {line[0]}, column {line[1]}" if line else source.name
        raise ConfigError(f"{where}: {problem.key}".removesuffix(": "), problem.what, problem.fix)


def _document(text: str, config: dict[str, Any]) -> Document | None:
    """Offsets, if both parsers read the same."""
    try:
        document = parse(text)
    except (PositionError, RecursionError):
        return None
    return document if same(document.root.plain(), config) else None


def same(one: object, other: object) -> bool:
    """Equality that tells 1 from true and from 1.0.

    >>> same({"a": [1]}, {"a": [True]})
    False
    """
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and one == other


def _syntax_error(text: str, name: str, error: Exception) -> ConfigError:
    """Where the text stops being HJSON, in words that say what to look for."""
    try:
        parse(text)
        message, offset = str(error), 0
    except PositionError as found:
        message, offset = str(found), found.offset
    except RecursionError:
        message, offset = "nested too deeply", 0
    if isinstance(error, hjson.HjsonDecodeError):
        # hjson stops where it gives up; ours points at what was not closed, when that is earlier.
        offset = min(offset, error.pos) if offset else error.pos
        message = f"{message}; hjson: {error.msg}"
    if _SWALLOWS.search(text):
        message += "; an unquoted word takes the rest of its line, brackets and commas too"
    line = text.count("\n", 0, offset) + 1
    column = offset - (text.rfind("\n", 0, offset) + 1) + 1
    lines = text.splitlines()
    shown = f": {lines[line - 1].strip()[:60]}" if line <= len(lines) else ""
    return ConfigError(
        f"{name}, line {line}, column {column}", f"not JSON ({message}){shown}", "mend the syntax there"
    )


def _offset(root: Node, path: Path) -> int | None:
    """Of the key at ``path``, or of the innermost object around it that is there."""
    members = (_member(root, path[:length]) for length in range(len(path), 0, -1))
    return next((member.key_start for member in members if member is not None), None)


def _member(root: Node, path: Path) -> Member | None:
    node, found = root, None
    for part in path:
        if node.kind == "list":
            found = node.members[part] if isinstance(part, int) and part < len(node.members) else None
        else:
            # Of a key written twice, the last counts.
            found = next((m for m in reversed(node.members) if m.key == part), None)
        if found is None:
            return None
        node = found.node
    return found


def _twice(node: Node, path: Path) -> Iterator[tuple[Path, list[int]]]:
    counts = Counter(m.key for m in node.members if m.key is not None)
    for key, count in counts.items():
        if count > 1:
            yield (*path, key), [m.key_start for m in node.members if m.key == key]
    for i, member in enumerate(node.members):
        yield from _twice(member.node, (*path, i if member.key is None else member.key))
