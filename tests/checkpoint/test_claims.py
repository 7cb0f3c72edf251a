"""What a checkpoint says of itself is held to what its files hold, at once, with one error that names it."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from checkpoint.hostile_originals import write_originals
from dsx.checkpoint.execute import ConversionOptions
from dsx.checkpoint.formats import native
from dsx.checkpoint.open import open_checkpoint
from dsx.checkpoint.reshard import WantedTarget, prepare
from dsx.errors import CheckpointError

pytestmark = pytest.mark.timeout(60)  # a loop over what is claimed takes hours

_BIG = 10**15
_OUTER = {
    "islands": 2, "name": "x", "version": 1, "progress": 2, "seen": {},
    "facts": {"step": 0, "lr_scheduler": None},
}  # fmt: skip


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    home = tmp_path_factory.mktemp("originals") / "all"
    write_originals(home)
    return home


@pytest.fixture
def copy_of(originals, tmp_path):
    return lambda name: Path(shutil.copytree(originals / name, tmp_path / name))


def _set(content, path, value):
    for key in path[:-1]:
        content = content[key]
    content[path[-1]] = value


def _manifest(folder: Path, path: tuple, value: object) -> None:
    """Change a value of ``dsx.json`` and its digest with it."""
    content = json.loads((folder / "dsx.json").read_text())
    content.pop("digest")
    _set(content, path, value)
    content["digest"] = native._digest(content)
    (folder / "dsx.json").write_text(json.dumps(content))


MANIFESTS = [
    (("mesh", "dp"), _BIG, "ranks"),
    (("mesh", "dp"), 10**9, "ranks"),
    (("mesh", "tp"), "2", "mesh.tp"),
    (("stage_bounds",), [0, _BIG], "stage_bounds"),
    (("stage_bounds",), [0, 3, 2], "stage_bounds"),
    (("model", "num_layers"), 10**9, "model"),
    (("tensors", 0, "layer"), _BIG, "tensor 0.word.weight"),
    (("tensors", 0, "shape"), [_BIG, 4], "0.word.weight"),
    (("tensors", 0, "states", "weight", "pieces"), [], "0.word.weight"),
    (("tensors", 0, "split"), 7, "0.word.weight"),
    (("tensors", 0, "name"), "a\0b", "a"),
    (("tile_elements",), _BIG, "tile_elements"),
    (("chunks",), {}, "chunks"),
    (("step",), "nine", "step"),
    (("step",), -1, "step"),
    (("param_groups", 0, "names"), [["a"]], "param_groups.0.names"),
    (("param_groups", 0, "step"), "x", "param_groups.0.step"),
    (("random_files",), {"0": 7}, "random_files"),
    (("tied",), {"word": [0, _BIG]}, "tied"),
    (("lr_scheduler",), {"__dsx__": "tensor"}, "lr_scheduler"),
    (("client_state",), json.loads('{"a":' * 200 + "1" + "}" * 200), "nested"),
    (("client_state",), {"a": "\ud800"}, "Unicode"),
    (("outer",), {"islands": 2}, "outer.name"),
    (("outer",), _OUTER | {"version": -1}, "outer.version"),
    (("outer",), _OUTER | {"facts": {"step": "x", "lr_scheduler": None}}, "outer.facts.step"),
    (("outer",), _OUTER | {"facts": {"step": _BIG, "lr_scheduler": None}}, "outer.facts.step"),
    (("outer",), _OUTER, "has no outer_momentum and no outer_weights"),
]


@pytest.mark.parametrize(("path", "value", "named"), MANIFESTS, ids=lambda one: repr(one)[:40])
def test_a_manifest_that_claims_what_its_files_do_not_bear_out(dsx, copy_of, tmp_path, path, value, named):
    folder = copy_of("dsx")
    _manifest(folder, path, value)
    for arguments in (("inspect", folder), ("reshard", folder, tmp_path / "out")):
        code, _, err = dsx(*arguments)
        assert code == (1 if arguments[0] == "inspect" else 2)
        assert err.startswith(f"dsx: {folder}")
        assert named in err
        assert len(err.splitlines()) == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "text", ['{"format": 2, "format": 2}', '{"format": NaN}', '{"format": 1e999}', "[" * 10**5]
)
def test_a_manifest_that_is_no_json(dsx, copy_of, text):
    folder = copy_of("dsx")
    (folder / "dsx.json").write_text(text)
    code, _, err = dsx("inspect", folder)
    assert (code, len(err.splitlines())) == (1, 1)
    assert "not JSON, or cut short" in err


STOCK = [
    ("zero0", "mp_rank_00_model_states.pt", ("dp_world_size",), _BIG, "ranks"),
    ("zero0", "mp_rank_00_model_states.pt", ("mp_world_size",), _BIG, "is missing, and 999"),
    ("zero1", "mp_rank_00_model_states.pt", ("dp_world_size",), _BIG, "is missing, and 999"),
    ("zero3", "zero_pp_rank_0_mp_rank_00_model_states.pt", ("dp_world_size",), 10**9, "is missing, and 999"),
    ("zero1", "mp_rank_00_model_states.pt", ("dp_world_size",), 10**400, "dp_world_size"),
    ("zero1", "mp_rank_00_model_states.pt", ("global_steps",), "nine", "global_steps"),
    ("zero1", "mp_rank_00_model_states.pt", ("global_steps",), float("nan"), "global_steps"),
    ("zero1", "mp_rank_00_model_states.pt", ("param_shapes",), 7, "param_shapes"),
    (
        "zero0",
        "mp_rank_00_model_states.pt",
        ("module", "5.norm.weight"),
        torch.zeros(1).expand(10**9),
        "5.norm.weight",
    ),
]


@pytest.mark.parametrize(("name", "file", "path", "value", "named"), STOCK, ids=lambda one: repr(one)[:40])
def test_a_stock_checkpoint_that_claims_what_its_files_do_not_bear_out(
    dsx, copy_of, name, file, path, value, named
):
    folder = copy_of(name)
    content = torch.load(folder / file, weights_only=False)
    _set(content, path, value)
    torch.save(content, folder / file)
    code, _, err = dsx("inspect", folder)
    assert (code, len(err.splitlines())) == (1, 1)
    assert named in err


def test_a_config_that_has_more_layers_than_the_files_have_tensors(dsx, copy_of, tmp_path):
    folder = copy_of("hf")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3 * 10**6}))
    code, _, err = dsx("reshard", folder, tmp_path / "out", "--to", "tp=1")
    assert code == 2
    assert "3000000 layers" in err


def test_a_name_that_begins_with_a_number_is_no_layer_that_far(dsx, tmp_path):
    (tmp_path / "in").mkdir()
    for number in ("1000000000000", "9" * 5000, "999999"):
        torch.save({f"{number}.weight": torch.ones(2)}, tmp_path / "in" / "pytorch_model.bin")
        code, _, err = dsx("reshard", tmp_path / "in", tmp_path / f"out{len(number)}")
        assert code == (2 if len(number) == 6 else 0), err


def test_a_states_name_does_not_lead_out_of_the_target(dsx, copy_of, tmp_path):
    folder = copy_of("dsx")
    content = json.loads((folder / "dsx.json").read_text())
    content.pop("digest")
    for tensor in content["tensors"]:
        tensor["states"]["../../../../evil"] = tensor["states"].pop("exp_avg")
    content["digest"] = native._digest(content)
    (folder / "dsx.json").write_text(json.dumps(content))
    code, _, err = dsx("reshard", folder, tmp_path / "out" / "deep" / "deeper", "--to", "universal")
    assert code == 2
    assert "leads elsewhere" in err
    assert not list(tmp_path.rglob("*evil*"))


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("dsx", "dsx.json"),
        ("dsx", "dsx_random_0.safetensors"),
        ("zero1", "mp_rank_00_model_states.pt"),
        ("dcp", ".metadata"),
        ("hf", "model.safetensors"),
        ("hf", "config.json"),
        ("bin", "pytorch_model.bin"),
        ("megatron", "common.pt"),
    ],
)
def test_a_pipe_where_a_file_should_be_is_not_waited_for(dsx, copy_of, name, file):
    folder = copy_of(name)
    (folder / file).unlink()
    os.mkfifo(folder / file)
    code, _, err = dsx("inspect", folder)
    ignored = file in ("common.pt", "config.json")  # a folder may have none
    assert (code, len(err.splitlines())) == ((0, 0) if ignored else (1, 1))


def test_a_pipe_in_place_of_latest_is_not_waited_for(dsx, originals, tmp_path):
    shutil.copytree(originals / "dsx", tmp_path / "checkpoints" / "one")
    os.mkfifo(tmp_path / "checkpoints" / "latest")
    code, _, err = dsx("inspect", tmp_path / "checkpoints")
    assert (code, len(err.splitlines())) == (1, 1)


@pytest.mark.parametrize(
    ("pattern", "what"),
    [
        ("(a+)+", "for ever"),
        ("a*a*a*a*b", "for ever"),
        ("(", "no regular expression"),
        ("a" * 2000, "for ever"),
    ],
)
def test_expressions_of_a_file_do_not_run_for_ever(dsx, copy_of, pattern, what):
    folder = copy_of("tensor")
    for path in folder.glob("mp_rank_*"):
        content = torch.load(path, weights_only=False)
        content["universal_checkpoint_info"]["tp_replicated_parameter_patterns"] = [pattern]
        torch.save(content, path)
    code, _, err = dsx("inspect", folder)
    assert (code, len(err.splitlines())) == (1, 1)
    assert what in err


def test_a_name_is_one_line_of_a_table(dsx, tmp_path):
    (tmp_path / "in").mkdir()
    torch.save({"a\ndsx: all is well": torch.ones(2)}, tmp_path / "in" / "pytorch_model.bin")
    code, out, _ = dsx("inspect", tmp_path / "in")
    assert code == 0
    assert "a\\ndsx: all is well" in out
    assert not any(line.startswith("dsx:") for line in out.splitlines())


@pytest.mark.parametrize("what", ["gone", "cut"])
@pytest.mark.parametrize("name", ["dsx", "zero1", "dcp", "hf"])
def test_a_source_that_goes_away_midway_is_one_error(copy_of, tmp_path, name, what):
    folder = copy_of(name)
    conversion = prepare(open_checkpoint(folder), tmp_path / "out", WantedTarget(format="dcp"))

    def spoil(_: int) -> None:
        for path in folder.iterdir():
            if what == "gone":
                path.unlink()
            else:
                os.truncate(path, 10)

    with pytest.raises(CheckpointError, match=str(folder)):
        conversion.run(ConversionOptions(workers=1, progress=spoil))
    assert not (tmp_path / "out").exists()


def test_a_flipped_bit_in_random_states_is_found_by_conversions(dsx, copy_of, tmp_path):
    folder = copy_of("dsx")
    path = folder / "dsx_random_2.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    code, _, err = dsx("reshard", folder, tmp_path / "out")
    assert code == 2
    assert "dsx_random_2.safetensors: random states of rank 2: they are not what was written" in err
    code, out, err = dsx("inspect", "--verify", folder)
    assert (code, len(err.splitlines())) == (1, 1)
    assert "dsx_random_2.safetensors: all of it" in err
    assert ", 1 wrong" in out
