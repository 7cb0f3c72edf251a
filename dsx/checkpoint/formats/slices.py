"""Cuts a logical tensor into the local ones of its tensor-parallel ranks, and merges them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from dsx.models.param import ParamSpec
from dsx.nn.parameters import regions, take_part
from dsx.parallel.mesh import Coordinates, Mesh


def part_of(spec: ParamSpec, whole: Tensor, at: Coordinates) -> Tensor:
    """One rank's local tensor; padding is zero."""
    part = whole.new_zeros(spec.local_shape(at))
    take_part(part, whole, spec, at)
    return part


def merge(spec: ParamSpec, shards: Sequence[Tensor]) -> Tensor:
    """The logical tensor from every tensor-parallel rank's local one, in rank order; padding is dropped."""
    if spec.split is None:
        return shards[0]
    whole = shards[0].new_empty(spec.shape)
    for rank, shard in enumerate(shards):
        for part, box in regions(shard, spec, Mesh.of(tp=len(shards)).at(rank)):
            whole[tuple(slice(*span) for span in box)] = part
    return whole
