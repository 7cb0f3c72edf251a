"""The text of a config file: its values, and where each key and value stands, for messages and edits.

The parser reads what the ``hjson`` package reads, with which DeepSpeed loads its configs, and gives the same
values (tests compare the two). Strict JSON is HJSON too. ``NaN`` and ``Infinity`` are no words of either; in
a text that is strict but for them they are numbers, as to Python's json, with which transformers' Trainer and
Accelerate read and write.
"""

from __future__ import annotations

import copy
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path as File
from typing import IO, Any, Literal, NoReturn

import hjson

from dsx.config.wording import Path, dotted, show
from dsx.errors import ConfigError

# Half of a pair of UTF-16 units, which is no character: \ud83d without \ude00 after it.
_HALF = re.compile("[\ud800-\udfff]")
# Objects in objects; DeepSpeed's deepest key has eight above it.
_MOST_LEVELS = 100
BEYOND = "a number beyond 1e308, which nothing can hold"


@dataclass(frozen=True, slots=True)
class Unusable:
    """A value that no program can use."""

    path: Path
    what: str
    fix: str

    @property
    def key(self) -> str:
        """``path`` in characters that every terminal can show."""
        return dotted(self.path).encode("ascii", "backslashreplace").decode()


def is_finite(value: float) -> bool:
    """Whether a float can hold ``value``, and it is not inf or nan."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def unusable(
    node: object, *, infinite: Callable[[float, str], bool] | None = None, path: Path = ()
) -> Iterator[Unusable]:
    """Every value in ``node`` that no program can use.

    ``node`` stands at ``path``. ``infinite`` says whether an inf or nan is allowed, by the value and its
    dotted key; None for nowhere.
    """
    if len(path) > _MOST_LEVELS:
        what = f"it holds more than {_MOST_LEVELS} objects or lists in one another"
        yield Unusable(path[:1], what, "write fewer")
    elif isinstance(node, Mapping):
        for key, value in node.items():
            if not isinstance(key, str):
                yield Unusable(path, f"it holds the key {show(key)}, which is no string", "put it in quotes")
            else:
                yield from _half(key, (*path, key), "the key ")
                yield from unusable(value, infinite=infinite, path=(*path, key))
    elif isinstance(node, list | tuple):
        for at, value in enumerate(node):
            yield from unusable(value, infinite=infinite, path=(*path, at))
    elif isinstance(node, str):
        yield from _half(node, path, "it ")
    elif isinstance(node, int) and not is_finite(node):
        yield Unusable(path, BEYOND, "write the number that is meant")
    elif isinstance(node, float) and not is_finite(node) and not (infinite and infinite(node, dotted(path))):
        yield Unusable(path, f"{json.dumps(node)} is no number of JSON's", "write the number that is meant")


def _half(word: str, path: Path, subject: str) -> Iterator[Unusable]:
    found = _HALF.search(word)
    if found is not None:
        shown = f"\\u{ord(found[0]):04x}"
        yield Unusable(path, f"{subject}holds {shown}, half of a character", "write the whole character")


# What HJSON has beyond JSON.
Relaxed = Literal[
    "comment", "unquoted key", "unquoted string", "single quotes", "multi-line string", "missing comma",
    "trailing comma", "no outer braces",
]  # fmt: skip

_BLANK = re.compile(r"[ \t\n\r]*")
_LINE_END = re.compile(r"[\r\n]|\Z")
_PUNCTUATION = "{}[],:"
_NUMBER = re.compile(r"(-?(?:0|[1-9]\d*))(\.\d+)?([eE][-+]?\d+)?\s*")
_VALUE_END = re.compile(r"[\r\n,}\]#]|//|/\*|\Z")
_WORDS = {"null": None, "true": True, "false": False}
# What Python's json reads besides.
_CONSTANTS = {word: float(word) for word in ("NaN", "Infinity", "-Infinity")}
_CONSTANT = re.compile(r"[\[:,]\s*(-?(?:NaN|Infinity))\b")
# The white space after a word is included.
_LONGEST_WORD = 1000
# Above it hjson leaves a whole number that was written with a point or exponent a float.
_WHOLE_FLOAT_LIMIT = 1e10


class PositionError(ValueError):
    """The text is not HJSON; ``offset`` says where."""

    def __init__(self, message: str, offset: int) -> None:
        super().__init__(message)
        self.offset = offset


@dataclass(slots=True)
class Member:
    """``key: value`` in an object, by offsets into the text, ends exclusive. A list item's key is None."""

    key: str | None
    key_start: int
    key_end: int
    node: Node


