"""dsx-2: what ranks' files hold, read by safetensors and cut by torch; A -> B -> A; refusals."""

from __future__ import annotations

import json
import math
import shutil
from itertools import permutations
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

import made
from dsx.checkpoint.catalog import Entry
from dsx.checkpoint.execute import ConversionOptions
from dsx.checkpoint.formats import native
from dsx.checkpoint.formats.slices import part_of
from dsx.checkpoint.run.state import restore_random_states, save_random_states
from dsx.errors import CheckpointError
from dsx.parallel.mesh import Mesh


@st.composite
def layouts(draw):
    pp = draw(st.integers(1, 3))
    return {
        "pp": pp,
        "chunks": draw(st.integers(1, 5 // pp)),
        "dp": draw(st.integers(1, 4)),
        "tp": draw(st.sampled_from([1, 2])),
        "zero": draw(st.integers(0, 3)),
        "multiple": draw(st.sampled_from([1, 2, 8])),
    }


families = st.sampled_from(["qwen2", "llama"])
precisions = st.sampled_from([made.BF16, made.FP32, {"weight": "bfloat16"}])


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@settings(max_examples=20, deadline=None)
@given(families, precisions, st.lists(layouts(), min_size=1, max_size=2), st.integers(150, 2000))
def test_any_layout_to_any_other_and_back_is_the_same_bits(tmp_path_factory, family, states, stops, tile):
    root = tmp_path_factory.mktemp("j")
    first = made.layout(family, pp=2, dp=2, zero=1)
    source = made.plain(root / "source", first.params, states, facts={"step": 3})
    made.reshard(source, root / "A", first, tile=tile)
    here = root / "A"
    for number, layout in enumerate([*(made.layout(family, **stop) for stop in stops), first]):
        read = native.catalog_of(here)
        here = root / str(number)
        report = made.reshard(read, here, layout)
        assert report.read_bytes == report.written_bytes == read.num_bytes
        assert report.tiles_checked > 0
    assert contents(here) == contents(root / "A")


PAIRED = [
    {"dp": 1},
    {"dp": 3, "zero": 1},
    {"dp": 2, "tp": 2, "zero": 2, "multiple": 2},
    {"dp": 4, "zero": 3},
    {"pp": 2, "dp": 2, "zero": 3, "multiple": 2},
    {"pp": 2, "dp": 2, "tp": 2, "zero": 1, "multiple": 1},
    {"pp": 2, "chunks": 2, "tp": 2, "zero": 1},
    {"pp": 2, "chunks": 2, "dp": 2, "placement": "v", "zero": 2},
    {"pp": 3, "tp": 2, "dp": 2, "zero": 0},
    {"chunks": 5, "tp": 2, "dp": 3, "zero": 3},
]
"""Every ordered pair of them changes something else: 90 conversions."""


@pytest.mark.slow
def test_every_pair_of_layouts_gives_what_the_layout_itself_gives(tmp_path):
    layouts = [made.layout("qwen2", **paired) for paired in PAIRED]
    source = made.plain(tmp_path / "source", layouts[0].params, made.BF16)
    for number, layout in enumerate(layouts):
        made.reshard(source, tmp_path / str(number), layout, tile=2000)
    expected = [contents(tmp_path / str(number)) for number in range(len(layouts))]
    for a, b in permutations(range(len(layouts)), 2):
        made.reshard(native.catalog_of(tmp_path / str(a)), tmp_path / "out", layouts[b])
        assert contents(tmp_path / "out") == expected[b], (PAIRED[a], PAIRED[b])
        shutil.rmtree(tmp_path / "out")


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_rank_files_hold_what_the_layout_says_and_every_element_once(tmp_path, family, zero):
    """Read back with safetensors, placed by the ranks' own coordinates and torch's slicing."""
    layout = made.layout(family, pp=2, dp=3, tp=2, chunks=2, zero=zero)
    source = made.plain(tmp_path / "source", layout.params, made.BF16)
    made.reshard(source, tmp_path / "out", layout)
    bits = made.random_bits(layout.params, made.BF16)
    seen = {key: np.zeros(array.shape, int) for key, array in bits.items()}
    for rank in range(layout.mesh.size):
        path = tmp_path / "out" / f"rank_{rank:05d}.safetensors"
        tensors = load_file(path) if path.exists() else {}
        at = layout.mesh.coords(rank)
        held = {holding.spec.name: holding for holding in layout.holdings(rank)}
        for key, tensor in tensors.items():
            state, name = key.split("/")
            spec = held[name].spec
            there = local(spec, bits[name, state], at["tp"])
            start, stop = held[name].weights if state == "weight" else held[name].state
            mine = made.bits_of(tensor).reshape(-1)
            window = np.lib.stride_tricks.sliding_window_view(there[start:stop], len(mine))
            (place,) = np.flatnonzero((window == mine.astype(np.int64) + 1).all(1))[:1]
            index = local(spec, np.arange(spec.numel).reshape(spec.shape), at["tp"])[start:stop]
            index = index[place : place + len(mine)]
            assert (index > 0).all()  # no padding
            np.add.at(seen[name, state].reshape(-1), index - 1, 1)
            assert math.prod(spec.local_shape(layout.mesh.at(rank))) == there.size
    assert all((count == 1).all() for count in seen.values())


def local(spec, values, tp_rank):
    """A rank's flat local tensor at tp = 2, by torch's slicing; one is added, so that 0 is padding."""
    whole = torch.from_numpy(values.astype(np.int64)) + 1
    return part_of(spec, whole, Mesh.of(tp=2).at(tp_rank)).reshape(-1).numpy()


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_ranks_of_a_large_model_write_about_as_much_each(zero):
    config = dict(made.CONFIGS["llama"], hidden_size=1024, intermediate_size=4096, vocab_size=32000)
    layout = made.layout(config, pp=2, dp=4, tp=2, zero=zero)
    wanted = {
        spec.name: [
            Entry(name=spec.name, state=state, shape=spec.shape, dtype=dtype, pieces=())
            for state, dtype in made.BF16.items()
        ]
        for spec in layout.params
    }
    written = []
    for rank in range(layout.mesh.size):
        sizes = dict.fromkeys(made.BF16, 0)
        for block in native.blocks_of(layout, rank, wanted):
            sizes[block.entry.state] += block.numel
        written.append([sizes["weight"], sizes["master"]])
    for pp_rank in range(2):
        stage = np.array(written[pp_rank * 8 : pp_rank * 8 + 8])
        assert (stage.max(0) - stage.min(0) < 0.02 * stage.mean(0)).all()


def test_a_bf16_run_becomes_fp32_from_its_masters_and_the_other_way_round(tmp_path):
    layout = made.layout("llama", dp=2, zero=2)
    bits = made.random_bits(layout.params, made.BF16, seed=3)
    source = made.plain(tmp_path / "source", layout.params, made.BF16, seed=3)
    report = made.reshard(source, tmp_path / "fp32", layout, precision="fp32")
    assert "weight (float32) of 21 tensors is made from master (float32)" in report.notes
    catalog = native.catalog_of(tmp_path / "fp32")
    assert {entry.state for entry in catalog.entries} == {"weight", "exp_avg", "exp_avg_sq"}
    assert catalog.facts["precision"] == "fp32"
    made.reshard(catalog, tmp_path / "bf16", made.layout("llama"), precision="bf16")
    tensors = load_file(tmp_path / "bf16" / "rank_00000.safetensors")
    for spec in layout.params:
        master = torch.from_numpy(bits[spec.name, "master"].view("<i4")).view(torch.float32)
        assert tensors[f"master/{spec.name}"].view(torch.int32).equal(master.view(torch.int32))
        weight, expected = tensors[f"weight/{spec.name}"], master.to(torch.bfloat16)
        assert weight.isnan().equal(expected.isnan())
        known = ~expected.isnan()
        assert weight.view(torch.int16)[known].equal(expected.view(torch.int16)[known])


def test_facts_and_random_states_come_along(tmp_path):
    layout = made.layout("qwen2", dp=2)
    facts = {
        "step": 7,
        "param_groups": [{"names": ["a"], "lr": 0.1, "betas": [0.9, 0.95], "step": 7}],
        "lr_scheduler": {"last_lr": [1e-3], "base": None},
        "random_files": {"0": "dsx_random_0.safetensors", "1": "r1"},
        "client_state": {"text": "ü"},
    }
    source = made.plain(tmp_path / "source", layout.params, made.FP32, facts=facts)
    (tmp_path / "source" / "dsx_random_0.safetensors").write_bytes(b"zero")
    (tmp_path / "source" / "r1").write_bytes(b"one")
    made.reshard(source, tmp_path / "out", made.layout("qwen2", tp=2))
    read = native.catalog_of(tmp_path / "out").facts
    assert {key: read[key] for key in facts if key != "random_files"} == {
        key: facts[key] for key in facts if key != "random_files"
    }
    assert read["random_files"]["1"] == "dsx_random_1.safetensors"  # whatever the mesh was: it is not known
    assert (tmp_path / "out" / "dsx_random_1.safetensors").read_bytes() == b"one"
    assert read["mesh"] == {"pp": 1, "dp": 1, "tp": 2}


def test_random_states_of_older_checkpoints_have_their_own_digest(tmp_path):
    """A manifest that says nothing of the file: what the file says of itself is held, by conversions too."""
    layout, path = made.layout("qwen2"), tmp_path / "source" / "dsx_random_0.safetensors"
    facts = {"random_files": {"0": path.name}}
    source = made.plain(tmp_path / "source", layout.params, {"weight": "bfloat16"}, facts=facts)
    save_random_states(path.parent, 0)
    good = path.read_bytes()
    made.reshard(source, tmp_path / "out", layout)
    assert (tmp_path / "out" / path.name).read_bytes() == good
    flipped = good[:-1] + bytes([good[-1] ^ 1])
    for bad in (flipped, good[:-8], good[:9] + b"\0" + good[10:]):
        path.write_bytes(bad)
        with pytest.raises(
            CheckpointError, match=r"dsx_random_0.safetensors: random states of rank 0: they are not"
        ):
            made.reshard(source, tmp_path / "more", layout)
    assert not (tmp_path / "more").exists()


def test_random_states_go_to_the_ranks_in_the_corresponding_places(tmp_path):
    layout = made.layout("qwen2", pp=2, dp=2, tp=2)
    files = {str(rank): f"r{rank}" for rank in range(8)}
    facts = {"mesh": {"pp": 2, "dp": 2, "tp": 2}, "random_files": files}
    source = made.plain(tmp_path / "source", layout.params, {"weight": "bfloat16"}, facts=facts)
    for rank in range(8):
        (tmp_path / "source" / f"r{rank}").write_bytes(str(layout.mesh.coords(rank)).encode())
    made.reshard(source, tmp_path / "same", layout)
    made.reshard(source, tmp_path / "other", made.layout("qwen2", pp=2, dp=3))

    def states(folder):
        named = native.catalog_of(folder).facts["random_files"]
        return {int(rank): eval((folder / file).read_text()) for rank, file in named.items()}

    assert states(tmp_path / "same") == {rank: layout.mesh.coords(rank) for rank in range(8)}
    # A third replica was not there, and has nobody's.
    places = {3 * pp + dp: {"pp": pp, "dp": dp, "tp": 0} for pp in range(2) for dp in range(2)}
    assert states(tmp_path / "other") == places


def test_ranks_that_were_not_there_draw_numbers_of_their_own(tmp_path):
    for saved, degrees, wanted in (
        ({"dp": 4}, {"dp": 2, "cp": 2}, [0, 1, 2, 3]),
        ({"dp": 2, "cp": 2}, {"cp": 2, "tp": 2}, [0, 0, 1, 1]),
        ({"dp": 2, "tp": 2}, {"pp": 2, "cp": 2}, [0, 2, None, None]),
    ):
        was, mesh = dict(Mesh.of(**saved).axes), Mesh.of(**degrees)
        assert [native.corresponding(was, mesh, rank) for rank in range(mesh.size)] == wanted
    torch.manual_seed(3)
    save_random_states(tmp_path, 0)
    facts = {"mesh": dict(Mesh.of().axes), "random_files": {"0": native.random_file(0)}}
    source = made.plain(tmp_path / "source", made.layout("qwen2").params, made.FP32, facts=facts)
    shutil.copy(tmp_path / native.random_file(0), tmp_path / "source")
    drawn, mesh = [], Mesh.of(pp=2, cp=3, tp=2)
    for rank in range(mesh.size):
        restore_random_states(SimpleNamespace(groups=SimpleNamespace(mesh=mesh, rank=rank)), source)
        drawn.append(float(torch.rand(())))
    assert drawn[0::2] == drawn[1::2]  # tensor-parallel ranks
    torch.manual_seed(3)
    assert drawn[0] == float(torch.rand(()))
    assert len(set(drawn)) == 6


def test_the_manifest_refuses_what_was_changed(tmp_path):
    layout = made.layout("qwen2")
    source = made.plain(tmp_path / "source", layout.params, made.FP32)
    made.reshard(source, tmp_path / "out", layout)
    file = tmp_path / "out" / "dsx.json"
    text = file.read_text()
    content = json.loads(text)
    for change, what in [
        (text[: len(text) // 2], "cut short"),
        (text.replace('"step"', '"stop"').replace('"fp32"', '"bf16"'), "does not have its digest"),
        ("[]", "not a description"),
        (json.dumps(content | {"format": 9}), "this reader knows format 2"),
    ]:
        file.write_text(change)
        with pytest.raises(CheckpointError, match=what):
            native.catalog_of(tmp_path / "out")
    file.unlink()
    with pytest.raises(CheckpointError, match="no such file"):
        native.catalog_of(tmp_path / "out")


def test_too_little_memory_is_said_with_the_amount_needed(tmp_path):
    layout = made.layout("qwen2")
    source = made.plain(tmp_path / "source", layout.params, made.FP32)
    with pytest.raises(CheckpointError, match=r"--memory 16MiB: one worker needs 80 MiB"):
        made.reshard(source, tmp_path / "out", layout, options=ConversionOptions(memory_bytes=16 << 20))
    assert not list(tmp_path.glob("out*"))
