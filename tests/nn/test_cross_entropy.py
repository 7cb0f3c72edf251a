"""The vocabulary-parallel loss against torch's cross entropy."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import ranks
from dsx.errors import ModelError
from dsx.nn import loss as loss_module
from dsx.nn.loss import cross_entropy
from dsx.nn.parallel import TensorParallel

VOCAB = 100


def inputs(dtype=torch.float32, columns=VOCAB, seed=0):
    g = torch.Generator().manual_seed(seed)
    logits = (3 * torch.randn(3, 7, columns, generator=g)).to(dtype)
    labels = torch.randint(VOCAB, (3, 7), generator=g)
    labels[0, :4] = -100
    labels[2, 6] = -100
    return logits, labels


def ours(logits, labels, **options):
    return cross_entropy(logits, labels, tp=TensorParallel(), vocab_size=VOCAB, **options)


@pytest.mark.parametrize("elements", [1, 250, 1 << 23])  # one token, two tokens, all tokens at a time
@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_equals_torch(dtype, overwrite, elements, monkeypatch):
    monkeypatch.setattr(loss_module, "_ELEMENTS_AT_ONCE", elements)
    logits, labels = inputs(dtype)
    a, b = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    exact = torch.promote_types(dtype, torch.float32)
    expected = F.cross_entropy(b.to(exact).flatten(0, 1), labels.flatten())
    (3 * expected).backward()
    loss = ours(a, labels, overwrite_logits=overwrite)
    (3 * loss).backward()
    assert loss.dtype == exact
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(a.grad, b.grad)
    if overwrite:
        assert torch.equal(a.detach(), a.grad)
    else:
        assert torch.equal(a.detach(), logits)


def test_gradient_is_the_derivative():
    logits, labels = inputs(torch.float64)
    assert torch.autograd.gradcheck(lambda x: ours(x, labels[:1]), logits[:1].requires_grad_())


def test_nothing_but_ignored_labels_gives_zero():
    logits, labels = inputs()
    logits.requires_grad_()
    loss = ours(logits, torch.full_like(labels, -100))
    loss.backward()
    assert loss.item() == 0.0
    assert not logits.grad.any()


def test_nan_in_an_ignored_token_does_not_spread():
    logits, labels = inputs()
    logits[0, 0] = torch.nan
    assert ours(logits, labels).isfinite()


def test_large_logits_do_not_overflow():
    logits, labels = inputs()
    expected = F.cross_entropy((logits * 1e4).flatten(0, 1), labels.flatten())
    torch.testing.assert_close(ours(logits * 1e4, labels), expected)


def test_a_second_backward_through_overwritten_logits_raises():
    logits, labels = inputs()
    logits = logits.requires_grad_() * 1
    loss = ours(logits, labels, overwrite_logits=True)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("label", [-1, VOCAB, VOCAB + 5])
def test_labels_outside_the_vocabulary_are_refused(label):
    logits, labels = inputs(columns=128)
    labels[1, 1] = label
    with pytest.raises(ModelError, match=f"label = {label}: the vocabulary has 100 tokens"):
        ours(logits, labels)


def test_no_float32_copy_of_the_logits(monkeypatch):
    """bfloat16 logits: nothing of their size is made in float32, and what is saved is them and vectors."""
    monkeypatch.setattr(loss_module, "_ELEMENTS_AT_ONCE", 2 * VOCAB)
    logits, labels = inputs(torch.bfloat16)
    logits.requires_grad_()
    wide, saved = 0, []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal wide
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.dtype == torch.float32:
                wide = max(wide, out.numel())
            return out

    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t), Watch():
        ours(logits, labels).backward()
    assert wide == 2 * VOCAB
    assert sum(t.numel() for t in saved if t.shape != logits.shape) == 4 * labels.numel()
    assert [t.dtype for t in saved if t.shape == logits.shape] == [torch.bfloat16]


def on_rank(rank, world_size, padded):
    """This rank's loss and gradient; the last columns of the last ranks are padding."""
    logits, labels = inputs()
    logits = F.pad(logits, (0, padded * world_size - VOCAB), value=-torch.inf)
    mine = logits.chunk(world_size, -1)[rank].contiguous().requires_grad_()
    tp = TensorParallel(world_size, rank, dist.group.WORLD)
    loss = cross_entropy(mine, labels, tp=tp, vocab_size=VOCAB)
    loss.backward()
    return loss.detach(), mine.grad


@pytest.mark.parametrize(("size", "padded"), [(2, 64), (4, 25), (3, 64)])
def test_ranks_equal_one(size, padded):
    """With (3, 64) the third rank's columns are padding alone."""
    logits, labels = inputs()
    logits.requires_grad_()
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    expected.backward()
    results = ranks.run(on_rank, size, padded)
    for loss, _ in results:
        torch.testing.assert_close(loss, expected)
        assert torch.equal(loss, results[0][0])
    grad = torch.cat([g for _, g in results], -1)
    torch.testing.assert_close(grad[..., :VOCAB], logits.grad)
    assert not grad[..., VOCAB:].any()
