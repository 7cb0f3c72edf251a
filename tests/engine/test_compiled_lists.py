"""dsx.initialize compiles the repeated modules of a layer list of someone's own, which trains alike."""

from __future__ import annotations

import warnings
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


PARTS = {"num_stages": 2, "num_chunks": 2, "schedule": "zbv", "partition_method": "uniform"}


def train_mixers(
    _rank: int, _world_size: int, compiles: bool, count: int, how: dict[str, Any]
) -> list[float]:
    import dsx
    from dsx.nn import compiled

    compiled.BACKEND = "aot_eager"
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    warnings.filterwarnings("error", ".*runs as it is")
    layers = [LayerSpec(Mixer) for _ in range(count)]
    model = dsx.PipelineModule(layers, loss_fn=nn.functional.mse_loss, seed_layers=True, **how)
    config = CONFIG | {"zero_optimization": {"stage": 3}}
    engine = dsx.initialize(model=model, config=config, compile_blocks=compiles)[0]
    x = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(0))
    return [float(engine.train_batch(iter([(each, -each) for each in x]))) for _ in range(4)]


def test_hooks_of_zero_3_stay_out_of_the_graphs_where_the_backward_is_divided() -> None:
    plain, made = (ranks.run(train_mixers, 2, compiles, 12, PARTS)[0] for compiles in (False, True))
    assert made == pytest.approx(plain, rel=1e-6)


def test_a_first_layer_is_compiled_whose_inputs_need_no_gradient() -> None:
    plain, made = (
        ranks.run(train_mixers, 2, compiles, 2, {"num_stages": 1})[0] for compiles in (False, True)
    )
    assert made == pytest.approx(plain, rel=1e-6)


class Words(nn.Module):
    """A head of one's own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(11, 8))

    def forward(self, x: Tensor, loss: Any = None) -> Tensor:
        """Logits, or the loss."""
        return x @ self.weight.t() if loss is None else loss(x, self.weight)


def chunked(_rank: int, _world_size: int, compiles: bool) -> list[float]:
    import dsx
    from dsx import nn as parallel

    loss = parallel.HeadLoss(tp=dsx.TensorParallel(), vocab_size=11, chunk_tokens=3)
    layers = [LayerSpec(nn.Embedding, 11, 8), LayerSpec(Mixer), LayerSpec(Words)]
    model = dsx.PipelineModule(layers, num_stages=1, loss_fn=loss, seed_layers=True)
    if compiles:
        model.compile(backend="aot_eager")
    engine = dsx.initialize(model=model, config=CONFIG)[0]
    ids = torch.randint(0, 11, (2, 4, 6), generator=torch.Generator().manual_seed(3))
    pairs = [(each[:, :-1], each[:, 1:]) for each in ids]
    return [float(engine.train_batch(iter(pairs))) for _ in range(3)]


def test_a_compiled_head_computes_the_loss_in_chunks() -> None:
    plain, compiled = (ranks.run(chunked, 1, compiles)[0] for compiles in (False, True))
    assert plain[0] != plain[2]
    assert compiled == pytest.approx(plain, rel=1e-6)
