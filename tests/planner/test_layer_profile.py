"""Measured layers: times that sleep forces, bytes that can be counted by hand, nothing left behind."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any, ClassVar

import pytest
import torch
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import nn

import ranks
from dsx.errors import ModelError
from dsx.nn.linear import ColumnParallelLinear
from dsx.nn.parallel import TensorParallel
from dsx.nn.split import WeightGradients
from dsx.planner.choose import choose
from dsx.planner.cluster import Link
from dsx.planner.layout import Space
from dsx.planner.profile import Profile
from dsx.planner.profiler import link_of, profile_layers
from engine import toy_pipeline as toy
from often import often

FORWARD, BACKWARD = 0.004, 0.007


class _Sleep(torch.autograd.Function):
    calls: ClassVar[Counter[str]] = Counter()

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        _Sleep.calls["forward"] += 1
        time.sleep(FORWARD)
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        _Sleep.calls["backward"] += 1
        time.sleep(BACKWARD)
        return gradient * 2


class Sleeper(nn.Module):
    """Built so often, slow on purpose."""

    built = 0

    def __init__(self, width: int) -> None:
        super().__init__()
        type(self).built += 1
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Sleep.apply(self.linear(x))


def mean_square(y: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return ((y - labels) ** 2).mean()


def profiled(layers: list[Any], rows: int = 3, width: int = 8, **more: Any) -> Profile:
    batch = torch.randn(rows, width), torch.zeros(rows, 1)
    return profile_layers(layers, batch, loss_fn=mean_square, micro_batches=3, **more)


def test_times_are_at_least_what_sleeps_take() -> None:
    _Sleep.calls.clear()
    first, _ = profiled([LayerSpec(Sleeper, 8), nn.Linear(8, 8)]).layers["none"]
    assert first.forward_seconds >= FORWARD
    assert first.backward_seconds >= BACKWARD
    # Not dsx's layer: its whole backward happens in the first part, and nothing is left for the second.
    assert first.backward_input_seconds >= BACKWARD
    assert first.pending_bytes == 0
    # Once for the bytes; two micro-batches that do not count and three that do, whole and divided.
    assert _Sleep.calls == {"forward": 1 + 5 * 2, "backward": 1 + 5 * 2}


def test_equal_specs_are_measured_once() -> None:
    Sleeper.built = 0
    profile = profiled([*[LayerSpec(Sleeper, 8)] * 4, nn.Linear(8, 8)])
    assert Sleeper.built == 1
    assert profile.num_layers == 5
    assert len(set(profile.layers["none"][:4])) == 1
    Sleeper.built = 0
    profiled([LayerSpec(Sleeper, 8), LayerSpec(nn.Linear, 8, 4), LayerSpec(Sleeper, 4), nn.Linear(4, 1)])
    assert Sleeper.built == 2


FLOAT = 4


@pytest.mark.parametrize(
    ("layer", "wanted"),
    often(
        [
            (nn.Linear(8, 16), 3 * 8),  # the input
            (nn.Sequential(nn.Linear(8, 16), nn.GELU()), 3 * (8 + 16)),  # and what GELU gets
            (nn.Sequential(nn.Linear(8, 16), nn.ReLU()), 3 * (8 + 16)),  # and what ReLU gives
            (nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 16)), 3 * (8 + 16 + 16)),
            (nn.Sequential(nn.Linear(8, 16), nn.Flatten(), nn.Tanh()), 3 * (8 + 16)),  # a view: no storage
            (nn.Identity(), 0),
        ],
        3,
    ),
    ids=str,
)
def test_kept_bytes_by_hand(layer: nn.Module, wanted: int) -> None:
    """Inputs and activations of 3 rows, parameters not counted."""
    profile = profiled([layer, nn.Identity()])
    assert profile.layers["none"][0].kept_bytes == wanted * FLOAT


def test_boundary_bytes_are_the_outputs() -> None:
    fork = [LayerSpec(toy.Fork), LayerSpec(toy.Pass), LayerSpec(toy.Join)]
    first, second, last = profiled(fork, rows=2).layers["none"]
    floats = 2 * toy.WIDTH * FLOAT
    assert first.boundary_bytes == 3 * floats + 2 * toy.WIDTH  # three of floats, one of bools
    assert second.boundary_bytes == first.boundary_bytes + floats // 2 + 2 * toy.WIDTH * 2
    assert last.boundary_bytes == 0


def test_divided_backward_of_dsx_layers() -> None:
    """Between its two parts the input and the output's gradient are kept."""
    split = WeightGradients()
    spec = LayerSpec(Column, split)
    first, _ = profiled([spec, nn.Linear(16, 1)], split=split).layers["none"]
    assert first.pending_bytes == 3 * (8 + 16) * FLOAT
    assert first.kept_bytes == 3 * 8 * FLOAT
    assert first.backward_weight_seconds > 0
    assert not split.has((0, 0))