@dataclass(slots=True)
class Node:
    """A value. ``start`` to ``end`` is its text, brackets and quotes included."""

    kind: Literal["object", "list", "scalar"]
    start: int
    end: int = 0
    value: Any = None
    members: list[Member] = field(default_factory=list)

    def plain(self) -> Any:
        """The value as Python has it; of keys written twice, the last one."""
        if self.kind == "object":
            return {member.key: member.node.plain() for member in self.members}
        return [member.node.plain() for member in self.members] if self.kind == "list" else self.value


@dataclass(slots=True)
class Document:
    """A parsed text: the top value, and whatever in it is no strict JSON."""

    root: Node
    relaxed: list[tuple[Relaxed, int]]


def parse(text: str) -> Document:
    """``text`` with offsets. Raises PositionError."""
    return _Parser(text).document()


class _Parser:
    def __init__(self, text: str) -> None:
        self.text = text
        self.words = _WORDS if _with_constants(text) is None else _WORDS | _CONSTANTS
        self.at = 1 if text.startswith("\ufeff") else 0
        self.relaxed: list[tuple[Relaxed, int]] = []

    def document(self) -> Document:
        self.space()
        start = self.at
        if self.peek() in ("{", "["):
            root = self.value()
        else:
            self.relaxed.append(("no outer braces", start))
            root = Node("object", start)
            self.members(root, closing="")
        self.space()
        if self.at != len(self.text):
            self.fail("something follows the end")
        return Document(root, self.relaxed)

    def fail(self, message: str, offset: int | None = None) -> NoReturn:
        raise PositionError(message, self.at if offset is None else offset)

    def peek(self, length: int = 1) -> str:
        return self.text[self.at : self.at + length]

    def space(self) -> None:
        while True:
            blank = _BLANK.match(self.text, self.at)
            self.at = self.at if blank is None else blank.end()
            char = self.peek()
            if char == "#" or self.peek(2) == "//":
                self.relaxed.append(("comment", self.at))
                end = _LINE_END.search(self.text, self.at)
                self.at = end.start() if end else len(self.text)
            elif self.peek(2) == "/*":
                self.relaxed.append(("comment", self.at))
                close = self.text.find("*/", self.at + 2)
                if close < 0:
                    self.fail("a comment that does not end")
                self.at = close + 2
            else:
                return

    def value(self) -> Node:
        char = self.peek()
        if char == "{":
            return self.container("object", "}")
        if char == "[":
            return self.container("list", "]")
        start = self.at
        value = self.quoted() if char in ('"', "'") else self.unquoted()
        return Node("scalar", start, self.at, value)

    def container(self, kind: Literal["object", "list"], closing: str) -> Node:
        node = Node(kind, self.at)
        self.at += 1
        self.members(node, closing)
        self.at += len(closing)
        node.end = self.at
        return node

    def members(self, node: Node, closing: str) -> None:
        """Fill ``node`` up to the ``closing`` bracket, which stays; empty: up to the end of the text."""
        comma = True
        self.space()
        while self.peek() != closing:
            if not self.peek():
                self.fail(f"{closing!r} is missing", node.start)
            if not comma:
                self.relaxed.append(("missing comma", self.at))
            node.members.append(self.member(node.kind == "object"))
            self.space()
            comma = self.peek() == ","
            if comma:
                where = self.at
                self.at += 1
                self.space()
                if self.peek() == closing:
                    self.relaxed.append(("trailing comma", where))
        node.end = self.at

    def member(self, in_object: bool) -> Member:
        if not in_object:
            return Member(None, self.at, self.at, self.value())
        start = self.at
        key = self.quoted(multi_line=False) if self.peek() in ('"', "'") else self.bare_key()
        end = self.at
        self.space()
        if self.peek() != ":":
            self.fail("a key without a colon", start)
        self.at += 1
        self.space()
        if not self.peek():
            self.fail("a key without a value", start)
        return Member(key, start, end, self.value())

    def bare_key(self) -> str:
        start = self.at
        end = re.compile(r"[\s{}\[\],:]|\Z").search(self.text, start)
        self.at = end.start() if end else len(self.text)
        if self.at == start:
            self.fail("a key is missing")
        self.relaxed.append(("unquoted key", start))
        return self.text[start : self.at]

    def quoted(self, multi_line: bool = True) -> str:
        start, quote = self.at, self.peek()
        if multi_line and self.peek(3) == "'''":
            return self.multi_line()
        body = re.compile(rf"(?:[^\\\x00-\x1f{quote}]|\\.)*{quote}").match(self.text, start + 1)
        if body is None:
            self.fail("a string that does not end", start)
        self.at = body.end()
        inner = self.text[start + 1 : self.at - 1]
        if quote == "'":
            self.relaxed.append(("single quotes", start))
        inner = re.sub(r'\\.|"', lambda m: {"\\'": "'", '"': '\\"'}.get(m[0], m[0]), inner)
        try:
            return str(json.loads(f'"{inner}"'))
        except json.JSONDecodeError:
            self.fail("a string with a wrong escape", start)

    def multi_line(self) -> str:
        start = self.at
        close = self.text.find("'''", start + 3)
        if close < 0:
            self.fail("a string that does not end", start)
        self.at = close + 3
        self.relaxed.append(("multi-line string", start))
        indent = start - (self.text.rfind("\n", 0, start) + 1)
        first, *rest = self.text[start + 3 : close].replace("\r", "").split("\n")
        lines = ([first.lstrip(" \t")] if first.strip(" \t") or not rest else []) + [
            line[min(indent, len(line) - len(line.lstrip(" \t"))) :] for line in rest
        ]
        return "\n".join(lines).removesuffix("\n")

    def unquoted(self) -> Any:
        """A number, true, false, null; or a string up to the end of the line."""
        start = self.at
        if self.peek() in _PUNCTUATION:
            self.fail("a value is missing")
        end = start
        for end in _value_ends(self.text, start):
            self.at = end
            token = self.text[start : min(end, start + _LONGEST_WORD)].strip()
            if token in self.words:
                return self.trim(start, self.words[token])
            # Searched in the text itself: a copy of a long line at each of its commas would take for ever.
            if number := _NUMBER.fullmatch(self.text, start, end):
                return self.trim(start, self.number(number, start))
        # There is none of these up to the end of the line.
        self.relaxed.append(("unquoted string", start))
        return self.trim(start, self.text[start:end].strip())

    def number(self, found: re.Match[str], start: int) -> int | float:
        """The number; one that no float holds is an error here, as it is sooner or later everywhere."""
        try:
            value = _number(found)
        except ValueError:  # more digits than Python reads
            value = math.inf
        if not is_finite(value):
            self.fail(BEYOND, start)
        return value

    def trim(self, start: int, value: Any) -> Any:
        """Move back over the white space behind a value that starts at ``start``."""
        self.at = start + len(self.text[start : self.at].rstrip())
        return value


