"""The linears and collectives on their own, against torch.nn.Linear and torch.distributed."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import ranks
from dsx.checkpoint.formats.slices import part_of
from dsx.errors import LayoutError, ModelError
from dsx.models.param import Init, ParamSpec
from dsx.nn import collectives
from dsx.nn.linear import ColumnParallelLinear, RowParallelLinear
from dsx.nn.norm import LayerNorm, RMSNorm
from dsx.nn.parallel import TensorParallel
from dsx.nn.parameters import initialise

ONE = TensorParallel()


def spec(name, *shape, **cut_as):
    return ParamSpec(name=name, layer=0, shape=shape, init=Init(kind="normal", std=1.0), hf=(name,), **cut_as)


def column_specs(parts, bias):
    shape = {"weight": (sum(parts), 6), "bias": (sum(parts),)}
    names = ("weight", "bias") if bias else ("weight",)
    return {name: spec(name, *shape[name], split=0, parts=parts) for name in names}


def row_specs():
    return {"weight": spec("weight", 6, 12, split=1), "bias": spec("bias", 6)}


def filled(module, specs, tp):
    initialise(module, specs, tp)
    return module


def whole(specs):
    """An uncut torch.nn.Linear with the same values."""
    linear = nn.Linear(*specs["weight"].shape[::-1], bias="bias" in specs)
    initialise(linear, specs, ONE)
    return linear


def inputs(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(4))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(5, 6), (2, 3, 6)])
def test_one_rank_equals_torch(shape, bias):
    specs = column_specs((12,), bias)
    ours, theirs = filled(ColumnParallelLinear(6, 12, ONE, bias=bias), specs, ONE), whole(specs)
    x = inputs(*shape).requires_grad_()
    z = x.detach().clone().requires_grad_()
    (ours(x) ** 2).sum().backward()
    (theirs(z) ** 2).sum().backward()
    torch.testing.assert_close(x.grad, z.grad)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.parametrize("frozen", ["weight", "bias", "input"])
def test_what_needs_no_gradient_gets_none_and_saves_nothing_for_it(frozen):
    linear = filled(ColumnParallelLinear(6, 12, ONE), column_specs((12,), True), ONE)
    x = inputs(5, 6).requires_grad_(frozen != "input")
    if frozen != "input":
        getattr(linear, frozen).requires_grad_(False)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t):
        y = linear(x)
    y.sum().backward()
    grads = {"weight": linear.weight.grad, "bias": linear.bias.grad, "input": x.grad}
    assert [name for name, grad in grads.items() if grad is None] == [frozen]
    kept = {"weight": [linear.weight], "bias": [x, linear.weight], "input": [x]}[frozen]
    assert [t.data_ptr() for t in saved] == [t.data_ptr() for t in kept]


def test_the_parameter_itself_is_saved():
    """A view of it would pin the weight that DeepSpeed's ZeRO-3 gathered (it empties the Parameter)."""
    linear = filled(RowParallelLinear(12, 6, ONE), row_specs(), ONE)
    linear.weight.ds_id = 0  # as ZeRO-3 tags it
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t):
        linear(inputs(5, 12).requires_grad_())
    weights = [t for t in saved if t.data_ptr() == linear.weight.data_ptr()]
    assert len(weights) == 1
    assert weights[0] is linear.weight or weights[0]._base is None


def test_a_weight_used_twice_and_checkpointed():
    specs = {"weight": spec("weight", 6, 6, split=0)}
    ours, theirs = filled(ColumnParallelLinear(6, 6, ONE, bias=False), specs, ONE), whole(specs)
    x = inputs(5, 6)
    checkpoint(lambda t: ours(ours(t).tanh()), x, use_reentrant=False).sum().backward()
    theirs(theirs(x).tanh()).sum().backward()
    torch.testing.assert_close(ours.weight.grad, theirs.weight.grad)


