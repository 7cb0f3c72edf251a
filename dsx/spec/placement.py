"""Which pipeline rank holds a virtual stage. The one place where this is derived."""

from __future__ import annotations

from typing import Literal

Placement = Literal["loop", "v"]
"""How virtual stages are dealt to ranks: in turn, or there and back."""


def rank_of(stage: int, num_ranks: int, placement: Placement) -> int:
    """Pipeline rank that holds virtual stage ``stage``, as its chunk ``stage // num_ranks``.

    ``loop`` deals the stages to the ranks in turn (arXiv:2104.04473, section 2.2). ``v`` turns round at each
    end, so that neighbouring stages ``num_ranks - 1`` and ``num_ranks`` share a rank, and with two chunks the
    first rank holds both the first stage and the last (arXiv:2401.10241, section 6).

    >>> [rank_of(stage, 3, "loop") for stage in range(6)], [rank_of(stage, 3, "v") for stage in range(6)]
    ([0, 1, 2, 0, 1, 2], [0, 1, 2, 2, 1, 0])
    """
    chunk, place = divmod(stage, num_ranks)
    return num_ranks - 1 - place if placement == "v" and chunk % 2 else place


def stages_of(rank: int, num_ranks: int, num_chunks: int, placement: Placement) -> tuple[int, ...]:
    """Virtual stages of pipeline rank ``rank``, chunk by chunk: ascending.

    >>> stages_of(0, 3, 2, "loop"), stages_of(0, 3, 2, "v")
    ((0, 3), (0, 5))
    """
    mirrored = num_ranks - 1 - rank
    return tuple(
        chunk * num_ranks + (mirrored if placement == "v" and chunk % 2 else rank)
        for chunk in range(num_chunks)
    )
