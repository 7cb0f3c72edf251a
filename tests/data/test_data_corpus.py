"""Preparing, caching, splitting and packing."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import numpy as np
import pytest
import torch

from dsx.config.schema import DataConfig
from dsx.data import tokenizers as tokenizers_module
from dsx.data.corpus import Corpus, prepare
from dsx.data.files import documents
from dsx.data.tokenizers import ByteTokenizer
from dsx.errors import DataError

END = 256


def config(source: object, **keys: object) -> DataConfig:
    return DataConfig(source=str(source), **{"tokenizer": "bytes", "sequence_length": 8, **keys})


def write(path: Path, texts: Sequence[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


def texts_of(tokens: np.ndarray) -> list[str]:
    """Documents of a packed byte stream."""
    tokens = np.asarray(tokens)
    pieces = np.split(tokens, np.flatnonzero(tokens == END) + 1)
    assert pieces.pop().size == 0  # every document is ended
    return [bytes(piece[:-1].tolist()).decode() for piece in pieces]


@pytest.fixture(scope="module")
def stdlib(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(config("python-stdlib", max_bytes=2_000_000), tmp_path_factory.mktemp("cache"))


def test_splits_are_all_documents_once(stdlib: Path) -> None:
    data = config("python-stdlib", max_bytes=2_000_000)
    corpus = Corpus.open(stdlib, sequence_length=256)
    train, held_out = texts_of(corpus.train.tokens), texts_of(corpus.held_out.tokens)
    assert sorted(train + held_out) == sorted(documents(data))
    assert not set(train) & set(held_out)
    assert len(held_out) == pytest.approx(0.05 * (len(train) + len(held_out)), abs=1)
    assert (corpus.info.train.documents, corpus.info.held_out.documents) == (len(train), len(held_out))
    assert corpus.info.train.text_bytes == sum(len(text.encode()) for text in train)
    assert corpus.info.train.tokens == corpus.info.train.text_bytes + len(train)


def test_windows_are_torch_unfold(stdlib: Path) -> None:
    corpus = Corpus.open(stdlib, sequence_length=100)
    for sequences in (corpus.train, corpus.held_out):
        tokens = torch.from_numpy(np.asarray(sequences.tokens, np.int64))
        want = tokens.unfold(0, 101, 100)
        assert len(sequences) == len(want)
        for index in (0, 1, len(want) // 2, len(want) - 1):
            inputs, labels = sequences.window(index)
            assert inputs.dtype == labels.dtype == torch.int64
            assert [*inputs, labels[-1], *labels] == [*want[index], *want[index][1:]]
        with pytest.raises(IndexError):
            sequences.window(len(sequences))


def test_unigram_entropy_and_bytes_per_token(stdlib: Path) -> None:
    corpus = Corpus.open(stdlib, sequence_length=64)
    text = "".join(texts_of(corpus.held_out.tokens)).encode()
    counts = torch.tensor([float(count) for count in Counter(text).values()], dtype=torch.float64)
    entropy = torch.distributions.Categorical(counts / counts.sum()).entropy() / np.log(2)
    assert corpus.unigram_bits_per_byte == pytest.approx(entropy.item(), rel=1e-9)
    assert 4 < corpus.unigram_bits_per_byte < 5.5
    assert corpus.bytes_per_token == len(text) / len(corpus.held_out.tokens)
    # A uniform guess over 256 bytes costs 8 bits a byte, and a little for the ends of documents.
    assert corpus.bits_per_byte(np.log(256)) == pytest.approx(8 * len(corpus.held_out.tokens) / len(text))


def test_seed_chooses_other_documents(tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", [f"document {i}" for i in range(100)])
    held_out = {
        tuple(
            texts_of(
                Corpus.open(
                    prepare(config(source, seed=seed, held_out=0.1), tmp_path), sequence_length=8
                ).held_out.tokens
            )
        )
        for seed in (0, 1, 2)
    }
    assert len(held_out) == 3
    assert all(len(texts) == 10 for texts in held_out)


class CountingTokenizer(ByteTokenizer):
    encoded = 0

    def encode(self, documents: Sequence[str]) -> list[np.ndarray]:
        type(self).encoded += len(documents)
        return super().encode(documents)


def test_prepared_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CountingTokenizer, "encoded", 0)
    monkeypatch.setattr(tokenizers_module, "load_tokenizer", lambda _, **__: CountingTokenizer())
    source = write(tmp_path / "a.jsonl", ["some text"] * 50)
    path = prepare(config(source), tmp_path / "cache")
    assert CountingTokenizer.encoded == 50
    assert prepare(config(source, sequence_length=4), tmp_path / "cache") == path
    assert CountingTokenizer.encoded == 50
    for other in ({"held_out": 0.2}, {"seed": 1}, {"max_bytes": 300}):
        assert prepare(config(source, **other), tmp_path / "cache") != path
    write(source, ["other text"] * 50)
    assert prepare(config(source), tmp_path / "cache") != path


def test_what_shall_be_known_before_is_asked_where_there_is_something_to_tokenise(tmp_path: Path) -> None:
    asked: list[int] = []
    for _ in range(2):
        prepare(config("python-stdlib", max_bytes=5_000, held_out=0.0), tmp_path, lambda: asked.append(1))
    assert asked == [1]

    def refuse() -> None:
        raise DataError("a model", "its layers are wrong", "use another")

    with pytest.raises(DataError, match="its layers are wrong"):
        prepare(config("python-stdlib", max_bytes=6_000, held_out=0.0), tmp_path, refuse)
    assert len([*tmp_path.iterdir()]) == 1


def test_large_vocabulary_takes_four_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Wide(ByteTokenizer):
        vocab_size = 100_000
        end_id = 99_999

    monkeypatch.setattr(tokenizers_module, "load_tokenizer", lambda _, **__: Wide())
    source = write(tmp_path / "a.jsonl", ["some text"] * 50)
    corpus = Corpus.open(prepare(config(source), tmp_path), sequence_length=9)
    assert [part.tolist() for part in corpus.train.window(0)] == [[*b"some text"], [*b"ome text", 99_999]]
    assert corpus.info.dtype == "<u4"


def test_concurrent_preparation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four processes' worth of prepare at once: all succeed, one folder results."""
    together = Barrier(4)

    class Slow(ByteTokenizer):
        def encode(self, documents: Sequence[str]) -> list[np.ndarray]:
            together.wait(30)  # nobody finishes before everybody has begun
            return super().encode(documents)

    monkeypatch.setattr(tokenizers_module, "load_tokenizer", lambda _, **__: Slow())
    source = write(tmp_path / "a.jsonl", ["some text"] * 50)
    with ThreadPoolExecutor(4) as pool:
        paths = list(pool.map(lambda _: prepare(config(source), tmp_path / "cache"), range(4)))
    assert len(set(paths)) == 1
    assert names(tmp_path / "cache") == [paths[0].name]
    assert len(Corpus.open(paths[0], sequence_length=8).train)


