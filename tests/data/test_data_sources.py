"""Documents from every kind of source, and a clear error for what cannot be read."""

from __future__ import annotations

import http.server
import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from huggingface_hub import constants

from dsx.config.schema import DataConfig
from dsx.data.corpus import Corpus, CorpusInfo, prepare
from dsx.data.files import documents, open_source, reachable
from dsx.data.records import Example, examples
from dsx.data.text import report
from dsx.errors import DataError

ROWS = ["first", "zweites, mit Komma", "三番目\nline two", "last"]


def config(source: object, **keys: object) -> DataConfig:
    return DataConfig(source=str(source), tokenizer="bytes", sequence_length=8, **keys)


def read(source: object, **keys: object) -> list[str]:
    return list(documents(config(source, **keys)))


def refused(source: object, **keys: object) -> str:
    with pytest.raises(DataError) as error:
        read(source, **keys)
    return str(error.value)


def write_jsonl(path: Path, rows: list[str], column: str = "text") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({column: row, "n": i}) + "\n" for i, row in enumerate(rows)))


def test_standard_library_is_python_without_tests() -> None:
    source = open_source(config("python-stdlib"))
    texts = list(source.documents())
    assert 400 < len(texts) < 1500
    assert Path(json.__file__).read_text() in texts
    assert sum(map(len, texts)) > 8_000_000
    assert Path(pytest.__file__).read_text() not in texts
    assert not any({"test", "tests", "site-packages"} & set(path.parts) for path in source.paths)
    assert source.identity() == open_source(config("python-stdlib")).identity()


def test_standard_library_compiles() -> None:
    for text in list(documents(config("python-stdlib", max_bytes=300_000))):
        compile(text, "stdlib", "exec", dont_inherit=True)


