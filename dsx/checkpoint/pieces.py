"""Boxes of tensors and where they lie in flat memory: the geometry of checkpoints. Pure, no torch."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, product
from math import prod

from dsx.checkpoint.catalog import Entry, Piece
from dsx.models.param import Box, ParamSpec
from dsx.parallel.mesh import Coordinates


@dataclass(frozen=True, slots=True)
class Part:
    """A box of a logical tensor as it lies in one rank's flattened local tensor.

    Attributes:
        start: Corner of the box in the logical tensor.
        strides: Of the local tensor, in elements.
        flat: Index of the box's first element in the flattened local tensor.
    """

    start: tuple[int, ...]
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    flat: int

    @property
    def box(self) -> Box:
        return tuple((low, low + extent) for low, extent in zip(self.start, self.shape, strict=True))

    @property
    def end(self) -> int:
        """The element of the flattened local tensor after the box's last one."""
        last = sum((size - 1) * step for size, step in zip(self.shape, self.strides, strict=True))
        return self.flat + last + 1

    def at(self, file: str, origin: int, item_bytes: int, replica: int = 0) -> Piece:
        """The piece of a file whose byte ``origin`` is element 0 of the flattened local tensor."""
        return Piece(file, origin + self.flat * item_bytes, self.start, self.shape, self.strides, replica)


def contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides, in elements.

    >>> contiguous((2, 3, 4))
    (12, 4, 1)
    """
    return tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))


def corner_of(flat: int, shape: Sequence[int]) -> tuple[int, ...]:
    """Index of an element of a row-major tensor, by its place in the flattened one.

    >>> corner_of(17, (2, 3, 4))
    (1, 1, 1)
    """
    found = []
    for step in contiguous(shape):
        at, flat = divmod(flat, max(1, step))
        found.append(at)
    return tuple(found)


def whole(shape: Sequence[int]) -> Box:
    """The box that is all of a tensor."""
    return tuple((0, extent) for extent in shape)


def whole_part(shape: tuple[int, ...]) -> Part:
    """All of a tensor, row-major."""
    return Part((0,) * len(shape), shape, contiguous(shape), 0)


def volume(box: Box) -> int:
    """Elements of a box."""
    return prod(stop - start for start, stop in box)


def intersect(a: Box, b: Box) -> Box | None:
    """What two boxes share; None if nothing."""
    shared = []
    for (a_start, a_stop), (b_start, b_stop) in zip(a, b, strict=True):
        start, stop = max(a_start, b_start), min(a_stop, b_stop)
        if start >= stop:
            return None
        shared.append((start, stop))
    return tuple(shared)


def clipped(entry: Entry, box: Box) -> tuple[Piece, ...]:
    """What an entry's pieces hold of a box."""
    found = []
    for piece in entry.pieces:
        shared = intersect(piece.box, box)
        if shared is not None:
            start, shape = tuple(low for low, _ in shared), tuple(high - low for low, high in shared)
            offset = piece.offset + flat_offset(piece, shared) * entry.item_bytes
            found.append(replace(piece, start=start, shape=shape, offset=offset))
    return tuple(found)


def subtract(box: Box, hole: Box) -> Iterator[Box]:
    """Disjoint boxes that together are ``box`` without ``hole``.

    >>> list(subtract(((0, 4), (0, 4)), ((1, 2), (0, 3))))
    [((0, 1), (0, 4)), ((2, 4), (0, 4)), ((1, 2), (3, 4))]
    """
    shared = intersect(box, hole)
    if shared is None:
        yield box
        return
    for dim, ((start, stop), (low, high)) in enumerate(zip(box, shared, strict=True)):
        for side in ((start, low), (high, stop)):
            if side[0] < side[1]:
                yield (*shared[:dim], side, *box[dim + 1 :])


