"""Key/value projections that ranks share: a divided backward gives what torch's undivided one gives."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from dsx.nn.linear import KeyValueLinear
from dsx.nn.parallel import TensorParallel
from dsx.nn.split import WeightGradients


@pytest.mark.parametrize("queries", [0, 6])
def test_gradients_wait_for_their_turn(queries: int) -> None:
    torch.manual_seed(0)
    split = WeightGradients()
    linear = KeyValueLinear(5, 2, 3, TensorParallel(), queries=queries, split=split)
    for parameter in linear.parameters():
        torch.nn.init.normal_(parameter)
    starts = ("q_", "kv_") if queries else ("",)
    names = [f"{start}{leaf}" for leaf in ("weight", "bias") for start in starts]
    assert [name for name, _ in linear.named_parameters()] == names
    x, dy = torch.randn(2, 4, 5), torch.randn(2, 4, queries + (2 if queries else 1) * 6)
    of = {leaf: [name for name in names if name.endswith(leaf)] for leaf in ("weight", "bias")}
    held = {leaf: [linear.get_parameter(name) for name in own] for leaf, own in of.items()}
    whole = {leaf: torch.cat(own).detach().requires_grad_() for leaf, own in held.items()}
    expected = F.linear(x, whole["weight"], whole["bias"])
    expected.backward(dy)
    y = linear(x)
    torch.testing.assert_close(y, expected)
    with split.deferring((0, 0)):
        y.backward(dy)
    assert all(parameter.grad is None for parameter in linear.parameters())
    with split.delivering((0, 0)) as waiting:
        waiting.backward()
    for leaf, own in held.items():
        torch.testing.assert_close(torch.cat([each.grad for each in own]), whole[leaf].grad)
