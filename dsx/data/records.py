"""Records of chats and completions, from files or tables to checked examples.

A record that cannot be used is an error that names its file and line, or its row of a table. What is wrong
with a whole file is an error, too, but of another kind: no policy skips it.
"""

from __future__ import annotations

import csv
import json
from codecs import BOM_UTF8
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dsx.config.schema import DataConfig
from dsx.data.files import LocalFiles, Tables, not_csv, not_utf8, open_source
from dsx.data.units import Stamp, Unit
from dsx.errors import DataError
from dsx.terminal import shortened

Message = dict[str, Any]

_FIX = "mend or remove it, or skip such records (dsx.data.bad_records)"
_ROLES = ("system", "developer", "user", "assistant", "tool")
_SHAREGPT = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "observation": "tool",
    "function_call": "assistant",
}
_USUAL = {
    "messages": ("messages", "conversations", "conversation"),
    "system": ("system",),
    "tools": ("tools",),
    "prompt": ("prompt", "question"),
    "completion": ("completion", "response", "answer"),
    "chat_template_kwargs": ("chat_template_kwargs",),
}

_BESIDE = ("image", "images", "video", "videos", "audio", "audios")
"""Columns in which other formats have what turns only mark."""


class BadRecordError(DataError):
    """A record that cannot be used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """What is made into tokens: messages, or a prompt and its completion as text.

    Args:
        where: File and line, or table and row.
        messages: Turns, each with role and content as chat templates take them.
        prompt: The first so many messages are a prompt; None in a chat.
        trained: For each message of a chat, whether it may be trained on.
        tools: Functions that the assistant can call, as JSON schemas.
        texts: Prompt and completion, if they are no messages.
        kwargs: What the template is told besides, above what ``dsx.data.chat_template_kwargs`` says.
    """

    where: str
    messages: tuple[Message, ...] = ()
    prompt: int | None = None
    trained: tuple[bool, ...] = ()
    tools: list[Any] | None = None
    texts: tuple[str, str] | None = None
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Row:
    """A record as it was read: an object, or what is wrong with it; pictures are looked for in its folder."""

    where: str
    cells: Mapping[str, Any] | None
    problem: str = ""
    folder: Path = Path()


def examples(data: DataConfig) -> Iterator[Example | BadRecordError]:
    """The records of the one source of ``data``, checked; those that cannot be used as errors."""
    return (_example(data, row) for row in _rows(data))


def example(data: DataConfig, where: str, text: str) -> Example | BadRecordError:
    """A record of a stream's unit, checked, or as an error."""
    return _example(data, _line(where, text.encode(errors="surrogateescape")))


def _example(data: DataConfig, row: _Row) -> Example | BadRecordError:
    if row.cells is None:
        return BadRecordError(row.where, row.problem, _FIX)
    read = _completion if data.format == "completion" else _chat
    try:
        return read(_Record(row.where, row.cells, data.columns, row.folder if data.pictures else None))
    except BadRecordError as error:
        return error


def open_records(data: DataConfig) -> Tables:
    """The tables of ``data.source``. Raises DataError for what has no records."""
    source = open_source(data)
    if not isinstance(source, Tables):
        raise DataError(
            f'dsx.data.format = "{data.format}"',
            f'source "{data.source}" is running text, which has no records',
            "name files of jsonl, json, parquet or csv, or a hub data set",
        )
    return source


@dataclass(frozen=True, slots=True)
class _CsvRecords:
    """The records of a CSV file as a unit of a stream, all cells text; positions are rows, read again."""

    name: str
    stamp: Stamp

    def documents(self, start: int | None) -> Iterator[tuple[int, str]]:
        """See :class:`dsx.data.units.Unit`; a row with other cells than the first line names is a list."""
        self.stamp.check()
        for number, row in enumerate(_file_rows(self.stamp.path)):
            if number >= (start or 0):
                yield number, json.dumps([row.problem] if row.cells is None else row.cells)
        self.stamp.check()

    def place(self, at: int) -> str:
        return f"{self.stamp.path}, row {at + 1}"


def record_units(data: DataConfig) -> tuple[Unit, ...]:
    """Parts of the records of ``data.source`` for a stream. Raises DataError as :func:`open_records` does."""
    tables = open_records(data)
    source = tables.source
    if not isinstance(source, LocalFiles) or source.builder != "csv":
        return tables.units(data.lanes)
    files = [(path.as_posix(), Stamp.of(source.root / path)) for path in source.paths]
    return tuple(_CsvRecords(f"{name}:{stamp.size_bytes}", stamp) for name, stamp in files)


