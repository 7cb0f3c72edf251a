"""A right config, and ways to make it wrong."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest

from dsx.config.resolve import resolve
from dsx.errors import DsxError

BASE = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 1},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "dsx": {
        "model": {"family": "llama", "preset": "tiny"},
        "data": {"sequence_length": 256},
        "train": {"steps": 10, "output": "runs/test"},
    },
}
AUTO_DECAY = {
    "type": "WarmupDecayLR",
    "params": dict.fromkeys(
        ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps"), "auto"
    ),
}
"""A schedule that the Trainer fills in."""
REMOVE = object()


def changed(edits: dict) -> dict:
    """BASE with dotted keys set, or removed."""
    config = copy.deepcopy(BASE)
    for key, value in edits.items():
        *path, last = key.split(".")
        node = config
        for part in path:
            node = node.setdefault(part, {})
        if value is REMOVE:
            del node[last]
        else:
            node[last] = value
    return config


def check_refused(edits: dict, words: Sequence[str], world_size: int = 1) -> None:
    """BASE with these edits is refused, in a message that has these words and a fix."""
    with pytest.raises(DsxError) as caught:
        resolve(changed(edits), world_size=world_size)
    message = str(caught.value)
    for word in ("Fix: ", *words):
        assert word in message
