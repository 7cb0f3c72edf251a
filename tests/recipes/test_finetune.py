"""Fine-tuning a folder that transformers wrote, and what transformers makes of the folder that comes out."""

from __future__ import annotations

import json
import sysconfig
from pathlib import Path

import pytest
import torch
from launching import FINETUNE, SMALL, Ended, held_out_loss, launch, records, rows, series
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

END = "<|end|>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """model/: a small Llama with a tokenizer of 300 ids; my.jsonl: text."""
    folder = tmp_path_factory.mktemp("finetune")
    torch.manual_seed(0)
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=320,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
        )
    ).save_pretrained(folder / "model")
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    texts = [path.read_text() for path in sorted(Path(sysconfig.get_paths()["stdlib"], "json").glob("*.py"))]
    bpe.train_from_iterator(texts, trainer)
    PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=END).save_pretrained(folder / "model")
    (folder / "my.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts * 4))
    return folder


@pytest.fixture(scope="module")
def settings(folder: Path) -> dict[str, object]:
    return SMALL | {
        "dsx.model.path": folder / "model",
        "dsx.data.source": folder / "my.jsonl",
        "dsx.train.output": folder / "out",
        "bf16.enabled": False,
        "optimizer.params.lr": 3e-3,
        "dsx.parallel.pipeline": 2,
    }


@pytest.fixture(scope="module")
def done(settings: dict[str, object]) -> Ended:
    """Six steps on two pipeline ranks."""
    ended = launch("deepspeed", "finetune.py", FINETUNE, settings)
    assert ended.code == 0, ended.text
    return ended


def test_loss_before_is_that_of_transformers(done: Ended, folder: Path) -> None:
    before = series(folder / "out", "eval/loss")[0]
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    assert before == pytest.approx(held_out_loss(model, folder / "out"), rel=1e-5)
    assert rows(done.lines, "done")["loss before"] == f"{before:.4f} nats/token, held out"
    assert any(line.startswith(f"eval 0/6 | loss {before:7.4f} | ") for line in done.lines)


def test_loss_after_is_that_of_the_export(done: Ended, folder: Path) -> None:
    losses = series(folder / "out", "eval/loss")
    exported = Path(rows(done.lines, "done")["Hugging Face model"])
    assert exported == folder / "out" / "hf" / "step6"
    model = AutoModelForCausalLM.from_pretrained(exported)
    assert losses[6] == pytest.approx(held_out_loss(model, folder / "out"), rel=1e-5)
    assert losses[6] < losses[0] - 0.1


def test_tokenizer_comes_along(done: Ended, folder: Path) -> None:
    source, exported = folder / "model", folder / "out" / "hf" / "step6"
    assert f"tokenizer {source}: " in rows(done.lines, "dsx")["data"]
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (exported / name).read_bytes() == (source / name).read_bytes()
    tokenizer = AutoTokenizer.from_pretrained(exported)
    assert tokenizer.decode(tokenizer("def naïve():").input_ids) == "def naïve():"
    assert tokenizer.eos_token == END


@pytest.mark.slow
def test_again_when_it_is_complete(done: Ended, folder: Path, settings: dict[str, object]) -> None:
    """It says so, evaluates nothing, and gives the weights back once more."""
    before, weights = records(folder / "out"), folder / "out" / "hf" / "step6" / "config.json"
    stamp = weights.stat().st_mtime_ns
    again = launch("torchrun", "finetune.py", FINETUNE, settings)
    assert again.code == 0, again.text
    assert [line for line in again.lines if not line.startswith("  ")] == ["dsx", "done"]
    assert "step 6 of dsx.train.steps = 6 is done" in rows(again.lines, "dsx")["complete"]
    assert list(rows(again.lines, "done")) == ["Hugging Face model"]
    assert records(folder / "out") == before
    assert weights.stat().st_mtime_ns > stamp
