"""Byte and transformers tokenizers."""

import time
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, ByT5Tokenizer, PreTrainedTokenizerFast

from dsx.data.tokenizers import load_tokenizer
from dsx.errors import DataError

TEXTS = ["def f(x):\n    return x\n", "naïve 日本語 🙂", "", "a\x00b <|end|> tail"]


def train_bpe(folder: Path, *, vocab_size: int = 400, eos: str | None = "<|end|>") -> None:
    """A byte-level BPE tokenizer as GPT-2's, trained on this file, in ``folder``."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator([Path(__file__).read_text()], trainer)
    PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=eos).save_pretrained(folder)


def test_bytes_are_utf8_as_in_byt5() -> None:
    """ByT5 has the 256 bytes too, three ids higher."""
    ours, theirs = load_tokenizer("bytes"), ByT5Tokenizer(extra_ids=0)
    plain = TEXTS[:3]
    for text, ids in zip(plain, ours.encode(plain), strict=True):
        want = theirs(text, add_special_tokens=False)["input_ids"]
        assert (ids.astype(int) + 3).tolist() == want
        assert bytes(ids.tolist()).decode() == text
    assert (ours.vocab_size, ours.end_id, ours.name) == (257, 256, "bytes")


def test_transformers_folder(tmp_path: Path) -> None:
    train_bpe(tmp_path)
    ours, theirs = load_tokenizer(str(tmp_path)), AutoTokenizer.from_pretrained(tmp_path)
    assert ours.vocab_size == len(theirs) == 400
    assert ours.end_id == theirs.convert_tokens_to_ids("<|end|>")
    assert ours.name == str(tmp_path)
    for text, ids in zip(TEXTS, ours.encode(TEXTS), strict=True):
        assert ids.tolist() == theirs.encode(text, add_special_tokens=False)
        assert theirs.decode(ids) == text
        assert ids.dtype == np.int64


def test_identity_is_of_the_content(tmp_path: Path) -> None:
    for name, size in (("a", 400), ("b", 400), ("c", 300)):
        train_bpe(tmp_path / name, vocab_size=size)
    a, b, c = (load_tokenizer(str(tmp_path / name)).identity() for name in "abc")
    assert a == b != c
    assert load_tokenizer("bytes").identity() != a


def test_tokenizer_without_end(tmp_path: Path) -> None:
    train_bpe(tmp_path, eos=None)
    with pytest.raises(DataError, match="no end-of-sequence token"):
        load_tokenizer(str(tmp_path))


def test_tokenizers_that_are_missing(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be loaded") as error:
        load_tokenizer(str(tmp_path))  # an empty folder
    assert f'dsx.data.tokenizer = "{tmp_path}"' in str(error.value)
    start = time.monotonic()
    with pytest.raises(DataError, match="hub cannot be reached"):
        load_tokenizer("some/tokenizer")
    with pytest.raises(DataError, match="cannot be reached"):
        load_tokenizer("/no/such/folder")
    assert time.monotonic() - start < 20  # a loaded machine; retries take 24
