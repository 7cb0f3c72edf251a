"""Measure what a transfer between pipeline neighbours takes."""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from dsx.runtime.groups import Groups

_DROPPED = 2  # First round trips: connections are made.
_SMALL_BYTES = 1024
_LEAST_LARGE_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Link:
    """Time of a transfer of n bytes: ``latency_seconds + n / bytes_per_second``."""

    latency_seconds: float
    bytes_per_second: float

    @classmethod
    def through(cls, small: tuple[int, float], large: tuple[int, float]) -> Link:
        """The line through two measured (bytes, seconds), the small one no faster than free.

        >>> Link.through((1000, 1e-3), (101_000, 2e-3))
        Link(latency_seconds=0.00099, bytes_per_second=100000000.0)
        """
        more_bytes, more_seconds = large[0] - small[0], large[1] - small[1]
        if more_seconds <= 0:  # the noise is larger than the difference
            return cls(0.0, large[0] / large[1])
        rate = more_bytes / more_seconds
        return cls(max(0.0, small[1] - small[0] / rate), rate)


def measure_link(groups: Groups, device: torch.device, *, num_bytes: int, rounds: int) -> Link | None:
    """What neighbours need for transfers of up to ``num_bytes``; None without a pipeline.

    A collective call over all ranks. Every pair of neighbours plays ping-pong with a small and a large
    message, pairs that share no rank at the same time; all ranks agree on the median. The way from the last
    rank back to the first, which chunks take, is taken to be like the others.
    """
    if groups.mesh.pp == 1:
        return None
    sizes = (_SMALL_BYTES, max(num_bytes, _LEAST_LARGE_BYTES))
    mine: list[tuple[float, ...]] = []
    for parity in (0, 1):
        first = groups.pp_rank - (groups.pp_rank + parity) % 2
        if first >= 0 and first + 1 < groups.mesh.pp:
            times = [_ping_pong(groups, device, first, size, rounds) for size in sizes]
            if first == groups.pp_rank:
                mine.append(tuple(times))
    everyone: list[list[tuple[float, ...]]] = [[] for _ in range(groups.mesh.size)]
    dist.all_gather_object(everyone, mine)
    small, large = (median(t) for t in zip(*(pair for pairs in everyone for pair in pairs), strict=True))
    return Link.through((sizes[0], small), (sizes[1], large))


def _ping_pong(groups: Groups, device: torch.device, first: int, num_bytes: int, rounds: int) -> float:
    """Seconds of one way, between pipeline ranks ``first`` and ``first + 1``."""
    message = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    up, down = groups.channels["F_up"], groups.channels["B_down"]
    leads = groups.pp_rank == first
    peer = groups.pipe_peer(first + 1 if leads else first)
    times = []
    for _ in range(_DROPPED + rounds):
        get_accelerator().synchronize()
        start = time.perf_counter()
        if leads:
            dist.send(message, peer, group=up)
            dist.recv(message, peer, group=down)
        else:
            dist.recv(message, peer, group=up)
            dist.send(message, peer, group=down)
        get_accelerator().synchronize()
        times.append((time.perf_counter() - start) / 2)
    return median(times[_DROPPED:])
