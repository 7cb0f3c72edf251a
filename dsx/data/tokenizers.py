"""Text -> token ids: raw bytes, or any tokenizer of ``transformers``."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dsx.data.files import offline_unless, reachable
from dsx.errors import DataError
from dsx.models.custom_code import TOKENIZER_CONFIG, tokenizer_code
from dsx.models.transformers_settings import first_line, quiet_transformers
from dsx.terminal import printable

TokenIds = npt.NDArray[np.integer[Any]]


class ByteTokenizer:
    """UTF-8 bytes as ids 0 to 255, and 256 for the end of a document.

    >>> [ids.tolist() for ids in ByteTokenizer().encode(["é", "ab"])]
    [[195, 169], [97, 98]]
    """

    name = "bytes"
    vocab_size = 257
    end_id = 256
    bos_id = None

    def identity(self) -> str:
        return "bytes"

    def encode(self, documents: Sequence[str]) -> list[TokenIds]:
        """UTF-8 bytes of every document (uint8)."""
        return [np.frombuffer(document.encode(), np.uint8) for document in documents]

    def encode_with_ends(self, texts: Sequence[str], *, special: bool) -> list[tuple[TokenIds, TokenIds]]:
        """Ids of every text, and behind which of its characters each ends; ``special`` adds none here."""
        del special
        return [
            (ids, np.repeat(np.arange(1, len(text) + 1), [len(one.encode()) for one in text]))
            for ids, text in zip(self.encode(texts), texts, strict=True)
        ]

    def chat_template(self, tools: list[Any] | None) -> None:
        """None: bytes are no model's own."""
        del tools

    @property
    def special_tokens(self) -> dict[str, Any]:
        """None that could be written as text."""
        return {}

    def decode(self, token_ids: Sequence[int]) -> str:
        """Bytes as UTF-8, ``�`` for what is none, as a model in training may write it.

        A model's vocabulary may be padded beyond 257 ids; those have no text.
        """
        return bytes(one for one in token_ids if one < self.end_id).decode(errors="replace")

    def pieces(self, token_ids: Sequence[int]) -> list[str]:
        """The text of each id on its own."""
        ends = {self.end_id: "<end>"}
        return [ends.get(one) or (chr(one) if one < 128 else f"<0x{one:02X}>") for one in token_ids]


class TransformersTokenizer:
    """A tokenizer of ``transformers``; its end-of-sequence token ends documents, no other is added.

    Args:
        name: A local folder or a name on the Hugging Face hub.
        trust_remote_code: Whether to run code that comes with it.
    """

    def __init__(self, name: str, *, trust_remote_code: bool = False) -> None:
        self.name = name
        self._tokenizer = _loaded(name, trust_remote_code=trust_remote_code)
        with _blamed(name, "cannot be used"):
            end, ids = self._tokenizer.eos_token_id, self._tokenizer.get_vocab().values()
            # Ids may have gaps, so the largest may be above the number of tokens.
            vocab_size = max(len(self._tokenizer), 1 + max(ids, default=0))
        if not isinstance(end, int) or end < 0:
            raise DataError(
                _place(name),
                "it has no end-of-sequence token, which must end every document",
                "set eos_token in its tokenizer_config.json",
            )
        self.end_id = end
        self.vocab_size = max(vocab_size, end + 1)

    def identity(self) -> str:
        """A hash of the whole tokenizer, not of its name: a retrained one in the same folder is another."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        with _blamed(self.name, "cannot be used"):
            whole = (
                backend.to_str()
                if backend is not None
                else json.dumps(sorted(self._tokenizer.get_vocab().items()))
            )
        kind = type(self._tokenizer)
        about = hashlib.sha256(f"{kind.__name__} {self.end_id} {whole}".encode())
        if not kind.__module__.startswith("transformers."):  # code that came with it
            about.update(Path(inspect.getfile(kind)).read_bytes())
        return about.hexdigest()

    def save(self, folder: Path) -> None:
        self._tokenizer.save_pretrained(folder)

    def encode(self, documents: Sequence[str]) -> list[TokenIds]:
        """Ids of every document (int64), special tokens in the text included, none added."""
        with _blamed(self.name, "has no ids for a text"):
            encoded = self._tokenizer(
                list(documents), add_special_tokens=False, return_attention_mask=False, verbose=False
            )
            return [np.asarray(ids, np.int64) for ids in encoded["input_ids"]]

    def encode_with_ends(self, texts: Sequence[str], *, special: bool) -> list[tuple[TokenIds, TokenIds]]:
        """Ids of every text, and behind which of its characters each ends.

        Args:
            texts: Texts, special tokens included.
            special: Whether the tokenizer adds its own special tokens, as before the text of a prompt.
        """
        if not getattr(self._tokenizer, "is_fast", False):
            raise DataError(
                _place(self.name),
                "it does not say which characters its tokens stand for, which the masks of chats need",
                "use a model whose tokenizer has a tokenizer.json",
            )
        with _blamed(self.name, "has no ids for a text"):
            encoded = self._tokenizer(
                list(texts),
                add_special_tokens=special,
                return_attention_mask=False,
                return_offsets_mapping=True,
                verbose=False,
            )
            pairs = zip(encoded["input_ids"], encoded["offset_mapping"], strict=True)
            return [
                (np.asarray(ids, np.int64), np.array([end for _, end in places])) for ids, places in pairs
            ]

    def chat_template(self, tools: list[Any] | None) -> str | None:
        """Its own chat template, for a conversation with these tools; None if it has none."""
        if not self._tokenizer.chat_template:
            return None
        with _blamed(self.name, "cannot be used"):
            return str(self._tokenizer.get_chat_template(tools=tools))

    @property
    def special_tokens(self) -> dict[str, Any]:
        """Its special tokens by the names that chat templates know them by."""
        return dict(self._tokenizer.special_tokens_map)

    @property
    def bos_id(self) -> int | None:
        """Id of the token that begins a text, if it has one."""
        found: int | None = self._tokenizer.bos_token_id
        return found

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text as the tokenizer joins it."""
        with _blamed(self.name, "has no text for ids"):
            return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def pieces(self, token_ids: Sequence[int]) -> list[str]:
        """What each id adds to the text of the one before it; its name if that is no whole character."""
        found, before = [], list[int]()
        with _blamed(self.name, "has no text for ids"):
            for one in token_ids:
                shorter, text = (str(self._tokenizer.decode(ids)) for ids in (before, [*before, one]))
                is_whole = text.startswith(shorter) and "\ufffd" not in text[len(shorter) :]
                name = str(self._tokenizer.convert_ids_to_tokens(one))
                found.append(text[len(shorter) :] if is_whole and "\ufffd" not in shorter else name)
                before = [one]
        return found