class Column(nn.Module):
    def __init__(self, split: WeightGradients) -> None:
        super().__init__()
        self.linear = ColumnParallelLinear(8, 16, TensorParallel(), bias=False, split=split)
        nn.init.normal_(self.linear.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(x)
        return y


def test_nothing_is_left_behind() -> None:
    given = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.BatchNorm1d(8))
    before = [t.clone() for t in given.state_dict().values()]
    profiled([given, LayerSpec(nn.Linear, 8, 1)])
    assert all(torch.equal(a, b) for a, b in zip(before, given.state_dict().values(), strict=True))
    assert all(p.grad is None for p in given.parameters())


def test_random_state_is_as_before() -> None:
    batch = torch.randn(3, 8), torch.zeros(3, 1)
    layers = [nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)), LayerSpec(nn.Linear, 8, 1)]
    state = torch.get_rng_state()
    profile_layers(layers, batch, loss_fn=mean_square, micro_batches=1)
    assert torch.equal(torch.get_rng_state(), state)


def test_tied_layers_and_functions() -> None:
    def head(module: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        return x @ module.weight

    tied = (
        TiedLayerSpec("t", nn.Linear, 8, 8, tied_weight_attr=["weight"]),
        TiedLayerSpec("t", nn.Linear, 8, 8, forward_fn=head, tied_weight_attr=["weight"]),
    )
    profile = profiled([tied[0], torch.tanh, tied[1]])
    assert profile.num_layers == 3
    assert profile.layers["none"][1].kept_bytes == 3 * 8 * FLOAT


class Twice(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return {"x": x}


def test_what_cannot_be_measured() -> None:
    with pytest.raises(ModelError, match="it returned a dict"):
        profiled([Twice(), nn.Linear(8, 1)])
    with pytest.raises(ModelError, match="no loss comes of the last layer"):
        profile_layers([nn.Linear(8, 2)], (torch.randn(3, 8), None), micro_batches=1)


def test_link_through_two_points() -> None:
    link = link_of((1000, 0.002), (101_000, 0.012))
    assert link.bytes_per_second == pytest.approx(1e7)
    assert link.latency_seconds == pytest.approx(0.0019)
    noisy = link_of((1000, 0.002), (100_000, 0.001))  # the large one took less
    assert (noisy.latency_seconds, noisy.bytes_per_second) == (0.0, pytest.approx(1e8))


def _link(rank: int, world_size: int) -> Link | None:
    from dsx.parallel.groups import make_groups
    from dsx.parallel.mesh import Mesh
    from dsx.planner.profiler import measure_link

    groups = make_groups(Mesh.of(pp=world_size))
    return measure_link(groups, torch.device("cpu"), num_bytes=1 << 20, rounds=3)


def test_every_pair_of_neighbours_plays_and_all_agree() -> None:
    """Three ranks: the middle one plays twice."""
    links = ranks.run(_link, 3)
    assert links[0] is not None
    assert links == [links[0]] * 3
    assert links[0].latency_seconds >= 0
    assert links[0].bytes_per_second > 0
    assert ranks.run(_link, 1) == [None]


def _measured_and_trained(rank: int, world_size: int) -> tuple[Profile, str, tuple[int, ...], list[float]]:
    """A user's own layers: profile, choice, pipeline, two steps."""
    import dsx
    from dsx.parallel.groups import make_groups
    from dsx.parallel.mesh import Mesh

    torch.manual_seed(7)
    groups = make_groups(Mesh.of(pp=2))
    layers = [LayerSpec(toy.Layer) for _ in range(6)]
    batch = torch.randn(2, toy.WIDTH), torch.zeros(2, toy.WIDTH)
    profile = profile_layers(layers, batch, loss_fn=mean_square, groups=groups, micro_batches=2)
    best = choose(profile, num_ranks=2, num_micro_batches=4, space=Space()).chosen.cut
    model = dsx.PipelineModule(
        layers,
        groups=groups,
        loss_fn=mean_square,
        seed_layers=True,
        stage_map=best.stage_map,
        schedule=best.program,
    )
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
    }
    engine = dsx.initialize(model=model, config=config)[0]
    rng = torch.Generator().manual_seed(3)
    data = iter([(torch.randn(2, toy.WIDTH, generator=rng), torch.ones(2, toy.WIDTH)) for _ in range(12)])
    losses = [engine.train_batch(data).item() for _ in range(3)]
    return profile, best.program.name, best.stage_map.bounds, losses


def test_a_users_own_pipeline_from_profile_to_training() -> None:
    """What DeepSpeed's partition_method="profile" raises NotImplementedError for."""
    one, two = ranks.run(_measured_and_trained, 2)
    assert one == two  # one profile, so one choice, on every rank
    profile, _, bounds, losses = one
    assert profile.bytes_per_second is not None
    assert profile.num_layers == 6
    assert (bounds[0], bounds[-1]) == (0, 6)
    assert losses[-1] < losses[0]
