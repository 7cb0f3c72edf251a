"""Head and loss in chunks of tokens beside torch's own, torch's fused one and DeepSpeed's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.sequence.linear_cross_entropy import vocab_parallel_linear_cross_entropy
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import ranks
from dsx.errors import ModelError
from dsx.nn import TensorParallel, cross_entropy, linear_cross_entropy
from dsx.nn.linear import column_linear

VOCABULARY, WIDTH, ROWS, LENGTH = 100, 16, 3, 8
ALONE = TensorParallel()


def inputs(dtype: torch.dtype = torch.float32, columns: int = VOCABULARY) -> tuple[Tensor, Tensor, Tensor]:
    """The second row, and so a whole chunk of five, has no label."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, LENGTH, WIDTH, generator=generator).to(dtype)
    weight = torch.zeros(columns, WIDTH)
    weight[:VOCABULARY] = torch.randn(VOCABULARY, WIDTH, generator=generator)
    labels = torch.randint(VOCABULARY, (ROWS, LENGTH), generator=generator)
    labels[1], labels[0, 0] = -100, -100
    return x.requires_grad_(), weight.to(dtype).requires_grad_(), labels


def ours(x: Tensor, weight: Tensor, labels: Tensor, **options: Any) -> Tensor:
    options = {"tp": ALONE, "vocab_size": VOCABULARY, "chunk_tokens": 5} | options
    return linear_cross_entropy(x, weight, labels, **options)


def gradients(loss: Tensor, *tensors: Tensor) -> list[Tensor]:
    return [loss.detach(), *torch.autograd.grad(3 * loss, tensors)]


def assert_equal(found: list[Tensor], wanted: list[Tensor], dtype: torch.dtype = torch.float32) -> None:
    close = {} if dtype != torch.float32 else {"rtol": 1e-5, "atol": 1e-6}
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other.to(one.dtype), **close)


