"""Chats with pictures as a stranger trains on them: dsx init, deepspeed, from_pretrained."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from launching import launch, series
from transformers import AutoModelForImageTextToText, AutoProcessor

from data import picture_chats
from dsx.data.order import is_held_out
from hub import tiny_pictures

HELD_OUT = 0.3


def loss_of(folder: Path, chats: list[list[dict[str, object]]], place: Path) -> float:
    """Of what the assistant says in chats, as the folder's own class and processor have it."""
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    processor, losses = AutoProcessor.from_pretrained(folder), []
    for chat in chats:
        made = processor.apply_chat_template(
            picture_chats.absolute(chat, place),
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
            return_assistant_tokens_mask=True,
            processor_kwargs={"add_special_tokens": False, "return_offsets_mapping": True},
        )
        trained = torch.as_tensor(made.pop("assistant_masks")).bool()[0, 1:]
        made.pop("offset_mapping", None)
        with torch.no_grad():
            logits = model(**made).logits[0, :-1]
        losses.append(F.cross_entropy(logits, made["input_ids"][0, 1:], reduction="none")[trained])
    return float(torch.cat(losses).mean())


@pytest.mark.parametrize("tensor", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_folder_goes_in_and_a_trained_one_comes_out(tmp_path: Path, tensor: int) -> None:
    """In a pipeline of two; the run's held-out losses are transformers', before it and after it."""
    picture_chats.save_processor(tmp_path / "model")
    model = tiny_pictures.model_of("gemma3", max_position_embeddings=128)
    model.config.image_token_index = picture_chats.IMAGE
    model.save_pretrained(tmp_path / "model")
    chats = picture_chats.chats(tmp_path)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    }
    (tmp_path / "ds_config.json").write_text(json.dumps(config))
    keys = {
        "source": tmp_path / "chats.jsonl",
        "format": "chat",
        "pictures": "true",
        "too_long": "drop",
        "sequence_length": 96,
        "held_out": HELD_OUT,
    }
    told = [f"dsx.data.{key}={value}" for key, value in keys.items()]
    told += [
        f"dsx.parallel.tensor={tensor}",
        "dsx.parallel.pipeline=2",
        "dsx.train.steps=3",
        f"dsx.train.output={tmp_path}/out",
    ]
    told += ["dsx.tracking.wandb.mode=disabled"]
    command = [sys.executable, "-m", "dsx", "init", "run", "--from", "ds_config.json", "--model", "model"]
    command += ["--gpus", str(2 * tensor), *(word for each in told for word in ("--set", each))]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    ended = launch("deepspeed", "finetune.py", tmp_path / "run/train.json", {}, ranks=2 * tensor)
    assert ended.code == 0, ended.text
    kept = [chat for number, chat in enumerate(chats) if is_held_out(number, HELD_OUT, 0)]
    before, after = (loss_of(tmp_path / each, kept, tmp_path) for each in ("model", "out/hf/step3"))
    assert after < before
    found = series(tmp_path / "out", "eval/loss")
    assert [found[0], found[3]] == pytest.approx([before, after], rel=1e-5)
    assert (tmp_path / "out/hf/step3/processor_config.json").is_file()
