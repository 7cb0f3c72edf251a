"""Chats with pictures: composite models train, their towers frozen, as in one process of transformers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, PeftModel
from transformers import AutoModelForImageTextToText

import dsx
import ranks
from dsx.checkpoint.execute import ConversionOptions
from dsx.checkpoint.open import open_checkpoint
from dsx.checkpoint.reshard import WantedTarget, prepare
from dsx.errors import ConfigError
from dsx.train.generation import load_transformers
from hub import tiny_pictures
from hub.test_hub_weights import engine_of, same, tensors_in
from hub.tiny_pictures import MICRO_BATCHES, ROWS
from often import often
from parity import oracle
from parity.oracle import ADAMW, CLIPPING

ONCE = ConversionOptions(workers=1)
STEPS = 5
PEFT: dict[str, Any] = {
    "task_type": "CAUSAL_LM",
    "r": 4,
    "lora_alpha": 8,
    "target_modules": ["q_proj", "v_proj", "fc1", "qkv"],
    "modules_to_save": ["multi_modal_projector", "visual.merger"],
    "init_lora_weights": False,
}


def config_of(folder: Path, *, tp: int = 1, pp: int = 1, dp: int = 1, **changes: Any) -> dict[str, Any]:
    block = {
        "model": {"path": str(folder), "vocab_multiple": 8},
        "parallel": {"tensor": tp, "pipeline": pp, "sequence_parallel": changes.get("sequence", True)},
        "recompute": changes.get("recompute", "none"),
        "adapter": {"path": str(folder.parent / "adapter")} if "adapter" in changes else None,
        "proof": "off",
        "data": {
            "source": "none.jsonl",
            "format": "chat",
            "tokenizer": "bytes",
            "pictures": True,
            "too_long": "drop",
            "sequence_length": tiny_pictures.SEQUENCE,
        },
        "train": {
            "steps": STEPS,
            "output": "unused",
            "tower": changes.get("tower", []),
            "freeze": changes.get("freeze", []),
        },
    }
    return {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": MICRO_BATCHES // dp,
        "gradient_clipping": CLIPPING,
        "zero_optimization": {"stage": changes.get("zero", 0)},
        "optimizer": {
            "type": "AdamW",
            "params": {**ADAMW, "betas": list(ADAMW["betas"]), "torch_adam": True},
        },
        "dsx": block,
    }


def reference(folder: Path, family: str, changes: dict[str, Any]) -> tuple[list[float], list[float]]:
    """Losses and norms of one process; the folder ``trained`` beside ``model`` is what it ends with."""
    model = AutoModelForImageTextToText.from_pretrained(folder / "model", dtype=torch.float32)
    text = {*model.get_decoder().parameters(), *model.get_output_embeddings().parameters()}
    tower, shown = changes.get("tower", []), changes.get("shown", (ROWS,) * MICRO_BATCHES)
    for name, each in model.named_parameters():
        named = any(re.search(pattern, name) for pattern in tower)
        each.requires_grad_(requires_grad=not changes.get("freeze") if each in text else named)
    if "adapter" in changes:
        PeftModel(model, LoraConfig(**PEFT)).save_pretrained(folder / "adapter")
        model = AutoModelForImageTextToText.from_pretrained(folder / "model", dtype=torch.float32)
        model = PeftModel.from_pretrained(model, folder / "adapter", is_trainable=True)
    model.train()
    trained = [each for each in model.parameters() if each.requires_grad]
    for each in trained:
        each.grad = torch.zeros_like(each)
    optimizer = torch.optim.AdamW(trained, **ADAMW)
    losses, norms = [], []
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=False)
        batches = list(tiny_pictures.micro_batches(family, step, shown))
        count, total = sum(int((labels != -100).sum()) for _, labels in batches), 0.0
        for (ids, given), labels in batches:
            logits = model(input_ids=ids, use_cache=False, **given).logits.float()
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / count
            loss.backward()
            total += loss.item()
        losses.append(total)
        norms.append(float(torch.nn.utils.clip_grad_norm_(trained, CLIPPING)))
        optimizer.step()
    assert min(norms) > CLIPPING
    model.save_pretrained(folder / "trained")
    return losses, norms


def trained(_rank: int, world_size: int, folder: Path, family: str, changes: dict[str, Any]) -> Any:
    shown = changes.get("shown", (ROWS,) * MICRO_BATCHES)
    engine = engine_of(config_of(folder / "model", **changes), world_size)
    losses, norms, dp = [], [], changes.get("dp", 1)

    def batches(step: int) -> Iterator[Any]:
        for number, batch in enumerate(tiny_pictures.micro_batches(family, step, shown)):
            if number % dp == engine.groups.dp_rank:
                yield batch

    for step in range(STEPS):
        losses.append(float(engine.train_batch(batches(step))))
        norms.append(engine.get_global_grad_norm())
    dsx.export_hf(engine, folder / "dsx")
    return losses, norms


LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "tp-pp": {"tp": 2, "pp": 2, "tower": ["."]},
    "tp": {"tp": 2, "sequence": False, "recompute": "full"},
    "some": {"pp": 2, "shown": (1, 1)},
    "zero3": {"dp": 2, "zero": 3, "tower": ["."], "shown": (2, 0)},
    "lora": {"tp": 2, "pp": 2, "zero": 1, "adapter": True},
    "plain": {"tp": 2, "pp": 2, "sequence": False, "tower": ["projector|merger"], "zero": 1},
    "projector": {"dp": 2, "zero": 1, "tower": ["projector|merger"], "freeze": ["."]},
}


@pytest.mark.parametrize(
    ("family", "layout"), often([(f, lay) for lay in LAYOUTS for f in tiny_pictures.SIX], 13)
)
def test_pictures_train_as_in_one_process(family: str, layout: str, tmp_path: Path) -> None:
    """Losses, norms and every tensor of the exported folder, the tower's among them, after five steps."""
    changes = dict(LAYOUTS[layout])
    tiny_pictures.model_of(family).save_pretrained(tmp_path / "model")
    losses, norms = reference(tmp_path, family, changes)
    size = changes.get("tp", 1) * changes.get("pp", 1) * changes.get("dp", 1)
    found = ranks.run(trained, size, tmp_path, family, changes)[0]
    torch.testing.assert_close(found[0], losses, rtol=1e-5, atol=0)
    torch.testing.assert_close(found[1], norms, rtol=1e-5, atol=0)
    ours, theirs = tensors_in(tmp_path / "dsx"), tensors_in(tmp_path / "trained")
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=0, atol=1e-5, msg=name)


