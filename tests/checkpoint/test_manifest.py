import dataclasses
import hashlib
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsx.checkpoint.manifest import Manifest, TensorEntry
from dsx.errors import CheckpointError
from dsx.spec.param import Init, ParamSpec

QKV = ParamSpec(
    name="1.attention.qkv.weight",
    layer=1,
    shape=(64, 32),
    init=Init(kind="normal", std=0.02),
    hf=("q", "k", "v"),
    split=0,
    parts=(32, 16, 16),
)
WORD = ParamSpec(
    name="0.word.weight",
    layer=0,
    shape=(1009, 32),
    init=Init(kind="normal", std=0.02),
    hf=("wte",),
    split=0,
    pad_multiple=64,
    tie="word",
)


def a_manifest(**changes):
    fields = {
        "versions": {"dsx": "0.1.0", "deepspeed": "0.19.8", "torch": "2.13.0"},
        "mesh": {"pp": 2, "dp": 2, "tp": 2},
        "chunks": 2,
        "stage_bounds": (0, 2, 3, 5, 7),
        "zero_stage": 3,
        "precision": "bf16",
        "schedule": "interleaved",
        "tensors": (TensorEntry.of(WORD, "bfloat16"), TensorEntry.of(QKV, "bfloat16")),
        "step": 50,
        "global_batch_size": 16,
        "tokens": 204_800,
        "data_cursor": 800,
        "seed": 1234,
        "model": {"family": "llama", "num_heads": 4, "rope": {"theta": 10000.0}, "residual_dropout": 0.0},
        "wandb_run_id": "abc123",
    }
    return Manifest(**fields | changes)


def entries(**changes):
    first, second = a_manifest().tensors
    return (first, dataclasses.replace(second, **changes))


def test_a_manifest_comes_back_from_its_file(tmp_path):
    manifest = a_manifest()
    path = tmp_path / "dsx.json"
    path.write_text(manifest.to_json())
    back = Manifest.read(path)
    assert back == manifest
    assert back.source == str(path)
    assert back.world_size == 8
    assert back.to_json() == manifest.to_json()
    back.require_same_model(manifest)
    back.require_same_layout(manifest)


def test_a_layer_list_of_the_users_own_needs_no_model(tmp_path):
    manifest = a_manifest(model=None, seed=None, wandb_run_id=None, tensors=())
    assert Manifest.from_json(manifest.to_json(), source="x") == manifest


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.text(), st.lists(st.integers(1, 2**40), max_size=4)), unique_by=lambda t: t[0]),
    st.dictionaries(st.text(), st.floats(allow_nan=False, allow_infinity=False) | st.none() | st.booleans()),
)
def test_any_names_shapes_and_model_fields_survive(tensors, model):
    manifest = a_manifest(
        tensors=tuple(TensorEntry(name=name, shape=tuple(shape), dtype="float32") for name, shape in tensors),
        model=model,
    )
    assert Manifest.from_json(manifest.to_json(), source="x") == manifest


def test_the_digest_is_the_sha256_of_sorted_names_and_shapes():
    text = '[["0.word.weight",[1009,32]],["1.attention.qkv.weight",[64,32]]]'
    expected = hashlib.sha256(text.encode()).hexdigest()
    manifest = a_manifest()
    assert manifest.model_digest == expected
    assert (
        dataclasses.replace(manifest, tensors=manifest.tensors[::-1], mesh={"tp": 1}).model_digest == expected
    )
    assert json.loads(manifest.to_json())["model_digest"] == expected
    assert dataclasses.replace(manifest, tensors=entries(shape=(32, 64))).model_digest != expected


def test_a_file_truncated_anywhere_is_refused(tmp_path):
    text = a_manifest().to_json()
    path = tmp_path / "dsx.json"
    for length in range(len(text) - 1):  # all but the last newline
        path.write_text(text[:length])
        with pytest.raises(CheckpointError, match="cut short") as caught:
            Manifest.read(path)
        assert caught.value.where == str(path)


def edited(**changes):
    content = json.loads(a_manifest().to_json())
    for key, value in changes.items():
        if value is ...:
            del content[key]
        else:
            content[key] = value
    return json.dumps(content)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1, 2]", "not a description of a dsx checkpoint"),
        ('{"train_batch_size": 8}', "not a description of a dsx checkpoint"),
        (edited(format=2), r"format = 2: this dsx reads format 1.*0\.1\.0"),
        (edited(format="1"), "this dsx reads format 1"),
        (edited(step=...), "key step"),
        (edited(chunks="two"), "key chunks"),
        (edited(chunks="2"), "key chunks"),
        (edited(mesh={"pp": 2.5}), "key mesh.pp"),
        (edited(surprise=1), "key surprise"),
        (edited(tensors=[{"name": "w"}]), "key tensors.0.shape"),
        (edited(tensors=[{"name": "w", "shape": [1], "dtype": "float32", "x": 1}]), r"key tensors.0.x"),
        (edited(tensors=[]), "model_digest"),
        (edited(model_digest="0" * 64), "model_digest = '0000"),
        (edited(model_digest=...), "model_digest = None"),
    ],
)
def test_a_wrong_file_is_refused_by_name_and_key(tmp_path, text, message):
    path = tmp_path / "dsx.json"
    path.write_text(text)
    with pytest.raises(CheckpointError, match=message) as caught:
        Manifest.read(path)
    assert str(path) in caught.value.where