def _rows(data: DataConfig) -> Iterator[_Row]:
    source = open_records(data)
    if isinstance(source.source, LocalFiles) and source.source.builder in ("json", "csv"):
        for path in source.source.paths:
            file = source.source.root / path
            yield from (replace(row, folder=file.parent) for row in _file_rows(file))
        return
    for where, cells in source.rows():
        yield _Row(where, cells)


def _file_rows(path: Path) -> Iterator[_Row]:
    read = {".csv": _csv_rows, ".json": _json_rows}.get(path.suffix, _line_rows)
    try:
        yield from read(path)
    except OSError as error:
        raise DataError(str(path), f"cannot be read ({error.strerror})", "check the file") from error


def _line_rows(path: Path) -> Iterator[_Row]:
    """A line each. Read as bytes, so that a line that is not UTF-8 spoils no other."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            record = line.removeprefix(BOM_UTF8) if number == 1 else line
            if record.strip():
                yield _line(f"{path}, line {number}", record)


def _line(where: str, line: bytes) -> _Row:
    try:
        return _object(where, json.loads(line.decode()), "line")
    except UnicodeDecodeError as error:
        what = f"is not UTF-8 text ({error.reason}: byte 0x{line[error.start]:02x} at {error.start})"
        return _Row(where, None, what)
    except (ValueError, RecursionError) as error:
        return _Row(where, None, f"is no line of JSON ({error})")


def _json_rows(path: Path) -> Iterator[_Row]:
    """A list of objects; or lines, as some write into ``.json``, too."""
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        if isinstance(error, json.JSONDecodeError) and error.msg == "Extra data":
            yield from _line_rows(path)
            return
        fix = "mend the file, or write a line of JSON for each record (.jsonl)"
        raise DataError(str(path), f"is no JSON ({error})", fix) from error
    if not isinstance(content, list):
        what = f"holds {_kind(content)} at the top, not a list of records"
        raise DataError(str(path), what, "write a list of objects, or a line of JSON for each (.jsonl)")
    for number, value in enumerate(content, 1):
        yield _object(f"{path}, record {number}", value, "record")


def _csv_rows(path: Path) -> Iterator[_Row]:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file)
            for cells in reader:
                where, names = f"{path}, line {reader.line_num}", reader.fieldnames or ()
                given = sum(cell is not None for name, cell in cells.items() if name is not None)
                count = given + len(cells.get(None, ()))
                if count != len(names):
                    yield _Row(where, None, f"has {count} cells, the first line names {len(names)} columns")
                else:
                    yield _Row(where, cells)
    except UnicodeDecodeError as error:
        raise not_utf8(path) or DataError(str(path), f"is not UTF-8 text ({error})", "convert it") from error
    except csv.Error as error:
        raise not_csv(path, error, reader.line_num) from error


def _object(where: str, value: Any, kind: str) -> _Row:
    if isinstance(value, dict):
        return _Row(where, value)
    return _Row(where, None, f"the {kind} holds {_kind(value)}, not an object")


class _Record:
    """A record under its column names; whatever is wrong is raised with its place."""

    def __init__(
        self, where: str, cells: Mapping[str, Any], columns: Mapping[Any, str], folder: Path | None = None
    ) -> None:
        self.where, self._cells, self._columns, self._folder = where, cells, columns, folder

    def bad(self, what: str, fix: str = _FIX) -> BadRecordError:
        return BadRecordError(self.where, what, fix)

    def column(self, role: str) -> str | None:
        """The name of the column, None if the record has none of the usual ones. Raises BadRecordError."""
        named = self._columns.get(role)
        if named is not None and named not in self._cells:
            raise self.bad(f'has no "{named}" (dsx.data.columns.{role}); it has {self._names()}')
        return next((name for name in self._usual(role) if self._cells.get(name) is not None), None)

    def _usual(self, role: str) -> tuple[str, ...]:
        return (self._columns[role],) if role in self._columns else _USUAL[role]

    def cell(self, role: str) -> tuple[str, Any]:
        """The column's name and the value; lists and objects that are written as JSON text are parsed."""
        name = self.column(role)
        if name is None:
            raise self.bad(
                f"has no {' or '.join(self._usual(role))}; it has {self._names()}",
                f"name the column in dsx.data.columns.{role}, {self._other(role)}or {_FIX}",
            )
        return name, self._cells[name]

    def _other(self, role: str) -> str:
        """What to set if records look like prompts with completions."""
        pair = {"instruction", "prompt", "question", "input"} & self._cells.keys()
        answer = {"output", "completion", "response", "answer"} & self._cells.keys()
        if role != "messages" or not pair or not answer:
            return ""
        return f'set dsx.data.format to "completion" with columns for {min(pair)} and {min(answer)}, '

    def _names(self) -> str:
        return shortened(", ".join(map(str, self._cells)) or "nothing", 300)

    def text(self, value: Any, what: str) -> str:
        """A string that can be encoded."""
        if not isinstance(value, str):
            raise self.bad(f"{what} is {_kind(value)}, not text")
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise self.bad(f"{what} holds half of a surrogate pair at character {error.start}") from error
        return value

    def parsed(self, value: Any, what: str) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return json.loads(value)
        except (ValueError, RecursionError) as error:
            raise self.bad(f"{what} is text that is no JSON ({error})") from error

    def told(self) -> dict[str, Any]:
        """What the template is told besides the messages: ``tools`` and ``kwargs`` of an example."""
        tools, kwargs = self._parsed_cell("tools"), self._parsed_cell("chat_template_kwargs")
        if tools is not None and (
            not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools)
        ):
            raise self.bad(f"tools is {_kind(tools)}, not a list of objects (JSON schemas of functions)")
        if not isinstance(kwargs or {}, dict):
            raise self.bad(f"chat_template_kwargs is {_kind(kwargs)}, not an object")
        return {"tools": tools or None, "kwargs": kwargs or {}}

    def _parsed_cell(self, role: str) -> Any:
        name = self.column(role)
        # An empty text is a cell of CSV.
        return None if name is None or self._cells[name] == "" else self.parsed(self._cells[name], name)

    def messages(self, name: str, value: Any) -> tuple[list[Message], list[bool]]:
        """Turns as chat templates take them, and whether each may be trained on."""
        turns = self.parsed(value, name)
        if not isinstance(turns, list):
            raise self.bad(f"{name} is {_kind(turns)}, not a list of turns")
        if not turns:
            raise self.bad(f"{name} is empty")
        done = [self._turn(number, turn) for number, turn in enumerate(turns, 1)]
        return [message for message, _ in done], [trained for _, trained in done]

    def _turn(self, number: int, turn: Any) -> tuple[Message, bool]:
        what = f"turn {number}"
        if not isinstance(turn, dict):
            raise self.bad(f"{what} is {_kind(turn)}, not an object")
        turn = {key: value for key, value in turn.items() if value is not None}
        weight = turn.pop("weight", 1)  # of OpenAI's format for fine-tuning
        if weight not in (0, 1):
            raise self.bad(f"{what} has weight {weight!r}, which is 0 or 1")
        if "role" not in turn and "from" in turn:
            turn = self._from_sharegpt(what, turn)
        if "role" not in turn:
            raise self.bad(f"{what} has no role; it has {', '.join(turn) or 'nothing'}")
        if turn["role"] not in _ROLES:
            role = shortened(json.dumps(turn["role"], default=str), 60)
            raise self.bad(f"{what} has the role {role}, which is none of {', '.join(_ROLES)}")
        is_assistant = turn["role"] == "assistant"
        if "tool_calls" in turn:
            turn["tool_calls"] = self._tool_calls(what, turn["tool_calls"])
        if "content" in turn:
            turn["content"] = self._content(what, turn["content"], None if is_assistant else self._folder)
        elif not (is_assistant and turn.get("tool_calls")):
            raise self.bad(f"{what} ({turn['role']}) has no content; it has {', '.join(turn)}")
        if is_assistant and not turn.get("content") and not turn.get("tool_calls"):
            raise self.bad(f"{what} (assistant) is empty: there is nothing to learn from it")
        return turn, is_assistant and bool(weight)

    def _from_sharegpt(self, what: str, turn: Message) -> Message:
        if "value" not in turn:
            raise self.bad(f'{what} has "from", but no "value"')
        role = turn["from"]
        rest = {key: value for key, value in turn.items() if key not in ("from", "value")}
        if role == "function_call":
            return {"role": "assistant", **rest, "tool_calls": [self.parsed(turn["value"], what)]}
        known = role in _SHAREGPT if isinstance(role, str) else False
        return {"role": _SHAREGPT[role] if known else role, **rest, "content": turn["value"]}

    def _content(self, what: str, content: Any, folder: Path | None) -> str | list[Message]:
        """Text, or its parts if pictures of a folder are read and some are there."""
        if not isinstance(content, list):
            return self.text(content, f"content of {what}")
        parts = [self._part(what, part, folder) for part in content]
        if any(part["type"] == "image" for part in parts):
            return parts
        return "".join(part["text"] for part in parts)

    def _part(self, what: str, part: Any, folder: Path | None) -> Message:
        if not isinstance(part, dict):
            raise self.bad(f"a part of the content of {what} is {_kind(part)}, not an object")
        kind = part.get("type")
        if kind == "text":
            return {"type": "text", "text": self.text(part.get("text"), f"content of {what}")}
        if kind != "image" or folder is None:
            named = shortened(str(kind), 60)
            said = f"content of {what} has a part of type {named}; "
            if kind == "image" and self._folder is None:
                raise self.bad(f"{said}dsx.data.pictures, which reads it, is false")
            reads = "text alone" if self._folder is None or kind == "image" else "text and image alone"
            raise self.bad(f"{said}dsx trains on {reads}")
        from dsx.data.pictures import file_of  # here: other chats need nothing of it

        try:
            path = file_of(part, folder)
        except OSError as error:
            raise self.bad(f"an image of {what}: {error}") from error
        if path is None:
            raise self.bad(f'an image of {what} has no path: {{"type": "image", "path": "a file"}}')
        return {"type": "image", "path": path}

    def require_pictures(self, messages: Sequence[Message]) -> None:
        """Refuse pictures that stand beside turns which show none: they would not be seen."""
        beside = [name for name in _BESIDE if self._cells.get(name)]
        if self._folder is not None and beside and not pictures_in(messages):
            what = (
                f'"{beside[0]}" stands beside its turns, of which none shows a picture: it would not be seen'
            )
            raise self.bad(what, 'show it in a turn: {"type": "image", "path": "a file"}')

    def _tool_calls(self, what: str, calls: Any) -> list[Any]:
        if not isinstance(calls, list):
            raise self.bad(f"tool_calls of {what} is {_kind(calls)}, not a list")
        return [self._tool_call(f"tool call {n} of {what}", call) for n, call in enumerate(calls, 1)]

    def _tool_call(self, what: str, call: Any) -> Message:
        """A call with its arguments as an object, which is what chat templates write as JSON."""
        function = call.get("function", call) if isinstance(call, dict) else call
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise self.bad(f"{what} names no function")
        arguments = self.parsed(function.get("arguments", {}), f"arguments of {what}")
        if not isinstance(arguments, dict):
            raise self.bad(f"arguments of {what} are {_kind(arguments)}, not an object")
        rest = {key: value for key, value in call.items() if key != "function" and call is not function}
        return {"type": "function", **rest, "function": {**function, "arguments": arguments}}


