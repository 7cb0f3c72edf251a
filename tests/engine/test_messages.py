"""What CPUs send each other directly, and memory in large pages."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import ranks
from dsx.engine.zero.messages import empty, exchange, share_weights


def _exchanged(rank: int, world_size: int, sizes: list[list[int]]) -> bool:
    """``sizes[a][b]`` elements from rank a to rank b, each with a value of its own."""
    others = [other for other in range(world_size) if other != rank]
    outgoing = {other: torch.full((sizes[rank][other],), float(10 * rank + other)) for other in others}
    incoming = {other: torch.zeros(sizes[other][rank]) for other in others}
    for work in exchange(dist.group.WORLD, outgoing, incoming):
        work.wait()
    return all(bool((came == 10 * other + rank).all()) for other, came in incoming.items())


def test_tensors_of_any_size_go_both_ways_at_once() -> None:
    many = (1 << 20) * 2 + 3  # more than a message
    assert ranks.run(_exchanged, 3, [[0, many, 0], [5, 0, 1], [many, 0, 0]]) == [True] * 3


def _shared(rank: int, world_size: int) -> list[bool]:
    """Two groups of different precision: what torch's all-gather gives."""
    groups = [dist.group.WORLD] * 2
    flats = [torch.zeros(7 * world_size, dtype=dtype) for dtype in (torch.bfloat16, torch.float32)]
    parts = [list(flat.chunk(world_size)) for flat in flats]
    masters = [torch.linspace(rank, rank + 1, 7), torch.full((7,), rank + 0.5)]
    expected = [torch.zeros_like(flat) for flat in flats]
    for master, flat in zip(masters, expected, strict=True):
        dist.all_gather_into_tensor(flat, master.to(flat.dtype))
    share_weights(masters, parts, groups)
    return [torch.equal(flat, want) for flat, want in zip(flats, expected, strict=True)]


@pytest.mark.parametrize("world_size", [1, 3])
def test_weights_are_every_ranks_masters(world_size: int) -> None:
    assert ranks.run(_shared, world_size) == [[True, True]] * world_size


@pytest.mark.parametrize("elements", [0, 1, 1 << 19, 3_000_001])
def test_memory_in_large_pages_is_a_tensor_as_any(elements: int) -> None:
    made = empty(elements, torch.bfloat16, torch.device("cpu"))
    assert (made.shape, made.dtype, made.is_contiguous()) == ((elements,), torch.bfloat16, True)
    assert made.fill_(1).sum(dtype=torch.float64) == elements
