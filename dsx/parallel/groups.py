"""The process groups of a mesh, made in one place and passed as arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from deepspeed.runtime.pipe.topology import (
    PipeDataParallelTopology,
    PipeModelDataParallelTopology,
    ProcessTopology,
)

from dsx.errors import LayoutError
from dsx.nn.context import ContextParallel
from dsx.nn.experts import ExpertParallel
from dsx.nn.parallel import TensorParallel
from dsx.parallel.mesh import Coordinates, Mesh

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from dsx.islands.coordinator import IslandNode

CHANNELS = ("F_up", "F_down", "B_up", "B_down")
"""Transfer kind x direction: activations (F) or gradients (B), to a higher or a lower rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """This rank's process groups.

    Attributes:
        data: Ranks that hold the same parameters; gradients are averaged and ZeRO partitions over it.
        tensor: Ranks that share each layer's matrices.
        context: Ranks that share every sequence; None where a rank has whole ones.
        samples: Those of ``data`` that read samples of their own; None where all of them do.
        experts: Those of ``data`` that hold the experts of a layer together; None where each holds all.
        expert_data: Those of ``data`` that hold the same experts; None where all of them do.
        pipe: Ranks of one pipeline, in stage order.
        model: Ranks of one model replica, all axes that divide the model together.
        channels: One group per transfer kind and direction over the pipe ranks. NCCL runs the transfers of
            a pair of ranks in a group one after the other, so directions and kinds have groups of their own.
        sequence_parallel: Whether activations between tensor-parallel blocks are split along the sequence.
        island: This rank's connections with other islands; None without islands.
        silent: Whether what is done in these groups is not to be told on any console.
        replica: Place among the ranks of ``data``.
        share: Which share of every batch this rank reads.
        speaks: Whether this rank is the first of those along axes that divide features: what all of them
            hold alike, such as a loss, is counted once, here.
    """

    mesh: Mesh
    rank: int
    data: ProcessGroup
    tensor: ProcessGroup
    pipe: ProcessGroup
    model: ProcessGroup
    channels: Mapping[str, ProcessGroup]
    context: ProcessGroup | None = None
    samples: ProcessGroup | None = None
    experts: ProcessGroup | None = None
    expert_data: ProcessGroup | None = None
    sequence_parallel: bool = False
    island: IslandNode | None = None
    silent: bool = False

    # Looked up for every message: computed once.
    pp_rank: int = field(init=False)
    dp_rank: int = field(init=False)
    cp_rank: int = field(init=False)
    tp_rank: int = field(init=False)
    replica: int = field(init=False)
    share: int = field(init=False)
    speaks: bool = field(init=False)
    _peers: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        for axis in ("pp", "dp", "cp", "tp"):
            _, index = self.at.along(axis)
            object.__setattr__(self, f"{axis}_rank", index)
        object.__setattr__(self, "replica", self.mesh.replica(self.rank))
        object.__setattr__(self, "share", self.mesh.share(self.rank))
        copy, _ = self.mesh.copies(self.rank, cut=False, divided=True)
        object.__setattr__(self, "speaks", copy == 0)
        object.__setattr__(self, "_peers", self.mesh.group_of(self.rank, "pp"))

    @property
    def mute(self) -> bool:
        """Whether this rank has no console: all but the first of the job, or of its first island."""
        told = self.island is None or self.island.islands.speaks
        return self.silent or self.rank != 0 or not told

    @property
    def at(self) -> Coordinates:
        """Where this rank stands, which says what it holds of a parameter."""
        return self.mesh.at(self.rank)

    @property
    def tensor_parallel(self) -> TensorParallel:
        """What dsx.nn's modules need to know of the tensor axis."""
        return TensorParallel(
            size=self.mesh.tp,
            rank=self.tp_rank,
            group=self.tensor,
            sequence_parallel=self.sequence_parallel and self.mesh.tp > 1,
        )

    @property
    def expert_parallel(self) -> ExpertParallel:
        """What a layer needs to know of the ranks that hold its experts together."""
        _, rank = self.at.along("ep")
        return ExpertParallel(size=self.mesh.ep, rank=rank, group=self.experts)

    def replicas_of(self, parameter: Any) -> ProcessGroup:
        """The ranks that hold the same elements of a parameter before ZeRO cuts it."""
        ranks = self.expert_data if of_experts(parameter) else None
        return self.data if ranks is None else ranks

    def is_first_of(self, parameter: Any) -> bool:
        """Whether this rank is the first of :meth:`replicas_of` a parameter."""
        return self.mesh.replica_of(self.rank, experts=of_experts(parameter)) == 0

    @property
    def context_parallel(self) -> ContextParallel:
        """What dsx.nn's modules need to know of the context axis, whose method is theirs to choose."""
        return ContextParallel(size=self.mesh.cp, rank=self.cp_rank, group=self.context)

    def pipe_peer(self, pp_rank: int) -> int:
        """Global rank of pipeline coordinate ``pp_rank``, this rank's other coordinates kept."""
        return self._peers[pp_rank]


