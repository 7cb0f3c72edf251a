"""Chats with pictures: the family's own processor, and the sequences that it makes of them.

The chat's template writes a mark for each picture. The processor writes tokens in the place of a mark, as
many as the picture is worth, and says where (``ProcessorMixin.get_text_with_replacements``). What is trained
on is found in the text with marks, and moved to where it stands then; nothing of a picture is.

A corpus keeps ids, the text with marks, and where the pictures are. Pixels are made again whenever a sequence
is taken. A chat is one sequence, filled up with padding.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dsx.data.packs import Fill, Packs, Sample, Seen
from dsx.data.tokenizers import TokenIds
from dsx.errors import DataError
from dsx.models.transformers_settings import first_line, quiet_transformers
from dsx.nn.documents import MicroBatch
from dsx.terminal import shortened

Span = tuple[int, int]
_KEYS = ("path", "image", "url")
_NOT_TOLD = ("input_ids", "attention_mask")
_DEEP = ("I", "F")  # of Pillow, whose conversion to eight bits makes white of all above 255
_TOKEN = re.compile("(image|video|audio)_token_(id|index)")


class Chat(NamedTuple):
    """A chat as text, and its pictures.

    Attributes:
        text: As its template writes it, with a mark for each picture.
        files: Path and digest of each.
    """

    text: str
    files: tuple[tuple[str, str], ...]

    @property
    def line(self) -> bytes:
        """Itself in a line of JSON."""
        return json.dumps(self._asdict()).encode() + b"\n"

    @classmethod
    def of(cls, line: bytes) -> Chat:
        """The inverse."""
        raw = json.loads(line)
        return cls(raw["text"], tuple((path, digest) for path, digest in raw["files"]))


class Expanded(NamedTuple):
    """A chat with the tokens of its pictures.

    Attributes:
        text: With the tokens.
        spans: Where each picture's are, and by how many characters the text behind them has moved.
        ids: Token ids of the text, as the processor gives them.
        seen: The rest.
    """

    text: str
    spans: tuple[tuple[Span, int], ...]
    ids: TokenIds
    seen: Seen


def file_of(part: Mapping[str, Any], folder: Path) -> str | None:
    """The path of a picture that a part of a turn's content names; None if it names none.

    Raises:
        OSError: There is no such file on this machine.
    """
    named = next((part[key] for key in _KEYS if isinstance(part.get(key), str)), None)
    if named is None:
        return None
    path = folder / Path(named.removeprefix("file://")).expanduser()
    if not path.is_file():
        what = f"there is no such file on this machine: {shortened(str(path), 200)}"
        raise FileNotFoundError(what)
    return str(path.absolute())


class Processor:
    """The processor of a composite model's folder.

    Raises:
        DataError: transformers cannot load it, or it has no chat template.
    """

    def __init__(self, name: str) -> None:
        from transformers import AutoProcessor

        self._where = f'dsx.data.pictures: the processor in "{name}"'
        try:
            with quiet_transformers():
                self._made: Any = AutoProcessor.from_pretrained(
                    str(Path(name).expanduser()), local_files_only=True, trust_remote_code=False
                )
                self._made.image_processor  # noqa: B018 - a tokenizer alone has none
            self._ids_of_model = _ids_in(Path(name).expanduser() / "config.json")
        except Exception as error:
            fix = "name a composite model's folder; what it asks for comes with pip install dsx[pictures]"
            raise DataError(self._where, f"cannot be loaded ({first_line(error)})", fix) from error
        self.chat_template: str | None = getattr(self._made, "chat_template", None)
        self._places: list[Any] = []
        # Asked for, they would come with the tensors, and InternVL's processor would make one of them.
        expand = getattr(self._made, "get_text_with_replacements", None)
        self._made.get_text_with_replacements = partial(self._noting, expand)

    def _noting(self, expand: Any, *given: Any, **named: Any) -> Any:
        text, places = expand(*given, **named)
        self._places = places[0] if places else []
        return text, places

    def identity(self) -> str:
        """A hash of its settings."""
        return hashlib.sha256(self._made.to_json_string().encode()).hexdigest()

    def expanded(self, chat: Chat) -> Expanded:
        """A chat with the tokens of its pictures.

        Raises:
            ValueError: A picture cannot be read or is another one, or the processor refuses them.
        """
        images = [_opened(path, digest) for path, digest in chat.files]
        try:
            with quiet_transformers():
                made = self._made(
                    text=[chat.text],
                    images=images or None,
                    return_tensors="pt",
                    add_special_tokens=False,
                )
        except Exception as error:
            raise ValueError(f"the processor refuses the chat ({first_line(error)})") from error
        places, self._places = self._places, []
        ids = made["input_ids"][0].numpy().astype(np.int64)
        if len(places) != len(images):
            raise ValueError(
                f"the processor puts {len(places)} pictures into it, and it has {len(images)}: "
                "its template writes no mark for each, or it does not say where it puts them"
            )
        pieces, end, spans = list[str](), 0, list[tuple[Span, int]]()
        for each in places:
            pieces += [self._of_text(chat.text[end : each["span"][0]]), each["replacement"]]
            end = each["span"][1]
            spans.append((tuple(each["new_span"]), len(each["replacement"]) - len(each["text"])))
        pieces.append(self._of_text(chat.text[end:]))
        rest = {key: value for key, value in made.items() if key not in _NOT_TOLD}
        loose = next((key for key, value in rest.items() if not isinstance(value, Tensor)), None)
        if loose is not None:
            raise ValueError(f"the processor gives {loose}, which is no tensor")
        tokens = {key: value[0] for key, value in rest.items() if value.shape == (1, len(ids))}
        pictures = {key: value for key, value in rest.items() if key not in tokens}
        return Expanded("".join(pieces), tuple(spans), ids, Seen(tokens, pictures))

    @cached_property
    def _marks(self) -> list[str]:
        """What stands for a picture in a text: before its tokens are there, and one of these.

        The model may read another token as a picture than the processor names: Llama 4's is a patch.
        """
        words = self._made.tokenizer
        told = [getattr(each, "image_token", None) for each in (self._made, words)]
        added = getattr(words, "added_tokens_decoder", {})
        told += [added[each] for each in self._ids_of_model if each in added]
        return [str(mark) for mark in dict.fromkeys(told) if mark]

    def _of_text(self, part: str) -> str:
        """What stands between pictures. Raises ValueError if a part of it stands for a picture."""
        found = next((mark for mark in self._marks if mark in part), None)
        if found is not None:
            raise ValueError(f"its text has {found}, which stands for a picture, and there is none")
        return part


def _ids_in(config: Path) -> list[int]:
    """Tokens that the model of a folder reads as pictures, video or sound; none where there is no config."""
    given = json.loads(config.read_text()) if config.is_file() else {}
    return [value for key, value in given.items() if _TOKEN.fullmatch(key) and isinstance(value, int)]


def _opened(path: str, digest: str) -> Any:
    """A picture, upright, in red, green and blue. Raises ValueError if there is none that can be had."""
    from PIL import Image
    from transformers.image_utils import load_image

    try:
        if digest_of(path) != digest:
            raise ValueError(f"the picture {path} is another one than when the chat was prepared")
        with Image.open(path) as found:
            if found.mode.startswith(_DEEP):
                what = (
                    f"has more than eight bits a number (mode {found.mode}), of which the upper would be cut"
                )
                raise ValueError(f"the picture {path} {what}")
            return load_image(found)
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(f"the picture {path} cannot be read ({first_line(error)})") from error


def digest_of(path: str) -> str:
    """Hash of a picture's file. Raises OSError."""
    return hashlib.blake2b(Path(path).read_bytes(), digest_size=16).hexdigest()


