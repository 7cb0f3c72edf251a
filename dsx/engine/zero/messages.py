"""Tensors that CPUs send each other directly.

gloo sums a whole bucket on every rank to scatter it, and gathers by way of a copy of everything. Messages
between any two ranks go at once both ways, without copies, unless they are large: those go one after the
other. What a step makes anew for them on a CPU is in large pages.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

_LARGE = 1 << 21
"""Bytes of a large page of x86-64 and of arm64 with small pages of 4 KiB."""


def empty(elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """``torch.empty`` of a flat tensor.

    The allocator gives a large tensor's memory back to Linux, which hands it out again page by page as it is
    touched. That costs several times as much as to write it, unless pages are large, which Linux has to be
    asked for (madvise(2), MADV_HUGEPAGE). Where it has none, nothing changes.
    """
    made = torch.empty(elements, dtype=dtype, device=device)
    advice = getattr(mmap, "MADV_HUGEPAGE", None)  # Linux's alone
    if advice is not None and made.device.type == "cpu":
        first = -(-made.data_ptr() // _LARGE) * _LARGE
        whole = (made.data_ptr() + made.nbytes - first) // _LARGE * _LARGE
        if whole > 0:
            ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(whole), advice)
    return made


_MESSAGE = 1 << 20
"""Elements of a message at most."""


def exchange(
    group: dist.ProcessGroup, outgoing: Mapping[int, torch.Tensor], incoming: Mapping[int, torch.Tensor]
) -> list[Any]:
    """Start to send and receive flat tensors, each by the rank in ``group`` of the other side.

    A collective call; both sides know the sizes, which may be zero. Returns what is to be waited for.
    """
    works: list[Any] = []
    for rank, tensor in incoming.items():
        parts = tensor.split(_MESSAGE) if len(tensor) else ()
        works += (dist.irecv(part, group=group, group_src=rank) for part in parts)
    for rank, tensor in outgoing.items():
        parts = tensor.split(_MESSAGE) if len(tensor) else ()
        works += (dist.isend(part, group=group, group_dst=rank) for part in parts)
    return works


def start_sum(
    group: dist.ProcessGroup, parts: Sequence[torch.Tensor]
) -> tuple[list[Any], Sequence[torch.Tensor]]:
    """Start to sum flat tensors, each on the rank in ``group`` of its place, where this rank's own is.

    A collective call over the group. Returns what :func:`end_sum` takes: what is to be waited for, and what
    each of the other ranks sends.
    """
    theirs, own = dict(enumerate(parts)), dist.get_rank(group)
    mine = theirs.pop(own)
    received = empty(len(theirs) * len(mine), mine.dtype, mine.device).view(len(theirs), len(mine))
    return exchange(group, theirs, dict(zip(theirs, received, strict=True))), tuple(received)


def end_sum(mine: torch.Tensor, works: Sequence[Any], received: Sequence[torch.Tensor]) -> None:
    """Wait, and add to this rank's part in place what has come."""
    for work in works:
        work.wait()
    for part in received:
        mine.add_(part)


def write_sum(into: torch.Tensor, mine: torch.Tensor, more: torch.Tensor | None = None) -> None:
    """Have flat ``into`` hold ``mine``, which may be overwritten, and what is still to be added to it.

    Sums are made in the data type that was sent, wherever they go.
    """
    if into.device != mine.device:
        # Of one data type and into pinned memory, so that the device goes on with the backward.
        into.copy_((mine if more is None else mine.add_(more)).to(into.dtype), non_blocking=True)
    elif more is not None and into.dtype == mine.dtype:
        torch.add(mine, more, out=into)  # which reads and writes once
    else:
        into.copy_(mine if more is None else mine.add_(more))


@torch.no_grad()
def share_weights(
    masters: Sequence[torch.Tensor],
    weights: Sequence[Sequence[torch.Tensor]],
    groups: Sequence[dist.ProcessGroup],
) -> None:
    """Write this rank's masters into its parts of the weights, and have the other ranks' parts of theirs.

    Stands in for ``update_lp_params`` of DeepSpeed's wrappers. A collective call over each group.

    Each has one for each parameter group: ``masters`` this rank's, flat, ``weights`` the flat parts of all
    ranks, ``groups`` those ranks.
    """
    works: list[Any] = []
    for master, parts, group in zip(masters, weights, groups, strict=True):
        others, own = dict(enumerate(parts)), dist.get_rank(group)
        mine = others.pop(own)
        mine.copy_(master)
        works += exchange(group, dict.fromkeys(others, mine), others)
    for work in works:
        work.wait()