@pytest.mark.parametrize("chunk", [1, 5, 8, 24, 1000, None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equals_torch(dtype: torch.dtype, chunk: int | None) -> None:
    x, weight, labels = inputs(dtype)
    bias = torch.linspace(-1, 1, VOCABULARY, dtype=dtype, requires_grad=True)
    plain = F.cross_entropy(F.linear(x, weight, bias).flatten(0, 1), labels.flatten())
    found = gradients(ours(x, weight, labels, bias=bias, chunk_tokens=chunk), x, weight, bias)
    assert_equal(found, gradients(plain, x, weight, bias), dtype)


def test_equals_the_fused_losses_of_torch_and_deepspeed() -> None:
    x, weight, labels = inputs()
    found = gradients(ours(x, weight, labels), x, weight)
    theirs = vocab_parallel_linear_cross_entropy(x, weight, labels, chunk_size=5)
    assert_equal(found, gradients(theirs, x, weight))
    options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=5, chunking_method=None)
    theirs = F.linear_cross_entropy(x.flatten(0, 1), weight, labels.flatten(), options=options)
    assert_equal(found, gradients(theirs, x, weight))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_equals_the_logits_own_loss(dtype: torch.dtype) -> None:
    """With padding, a cap, and the divisor of another number of tokens, at a loss scale of fp16's."""
    x, weight, labels = inputs(dtype, columns=128)
    count, scale = torch.tensor(4000.0), 2.0**16

    def capped(x: Tensor, linear: Any) -> Tensor:
        y = 2 * torch.tanh(linear(x) / 2)
        return y.masked_fill(torch.arange(128) >= VOCABULARY, -torch.inf)

    whole = capped(x, lambda x: column_linear(x, weight, None, ALONE, num_valid=VOCABULARY))
    plain = cross_entropy(whole, labels, tp=ALONE, vocab_size=VOCABULARY, num_tokens=count)
    chunked = ours(x, weight, labels, num_valid=VOCABULARY, logits=capped, num_tokens=count)
    found, wanted = gradients(scale * chunked, x, weight), gradients(scale * plain, x, weight)
    limit = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    for one, other in zip(found, wanted, strict=True):
        assert (one - other).abs().max() <= limit * other.abs().max()
    assert not found[2][VOCABULARY:].any()


@pytest.mark.parametrize("frozen", ["x", "weight", "both"])
def test_what_is_frozen_gets_no_gradient(frozen: str) -> None:
    x, weight, labels = inputs()
    wanted = gradients(F.cross_entropy(F.linear(x, weight).flatten(0, 1), labels.flatten()), x, weight)
    x.requires_grad_(frozen == "weight")
    weight.requires_grad_(frozen == "x")
    loss = ours(x, weight, labels)
    assert_equal([loss.detach()], wanted[:1])
    assert loss.requires_grad == (frozen != "both")
    if loss.requires_grad:
        (3 * loss).backward()
        assert_equal([x.grad if frozen == "weight" else weight.grad], [wanted[1 + (frozen == "x")]])
        assert (weight if frozen == "weight" else x).grad is None


def test_nothing_but_ignored_labels_gives_zero() -> None:
    x, weight, labels = inputs()
    loss = ours(x, weight, torch.full_like(labels, -100))
    loss.backward()
    assert loss.item() == 0.0
    assert not x.grad.any()
    assert not weight.grad.any()


def test_a_label_outside_the_vocabulary_is_refused_and_a_second_backward_raises() -> None:
    x, weight, labels = inputs()
    loss = ours(x, weight, labels)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    labels[0, 1] = VOCABULARY
    with pytest.raises(ModelError, match="label = 100: the vocabulary has 100 tokens"):
        ours(x, weight, labels)


class Largest(TorchDispatchMode):
    """The most elements of a tensor with a column for each token of the vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.shape[-1:] == (VOCABULARY,) and out.shape[0] != WIDTH:
            self.elements = max(self.elements, out.numel())
        return out


@pytest.mark.parametrize("training", [True, False])
def test_the_logits_of_a_chunk_alone_exist_and_gradients_are_handed_over(training: bool) -> None:
    x, weight, labels = inputs()
    with Largest() as seen, torch.set_grad_enabled(training):
        loss = ours(x, weight, labels)
    assert seen.elements == 5 * VOCABULARY
    assert loss.requires_grad == training
    if training:
        kept = {each.data_ptr() for each in loss.grad_fn.saved_tensors if each is not None}
        loss.backward()
        assert {x.grad.data_ptr(), weight.grad.data_ptr()} == kept  # no copy was made of them


def on_rank(rank: int, world_size: int, sequence: bool) -> list[Tensor]:
    tp = TensorParallel(world_size, rank, dist.group.WORLD, sequence_parallel=sequence)
    x, weight, labels = inputs(columns=128)
    rows, tokens = 128 // world_size, LENGTH // world_size
    own = weight.detach()[rank * rows : (rank + 1) * rows].clone().requires_grad_()
    share = x[:, rank * tokens : (rank + 1) * tokens] if sequence else x
    given = share.detach().clone().requires_grad_()
    valid = max(0, min(VOCABULARY - rank * rows, rows))
    return gradients(ours(given, own, labels, tp=tp, num_valid=valid if valid < rows else None), given, own)


@pytest.mark.parametrize(("size", "sequence"), [(2, False), (4, True)])
def test_ranks_equal_one(size: int, sequence: bool) -> None:
    """Of four ranks the last one has padding alone."""
    x, weight, labels = inputs(columns=128)
    whole = gradients(ours(x, weight, labels, num_valid=VOCABULARY), x, weight)
    found = ranks.run(on_rank, size, sequence)
    for loss, dx, _ in found:
        assert_equal([loss], whole[:1])
        if not sequence:
            assert_equal([dx], [whole[1]])
    if sequence:
        assert_equal([torch.cat([dx for _, dx, _ in found], dim=1)], [whole[1]])
    assert_equal([torch.cat([dweight for *_, dweight in found])], [whole[2]])
