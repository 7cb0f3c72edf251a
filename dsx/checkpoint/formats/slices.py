"""Cuts a logical tensor into the local ones of its tensor-parallel ranks, and merges them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dsx.models.param import Box, ParamSpec
from dsx.parallel.mesh import Coordinates, Mesh


def cut(spec: ParamSpec, fetch: Callable[[Box], Tensor], at: Coordinates) -> Tensor:
    """One rank's local tensor, put together from the global boxes that it holds; padding is zero."""
    boxes = spec.boxes(at)
    if spec.split is None:
        return fetch(boxes[0]).contiguous()
    dim = spec.split
    pieces = [fetch(box) for box in boxes if box[dim][0] < box[dim][1]]
    missing = spec.local_extent(at) - sum(piece.shape[dim] for piece in pieces)
    if missing:
        padding = (*spec.shape[:dim], missing, *spec.shape[dim + 1 :])
        like = pieces[0] if pieces else fetch(tuple((0, min(1, n)) for n in spec.shape))
        pieces.append(like.new_zeros(padding))
    return torch.cat(pieces, dim)


def part_of(spec: ParamSpec, whole: Tensor, at: Coordinates) -> Tensor:
    """:func:`cut` of a tensor that is there whole."""
    return cut(spec, lambda box: whole[tuple(slice(*span) for span in box)], at)


def merge(spec: ParamSpec, shards: Sequence[Tensor]) -> Tensor:
    """The logical tensor from every tensor-parallel rank's local one, in rank order; padding is dropped."""
    if spec.split is None:
        return shards[0]
    whole = shards[0].new_empty(spec.shape)
    for rank, shard in enumerate(shards):
        start = 0
        for box in spec.boxes(Mesh.of(tp=len(shards)).at(rank)):
            extent = box[spec.split][1] - box[spec.split][0]
            whole[tuple(slice(*span) for span in box)] = shard.narrow(spec.split, start, extent)
            start += extent
    return whole
