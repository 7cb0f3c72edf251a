"""Code that a model folder brings leaves a mark when it runs: it never does, unless it is trusted."""

from __future__ import annotations

import io
import itertools
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

import dsx as package
import made
from data.test_data_tokenizers import train_bpe
from dsx.data.tokenizers import load_tokenizer
from dsx.errors import DataError, DsxError
from often import often
from said import own_words

GENERATE = Path(__file__).parents[2] / "recipes" / "generate.py"
CODE = """
from pathlib import Path
Path(__file__)  # transformers copies this file into its cache before it imports it
Path({mark!r}).touch()
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
class Config(LlamaConfig):
    model_type = "own"
class Model(LlamaForCausalLM):
    config_class = Config
class Words(PreTrainedTokenizerFast):
    pass
def generate(model, **settings):
    raise RuntimeError("of the folder")
"""
MODEL = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
UPSTREAM = {"AutoConfig": "somebody/else--own.Config"}
WORDS = {"tokenizer_class": "Words", "auto_map": {"AutoTokenizer": ["own.Words", None]}}
OLD_WORDS = {"tokenizer_class": "Words", "auto_map": ["own.Words", None]}
YES = "y\n" * 99
KINDS = {
    "model": {"config": {"model_type": "own", "auto_map": MODEL}},
    "model of a known type": {"config": {"auto_map": MODEL}, "tokenizer": WORDS},
    "model of another repository": {"config": {"model_type": "own", "auto_map": UPSTREAM}},
    "tokenizer": {"tokenizer": WORDS},
    "tokenizer of the old form": {"tokenizer": OLD_WORDS},
    "attention": {"config": {"attn_implementation": "somebody/kernel"}},
    "pickle": {"pickle": True},
}


class Evil:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return os.system, (f"touch {self.mark}",)


def edit(file: Path, more: dict) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | more))


def folder_of(root: Path, *, config=None, tokenizer=None, pickle: bool = False) -> Path:
    """A model folder with weights and a tokenizer, whose code leaves ``root/mark``."""
    folder = root / "folder"
    torch.manual_seed(1)
    settings = made.CONFIGS["llama"] | {"vocab_size": 300, "max_position_embeddings": 32}
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**settings))
    model.save_pretrained(folder)
    train_bpe(folder, vocab_size=300)
    for file in (folder / "own.py", folder / "custom_generate" / "generate.py"):
        file.parent.mkdir(exist_ok=True)
        file.write_text(CODE.format(mark=str(root / "mark")))
    edit(folder / "config.json", config or {})
    edit(folder / "tokenizer_config.json", tokenizer or {})
    if pickle:
        (folder / "model.safetensors").unlink()
        write_pickle(folder / "pytorch_model.bin", root / "mark")
    return folder


def write_pickle(file: Path, mark: Path) -> None:
    torch.save({"lm_head.weight": torch.zeros(2), "more": Evil(mark)}, file, pickle_module=pickle)