def test_missing_and_unreadable_files_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match="no such file"):
        Manifest.read(tmp_path / "dsx.json")
    with pytest.raises(CheckpointError, match="cannot be read"):
        Manifest.read(tmp_path)
    (tmp_path / "dsx.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(CheckpointError, match="cannot be read"):
        Manifest.read(tmp_path / "dsx.json")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"tensors": entries(shape=(96, 32), parts=(32, 32, 32))},
            r"\(64, 32\) in the.*\(96, 32\) here",
        ),
        ({"tensors": entries(parts=(16, 24, 24))}, r"parts \(32, 16, 16\) .* \(16, 24, 24\)"),
        ({"tensors": entries(tie="word")}, "tie None in the checkpoint, .*word here"),
        (
            {"tensors": a_manifest().tensors[:1]},
            r"qkv.weight \(64, 32\) is in the checkpoint alone",
        ),
        ({"tensors": entries(name="1.other")}, "1.other .* is in this run's model alone"),
        ({"tensors": ()}, "0.word.weight"),
        ({"model": a_manifest().model | {"num_heads": 8}}, "num_heads is 4 in the checkpoint, 8 here"),
        ({"model": a_manifest().model | {"rope": None}}, r"rope is {'theta': 10000.0} .*None here"),
        ({"model": a_manifest().model | {"new": 1}}, "new is None in the checkpoint, 1 here"),
    ],
)
def test_another_model_is_refused_with_both_values(changes, message):
    saved = dataclasses.replace(a_manifest(), source="runs/a/step50/dsx.json")
    with pytest.raises(CheckpointError, match=message) as caught:
        saved.require_same_model(a_manifest(**changes))
    assert caught.value.where == "runs/a/step50/dsx.json"


def test_many_differences_are_counted_not_listed():
    tensors = tuple(TensorEntry(name=f"{i}.w", shape=(2,), dtype="float32") for i in range(100))
    with pytest.raises(CheckpointError, match="and 99 more differences") as caught:
        a_manifest(tensors=tensors).require_same_model(a_manifest())
    assert len(str(caught.value)) < 600


def test_what_a_resumed_run_may_change_is_accepted():
    model = a_manifest().model | {"residual_dropout": 0.1, "max_positions": 4096}
    other = a_manifest(
        model=model, schedule="gpipe", step=0, seed=1, versions={}, global_batch_size=8, wandb_run_id=None
    )
    a_manifest().require_same_model(other)
    a_manifest().require_same_layout(other)
    a_manifest().require_same_model(a_manifest(mesh={"pp": 1, "dp": 1, "tp": 1}, model=None))


@pytest.mark.parametrize(
    ("changes", "saved", "here"),
    [
        ({"mesh": {"pp": 2, "dp": 1, "tp": 4}}, "dsx.parallel.tensor = 2", "dsx.parallel.tensor = 4"),
        ({"mesh": {"pp": 4, "dp": 1, "tp": 2}}, "dsx.parallel.pipeline = 2", "dsx.parallel.pipeline = 4"),
        ({"mesh": {"pp": 2, "dp": 4, "tp": 2}}, "data-parallel ranks = 2", "data-parallel ranks = 4"),
        ({"chunks": 1}, "dsx.parallel.chunks = 2", "dsx.parallel.chunks = 1"),
        ({"stage_bounds": (0, 1, 3, 5, 7)}, r"\(0, 2, 3, 5, 7\)", r"\(0, 1, 3, 5, 7\)"),
        ({"zero_stage": 1}, "zero_optimization.stage = 3", "zero_optimization.stage = 1"),
        ({"precision": "fp32"}, "precision = bf16", "precision = fp32"),
        ({"tensors": entries(pad_multiple=128)}, r"vocabulary padding = \[1, 64\]", r"= \[64, 128\]"),
    ],
)
def test_another_layout_is_refused_with_both_values_and_a_way_out(changes, saved, here):
    with pytest.raises(CheckpointError, match=f"saved with .*{saved}.*this run has .*{here}") as caught:
        a_manifest().require_same_layout(a_manifest(**changes))
    assert "start with" in caught.value.fix
    assert "Hugging Face" in caught.value.fix