@pytest.mark.parametrize("suffix", ["jsonl", "json", "csv", "parquet"])
def test_tables(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.{suffix}"
    table = datasets.Dataset.from_dict({"text": ROWS, "n": list(range(len(ROWS)))})
    {"jsonl": table.to_json, "json": table.to_json, "csv": table.to_csv, "parquet": table.to_parquet}[suffix](
        str(path)
    )
    assert read(path) == ROWS


def test_rows_without_text_are_left_out_and_counted(tmp_path: Path) -> None:
    pq.write_table(pa.table({"body": ["a", None, "", "b"]}), tmp_path / "a.parquet")
    (tmp_path / "b.jsonl").write_text('{"body": "a"}\n\n{"other": "c"}\n{"body": null}\n{"body": "b"}\n\n')
    for name in ("a.parquet", "b.jsonl"):
        found = config(tmp_path / name, text_column="body", held_out=0)
        folder = prepare(found, tmp_path / "cache")
        info = CorpusInfo.load(folder)
        assert (info.train.documents, info.train.text_bytes) == (2, 2)
        assert (info.bad_records, info.first_bad_record) == (2, 'row 2 has no "body"')
        assert report(Corpus.open(folder, sequence_length=1)) == [("left out", "2 rows without text")]


def test_several_table_files_in_order_with_an_empty_one(tmp_path: Path) -> None:
    for number in range(12):
        write_jsonl(tmp_path / f"{number:02}.jsonl", [] if number == 5 else [f"{number}a", f"{number}b"])
    want = [f"{number}{letter}" for number in range(12) if number != 5 for letter in "ab"]
    assert read(f"{tmp_path}/*.jsonl") == read(tmp_path) == want


def test_folder_of_a_hub_data_set(tmp_path: Path) -> None:
    """Splits by file name and a data set card, as a clone of a hub repository has them."""
    write_jsonl(tmp_path / "data/train-00000.jsonl", ["a", "b"])
    write_jsonl(tmp_path / "data/test-00000.jsonl", ["c"])
    (tmp_path / "README.md").write_text("# Card\n")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git/notes.txt").write_text("hidden")
    assert read(tmp_path) == ["a", "b"]
    assert read(tmp_path, split="test") == ["c"]
    assert "dsx.data.split" in refused(tmp_path, split="dev")


def test_many_text_files_are_documents_as_datasets_reads_them(tmp_path: Path) -> None:
    for number in range(70):
        folder = tmp_path / f"{number % 7}"
        folder.mkdir(exist_ok=True)
        (folder / f"{number:02}.txt").write_text(f"file {number}\n\nsecond paragraph é\n" * (1 + number % 3))
    files = sorted(tmp_path.rglob("*.txt"), key=Path.as_posix)
    theirs = datasets.load_dataset(
        "text", data_files=[str(file) for file in files], sample_by="document", split="train", streaming=True
    )
    assert read(tmp_path) == [row["text"] for row in theirs]


def test_one_text_file_is_cut_at_blank_lines_without_loss(tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    paragraphs = [f"Paragraph {i}. " + "word " * (i % 50) + "\r\n\r\n" for i in range(3000)]
    path.write_bytes("".join(paragraphs).encode())
    texts = read(path)
    assert "".join(texts).encode() == path.read_bytes()
    assert 60 < len(texts) <= 129
    assert all(text.endswith("\r\n\r\n") for text in texts)


def test_text_without_blank_lines_is_cut_at_lines(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    path.write_text("".join(f"line {i}\n" for i in range(20_000)))
    texts = read(path)
    assert "".join(texts) == path.read_text()
    assert 60 <= len(texts) <= 65
    assert all(text.endswith("\n") for text in texts)


def test_max_bytes_stops_early(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", ["é" * 10] * 100)  # 20 bytes each
    assert len(read(tmp_path / "a.jsonl", max_bytes=100)) == 5


def test_identity_follows_the_files(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one")
    before = open_source(config(path)).identity()
    assert open_source(config(path)).identity() == before
    path.write_text("three")
    assert open_source(config(path)).identity() != before


def test_files_that_are_missing(tmp_path: Path) -> None:
    for source in (tmp_path / "no.txt", "./no-such-folder", "no.jsonl", "~/no/such/file", "a b c", "x/y/z"):
        message = refused(source)
        assert str(source) in message
        assert "no such file" in message
    assert "no file of a known kind" in refused(f"{tmp_path}/*.txt")
    assert "no file of a known kind" in refused(tmp_path)


def test_files_of_a_wrong_kind(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_text("x")
    assert "a.bin is of no known kind" in refused(tmp_path / "a.bin")
    (tmp_path / "a.txt").write_text("x")
    write_jsonl(tmp_path / "a.jsonl", ["x"])
    message = refused(tmp_path)
    assert "several kinds: json, text" in message
    assert "*.jsonl" in message


@pytest.mark.parametrize("suffix", ["txt", "csv", "jsonl"])
def test_files_that_are_not_utf8(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.{suffix}"
    text = '{"text": "café"}\n' if suffix == "jsonl" else "text\ncafé\n"
    path.write_bytes(text.encode("latin1"))
    message = refused(path)
    assert str(path) in message
    assert "not UTF-8" in message
    assert "iconv" in message


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet"])
def test_columns_that_are_missing_or_no_text(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.{suffix}"
    table = datasets.Dataset.from_dict({"body": ["x"], "n": [3]})
    {"jsonl": table.to_json, "csv": table.to_csv, "parquet": table.to_parquet}[suffix](str(path))
    message = refused(path)
    assert 'dsx.data.text_column = "text"' in message
    assert "body, n" in message
    assert re.search("holds int(64| there), not text", refused(path, text_column="n"))


@pytest.mark.parametrize(
    ("name", "content"), [("a.parquet", b"nonsense"), ("a.json", b"{nonsense}\n"), ("a.csv", b'text\n"x\n')]
)
def test_files_that_are_broken(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    message = refused(tmp_path / name)
    assert f"{tmp_path / name}: cannot be read" in message


def test_lines_of_json_have_columns_of_their_own(tmp_path: Path) -> None:
    """datasets takes those of a file's beginning for all of it; Spark's writer leaves out what is null."""
    write_jsonl(tmp_path / "a.jsonl", ["x" * 700] * 20_000)
    with (tmp_path / "a.jsonl").open("a") as file:
        file.write('\n{"text": "late", "n": [1], "url": "u"}\n')
    (tmp_path / "b.jsonl").write_text('{"meta": 1}\n' * 2000 + '{"text": "other", "meta": {}}\n')
    assert read(f"{tmp_path}/*.jsonl")[19_999:] == ["x" * 700, "late", "other"]
    with (tmp_path / "a.jsonl").open("a") as file:
        file.write('{"text": "cut off')
    assert refused(f"{tmp_path}/*.jsonl").startswith(
        f"{tmp_path / 'a.jsonl'}, line 20003: is no line of JSON"
    )
    (tmp_path / "a.jsonl").write_text('{"text": "cut off\n{"text": "x"}\n')
    assert "a.jsonl, line 1: is no line of JSON" in refused(tmp_path / "a.jsonl")
    (tmp_path / "b.jsonl").write_text('{"text": "half of a pair: \\ud800"}\n')
    assert "b.jsonl, line 1: is no line of JSON in UTF-8" in refused(tmp_path / "b.jsonl")


@pytest.mark.parametrize("form", ["[{},{}]", "[\n {},\n {}\n]\n", "{}{}\n", "{}\r{}\r", "{}\n{}\n"])
def test_jsonl_that_is_no_lines_is_left_to_datasets(tmp_path: Path, form: str) -> None:
    rows = [json.dumps({"n": 1, "text": text}, indent=[None, 1][form == "{}\n{}\n"]) for text in "xé"]
    (tmp_path / "a.jsonl").write_text(form.format(*rows), newline="")
    units = open_source(config(tmp_path / "a.jsonl")).units(1)
    assert [text for unit in units for _, text in unit.documents(None)] == ["x", "é"]
    (tmp_path / "b.jsonl").write_text('{"text": "z"}\n')
    assert read(f"{tmp_path}/*.jsonl") == ["x", "é", "z"]


@pytest.mark.parametrize("suffix", ["parquet", "json"])
def test_a_folder_of_tables_with_other_columns_gets_a_fix_that_is_one(tmp_path: Path, suffix: str) -> None:
    for name in "nm":
        table = datasets.Dataset.from_dict({"text": [name], name: [1]})
        getattr(table, f"to_{suffix}")(tmp_path / f"{name}.{suffix}")
    fix = refused(tmp_path).partition(" Fix: name the files: ")[2]
    assert read(fix.split('"')[1]) == ["m", "n"]


@pytest.mark.parametrize("error", [OSError(28, "No space"), OSError("Not enough disk space. Needed: 9 GB")])
def test_a_full_disk_asks_for_room(monkeypatch: pytest.MonkeyPatch, error: OSError) -> None:
    monkeypatch.setattr(datasets, "load_dataset", Mock(side_effect=error))
    monkeypatch.setattr("dsx.data.files.reachable", lambda: True)
    said = r"(No space|Not enough disk space).*\)\. Fix: make room on that disk, or name another with HF_HOME"
    assert re.search(said, refused("me/mine"))


def test_folders_and_tables_that_datasets_alone_can_read_get_a_fix(tmp_path: Path) -> None:
    datasets.Dataset.from_dict({"text": ROWS}).save_to_disk(tmp_path / "saved")
    code = refused(tmp_path / "saved").partition("write a table: ")[2].partition(", for each split")[0]
    datasets.load_from_disk(code.split('"')[1]).to_parquet(tmp_path / code.split('"')[3])
    assert read(tmp_path / "text.parquet") == ROWS
    (tmp_path / "a.csv").write_text("id;text\n1;one\n")
    assert "with a comma between the cells" in refused(tmp_path / "a.csv")
    (tmp_path / "b.jsonl").write_text('{"data": [{"text": "one"}]}\n')
    assert '"chat"' not in refused(tmp_path / "b.jsonl")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"text,more\n" + b"a,b\n" * 3000 + b"a,b,c\na,b\n", "line 3002 has 3 cells, the first one 2"),
        (b'text\n"two\nlines"\n"open\n', "(unexpected end of data), line 4"),
        (b'text\na\n"b"c\nd,e\n', "line 4 has 2 cells, the first one 1"),
        (b"text\na\n\xff\n", "byte 0xff), line 3"),
    ],
)
def test_a_broken_csv_file_among_others_is_named_with_its_line(
    tmp_path: Path, content: bytes, said: str
) -> None:
    (tmp_path / "a.csv").write_text("text\nfine\n")
    (tmp_path / "b.csv").write_bytes(content)
    message = refused(tmp_path)
    assert message.startswith(f"{tmp_path / 'b.csv'}: ")
    assert said in message


def test_keys_that_would_do_nothing(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", ["x"])
    (tmp_path / "a.txt").write_text("x")
    assert 'dsx.data.split = "test"' in refused("python-stdlib", split="test")
    assert re.search('dsx.data.split.*the split "train" alone', refused(tmp_path / "a.jsonl", split="test"))
    assert 'dsx.data.name = "en"' in refused(tmp_path / "a.jsonl", name="en")
    for key in ("name", "split", "text_column"):
        assert f'dsx.data.{key} = "other"' in refused(tmp_path / "a.txt", **{key: "other"})


def test_hub_in_offline_mode() -> None:
    """conftest sets HF_HUB_OFFLINE: a hub name is answered at once."""
    start = time.monotonic()
    message = refused("wikitext", name="wikitext-2-raw-v1")
    assert time.monotonic() - start < 20  # a loaded machine; retries take 24
    assert 'dsx.data.source = "wikitext"' in message
    assert "cannot be reached" in message


def test_hub_without_network_fails_fast_and_restores_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Left alone, datasets would retry for 24 seconds."""
    with socket.socket() as taken:  # bound, not listening: connections to it are refused
        taken.bind(("127.0.0.1", 0))
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{taken.getsockname()[1]}")
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
        start = time.monotonic()
        assert "cannot be reached" in refused("some/dataset")
        assert time.monotonic() - start < 20  # a loaded machine; retries take 24
        assert not constants.HF_HUB_OFFLINE
        assert not datasets.config.HF_HUB_OFFLINE


@pytest.fixture
def answering() -> Iterator[str]:
    class NotFound(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_error(404)

        def log_message(self, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), NotFound) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_reachable(answering: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(constants, "ENDPOINT", answering)
    assert not reachable()  # offline mode
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    assert reachable()
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections and never answers
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        assert not reachable(timeout_seconds=0.2)


def test_hub_data_set_from_the_cache_of_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without network, what was downloaded before is found."""
    write_jsonl(tmp_path / "a.jsonl", ROWS)
    cache = tmp_path / "cache"
    datasets.load_dataset("json", data_files=str(tmp_path / "a.jsonl"), cache_dir=str(cache))
    (made,) = (cache / "json").iterdir()
    (cache / "me___mine").mkdir()
    made.rename(cache / "me___mine/default")  # where a download of the data set me/mine lies
    for file in (cache / "me___mine").rglob("json-train*"):
        file.rename(file.with_name(file.name.replace("json", "mine")))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
    assert read("me/mine") == ROWS
    assert read("me/mine", split="train[:2]") == ROWS[:2]
    assert "dsx.data.text_column" in refused("me/mine", text_column="body")
    columns = {"prompt": "text", "completion": "text"}
    pairs = DataConfig(source="me/mine", format="completion", columns=columns, sequence_length=8)
    found = list(examples(pairs))
    assert [one.texts for one in found] == [(row, row) for row in ROWS]
    assert found[2].where == 'dsx.data.source = "me/mine", row 3'


CHATS = {
    "messages": [{"role": "user", "content": "Two and two?"}, {"role": "assistant", "content": "Four."}],
    "conversations": [{"from": "human", "value": "Two and two?"}, {"from": "gpt", "value": "Four."}],
}


@pytest.mark.parametrize("column", CHATS)
@pytest.mark.parametrize("named", [False, True])
def test_chats_get_a_fix_that_is_one(tmp_path: Path, column: str, named: bool) -> None:
    """What the message says, done, gives chats that are read."""
    path = tmp_path / "chats.jsonl"
    path.write_text(2 * (json.dumps({column: CHATS[column], "id": "a"}) + "\n"))
    said = refused(path, **({"text_column": column} if named else {}))
    assert f'Fix: set dsx.data.format to "chat" for the turns of {column}' in said
    first, _ = examples(DataConfig(source=str(path), format="chat", sequence_length=8))
    assert isinstance(first, Example)
    assert list(first.messages) == CHATS["messages"]


def test_a_column_that_is_no_text_names_those_that_are(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"score": 3, "answer": "four", "question": "two and two?"}\n')
    assert "name the column that holds the text: answer, question" in refused(tmp_path / "a.jsonl")
    (tmp_path / "b.jsonl").write_text('{"score": 3}\n')
    assert "add a column of strings" in refused(tmp_path / "b.jsonl", text_column="score")
