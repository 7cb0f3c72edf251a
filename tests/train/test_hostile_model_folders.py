"""Hugging Face folders that somebody else made: a text, or one clear error, whatever their files claim."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.utils import logging

import dsx
import mutant_runs
import mutants
from data.test_data_tokenizers import train_bpe
from dsx.data.tokenizers import load_tokenizer
from dsx.errors import DsxError
from often import often


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Config, generation config, two shards with an index, tokenizer."""
    folder = tmp_path_factory.mktemp("good") / "model"
    train_bpe(folder)
    torch.manual_seed(0)
    sizes = {"vocab_size": 400, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}
    logging.disable_progress_bar()
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    model.save_pretrained(folder, max_shard_size="60KB")
    return folder


def text_of(folder: Path, seed: int) -> str:
    model, tokenizer = dsx.load_transformers(folder)
    dsx.generate(model, tokenizer, "def f(", tokens=3, temperature=0 if seed % 2 else 0.8)
    return "text"


def ids_of(folder: Path, seed: int) -> str:
    tokenizer = load_tokenizer(str(folder))
    tokenizer.identity()
    ids = tokenizer.encode(["def f(x): naïve 日本語 🙂", "", "a\x00b <|end|>"])
    assert all(one < tokenizer.vocab_size for each in ids for one in each)
    tokenizer.decode(ids[0].tolist())
    return "ids"


@pytest.mark.parametrize("block", often(range(0, 3000, 30), 100))
@pytest.mark.parametrize("attempt", [text_of, ids_of])
def test_a_text_or_one_error(good: Path, tmp_path: Path, capfd, attempt, block: int):
    """Nothing else, within 20 seconds and 1 GiB, and nothing on the console that it would obey."""
    only = ("tokenizer", "special") if attempt is ids_of else ("",)
    files = [path.name for path in good.glob("*.json") if path.name.startswith(only)]
    seeds = range(block, block + 30)
    found = list(mutant_runs.outcomes(seeds, good, tmp_path, attempt, allowed=(DsxError,), files=files))
    assert [one for one in found if not one.good] == []
    assert len(mutant_runs.counted(found)) > 1
    said = "".join(capfd.readouterr())
    assert not {"\x1b", "\x07", "\x9b", "\u202e"} & set(said)


def spoilt(good: Path, folder: Path, file: str, **changes: object) -> Path:
    """A copy with other values in a JSON file of it."""
    shutil.copytree(good, folder)
    content = json.loads((folder / file).read_text()) | changes
    (folder / file).write_text(json.dumps(content))
    return folder


CLAIMS = [
    ("config.json", {"n_layer": 3_000_000}, "n_layer = 3000000: .* have 28 tensors"),
    ("config.json", {"n_layer": 40}, "n_layer = 40"),
    ("config.json", {"n_inner": 10**9}, "parameters"),
    ("config.json", {"n_layer": 3}, "parameters"),
    ("generation_config.json", {"num_beams": 10**6}, "num_beams in the generation settings"),
    ("generation_config.json", {"num_return_sequences": 10**9}, "num_return_sequences"),
    ("generation_config.json", {"suppress_tokens": "all"}, "generation settings"),
    ("tokenizer.json", {"model": {"type": "BPE", "vocab": "\x1b[2J"}}, "cannot be loaded"),
    ("tokenizer.json", {"added_tokens": [{"id": 10**30}]}, "cannot be loaded"),
    ("tokenizer_config.json", {"eos_token": mutants.ESCAPES * 10}, "no end-of-sequence token|ids|tokens"),
    ("tokenizer_config.json", {"\x1b[2J": 1}, r"has the key \\u001b\[2J"),
]  # fmt: skip


@pytest.mark.parametrize(("file", "changes", "words"), CLAIMS)
def test_claims_are_held_to_what_there_is(good: Path, tmp_path: Path, file: str, changes, words: str):
    folder = spoilt(good, tmp_path / "model", file, **changes)
    with pytest.raises(DsxError, match=words) as error:
        text_of(folder, 1)
    assert str(error.value).isprintable()


def test_what_the_files_lack_is_no_random_weight(good: Path, tmp_path: Path):
    """Transformers fills it with random numbers, and says so in a warning."""
    folder = spoilt(good, tmp_path / "model", "config.json")
    index = folder / "model.safetensors.index.json"
    told = json.loads(index.read_text())
    lost = next(name for name in told["weight_map"] if name.endswith("h.1.mlp.c_fc.weight"))
    file = folder / told["weight_map"].pop(lost)
    tensors = load_file(file)
    tensors["more.than.the.model.has"] = tensors.pop(lost)
    told["weight_map"]["more.than.the.model.has"] = file.name
    index.write_text(json.dumps(told))
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(DsxError, match=r"h\.1\.mlp\.c_fc\.weight"):
        text_of(folder, 1)


def test_tokens_beyond_all_measure(good: Path):
    model, tokenizer = dsx.load_transformers(good)
    for tokens in (10**12, 60):
        with pytest.raises(DsxError, match=f"tokens = {tokens}"):
            dsx.generate(model, tokenizer, "def f(x):", tokens=tokens)


def test_a_tokenizer_with_holes_counts_to_its_largest_id(good: Path, tmp_path: Path):
    folder = tmp_path / "model"
    shutil.copytree(good, folder)
    content = json.loads((folder / "tokenizer.json").read_text())
    content["model"]["vocab"]["zz"] = 70_000
    content["model"]["merges"].append(["z", "z"])
    (folder / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = load_tokenizer(str(folder))
    assert tokenizer.vocab_size == 70_001
    assert 70_000 in tokenizer.encode(["zz"])[0]
    with pytest.raises(DsxError, match="70001 tokens"):
        text_of(folder, 1)
