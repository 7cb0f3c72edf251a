"""A user's pipeline model as ``dsx verify --model`` and ``--stock`` take it. Nothing of dsx."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

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
