"""The axis that shares experts out is laid over replicas: who holds what, beside counting by hand."""

from __future__ import annotations

from itertools import product
from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsx.checkpoint.formats.slices import merge, part_of
from dsx.checkpoint.pieces import local_parts
from dsx.errors import LayoutError
from dsx.models.param import Init, ParamSpec
from dsx.nn.parameters import fill
from dsx.parallel.mesh import Mesh
from dsx.parallel.zero import ZeroPlan

DEGREES = st.tuples(*[st.integers(1, 3)] * 4).flatmap(
    lambda four: st.tuples(
        st.just(four), st.sampled_from([n for n in range(1, 10) if (four[1] * four[2]) % n == 0])
    )
)


@settings(deadline=None, max_examples=60)
@given(DEGREES)
def test_neighbours_on_data_x_context_hold_experts_together(drawn) -> None:
    (pp, dp, cp, tp), ep = drawn
    mesh, plain = Mesh.of(pp=pp, dp=dp, cp=cp, tp=tp, ep=ep), Mesh.of(pp=pp, dp=dp, cp=cp, tp=tp)
    assert mesh.size == plain.size
    for rank in range(mesh.size):
        assert mesh.coords(rank) == plain.coords(rank)
        assert mesh.random_stream(rank) == plain.random_stream(rank)
        replicas = plain.group_of(rank, "dp", "cp")
        together, same = mesh.together(rank), mesh.same(rank, experts=True)
        assert len(together) == ep
        assert [mesh.at(each).along("ep")[1] for each in together] == list(range(ep))
        assert {*together} & {*same} == {rank}
        assert sorted(each for other in same for each in mesh.together(other)) == [*replicas]
        assert {mesh.at(each).along("ep") for each in same} == {mesh.at(rank).along("ep")}
        assert same[mesh.replica_of(rank, experts=True)] == rank


def test_a_degree_that_does_not_divide_the_replicas_is_refused() -> None:
    with pytest.raises(LayoutError, match="4 ranks of data x context do not divide by it"):
        Mesh.of(dp=2, cp=2, ep=3)


SPECS = {
    "a stack": ParamSpec(
        name="1.w", layer=1, shape=(4, 6, 5), init=Init(kind="normal", std=1.0), hf=("w",), experts=0
    ),
    "and features, gate and up": ParamSpec(
        name="1.w", layer=1, shape=(4, 8, 5), init=Init(kind="uniform", std=1.0), hf=("w",),
        experts=0, split=1, parts=(4, 4),
    ),
    "and the last dim": ParamSpec(
        name="1.w", layer=1, shape=(4, 3, 6), init=Init(kind="normal", std=1.0), hf=("w",), experts=0, split=2
    ),
    "B of LoRA": ParamSpec(
        name="1.w", layer=1, shape=(6, 12), init=Init(kind="normal", std=1.0), hf=("w",),
        experts=1, expert_blocks=3, split=0,
    ),
}  # fmt: skip


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("ep", [1, 2, 4])
def test_parts_are_of_one_tensor(spec: ParamSpec, ep: int) -> None:
    """Drawn, cut, merged and stored: every element is where it is counted by hand to be, and there once."""
    mesh = Mesh.of(tp=2, dp=ep, ep=ep)
    whole = torch.empty(spec.shape)
    fill(whole, spec, Mesh.of().at(), seed=3)
    places = [mesh.at(rank) for rank in range(mesh.size)]
    shards = [part_of(spec, whole, at) for at in places]
    assert torch.equal(merge(spec, shards, places), whole)
    if spec.experts == 1:  # [outputs, rank, experts], outputs cut over tp
        by_hand = whole.view(6, 3, 4)[:3, :, : 4 // ep].reshape(3, -1)
        assert torch.equal(shards[0], by_hand)
    seen = torch.zeros(spec.shape)
    for at, shard in zip(places, shards, strict=True):
        drawn = torch.empty(spec.local_shape(at))
        fill(drawn, spec, at, seed=3)
        assert torch.equal(drawn, shard)
        half = shard.numel() // 2
        for start, stop in ((0, half), (half, shard.numel())):
            for part in local_parts(spec, at, start, stop):
                own = shard.flatten().as_strided(part.shape, part.strides, part.flat)
                where = tuple(slice(*span) for span in part.box)
                assert torch.equal(own, whole[where])
                seen[where] += 1
    assert seen.unique().tolist() == [1 if spec.split is not None else 2]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_cuts_experts_over_their_replicas(stage: int) -> None:
    groups = ((("a", 10), ("b", 7)), (("w", 9), ("v", 6)))
    plan = ZeroPlan(stage=stage, dp=6, groups=groups, experts_over=2, experts=frozenset([1]))
    dense = ZeroPlan(stage=stage, dp=6, groups=groups[:1])
    experts = ZeroPlan(stage=stage, dp=3, groups=groups[1:])
    for rank in range(6):
        assert plan.state(rank) == dense.state(rank) | experts.state(rank // 2)
    assert plan.owners() == dense.owners() | experts.owners()


def test_copies_count_replicas_of_experts() -> None:
    mesh = Mesh.of(dp=4, tp=2, ep=2)
    for experts, cut, divided in product((False, True), repeat=3):
        found = [mesh.copies(rank, cut=cut, divided=divided, experts=experts) for rank in range(mesh.size)]
        count = prod((1 if divided else 4 // (1 + experts), 1 if cut else 2))
        assert {of for _, of in found} == {count}
        assert sorted({index for index, _ in found}) == list(range(count))
