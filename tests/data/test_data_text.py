"""Mixtures in exact shares, the order that runs before them had, files that change, and reading ahead."""

from __future__ import annotations

import gc
import json
import os
import threading
import weakref
from collections import Counter
from fractions import Fraction
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsx.config.load import load
from dsx.config.schema import DataConfig, MixedSource
from dsx.data.batches import Batches, Prefetched, Shuffled
from dsx.data.corpus import Corpus, Sequences, TokenFile, prepare
from dsx.data.order import Shares
from dsx.data.packs import kept_apart
from dsx.data.text import Text, prepare_text
from dsx.errors import ConfigError, DataError

S = 16


def write(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def batches(samples: object, **keys: int) -> Batches:
    sizes = {"micro_batch_size": 1, "accumulation": 1, "dp": 1, "dp_rank": 0}
    return Batches(samples, **{**sizes, **keys})


def ids(sample: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return torch.cat((sample[0], sample[1][-1:]))


def test_one_source_keeps_its_order_and_its_cache(tmp_path: Path) -> None:
    """As dsx 0.1 had them: runs and corpora from then go on."""
    counting = Shuffled(Sequences(np.arange(50 * 3 + 1, dtype=np.uint32), 3), seed=3)
    order = [int(counting.take(sample)[0][0]) // 3 for sample in range(60)]
    assert order[:12] == [15, 17, 20, 0, 39, 12, 31, 5, 32, 27, 38, 43]
    assert order[48:] == [4, 9, 31, 23, 4, 14, 40, 0, 47, 21, 32, 15]  # over the epoch's end
    path = write(tmp_path / "a.jsonl", [f"document {i} " * (i % 7) for i in range(200)])
    os.utime(path, (0, 0))
    data = DataConfig(source=str(path), tokenizer="bytes", sequence_length=S, seed=1)
    (folder,) = prepare_text(data, tmp_path / "cache", held_out_tokens=1)
    assert folder.name == "178ba90b0e97edc2903d"
    text = Text.open([folder], data)
    assert text.digest == Corpus.open(folder, sequence_length=S).digest == "668331b1c93d6010214ea8b5e239ddee"
    assert text.parts[0].corpus.info.train.tokens == 7226


@settings(max_examples=80, deadline=None)
@given(
    weights=st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=7),
    start=st.sampled_from([0, 1, 1000, 10**15]),
    lane=st.integers(0, 100),
    seed=st.integers(0, 3),
)
def test_shares_are_exact_everywhere(weights: list[float], start: int, lane: int, seed: int) -> None:
    shares = Shares(weights, seed=seed)
    assert sum(shares.shares) == 1
    taken = list(shares.counts(start, lane))
    assert sum(taken) == start
    for place in range(start, start + 200):
        source, number = shares.locate(place, lane)
        assert number == taken[source]  # its sequences come in order, none twice
        taken[source] += 1
        assert all(
            abs(Fraction(count) - (place + 1) * share) < len(weights)
            for count, share in zip(taken, shares.shares, strict=True)
        )
    assert shares.counts(start + 200, lane) == tuple(taken)


def test_lanes_have_the_shares_together() -> None:
    shares = Shares([0.5, 0.3, 0.2], seed=0)
    for row in (0, 1, 77):
        counts = Counter(shares.locate(row, lane)[0] for lane in range(100))
        assert abs(counts[0] - 50) <= 2
        assert abs(counts[1] - 30) <= 8
    assert Shares([2, 1], seed=0).shares == (Fraction(2, 3), Fraction(1, 3))
    assert Shares([0.1, 0.2], seed=0).shares == (Fraction(1, 3), Fraction(2, 3))  # as written, not as binary


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> tuple[DataConfig, tuple[Path, ...]]:
    folder = tmp_path_factory.mktemp("mixture")
    sources = [
        MixedSource(source=str(write(folder / "big.jsonl", [f"B{i}" * 9 for i in range(400)])), weight=3),
        MixedSource(source=str(write(folder / "small.jsonl", [f"s{i}" * 9 for i in range(60)])), label="few"),
    ]
    data = DataConfig(sources=sources, tokenizer="bytes", sequence_length=S)
    return data, prepare_text(data, folder / "cache", held_out_tokens=1)


def test_a_mixture_is_its_sources_each_in_its_own_order(
    mixture: tuple[DataConfig, tuple[Path, ...]],
) -> None:
    data, folders = mixture
    text = Text.open(folders, data)
    samples = text.samples()
    found: dict[str, list[list[int]]] = {"big": [], "few": []}
    for sample in range(4 * 200):
        row = ids(samples.take(sample)).tolist()
        found["big" if ord("B") in row else "few"].append(row)
    assert {name: len(rows) for name, rows in found.items()} == {"big": 600, "few": 200}
    for part in text.parts:
        length = len(part.corpus.train)
        every = sorted(ids(part.corpus.train.window(i)).tolist() for i in range(length))
        for turn in range(len(found[part.name]) // length):
            assert sorted(found[part.name][turn * length : (turn + 1) * length]) == every
    few = len(text.parts[1].corpus.train)
    assert found["few"][:few] != found["few"][few : 2 * few]  # shuffled anew
    rows = dict(text.rows(800, 4))
    assert rows["data few"].startswith("25% of the samples, ")
    assert rows["data few"].endswith(f"read {200 / few:.3g} times in all")


def test_a_mixture_is_the_same_in_every_layout(mixture: tuple[DataConfig, tuple[Path, ...]]) -> None:
    samples = Text.open(mixture[1], mixture[0]).samples()
    want = [ids(samples.take(sample)).tolist() for sample in range(48)]
    for dp, rows, cursor in ((2, 3, 0), (4, 2, 24), (1, 6, 12), (3, 4, 36)):
        ranks = [batches(samples, dp=dp, dp_rank=r, micro_batch_size=rows, cursor=cursor) for r in range(dp)]
        found = []
        while len(found) < 12:
            for rank in ranks:
                inputs, labels = next(rank)
                found += torch.cat([inputs, labels[:, -1:]], 1).tolist()
        assert found == want[cursor : cursor + len(found)]


def test_what_a_mixture_says_of_its_held_out_text(mixture: tuple[DataConfig, tuple[Path, ...]]) -> None:
    data, folders = mixture
    text = Text.open(folders, data)
    assert [part.name for part in text.held_out] == ["big", "few"]
    assert text.mean_loss({"big": 2.0, "few": 4.0}) == pytest.approx(2.5)
    # With 2 nats a token in the one and 4 in the other; tokens of the one are three times as many.
    each = [part.corpus.bytes_per_token for part in text.parts]
    bits = (3 * 2.0 + 4.0) / np.log(2) / (3 * each[0] + each[1])
    assert text.bits_per_byte(2.5) == pytest.approx(bits)
    parts = [part.corpus.unigram_bits_per_byte for part in text.parts]
    assert min(parts) < text.unigram_bits_per_byte < max(parts) + 1  # and at most a bit to tell them apart
    assert text.digest != Text.open(folders[:1], data.of_part(data.sources[0])).digest
    heavier = data.model_copy(
        update={"sources": [data.sources[0].model_copy(update={"weight": 4}), *data.sources[1:]]}
    )
    assert Text.open(folders, heavier).digest != text.digest


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"sources": [{"source": "a", "weight": 0}]}, "dsx.data.sources[0].weight = 0: not a value"),
        ({"sources": [{"source": "a"}, {"source": "b", "weight": -1}]}, "use a number greater than 0"),
        ({"sources": [{"source": "a", "weight": "1"}]}, "remove the quotes"),
        ({"sources": [{"source": "a/x.txt"}, {"source": "b/x.json"}]}, 'are called "x"'),
        ({"sources": [{"source": "a/*.txt"}, {"source": "a"}]}, "give each a label of its own"),
        ({"source": "a", "sources": [{"source": "b"}]}, "sources and source are both given"),
        ({"max_bytes": 9, "sources": [{}]}, "each of sources has its own max_bytes"),
        ({"streaming": True, "max_bytes": 9}, "leave one of them out"),
        ({"sources": [{"label": "a b"}]}, "dsx.data.sources[0].label"),
        ({"sources": [{"weigth": 1}]}, 'write "weight"'),
        ({"shuffle_buffer": 0}, "a whole number of at least 1"),
    ],
)
def test_mixtures_that_cannot_be(data: dict[str, object], said: str) -> None:
    block = {"model": {"preset": "tiny"}, "train": {"steps": 1, "output": "x"}}
    with pytest.raises(ConfigError) as error:
        load({"dsx": {**block, "data": {"sequence_length": 8, **data}}})
    assert said in str(error.value)