def cut_here(rank, world_size, sequence_parallel, parts, bias):
    """Column, its gathered form and row on one rank; gradients of everything."""
    tp = TensorParallel(world_size, rank, dist.group.WORLD, sequence_parallel)
    specs, rows = column_specs(parts, bias), row_specs()
    column = filled(ColumnParallelLinear(6, sum(parts), tp, bias=bias, parts=parts), specs, tp)
    gathered = ColumnParallelLinear(6, sum(parts), tp, bias=bias, parts=parts, gather_output=True)
    filled(gathered, specs, tp)
    row = filled(RowParallelLinear(12, 6, tp), rows, tp)
    results = {}

    x = inputs(2, 4, 6)
    x = (x.chunk(world_size, 1)[rank] if sequence_parallel else x).contiguous().requires_grad_()
    y = column(x)
    (y * weighting(2, 4, sum(parts), specs, tp)).sum().backward()
    results["column"] = (y.detach(), x.grad, column.weight.grad)
    results["gathered"] = (gathered(x).detach(),)

    x = inputs(2, 4, 12).chunk(world_size, 2)[rank].contiguous().requires_grad_()
    y = row(x)
    scale = inputs(2, 4, 6)
    (y * (scale.chunk(world_size, 1)[rank] if sequence_parallel else scale)).sum().backward()
    results["row"] = (y.detach(), x.grad, row.weight.grad, row.bias.grad)
    return results


def weighting(b, s, columns, specs, tp):
    """Factors for the cut outputs: this rank's part of those for the whole."""
    factors = inputs(b, s, columns)
    like = spec("y", columns, b * s, split=0, parts=specs["weight"].parts)
    flat = factors.flatten(0, 1).t()
    return part_of(like, flat, tp.at).t().unflatten(0, (b, s))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("parts", [(12,), (8, 2, 2)])
def test_two_ranks_equal_torch(sequence_parallel, parts, bias):
    results = ranks.run(cut_here, 2, sequence_parallel, parts, bias)
    specs, rows = column_specs(parts, bias), row_specs()

    column = whole(specs)
    x = inputs(2, 4, 6).requires_grad_()
    y = column(x)
    (y * inputs(2, 4, 12)).sum().backward()
    halves = [torch.cat([p.chunk(2, -1)[r] for p in y.split(parts, -1)], -1) for r in range(2)]
    weights = [torch.cat([p.chunk(2, 0)[r] for p in column.weight.grad.split(parts)]) for r in range(2)]
    for rank, result in enumerate(results):
        dx = x.grad.chunk(2, 1)[rank] if sequence_parallel else x.grad
        for a, b in zip(result["column"], (halves[rank], dx, weights[rank]), strict=True):
            torch.testing.assert_close(a, b)
        torch.testing.assert_close(result["gathered"][0], y)

    row = whole(rows)
    x = inputs(2, 4, 12).requires_grad_()
    y = row(x)
    (y * inputs(2, 4, 6)).sum().backward()
    for rank, result in enumerate(results):
        mine = y.chunk(2, 1)[rank] if sequence_parallel else y
        expected = (mine, x.grad.chunk(2, 2)[rank], row.weight.grad.chunk(2, 1)[rank], row.bias.grad)
        for a, b in zip(result["row"], expected, strict=True):
            torch.testing.assert_close(a, b)


def pairs(rank, world_size):
    """Each collective's forward and its gradient for a rank-dependent weighting."""
    tp = TensorParallel(world_size, rank, dist.group.WORLD, sequence_parallel=True)
    plain = TensorParallel(world_size, rank, dist.group.WORLD)
    out = {}
    for name, fn, shape in [
        ("copy_to", lambda x: collectives.copy_to(x, plain), (2, 4, 6)),
        ("reduce_from", lambda x: collectives.reduce_from(x * 1, plain), (2, 4, 6)),
        ("gather_from", lambda x: collectives.gather_from(x, plain), (2, 4, 6)),
        ("scatter_to", lambda x: collectives.scatter_to(x, plain), (2, 4, 6)),
        ("gather_sequence", lambda x: collectives.gather_sequence(x, tp), (2, 4, 6)),
        ("scatter_sequence", lambda x: collectives.reduce_from(x, tp), (2, 4, 6)),
        ("copy_parameters", lambda x: collectives.copy_parameters(tp, x)[0], (6,)),
    ]:
        x = (inputs(*shape) + rank).requires_grad_()
        y = fn(x)
        y.backward(torch.ones_like(y) * (rank + 1))
        out[name] = (y.detach(), x.grad)
    return out