KILLED = """
import os, signal, sys
from dsx.config.schema import DataConfig
from dsx.data import corpus

class Dying(corpus.SplitWriter):
    def append(self, ids, text_bytes):
        super().append(ids, text_bytes)
        if self.documents == 20:
            os.kill(os.getpid(), signal.SIGKILL)

corpus.SplitWriter = Dying
corpus.prepare(DataConfig(source=sys.argv[1], tokenizer="bytes", sequence_length=8), sys.argv[2])
"""


def test_killed_preparation_leaves_nothing_that_is_used(tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", ["some text"] * 50)
    cache = tmp_path / "cache"
    killed = subprocess.run([sys.executable, "-c", KILLED, source, cache], check=False, timeout=60)
    assert killed.returncode == -signal.SIGKILL
    (left,) = names(cache)
    assert left.startswith(".")
    path = prepare(config(source), cache)
    assert names(cache) == [path.name]  # the remains are gone too
    assert texts_of(Corpus.open(path, sequence_length=8).train.tokens) == ["some text"] * 48


def test_failed_preparation_leaves_nothing(tmp_path: Path) -> None:
    source = tmp_path / "a.jsonl"
    source.write_text('{"text": "a"}\n{nonsense')
    with pytest.raises(DataError):
        prepare(config(source), tmp_path / "cache")
    assert names(tmp_path / "cache") == []


def test_damaged_cache(tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", ["some text"] * 50)
    path = prepare(config(source), tmp_path / "cache")
    with (path / "train.bin").open("ab") as file:
        file.write(b"x")
    for action in (
        lambda: prepare(config(source), tmp_path / "cache"),
        lambda: Corpus.open(path, sequence_length=8),
    ):
        with pytest.raises(DataError, match=r"train\.bin: 961 bytes, but corpus\.json says 960.*remove"):
            action()
    (path / "corpus.json").write_text("{")
    with pytest.raises(DataError, match=r"corpus\.json: cannot be read.*remove"):
        Corpus.open(path, sequence_length=8)
    (path / "corpus.json").write_text('{"version": 99}')
    with pytest.raises(DataError, match="version 99, not 1"):
        Corpus.open(path, sequence_length=8)
    with pytest.raises(DataError, match="no corpus has been prepared here"):
        Corpus.open(tmp_path, sequence_length=8)


def test_unwritable_cache(tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", ["some text"] * 50)
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot be written"):
        prepare(config(source), tmp_path / "file" / "cache")


def test_digest_is_of_the_tokens(tmp_path: Path) -> None:
    """The same text from another file has the same digest; other text another."""
    one = write(tmp_path / "a.jsonl", ["some text"] * 50)
    same = write(tmp_path / "b.jsonl", ["some text"] * 50)
    other = write(tmp_path / "c.jsonl", ["some text"] * 49 + ["more text"])
    digests = [
        Corpus.open(prepare(config(source), tmp_path), sequence_length=8).digest
        for source in (one, same, other)
    ]
    assert digests[0] == digests[1] != digests[2]


def test_too_little_text(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(DataError, match=r'dsx\.data\.source = ".*/empty\.txt": it holds no text'):
        prepare(config(tmp_path / "empty.txt"), tmp_path)
    with pytest.raises(DataError, match="it holds no text"):
        prepare(config(write(tmp_path / "empty.jsonl", ["", ""])), tmp_path)
    with pytest.raises(DataError, match=r"held_out = 0\.001: of 5 documents none is held out.*0\.2"):
        prepare(config(write(tmp_path / "five.jsonl", ["x"] * 5), held_out=0.001), tmp_path)
    one, alone = (
        write(tmp_path / "one.jsonl", ["x"]),
        r"of 1 document none is {}\. Fix: use 0 to hold out none",
    )
    for share, lack in ((0.999, "left to train on"), (0.5, "held out")):
        with pytest.raises(DataError, match=alone.format(lack)):
            prepare(config(one, held_out=share), tmp_path)
    path = prepare(config(write(tmp_path / "short.jsonl", ["abc"] * 40)), tmp_path)
    with pytest.raises(DataError, match="training split has 152 tokens, a sequence needs 201"):
        Corpus.open(path, sequence_length=200)
    with pytest.raises(DataError, match="held-out split has 8 tokens, a sequence needs 9"):
        Corpus.open(path, sequence_length=8)
    assert len(Corpus.open(path, sequence_length=7).held_out) == 1


def test_nothing_held_out(tmp_path: Path) -> None:
    path = prepare(config(write(tmp_path / "a.jsonl", ["abc"] * 40), held_out=0), tmp_path)
    corpus = Corpus.open(path, sequence_length=8)
    assert (len(corpus.train), len(corpus.held_out)) == (19, 0)
    for bound in ("bytes_per_token", "unigram_bits_per_byte"):
        with pytest.raises(DataError, match="nothing is held out of 40 documents"):
            getattr(corpus, bound)


def test_vocabulary_of_the_model(stdlib: Path) -> None:
    assert Corpus.open(stdlib, sequence_length=8, vocab_size=257).info.vocab_size == 257
    with pytest.raises(DataError, match="257 ids, but the model's vocabulary is 256"):
        Corpus.open(stdlib, sequence_length=8, vocab_size=256)
