"""Plans between catalogs: right for every cut, and refused, by name, when either side does not add up."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsx.checkpoint.catalog import Catalog, Entry, Piece
from dsx.checkpoint.copy_plan import check_cover, plan, tiles
from dsx.checkpoint.pieces import PieceIndex, contiguous
from dsx.errors import CheckpointError


def entry(*cuts, shape=(6, 4), state="weight", dtype="float32", name="1.w"):
    """A tensor of which file f<n> holds the n-th (start, shape), row-major."""
    pieces = tuple(Piece(f"f{n}", 0, low, size, contiguous(size)) for n, (low, size) in enumerate(cuts))
    return Entry(name=name, state=state, shape=shape, dtype=dtype, pieces=pieces)


WHOLE = ((0, 0), (6, 4))


def catalog(*entries, root="src"):
    return Catalog(root=Path(root), format="test", entries=entries)


@given(st.lists(st.integers(1, 9), max_size=4).map(tuple), st.integers(1, 30))
def test_tiles_are_consecutive_stretches_of_the_flat_tensor(shape, size):
    flat = np.arange(prod(shape)).reshape(shape)
    found = [flat[tuple(slice(*span) for span in box)].ravel() for box in tiles(shape, size)]
    assert np.concatenate(found).tolist() == list(range(flat.size))
    assert max(map(len, found)) <= size


def test_an_empty_tensor_has_no_tiles():
    assert list(tiles((0, 3), 4)) == []


@given(st.data())
def test_cover_is_proved_exactly_when_every_element_is_held_once(data):
    shape = (6, 4)
    cuts = []
    for _ in range(data.draw(st.integers(1, 4))):
        low = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
        cuts.append((low, tuple(data.draw(st.integers(1, n - at)) for at, n in zip(low, shape, strict=True))))
    count = np.zeros(shape, int)
    for low, size in cuts:
        count[low[0] : low[0] + size[0], low[1] : low[1] + size[1]] += 1
    made = entry(*cuts)
    if (count == 1).all():
        check_cover(made, 0, 5, "x")
        return
    with pytest.raises(CheckpointError) as error:
        check_cover(made, 0, 5, "x")
    named = error.value.what
    spans = named[named.index("[") + 1 : named.index("]")].split(", ")
    region = tuple(slice(*map(int, span.split(":"))) for span in spans)
    assert ((count[region] == 0) if "nothing holds" in named else (count[region] > 1)).all()
    assert "1.w" in error.value.where


def test_a_piece_past_the_tensors_end_is_refused():
    with pytest.raises(CheckpointError, match=r"f1 has \[3:7, 0:4\]"):
        check_cover(entry(((0, 0), (3, 4)), ((3, 0), (4, 4))), 0, 100, "x")


def test_replicas_are_other_copies_not_overlaps():
    source = entry(WHOLE)
    copies = replace(source, pieces=(*source.pieces, Piece("g", 8, (2, 0), (1, 4), (4, 1), 1)))
    made = plan(catalog(copies), catalog(entry(WHOLE), root="dst"))
    assert [
        piece.file for piece, _ in PieceIndex(made.jobs[0].source.read_pieces).overlaps(((2, 3), (0, 4)))
    ] == ["f0"]


def test_what_is_missing_is_named():
    for source, wanted, what in [
        (entry(WHOLE, name="2.w"), entry(WHOLE), r"src: tensor 1.w, weight: it has no such tensor"),
        (entry(WHOLE), entry(WHOLE, state="exp_avg"), r"tensor 1.w, exp_avg: it has weight of it"),
        (entry(((0, 0), (3, 4))), entry(WHOLE), r"tensor 1.w, weight: nothing holds \[3:6, 0:4\]"),
        (entry(((0, 0), (4, 4)), ((2, 0), (4, 4))), entry(WHOLE), r"\[2:4, 0:4\] is held twice, by f0 and"),
        (entry(((0, 0), (6, 2)), shape=(6, 2)), entry(WHOLE), r"its shape is \(6, 2\), the target's is"),
        (entry(WHOLE, dtype="int64"), entry(WHOLE), "int64 cannot become float32"),
        (entry(WHOLE), entry(((0, 0), (5, 4))), r"dst \(to be written\): tensor 1.w.* nothing holds \[5:6"),
    ]:
        with pytest.raises(CheckpointError, match=what):
            plan(catalog(source), catalog(wanted, root="dst"))


def test_weights_and_masters_stand_in_for_each_other():
    weight, master = entry(WHOLE, dtype="bfloat16"), entry(WHOLE, state="master")
    exported = plan(catalog(weight, master), catalog(entry(WHOLE), root="dst"))  # fp32 weights are wanted
    assert exported.jobs[0].source.state == "master"
    assert not exported.jobs[0].converts
    same = plan(catalog(weight, master), catalog(weight, root="dst"))
    assert same.jobs[0].source.state == "weight"
    assert same.notes == ("master of 1 tensors stays behind: the target has no place for it",)
    started = plan(catalog(weight), catalog(weight, master, root="dst"))
    assert started.jobs[1].converts
    assert started.notes == ("master (float32) of 1 tensors is made from weight (bfloat16)",)


def test_tensors_that_the_target_does_not_know_are_mentioned():
    made = plan(catalog(entry(WHOLE), entry(WHOLE, name="9.w")), catalog(entry(WHOLE), root="dst"))
    assert made.notes == ("1 tensors stay behind, which the target does not know: 9.w",)
    assert (made.read_bytes, made.write_bytes) == (96, 96)
    assert [(job, tile) for job, tile, _ in made.units()] == [(0, 0)]
