"""Where each key and value of an HJSON text is: a parser that keeps offsets, for messages and edits.

It reads what the ``hjson`` package reads, with which DeepSpeed loads its configs, and gives the same values
(tests compare the two). Strict JSON is HJSON too.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn

from dsx.config.doctor.unusable import BEYOND, is_finite

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
# White space behind a word included.
_LONGEST_WORD = 1000
# Beyond it hjson leaves a whole number that was written with a point or exponent a float.
_WHOLE_FLOAT_LIMIT = 1e10


class PositionError(ValueError):
    """The text is not HJSON; ``offset`` says where."""

    def __init__(self, message: str, offset: int) -> None:
        super().__init__(message)
        self.offset = offset


@dataclass(slots=True)
class Member:
    """``key: value`` in an object; offsets into the text, ends exclusive. Of a list item, the key is None."""

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
        """The value as Python has it; of keys written twice, the last."""
        if self.kind == "object":
            return {member.key: member.node.plain() for member in self.members}
        return [member.node.plain() for member in self.members] if self.kind == "list" else self.value


@dataclass(slots=True)
class Document:
    """A parsed text: the top value, and what in it is no strict JSON."""

    root: Node
    relaxed: list[tuple[Relaxed, int]]


def parse(text: str) -> Document:
    """``text`` with offsets. Raises PositionError."""
    return _Parser(text).document()


class _Parser:
    def __init__(self, text: str) -> None:
        self.text = text
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
        """Skip white space and comments."""
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
            if token in _WORDS:
                return self.trim(start, _WORDS[token])
            # By its end in the text: a copy of a long line at each of its commas would take for ever.
            if number := _NUMBER.fullmatch(self.text, start, end):
                return self.trim(start, self.number(number, start))
        # Nothing of these up to the end of the line.
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


def _number(found: re.Match[str]) -> int | float:
    whole, fraction, exponent = found.groups()
    if not fraction and not exponent:
        return int(whole)
    number = float(found[0])
    is_short = abs(number) < _WHOLE_FLOAT_LIMIT and number == int(number)
    return int(number) if is_short else number
