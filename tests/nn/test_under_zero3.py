"""The families under a stock DeepSpeed engine with ZeRO-3: same training, no gathered weight kept."""

import deepspeed
import pytest
import tiny_models
import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import ranks
from dsx.nn.linear import ColumnParallelLinear, RowParallelLinear
from dsx.nn.parallel import TensorParallel

STEPS = 3


def engine_of(model, mpu=None):
    """DeepSpeed's own engine, every parameter partitioned and none kept between uses."""
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 0,
            "stage3_max_live_parameters": 0,
            "stage3_max_reuse_distance": 0,
            "stage3_prefetch_bucket_size": 0,
        },
    }
    return deepspeed.initialize(model=model, config=config, mpu=mpu)[0]


class Linears(nn.Module):
    """Two uses of one weight, and a row-parallel linear."""

    def __init__(self, view):
        super().__init__()
        one = TensorParallel()
        self.up, self.down = ColumnParallelLinear(64, 64, one), RowParallelLinear(64, 64, one)
        if view:
            self.up.forward = lambda x: x @ self.up.weight.t() + self.up.bias
        for p in self.parameters():
            nn.init.normal_(p, std=0.1)

    def forward(self, x):
        return self.down(self.up(self.up(x).tanh())).sum()


def kept_after_forward(rank, world_size, view):
    """Of the weights gathered in a forward, how many are still alive after it."""
    model = Linears(view)
    engine = engine_of(model)
    gathered = []
    for linear in (model.up, model.down):
        linear.register_forward_pre_hook(
            lambda module, _: gathered.append(StorageWeakRef(module.weight.data.untyped_storage()))
        )
    loss = engine(torch.ones(2, 64, requires_grad=True))
    alive = sum(not ref.expired() for ref in gathered)
    engine.backward(loss)
    engine.step()
    return len(gathered), alive


def test_no_gathered_weight_outlives_its_forward():
    assert ranks.run(kept_after_forward, 2, False) == [(3, 0)] * 2


def test_a_view_would_keep_it():
    """The control: the test above can fail."""
    assert ranks.run(kept_after_forward, 2, True) == [(3, 2)] * 2


def losses_of(model, engine, ids, labels):
    losses = []
    for _ in range(STEPS):
        loss = model.loss_fn(engine(ids), labels)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def losses_with_zero3(rank, world_size, name, recompute, ids, labels):
    """Losses of some steps, both data-parallel ranks on the same data."""
    model = tiny_models.Model(name, recompute=recompute, seed=3)
    engine = engine_of(model)
    return losses_of(model, engine, ids, labels)


def losses_alone(name, ids, labels):
    model = tiny_models.Model(name, seed=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(STEPS):
        loss = model.loss_fn(model(ids), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(("name", "recompute"), [("gpt2", "none"), ("llama-tied", "full")])
def test_training_equals_one_process(name, recompute):
    """Both have tied embeddings: one module, gathered twice."""
    ids, labels = tiny_models.batch(name)
    expected = losses_alone(name, ids, labels)
    assert expected[-1] < expected[0]
    for losses in ranks.run(losses_with_zero3, 2, name, recompute, ids, labels):
        assert losses == pytest.approx(expected, abs=2e-6)


class Grid:
    """What DeepSpeed asks of a model-parallel unit."""

    def __init__(self, world_size, rank):
        self.single = [dist.new_group([r]) for r in range(world_size)][rank]

    def get_model_parallel_rank(self):
        return dist.get_rank()

    get_tensor_model_parallel_rank = get_model_parallel_rank

    def get_model_parallel_world_size(self):
        return dist.get_world_size()

    get_tensor_model_parallel_world_size = get_model_parallel_world_size

    def get_model_parallel_group(self):
        return dist.group.WORLD

    get_tensor_model_parallel_group = get_model_parallel_group

    def get_data_parallel_rank(self):
        return 0

    def get_data_parallel_world_size(self):
        return 1

    def get_data_parallel_group(self):
        return self.single


def losses_with_tensor_parallel_zero3(rank, world_size, name, sequence_parallel, ids, labels):
    tp = TensorParallel(world_size, rank, dist.group.WORLD, sequence_parallel)
    model = tiny_models.Model(name, tp, seed=3)
    engine = engine_of(model, Grid(world_size, rank))
    return losses_of(model, engine, ids, labels)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_tensor_parallel_under_zero3_equals_one_process(sequence_parallel):
    """Weights start equal in both layouts, so the losses agree from the first step."""
    ids, labels = tiny_models.batch("gpt2")
    expected = losses_alone("gpt2", ids, labels)
    for losses in ranks.run(losses_with_tensor_parallel_zero3, 2, "gpt2", sequence_parallel, ids, labels):
        assert losses == pytest.approx(expected, abs=2e-6)