def _loaded(name: str, *, trust_remote_code: bool) -> Any:
    """The tokenizer of ``transformers``. Raises DataError."""
    from transformers import AutoTokenizer

    local = Path(name).expanduser()
    online = not local.exists() and reachable()
    if not local.exists() and not online:
        what = "is no folder, and the Hugging Face hub cannot be reached"
    else:
        what = "cannot be loaded"
    try:
        with _blamed(name, what), offline_unless(online):
            for file in (TOKENIZER_CONFIG, "special_tokens_map.json"):
                if (local / file).is_file():
                    _check_keys(json.loads((local / file).read_text(encoding="utf-8")), file)
            return AutoTokenizer.from_pretrained(
                str(local) if local.exists() else name, trust_remote_code=trust_remote_code
            )
    except DataError as error:
        if not trust_remote_code and "trust_remote_code" in str(error.__cause__):
            raise tokenizer_code(name) from None
        raise


def _check_keys(node: object, file: str) -> None:
    """Refuse keys that a terminal would obey: the tokenizers library prints those that it does not know."""
    if isinstance(node, dict):
        for key, value in node.items():
            if printable(key) != key:
                raise ValueError(f"{file} has the key {key}")
            _check_keys(value, file)
    elif isinstance(node, list):
        for value in node:
            _check_keys(value, file)


def _place(name: str) -> str:
    return f'dsx.data.tokenizer = "{name}"'


@contextmanager
def _blamed(name: str, what: str) -> Iterator[None]:
    """Blame the tokenizer for whatever goes wrong inside: raise a DataError that says what it cannot do.

    For a damaged file the tokenizers library raises a bare Exception, transformers anything at all, and a
    panic in Rust is no Exception.
    """
    try:
        with quiet_transformers():
            yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__module__ != "pyo3_runtime":
            raise
        fix = 'name a folder that holds tokenizer.json, a hub tokenizer, or "bytes"'
        raise DataError(_place(name), f"{what} ({first_line(error)})", fix) from error


Tokenizer = ByteTokenizer | TransformersTokenizer
"""Text -> ids below ``vocab_size`` and back.

``end_id`` ends every document, and ``identity`` changes whenever the same text could give other ids.
"""


def load_tokenizer(name: str, *, trust_remote_code: bool = False) -> Tokenizer:
    """``"bytes"``, or a tokenizer of ``transformers`` by folder or hub name."""
    if name == "bytes":
        return ByteTokenizer()
    return TransformersTokenizer(name, trust_remote_code=trust_remote_code)
