"""Over which ranks ZeRO-3 divided each parameter: those of its data-parallel group, or all.

A model that is made under ``deepspeed.zero.Init``, before AutoTP has its groups, is divided over all ranks.
AutoTP then divides anew, over data parallelism, what it cuts; everything else stays divided over all, in
sub-groups of its own (deepspeed/runtime/zero/partition_parameters.py:1094; stage3.py,
``_get_trainable_parameter_groups``). The files do not say which is which, but the sizes of the parts do.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod


def part_numel(shape: Iterable[int], ranks: int) -> int:
    """Elements of each rank's part of a parameter, padding included."""
    return -(-prod(shape) // ranks)


def over_all_ranks(
    sizes: Sequence[int], shapes: Sequence[Iterable[Sequence[int]]], *, dp: int, tp: int
) -> list[bool]:
    """Whether the parameters that have a part in each buffer are divided over all ranks.

    Where both divisions give parts of one size (parameters of a few elements), the other buffers decide: a
    model is made in one way.

    Args:
        sizes: Elements of each buffer on one rank.
        shapes: Local shapes of those parameters.
        dp: Data-parallel degree.
        tp: Tensor-parallel degree.

    >>> over_all_ranks([6, 12, 1], [[(24,)], [(24,)], [(2,)]], dp=2, tp=2)
    [True, False, True]
    """
    found: list[bool | None] = []
    for size, held in zip(sizes, map(tuple, shapes), strict=True):
        own = sum(part_numel(shape, dp) for shape in held)
        every = sum(part_numel(shape, dp * tp) for shape in held)
        found.append(size == every if own != every else None)
    return [any(found) if one is None else one for one in found]
