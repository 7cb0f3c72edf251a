"""The backward in two parts gives what the undivided one gives, to the last bit: the same matmuls run."""

import pytest
import tiny_models
import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef

import ranks
from dsx.errors import ScheduleError
from dsx.models.spec import ModelSpec
from dsx.nn import ColumnParallelLinear, WeightGradients, collectives
from dsx.nn.parallel import TensorParallel

MICRO_BATCHES = 3


def batches(name):
    ids, labels = tiny_models.batch(name, MICRO_BATCHES)
    return [(ids[i : i + 1], labels[i : i + 1]) for i in range(MICRO_BATCHES)]


def undivided(name, tp=tiny_models.SINGLE, split=None, **options):
    """Gradients of some micro-batches by ordinary backwards."""
    model = tiny_models.Model(name, tp, seed=3, split=split, **options)
    torch.manual_seed(0)
    for ids, labels in batches(name):
        model.loss_fn(model(ids), labels).backward()
    return {p.dsx_spec.name: p.grad for p in model.parameters()}


def divided(name, tp=tiny_models.SINGLE, **options):
    """The same in two parts, those of different micro-batches interleaved: I0 I1 W0 I2 W1 W2."""
    split = WeightGradients()
    model = tiny_models.Model(name, tp, seed=3, split=split, **options)
    torch.manual_seed(0)
    for number, (ids, labels) in enumerate(batches(name)):
        loss = model.loss_fn(model(ids), labels)
        before = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        with split.deferring((0, number)):
            loss.backward()
        for p, old in zip(model.parameters(), before, strict=True):
            if p.dsx_spec.linear or isinstance(model.spec, ModelSpec):  # transformers' norms do not wait
                assert (p.grad is None) if old is None else torch.equal(p.grad, old)
        if number:
            deliver(split, (0, number - 1))
    deliver(split, (0, number))
    assert split.kept_bytes() == 0
    return {p.dsx_spec.name: p.grad for p in model.parameters()}


def deliver(split, key):
    assert split.has(key)
    with split.delivering(key) as loss:
        loss.backward()
    assert not split.has(key)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("name", ["llama-dropout", "llama", "llama-tied"])
def test_gradients_equal_the_undivided_backward(name, recompute):
    expected, gradients = undivided(name, recompute=recompute), divided(name, recompute=recompute)
    assert expected.keys() == gradients.keys()
    for key, gradient in gradients.items():
        assert gradient.abs().max() > 0
        assert torch.equal(gradient, expected[key]), key


def test_undivided_backward_of_a_divisible_model():
    """Without deferring, a model that could be split computes what it always did."""
    expected, gradients = undivided("gpt2"), undivided("gpt2", split=WeightGradients())
    for key, gradient in gradients.items():
        assert torch.equal(gradient, expected[key]), key


def test_bfloat16():
    options = {"dtype": torch.bfloat16}
    expected, gradients = undivided("llama-tied", **options), divided("llama-tied", **options)
    for key, gradient in gradients.items():
        assert torch.equal(gradient, expected[key]), key


def test_input_gradient_comes_with_the_first_part():
    def stage(split):
        block = tiny_models.Model("llama", seed=3, split=split).calls[1]
        torch.manual_seed(5)
        x = torch.randn(2, 8, 60, requires_grad=True)
        return x, block(x).square().sum()

    x, loss = stage(None)
    loss.backward()
    split = WeightGradients()
    x_split, loss = stage(split)
    with split.deferring((0, 0)):
        loss.backward()
    assert torch.equal(x_split.grad, x.grad)


def test_what_is_kept_is_released_one_by_one():
    """Kept: x and dy of each linear. A parameter gets its gradient when what it kept is gone."""
    split, one = WeightGradients(), TensorParallel()
    linears = [ColumnParallelLinear(32, 32, one, bias=False, split=split) for _ in range(3)]
    for linear in linears:
        torch.nn.init.normal_(linear.weight)
    x = torch.randn(4, 32, requires_grad=True)
    y = linears[2](linears[1](linears[0](x).tanh()).tanh())
    with split.deferring((0, 0)):
        y.sum().backward()
    del y
    # Three x (one of them ours) and three dy; the last dy is an expanded scalar.
    assert split.kept_bytes() == 5 * x.numel() * x.element_size() + x.element_size()
    kept = [
        [StorageWeakRef(t.untyped_storage()) for t in use.tensors]
        for entry in split._kept[0, 0].values()
        for use in entry.uses
    ]
    alive = []

    def look(_):
        alive.append([sum(not ref.expired() for ref in refs) for refs in kept])

    for linear in linears:
        linear.weight.register_post_accumulate_grad_hook(look)
    with split.delivering((0, 0)) as loss:
        loss.backward()
    # The last one's x is the model's input, which we hold.
    assert alive == [[0, 2, 2], [0, 0, 2], [0, 0, 1]]


