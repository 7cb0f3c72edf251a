"""Chats with pictures: ids, what is trained on and pixels are those of the family's own processor."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import picture_chats
import pytest
import torch
from PIL import Image

from dsx.config.schema import DataConfig
from dsx.data.batches import Batches, Shuffled
from dsx.data.corpus import Corpus, prepare
from dsx.data.packs import Seen
from dsx.data.pictures import Chat, Processor, together
from dsx.errors import DataError

SEQUENCE = 96


def settings(folder: Path, **changes: Any) -> DataConfig:
    given = {
        "source": str(folder / "chats.jsonl"),
        "format": "chat",
        "pictures": True,
        "tokenizer": str(folder / "model"),
        "sequence_length": SEQUENCE,
        "too_long": "refuse",
        "held_out": 0.0,
    }
    return DataConfig(**given | changes)


def opened(folder: Path, **changes: Any) -> Corpus:
    data = settings(folder, **changes)
    return Corpus.open(prepare(data, folder / "cache"), sequence_length=data.sequence_length)


@pytest.mark.parametrize("marked", [True, False])
def test_a_chat_is_what_the_processor_makes_of_it(marked: bool, tmp_path: Path) -> None:
    made = picture_chats.save_processor(tmp_path / "model")
    chats = picture_chats.chats(tmp_path)
    if not marked:
        picture_chats.save_processor(tmp_path / "model", marked=False)
    rows = opened(tmp_path).train
    assert len(rows) == len(chats)
    for number, chat in enumerate(chats):
        wanted = made.apply_chat_template(
            picture_chats.absolute(chat, tmp_path),
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
            return_assistant_tokens_mask=True,
            processor_kwargs={"add_special_tokens": False, "return_offsets_mapping": True},
        )
        inputs, labels, seen = rows.window(number)
        ids, mask = wanted["input_ids"][0], torch.as_tensor(wanted["assistant_masks"])[0].bool()
        room = SEQUENCE - len(ids)
        assert torch.equal(inputs[: len(ids)], ids)
        assert torch.equal(labels[: len(ids) - 1], ids.where(mask, -100)[1:])
        assert bool((labels[len(ids) - 1 :] == -100).all())
        assert bool((labels != -100).any())
        for key, value in seen.tokens.items():
            assert torch.equal(value, torch.nn.functional.pad(wanted[key][0], (0, room)))
        assert seen.pictures.keys() == {"pixel_values"} & wanted.keys()
        for key, value in seen.pictures.items():
            assert torch.equal(value, wanted[key])


def test_nothing_of_a_picture_is_trained_on(tmp_path: Path) -> None:
    """Where all else is: ten tokens each, with those around it."""
    picture_chats.save_processor(tmp_path / "model")
    picture_chats.chats(tmp_path)
    rows = opened(tmp_path, train_on="all").train
    for number in range(len(rows)):
        inputs, labels, _ = rows.window(number)
        length = len(rows.packs.document(number)[0])
        shown = (inputs >= picture_chats.IMAGE) & (inputs <= picture_chats.DONE)
        assert bool((labels[:-1][shown[1:]] == -100).all())
        assert int((labels != -100).sum()) >= length - 1 - 10 * int((inputs == picture_chats.BEGIN).sum())


def test_a_micro_batch_fills_up_pictures_of_several_sizes() -> None:
    ids = torch.arange(4)
    row = partial(Seen, {"kinds": ids}, length=4)
    small, large = torch.ones(1, 3, 2, 5), torch.ones(2, 3, 4, 3)
    given = [row({"pixels": small}), row({}), row({"pixels": large})]
    (inputs, seen), labels = together([(ids, -ids, each) for each in given])
    assert torch.equal(inputs, ids.expand(3, 4))
    assert torch.equal(labels, -inputs)
    assert torch.equal(seen["kinds"], inputs)
    assert seen["pixels"].shape == (3, 3, 4, 5)
    assert torch.equal(seen["pixels"][:1, :, :2], small)
    assert torch.equal(seen["pixels"][1:, ..., :3], large)
    assert seen["pixels"].sum() == small.numel() + large.numel()


def test_rows_of_which_some_have_kinds_of_tokens_share_a_micro_batch() -> None:
    """Text is of kind 0, which is what a processor that gives kinds beside pictures alone leaves out."""
    ids = torch.arange(1, 5)
    given = [Seen({}, {}, 4), Seen({"kinds": ids}, {}, 4)]
    (_, seen), _ = together([(ids, ids, each) for each in given])
    assert torch.equal(seen["kinds"], torch.stack([torch.zeros_like(ids), ids]))


def test_a_step_has_its_chats_in_rows_of_like_lengths(tmp_path: Path) -> None:
    """The same chats as in the order without lengths, no token of them lost, over two ranks of two rows."""
    picture_chats.save_processor(tmp_path / "model")
    picture_chats.chats(tmp_path)
    rows: Any = opened(tmp_path).train
    text, unit = Shuffled(rows, seed=1), SEQUENCE // 8
    shares = [
        Batches(text, micro_batch_size=2, accumulation=3, dp=2, dp_rank=rank, multiple_of=3)
        for rank in (0, 1)
    ]
    found = [ids for _ in range(3) for share in shares for ids in next(share).inputs[0].tolist()]
    chats = sorted((rows.packs.document(number)[0].tolist() for number in range(12)), key=len, reverse=True)
    taken = [next(own for own in chats if ids[: len(own)] == own) for ids in found]
    assert sorted(taken) == sorted(chats)
    assert [*map(len, taken)] == [*map(len, chats)]
    for one, other, longest in zip(found[::2], found[1::2], taken[::2], strict=True):
        assert len(one) == len(other) == -(-len(longest) // unit) * unit


def chat_with(part: Any) -> str:
    turns = [{"role": "user", "content": [part]}, {"role": "assistant", "content": "yes"}]
    return json.dumps({"messages": turns}) + "\n"


BAD = {
    "a path that is not there": (
        {"type": "image", "path": "gone.png"},
        r"line 1.*turn 1: there is no such .*gone.png",
    ),
    "an address": ({"type": "image", "url": "https://x.org/a.png"}, "no such file on this machine.*x.org"),
    "no path": ({"type": "image"}, r"has no path: \{\"type\": \"image\", \"path\""),
    "a video": (
        {"type": "video", "path": "a.mp4"},
        "a part of type video; dsx trains on text and image alone",
    ),
    "no picture": ({"type": "image", "path": "chats.jsonl"}, "chats.jsonl cannot be read"),
    "a token without one": ({"type": "text", "text": "<image>"}, "its text has <image>, which stands for"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_read_is_named(case: str, tmp_path: Path) -> None:
    part, told = BAD[case]
    picture_chats.save_processor(tmp_path / "model")
    (tmp_path / "chats.jsonl").write_text(chat_with(part))
    with pytest.raises(DataError, match=told):
        opened(tmp_path)


def test_pictures_that_would_be_read_otherwise_than_they_are_drawn_are_named(tmp_path: Path) -> None:
    """Pillow makes white of all above 255 in sixteen bits."""
    picture_chats.save_processor(tmp_path / "model")
    deep = np.arange(64 * 64, dtype=np.uint16).reshape(64, 64) * 16
    Image.fromarray(deep).save(tmp_path / "deep.png")
    (tmp_path / "chats.jsonl").write_text(chat_with({"type": "image", "path": "deep.png"}))
    with pytest.raises(DataError, match=r"deep\.png has more than eight bits a number \(mode I"):
        opened(tmp_path)


def test_a_picture_too_large_to_be_opened_is_named(tmp_path: Path) -> None:
    picture_chats.save_processor(tmp_path / "model")
    (tmp_path / "large.ppm").write_bytes(b"P6 20000 20000 255\n")
    (tmp_path / "chats.jsonl").write_text(chat_with({"type": "image", "path": "large.ppm"}))
    with pytest.raises(DataError, match=r"large\.ppm cannot be read \(.*exceeds limit"):
        opened(tmp_path)


def test_a_token_of_a_picture_beside_another_picture_is_named(tmp_path: Path) -> None:
    picture_chats.save_processor(tmp_path / "model")
    picture_chats.chats(tmp_path)
    shown = {"type": "image", "path": "pictures/0.png"}
    turns = [
        {"role": "user", "content": [shown, {"type": "text", "text": "and <image>?"}]},
        {"role": "assistant", "content": "yes"},
    ]
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": turns}))
    with pytest.raises(DataError, match="its text has <image>, which stands for a picture"):
        opened(tmp_path)


def test_a_token_that_the_model_alone_reads_as_a_picture_is_named(tmp_path: Path) -> None:
    """As Llama 4's patch, which its processor writes around the token that it names."""
    picture_chats.save_processor(tmp_path / "model")
    picture_chats.chats(tmp_path)
    (tmp_path / "chats.jsonl").write_text(chat_with({"type": "text", "text": "<done>"}))
    assert len(opened(tmp_path).train) == 1
    told = {"image_token_index": picture_chats.DONE, "video_token_id": -200}
    (tmp_path / "model/config.json").write_text(json.dumps(told))
    with pytest.raises(ValueError, match="its text has <done>, which stands for a picture"):
        Processor(str(tmp_path / "model")).expanded(Chat("a <done>", ()))