def of_experts(parameter: Any) -> bool:
    """Whether other ranks hold other experts of a parameter."""
    return bool(getattr(parameter, "expert_parallel", False))


def make_groups(mesh: Mesh, *, sequence_parallel: bool = False, island: IslandNode | None = None) -> Groups:
    """Create every process group of ``mesh``; a collective call over all ranks."""
    world_size, rank = dist.get_world_size(), dist.get_rank()
    if mesh.size != world_size:
        raise LayoutError(
            f"mesh of {mesh.words}",
            f"it has {mesh.size} ranks and the launcher started {world_size}",
            "choose degrees whose product is the number of ranks",
        )
    pipe = mesh.group_of(rank, "pp")
    return Groups(
        mesh=mesh,
        rank=rank,
        data=new_group(mesh.group_of(rank, *mesh.replica_axes)),
        tensor=new_group(mesh.group_of(rank, "tp")),
        pipe=new_group(pipe),
        model=new_group(mesh.group_of(rank, *mesh.model_axes)),
        channels={name: new_group(pipe) for name in CHANNELS},
        context=new_group(mesh.group_of(rank, "cp")) if mesh.cp > 1 else None,
        samples=new_group(mesh.group_of(rank, *mesh.sample_axes)) if mesh.cp > 1 else None,
        experts=new_group(mesh.together(rank)) if mesh.ep > 1 else None,
        expert_data=new_group(mesh.same(rank, experts=True)) if mesh.ep > 1 else None,
        sequence_parallel=sequence_parallel,
        island=island,
    )


def new_group(ranks: Sequence[int]) -> ProcessGroup:
    """A group of ``ranks``, to which this one belongs. A collective call over those ranks alone.

    Without local synchronisation every rank would take part in making every group: with a thousand ranks, in
    some thousands of barriers.
    """
    group: ProcessGroup | None = dist.new_group(list(ranks), use_local_synchronization=True)
    assert group is not None
    return group


