"""Movements as bytes: fp32, bf16, or int8 with one scale for every :data:`~dsx.parallel.islands.BLOCK`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dsx.parallel.islands import BLOCK, SEGMENT, Wire, wire_bytes

_MOST = 127

Segment = list[tuple[int, int, int]]
"""Parts of pieces: which piece, and from which element to which."""


def segments(sizes: Sequence[int]) -> list[Segment]:
    """Pieces of these sizes in segments, which are sent one by one and begin at blocks.

    >>> segments([3, 2 * SEGMENT, 1]) == [
    ...     [(0, 0, 3), (1, 0, SEGMENT)], [(1, SEGMENT, 2 * SEGMENT)], [(2, 0, 1)]]
    True
    """
    found: list[Segment] = []
    room = 0
    for piece, size in enumerate(sizes):
        for low in range(0, size, SEGMENT):
            if room <= 0:
                found.append([])
                room = SEGMENT
            found[-1].append((piece, low, min(low + SEGMENT, size)))
            room -= min(SEGMENT, size - low)
    return found


def bytes_due(segment: Segment, wire: Wire) -> int:
    """How many bytes a segment is."""
    return sum(wire_bytes(high - low, wire) for _, low, high in segment)


def taken(pieces: Sequence[Tensor], segment: Segment) -> list[Tensor]:
    """The parts of a segment: views."""
    return [pieces[piece][low:high] for piece, low, high in segment]


def encode(pieces: Sequence[Tensor], wire: Wire) -> bytearray:
    """The bytes of ``pieces``, fp32 on the host, one after the other.

    Scales of int8 begin anew with every piece, so that a parameter that several ranks hold is rounded alike
    by each of them, whatever else they hold.
    """
    return bytearray(b"".join(_bytes_of(part) for piece in pieces for part in _parts(piece, wire)))


def decode(data: bytearray, segment: Segment, wire: Wire) -> list[Tensor]:
    """The parts of a segment, fp32, that :func:`encode` made ``data`` of."""
    pieces, at, view = [], 0, memoryview(data)
    for size in (high - low for _, low, high in segment):
        end = at + wire_bytes(size, wire)
        pieces.append(_piece(view[at:end], size, wire))
        at = end
    return pieces


def _parts(piece: Tensor, wire: Wire) -> tuple[Tensor, ...]:
    if not piece.numel():
        return ()
    if wire == "fp32":
        return (piece,)
    if wire == "bf16":
        return (piece.bfloat16(),)
    blocks = _blocks(piece)
    # A block of zeros has no scale to divide by; one that is not finite stays so, and is heard of.
    scale_B = blocks.abs().amax(dim=1) / _MOST
    rounded = (blocks / torch.where(scale_B > 0, scale_B, 1.0)[:, None]).round_().clamp_(-_MOST, _MOST)
    return scale_B, rounded.nan_to_num_(0.0).to(torch.int8).view(-1)[: piece.numel()]


def _piece(data: memoryview, size: int, wire: Wire) -> Tensor:
    if not size:
        return torch.zeros(0)
    if wire == "fp32":
        return torch.frombuffer(data, dtype=torch.float32).clone()
    if wire == "bf16":
        return torch.frombuffer(data, dtype=torch.bfloat16).float()
    count = -(-size // BLOCK)
    scale_B = torch.frombuffer(data[: 4 * count], dtype=torch.float32)
    blocks = _blocks(torch.frombuffer(data[4 * count :], dtype=torch.int8).float())
    return (blocks * scale_B[:, None]).view(-1)[:size].clone()


def _blocks(flat: Tensor) -> Tensor:
    """Rows of :data:`BLOCK` elements, the last one filled up with zeros; one short row if that is all."""
    size = flat.numel()
    if size <= BLOCK:
        return flat.view(1, -1)
    return torch.nn.functional.pad(flat, (0, -size % BLOCK)).view(-1, BLOCK)


def _bytes_of(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()
