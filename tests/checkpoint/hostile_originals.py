"""One small good checkpoint of every format that dsx reads, for tests that spoil them."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save

import made
from dsx.checkpoint.execute import ConversionOptions
from dsx.checkpoint.file_io import digest
from dsx.checkpoint.layouts import Pipeline, TargetDegrees
from dsx.checkpoint.open import open_checkpoint
from dsx.checkpoint.reshard import WantedTarget, prepare
from dsx.models.hf_config import model_spec

CONFIG = {
    **made.CONFIGS["llama"],
    "num_hidden_layers": 1,
    "vocab_size": 9,
    "hidden_size": 4,
    "intermediate_size": 6,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "tie_word_embeddings": False,
}
MEGATRON = Path(__file__).parent / "formats" / "megatron_core_0_16_1"
_WANTED = {
    "dsx": WantedTarget(degrees=TargetDegrees(tensor=2, data=2, zero=1)),
    "zero0": WantedTarget(format="deepspeed", degrees=TargetDegrees(zero=0)),
    "zero1": WantedTarget(format="deepspeed", degrees=TargetDegrees(data=2, zero=1)),
    "zero3": WantedTarget(format="deepspeed", degrees=TargetDegrees(data=2, zero=3)),
    "tensor": WantedTarget(format="deepspeed", degrees=TargetDegrees(tensor=2, zero=1)),
    "pipeline": WantedTarget(
        format="deepspeed", degrees=TargetDegrees(pipeline=2, zero=1), pipeline=Pipeline(partition="uniform")
    ),
    "pipeline0": WantedTarget(
        format="deepspeed", degrees=TargetDegrees(pipeline=1, zero=0), pipeline=Pipeline(partition="uniform")
    ),
    "universal": WantedTarget(format="universal"),
    "dcp": WantedTarget(format="dcp"),
    "hf": WantedTarget(format="hf"),
}
FORMATS = (*_WANTED, "bin", "index", "megatron")


def write_originals(home: Path) -> None:
    """Make ``home/<format>`` for each of :data:`FORMATS`."""
    home.mkdir()
    layout = made.layout(CONFIG, dp=2, tp=2, zero=1)
    names = [spec.name for spec in layout.params]
    chance = np.random.default_rng(3)
    bits = {
        (spec.name, state): chance.normal(size=spec.shape).astype("<f4").view("<u4")
        for spec in layout.params
        for state in made.FP32
    }
    facts = {
        "versions": {"dsx": "0.1.0", "torch": "2.13.0"},
        "step": 9,
        "optimizer": "AdamW",
        "lr_scheduler": {"last_batch_iteration": 9},
        "loss_scale": {"scale": 1.0},
        "counters": {"global_samples": 72, "skipped_steps": 0},
        "client_state": {"tokens": 5, "names": ["a"]},
        "deepspeed_config": {"train_batch_size": 8, "zero_optimization": {"stage": 1}},
        "param_groups": [
            {"names": names[::2], "step": 9, "lr": 0.5, "betas": [0.9, 0.999], "weight_decay": 0.1},
            {"names": names[1::2], "step": dict.fromkeys(names[1::2], 9), "lr": 0.25},
        ],
        "model": json.loads(json.dumps(asdict(model_spec(CONFIG)))),
        "hf_config": CONFIG,
        "seed": 3,
        "random_files": {str(rank): f"dsx_random_{rank}.safetensors" for rank in range(4)},
        "mesh": {"pp": 1, "dp": 2, "tp": 2},
    }
    source = made.plain(home / "plain", layout.params, made.FP32, bits=bits, facts=facts)
    for rank in range(4):
        state = {"cpu": torch.arange(8, dtype=torch.uint8)}
        (home / "plain" / f"dsx_random_{rank}.safetensors").write_bytes(save(state, {"x": digest(b"")}))
    for name, wanted in _WANTED.items():
        prepare(source, home / name, wanted).run(ConversionOptions(workers=1))
        source = open_checkpoint(home / "dsx")
    weights = {name: torch.ones(2, 3) for name in ("up.weight", "down.weight")}
    for name in ("bin", "index"):
        (home / name).mkdir()
    torch.save(weights, home / "bin" / "pytorch_model.bin")
    (home / "bin" / "config.json").write_text(json.dumps({"model_type": "unknown"}))
    for number, (name, tensor) in enumerate(weights.items()):
        (home / "index" / f"{number}.safetensors").write_bytes(save({name: tensor}))
    places = {name: f"{number}.safetensors" for number, name in enumerate(weights)}
    (home / "index" / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": 48}, "weight_map": places})
    )
    shutil.copytree(MEGATRON, home / "megatron")