def resumed(_rank: int, world_size: int, folder: Path, changes: dict[str, Any], name: str) -> None:
    """Two steps of which the first is in a checkpoint of ``saved``; ``name`` is that or begins there."""
    engine = engine_of(config_of(folder / "model", **changes), world_size)
    if name != "saved":
        engine.load_checkpoint(str(folder / "run"))
    for step in range(int(name != "saved"), 2):
        batches = list(tiny_pictures.micro_batches("gemma3", step))
        engine.train_batch(iter(batches[engine.groups.dp_rank :: changes.get("dp", 1)]))
        if not step:
            engine.save_checkpoint(str(folder / "run"))
            dsx.export_hf(engine, folder / "first")
    dsx.export_hf(engine, folder / name)


@pytest.mark.parametrize("trained", often([{"tower": ["projector"]}, {"adapter": True}], 2))
def test_what_is_trained_of_the_tower_is_in_checkpoints(trained: dict[str, Any], tmp_path: Path) -> None:
    """It is resumed in another layout, and a folder that is made of the checkpoint is what a run exports."""
    model = tiny_pictures.model_of("gemma3")
    model.save_pretrained(tmp_path / "model")
    PeftModel(model, LoraConfig(**PEFT)).save_pretrained(tmp_path / "adapter")
    ranks.run(resumed, 2, tmp_path, trained | {"dp": 2, "zero": 3}, "saved")
    ranks.run(resumed, 4, tmp_path, trained | {"tp": 2, "pp": 2, "zero": 1}, "resumed")
    ours, theirs = tensors_in(tmp_path / "resumed"), tensors_in(tmp_path / "saved")
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=0, atol=1e-5, msg=name)
    prepare(open_checkpoint(tmp_path / "run"), tmp_path / "hf", WantedTarget(format="hf")).run(ONCE)
    first = tensors_in(tmp_path / "first")
    if "adapter" in trained:
        prepare(open_checkpoint(tmp_path / "run"), tmp_path / "peft", WantedTarget(format="peft")).run(ONCE)
        assert same(tensors_in(tmp_path / "peft"), first)
        whole = AutoModelForImageTextToText.from_pretrained(tmp_path / "model", dtype=torch.float32)
        merged: Any = PeftModel.from_pretrained(whole, tmp_path / "first").merge_and_unload()
        merged.save_pretrained(tmp_path / "merged")
        first = tensors_in(tmp_path / "merged")
    text: Any = load_transformers(tmp_path / "run", tokenizer="bytes")[0]
    query = "model.layers.0.self_attn.q_proj.weight"
    torch.testing.assert_close(text.get_parameter(query), first[f"language_model.{query}"], rtol=0, atol=1e-6)
    found = tensors_in(tmp_path / "hf")
    assert found.keys() == first.keys()
    for name, tensor in first.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-6, msg=name)


def test_what_pictures_cannot_have_is_refused_by_name(tmp_path: Path) -> None:
    tiny_pictures.model_of("gemma3").save_pretrained(tmp_path / "model")
    for block, told in (
        ({"parallel": {"context": 2}}, r"dsx\.parallel\.context = 2: ranks would share rows"),
        ({"train": {"tower": ["projectr"]}}, r"train\.tower\[0\].*projectr.*no parameter of the tower"),
        ({"data": {"pictures": False}, "train": {"tower": ["."]}}, "no tower runs without pictures"),
        ({"model": {"weights": "random"}}, "the tower is read from a folder with weights"),
        ({"model": {"implementation": "dsx"}}, r"dsx has modules of|works with transformers' modules"),
    ):
        settings = config_of(tmp_path / "model")
        for key, changes in block.items():
            settings["dsx"][key] |= changes
        with pytest.raises(ConfigError, match=told):
            dsx.load_config(settings, world_size=2)
    oracle.hf_model("gpt_neox").save_pretrained(tmp_path / "text")
    with pytest.raises(ConfigError, match="is of one model, which reads text"):
        dsx.load_config(config_of(tmp_path / "text"), world_size=1)
