"""The one search for a layout: the cheapest candidates first, with what is cheap as an argument. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from itertools import count
from typing import Any, TypeVar

Candidate = TypeVar("Candidate")


def search(
    starts: Iterable[Candidate],
    *,
    cost: Callable[[Candidate], Any],
    grow: Callable[[Candidate], Iterable[Candidate] | None],
) -> Iterator[Candidate]:
    """Complete candidates, the cheapest first; whoever takes the first only does no more work than it needs.

    Args:
        starts: Candidates of which something, or nothing, is open.
        cost: What they are ordered by. Of one with something open a bound, which nothing that comes of it
            is below. Of equals the one that was found first comes first.
        grow: The candidates that come of one with something open, those that cannot be or cannot fit left
            out; None for a complete one.
    """
    order = count()
    heap = [(cost(start), next(order), start) for start in starts]
    heapq.heapify(heap)
    while heap:
        _, _, candidate = heapq.heappop(heap)
        grown = grow(candidate)
        if grown is None:
            yield candidate
            continue
        for each in grown:
            heapq.heappush(heap, (cost(each), next(order), each))
