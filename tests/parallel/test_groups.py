"""Process groups against DeepSpeed's own grid for the same topology."""

from __future__ import annotations

from typing import Any

import pytest

import ranks
from dsx.errors import LayoutError

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
