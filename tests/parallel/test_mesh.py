"""Meshes against DeepSpeed's topology, and the laws that ranks and groups obey."""

from __future__ import annotations

import re

import pytest
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from hypothesis import given, settings
from hypothesis import strategies as st

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
