"""A user's pipeline model as ``dsx verify --model`` and ``--stock`` take it. Nothing of dsx."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from deepspeed.pipe import LayerSpec

sys.path.insert(0, str(Path(__file__).parents[1]))

from parity import stock_model


def make_model() -> dict[str, Any]:
    """What PipelineModule takes, and the micro-batches."""
    return {
        "layers": stock_model.layers(),
        "loss_fn": stock_model.loss_fn,
        "num_stages": 2,
        "partition_method": "uniform",
        "seed_layers": True,
        "seed_fn": torch.manual_seed,
        "batch": batch,
    }


def batch(step: int, index: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Micro-batch ``index`` of a step."""
    generator = torch.Generator().manual_seed(1000 * step + index)
    ids = torch.randint(0, stock_model.VOCAB, (size, 8), generator=generator)
    return ids[:, :-1], ids[:, 1:]


class Second(torch.nn.Module):
    """A layer that does ``what`` on the second of two ranks, and nothing in one process."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.weight = torch.nn.Parameter(torch.ones(1))

    def forward(self, inputs: Any) -> Any:
        """The same."""
        if os.environ.get("WORLD_SIZE") == "2" and os.environ.get("RANK") == "1":
            if self.what == "fails":
                raise ValueError("no such luck")
            while True:
                time.sleep(1)
        hidden, mask = inputs
        return hidden * self.weight, mask


def _with(what: str) -> dict[str, Any]:
    model = make_model()
    return {**model, "layers": [*model["layers"][:-2], LayerSpec(Second, what), *model["layers"][-2:]]}


def fails() -> dict[str, Any]:
    """Raises on rank 1."""
    return _with("fails")


def hangs() -> dict[str, Any]:
    """Never ends on rank 1."""
    return _with("hangs")


def empty() -> dict[str, Any]:
    """Forgets everything."""
    return {}


def nothing() -> None:
    """Returns nothing."""
