"""Streaming: every document once, an order that no layout changes, a resume that reads little again."""

from __future__ import annotations

import json
import random
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from itertools import islice, pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dsx.config.schema import DataConfig, MixedSource
from dsx.data import lanes
from dsx.data.batches import Batches
from dsx.data.files import documents, open_source
from dsx.data.lanes import LaneReader, _Shuffle, merged, open_stream
from dsx.data.order import keyed_hash, permute
from dsx.data.text import Text, prepare_text
from dsx.data.tokenizers import ByteTokenizer
from dsx.data.units import FilePart, Stamp, file_parts
from dsx.errors import DataError

S, END = 6, 256


def write(path: Path, count: int, seed: int) -> Path:
    draw = random.Random(seed)
    texts = [f"{path.stem}{i}:" + "ab" * draw.randint(0, 30) for i in range(count)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def config(*sources: Path, weights: Sequence[float] = (1.0,), **keys: object) -> DataConfig:
    mixture = [MixedSource(source=str(s), weight=w) for s, w in zip(sources, weights, strict=True)]
    base = {"tokenizer": "bytes", "sequence_length": S, "streaming": True, "lanes": 4, "shuffle_buffer": 24}
    return DataConfig(sources=mixture, **{**base, "prefetch": 0, **keys})


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> tuple[DataConfig, tuple[Path, ...]]:
    folder = tmp_path_factory.mktemp("mixture")
    data = config(write(folder / "one.jsonl", 300, 1), write(folder / "two.jsonl", 90, 2), weights=(0.7, 0.3))
    return data, prepare_text(data, folder / "cache", held_out_tokens=200)


def naive(data: DataConfig, count: int) -> list[list[int]]:
    """The first ``count`` samples by lists alone: all documents, all tokens, all sequences."""
    names = [part.called for part in data.parts()]
    weights = np.array([part.weight for part in data.parts()])
    lanes = {}
    for number, part in enumerate(data.parts()):
        source = open_stream(data.of_part(part), part.called)
        for lane in range(data.lanes):
            texts = []
            for index, unit in enumerate(source.units):
                for offset, text in unit.documents(None):
                    point = index + keyed_hash("lane", unit.name, offset) / 2**64
                    held_out = keyed_hash("held-out", data.seed, unit.name, offset) / 2**64 < data.held_out
                    if not held_out and int(point * data.lanes / len(source.units)) == lane:
                        texts.append(text)
            tokens = [token for text in texts for token in [*text.encode(), END]]
            turns = -(-2 * count * S // len(tokens)) + 2
            stream = tokens * turns
            lanes[number, lane] = [stream[i : i + S + 1] for i in range(0, len(stream) - S, S)]
    block = data.shuffle_buffer // 2 // data.lanes
    taken: Counter[tuple[int, int]] = Counter()
    samples = []
    for sample in range(count):
        lane = sample % data.lanes
        # Of two sources, the first comes where its exact count falls behind; which phase is the order's own.
        phase = (keyed_hash("mixture", data.seed, 0) + lane * 0x9E3779B97F4A7C15) % 2**64 / 2**64
        row, share = sample // data.lanes, weights[0] / weights.sum()
        number = 0 if int((row + 1) * share + phase) > int(row * share + phase) else 1
        i = taken[number, lane]
        taken[number, lane] += 1
        key = keyed_hash("stream", data.seed, f"{names[number]}/{lane}", i // block)
        samples.append(lanes[number, lane][i // block * block + permute(i % block, block, key)])
    return samples


def open_ranks(
    text_of: tuple[DataConfig, tuple[Path, ...]], dp: int, rows: int, cursor: int = 0, state: object = None
) -> list[tuple[Text, Batches]]:
    """Texts and batches of every data-parallel rank of a layout."""
    ranks = []
    for rank in range(dp):
        text = Text.open(text_of[1], text_of[0])
        if state is not None:
            text.resume({"data_stream": json.loads(json.dumps(state))})
        samples = text.samples(cursor=cursor, in_flight=2 * rows * dp)
        batches = Batches(samples, micro_batch_size=rows, accumulation=1, dp=dp, dp_rank=rank, cursor=cursor)
        ranks.append((text, batches))
    return ranks


def rows_of(ranks: list[tuple[Text, Batches]], count: int) -> list[list[int]]:
    """The next samples of all ranks together, in global order: at least ``count``."""
    out: list[list[int]] = []
    while len(out) < count:
        for _, batches in ranks:
            inputs, labels = next(batches)
            assert inputs.dtype == labels.dtype == torch.int64
            assert torch.equal(inputs[:, 1:], labels[:, :-1])
            out += torch.cat([inputs, labels[:, -1:]], 1).tolist()
    return out


def state_of(ranks: list[tuple[Text, Batches]], cursor: int) -> dict[str, object]:
    return ranks[0][0].together([text.state(cursor) for text, _ in ranks])


def test_order_is_the_naive_one(mixture: tuple[DataConfig, tuple[Path, ...]]) -> None:
    assert rows_of(open_ranks(mixture, 1, 1), 500) == naive_order(mixture[0])


def test_order_without_shuffling_and_with_another_seed(tmp_path: Path) -> None:
    one, two = write(tmp_path / "one.jsonl", 60, 1), write(tmp_path / "two.jsonl", 60, 2)
    for keys in ({"shuffle_buffer": 8}, {"seed": 3}, {"lanes": 3}):
        data = config(one, two, weights=(1, 2), **keys)
        folders = prepare_text(data, tmp_path / "cache", held_out_tokens=50)
        assert rows_of(open_ranks((data, folders), 1, 3), 200)[:200] == naive(data, 200)


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_resume_goes_on_in_any_layout(
    mixture: tuple[DataConfig, tuple[Path, ...]], data: st.DataObject
) -> None:
    """Twice: what a resumed run saves is as good as what a run from the beginning does."""
    expected, cursor, state = naive_order(mixture[0]), 0, None
    for _ in range(3):
        layouts = [(dp, rows) for dp in (1, 2, 4) for rows in (1, 2, 3) if cursor % (dp * rows) == 0]
        dp, rows = data.draw(st.sampled_from(layouts))
        ranks = open_ranks(mixture, dp, rows, cursor, state)
        count = data.draw(st.integers(0, 6)) * 24 // (dp * rows) * (dp * rows)
        assert rows_of(ranks, count) == expected[cursor : cursor + count]
        cursor += count
        # Some are ahead of training, as with a prefetching thread.
        ahead = data.draw(st.integers(0, 2)) * dp * rows
        assert rows_of(ranks, ahead) == expected[cursor : cursor + ahead]
        state = state_of(ranks, cursor)


_ORDERS: dict[str, list[list[int]]] = {}


def naive_order(data: DataConfig) -> list[list[int]]:
    key = data.model_dump_json()
    if key not in _ORDERS:
        _ORDERS[key] = naive(data, 500)
    return _ORDERS[key]


class Counting(ByteTokenizer):
    encoded = 0

    def encode(self, documents: Sequence[str]) -> list[np.ndarray]:
        type(self).encoded += sum(map(len, documents))
        return super().encode(documents)


def test_resume_and_ranks_read_little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is tokenised after a resume does not grow with the cursor; ranks share the work."""
    monkeypatch.setattr(lanes, "load_tokenizer", lambda _, **__: Counting())
    source = tmp_path / "long.jsonl"
    source.write_text("".join(json.dumps({"text": "x" * 2000}) + "\n" for _ in range(1500)))
    data = config(source, sequence_length=500, shuffle_buffer=64, held_out=0)
    folders = prepare_text(data, tmp_path / "cache", held_out_tokens=1)
    first = Text.open(folders, data)
    samples = first.samples(in_flight=4)
    for sample in range(4800):
        samples.take(sample)
    state = first.together([first.state(4800)])
    again = []
    for dp in (1, 2, 4):
        text = Text.open(folders, data)
        text.resume({"data_stream": state})
        samples = text.samples(cursor=4800)
        Counting.encoded = 0
        for step in range(4800, 4816, dp):
            samples.take(step)  # data-parallel rank 0's
        again.append(Counting.encoded)
    assert again == [4 * again[2], 2 * again[2], again[2]]
    assert 0 < again[2] < 20_000  # of 3,000,000: a block of 8 sequences, and as much as is tokenised at once


def test_memory_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write(tmp_path / "a.jsonl", 2000, 5)
    data = config(source, shuffle_buffer=160)
    text = Text.open(prepare_text(data, tmp_path / "cache", held_out_tokens=50), data)
    read, most = 0, 0
    plain = LaneReader.read

    def counted(reader: LaneReader) -> np.ndarray:
        nonlocal read
        read += 1
        return plain(reader)

    monkeypatch.setattr(LaneReader, "read", counted)
    samples = text.samples(in_flight=8)
    for sample in range(3000):
        samples.take(sample)
        most = max(most, read - sample)
    assert 80 <= most <= 160
    held = [len(s._now) + len(s._next) for s in samples._lanes.values()]
    assert sum(held) <= 160
    assert all(len(shuffle.begins) <= 5 for shuffle in samples._lanes.values())  # nor do the records grow


@pytest.mark.parametrize("lanes", [1, 3, 8, 64])
def test_every_document_is_in_one_lane(tmp_path: Path, lanes: int) -> None:
    paths = [write(tmp_path / f"{i}.jsonl", 400, i) for i in range(3)]
    data = DataConfig(
        source=f"{tmp_path}/*.jsonl", tokenizer="bytes", sequence_length=S, streaming=True, lanes=lanes
    )
    source = open_stream(data, "all")
    held_out = {
        text
        for unit in source.units
        for offset, text in unit.documents(None)
        if source.is_held_out(unit, offset)
    }
    trained = [
        t for lane in range(lanes) for unit in source.lane(lane, lanes) for _, t in unit.documents(None)
    ]
    plain = list(documents(DataConfig(source=f"{tmp_path}/*.jsonl", sequence_length=S)))
    assert sorted([*trained, *held_out]) == sorted(plain)
    assert len(paths) * 400 * 0.02 < len(held_out) < len(paths) * 400 * 0.1
    sizes = [
        sum(len(t) for unit in source.lane(lane, lanes) for _, t in unit.documents(None))
        for lane in range(lanes)
    ]
    assert max(sizes) < 3 * sum(sizes) / lanes + 200


def test_held_out_text_is_never_trained_on(mixture: tuple[DataConfig, tuple[Path, ...]]) -> None:
    text = Text.open(mixture[1], mixture[0])
    documents_kept = []
    for part in text.held_out:
        tokens = np.asarray(part.corpus.held_out.tokens)
        pieces = np.split(tokens, np.flatnonzero(tokens == END) + 1)
        documents_kept += [bytes(piece[:-1].tolist()).decode() for piece in pieces if piece.size]
    assert len(documents_kept) > 4
    trained = {
        t
        for part in mixture[0].parts()
        for lane in range(4)
        for unit in open_stream(mixture[0].of_part(part), part.called).lane(lane, 4)
        for _, t in unit.documents(None)
    }
    assert not trained & set(documents_kept)
    assert {part.name for part in text.held_out} == {"one", "two"}


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lines=st.lists(st.sampled_from(["", " ", "é", "word word", "x" * 70, "é" * 40]), max_size=60),
    cuts=st.integers(1, 7),
    cut_bytes=st.integers(1, 90),
    ended=st.booleans(),
)
def test_text_parts_are_the_file(
    tmp_path: Path, lines: list[str], cuts: int, cut_bytes: int, ended: bool
) -> None:
    path = tmp_path / "a.txt"
    path.write_text("\n".join(lines) + "\n" * ended)
    stamp = Stamp.of(path)
    borders = [i * stamp.size_bytes // cuts for i in range(cuts)] + [stamp.size_bytes]
    found: list[tuple[int, str]] = []
    for start, end in pairwise(borders):
        part = FilePart(stamp=stamp, name="a", start=start, end=end, lines=False, cut_bytes=cut_bytes)
        own = list(part.documents(None))
        for index, (offset, _) in enumerate(own):
            assert list(part.documents(offset)) == own[index:]
        found += own
    assert "".join(text for _, text in found) == path.read_text()
    assert [offset for offset, _ in found] == sorted({offset for offset, _ in found})


def test_files_are_cut_as_their_size_asks(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("".join(f"line {i}\n\n" for i in range(100_000)))
    parts = file_parts(tmp_path, [Path("a.txt")], lanes=4)
    assert len(parts) == 16
    texts = [text for part in parts for _, text in part.documents(None)]
    assert "".join(texts) == path.read_text()
    assert max(map(len, texts)) <= 2 * (64 << 10)
    assert len(file_parts(tmp_path, [Path("a.txt")] * 80, lanes=4, whole_files=True)) == 80


@pytest.mark.parametrize("suffix", ["jsonl", "csv", "json", "parquet", "folder"])
def test_streamed_documents_are_the_prepared_ones(tmp_path: Path, suffix: str) -> None:
    """The readers of ``datasets`` on one side; from any document on as well."""
    import datasets
    import pyarrow.parquet as pq

    texts: list[str | None] = [f"text {i}" * (i % 5) for i in range(2500)]
    table = datasets.Dataset.from_dict({"n": list(range(2500)), "text": texts})
    path = tmp_path / f"a.{'jsonl' if suffix == 'folder' else suffix}"
    if suffix == "parquet":
        pq.write_table(table.data.table, path, row_group_size=400)
    else:
        getattr(table, {"csv": "to_csv", "parquet": "to_parquet"}.get(suffix, "to_json"))(str(path))
    if suffix == "folder":
        (tmp_path / "README.md").write_text("# Card\n")
    data = DataConfig(source=str(tmp_path if suffix == "folder" else path), sequence_length=S)
    source = open_source(data)
    units = source.units(4)
    assert len(units) == {"parquet": 7}.get(suffix, 1)
    streamed_texts = [list(unit.documents(None)) for unit in units]
    assert [text for part in streamed_texts for _, text in part] == list(documents(data))
    for unit, part in zip(units, streamed_texts, strict=True):
        for index in (0, len(part) // 2, len(part) - 1):
            assert list(islice(unit.documents(part[index][0]), 3)) == part[index : index + 3]


def grown(path: Path) -> None:
    with path.open("a") as file:
        file.write(json.dumps({"text": "more"}) + "\n")


def shortened(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40])


def rewritten(path: Path) -> None:
    path.write_bytes(path.read_bytes())


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (Path.unlink, "the file is gone"),
        (shortened, "has changed since the run started"),
        (grown, "has changed since the run started"),
        (rewritten, "it was written to"),
    ],
)
def test_a_file_that_changes_while_it_is_read(tmp_path: Path, fault: object, said: str) -> None:
    path = write(tmp_path / "a.jsonl", 3000, 1)
    data = config(path, lanes=1, shuffle_buffer=2)
    folders = prepare_text(data, tmp_path / "cache", held_out_tokens=50)
    samples = Text.open(folders, data).samples()
    samples.take(0)
    assert callable(fault)
    fault(path)
    with pytest.raises(DataError) as error:
        deque(map(samples.take, range(1, 100_000)), maxlen=0)
    assert str(path) in str(error.value)
    assert said in str(error.value)


def test_files_other_than_those_prepared(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", 300, 1)
    data = config(path)
    folders = prepare_text(data, tmp_path / "cache", held_out_tokens=50)
    digest = Text.open(folders, data).digest
    grown(path)
    samples = Text.open(folders, data).samples()
    with pytest.raises(DataError, match="files are others than when the run was prepared"):
        samples.take(0)
    again = Text.open(prepare_text(data, tmp_path / "cache", held_out_tokens=50), data)
    assert again.digest != digest
    for other in ({"lanes": 2}, {"seed": 1}, {"shuffle_buffer": 48}, {"weights": (2.0,)}):
        changed = config(path, **other)
        opened = Text.open(prepare_text(changed, tmp_path / "cache", held_out_tokens=50), changed)
        # One source's share is all of it, whatever its weight.
        assert (opened.digest == again.digest) == (other == {"weights": (2.0,)})


def test_too_little_text_for_the_lanes(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", 10, 1)
    with pytest.raises(DataError, match=r"dsx.data.lanes = 64: source \"a\" has no document to train on"):
        prepare_text(config(path, lanes=64), tmp_path / "cache", held_out_tokens=50)
    with pytest.raises(DataError, match='no document of source "a" is held out'):
        prepare_text(config(path, lanes=1, held_out=0.0001), tmp_path / "cache", held_out_tokens=50)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{nonsense", "is no line of JSON"),
        ('{"text": 3}', "holds int there, not text"),
        ("[1]", "holds list, not an object"),
    ],
)
def test_lines_that_hold_no_text(tmp_path: Path, line: str, said: str) -> None:
    path = write(tmp_path / "a.jsonl", 100, 1)
    with path.open("a") as file:
        file.write(line + "\n")
    data = DataConfig(source=str(path), sequence_length=S)
    with pytest.raises(DataError) as error:
        [text for unit in open_source(data).units(1) for _, text in unit.documents(None)]
    assert said in str(error.value)
    assert str(path) in str(error.value)


def test_text_that_is_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"line\n\n" * 10 + "café\n".encode("latin1"))
    with pytest.raises(DataError, match=r"not UTF-8 text \(invalid continuation byte: byte 0xe9 at 63"):
        list(open_source(DataConfig(source=str(path), sequence_length=S)).units(1)[0].documents(None))


def test_a_turn_is_told(tmp_path: Path) -> None:
    data = config(write(tmp_path / "a.jsonl", 60, 1))
    text = Text.open(prepare_text(data, tmp_path / "cache", held_out_tokens=50), data)
    samples = text.samples()
    samples.take(0)
    (opened,) = text.news()
    assert opened.startswith("data: 1 lanes opened in")
    for sample in range(1, 800):
        samples.take(sample)
    assert 'data: source "a" begins again' in " ".join(text.news())
    assert text.news() == []


def test_states_of_ranks_together() -> None:
    assert merged([{"a/0": [1, [0]]}, {"a/0": [3, [2]], "a/1": [0, [5]]}, {"a/0": [2, [1]]}]) == {
        "a/0": [3, [2]],
        "a/1": [0, [5]],
    }


def test_streams_do_not_run_backwards() -> None:
    class Reader:
        place = None

        def read(self) -> Iterator[int]:
            return np.zeros(1)

    shuffle = _Shuffle(Reader(), 2, lambda block: block, block=3)
    shuffle.take(8)
    with pytest.raises(DataError, match="does not run backwards"):
        shuffle.take(5)


def test_shards_of_a_hub_data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder stands for the hub; streamed from there, or prepared in the cache of datasets."""
    import datasets

    from dsx.data import files

    for number in range(3):
        rows = [{"text": f"{number}-{row}" * (row % 3)} for row in range(1100)]
        datasets.Dataset.from_list(rows).to_parquet(str(tmp_path / f"{number}.parquet"), batch_size=500)
    want = [f"{number}-{row}" * (row % 3) for number in range(3) for row in range(1100) if row % 3]
    monkeypatch.setattr(files, "reachable", lambda: True)
    hub = files.Tables(source=str(tmp_path), name=None, split="train", text_column="text")
    cached = datasets.Dataset.from_dict({"text": want})
    for units, count in (
        (hub.units(4), 9),
        (files._shards(cached, "text", "cached", ()), 256),
    ):
        assert len(units) == count
        found = [list(unit.documents(None)) for unit in units]
        assert [text for part in found for _, text in part] == want
        assert list(units[1].documents(found[1][4][0])) == found[1][4:]
        with pytest.raises(DataError, match="rows left"):
            list(units[1].documents(10_000))
