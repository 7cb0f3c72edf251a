"""Dropout: rate, scale, masks per rank, and generators left alone."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from dsx.nn.dropout import Dropout, seeded
from dsx.nn.parallel import TensorParallel


def masks(sharded, seed=0, size=4):
    """Each rank's output for ones, from equal generators."""
    out = []
    for rank in range(size):
        torch.manual_seed(seed)
        out.append(Dropout(0.25, TensorParallel(size, rank), sharded=sharded)(torch.ones(64, 64)))
    return out


def test_replicated_activations_get_one_mask():
    first, *others = masks(sharded=False)
    assert all(torch.equal(first, other) for other in others)


def test_sharded_activations_get_independent_masks():
    kept = torch.stack(masks(sharded=True)).ne(0).flatten(1).double()
    assert (torch.corrcoef(kept) - torch.eye(4)).abs().max() < 0.06  # 3.8 sigma of 4096


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rate_and_scale(dtype):
    torch.manual_seed(0)
    out = Dropout(0.25, TensorParallel(), sharded=False)(torch.ones(100, 1000, dtype=dtype))
    values = out.unique().float().tolist()
    assert values == pytest.approx([0, 1 / 0.75], rel=4e-3)
    assert abs((out == 0).double().mean() - 0.25) < 3 * (0.25 * 0.75 / out.numel()) ** 0.5


def test_gradient_has_the_mask_of_the_forward():
    x = torch.randn(50, 20, requires_grad=True)
    y = Dropout(0.5, TensorParallel(), sharded=False)(x)
    dy = torch.randn(20, 50).t()  # another memory layout must not turn the mask
    y.backward(dy)
    torch.testing.assert_close(x.grad, (y / x).detach() * dy)


def test_each_call_has_its_own_mask():
    dropout = Dropout(0.5, TensorParallel(), sharded=False)
    x = torch.ones(40, 40)
    assert not torch.equal(dropout(x), dropout(x))


def test_nothing_is_saved_for_backward():
    saved = []
    x = torch.randn(8, 8, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda t: t):
        Dropout(0.5, TensorParallel(), sharded=False)(x)
    assert not saved


def test_evaluation_and_zero_are_the_identity():
    x = torch.randn(4, 4)
    assert Dropout(0.5, TensorParallel(), sharded=False).eval()(x) is x
    assert Dropout(0.0, TensorParallel(), sharded=False)(x) is x


def test_recompute_repeats_the_mask_and_advances_once():
    dropout = Dropout(0.5, TensorParallel(), sharded=False)
    x = torch.randn(30, 30, requires_grad=True)
    torch.manual_seed(1)
    y = checkpoint(lambda t: dropout(t).exp(), x, use_reentrant=False)
    state = torch.get_rng_state()
    y.sum().backward()
    assert torch.equal(state, torch.get_rng_state())
    torch.manual_seed(1)
    z = x.detach().clone().requires_grad_()
    dropout(z).exp().sum().backward()
    assert torch.equal(x.grad, z.grad)


def test_seeded_restores_the_generator_after_an_error():
    torch.manual_seed(3)
    state = torch.get_rng_state()
    drawn = []

    def fail():
        with seeded(torch.device("cpu"), 9):
            drawn.append(torch.rand(3))
            raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"):
        fail()
    assert torch.equal(state, torch.get_rng_state())
    with seeded(torch.device("cpu"), 9):
        assert torch.equal(drawn[0], torch.rand(3))