def test_layers_of_others_keep_nothing():
    split, layer = WeightGradients(), torch.nn.Linear(4, 4)
    loss = layer(torch.ones(1, 4)).sum()
    with split.deferring((0, 0)):
        loss.backward()
    assert layer.weight.grad is not None
    with split.delivering((0, 0)) as nothing:
        assert nothing is None


def test_frozen_weights_keep_nothing():
    split = WeightGradients()
    model = tiny_models.Model("llama", seed=3, split=split)
    model.calls[1].requires_grad_(False)
    ids, labels = tiny_models.batch("llama")
    loss = model.loss_fn(model(ids), labels)
    with split.deferring((0, 0)):
        loss.backward()
    deliver(split, (0, 0))
    for p in model.parameters():
        assert (p.grad is None) == (not p.requires_grad)


def test_wrong_orders_are_refused():
    split = WeightGradients()
    model = tiny_models.Model("llama", seed=3, split=split)
    ids, labels = tiny_models.batch("llama")
    loss = model.loss_fn(model(ids), labels)
    with split.deferring((4, 7)):
        loss.backward()
        with pytest.raises(ScheduleError, match="another one is running"), split.deferring((4, 8)):
            pass
    with (
        pytest.raises(ScheduleError, match=r"stage 4, micro-batch 7.*still waiting"),
        split.deferring((4, 7)),
    ):
        pass


def both_ways(rank, world_size, name, sequence_parallel, recompute):
    """Names of unequal gradients, and communications of the weights' part."""
    tp = TensorParallel(world_size, rank, dist.group.WORLD, sequence_parallel)
    expected = undivided(name, tp, recompute=recompute)
    gradients = divided(name, tp, recompute=recompute)
    split = WeightGradients()
    model = tiny_models.Model(name, tp, seed=3, split=split, recompute=recompute)
    ids, labels = tiny_models.batch(name)
    loss = model.loss_fn(model(ids), labels)
    with split.deferring((0, 0)):
        loss.backward()
    calls = []

    class Recorder:
        def __getattr__(self, function):
            found = getattr(dist, function)  # a name that only a newer torch has is asked for, and not called
            if function.startswith(("all_", "reduce_")):
                calls.append(function)
            return found

    collectives.dist = Recorder()
    deliver(split, (0, 0))
    return [key for key in expected if not torch.equal(gradients[key], expected[key])], len(calls)


CASES = [
    ("llama", False, "none", 0),
    # x of Q, K, V and of up, dy of the two row-parallel linears in two blocks, and x of the head.
    ("llama", True, "selective", 4 * 2 + 1),
    ("qwen2", True, "full", 4 * 2 + 1),
    ("llama-tied", True, "none", 4 * 2 + 1),
]


@pytest.mark.parametrize(("name", "sequence_parallel", "recompute", "communications"), CASES)
def test_tensor_parallel(name, sequence_parallel, recompute, communications):
    results = ranks.run(both_ways, 2, name, sequence_parallel, recompute)
    assert results == [([], communications)] * 2


def test_without_autograd_the_same_gradients_and_hooks_are_honoured():
    """accumulate() takes over, then adds; a hooked parameter waits for the backward that runs hooks."""
    torch.manual_seed(0)
    split = WeightGradients()
    linear = ColumnParallelLinear(4, 3, tiny_models.SINGLE, split=split)
    inputs = [torch.randn(2, 5, 4) for _ in range(2)]

    def gradients(finish):
        with torch.no_grad():
            for i, p in enumerate(linear.parameters()):
                p.copy_(torch.arange(p.numel(), dtype=torch.float32).view(p.shape) / (i + 7))
        linear.zero_grad()
        for number, x in enumerate(inputs):
            with split.deferring((0, number)):
                linear(x).square().sum().backward()
            finish((0, number))
        assert split.kept_bytes() == 0
        return [p.grad.clone() for p in linear.parameters()]

    def deliver(key):
        with split.delivering(key) as loss:
            loss.backward()

    expected = gradients(deliver)
    for got, want in zip(gradients(split.accumulate), expected, strict=True):
        torch.testing.assert_close(got, want)
    seen = []
    linear.weight.register_post_accumulate_grad_hook(seen.append)

    def either(key):
        split.accumulate(key)
        assert split.has(key), "a hook would have been passed over"
        deliver(key)

    for got, want in zip(gradients(either), expected, strict=True):
        assert torch.equal(got, want)
    assert len(seen) >= 2  # torch 2.13 calls them in the input part as well, where there is no gradient