@pytest.mark.parametrize("beside", [{"image": "pictures/0.png"}, {"images": ["pictures/0.png"]}], ids=str)
def test_pictures_beside_turns_that_show_none_are_refused(beside: dict[str, Any], tmp_path: Path) -> None:
    """As in LLaVA's files, where the text has a mark that other families do not know."""
    picture_chats.save_processor(tmp_path / "model")
    picture_chats.chats(tmp_path)
    turns = [{"from": "human", "value": "<picture>\nwhat is it?"}, {"from": "gpt", "value": "a lake"}]
    (tmp_path / "chats.jsonl").write_text(json.dumps({"conversations": turns, **beside}))
    (name,) = beside
    with pytest.raises(DataError, match=f'"{name}" stands beside its turns, of which none shows a picture'):
        opened(tmp_path)


def test_pictures_of_the_assistant_and_those_that_are_not_read_are_refused(tmp_path: Path) -> None:
    picture_chats.save_processor(tmp_path / "model")
    picture_chats.chats(tmp_path)
    with pytest.raises(DataError, match=r"type image; dsx\.data\.pictures, which reads it, is false"):
        opened(tmp_path, pictures=False, too_long="truncate")
    turn = {"role": "assistant", "content": [{"type": "image", "path": "pictures/0.png"}]}
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "a"}, turn]}))
    with pytest.raises(DataError, match="turn 2 has a part of type image; dsx trains on text alone"):
        opened(tmp_path)


