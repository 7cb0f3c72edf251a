"""The pictures of a micro-batch as an estimate takes them: those of the fullest chats of the data.

How many pictures a chat has, of which sizes, and how many tokens a processor writes for each, nothing but
data says. So the first chats of the data are looked at, and those with the most pictures, and with the most
pixels, go through the family's own processor. The micro-batch consists of those of which it makes most, in
rows of the whole sequence length: an upper bound, as far as later chats have no more.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import lru_cache
from itertools import chain, cycle, islice
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dsx.config.schema import DataConfig
from dsx.data.masks import Masks
from dsx.data.packs import Sample, Seen
from dsx.data.pictures import together
from dsx.data.records import BadRecordError, Example, examples, pictures_in
from dsx.data.tokenizers import load_tokenizer
from dsx.errors import ConfigError, DataError
from dsx.memory.layer_record import PictureInput, TensorForm
from dsx.models.config_values import at

_LOOKED_AT = 2000
"""Chats at the beginning of each source."""

_PROCESSED = 16
"""Of these, by number of pictures and again by pixels."""


class _Row(NamedTuple):
    """A chat as the model reads it.

    Attributes:
        pictures: How many it has.
        pixels: Height and width of the largest.
        sample: A row of the sequence length.
    """

    pictures: int
    pixels: tuple[int, int]
    sample: Sample

    @property
    def weight(self) -> int:
        """Numbers that a tower is given for it."""
        return sum(each.numel() for each in self.sample[2].pictures.values())


class Pictures(NamedTuple):
    """A micro-batch with pictures.

    Attributes:
        inputs: What the first layer is given.
        said: What that supposes, in words.
    """

    inputs: tuple[PictureInput, ...]
    said: str


def pictures_of(data: DataConfig, micro_batch: int) -> Pictures:
    """The fullest micro-batch of so many chats of ``dsx.data``, which may be the same ones again.

    Raises:
        ConfigError: No chat with a picture can be read.
    """
    return _supposed(data.model_dump_json(), micro_batch)


@lru_cache(maxsize=8)
def _supposed(settings: str, micro_batch: int) -> Pictures:
    """The same of the settings as JSON: a plan asks for each of its layouts."""
    rows, count = _fullest(DataConfig.model_validate_json(settings), micro_batch)
    rows = tuple(islice(cycle(rows), micro_batch))
    (ids, given), _ = together([row.sample for row in rows])
    largest = " x ".join(f"{size:,}" for size in max(row.pixels for row in rows))
    said = f"at most {sum(row.pictures for row in rows)} pictures in a micro-batch, the largest {largest}"
    said += f", as in the fullest of {'the first ' * (count >= _LOOKED_AT)}{count:,} chats of the data"
    inputs = [PictureInput(name, _form(x), _values(x)) for name, x in {"": ids, **given}.items()]
    return Pictures(tuple(inputs), said)


def _form(x: Tensor) -> TensorForm:
    return TensorForm(tuple(x.shape), str(x.dtype).removeprefix("torch."), x.element_size(), False)


def _values(x: Tensor) -> str:
    return "" if x.is_floating_point() else json.dumps(x.tolist(), separators=(",", ":"))


def _fullest(data: DataConfig, count: int) -> tuple[tuple[_Row, ...], int]:
    """So many rows at most, the fullest first, and of how many chats they are."""
    try:
        parts = [data.of_part(part) for part in data.parts()]
        known = [[*islice(_chats(part), _LOOKED_AT)] for part in parts]
        rows = [row for part, chats in zip(parts, known, strict=True) for row in _rows(part, _chosen(chats))]
    except (DataError, OSError) as error:
        raise _refusal(data, str(error).partition("\n")[0]) from error
    if not rows:
        raise _refusal(data, f"none of its chats has a picture and at most {data.sequence_length:,} tokens")
    rows.sort(key=lambda row: row.weight, reverse=True)
    return tuple(rows[:count]), sum(map(len, known))


def _refusal(data: DataConfig, why: str) -> ConfigError:
    return ConfigError(
        at("dsx.data.source", data.source),
        f"an estimate takes the pictures of a micro-batch from it: {why}",
        "name chats of this machine: a file of one, with as many pictures as you expect, will do",
    )


_Chat = tuple[Example, list[tuple[int, int]]]
"""A chat, and height and width of each of its pictures."""


def _chats(data: DataConfig) -> Iterator[_Chat]:
    """Chats, those that cannot be used left out."""
    from PIL import Image

    for each in examples(data):
        if isinstance(each, BadRecordError):
            continue
        sizes = []
        for path in pictures_in(each.messages):
            with Image.open(path) as image:  # which reads its size alone
                sizes.append((image.height, image.width))
        yield each, sizes


def _chosen(chats: list[_Chat]) -> Iterator[_Chat]:
    shown = [chat for chat in chats if chat[1]]
    by_number = sorted(shown, key=lambda chat: -len(chat[1]))[:_PROCESSED]
    by_pixels = sorted(shown, key=lambda chat: -sum(h * w for h, w in chat[1]))[:_PROCESSED]
    known = dict.fromkeys(map(id, chain(by_number, by_pixels)))
    return (chat for chat in shown if id(chat) in known)


def _rows(data: DataConfig, chats: Iterator[_Chat]) -> Iterator[_Row]:
    """What the processor makes of chats that are not too long."""
    masks = Masks(data, load_tokenizer(data.tokenizer, trust_remote_code=data.trust_remote_code))
    for example, sizes in chats:
        try:
            found = masks.seen(example)
        except BadRecordError:
            continue
        room = data.sequence_length - len(found.ids)
        if room >= 0:
            ids = F.pad(torch.from_numpy(found.ids), (0, room))
            tokens = {key: F.pad(each, (0, room)) for key, each in found.seen.tokens.items()}
            seen = Seen(tokens, found.seen.pictures, data.sequence_length)
            yield _Row(len(sizes), max(sizes), (ids, ids, seen))