def test_collectives_and_their_conjugates():
    (a, b) = ranks.run(pairs, 2)
    x, v = inputs(2, 4, 6), inputs(6)
    both = [x, x + 1]
    for rank, got in enumerate((a, b)):
        mine, ones = both[rank], torch.ones_like(x)
        summed = both[0] + both[1]
        expected = {
            "copy_to": (mine, 3 * ones),
            "reduce_from": (summed, (rank + 1) * ones),
            "gather_from": (torch.cat(both, -1), (rank + 1) * ones),
            "scatter_to": (mine[..., 3 * rank :][..., :3], torch.cat((ones, 2 * ones), -1)[..., ::2]),
            "gather_sequence": (torch.cat(both, 1), 3 * ones),
            "scatter_sequence": (summed.chunk(2, 1)[rank], torch.cat((ones, 2 * ones), 1)[:, ::2]),
            "copy_parameters": (v + rank, 3 * torch.ones(6)),
        }
        assert got.keys() == expected.keys()
        for name, (y, grad) in expected.items():
            torch.testing.assert_close(got[name][0], y)
            torch.testing.assert_close(got[name][1], grad)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_backward_communicates_while_it_multiplies(sequence_parallel, monkeypatch):
    """Order of events on one of two (pretended) ranks: each wait comes as late as it can."""
    events = []

    class Work:
        def __init__(self, name):
            self.name = name
            events.append(f"start {name}")

        def wait(self):
            events.append(f"wait {self.name}")

    class Fake:
        ReduceOp = dist.ReduceOp

        def __getattr__(self, name):
            return lambda *_, **__: Work(name.removesuffix("_single"))

    class Matmuls(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten.mm.default:
                events.append("matmul")
            return func(*args, **(kwargs or {}))

    monkeypatch.setattr(collectives, "dist", Fake())
    tp = TensorParallel(2, 0, sequence_parallel=sequence_parallel)
    y = ColumnParallelLinear(6, 12, tp, bias=False)(torch.zeros(1, 4, 6, requires_grad=True))
    events.clear()
    with Matmuls():
        y.backward(torch.zeros_like(y))
    reduction = "reduce_scatter" if sequence_parallel else "all_reduce"
    expected = ["matmul", f"start {reduction}", "matmul", f"wait {reduction}"]
    if sequence_parallel:
        expected = ["start all_gather", *expected[:2], "wait all_gather", *expected[2:]]
    assert events == expected


def test_double_backward_is_refused():
    linear = filled(ColumnParallelLinear(6, 12, ONE), column_specs((12,), True), ONE)
    linear.weight.ds_id = 0  # ZeRO-3's: torch's own linear, for other weights, can do it
    x = inputs(5, 6).requires_grad_()
    (dx,) = torch.autograd.grad((linear(x) ** 2).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
def test_bfloat16_norms_take_statistics_in_float32(kind):
    """Values around 300 with a spread of 1: bfloat16 statistics would be off by several percent."""
    x = (300 + 4 * inputs(20, 64)).bfloat16()
    ours = (LayerNorm if kind == "layernorm" else RMSNorm)(64, ONE, epsilon=1e-5, dtype=torch.bfloat16)
    theirs = nn.LayerNorm(64, eps=1e-5) if kind == "layernorm" else nn.RMSNorm(64, eps=1e-5)
    ours.load_state_dict(theirs.state_dict())
    torch.testing.assert_close(ours(x).float(), theirs(x.float()), atol=0, rtol=2.0**-8)


def test_wrong_sizes_are_refused():
    with pytest.raises(ModelError, match="12 outputs: they do not divide by the tensor-parallel size 5"):
        ColumnParallelLinear(6, 12, TensorParallel(5))
    with pytest.raises(ModelError, match="they sum to 10, not 12"):
        ColumnParallelLinear(6, 12, ONE, parts=(8, 2))
    with pytest.raises(ModelError, match="a linear with 6 inputs"):
        RowParallelLinear(6, 12, TensorParallel(4))
    with pytest.raises(LayoutError, match="tensor-parallel rank 4: there are 4 ranks"):
        TensorParallel(4, 4)


def test_parameters_and_specs_must_agree():
    specs = column_specs((12,), True)
    with pytest.raises(ModelError, match=r"\['bias'\] too many"):
        initialise(ColumnParallelLinear(6, 12, ONE), {"weight": specs["weight"]}, ONE)
    with pytest.raises(ModelError, match=r"lacks \['bias'\]"):
        initialise(ColumnParallelLinear(6, 12, ONE, bias=False), specs, ONE)
    with pytest.raises(ModelError, match=r"the module holds \(12, 6\), the spec says \(6, 6\)"):
        initialise(ColumnParallelLinear(6, 12, ONE), specs, TensorParallel(2))