def moved(spans: Sequence[Span], places: Sequence[tuple[Span, int]]) -> list[Span]:
    """Where parts of a chat stand once its pictures' tokens are in it, without the pictures themselves.

    >>> moved([(0, 3), (4, 9)], [((5, 25), 19)])
    [(0, 3), (4, 5), (25, 28)]
    """
    found = list(spans)
    for (first, behind), longer in places:
        found = [part for span in found for part in _around(span, first, behind, longer)]
    return [(start, end) for start, end in found if start < end]


def _around(span: Span, first: int, behind: int, longer: int) -> Iterator[Span]:
    """The parts of a span in front of a picture's tokens and behind them, these written in."""
    start, end = span
    if end <= first:
        yield span
    elif start >= behind - longer:
        yield start + longer, end + longer
    else:
        yield from ((start, first), (behind, end + longer))


class PictureRows:
    """Chats with pictures, one to a sequence of S tokens; those that are longer are left out.

    Args:
        packs: Their ids, and what is trained on.
        file: The :attr:`Chat.line` of each.
        processor: Name of the folder with the processor.
    """

    def __init__(self, packs: Packs, file: Path, processor: str) -> None:
        self.packs, self._file, self._name = packs, file, processor
        self.sequence_length = packs.sequence_length
        self._kept = packs.kept()

    def __len__(self) -> int:
        return len(self._kept)

    def fill(self) -> Fill:
        """How full the sequences are."""
        return replace(self.packs.fill(), packs=len(self), places=len(self) * self.sequence_length)

    def empty(self) -> Sample:
        """A sequence of padding alone."""
        inputs, labels, _ = self.packs.empty()
        tokens = self.window(0)[2].tokens  # by the names that the others have
        return inputs, labels, Seen({key: torch.zeros_like(each) for key, each in tokens.items()}, {})

    @cached_property
    def _processor(self) -> Processor:
        return Processor(self._name)

    @cached_property
    def _starts(self) -> list[int]:
        with self._file.open("rb") as file:
            return [0, *np.cumsum([len(line) for line in file]).tolist()]

    def window(self, index: int) -> Sample:
        """Inputs and labels, int64 [S] each, and the :class:`Seen` of a chat.

        Raises:
            DataError: A picture is gone or another one, or the processor is.
            IndexError: ``index`` is outside ``range(len(self))``.
        """
        number = self._kept[index]
        with self._file.open("rb") as file:
            file.seek(self._starts[number])
            chat = Chat.of(file.readline())
        own, _ = self.packs.document(number)
        fix = "restore it, or start anew in another dsx.train.output"
        try:
            found = self._processor.expanded(chat)
        except ValueError as error:
            raise DataError(f"{self._file}, chat {number + 1}", str(error), fix) from error
        if not np.array_equal(found.ids, own):
            what = "the processor gives other tokens than when the chat was prepared"
            raise DataError(f"{self._file}, chat {number + 1}", what, fix)
        inputs, labels = self.packs.row(number)
        room = self.sequence_length - len(own)
        tokens = {key: F.pad(value, (0, room)) for key, value in found.seen.tokens.items()}
        return inputs, labels, Seen(tokens, found.seen.pictures, len(own))

    def chat_length(self, index: int) -> int:
        """Tokens of a chat."""
        return self.packs.length(self._kept[index])