def _value_ends(text: str, start: int) -> Iterator[int]:
    for found in _VALUE_END.finditer(text, start):
        yield found.start()
        if found.group() in ("", "\r", "\n"):
            return


def _with_constants(text: str) -> dict[str, Any] | None:
    """What Python's json makes of an object in which it reads NaN or Infinity; None for any other text."""
    if not _CONSTANT.search(text):
        return None
    seen = []

    def constant(word: str) -> float:
        seen.append(word)
        return _CONSTANTS[word]

    def number(word: str) -> int | float:
        found = _NUMBER.fullmatch(word)
        value = math.inf if found is None else _number(found)
        if not is_finite(value):
            raise ValueError(BEYOND)
        return value

    try:
        config = json.loads(text, parse_constant=constant, parse_float=number)
    except (ValueError, RecursionError):
        return None
    return config if seen and isinstance(config, dict) else None


def _number(found: re.Match[str]) -> int | float:
    whole, fraction, exponent = found.groups()
    if not fraction and not exponent:
        return int(whole)
    number = float(found[0])
    is_short = abs(number) < _WHOLE_FLOAT_LIMIT and number == int(number)
    return int(number) if is_short else number


# Configs have kilobytes; a list of labels in a model's has a few hundred.
_MOST_BYTES = 4 << 20
# A word without quotes, not true, false or null, with a bracket after it on its line.
_SWALLOWS = re.compile(r":[ \t]*(?!true|false|null)[A-Za-z_][^\n\"']*[}\]]")