def test_a_picture_that_changes_is_named(tmp_path: Path) -> None:
    picture_chats.save_processor(tmp_path / "model")
    picture_chats.chats(tmp_path)
    rows = opened(tmp_path).train
    Image.new("RGB", (9, 9)).save(tmp_path / "pictures/1.png")
    rows.window(0)
    with pytest.raises(DataError, match=r"chat 2: the picture .*1.png is another one than when the chat was"):
        rows.window(1)
    (tmp_path / "pictures/1.png").unlink()
    with pytest.raises(DataError, match=r"chat 2: the picture .*1.png cannot be read"):
        rows.window(1)


def test_a_folder_without_a_processor_is_refused(tmp_path: Path) -> None:
    picture_chats.save_processor(tmp_path / "model").tokenizer.save_pretrained(tmp_path / "text")
    picture_chats.chats(tmp_path)
    with pytest.raises(
        DataError, match=r"pictures: the processor in .*text.*cannot be loaded.*dsx\[pictures\]"
    ):
        opened(tmp_path, tokenizer=str(tmp_path / "text"))


def test_long_chats_are_left_out_or_refused(tmp_path: Path) -> None:
    picture_chats.save_processor(tmp_path / "model")
    picture_chats.chats(tmp_path)
    short = opened(tmp_path, too_long="drop", sequence_length=48)
    assert 0 < len(short.train) < 12
    fill = short.fill()
    assert fill is not None
    assert (fill.packs, fill.dropped) == (len(short.train), 12 - len(short.train))
    with pytest.raises(DataError, match="refuses more than 48"):
        opened(tmp_path, sequence_length=48)


@pytest.mark.parametrize(
    "changes",
    [
        {"too_long": "truncate"},
        {"documents": "apart"},
        {"streaming": True},
        {"train_on": "each"},
        {"format": "text"},
    ],
    ids=str,
)
def test_settings_that_pictures_do_not_have_are_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    (key,) = changes
    named = "pictures stand in chats" if key == "format" else f"pictures are not read with {key}"
    with pytest.raises(ValueError, match=re.escape(named)):
        settings(tmp_path, **changes)
