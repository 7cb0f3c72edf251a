"""Ties over different pipeline ranks, beside other process groups: members have made equally many."""

from __future__ import annotations

from functools import partial, reduce
from typing import Any

import pytest
import torch
from torch import nn

import ranks

WIDTH, ROWS, STEPS = 6, 2, 3
CONFIG = {
    "train_micro_batch_size_per_gpu": ROWS,
    "gradient_accumulation_steps": 3,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
}
LISTS = {"two ties": "ap bp ba", "a tie and headers": "ap pp pa", "three ties": "ab cp abc"}


class Seeded(nn.Linear):
    """Weights that follow from a letter and no generator's state."""

    def __init__(self, letter: str) -> None:
        super().__init__(WIDTH, WIDTH, bias=False)
        place = torch.arange(WIDTH * WIDTH) + ord(letter)
        with torch.no_grad():
            self.weight.copy_((place * 0.7).sin().view(WIDTH, WIDTH) / 2)


def _letters(name: str) -> list[str]:
    """One letter a layer; p is a plain layer, with weights by its place."""
    return [str(i) if letter == "p" else letter for i, letter in enumerate(LISTS[name].replace(" ", ""))]


def _data() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [tuple(torch.randn(2, ROWS, WIDTH, generator=generator)) for _ in range(3 * STEPS)]  # type: ignore[misc]


def _train(rank: int, world_size: int, names: list[str]) -> list[list[float]]:
    from deepspeed.pipe import LayerSpec, TiedLayerSpec

    import dsx

    out = []
    for name in names:  # one model after another, as in a notebook
        layers: list[Any] = [
            LayerSpec(Seeded, letter) if letter.isdigit() else TiedLayerSpec(letter, Seeded, letter)
            for letter in _letters(name)
        ]
        module = dsx.PipelineModule(
            layers,
            num_stages=world_size,
            loss_fn=nn.functional.mse_loss,
            partition_method="uniform",
            dynamic_shape="headers" in name,
        )
        engine = dsx.initialize(model=module, config=CONFIG)[0]
        data = iter(_data())
        out.append([engine.train_batch(data).item() for _ in range(STEPS)])
    return out


def _plain(name: str) -> list[float]:
    modules: dict[str, nn.Module] = {}
    layers = [modules.setdefault(letter, Seeded(letter)) for letter in _letters(name)]
    model = nn.ModuleDict(modules)
    optimizer, data, losses = torch.optim.SGD(model.parameters(), lr=0.1), _data(), []
    for step in range(STEPS):
        optimizer.zero_grad()
        several = []
        for x, y in data[3 * step : 3 * step + 3]:
            several.append(nn.functional.mse_loss(reduce(lambda out, layer: layer(out), layers, x), y))
        mean = torch.stack(several).mean()
        mean.backward()
        optimizer.step()
        losses.append(mean.item())
    return losses


def test_any_ties_train_as_one_process_in_one_program_after_another() -> None:
    found = ranks.run(partial(_train, names=list(LISTS)), 3)
    for name, losses in zip(LISTS, found[0], strict=True):
        assert losses == pytest.approx(_plain(name), rel=1e-5), name
    assert all(each == found[0] for each in found)