@dataclass(frozen=True, slots=True)
class Source:
    """A config with its text.

    Attributes:
        text: The file's text; empty for a config that comes as a mapping.
        config: The values, as DeepSpeed reads them (NaN and Infinity as Python's json does); of a key written
            twice, the last.
        document: The text with offsets; None for a mapping.
        put: Keys whose values a command line has put over those of the text.
    """

    name: str
    text: str
    config: dict[str, Any]
    document: Document | None
    put: tuple[Path, ...] = ()

    def is_put(self, path: Path) -> bool:
        """Whether the value at ``path``, or the nearest one around it, is not the text's own."""
        is_around = any(put[: len(path)] == path for put in self.put)
        return bool(path) and (self._is_within(path) or (is_around and not self.written(path)))

    def _is_within(self, path: Path) -> bool:
        return any(path[: len(put)] == put for put in self.put)

    def line_column(self, offset: int) -> tuple[int, int]:
        """Line and column of ``offset``, both from 1."""
        return self.text.count("\n", 0, offset) + 1, offset - (self.text.rfind("\n", 0, offset) + 1) + 1

    def written(self, path: Path) -> str:
        """The text of the value at ``path``; empty if it is not known."""
        is_text = self.document is not None and not self._is_within(path)
        member = find(self.document.root, path)[1] if is_text and self.document else None
        return "" if member is None else self.text[member.node.start : member.node.end]

    def place(self, path: Path) -> tuple[int, int] | None:
        """Line and column of the key at ``path``, or of the nearest object around it; None if not known."""
        if self.document is None or self.is_put(path):
            return None
        root = self.document.root
        members = (find(root, path[:length])[1] for length in range(len(path), 0, -1))
        found = next((member for member in members if member is not None), None)
        return None if found is None else self.line_column(found.key_start)

    def twice(self) -> Iterator[tuple[Path, list[int]]]:
        """Keys written more than once in one object, with their lines."""
        if self.document is not None:
            for path, offsets in _twice(self.document.root, ()):
                yield path, [self.line_column(offset)[0] for offset in offsets]


class UnopenedError(ConfigError):
    """A config file that is not there, or that cannot be opened."""


def shipped(name: str) -> Traversable:
    """``recipes/NAME.py``, ``configs/NAME.json``, ``constraints.txt``, or the folder ``docs/guides``."""
    package = files("dsx")
    places = [package.joinpath("shipped")]
    if isinstance(package, File) and (package.parent / "pyproject.toml").is_file():
        places.insert(0, package.parent)  # a checkout
    for place in places:
        found = place.joinpath(*name.split("/"))
        if found.is_file() or found.is_dir():
            return found
    raise ConfigError(
        name, "this installation of dsx lacks it", "install dsx with pip, from a wheel or a checkout"
    )


def own_copy(name: str) -> str:
    """The end of a fix, where a path that is not there is that of a config which comes with dsx."""
    try:
        return f"; dsx's own is {shipped(name)}" if name.startswith("configs/") else ""
    except ConfigError:
        return ""


def read_text(path: File | Traversable) -> str:
    """The text of a config file, with its line ends as they are.

    Raises:
        UnopenedError: There is no such file.
        ConfigError: It is no text, or too long for a config.
    """
    where = str(path)
    try:
        with path.open("rb") as file:
            return decoded(file, where)
    except FileNotFoundError:
        fix = f"give the path of a DeepSpeed JSON{own_copy(where)}"
        raise UnopenedError(where, "there is no such file", fix) from None
    except IsADirectoryError:
        raise UnopenedError(where, "it is a folder", "give the JSON file itself") from None
    except (OSError, ValueError) as error:
        what = f"it cannot be read ({getattr(error, 'strerror', None) or error})"
        raise UnopenedError(where, what, "give a readable UTF-8 file") from None