def every_way(dsx, folder: Path, root: Path) -> list[int]:
    """Everything that reads a model folder, whatever comes of it; the commands' exit codes."""
    config = root / "config.json"
    content = {"train_batch_size": 1, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
    block = {"model": {"path": str(folder)}, "data": {"sequence_length": 8}}
    config.write_text(json.dumps({**content, "dsx": block | {"train": {"steps": 1, "output": "x"}}}))
    codes = [
        dsx(*arguments)[0]
        for arguments in (
            ("inspect", folder),
            ("diff", folder, folder),
            ("reshard", folder, root / "made"),
            ("reshard", folder, root / "hf", "--to", "hf"),
            ("check", config, "--gpus", 1),
            ("estimate", config, "--gpus", 1),
            ("plan", "--config", config, "--gpus", 1, "--cluster", "H100"),
            ("init", root / "new", "--model", folder),
        )
    ]
    for words in (None, "bytes", str(folder)):
        try:
            model, tokenizer = package.load_transformers(folder, tokenizer=words)
            package.generate(model, tokenizer, "x", tokens=2, temperature=0)
        except DsxError:
            continue
    return codes


# "yes" on the standard input of each kind; closed ones, where asking would be an error by itself, are slow.
@pytest.mark.parametrize(
    ("kind", "answer"),
    often(itertools.product(KINDS, (YES, None)), every=2),
    ids={YES: "yes", None: "closed"}.get,
)
def test_code_never_runs(dsx, monkeypatch, tmp_path, kind, answer):
    folder = folder_of(tmp_path, **KINDS[kind])
    stdin = io.StringIO(answer or "")
    if answer is None:
        stdin.close()
    monkeypatch.setattr(sys, "stdin", stdin)
    codes = every_way(dsx, folder, tmp_path)
    assert kind != "model of a known type" or not any(codes), codes
    assert not (tmp_path / "mark").exists()
    assert answer is None or stdin.tell() == 0  # nor was anything asked


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        ("model", r'folder/config\.json: auto_map\.AutoConfig = "own\.Config": .*--trust-remote-code'),
        ("model of another repository", r'auto_map\.AutoConfig = "somebody/else--own\.Config"'),
        (
            "tokenizer",
            r"folder/tokenizer_config\.json: auto_map = .*own\.Words.*dsx\.data\.trust_remote_code",
        ),
        ("tokenizer of the old form", r"folder/tokenizer_config\.json: auto_map = .*own\.Words"),
        ("attention", r'folder/config\.json: attn_implementation = "somebody/kernel"'),
        ("pickle", r"pytorch_model\.bin: .*(posix|nt|os)\.system"),
    ],
)
def test_what_names_the_code_is_said(tmp_path, kind, what):
    with pytest.raises(DsxError, match=what):
        package.load_transformers(folder_of(tmp_path, **KINDS[kind]))


def test_a_known_type_needs_no_code(tmp_path):
    """transformers' own class is the model then, as in transformers without an answer."""
    folder = folder_of(tmp_path, config={"auto_map": MODEL})
    model, _ = package.load_transformers(folder)
    assert type(model) is transformers.LlamaForCausalLM
    again, _ = package.load_transformers(folder, config=folder, tokenizer="bytes")
    assert type(again) is transformers.LlamaForCausalLM
    assert not (tmp_path / "mark").exists()


def test_a_way_to_generate_that_is_code_on_the_hub(tmp_path):
    folder = folder_of(tmp_path)
    (folder / "generation_config.json").write_text(json.dumps({"penalty_alpha": 0.6, "top_k": 4}))
    model, tokenizer = package.load_transformers(folder)
    with pytest.raises(DsxError, match=r"generation settings of .*folder: .*requires `trust_remote_code"):
        package.generate(model, tokenizer, "x", tokens=2, temperature=0)


def generate(folder: Path, *arguments: object, answer: bytes | None) -> tuple[int, str]:
    """Exit code and what a shell sees of recipes/generate.py."""
    done = subprocess.run(
        [sys.executable, str(GENERATE), "--checkpoint", str(folder), "--tokens", "2", *map(str, arguments)],
        input=answer,
        stdin=subprocess.DEVNULL if answer is None else None,
        capture_output=True,
        check=False,
        timeout=120,
    )
    return done.returncode, own_words((done.stdout + done.stderr).decode())


def test_the_recipe_runs_it_if_told_to(tmp_path):
    folder = folder_of(tmp_path, **KINDS["model"] | KINDS["tokenizer"])
    code, said = generate(folder, answer=b"y\n" * 9)
    assert code == 2
    assert said.startswith(f'error: {folder}/config.json: auto_map.AutoConfig = "own.Config": ')
    assert said.count("\n") == 1
    assert not (tmp_path / "mark").exists()
    (folder / "custom_generate" / "generate.py").unlink()
    code, said = generate(folder, "--trust-remote-code", answer=None)
    assert code == 0, said
    assert (tmp_path / "mark").exists()


def test_a_trusted_tokenizer_has_its_code_in_its_identity(tmp_path):
    """The same vocabulary and other code is another tokenizer: a prepared corpus is not taken for it."""
    folder = folder_of(tmp_path, **KINDS["tokenizer"])
    with pytest.raises(DataError, match="auto_map"):
        load_tokenizer(str(folder))
    first = load_tokenizer(str(folder), trust_remote_code=True).identity()
    assert (tmp_path / "mark").exists()
    assert load_tokenizer(str(folder), trust_remote_code=True).identity() == first
    (folder / "own.py").write_text((folder / "own.py").read_text() + "# another\n")
    assert load_tokenizer(str(folder), trust_remote_code=True).identity() != first
