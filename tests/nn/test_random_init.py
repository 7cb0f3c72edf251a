"""The layout-independent initial weights: published vectors, cuts that agree, and the distribution."""

from dataclasses import replace

import pytest
import torch

from dsx.checkpoint.formats.huggingface import weights as hf
from dsx.checkpoint.formats.slices import merge
from dsx.models.hf_config import model_spec
from dsx.models.param import Init, ParamSpec
from dsx.models.params import param_specs
from dsx.nn.parameters import _BLOCKS_AT_ONCE, fill, philox_4x32
from dsx.parallel.mesh import Mesh

NORMAL = Init(kind="normal", std=0.02)

# Random123 1.14.0, tests/kat_vectors, "philox4x32 10": counter, key, output.
VECTORS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text):
    return [int(word, 16) for word in text.split()]


def spec(**changes):
    base = ParamSpec(name="3.attention.qkv.weight", layer=3, shape=(36, 22), init=NORMAL, hf=("w",))
    return replace(base, **changes)


def local(which, tp=1, rank=0, seed=5, dtype=torch.float32):
    at = Mesh.of(tp=tp).at(rank)
    out = torch.full(which.local_shape(at), torch.nan, dtype=dtype)
    fill(out, which, at, seed=seed)
    return out


@pytest.mark.parametrize(("counter", "key", "expected"), VECTORS)
def test_philox_gives_the_published_words(counter, key, expected):
    out = philox_4x32(tuple(torch.tensor([word]) for word in words(counter)), tuple(words(key)))
    assert [int(word) for word in out] == words(expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tp", [2, 3, 6])
@pytest.mark.parametrize(
    "which",
    [
        spec(split=0),
        spec(split=0, parts=(24, 6, 6)),
        spec(shape=(22, 36), split=1),
        spec(shape=(36, 22), split=0, pad_multiple=4),
        spec(shape=(37,), split=0, pad_multiple=5),
        spec(shape=(6, 3, 5), split=0),
        spec(shape=(3, 24, 5), split=1, parts=(12, 6, 6)),
        spec(shape=(3, 5, 24), split=2, parts=(12, 12)),
        spec(shape=(2, 12, 2, 3), split=1),
        spec(shape=(2, 3, 12, 7), split=2),
        spec(),
    ],
)
def test_every_cut_holds_the_same_values(which, tp, dtype):
    whole = merge(which, [local(which, dtype=dtype)])
    shards = [local(which, tp, rank, dtype=dtype) for rank in range(tp)]
    assert torch.equal(merge(which, shards), whole)
    padding = sum(shard.numel() for shard in shards) - whole.numel()
    if which.split is not None:
        assert sum(int((shard == 0).sum()) for shard in shards) == padding


def test_rows_of_three_dims_are_those_of_a_matrix():
    """An element's value does not depend on which dim is cut, and none is given twice."""
    flat = local(spec(shape=(15, 7)))
    for split in (None, 0, 1, 2):
        assert torch.equal(local(spec(shape=(3, 5, 7), split=split)), flat.view(3, 5, 7))
    assert flat.unique().numel() == flat.numel()
    assert local(spec(shape=())).shape == ()


def test_values_do_not_depend_on_the_chunks(monkeypatch):
    big = spec(shape=(70, 1030), split=1)
    whole = local(big)
    monkeypatch.setitem(_BLOCKS_AT_ONCE, "cpu", 100)
    assert torch.equal(local(big), whole)
    assert torch.equal(local(big, 2, 1), whole[:, 515:])


def test_seed_and_name_choose_the_values():
    first, again = local(spec()), local(spec())
    assert torch.equal(first, again)
    for other in (local(spec(), seed=6), local(spec(name="4.attention.qkv.weight"))):
        assert not torch.isclose(first, other, atol=1e-6).any()


def test_values_are_independent_normal():
    """Kolmogorov-Smirnov against torch's normal distribution; no correlation between lanes or rows."""
    z = local(spec(shape=(500, 400))).double() / 0.02
    cumulative = torch.distributions.Normal(0.0, 1.0).cdf(z.flatten().sort().values)
    distance = (cumulative - torch.linspace(0, 1, z.numel(), dtype=torch.float64)).abs().max()
    assert distance < 1.36 / z.numel() ** 0.5  # the 5% point
    assert z.abs().max() > 4.3  # 3.4 expected beyond
    lanes = z.view(500, 100, 4).flatten(0, 1)
    correlation = torch.corrcoef(lanes.T) - torch.eye(4)
    assert correlation.abs().max() < 0.015  # 3.3 sigma of 50,000 pairs
    assert torch.corrcoef(torch.stack((z[:-1].flatten(), z[1:].flatten())))[0, 1].abs() < 0.0075


def test_ones_leave_padding_zero():
    out = local(spec(shape=(5, 2), init=Init(kind="ones"), split=0, pad_multiple=4), 2, 1)
    assert out.tolist() == [[1, 1], [0, 0], [0, 0], [0, 0]]


def test_memory_is_bounded():
    """No temporary is larger than the chunk, however large the parameter."""
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.dtype in (torch.int64, torch.float64):
                largest = max(largest, out.numel())
            return out

    with Watch():
        local(spec(shape=(1500, 400)))
    assert largest <= 4 * _BLOCKS_AT_ONCE["cpu"] < 1500 * 400


def test_a_model_starts_alike_where_ranks_share_heads():
    config = {"model_type": "qwen2", "hidden_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = model_spec(config | {"num_hidden_layers": 1, "intermediate_size": 8, "vocab_size": 11})
    fused, parted = param_specs(model), param_specs(model.for_tensor(4))
    weights = [
        {name: part for one in specs for name, part in hf.split(one, merge(one, [local(one)])).items()}
        for specs in (fused, parted)
    ]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[1][name], tensor) for name, tensor in weights[0].items())
    assert {one.name for one in parted} - {one.name for one in fused} == {
        f"1.attention.qkv.{part}_{leaf}" for part in ("q", "kv") for leaf in ("weight", "bias")
    }