def decoded(file: IO[bytes], where: str) -> str:
    """The text in an open file. Raises ConfigError, at ``where``, if it is none, or too long for a config."""
    content = file.read(_MOST_BYTES + 1)
    if len(content) > _MOST_BYTES:
        what = f"it has more than {_MOST_BYTES >> 20} MiB, which no config has"
        raise ConfigError(where, what, "give a DeepSpeed JSON")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(where, f"it cannot be read ({error})", "give a readable UTF-8 file") from None


def from_mapping(config: Mapping[str, Any], name: str = "config") -> Source:
    """A config that is no file. Raises ConfigError if a value in it is none of JSON's."""
    source = Source(name, "", dict(config), None)
    refuse_unusable(source)
    return replace(source, config=copy.deepcopy(source.config))


def from_text(text: str, name: str = "config") -> Source:
    """The config in ``text``."""
    if not text.strip("\ufeff \t\r\n"):
        raise ConfigError(name, "the file is empty", 'write a config, {"train_batch_size": 8} at the least')
    config: Any = _with_constants(text)
    try:
        config = hjson.loads(text, object_pairs_hook=dict) if config is None else config
    except (ValueError, OverflowError, IndexError, RecursionError) as error:
        # hjson's own error is a ValueError, and so is Python's about a number of too many digits.
        raise _syntax_error(text, name, error) from None
    if not isinstance(config, dict):
        raise ConfigError(name, f"it holds {show(config)}, not an object", "write {...}")
    source = Source(name, text, config, _document(text, config))
    refuse_unusable(source)
    return source


def refuse_unusable(source: Source) -> None:
    """Raise a ConfigError for the first value that no program can use; of NaN and Infinity their keys say."""
    refuse(source, unusable(source.config, infinite=lambda _value, _name: True))


def refuse(source: Source, problems: Iterable[Unusable]) -> None:
    """Raise the first of ``problems`` as a ConfigError on its line, or return if there are none."""
    for problem in problems:
        line = source.place(problem.path)
        where = _where(source.name, *line) if line else source.name
        raise ConfigError(f"{where}: {problem.key}".removesuffix(": "), problem.what, problem.fix)


def _document(text: str, config: dict[str, Any]) -> Document | None:
    """The text with offsets, if both parsers read the same values."""
    try:
        document = parse(text)
    except (PositionError, RecursionError):
        return None
    return document if same(document.root.plain(), config) else None


def same(one: object, other: object) -> bool:
    """Equality that tells 1 from true and from 1.0, and in which NaN is NaN.

    >>> same({"a": [1]}, {"a": [True]}), same(math.nan, math.nan)
    (False, True)
    """
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and (one == other or (one != one and other != other))  # noqa: PLR0124


def _where(name: str, line: int, column: int) -> str:
    """A place in a file, or in the only config there is."""
    return f"{name}, line {line}, column {column}".removeprefix(", ")


def _syntax_error(text: str, name: str, error: Exception) -> ConfigError:
    """The error where the text stops being HJSON, in words that say what to look for."""
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
    if constant := _CONSTANT.search(text):
        line = text.count("\n", 0, constant.start(1)) + 1
        message += f"; {constant[1]} on line {line} is no number of JSON's"
    line = text.count("\n", 0, offset) + 1
    column = offset - (text.rfind("\n", 0, offset) + 1) + 1
    lines = text.splitlines()
    shown = f": {lines[line - 1].strip()[:60]}" if line <= len(lines) else ""
    return ConfigError(_where(name, line, column), f"not JSON ({message}){shown}", "mend the syntax there")


def find(root: Node, path: Path) -> tuple[Node, Member | None]:
    """The member at ``path`` (of a key written twice the last, which counts), and what holds it or would."""
    owner, found = root, None
    for i, part in enumerate(path):
        owner = owner if found is None else found.node
        if owner.kind == "list":
            found = owner.members[part] if isinstance(part, int) and part < len(owner.members) else None
        else:
            found = next((member for member in reversed(owner.members) if member.key == part), None)
        if found is None and i + 1 < len(path):
            return owner, None
    return owner, found


def _twice(node: Node, path: Path) -> Iterator[tuple[Path, list[int]]]:
    counts = Counter(m.key for m in node.members if m.key is not None)
    for key, count in counts.items():
        if count > 1:
            yield (*path, key), [m.key_start for m in node.members if m.key == key]
    for i, member in enumerate(node.members):
        yield from _twice(member.node, (*path, i if member.key is None else member.key))
