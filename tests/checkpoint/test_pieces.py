"""Boxes against numpy's own slicing: what flat intervals and tensor-parallel shards hold, by element."""

from __future__ import annotations

from math import prod

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsx.checkpoint.catalog import Piece
from dsx.checkpoint.formats.slices import part_of
from dsx.checkpoint.pieces import (
    PieceIndex,
    contiguous,
    dense_blocks,
    flat_offset,
    intersect,
    interval_boxes,
    local_parts,
    subtract,
    volume,
    whole,
)
from dsx.models.param import Init, ParamSpec
from dsx.parallel.mesh import Mesh

shapes = st.lists(st.integers(1, 6), max_size=4).map(tuple)


def at(box):
    return tuple(slice(*span) for span in box)


@st.composite
def boxes(draw, shape):
    spans = [sorted(draw(st.lists(st.integers(0, n), min_size=2, max_size=2, unique=True))) for n in shape]
    return tuple((low, high) for low, high in spans)


@st.composite
def two_boxes(draw):
    shape = draw(shapes)
    return shape, draw(boxes(shape)), draw(boxes(shape))


@st.composite
def sharded(draw):
    """A parameter as a model may have it, cut by tp ranks, and an interval of one rank's flat tensor."""
    tp = draw(st.integers(1, 4))
    dims = draw(st.integers(1, 3))
    split = draw(st.none() | st.integers(0, dims - 1))
    shape = draw(st.lists(st.integers(1, 5), min_size=dims, max_size=dims))
    parts, multiple = (), None
    if split is not None:
        kind = draw(st.sampled_from(["even", "parts", "padded"]))
        if kind == "parts":
            parts = tuple(tp * n for n in draw(st.lists(st.integers(1, 3), min_size=2, max_size=3)))
            shape[split] = sum(parts)
        elif kind == "even":
            shape[split] *= tp
        else:
            multiple = draw(st.integers(1, 4))
    spec = ParamSpec(
        name="0.w",
        layer=0,
        shape=tuple(shape),
        init=Init(kind="zeros"),
        hf=("w",),
        split=split,
        parts=parts,
        pad_multiple=multiple,
    )
    rank = draw(st.integers(0, tp - 1))
    numel = prod(spec.local_shape(Mesh.of(tp=tp).at()))
    start, stop = sorted((draw(st.integers(0, numel)), draw(st.integers(0, numel))))
    return spec, tp, rank, start, stop


@given(shapes, st.data())
def test_an_interval_of_a_flat_tensor_is_its_boxes_in_order(shape, data):
    tensor = np.arange(prod(shape)).reshape(shape)
    stop = data.draw(st.integers(0, tensor.size))
    start = data.draw(st.integers(0, stop))
    found = list(interval_boxes(shape, start, stop))
    assert len(found) <= max(1, 2 * len(shape) - 1)
    flat = [tensor[at(box)].ravel() for box in found]
    assert np.concatenate([*flat, np.empty(0, int)]).tolist() == list(range(start, stop))


@given(two_boxes())
def test_sharing_and_subtracting_boxes_is_what_masks_say(drawn):
    shape, a, b = drawn
    mask = np.zeros(shape, int)
    mask[at(a)] += 1
    both = mask.copy()
    both[at(b)] += 1
    shared = intersect(a, b)
    expected = np.zeros(shape, bool)
    if shared is not None:
        expected[at(shared)] = True
    assert (expected == (both == 2)).all()
    rest = np.zeros(shape, int)
    for piece in subtract(a, b):
        assert volume(piece) > 0
        rest[at(piece)] += 1
    assert (rest == (mask.astype(bool) & ~expected)).all()


@settings(max_examples=300)
@given(sharded())
def test_parts_of_a_rank_are_what_slicing_gives_it(drawn):
    spec, tp, rank, start, stop = drawn
    logical = torch.arange(1, spec.numel + 1).reshape(spec.shape)
    place = Mesh.of(tp=tp).at(rank)
    local = part_of(spec, logical, place).numpy()
    assert local.shape == spec.local_shape(place)
    seen = np.zeros(local.size, int)
    for part in local_parts(spec, place, start, stop):
        assert part.strides == contiguous(local.shape)
        view = np.lib.stride_tricks.as_strided(
            local.ravel()[part.flat :], part.shape, [8 * step for step in part.strides]
        )
        box = [slice(low, low + extent) for low, extent in zip(part.start, part.shape, strict=True)]
        assert (view == logical.numpy()[tuple(box)]).all()
        index = np.lib.stride_tricks.as_strided(
            np.arange(local.size)[part.flat :], part.shape, [8 * step for step in part.strides]
        )
        seen[index.ravel()] += 1
    inside = np.zeros(local.size, bool)
    inside[start:stop] = True
    assert (seen == (inside & (local.ravel() != 0))).all()  # each element once; padding, which is 0, never


@given(sharded(), st.integers(2, 100))
def test_all_ranks_parts_tile_the_tensor_and_keep_their_bytes(drawn, item_bytes):
    spec, tp, _, _, _ = drawn
    count = np.zeros(spec.shape, int)
    for rank in range(1 if spec.split is None else tp):
        place = Mesh.of(tp=tp).at(rank)
        for part in local_parts(spec, place, 0, prod(spec.local_shape(place))):
            piece = part.at("f", 10, item_bytes)
            assert piece.offset == 10 + part.flat * item_bytes
            count[at(piece.box)] += 1
    assert (count == 1).all()


@given(shapes.filter(len), st.data())
def test_the_index_finds_every_overlap(shape, data):
    found = [data.draw(boxes(shape)) for _ in range(data.draw(st.integers(0, 12)))]
    pieces = [
        Piece(str(n), 0, tuple(lo for lo, _ in b), tuple(hi - lo for lo, hi in b), (1,) * len(shape))
        for n, b in enumerate(found)
    ]
    box = data.draw(boxes(shape))
    expected = {(p.file, shared) for p in pieces if (shared := intersect(p.box, box)) is not None}
    assert {(piece.file, shared) for piece, shared in PieceIndex(pieces).overlaps(box)} == expected


@given(shapes, st.data())
def test_dense_blocks_cover_a_strided_box_without_gaps(shape, data):
    """A tensor in any order of dims, of which a box is taken: its blocks are runs of consecutive numbers."""
    order = data.draw(st.permutations(range(len(shape))))
    stored = np.arange(prod(shape)).reshape([shape[dim] for dim in order])
    view = stored.transpose(np.argsort(order)) if shape else stored
    strides = tuple(step // 8 for step in view.strides)
    box = data.draw(boxes(shape))
    part = view[at(box)]
    blocks = dense_blocks(part.shape, strides)
    runs = part.transpose([*blocks.outer, *(d for d in range(part.ndim) if d not in blocks.outer)])
    runs = runs.reshape(prod(part.shape[d] for d in blocks.outer), -1) if part.ndim else part.reshape(1, 1)
    assert runs.shape[1] == blocks.elements
    for run in runs:
        assert sorted(run.tolist()) == list(range(run.min(), run.min() + blocks.elements))
    piece = Piece("f", 0, (0,) * len(shape), shape, strides)
    assert flat_offset(piece, box) == part.ravel()[0]
    assert whole(shape) == piece.box
