"""Meshes and process groups against DeepSpeed's topology and grid, and the laws that they obey."""

from __future__ import annotations

import re
from typing import Any

import pytest
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from hypothesis import given, settings
from hypothesis import strategies as st

import ranks
from dsx.errors import LayoutError
from dsx.parallel.mesh import Mesh

SETTINGS = settings(max_examples=60, deadline=None, derandomize=True, database=None)
DEGREES = st.tuples(st.integers(1, 5), st.integers(1, 5), st.integers(1, 5))
THEIR_NAMES = {"pp": "pipe", "dp": "data", "tp": "model"}


@SETTINGS
@given(DEGREES)
def test_mesh_is_deepspeed_s_topology(degrees):
    pp, dp, tp = degrees
    mesh = Mesh.of(pp=pp, dp=dp, tp=tp)
    topology = PipeModelDataParallelTopology(num_pp=pp, num_mp=tp, num_dp=dp)
    assert mesh.size == topology.world_size()
    for rank in range(mesh.size):
        theirs = topology.get_coord(rank)
        assert mesh.coords(rank) == {ours: getattr(theirs, name) for ours, name in THEIR_NAMES.items()}
    for ours, name in THEIR_NAMES.items():
        # DeepSpeed lists no group for an axis of degree 1; ours are then single ranks.
        theirs = sorted(tuple(group) for group in topology.get_axis_comm_lists(name))
        assert sorted(mesh.groups(ours)) == theirs


@SETTINGS
@given(DEGREES)
def test_coords_and_rank_are_inverse(degrees):
    mesh = Mesh.of(pp=degrees[0], dp=degrees[1], tp=degrees[2])
    for rank in range(mesh.size):
        assert mesh.rank(**mesh.coords(rank)) == rank


@SETTINGS
@given(DEGREES, st.sets(st.sampled_from(["pp", "dp", "tp"])))
def test_groups_partition_the_world(degrees, axes):
    mesh = Mesh.of(pp=degrees[0], dp=degrees[1], tp=degrees[2])
    groups = mesh.groups(*axes)
    assert sorted(rank for group in groups for rank in group) == list(range(mesh.size))
    for group in groups:
        assert list(group) == sorted(group)
        fixed = [{k: v for k, v in mesh.coords(rank).items() if k not in axes} for rank in group]
        assert all(coords == fixed[0] for coords in fixed)
        assert all(mesh.group_of(rank, *axes) == group for rank in group)


@pytest.mark.parametrize(
    ("degrees", "fix"),
    [
        ({"pp": 2}, "Mesh.of(pp=2)"),
        ({"tp": 2, "dp": 4}, "Mesh.of(dp=4, tp=2)"),
        ({}, "Mesh.of(pp=1, dp=1, tp=1)"),
    ],
)
def test_degrees_by_name_say_what_to_write(degrees, fix):
    with pytest.raises(LayoutError, match=re.escape(f"Fix: write dsx.{fix}.")):
        Mesh(**degrees)


def test_wrong_meshes_are_refused():
    with pytest.raises(LayoutError, match="axes repeat"):
        Mesh((("tp", 2), ("tp", 2)))
    with pytest.raises(LayoutError, match="tp = 0"):
        Mesh.of(tp=0)
    with pytest.raises(LayoutError, match="the mesh has 4 ranks"):
        Mesh.of(tp=4).coords(4)


def test_an_unknown_axis_is_refused():
    with pytest.raises(
        LayoutError, match=r"mesh axis 'sp': there is no such axis\. Fix: use pp, dp, cp, tp, ep\."
    ):
        Mesh.of(sp=2)


@SETTINGS
@given(DEGREES)
def test_roles_of_ranks_are_deepspeed_s(degrees):
    pp, dp, tp = degrees
    mesh = Mesh.of(pp=pp, dp=dp, tp=tp)
    topology = PipeModelDataParallelTopology(num_pp=pp, num_mp=tp, num_dp=dp)
    models = [topology.filter_match(data=index) for index in range(dp)]
    assert (mesh.num_parts, mesh.num_replicas, mesh.num_shares) == (len(models[0]), dp, dp)
    for rank in range(mesh.size):
        theirs = topology.get_coord(rank)
        assert mesh.part(rank) == models[theirs.data].index(rank)
        assert mesh.replica(rank) == mesh.share(rank) == theirs.data
        assert mesh.is_first(rank, *mesh.model_axes) == (theirs.pipe == theirs.model == 0)


