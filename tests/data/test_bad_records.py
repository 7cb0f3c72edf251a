"""Data that cannot be used: one message each, which names file and line, and what a skip counts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from chat_tokenizers import published, save_tokenizer

from dsx.config.schema import DataConfig
from dsx.config.sources import missing
from dsx.data.text import Text, prepare_text, report
from dsx.errors import DataError

USER, ANSWER = {"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because."}
GOOD = json.dumps({"messages": [USER, ANSWER]})


def chat(*turns: object, **more: object) -> str:
    return json.dumps({"messages": list(turns), **more})


def call(**function: object) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]}


# The second of four lines, and what is said of it.
BAD_CHATS = {
    "half a line": ('{"messages": [', "is no line of JSON"),
    "two objects": (GOOD + GOOD, "is no line of JSON (Extra data"),
    "nested too deep": ("[" * 200_000, "is no line of JSON"),
    "not an object": ("[1, 2]", "the line holds a list, not an object"),
    "a string": ('"hello"', "the line holds text, not an object"),
    "latin1": (b'{"messages": "\xe9"}', "is not UTF-8 text (invalid continuation byte: byte 0xe9 at 14)"),
    "no messages": ('{"text": "hello"}', "has no messages or conversations or conversation; it has text"),
    "null": ('{"messages": null}', "has no messages or conversations"),
    "messages are text": ('{"messages": "hello"}', "messages is text that is no JSON"),
    "messages are an object": (
        '{"messages": {"role": "user"}}',
        "messages is an object, not a list of turns",
    ),
    "no turns": (chat(), "messages is empty"),
    "a turn is text": (chat(USER, "Because."), "turn 2 is text, not an object"),
    "no role": (chat(USER, {"content": "Because."}), "turn 2 has no role; it has content"),
    "unknown role": (
        chat(USER, {"role": "bot", "content": "x"}),
        'turn 2 has the role "bot", which is none of',
    ),
    "role is a number": (chat(USER, {"role": 1, "content": "x"}), "turn 2 has the role 1, which is none of"),
    "no content": (chat({"role": "user"}, ANSWER), "turn 1 (user) has no content; it has role"),
    "content is a number": (chat(USER, {**ANSWER, "content": 4}), "content of turn 2 is a number, not text"),
    "content is null": (chat({**USER, "content": None}, ANSWER), "turn 1 (user) has no content"),
    "empty answer": (chat(USER, {**ANSWER, "content": ""}), "turn 2 (assistant) is empty"),
    "picture": (
        chat({**USER, "content": [{"type": "image_url", "image_url": {"url": "a.png"}}]}, ANSWER),
        "content of turn 1 has a part of type image_url; dsx trains on text alone",
    ),
    "part is text": (
        chat({**USER, "content": ["Why?"]}, ANSWER),
        "a part of the content of turn 1 is text, not",
    ),
    "part without text": (chat({**USER, "content": [{"type": "text"}]}, ANSWER), "content of turn 1 is null"),
    "surrogate": (r'{"messages": [{"role": "user", "content": "\ud800"}]}', "half of a surrogate pair"),
    "no answer": (chat(USER), "it has no turn of the assistant that could be trained on"),
    "answers of weight 0": (chat(USER, {**ANSWER, "weight": 0}), "no turn of the assistant that could be"),
    "weight 2": (chat(USER, {**ANSWER, "weight": 2}), "turn 2 has weight 2, which is 0 or 1"),
    "from without value": ('{"conversations": [{"from": "human"}]}', 'turn 1 has "from", but no "value"'),
    "unknown from": ('{"conversations": [{"from": "me", "value": "x"}]}', 'turn 1 has the role "me"'),
    "tool_calls is text": (
        chat(USER, {**ANSWER, "tool_calls": "f()"}),
        "tool_calls of turn 2 is text, not a",
    ),
    "nameless call": (chat(USER, call(arguments={})), "tool call 1 of turn 2 names no function"),
    "arguments": (
        chat(USER, call(name="f", arguments="{")),
        "arguments of tool call 1 of turn 2 is text that",
    ),
    "arguments are a list": (chat(USER, call(name="f", arguments=[])), "are a list, not an object"),
    "tools": (chat(USER, ANSWER, tools="f"), "tools is text that is no JSON"),
    "two systems": (
        chat({"role": "system", "content": "x"}, USER, ANSWER, system="y"),
        "system says otherwise than the first turn, which is the system's, too",
    ),
    "tools are names": (chat(USER, ANSWER, tools=["f"]), "tools is a list, not a list of objects"),
    "what the template refuses": (
        chat({"role": "system", "content": "x"}, USER, ANSWER),
        "the chat template refuses it (TemplateError: System role not supported)",
    ),
}
BAD_COMPLETIONS = {
    "no completion": ('{"prompt": "a"}', "has no completion or response or answer; it has prompt"),
    "no prompt": ('{"completion": "a"}', "has no prompt or question; it has completion"),
    "prompt is a number": ('{"prompt": 1, "completion": "b"}', "prompt is a number, completion is not"),
    "text and messages": (
        json.dumps({"prompt": "a", "completion": [ANSWER]}),
        "prompt is text, completion is",
    ),
    "empty completion": ('{"prompt": "a", "completion": ""}', "completion is empty"),
    "empty messages": (json.dumps({"prompt": [], "completion": [ANSWER]}), "prompt is empty"),
}
CASES = [("chat", name, *case) for name, case in BAD_CHATS.items()]
CASES += [("completion", name, *case) for name, case in BAD_COMPLETIONS.items()]
GOOD_LINES = {"chat": GOOD, "completion": '{"prompt": "Why?", "completion": " Because."}'}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(folder, template=published("gemma"))
    return str(folder)


def prepared(source: Path, tokenizer: str, form: str = "chat", **keys: Any) -> Text:
    data = DataConfig(
        source=str(source), format=form, tokenizer=tokenizer, sequence_length=32, held_out=0, **keys
    )
    return Text.open(prepare_text(data, source.parent / "cache", held_out_tokens=1), data)


@pytest.mark.parametrize(("form", "line", "said"), [(c[0], *c[2:]) for c in CASES], ids=[c[1] for c in CASES])
def test_a_bad_line(tmp_path: Path, tokenizer: str, form: str, line: str | bytes, said: str) -> None:
    good, bad = GOOD_LINES[form].encode(), line if isinstance(line, bytes) else line.encode()
    path = tmp_path / "data.jsonl"
    path.write_bytes(b"\n".join([good, bad, b"", good]) + b"\n")
    with pytest.raises(DataError) as refused:
        prepared(path, tokenizer, form)
    assert str(refused.value).startswith(f"{path}, line 2: ")
    assert said in refused.value.what
    assert len(refused.value.fix) > 10
    assert len(str(refused.value)) < 1000
    corpus = prepared(path, tokenizer, form, bad_records="skip").parts[0].corpus
    assert (corpus.info.train.documents, corpus.info.bad_records) == (2, 1)
    assert dict(report(corpus))["skipped"].startswith(f"1 bad record: {path}, line 2: ")


def test_nothing_but_bad_records_is_an_error(tmp_path: Path, tokenizer: str) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text("{\n[]\n")
    with pytest.raises(DataError, match=r"none of its 2 records can be used; .*jsonl, line 1: is no line of"):
        prepared(path, tokenizer, bad_records="skip")


def test_a_chat_that_the_assistant_begins(tmp_path: Path) -> None:
    """Nothing is in front of its turn, unless the template marks it."""
    save_tokenizer(tmp_path / "tokenizer", template=published("llama3"))
    path = tmp_path / "data.jsonl"
    path.write_text(chat(ANSWER, USER))
    with pytest.raises(DataError, match=r"line 1: the assistant's turn is the first, and its chat template"):
        prepared(path, str(tmp_path / "tokenizer"))
    marked = published("llama3_training")
    assert len(prepared(path, str(tmp_path / "tokenizer"), chat_template=marked).parts[0].corpus.train) == 1


def written(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


BAD_FILES = {
    "empty.jsonl": ("", "it holds no text"),
    "broken.json": ('[{"messages": ', "is no JSON"),
    "object.json": ('{"messages": []}', "holds an object at the top, not a list of records"),
    "latin1.json": (b'["\xe9"]', "is no JSON"),
    "latin1.csv": (
        b"prompt,completion\na,\xe9\n",
        "is not UTF-8 text (invalid continuation byte: byte 0xe9), line 2",
    ),
    "wide.csv": (
        b"prompt,completion\n" + b'"' + b"x" * 140_000 + b'",b\n',
        "cannot be read as CSV (field larger than field limit (131072)), line 2",
    ),
    "text.txt": ("hello", "is running text, which has no records"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_file_is_never_skipped(tmp_path: Path, tokenizer: str, name: str) -> None:
    content, said = BAD_FILES[name]
    form = "completion" if name.endswith(".csv") else "chat"
    with pytest.raises(DataError) as refused:
        prepared(written(tmp_path / name, content), tokenizer, form, bad_records="skip")
    assert name in refused.value.where + refused.value.what
    assert said in refused.value.what


def test_rows_of_other_files(tmp_path: Path, tokenizer: str) -> None:
    """Lists of JSON by number, csv by line, parquet by row; and a good one of each is read alike."""
    lists = written(tmp_path / "a.json", json.dumps([json.loads(GOOD), {"messages": 3}]))
    with pytest.raises(DataError, match=r"a.json, record 2: messages is a number"):
        prepared(lists, tokenizer)
    rows = written(tmp_path / "b.csv", 'prompt,completion\n"two\nlines",yes\nonly\n')
    with pytest.raises(DataError, match=r"b.csv, line 4: has 1 cells, the first line names 2 columns"):
        prepared(rows, tokenizer, "completion")
    table = pa.table({"messages": [[USER, ANSWER], [USER, ANSWER], [{"role": "user", "content": None}]]})
    pq.write_table(table, tmp_path / "c.parquet")
    with pytest.raises(DataError, match=r"c.parquet, row 3: turn 1 \(user\) has no content"):
        prepared(tmp_path / "c.parquet", tokenizer)
    cell = '"' + json.dumps([USER, ANSWER]).replace('"', '""') + '",\n'
    texts = [
        prepared(written(tmp_path / "d.jsonl", f"{GOOD}\n{GOOD}"), tokenizer),
        prepared(written(tmp_path / "e.json", f"{GOOD}\n{GOOD}\n"), tokenizer),
        prepared(written(tmp_path / "f.json", f"[{GOOD}, {GOOD}]"), tokenizer),
        prepared(written(tmp_path / "g.csv", "messages,tools\n" + 2 * cell), tokenizer),
        prepared(tmp_path / "c.parquet", tokenizer, bad_records="skip"),
    ]
    assert [text.parts[0].corpus.info.train.documents for text in texts] == [2] * 5
    assert len({text.digest for text in texts}) == 1


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"format": "chat", "chat_date": "2026-02-30"}, "chat_date"),
        ({"format": "chat", "text_column": "x"}, 'format "chat" reads no text_column'),
        (
            {"format": "chat", "columns": {"prompt": "x"}},
            'columns has "prompt", which format "chat" does not',
        ),
        ({"columns": {"messages": "x"}}, 'columns has "messages", which format "text" does not'),
        ({"train_on": "last"}, 'train_on has no meaning for format "text"'),
        ({"bad_records": "skip"}, 'bad_records has no meaning for format "text"'),
        ({"format": "chats"}, "format"),
    ],
)
def test_keys_that_do_not_go_together(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(Exception, match=said):
        DataConfig(source="a.jsonl", sequence_length=8, **keys)


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{% for m in messages %}", "is no template (line 1"),
        ("missing.jinja", "cannot be read (No such file or directory)"),
        (None, "it has no chat template"),
    ],
)
def test_templates_that_are_none(tmp_path: Path, template: str | None, said: str) -> None:
    save_tokenizer(tmp_path / "tokenizer")
    path = written(tmp_path / "a.jsonl", GOOD)
    with pytest.raises(DataError) as refused:
        prepared(path, str(tmp_path / "tokenizer"), chat_template=template, bad_records="skip")
    assert said in refused.value.what


def test_a_template_that_is_not_there_is_found_by_check(tmp_path: Path) -> None:
    for template, found in ((str(tmp_path / "absent.jinja"), 1), ("{{ messages }}", 0), (None, 0)):
        data = DataConfig(source=str(tmp_path), format="chat", sequence_length=8, chat_template=template)
        assert len(list(missing(data))) == found
