"""A user's PipelineModule model trains under dsx as under stock DeepSpeed, by changing two lines."""

from __future__ import annotations

import pytest
import torch

import ranks
from parity import stock_model

STEPS = 4


def _steps(engine, dp: int, dp_rank: int, micro_batches: int, dynamic: bool) -> list[float]:
    losses = []
    for step in range(STEPS):
        data = stock_model.batches(step, dp, dp_rank, micro_batches, dynamic=dynamic)
        losses.append(engine.train_batch(data_iter=data).item())
    data = stock_model.batches(99, dp, dp_rank, micro_batches, dynamic=dynamic)
    return [*losses, engine.eval_batch(data).item()]


def stock(rank: int, world_size: int, pp: int, zero: int, micro_batches: int, dynamic: bool) -> list[float]:
    import deepspeed
    from deepspeed.pipe import PipelineModule

    deepspeed.init_distributed()
    net = PipelineModule(
        layers=stock_model.layers(),
        num_stages=pp,
        loss_fn=stock_model.loss_fn,
        seed_layers=True,
        seed_fn=torch.manual_seed,
        partition_method="uniform",
        dynamic_shape=dynamic,
    )
    engine, *_ = deepspeed.initialize(
        model=net, model_parameters=list(net.parameters()), config=stock_model.config(zero, micro_batches)
    )
    return _steps(engine, world_size // pp, engine.grid.get_data_parallel_rank(), micro_batches, dynamic)


def ours(
    rank: int,
    world_size: int,
    pp: int,
    zero: int,
    micro_batches: int,
    dynamic: bool,
    chunks: int,
    interval: int,
) -> list[float]:
    import deepspeed

    import dsx

    deepspeed.init_distributed()
    net = dsx.PipelineModule(
        layers=stock_model.layers(),
        num_stages=pp,
        loss_fn=stock_model.loss_fn,
        seed_layers=True,
        seed_fn=torch.manual_seed,
        partition_method="uniform",
        dynamic_shape=dynamic,
        num_chunks=chunks,
        activation_checkpoint_interval=interval,
    )
    engine, *_ = dsx.initialize(
        model=net, model_parameters=net.parameters(), config=stock_model.config(zero, micro_batches)
    )
    return _steps(engine, world_size // pp, engine.grid.get_data_parallel_rank(), micro_batches, dynamic)


@pytest.mark.parametrize(
    ("pp", "dp", "micro_batches", "dynamic", "variants"),
    [
        # (zero, chunks, recompute interval) of ours against stock ZeRO-1.
        (2, 1, 4, False, [(0, 1, 0), (1, 2, 0), (2, 3, 2), (3, 1, 1)]),
        (2, 2, 3, False, [(0, 2, 1), (1, 1, 0), (3, 2, 0)]),
        (2, 1, 4, True, [(1, 1, 0), (2, 2, 0), (3, 3, 0)]),
    ],
)
def test_same_losses_as_stock_deepspeed(
    pp: int, dp: int, micro_batches: int, dynamic: bool, variants: list[tuple[int, int, int]]
) -> None:
    expected = ranks.run(stock, pp * dp, pp, 1, micro_batches, dynamic)
    for zero, chunks, interval in variants:
        got = ranks.run(ours, pp * dp, pp, zero, micro_batches, dynamic, chunks, interval)
        assert got[0] == pytest.approx(expected[0], rel=1e-5), (zero, chunks, interval)
        assert all(row == got[0] for row in got)
