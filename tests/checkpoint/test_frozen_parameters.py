"""Frozen parameters in checkpoints of a run: whoever wrote one, every ZeRO stage and precision reads it."""

from __future__ import annotations

from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ranks
from often import often

WORDS, WIDTH, ROWS = 19, 8, 2
KINDS = [(stage, bf16) for stage, bf16 in product((0, 1, 3), (False, True))]
PAIRS = [(first, then) for first, then in product(KINDS, KINDS) if first[1] == then[1]]


class Frozen(nn.Embedding):
    def __init__(self) -> None:
        super().__init__(WORDS, WIDTH)
        self.weight.requires_grad_(False)


def _engine(stage: int, bf16: bool, seed: int, embedding: type[nn.Module] = Frozen) -> Any:
    from deepspeed.pipe import LayerSpec

    import dsx

    torch.manual_seed(seed)
    names = (WORDS, WIDTH) if embedding is nn.Embedding else ()
    layers = [LayerSpec(embedding, *names), LayerSpec(nn.Linear, WIDTH, WORDS)]
    module = dsx.PipelineModule(
        layers, num_stages=1, loss_fn=lambda y, t: nn.functional.cross_entropy(y.flatten(0, 1), t.flatten())
    )
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": bf16},
    }
    return dsx.initialize(model=module, config=config)[0]


def _losses(engine: Any, first: int, count: int) -> list[float]:
    out = []
    for step in range(first, first + count):
        torch.manual_seed(100 + step)
        words = torch.randint(0, WORDS, (ROWS, 7))
        out.append(engine.train_batch(iter([(words[:, :-1], words[:, 1:])])).item())
    return out


def _there_and_back(rank: int, world_size: int, pairs: list[Any], folder: str) -> list[Any]:
    out = []
    for index, (first, then) in enumerate(pairs):
        writer = _engine(*first, seed=0)
        _losses(writer, 0, 2)
        writer.save_checkpoint(f"{folder}/{index}")
        reader = _engine(*then, seed=1)
        reader.load_checkpoint(f"{folder}/{index}")
        out.append((_losses(writer, 2, 2), _losses(reader, 2, 2)))
    return out


@pytest.mark.parametrize("pairs", often([PAIRS[i::3] for i in range(3)], 1), ids=str)
def test_what_one_writes_another_goes_on_from(pairs: list[Any], tmp_path: Path) -> None:
    (found,) = ranks.run(partial(_there_and_back, pairs=pairs, folder=str(tmp_path)), 1)
    for (first, then), (went_on, loaded) in zip(pairs, found, strict=True):
        assert loaded == pytest.approx(went_on, rel=1e-2 if first[1] else 1e-5), (first, then)


def _thawed(rank: int, world_size: int, folder: str) -> str:
    from dsx.errors import CheckpointError

    writer = _engine(1, False, seed=0)
    _losses(writer, 0, 1)
    writer.save_checkpoint(folder)
    try:
        _engine(1, False, seed=0, embedding=nn.Embedding).load_checkpoint(folder)
    except CheckpointError as error:
        return str(error)
    return "loaded"


def test_what_was_frozen_and_is_trained_is_refused_by_name(tmp_path: Path) -> None:
    (said,) = ranks.run(partial(_thawed, folder=str(tmp_path)), 1)
    assert "0.weight" in said
    assert "was frozen when the checkpoint was written" in said
