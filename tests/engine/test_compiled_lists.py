"""dsx.initialize compiles the repeated modules of a layer list of someone's own, which trains alike."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import Tensor, nn

import ranks

CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
}


class Mixer(nn.Module):
    """A block."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        """Any shape to the same."""
        return x + torch.tanh(self.mix(x))


def train(rank: int, world_size: int, zero: int, compiles: bool) -> tuple[list[float], list[int]]:
    """Losses, and the places of the compiled layers."""
    import dsx
    from dsx.nn import compiled

    compiled.BACKEND = "aot_eager"
    tied = partial(TiedLayerSpec, "ends", nn.Linear, 8, 8)
    layers = [tied(), LayerSpec(Mixer), torch.relu, LayerSpec(Mixer), nn.LayerNorm(8), tied()]
    config = CONFIG | {"zero_optimization": {"stage": zero}}
    model = dsx.PipelineModule(
        layers, num_stages=1, loss_fn=nn.functional.mse_loss, seed_layers=True, partition_method="uniform"
    )
    engine = dsx.initialize(model=model, config=config, compile_blocks=compiles)[0]
    x = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(rank))
    losses = [float(engine.train_batch(iter([(each, -each) for each in x]))) for _ in range(4)]
    layers = model.chunks.layers
    return losses, [index for index, layer in layers.items() if "forward" in getattr(layer, "__dict__", ())]


@pytest.mark.parametrize("zero", [1, 3])
def test_repeated_modules_are_compiled(zero: int) -> None:
    plain, made = (ranks.run(train, 2, zero, compiles)[0] for compiles in (False, True))
    assert plain[1] == []
    assert made[1] == [1, 3]
    assert made[0] == pytest.approx(plain[0], rel=1e-6)
