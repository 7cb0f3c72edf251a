"""Modules that compute their tokens tile by tile, beside torch's autograd of the same in one."""

from __future__ import annotations

import copy
import json
from itertools import pairwise
from typing import Any

import pytest
import torch
from all_families import tiny
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP

from dsx.hub.feed_forward import feed_forwards
from dsx.nn.compiled import Compiled
from dsx.nn.tiling import tile

ROWS, LENGTH, HIDDEN, TILES = 2, 23, 16, 5


def mlp(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return LlamaMLP(
        LlamaConfig(hidden_size=HIDDEN, intermediate_size=40, num_attention_heads=4, mlp_bias=True)
    ).to(dtype)


def pair() -> tuple[nn.Module, nn.Module]:
    whole = mlp()
    tiled = copy.deepcopy(whole)
    tile(tiled, TILES, None)
    return whole, tiled


def gradients(module: Any, x: Tensor, weights: Tensor) -> list[Tensor]:
    """Output, and gradients of the input and the parameters."""
    x = x.clone().requires_grad_()
    y = module(x)
    (y * weights).sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in module.parameters())]  # type: ignore[list-item]


def inputs(dtype: torch.dtype = torch.float32, length: int = LENGTH) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, weights = (torch.randn(ROWS, length, HIDDEN, generator=generator) for _ in range(2))
    return x.to(dtype), weights.to(dtype)


def test_gradients_are_those_of_autograd() -> None:
    for one, other in zip(*(gradients(each, *inputs()) for each in pair()), strict=True):
        torch.testing.assert_close(other, one, rtol=1e-6, atol=1e-6)


def test_a_copy_computes_with_its_own_weights() -> None:
    _, tiled = pair()
    other = copy.deepcopy(tiled)
    with torch.no_grad():
        other.get_parameter("down_proj.weight").zero_()
        other.get_parameter("down_proj.bias").zero_()
    assert float(other(inputs()[0]).abs().max()) == 0 < float(tiled(inputs()[0]).abs().max())


def test_one_tile_is_there_at_a_time_and_hooks_see_one_gradient() -> None:
    _, tiled = pair()
    lengths, seen = list[int](), list[str]()
    tiled.get_submodule("gate_proj").register_forward_hook(lambda *a: lengths.append(a[2].shape[1]))
    for name, parameter in tiled.named_parameters():
        parameter.register_hook(lambda _, name=name: seen.append(name))
    gradients(tiled, *inputs())
    assert lengths == 2 * [4, 5, 4, 5, 5]
    assert sorted(seen) == sorted(name for name, _ in tiled.named_parameters())


def test_sums_of_many_tiles_in_bfloat16_are_as_near_as_in_one() -> None:
    half, whole = torch.bfloat16, mlp(torch.bfloat16)
    exact, tiled = copy.deepcopy(whole).double(), copy.deepcopy(whole)
    tile(tiled, 256, None)
    given = inputs(half, 1024)
    right = gradients(exact, *(each.double() for each in given))
    found = gradients(whole, *given), gradients(tiled, *given)
    for wanted, one, other in zip(right[2:], *(each[2:] for each in found), strict=True):
        near, far = (float((each.double() - wanted).norm()) for each in (one, other))
        assert far <= 1.5 * near


def test_dropout_draws_the_same_masks_again() -> None:
    class Dropping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.drop, self.down = nn.Linear(HIDDEN, 40), nn.Dropout(0.5), nn.Linear(40, HIDDEN)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(self.drop(self.up(x)))

    torch.manual_seed(0)
    whole = Dropping()
    tiled = copy.deepcopy(whole)
    tile(tiled, TILES, None)
    bounds = [place * LENGTH // TILES for place in range(TILES + 1)]

    def in_turn(x: Tensor) -> Tensor:
        parts = [whole(x[:, a:b]) for a, b in pairwise(bounds)]
        return torch.cat(parts, dim=1)

    in_turn.parameters = whole.parameters  # type: ignore[attr-defined]
    found = []
    for each in (in_turn, tiled):
        torch.manual_seed(3)
        found.append([*gradients(each, *inputs()), torch.rand(3)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-6, atol=1e-6)


def test_frozen_parts_get_no_gradient_and_ask_for_none() -> None:
    whole, tiled = pair()
    for each in (whole, tiled):
        each.get_submodule("gate_proj").requires_grad_(requires_grad=False)
    x, weights = inputs()
    for each in (whole, tiled):
        (each(x) * weights).sum().backward()
    for one, other in zip(whole.parameters(), tiled.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None)
        if one.grad is not None and other.grad is not None:
            torch.testing.assert_close(other.grad, one.grad, rtol=1e-6, atol=1e-6)
    tiled.requires_grad_(requires_grad=False)
    assert not tiled(x).requires_grad


class Surrounded(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 + self.inner(x.tanh()).sin()


def test_in_a_compiled_block_it_runs_between_graphs() -> None:
    whole, tiled = (Surrounded(each) for each in pair())
    compiled = Compiled(Surrounded.forward, "Surrounded", "aot_eager")
    expected, x = gradients(whole, *inputs()), inputs()[0].requires_grad_()
    y = compiled(tiled, x)
    (y * inputs()[1]).sum().backward()
    for one, other in zip(expected, [y, x.grad, *(p.grad for p in tiled.parameters())], strict=True):
        torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("family", "paths"),
    [
        ("gpt_neox", {"mlp"}),
        ("deepseek_v3", {"mlp"}),
        ("mixtral", {"mlp"}),
        ("lfm2", {"feed_forward"}),
        ("opt", set()),
    ],
)
def test_feed_forwards_are_found_and_mixers_are_not(family: str, paths: set[str]) -> None:
    assert set(feed_forwards(json.dumps(tiny.tiny_config(family).to_dict() | {"vocab_size": 257}))) == {
        frozenset(paths)
    }