def interval_boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Elements ``start`` to ``stop`` of a flattened row-major tensor as boxes, in order.

    A part of a row, full rows, a part of a row; and so inside each row: at most ``2 * dims - 1`` boxes.

    >>> list(interval_boxes((4, 3), 2, 10))
    [((0, 1), (2, 3)), ((1, 3), (0, 3)), ((3, 4), (0, 1))]
    """
    if start >= stop:
        return
    if not shape:
        yield ()
        return
    row = prod(shape[1:])
    (first, head), (last, tail) = divmod(start, row), divmod(stop, row)
    if first == last:
        yield from (((first, first + 1), *box) for box in interval_boxes(shape[1:], head, tail))
        return
    if head:
        yield from (((first, first + 1), *box) for box in interval_boxes(shape[1:], head, row))
        first += 1
    if first < last:
        yield ((first, last), *whole(shape[1:]))
    if tail:
        yield from (((last, last + 1), *box) for box in interval_boxes(shape[1:], 0, tail))


def local_parts(spec: ParamSpec, at: Coordinates, start: int, stop: int) -> tuple[Part, ...]:
    """Elements ``start`` to ``stop`` of a rank's flattened local tensor, as boxes of the logical tensor.

    The local tensor is what the axes leave on the rank, its fused blocks one after another and padding last
    along the split dim.
    """
    return cut_parts(spec.local_shape(at), spec.cuts(at), start, stop)


def cut_parts(
    shape: Sequence[int], cuts: Mapping[int, Sequence[tuple[int, int]]], start: int, stop: int
) -> tuple[Part, ...]:
    """Elements ``start`` to ``stop`` of a flattened local tensor, as boxes of the logical tensor.

    Args:
        shape: Of the local tensor.
        cuts: For each dim that is cut, what the local tensor has along it: (start, stop) of each block, in
            its order. Rows past them are padding, which has no part.
        start: First element.
        stop: The element after the last.

    Returns:
        The parts in the order of their first elements.
    """
    strides = contiguous(shape)
    parts = []
    for local in interval_boxes(shape, start, stop):
        reached = (_reached(cuts.get(dim), span) for dim, span in enumerate(local))
        for stretches in product(*reached):
            flat = sum(at * step for (at, _), step in zip(stretches, strides, strict=True))
            box = tuple(span for _, span in stretches)
            parts.append(
                Part(tuple(low for low, _ in box), tuple(high - low for low, high in box), strides, flat)
            )
    return tuple(sorted(parts, key=lambda part: part.flat))


def _reached(
    blocks: Sequence[tuple[int, int]] | None, local: tuple[int, int]
) -> list[tuple[int, tuple[int, int]]]:
    """The global stretches that a local one reaches into along a dim, each with its first local index."""
    if blocks is None:
        return [(local[0], local)]
    base, found = 0, []
    for low, high in blocks:
        start, stop = max(local[0], base), min(local[1], base + high - low)
        if start < stop:
            found.append((start, (start + low - base, stop + low - base)))
        base += high - low
    return found


class PieceIndex:
    """Finds the pieces that reach into a box; fast if they are many and spread over dim 0."""

    def __init__(self, pieces: Iterable[Piece]) -> None:
        self._pieces = sorted(pieces, key=lambda piece: piece.start)
        self._starts = [piece.start[0] if piece.start else 0 for piece in self._pieces]
        stops = (piece.start[0] + piece.shape[0] if piece.start else 1 for piece in self._pieces)
        self._furthest = list(accumulate(stops, max))

    def overlaps(self, box: Box) -> list[tuple[Piece, Box]]:
        """Pieces with the part of ``box`` that each holds, in the order of their corners."""
        low, high = box[0] if box else (0, 1)
        first, last = bisect_right(self._furthest, low), bisect_left(self._starts, high)
        found = []
        for piece in self._pieces[first:last]:
            shared = intersect(piece.box, box)
            if shared is not None:
                found.append((piece, shared))
        return found


@dataclass(frozen=True, slots=True)
class Blocks:
    """How a strided box falls into blocks without gaps.

    Attributes:
        outer: Dims to loop over, one block per index.
        inner: Dims inside a block, the slowest first.
    """

    outer: tuple[int, ...]
    inner: tuple[int, ...]
    elements: int


def dense_blocks(shape: Sequence[int], strides: Sequence[int]) -> Blocks:
    """The largest blocks of a box that are each one stretch of memory, in whatever order of dims.

    >>> dense_blocks((4, 3), (3, 1)), dense_blocks((4, 3), (8, 1)), dense_blocks((4, 3), (1, 4))
    (Blocks(outer=(), inner=(0, 1), elements=12), Blocks(outer=(0,), inner=(1,), elements=3), \
Blocks(outer=(), inner=(1, 0), elements=12))
    """
    dims = sorted((dim for dim, extent in enumerate(shape) if extent > 1), key=lambda dim: strides[dim])
    elements, inner = 1, 0
    for dim in dims:
        if strides[dim] != elements:
            break
        elements *= shape[dim]
        inner += 1
    return Blocks(tuple(sorted(dims[inner:])), tuple(reversed(dims[:inner])), elements)


def flat_offset(piece: Piece | Part, box: Box) -> int:
    """Elements between the first element of a piece or part and the first of ``box``, which lies in it."""
    return sum(
        (low - corner) * step for (low, _), corner, step in zip(box, piece.start, piece.strides, strict=True)
    )
