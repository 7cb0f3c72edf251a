"""Random initial weights that do not depend on the layout.

A counter-based generator, Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3",
section 3.2), gives element (row, column) of a parameter its value from (seed, parameter name, row, column)
alone. So every rank generates just the part that it holds, and the weights are the same for every tensor- and
pipeline-parallel degree.

Shapes: R rows, Q column quads (4 columns share one Philox block), C columns.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from dsx.spec.param import Box, ParamSpec

Words = tuple[Tensor, Tensor, Tensor, Tensor]
"""Four 32-bit words per element, in int64 tensors of one (broadcastable) shape."""

_MASK = 0xFFFFFFFF
_BLOCKS_AT_ONCE = {"cpu": 1 << 14, "cuda": 1 << 20}
"""Philox blocks generated at a time: temporaries of 1.6 MB in a CPU's cache, 100 MB on a GPU."""


def philox_4x32(counter: Words, key: tuple[int, int]) -> Words:
    """Philox4x32-10: four random 32-bit words for each counter.

    Args:
        counter: Four 32-bit words per element.
        key: Two 32-bit words.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        # The products of two 32-bit words wrap around int64's sign; the bits are right all the same.
        product_0, product_1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (
            ((product_1 >> 32) & _MASK) ^ c1 ^ k0,
            product_1 & _MASK,
            ((product_0 >> 32) & _MASK) ^ c3 ^ k1,
            product_0 & _MASK,
        )
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    return c0, c1, c2, c3


def fill(out: Tensor, spec: ParamSpec, *, tp: int, tp_rank: int, seed: int) -> None:
    """Fill one rank's tensor with its part of the initial value of ``spec``; padding becomes zero.

    Args:
        out: Of shape ``spec.local_shape(tp)``, any dtype and device. Overwritten.
        spec: The parameter; its name and ``seed`` choose the values.
        tp: Tensor-parallel degree.
        tp_rank: This rank's index.
        seed: Of the run.
    """
    out = out.detach()
    out.zero_()
    for region, box in regions(out, spec, tp=tp, tp_rank=tp_rank):
        if spec.init.kind == "ones":
            region.fill_(1.0)
        elif spec.init.kind == "normal":
            _fill_normal(region, box, spec.init.std, _key(seed, spec.name))


def regions(out: Tensor, spec: ParamSpec, *, tp: int, tp_rank: int) -> Iterator[tuple[Tensor, Box]]:
    """Views of one rank's tensor, each with the global box that it holds; padding is in none."""
    at = 0
    for box in spec.boxes(tp, tp_rank):
        region = out
        if spec.split is not None:
            lo, hi = box[spec.split]
            region = out.narrow(spec.split, at, hi - lo)
            at += hi - lo
        yield region, box


def _key(seed: int, name: str) -> tuple[int, int]:
    digest = int.from_bytes(hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest(), "little")
    return digest & _MASK, digest >> 32


def _fill_normal(region: Tensor, box: Box, std: float, key: tuple[int, int]) -> None:
    """Normal values for the global ``box``, one or two dims, into ``region``, in bounded memory."""
    rows, columns = box if len(box) == 2 else ((0, 1), box[0])
    if rows[0] >= rows[1] or columns[0] >= columns[1]:
        return
    region_RC = region.view(rows[1] - rows[0], columns[1] - columns[0])
    quads = (columns[0] // 4, -(-columns[1] // 4))
    blocks = _BLOCKS_AT_ONCE["cuda" if region.is_cuda else "cpu"]
    wide = min(quads[1] - quads[0], blocks)
    tall = max(1, blocks // wide)
    for row in range(rows[0], rows[1], tall):
        row_end = min(row + tall, rows[1])
        for quad in range(quads[0], quads[1], wide):
            lo, hi = max(4 * quad, columns[0]), min(4 * (quad + wide), columns[1])
            normal_RC = _normal((row, row_end), (quad, min(quad + wide, quads[1])), key, region.device)
            target = region_RC[row - rows[0] : row_end - rows[0], lo - columns[0] : hi - columns[0]]
            target.copy_(normal_RC[:, lo - 4 * quad : hi - 4 * quad] * std)


def _normal(
    rows: tuple[int, int], quads: tuple[int, int], key: tuple[int, int], device: torch.device
) -> Tensor:
    """Standard normal values [R, 4 Q] by Box-Muller.

    In float64: vectorised and scalar code paths differ in the last bits of log and cos, and those must not
    reach the (at most float32) result, or the value of an element would depend on its place in the chunk.
    """
    row_R1 = torch.arange(*rows, device=device)[:, None]
    quad_1Q = torch.arange(*quads, device=device)[None, :]
    words = philox_4x32((quad_1Q & _MASK, quad_1Q >> 32, row_R1 & _MASK, row_R1 >> 32), key)
    out = torch.empty(rows[1] - rows[0], quads[1] - quads[0], 4, dtype=torch.float64, device=device)
    for pair in (0, 2):
        radius = ((words[pair].double() + 1) * 2.0**-32).log_().mul_(-2).sqrt_()
        angle = words[pair + 1].double() * (2 * math.pi * 2.0**-32)
        out[..., pair] = radius * angle.cos()
        out[..., pair + 1] = radius * angle.sin()
    return out.flatten(1)