class Grid:
    """A :class:`Groups` under the names that DeepSpeed asks of its ``mpu`` argument.

    DeepSpeed calls pipe x tensor "model parallel" (deepspeed/runtime/pipe/topology.py,
    PipelineParallelGrid): the gradient norm is summed and checkpoints are numbered over that.

    Args:
        topology: The DeepSpeed ProcessTopology that the mesh was made from, if any.
        replicas: Whether data-parallel ranks are all that hold the same parameters, as for DeepSpeed, which
            partitions over them. Else they are those that read samples of their own, as for whoever reads.
    """

    def __init__(
        self, groups: Groups, topology: ProcessTopology | None = None, *, replicas: bool = False
    ) -> None:
        self._groups = groups
        self._mesh = groups.mesh
        self._topo = topology or _topology(groups.mesh)
        self._data_axes = self._mesh.replica_axes if replicas else self._mesh.sample_axes
        self._data = groups.data if replicas or groups.samples is None else groups.samples
        self._data_ranks = self._mesh.group_of(groups.rank, *self._data_axes)

    def topology(self) -> ProcessTopology:
        return self._topo

    def get_data_parallel_group(self) -> ProcessGroup:
        """Group of the data-parallel ranks: see ``replicas``."""
        return self._data

    def get_data_parallel_group_ranks(self) -> list[int]:
        return list(self._data_ranks)

    def get_data_parallel_world_size(self) -> int:
        return len(self._data_ranks)

    def get_data_parallel_rank(self) -> int:
        return self._data_ranks.index(self._groups.rank)

    get_data_parallel_id = get_data_parallel_rank  # as PipelineParallelGrid names it

    def get_model_parallel_group(self) -> ProcessGroup:
        return self._groups.model

    def get_model_parallel_world_size(self) -> int:
        return self._mesh.num_parts

    def get_model_parallel_rank(self) -> int:
        """Index in the model replica, tensor varying fastest: it numbers DeepSpeed's ``mp_rank_XX`` files."""
        return self._mesh.part(self._groups.rank)

    def get_tensor_model_parallel_group(self) -> ProcessGroup:
        return self._groups.tensor

    def get_tensor_model_parallel_world_size(self) -> int:
        return self._mesh.tp

    def get_tensor_model_parallel_rank(self) -> int:
        return self._groups.tp_rank

    def get_tensor_model_parallel_src_rank(self) -> int:
        """Global rank of the first member of the tensor-parallel group."""
        return self._mesh.group_of(self._groups.rank, "tp")[0]

    get_slice_parallel_group = get_tensor_model_parallel_group
    get_slice_parallel_world_size = get_tensor_model_parallel_world_size
    get_slice_parallel_rank = get_tensor_model_parallel_rank

    def get_pipe_parallel_group(self) -> ProcessGroup:
        return self._groups.pipe

    def get_pipe_parallel_world_size(self) -> int:
        return self._mesh.pp

    def get_pipe_parallel_rank(self) -> int:
        return self._groups.pp_rank

    get_stage_id = get_pipe_parallel_rank  # as PipelineParallelGrid names it
    get_pipeline_model_parallel_group = get_pipe_parallel_group
    get_pipeline_model_parallel_world_size = get_pipe_parallel_world_size
    get_pipeline_model_parallel_rank = get_pipe_parallel_rank

    def get_global_rank(self) -> int:
        return self._groups.rank

    def stage_to_global(self, stage_id: int, *, data: int | None = None, model: int | None = None) -> int:
        """Global rank of pipeline coordinate ``stage_id``; the other coordinates default to this rank's."""
        tensor = self._groups.tp_rank if model is None else model
        at = self._mesh.coords(self._groups.rank) | {"pp": stage_id, "tp": tensor}
        same = self._mesh.group_of(self._mesh.rank(**at), *self._data_axes)
        return same[self.get_data_parallel_rank() if data is None else data]

    # PipelineParallelGrid's attributes.
    stage_id = property(get_stage_id)
    data_parallel_id = property(get_data_parallel_id)
    global_rank = property(get_global_rank)
    world_size = property(lambda self: self._mesh.size)
    pipe_parallel_size = property(get_pipe_parallel_world_size)
    data_parallel_size = property(get_data_parallel_world_size)
    model_parallel_size = property(get_tensor_model_parallel_world_size)
    slice_parallel_size = property(get_tensor_model_parallel_world_size)
    is_first_stage = property(lambda self: self._groups.pp_rank == 0)
    is_last_stage = property(lambda self: self._groups.pp_rank == self._mesh.pp - 1)
    dp_group = property(get_data_parallel_group_ranks)
    dp_groups = property(lambda self: [list(ranks) for ranks in self._mesh.groups(*self._data_axes)])
    dp_proc_group = property(get_data_parallel_group)
    pp_group = property(lambda self: list(self._mesh.group_of(self._groups.rank, "pp")))
    pipe_groups = property(lambda self: [list(ranks) for ranks in self._mesh.groups("pp")])
    pp_proc_group = property(get_pipe_parallel_group)
    slice_group = property(lambda self: list(self._mesh.group_of(self._groups.rank, "tp")))
    slice_proc_group = property(get_tensor_model_parallel_group)
    p2p_groups = property(lambda self: [self._with_next(rank) for rank in range(self._mesh.size)])
    model_groups = property(lambda self: [list(ranks) for ranks in self._mesh.groups("tp")])
    ds_model_proc_group = property(get_model_parallel_group)
    ds_model_world_size = property(get_model_parallel_world_size)
    ds_model_rank = property(get_model_parallel_rank)

    def _with_next(self, rank: int) -> list[int]:
        """A rank and its successor in the pipeline, the first rank following the last."""
        ranks = self._mesh.group_of(rank, "pp")
        return [rank, ranks[(ranks.index(rank) + 1) % len(ranks)]]


def _topology(mesh: Mesh) -> ProcessTopology:
    if mesh.tp > 1:
        return PipeModelDataParallelTopology(num_pp=mesh.pp, num_mp=mesh.tp, num_dp=mesh.num_replicas)
    return PipeDataParallelTopology(num_pp=mesh.pp, num_dp=mesh.num_replicas)