_LENGTHS = 8


def together(rows: Sequence[Sample], multiple_of: int = 1) -> MicroBatch:
    """A micro-batch of chats with pictures: ids [B, s] with what the processor made, and labels [B, s].

    Padding behind the longest chat is left out, but for what makes s one of eight lengths up to S, for which
    memory and compiled code are made again, and one that ``multiple_of`` tensor-parallel ranks can share.
    Pictures of several sizes are filled up with zeros, as processors do within a chat.
    """
    inputs, labels, seen = zip(*rows, strict=True)
    unit = -(-len(inputs[0]) // (_LENGTHS * multiple_of)) * multiple_of
    end = -(-max(each.length for each in seen) // unit) * unit or unit  # beyond S, slices end there
    none, made = torch.zeros_like(inputs[0]), dict[str, Tensor]()
    for key in dict.fromkeys(key for each in seen for key in each.tokens):  # 0 is text, as in padding
        made[key] = torch.stack([each.tokens.get(key, none)[:end] for each in seen])
    for key in dict.fromkeys(key for each in seen for key in each.pictures):
        held = [each.pictures[key] for each in seen if key in each.pictures]
        most = [max(sizes) for sizes in zip(*(each.shape[1:] for each in held), strict=True)]
        made[key] = torch.cat([_filled(each, most) for each in held])
    ids, labels_BS = torch.stack(inputs), torch.stack(labels)
    return MicroBatch((ids[:, :end].contiguous(), made), labels_BS[:, :end].contiguous())


def _filled(tensor: Tensor, most: Sequence[int]) -> Tensor:
    room = [size - have for size, have in zip(most, tensor.shape[1:], strict=True)]
    return F.pad(tensor, [each for size in reversed(room) for each in (0, size)]) if any(room) else tensor
