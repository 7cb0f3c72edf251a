"""The one search for a layout: the cheapest candidates come first, by a cost that is an argument. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from itertools import count
from typing import Any, TypeVar

Candidate = TypeVar("Candidate")


def best_first(
    starts: Iterable[Candidate],
    *,
    cost: Callable[[Candidate], Any],
    grow: Callable[[Candidate], Iterable[Candidate] | None],
) -> Iterator[Candidate]:
    """Complete candidates, the cheapest first; taking only the first does only the work that it needs.

    Args:
        starts: Candidates of which something, or nothing, is open.
        cost: The cost that orders them; for an incomplete candidate, a lower bound of all that come of it. Of
            equal ones, the one found first comes first.
        grow: Gives the candidates that come of an incomplete one, without those that cannot be or cannot fit;
            None for a complete one.
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
