"""Cuts a logical tensor into the local ones of its ranks, and merges them."""

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


def merge(spec: ParamSpec, shards: Sequence[Tensor], places: Sequence[Coordinates] | None = None) -> Tensor:
    """The logical tensor from local ones that together hold all of it; padding is dropped.

    ``shards`` are those of every tensor-parallel rank in rank order, or of ranks at ``places``.
    """
    places = places or [Mesh.of(tp=len(shards)).at(rank) for rank in range(len(shards))]
    if not spec.cuts(places[0]):
        return shards[0]
    whole = shards[0].new_empty(spec.shape)
    for at, shard in zip(places, shards, strict=True):
        for part, box in regions(shard, spec, at):
            whole[tuple(slice(*span) for span in box)] = part
    return whole
