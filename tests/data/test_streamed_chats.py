"""Streamed chats: each record's documents once a turn, whole, in packs; resumed exactly; mixed with text."""

from __future__ import annotations

import csv
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from chat_tokenizers import published, save_tokenizer
from test_chat_masks import of_dsx, turns, write

from dsx.config.schema import DataConfig
from dsx.data.text import Text, prepare_text
from dsx.errors import DataError

S, LANES = 96, 4
ROWS = [
    {
        "messages": turns(
            *[f"chat {n}, {i} " + "so " * draw.randint(0, 9) for i in range(draw.choice((2, 4, 6)))]
        )
    }
    for draw in (random.Random(2),)
    for n in range(80)
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("chats")
    save_tokenizer(made / "tokenizer", template=published("qwen3"))
    for part in range(2):
        write(made / f"chats{part}.jsonl", ROWS[part::2])
    datasets.Dataset.from_list(ROWS).to_parquet(str(made / "chats.parquet"))
    write_csv(made / "chats.csv", ROWS)
    return made


def write_csv(path: Path, rows: list[dict[str, Any]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerows([["messages"], *([json.dumps(row["messages"], indent=1)] for row in rows)])


def config(folder: Path, source: str, **keys: Any) -> DataConfig:
    base = {"format": "chat", "sequence_length": S, "streaming": True, "lanes": LANES, "shuffle_buffer": 16}
    own = {"source": str(folder / source), "tokenizer": str(folder / "tokenizer")}
    return DataConfig(**{**base, **own, "held_out": 0, **keys})


def opened(data: DataConfig, cache: Path, state: object = None) -> Text:
    text = Text.open(prepare_text(data, cache, held_out_tokens=200), data)
    text.resume({"data_stream": json.loads(json.dumps(state))} if state else {})
    return text


def taken(text: Text, begin: int, end: int, rank: int = 0, dp: int = 1) -> dict[int, list[list[int]]]:
    """The samples of one data-parallel rank, by their numbers."""
    samples = text.samples(cursor=begin, in_flight=LANES)
    numbers = range(begin + rank, end, dp)
    return {number: [part.tolist() for part in samples.take(number)] for number in numbers}


def documents(sample: list[list[int]]) -> list[tuple[list[int], list[int]]]:
    """Ids and unshifted labels of the documents in a pack that have labels."""
    ids, labels, positions = sample
    begins = [at for at in range(S) if positions[at] == 0]
    assert positions == [at - max(begin for begin in begins if begin <= at) for at in range(S)]
    cut = [(ids[a:b], [-100, *labels[a : b - 1]]) for a, b in zip(begins, [*begins[1:], S], strict=True)]
    return [one for one in cut if any(label != -100 for label in one[1])]


@pytest.mark.parametrize(
    ("source", "keys"),
    [
        ("chats*.jsonl", {}),
        ("chats.parquet", {"train_on": "each", "held_out": 0.2}),
        ("chats*.jsonl", {"documents": "joined", "train_on": "last"}),
        ("chats.csv", {}),
    ],
)
def test_a_stream_has_every_document_and_goes_on_anywhere(
    folder: Path, tmp_path: Path, source: str, keys: dict[str, Any]
) -> None:
    data = config(folder, source, **keys)
    whole = taken(opened(data, tmp_path), 0, 200)
    all_rows = write(tmp_path / "all.jsonl", ROWS)
    read = of_dsx(all_rows, folder / "tokenizer", train_on=keys.get("train_on", "assistant"))
    if "documents" not in keys:
        cut = [(tuple(ids[:S]), tuple(labels[:S])) for ids, labels in read]
        known = Counter(
            one for one in cut if set(one[1]) != {-100}
        )  # the others have nothing left to train on
        found = Counter((tuple(a), tuple(b)) for sample in whole.values() for a, b in documents(sample))
        assert not found.keys() - known.keys()
        held_out = opened(data, tmp_path).parts[0].corpus.held_out
        kept = {tuple(held_out.document(n)[0].tolist()) for n in held_out.kept(999)}
        left_out = {ids for ids, _ in known} - {ids for ids, _ in found}
        assert kept <= left_out
        assert 0.7 * keys.get("held_out", 0) <= len(left_out) / len(known) <= 1.5 * keys.get("held_out", 0)
        assert max(found.values()) - min(found.values()) < 6  # each lane begins again by itself
        filled = sum(len(ids) for sample in whole.values() for ids, _ in documents(sample))
        assert filled > 0.8 * S * len(whole)
    else:
        known = Counter(label for _, labels in read for label in labels)
        found = Counter(label for sample in whole.values() for label in sample[1])
        assert abs(found[-100] / found.total() - known[-100] / known.total()) < 0.02
        assert len(whole[0]) == 2
    cursor, state = 0, None
    for dp, steps in ((1, 7), (2, 9), (4, 12)):
        ranks = [opened(data, tmp_path, state) for _ in range(dp)]
        end = cursor + 4 * steps
        parts = [taken(text, cursor, end, rank, dp) for rank, text in enumerate(ranks)]
        assert {n: sample for part in parts for n, sample in part.items()} == {
            n: whole[n] for n in range(cursor, end)
        }
        state, cursor = ranks[0].together([text.state(end) for text in ranks]), end


def test_text_and_chats_in_one_stream(folder: Path, tmp_path: Path) -> None:
    """Documents of both are apart; each source has its share."""
    text = write(folder / "text.jsonl", [{"text": f"plain {n} " + "words " * 20} for n in range(300)])
    parts = [
        {"source": str(folder / "chats*.jsonl"), "format": "chat", "weight": 0.5},
        {"source": str(text), "weight": 0.5},
    ]
    data = DataConfig.model_validate(
        config(folder, "x").model_dump(exclude={"source", "format"}, exclude_unset=True) | {"sources": parts}
    )
    samples = taken(opened(data, tmp_path), 0, 40)
    plain = sum(-100 not in labels[: S // 2] for _, labels, _ in samples.values())
    assert all(len(sample) == 3 for sample in samples.values())
    assert 15 <= plain <= 25


def test_what_a_stream_says_of_records(folder: Path, tmp_path: Path) -> None:
    rows = [json.dumps(row) for row in ROWS]
    (tmp_path / "a.jsonl").write_text("\n".join([*rows[:60], '{"messages": []}', *rows[60:]]) + "\n")
    data = config(folder, str(tmp_path / "a.jsonl"))
    with pytest.raises(DataError, match=r"a\.jsonl, line 61: messages is empty"):
        taken(opened(data, tmp_path), 0, 200)
    text = opened(config(folder, str(tmp_path / "a.jsonl"), bad_records="skip"), tmp_path)
    taken(text, 0, 120)
    assert any("1 bad records skipped, the first: messages is empty" in one for one in text.news())
    with pytest.raises(DataError, match=r"line \d+: it has \d+ tokens, and dsx.data.too_long refuses more"):
        opened(config(folder, "chats0.jsonl", too_long="refuse", sequence_length=32), tmp_path)
    with pytest.raises(DataError, match="every document of the training split is longer"):
        taken(opened(config(folder, "chats0.jsonl", too_long="drop", sequence_length=8), tmp_path), 0, 4)
    dated = config(folder, "chats0.jsonl", chat_template=published("gptoss"), sequence_length=400)
    with pytest.raises(
        DataError, match=r'dsx.data.chat_date: the chat template writes the day.* set it: "20'
    ):
        opened(dated, tmp_path)
    named = DataConfig.model_validate({**dated.model_dump(), "chat_date": "2001-02-03", "train_on": "last"})
    (sample,) = taken(opened(named, tmp_path), 0, 1).values()
    assert torch.tensor(sample[1]).ne(-100).any()
    write_csv(tmp_path / "a.csv", [*ROWS, {"messages": []}])
    with pytest.raises(DataError, match=r"a\.csv, row 81: messages is empty"):
        taken(opened(config(folder, str(tmp_path / "a.csv")), tmp_path), 0, 200)
