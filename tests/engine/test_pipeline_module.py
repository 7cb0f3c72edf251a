"""A layer list becomes the same stages, weights, draws and shared objects as under stock DeepSpeed."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import pytest
import torch
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import nn

import ranks
from dsx.errors import LayoutError, ModelError
from engine import toy_pipeline as toy
from engine.toy_pipeline import Case


class Wide(nn.Module):
    """Its constructor looks at values, which tensors on the meta device do not have."""

    def __init__(self) -> None:
        super().__init__()
        factor = int(torch.tensor([3]).item())
        self.up, self.down = (
            nn.Linear(toy.WIDTH, factor * toy.WIDTH),
            nn.Linear(factor * toy.WIDTH, toy.WIDTH),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


LISTS = {
    "even": [LayerSpec(toy.Layer) for _ in range(7)],
    "uneven": [LayerSpec(Wide), *(LayerSpec(toy.Layer) for _ in range(5)), nn.Tanh(), LayerSpec(Wide)],
}


def _parts(rank: int, world_size: int) -> list[tuple[Any, Any]]:
    import deepspeed
    from deepspeed.pipe import PipelineModule

    import dsx

    deepspeed.init_distributed()
    found = []
    for layers in LISTS.values():
        for method in ("uniform", "parameters", "type:layer|wide", "type:Wide"):
            if method == "type:Wide" and layers is LISTS["even"]:
                continue
            keys = {"num_stages": 2, "loss_fn": toy.loss_fn, "partition_method": method}
            stock, ours = PipelineModule(layers, **keys), dsx.PipelineModule(layers, **keys)
            found.append((stock.parts, list(ours.stage_map.bounds)))
    return found


def test_partitions_equal_stock_deepspeeds() -> None:
    for stock, ours in ranks.run(_parts, 2)[0]:
        assert ours == stock


def _dropout_layers() -> list[Any]:
    return [layer for _ in range(3) for layer in (LayerSpec(toy.Layer), LayerSpec(nn.Dropout, 0.5))]


def _dropout(rank: int, world_size: int, layouts: list[tuple[int, int, int, bool]]) -> list[list[float]]:
    """Losses with dropout: (pp, chunks, recompute interval, stock DeepSpeed's engine)."""
    import deepspeed
    from deepspeed.pipe import PipelineModule

    import dsx

    deepspeed.init_distributed()
    results = []
    for pp, chunks, interval, stock in layouts:
        keys: dict[str, Any] = {"num_stages": pp, "loss_fn": toy.loss_fn, "partition_method": "uniform"}
        keys |= {"seed_layers": True, "seed_fn": torch.manual_seed, "base_seed": 77}
        if not stock:
            keys |= {"num_chunks": chunks, "activation_checkpoint_interval": interval}
        module = (PipelineModule if stock else dsx.PipelineModule)(_dropout_layers(), **keys)
        start = deepspeed.initialize if stock else dsx.initialize
        config = toy.config(Case(zero=1))
        made, *_ = start(model=module, model_parameters=list(module.parameters()), config=config)
        results.append([made.train_batch(toy.batches(step, 2)).item() for step in range(2)])
    return results


def test_seeded_dropout_is_the_same_in_every_layout() -> None:
    """seed_layers makes dropout depend on layer and micro-batch alone, as stock DeepSpeed's seeds do."""
    pipelines = ranks.run(
        _dropout, 2, [(2, 1, 0, True), (2, 1, 0, False), (2, 2, 0, False), (2, 1, 1, False)]
    )
    alone = ranks.run(_dropout, 1, [(1, 1, 0, False), (1, 3, 2, False)])
    stock = pipelines[0][0]
    for losses in pipelines[0][1:] + alone[0]:
        assert losses == pytest.approx(stock, rel=1e-6)


def _checkpointed(rank: int, world_size: int) -> tuple[list[Any], str]:
    """DeepSpeed's own reentrant checkpoint function, on float inputs and on a list that starts with ids."""
    import deepspeed

    import dsx

    recompute = {
        "activation_checkpoint_interval": 1,
        "activation_checkpoint_func": deepspeed.checkpointing.checkpoint,
    }
    losses = [toy.train(Case(pp=2, zero=zero, module=recompute)) for zero in (0, 1, 3)]
    ids = [LayerSpec(nn.Embedding, 9, toy.WIDTH), LayerSpec(toy.Layer)]
    module = dsx.PipelineModule(ids, num_stages=2, loss_fn=toy.loss_fn, **recompute)
    made, *_ = dsx.initialize(model=module, config=toy.config(Case()))
    text = ""
    if rank == 0:
        with pytest.raises(ModelError) as caught:
            made.train_batch(iter([(torch.zeros(2, dtype=torch.int64), torch.zeros(2, toy.WIDTH))] * 2))
        text = str(caught.value)
    return losses, text


def test_a_reentrant_checkpoint_function_trains_or_is_refused() -> None:
    losses, text = ranks.run(_checkpointed, 2)[0]
    for found in losses:
        assert toy.flat(found) == pytest.approx(toy.flat(toy.oracle("plain", micro_batches=2)), rel=1e-5)
    assert "recomputed layers 0 to 0" in text


def _ties(rank: int, world_size: int) -> list[Any]:
    import dsx

    torch.manual_seed(rank)  # different weights before the broadcast
    module = dsx.PipelineModule(toy.layers("tied"), num_stages=2, loss_fn=toy.loss_fn)
    (tie,) = module.ties
    flags = {name: p.ds_pipe_replicated for name, p in module.chunks.named_parameters()}
    return [[p.tolist() for p in tie.parameters], flags]


def test_tied_copies_start_equal_and_count_once() -> None:
    (first, flags_first), (second, flags_second) = ranks.run(_ties, 2)
    assert first == second
    assert not any(flags_first.values())
    assert {name for name, flag in flags_second.items() if flag} == {
        "tied_modules.table.weight",
        "tied_modules.table.bias",
    }


def _refused(rank: int, world_size: int) -> list[str]:
    import deepspeed
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology, ProcessTopology

    import dsx
    from dsx.parallel.groups import make_groups
    from dsx.parallel.mesh import Mesh
    from dsx.parallel.stages import StageMap

    plain = toy.layers("plain")

    def tied(first: Any, second: Any) -> list[Any]:
        return [
            TiedLayerSpec("t", toy.Table, tied_weight_attr=first),
            *plain,
            TiedLayerSpec("t", toy.Table, forward_fn=toy.head, tied_weight_attr=second),
        ]

    attempts = [
        (LayoutError, {}),
        (LayoutError, {"num_stages": 3}),
        (LayoutError, {"num_stages": 0}),
        (LayoutError, {"topology": ProcessTopology(axes=["data", "pipe"], dims=[1, 2])}),
        (LayoutError, {"topology": ProcessTopology(axes=["pipe", "expert"], dims=[2, 1])}),
        (LayoutError, {"topology": PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=2)}),
        (LayoutError, {"groups": make_groups(Mesh.of(pp=2)), "stage_map": StageMap((0, 1, 2), 2)}),
        (ModelError, {"num_stages": 2, "layers": [*plain, "layer"], "partition_method": [2, 3]}),
        (ModelError, {"num_stages": 2, "layers": tied("weight", "bias")}),
        (ModelError, {"num_stages": 2, "layers": tied("wait", "wait"), "partition_method": "uniform"}),
    ]
    texts = []
    for kind, keys in attempts:
        with pytest.raises(kind) as caught:
            dsx.PipelineModule(**{"layers": plain, "loss_fn": toy.loss_fn, **keys})
        texts.append(str(caught.value))
    with deepspeed.zero.Init(config_dict_or_path={"train_batch_size": 2, "zero_optimization": {"stage": 3}}):
        cut = [toy.Layer() for _ in range(2)]
    with pytest.raises(ModelError) as caught:
        dsx.PipelineModule(cut, num_stages=2, loss_fn=toy.loss_fn)
    texts.append(str(caught.value))
    whole = dsx.PipelineModule(plain, topology=ProcessTopology(axes=["pipe", "data"], dims=[2, 1]))
    assert whole(torch.zeros(1, toy.WIDTH)).shape == (1, toy.WIDTH)  # this rank's layers, as in stock
    twice = dsx.PipelineModule(plain, num_stages=2, num_chunks=2)
    with pytest.raises(ModelError, match=r"dsx\.initialize"):
        twice(torch.zeros(1, toy.WIDTH))
    return texts


def test_wrong_arguments_are_explained() -> None:
    words = [
        "both missing",
        "num_stages = 3",
        "num_stages = 0",
        "['data', 'pipe']",
        "expert",
        "8 ranks",
        "2 layers on 2 ranks",
        "layer 4 (str)",
        "tied_weight_attr differ",
        "['weight', 'bias']",
        "deepspeed.zero.Init",
    ]
    for texts in ranks.run(_refused, 2):
        for text, word in zip(texts, words, strict=True):
            assert word in text


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