def pictures_in(messages: Iterable[Message]) -> list[str]:
    """The paths of a chat's pictures, in their order."""
    contents = (turn["content"] for turn in messages if isinstance(turn.get("content"), list))
    return [part["path"] for parts in contents for part in parts if part["type"] == "image"]


def _chat(record: _Record) -> Example:
    messages, trained = record.messages(*record.cell("messages"))
    record.require_pictures(messages)
    system = record.column("system")
    text = record.text(record.cell("system")[1], system) if system is not None else ""
    if text and messages[0]["role"] != "system":
        messages, trained = [{"role": "system", "content": text}, *messages], [False, *trained]
    elif text and messages[0]["content"] != text:
        raise record.bad(f"{system} says otherwise than the first turn, which is the system's, too")
    return Example(where=record.where, messages=tuple(messages), trained=tuple(trained), **record.told())


def _completion(record: _Record) -> Example:
    (name, prompt), (other, completion) = record.cell("prompt"), record.cell("completion")
    if isinstance(prompt, str) and isinstance(completion, str):
        texts = record.text(prompt, name), record.text(completion, other)
        if not completion:
            raise record.bad(f"{other} is empty: there is nothing to learn from it")
        return Example(where=record.where, texts=texts)
    for one, value, its in ((name, prompt, other), (other, completion, name)):
        if not isinstance(value, list):
            raise record.bad(f"{one} is {_kind(value)}, {its} is not: both are text, or both messages")
    messages = record.messages(name, prompt)[0]
    both = (*messages, *record.messages(other, completion)[0])
    return Example(where=record.where, messages=both, prompt=len(messages), **record.told())


_KINDS: dict[type, str] = {
    dict: "an object",
    list: "a list",
    str: "text",
    bool: "true or false",
    int: "a number",
    float: "a number",
    type(None): "null",
}


def _kind(value: Any) -> str:
    return _KINDS.get(type(value), type(value).__name__)
