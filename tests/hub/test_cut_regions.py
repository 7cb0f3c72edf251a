"""What a plan does not name is known by what it computes: modules here have names that say nothing.

What is found is held to autograd: two halves of a region, each with its part of what is cut, whose gradients
are compared with those of the whole region.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dsx.hub.cut_regions import completed
from dsx.hub.model_structure import BlockCall
from dsx.hub.read import hub_model
from dsx.hub.tensor_plan import SUMMED, BlockPlan

HEADS, HEAD = 4, 6
WIDTH = HEADS * HEAD
OWN = {"layers.*.b": "colwise", "layers.*.c": "rowwise"}
PLAN = {"layers.*.a.b": "colwise", "layers.*.a.c": "rowwise"}


class Region(nn.Module):
    """Cut between ``b`` and ``c``; ``kind`` says what else stands in it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.b, self.c = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.d = nn.Parameter(torch.randn(HEAD))
        if kind == "before":
            self.d = nn.Parameter(torch.randn(WIDTH))
        elif kind == "a row per head":
            self.d = nn.Parameter(torch.randn(HEADS, HEAD))
        elif kind == "a list":
            self.e = nn.ModuleList(nn.LayerNorm(HEAD, bias=False) for _ in range(HEADS))
            del self.d
        elif kind in ("a linear beside", "its input by the way"):
            self.e = nn.Linear(WIDTH, WIDTH, bias=False)
            del self.d
        elif kind == "a gate":
            self.e = nn.Linear(WIDTH, 1, bias=False)
            del self.d
        elif kind == "a gate per head":
            self.d = nn.Parameter(torch.randn(HEADS, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "before":
            x = x * self.d
        y = self.b(x).unflatten(-1, (-1, HEAD))
        if self.kind in ("one for all heads", "a row per head"):
            y = y * self.d
        elif self.kind == "an activation":
            y = torch.where(y > 0, y * self.d.mean(), y)
        elif self.kind == "a list":
            y = torch.stack([norm(each) for norm, each in zip(self.e, y.unbind(-2), strict=False)], dim=-2)
        elif self.kind == "a linear beside":
            y = y * self.e(x).unflatten(-1, (-1, HEAD))
        elif self.kind == "a gate":
            y = y * self.e(x).unsqueeze(-1)
        elif self.kind == "a gate per head":
            y = y * F.linear(x, self.d).sigmoid().unsqueeze(-1)
        elif self.kind == "a mean beside":
            y = (y + self.d) * x.mean(-1)[..., None, None]
        elif self.kind == "its input by the way":
            y = (y + x.mean(-1)[..., None, None]) * self.e(x).unflatten(-1, (-1, HEAD))
        y = self.c(y.tanh().flatten(-2))
        return y * self.d.sum() if self.kind == "behind" else y


class Block(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.a = Region(kind)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x)


class Both(Region):
    """A region among the block's own linears."""

    def __init__(self, kind: str) -> None:
        super().__init__("one for all heads")
        self.a = Region(kind)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.a(x)
        return x + super().forward(x)


def styles_of(block: nn.Module, plan: Mapping[str, str | None] = PLAN) -> dict[str, str]:
    call = BlockCall(torch.ones(2, 3, WIDTH), (), {}, by_name=False)
    empty = copy.deepcopy(block).to("meta")
    return dict(completed(empty, BlockPlan.of(empty, "layers.0", plan), call).styles)


FOUND: dict[str, dict[str, Any]] = {
    "one for all heads": {"a.d": SUMMED},
    "an activation": {"a.d": SUMMED},
    "a row per head": {"a.d": "colwise"},
    "a linear beside": {"a.e": "colwise"},
    "before": {},
    "behind": {},
}


@pytest.mark.parametrize("own", [False, True], ids=["a child's linears", "the block's own"])
@pytest.mark.parametrize("kind", FOUND)
def test_what_a_plan_does_not_name_is_cut_or_summed_by_what_it_meets(kind: str, own: bool) -> None:
    torch.manual_seed(3)
    block = Region(kind) if own else Block(kind)
    styles = styles_of(block, OWN if own else PLAN)
    expected = {"a.b": "colwise", "a.c": "rowwise", **FOUND[kind]}
    assert styles == {path.removeprefix("a." * own): style for path, style in expected.items()}
    plan = BlockPlan(styles)
    x = torch.randn(2, 3, WIDTH)
    whole = block(x)
    (whole * x).sum().backward()
    halves, total = [copy.deepcopy(block) for _ in range(2)], torch.zeros_like(whole)
    for rank, half in enumerate(halves):
        for path, parameter in block.named_parameters():
            split = plan.cut(block, path, parameter).split
            values = parameter.detach() if split is None else parameter.detach().chunk(2, dim=split)[rank]
            half.get_parameter(path).data = values.clone()
            half.get_parameter(path).grad = None
        total = total + half(x)
    assert torch.allclose(total, whole, atol=1e-5)
    (total * x).sum().backward()
    for path, parameter in block.named_parameters():
        own = [half.get_parameter(path).grad for half in halves]
        split = plan.cut(block, path, parameter).split
        if split is not None:
            found = torch.cat(own, dim=split)
        elif styles.get(path) == SUMMED:
            found = own[0] + own[1]
            assert not torch.allclose(own[0], own[1])
        else:  # in front of the cut or behind it, where the ends of a region do the rest
            found = own[0] + own[1]
        assert torch.allclose(found, parameter.grad, atol=1e-5), path


@pytest.mark.parametrize("kind", ["a list", "a gate", "a gate per head", "a mean beside"])
def test_a_region_is_left_whole_where_a_rank_would_use_other_parts_or_give_other_gradients(kind: str) -> None:
    assert styles_of(Block(kind)) == styles_of(Region(kind), OWN) == {}


def test_a_linear_cut_by_inputs_that_are_whole_takes_a_part_of_them() -> None:
    """As a plan names it for other kinds of blocks; not where they are cut in front of its child."""
    row = {"layers.*.a.c": "rowwise"}
    assert styles_of(Block("behind"), row) == {"a.c": "rowwise_split_input"}
    assert styles_of(Block("behind"), PLAN)["a.c"] == "rowwise"

    class InFront(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.b, self.a = nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.Tanh(), nn.Linear(WIDTH, WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return self.a(self.b(x))

    row = {"layers.*.a.*": "rowwise"}
    assert styles_of(InFront(), row)["a.1"] == "rowwise_split_input"
    assert styles_of(InFront(), row | {"layers.*.b": "colwise"})["a.1"] == "rowwise"


def test_a_block_and_its_child_each_have_a_region() -> None:
    """The child's ends sum the gradient of what it is given, the block has none for its own linears."""
    kind = "its input by the way"
    assert styles_of(Region(kind), OWN) == {}
    expected = {"b": "colwise", "c": "rowwise", "d": SUMMED}
    expected |= {"a.b": "colwise", "a.c": "rowwise", "a.e": "colwise"}
    assert styles_of(Both(kind), PLAN | OWN) == expected


@pytest.mark.parametrize(
    "options",
    [
        {"model_type": "glm4_moe", "num_key_value_heads": 3, "use_qk_norm": True},
        {"model_type": "phi", "num_key_value_heads": 9, "qk_layernorm": True},
    ],
)
def test_a_region_of_an_odd_number_of_heads_is_cut_for_three_ranks(options: dict[str, Any]) -> None:
    sizes = {"vocab_size": 96, "hidden_size": 144, "head_dim": 16, "intermediate_size": 96}
    sizes |= {
        "num_hidden_layers": 1,
        "num_attention_heads": 9,
        "n_routed_experts": 4,
        "moe_intermediate_size": 48,
    }
    model = hub_model(sizes | options)
    assert model.heads == (9, options["num_key_value_heads"])
    assert not [path for path, _ in model.whole if "self_attn" in path]


def test_an_entry_of_the_user_counts() -> None:
    assert "a.d" not in styles_of(Block("one for all heads"), PLAN | {"layers.*.a.d": None})