def test_names_of_sources() -> None:
    named = {"/a/b.jsonl.gz": "b", "owner/set": "set", "wiki/*.txt": "wiki", "a b/": "a_b", "**": "text"}
    assert {source: MixedSource(source=source).called for source in named} == named


def test_a_missing_source_of_a_mixture(tmp_path: Path) -> None:
    """Said before the first source is tokenised, which may take hours."""
    there = write(tmp_path / "a.jsonl", ["some text"] * 50)
    for streaming in (False, True):
        sources = [MixedSource(source=str(there)), MixedSource(source="./none.txt")]
        data = DataConfig(sources=sources, tokenizer="bytes", sequence_length=8, streaming=streaming, lanes=2)
        with pytest.raises(DataError, match=r"none\.txt.*no such file"):
            prepare_text(data, tmp_path / "cache", held_out_tokens=9)
    assert not (tmp_path / "cache").exists()


def test_token_files_are_what_numpy_maps(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    ids = np.arange(1000, dtype="<u2")
    ids.tofile(path)
    tokens, mapped = TokenFile(path, np.dtype("<u2")), np.memmap(path, "<u2", mode="r")
    assert len(tokens) == 1000
    for part in (slice(0, 7), slice(990, 2000), slice(5, 5), slice(-3, None)):
        assert tokens[part].tolist() == mapped[part].tolist()
    assert np.asarray(tokens, np.int64).tolist() == ids.tolist()
    path.unlink()
    assert tokens[:3].tolist() == [0, 1, 2]  # the open file outlives its name
    with pytest.raises(DataError, match=r"a\.bin: cannot be opened"):
        TokenFile(path, np.dtype("<u2"))


@pytest.mark.parametrize("size", [10, 2000, 2002])
def test_a_prepared_corpus_that_changes(tmp_path: Path, size: int) -> None:
    """Under a memory map, the first of these ends the process by SIGBUS."""
    path = write(tmp_path / "a.jsonl", ["some text"] * 300)
    folder = prepare(DataConfig(source=str(path), tokenizer="bytes", sequence_length=S), tmp_path / "cache")
    corpus = Corpus.open(folder, sequence_length=S)
    last = len(corpus.train) - 1
    corpus.train.window(last)
    with (folder / "train.bin").open("r+b") as file:
        file.truncate(size)
    os.utime(folder / "train.bin", (0, 0))
    with pytest.raises(DataError) as error:
        corpus.train.window(last)
    assert f"train.bin: has changed since it was opened (5,700 bytes then, {size:,} now)" in str(error.value)


class Source:
    """Counts what is taken; sample ``fails`` raises."""

    epoch = None

    def __init__(self, fails: int = -1) -> None:
        self.taken, self.fails = 0, fails
        self.room = threading.Semaphore(0)

    def take(self, sample: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.taken += 1
        self.room.release()
        if sample == self.fails:
            raise DataError("source", "broke", "mend it")
        return torch.arange(sample, sample + 4), torch.arange(sample + 1, sample + 5)


def test_prefetched_batches_are_the_same_and_bounded() -> None:
    plain, source = batches(Source(), micro_batch_size=2), Source()
    ahead = Prefetched(batches(source, micro_batch_size=2), depth=3, pin=False)
    assert source.taken == 0  # a rank that needs no data reads none
    for number, (want, got) in enumerate(islice(zip(plain, ahead, strict=False), 40), 1):
        assert torch.equal(want[0], got[0])
        assert torch.equal(want[1], got[1])
        assert ahead.cursor == 2 * number
        # Those on the shelf, and one being made when this one was taken.
        assert source.taken <= 2 * (number + 3 + 1)
    for _ in range(2 * (40 + 3)):  # it does go on to the bound, without being asked
        assert source.room.acquire(timeout=60)
    ahead.close()
    assert source.taken in (2 * 43, 2 * 44)
    assert "dsx-data" not in [thread.name for thread in threading.enumerate()]


def test_prefetching_tells_of_errors_in_their_turn() -> None:
    ahead = Prefetched(batches(Source(fails=5)), depth=50, pin=False)
    assert [int(next(ahead)[0][0, 0]) for _ in range(5)] == [0, 1, 2, 3, 4]
    for _ in range(2):
        with pytest.raises(DataError, match="source: broke"):
            next(ahead)
    ahead.close()


def test_prefetching_ends_with_its_owner() -> None:
    ahead = Prefetched(batches(Source()), depth=2, pin=False)
    next(ahead)
    thread = ahead._thread
    assert thread is not None
    gone = weakref.ref(ahead)
    del ahead
    gc.collect()
    assert gone() is None
    thread.join(timeout=60)
    assert not thread.is_alive()


@pytest.mark.parametrize("streaming", [False, True])
def test_documents_apart(tmp_path: Path, streaming: bool) -> None:
    """The same windows as joined ones, positions and labels of each document its own."""
    path = write(tmp_path / "a.jsonl", [f"document {n} " * (n % 5 + 1) for n in range(60)])
    joined = DataConfig(
        source=str(path),
        tokenizer="bytes",
        sequence_length=64,
        held_out=0.1,
        streaming=streaming,
        lanes=2,
        shuffle_buffer=8,
    )
    apart = joined.model_copy(update={"documents": "apart"})
    one, two = (
        Text.open(prepare_text(data, tmp_path / "cache", held_out_tokens=200), data)
        for data in (joined, apart)
    )
    assert one.digest != two.digest
    first, second = one.samples(), two.samples()
    for number in range(2 * joined.lanes):
        wanted = kept_apart(ids(first.take(number)), 256)
        assert all(map(torch.equal, second.take(number), wanted))
        assert (wanted[2] == 0).any()
    held_out = two.held_out[0].sequences.window(0)
    assert all(map(torch.equal, held_out, kept_apart(ids(one.held_out[0].sequences.window(0)), 256)))


def test_a_mixture_of_chats_and_text_from_a_folder(tmp_path: Path) -> None:
    """Files that ``datasets`` reads as one folder, beside text; the order is one at every degree."""
    (tmp_path / "chats").mkdir()
    turns = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]
    for part in range(2):
        rows = [json.dumps({"messages": turns * (n % 5 + 1)}) for n in range(40)]
        (tmp_path / f"chats/{part}.jsonl").write_text("\n".join(rows))
    text = write(tmp_path / "a.jsonl", [f"document {n} " * 5 for n in range(60)])
    sources = [
        MixedSource(source=str(tmp_path / "chats"), format="chat", weight=3),
        MixedSource(source=str(text), label="text"),
    ]
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    template += "{% if add_generation_prompt %}<assistant>{% endif %}"
    data = DataConfig(sources=sources, tokenizer="bytes", chat_template=template, sequence_length=128)
    opened = Text.open(prepare_text(data, tmp_path / "cache", held_out_tokens=1), data)
    assert opened.parts[0].corpus.info.train.documents == 76
    assert opened.bits_per_byte(1.0) is opened.unigram_bits_per_byte is None
    assert opened.mean_loss({"chats": 1.0, "text": 2.0}) == 1.25
    rows = dict(opened.rows(100, 4))
    assert rows["packs chats"].startswith("76 documents in ")
    assert "packs text" not in rows
    whole = [batch for batch, _ in islice(batches(opened.samples(), micro_batch_size=4), 20)]
    for dp in (2, 4):
        ranks = [batches(opened.samples(), micro_batch_size=4 // dp, dp=dp, dp_rank=d) for d in range(dp)]
        for ids, positions in whole:
            found = [next(rank)[0] for rank in ranks]
            assert torch.equal(torch.cat([one for one, _ in found]), ids)
            assert torch.equal(torch.cat([two for _, two in found]), positions)