def test_an_axis_that_divides_the_sequence_has_all_that_follows():
    mesh = Mesh.of(pp=2, dp=3, cp=4, tp=5)
    assert mesh.words == "tensor 5 x pipeline 2 x data 3 x context 4"
    assert (mesh.num_parts, mesh.num_replicas, mesh.num_shares) == (10, 12, 3)
    assert (mesh.model_axes, mesh.replica_axes) == (("pp", "tp"), ("dp", "cp"))
    at = {"pp": 1, "dp": 2, "cp": 3, "tp": 4}
    rank = mesh.rank(**at)
    assert (mesh.coords(rank), mesh.part(rank), mesh.replica(rank), mesh.share(rank)) == (at, 9, 11, 2)
    # Everybody but the ranks of one tensor-parallel group computes other activations.
    streams = [mesh.random_stream(rank) for rank in range(mesh.size)]
    assert all(len({streams[rank] for rank in group}) == 1 for group in mesh.groups("tp"))
    assert len(set(streams)) == mesh.size // 5
    # The ranks that ZeRO partitions over hold the same part of the model and are numbered within it.
    for group in mesh.groups(*mesh.replica_axes):
        assert len({mesh.part(rank) for rank in group}) == 1
        assert [mesh.replica(rank) for rank in group] == list(range(12))


@pytest.mark.parametrize(
    ("cut", "divided", "axes"),
    [(False, False, ("dp", "tp")), (True, False, ("dp",)), (False, True, ("tp",)), (True, True, ())],
)
def test_ranks_with_the_same_elements_are_numbered(cut, divided, axes):
    mesh = Mesh.of(pp=2, dp=3, tp=2)
    for group in mesh.groups(*axes):
        found = [mesh.copies(rank, cut=cut, divided=divided) for rank in group]
        assert found == [(number, len(group)) for number in range(len(group))]


NAMES = [
    "get_data_parallel_world_size",
    "get_data_parallel_rank",
    "get_data_parallel_id",
    "get_model_parallel_world_size",
    "get_model_parallel_rank",
    "get_slice_parallel_world_size",
    "get_slice_parallel_rank",
    "get_pipe_parallel_world_size",
    "get_pipe_parallel_rank",
    "get_stage_id",
    "get_global_rank",
]
GROUPS = [
    "get_data_parallel_group",
    "get_model_parallel_group",
    "get_slice_parallel_group",
    "get_pipe_parallel_group",
]


def _members(group: Any) -> list[int]:
    import torch.distributed as dist

    return dist.get_process_group_ranks(group)


def _grids(rank: int, world_size: int) -> tuple[Any, Any, dict[str, Any]]:
    import deepspeed
    from deepspeed.runtime.pipe.topology import PipelineParallelGrid, PipeModelDataParallelTopology

    from dsx.parallel.groups import Grid, make_groups
    from dsx.parallel.mesh import Mesh

    deepspeed.init_distributed()
    mine = make_groups(Mesh.of(pp=2, dp=2, tp=2), sequence_parallel=True)
    ours = Grid(mine)
    stock = PipelineParallelGrid(topology=PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=2))

    def facts(grid: Any) -> dict[str, Any]:
        return {name: getattr(grid, name)() for name in NAMES} | {
            name: sorted(_members(getattr(grid, name)())) for name in GROUPS
        }

    more = {
        "channels": [_members(group) == _members(mine.pipe) for group in mine.channels.values()],
        "distinct": len({id(group) for group in mine.channels.values()}),
        "stages": [ours.stage_to_global(stage) == stock.stage_to_global(stage) for stage in range(2)],
        "tensor source": ours.get_tensor_model_parallel_src_rank(),
        "tensor": (mine.tensor_parallel.size, mine.tensor_parallel.rank, mine.tensor_parallel.sequence),
    }
    return facts(ours), facts(stock), more


def test_grid_equals_deepspeeds() -> None:
    for rank, (ours, stock, more) in enumerate(ranks.run(_grids, 8)):
        assert ours == stock, rank
        assert more == {
            "channels": [True] * 4,
            "distinct": 4,
            "stages": [True, True],
            "tensor source": rank - rank % 2,
            "tensor": (2, rank % 2, True),
        }


def _wrong_size(rank: int, world_size: int) -> None:
    from dsx.parallel.groups import make_groups
    from dsx.parallel.mesh import Mesh

    with pytest.raises(LayoutError, match="4 ranks and the launcher started 2"):
        make_groups(Mesh.of(pp=4))


def test_mesh_of_another_size() -> None:
    ranks.run(_wrong_size, 2)
