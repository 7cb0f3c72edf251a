"""dsx.PipelineModule beside stock DeepSpeed's: first weights, random draws, shared objects."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import nn

import ranks
from engine import toy_pipeline as toy
from engine.toy_pipeline import Case

WIDTH = toy.WIDTH


class Noisy(nn.Module):
    """Draws from the generator in a way of its own, and more often the wider it is."""

    def __init__(self, factor: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, factor * WIDTH), nn.Linear(factor * WIDTH, WIDTH)
        self.shift = nn.Parameter(torch.empty(WIDTH).exponential_())
        self.register_buffer("order", torch.randperm(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x))) + self.shift[self.order]


def _layers() -> list[Any]:
    return [
        TiedLayerSpec("table", toy.Table, tied_weight_attr=["weight", "bias"]),
        *(LayerSpec(Noisy, factor) for factor in (1, 3, 2)),
        nn.Linear(WIDTH, WIDTH),
        LayerSpec(nn.Dropout, 0.25),
        torch.tanh,
        LayerSpec(Noisy, 1),
        TiedLayerSpec("table", toy.Table, forward_fn=toy.head, tied_weight_attr=["weight", "bias"]),
    ]


def _built(rank: int, world_size: int) -> list[tuple[str, bool]]:
    """Whether weights, buffers and the generator's state are stock DeepSpeed's, by way of building."""
    import deepspeed
    from deepspeed.pipe import PipelineModule

    import dsx

    deepspeed.init_distributed()
    results = []
    for seeded in (False, True):
        for method in ("parameters", "Uniform", "type:noisy"):
            found = []
            for kind in (PipelineModule, dsx.PipelineModule):
                torch.manual_seed(40 + rank)  # layers given as modules are each rank's own
                keys: dict[str, Any] = {"num_stages": 2, "partition_method": method, "seed_layers": seeded}
                keys["seed_fn"] = torch.manual_seed  # its own refuses the NumPy numbers that stock cuts by
                module = kind(_layers(), loss_fn=toy.loss_fn, **keys)
                found.append((dict(module.state_dict()), torch.get_rng_state()))
            (stock, state), (ours, own_state) = found
            same = stock.keys() == ours.keys() and all(torch.equal(ours[name], stock[name]) for name in stock)
            results.append((f"{method}, seeded {seeded}", same and torch.equal(state, own_state)))
    return results


def test_the_first_weights_are_stock_deepspeeds() -> None:
    """For the same torch seed, with and without seed_layers, whatever cuts the list."""
    for found in ranks.run(_built, 2):
        assert [name for name, same in found if not same] == []


def _trained(rank: int, world_size: int) -> list[list[float]]:
    """Losses with dropout from torch's seed alone: stock DeepSpeed, then dsx."""
    import deepspeed
    from deepspeed.pipe import PipelineModule

    import dsx

    deepspeed.init_distributed()
    results = []
    for kind, start in ((PipelineModule, deepspeed.initialize), (dsx.PipelineModule, dsx.initialize)):
        torch.manual_seed(7)
        module = kind(_layers(), num_stages=2, loss_fn=toy.loss_fn)
        config = toy.config(Case(zero=1))
        made, *_ = start(model=module, model_parameters=list(module.parameters()), config=config)
        results.append([made.train_batch(toy.batches(step, 2)).item() for step in range(3)])
    return results


def test_one_torch_seed_gives_stock_deepspeeds_losses() -> None:
    """Two changed lines: not even the dropout differs."""
    stock, ours = ranks.run(_trained, 2)[0]
    torch.testing.assert_close(ours, stock, rtol=1e-5, atol=0)


def _use(table: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return toy.head(table, x)


def _shared(rank: int, world_size: int) -> list[list[str]]:
    """What a PipelineModule of two ranks warns of, for lists that share weights in several ways."""
    import deepspeed

    import dsx

    deepspeed.init_distributed()
    one, frozen = toy.Table(), nn.Linear(WIDTH, WIDTH).requires_grad_(False)
    other = nn.Linear(WIDTH, WIDTH)
    other.weight = one.weight
    part = [TiedLayerSpec("t", toy.Table), LayerSpec(toy.Layer), TiedLayerSpec("t", toy.Table)]
    every = TiedLayerSpec("t", toy.Table, tied_weight_attr=["weight", "bias"])
    spec = LayerSpec(toy.Layer)
    lists: list[list[Any]] = [
        [one, LayerSpec(toy.Layer), one],
        [one, LayerSpec(toy.Layer), other],
        [one, LayerSpec(toy.Layer), functools.partial(_use, one)],
        [one, LayerSpec(toy.Layer), lambda x: _use(one, x)],
        [one, one, LayerSpec(toy.Layer)],  # on one rank: one module in truth
        [frozen, LayerSpec(toy.Layer), frozen],
        [spec, spec, spec],
        [every, LayerSpec(toy.Layer), every],
        [*part[:2], TiedLayerSpec("t", toy.Table, forward_fn=toy.head)],
        [*part[::2], LayerSpec(toy.Layer)],  # both on one rank: one module
    ]
    found = []
    for layers in lists:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            dsx.PipelineModule(layers, num_stages=2, loss_fn=toy.loss_fn, partition_method=[2, 1])
        found.append([str(w.message) for w in caught if "TiedLayerSpec" in str(w.message)])
    return found


def test_one_object_on_two_ranks_is_warned_of() -> None:
    (first, *others), elsewhere = ranks.run(_shared, 2)
    assert [len(texts) for texts in (first, *others)] == [1, 1, 1, 1, 0, 0, 0, 0, 1, 0]
    assert "layers 0 (Table), 2 (Table) on pipeline ranks 0, 1" in first[0]
    assert "layers 0 (Table), 2 (Linear) on pipeline ranks 0, 1" in others[0][0]
    assert (
        "layers 0 (Table), 2 (Table) on pipeline ranks 0, 1 are tied as 't', but not in bias." in others[7][0]
    )
    assert "name them too in the tied_weight_attr" in others[7][0]
    assert not any(elsewhere)  # once, from rank 0
