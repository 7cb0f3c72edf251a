"""What checkpoints of others hold beside equal flat buffers: kept on every way, or refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint import stock_checkpoints
from checkpoint.stock_checkpoints import Stock, read_entry
from dsx.checkpoint.catalog import Catalog
from dsx.checkpoint.execute import ConversionOptions
from dsx.checkpoint.formats.deepspeed.cut import Rules
from dsx.checkpoint.formats.deepspeed.reader import catalog_of
from dsx.checkpoint.layouts import TargetDegrees
from dsx.checkpoint.open import open_checkpoint
from dsx.checkpoint.reshard import WantedTarget, prepare
from dsx.errors import CheckpointError

MODEL = "mp_rank_00_model_states.pt"
ENGINE = WantedTarget(format="deepspeed", degrees=TargetDegrees(data=3, zero=3))
WAYS = {
    "deepspeed": ENGINE,
    "plain": WantedTarget(format="deepspeed", degrees=TargetDegrees(data=1, zero=0)),
    "universal": WantedTarget(format="universal"),
    "dcp": WantedTarget(format="dcp"),
    "dsx": WantedTarget(degrees=TargetDegrees(data=2, zero=2)),
}


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stock_checkpoints.save(Stock(zero=1), tmp_path_factory.mktemp("stock"))[0]


@pytest.fixture
def changed(stock: Path, tmp_path: Path) -> Callable[..., Path]:
    """A copy with each optimizer file, or the model's, changed."""

    def make(edit: Callable[[dict[str, Any]], object], pattern: str = "*optim_states.pt") -> Path:
        path = tmp_path / "changed"
        if not path.exists():
            shutil.copytree(stock, path)
        for file in path.glob(pattern):
            content = torch.load(file, weights_only=False)
            edit(content.get("optimizer_state_dict", content) if pattern != MODEL else content)
            torch.save(content, file)
        return path

    return make


def convert(source: Catalog, target: Path, wanted: WantedTarget) -> Catalog:
    prepare(source, target, wanted).run(ConversionOptions(workers=1))
    return open_checkpoint(target)


def settings(catalog: Catalog) -> dict[str, dict[str, Any]]:
    """Hyperparameters and numbers of every tensor."""
    groups = catalog.facts["param_groups"]
    return {
        name: {k: v for k, v in group.items() if k != "names"} for group in groups for name in group["names"]
    }


@pytest.mark.parametrize("way", WAYS)
def test_numbers_settings_scale_and_roles_come_along(way: str, changed: Any, tmp_path: Path) -> None:
    """NAdam's mu_product is one number per tensor; a learning rate may be a tensor; a scale dynamic."""

    def edit(content: dict[str, Any]) -> None:
        base = content["base_optimizer_state"]
        base["param_groups"][1]["lr"] = torch.tensor(0.125)
        for number, state in base["state"].items():
            state["mu_product"] = torch.tensor(0.5 + number)

    source = catalog_of(changed(edit))
    scale = {"scale": 512.0, "cur_scale": 512.0, "dynamic": True, "cur_iter": 3, "last_overflow_iter": 2}
    source = replace(source, facts={**source.facts, "loss_scale": scale, "precision": "fp16"})
    assert [group["numbers"] for group in source.facts["param_groups"]] == [
        {"mu_product": 0.5},
        {"mu_product": 1.5},
    ]
    assert settings(source)["norm.bias"]["lr"] == 0.125
    assert source.facts.get("optimizer") is None  # exp_avg and exp_avg_sq, but no Adam
    made = convert(source, tmp_path / way, WAYS[way])
    assert settings(made) == settings(source)
    known = {
        key: value for key, value in made.facts["loss_scale"].items() if key in scale and key != "dynamic"
    }
    assert known == {key: value for key, value in scale.items() if key != "dynamic"}
    roles = {entry.name: entry.role for entry in source.entries}
    assert {entry.name: entry.role for entry in made.entries} == roles
    assert roles["blocks.0.seen"] == "buffer"  # of floats
    assert roles["blocks.0.frozen"] == "frozen"


def test_groups_without_zero_keep_their_names(stock: Path, tmp_path: Path) -> None:
    """In another order than the model's, and of tensors that look alike."""
    source = catalog_of(stock)
    names = [name for group in source.facts["param_groups"] for name in group["names"]]
    first = source.facts["param_groups"][0]
    groups = [{**first, "names": names[::2][::-1], "lr": 0.5}, {**first, "names": names[1::2], "lr": 0.25}]
    source = replace(source, facts={**source.facts, "param_groups": groups})
    made = convert(source, tmp_path / "plain", WAYS["plain"])
    assert [group["names"] for group in made.facts["param_groups"]] == [group["names"] for group in groups]
    for entry in source.entries:
        if entry.state.startswith("exp_avg"):
            assert torch.equal(read_entry(made, made.by_key[entry.key]), read_entry(source, entry))

    def named(content: dict[str, Any]) -> None:  # as torch's optimizers that were made with names are
        content["param_shapes"] = None
        for group, names in zip(content["optimizer"]["param_groups"], told, strict=True):
            group["param_names"] = names

    told = [group["names"] for group in groups]
    content = torch.load(made.root / MODEL, weights_only=False)
    named(content)
    torch.save(content, made.root / MODEL)
    assert [group["names"] for group in catalog_of(made.root).facts["param_groups"]] == told
    told = [[*told[0][1:], told[0][0]], told[1]]
    named(content)
    torch.save(content, made.root / MODEL)
    with pytest.raises(CheckpointError, match="no order of the model's parameters has"):
        catalog_of(made.root)


def test_numbers_that_a_flat_buffer_cannot_hold(stock: Path, tmp_path: Path) -> None:
    source = catalog_of(stock)
    one, other = source.facts["param_groups"]
    steps = {name: 3.0 + (name == one["names"][1]) for name in one["names"]}
    source = replace(source, facts={**source.facts, "param_groups": [{**one, "step": steps}, other]})
    with pytest.raises(CheckpointError, match=r"\{'step': 3.0\} for one and \{'step': 4.0\} for the other"):
        prepare(source, tmp_path / "flat", WantedTarget(format="deepspeed"))
    made = convert(source, tmp_path / "plain", WAYS["plain"])
    assert made.facts["param_groups"][0]["step"] == steps


def test_elastic_checkpoints_have_no_hyperparameters(changed: Any, tmp_path: Path) -> None:
    def elastic(content: dict[str, Any]) -> None:
        flats = content["single_partition_of_fp32_groups"]
        states = content["base_optimizer_state"]["state"]
        content["base_optimizer_state"] = [
            {k: v[: len(flat)].clone() if v.dim() else v for k, v in states[at].items()}
            for at, flat in enumerate(flats)
        ]

    path = changed(elastic)
    for wanted in (ENGINE, WAYS["universal"]):
        with pytest.raises(CheckpointError, match=r"group 0 with .*: it has no learning rate .*\"settings\""):
            prepare(catalog_of(path), tmp_path / "to", wanted)
    rules = tmp_path / "rules.json"
    rules.write_text(json.dumps({"settings": [{"lr": 0.5}]}))
    with pytest.raises(CheckpointError, match="of 1 optimizer groups, the checkpoint has 2"):
        catalog_of(path, Rules.read(rules))
    rules.write_text(json.dumps({"settings": [{"lr": 0.5, "betas": [0.9, 0.99]}, {"lr": 0.25}]}))
    made = convert(catalog_of(path, Rules.read(rules)), tmp_path / "to", ENGINE)
    assert [group["lr"] for group in made.facts["param_groups"]] == [0.5, 0.25]
    assert made.facts["param_groups"][0]["step"] == 3


def test_muon_keeps_whole_tensors(stock: Path, changed: Any, tmp_path: Path) -> None:
    """Its momentum is as long as the tensors that a rank has a part of (stage_1_and_2.py)."""
    source = catalog_of(stock)
    groups = [{**group, "use_muon": True} for group in source.facts["param_groups"]]
    with pytest.raises(CheckpointError, match="Muon has its momentum by whole tensors"):
        prepare(replace(source, facts={**source.facts, "param_groups": groups}), tmp_path / "to", ENGINE)

    def muon(content: dict[str, Any]) -> None:
        base = content["base_optimizer_state"]
        base["param_groups"][0]["use_muon"] = True
        base["state"][0] = {"momentum_buffer": torch.ones(base["state"][0]["exp_avg"].numel() + 12)}

    with pytest.raises(CheckpointError, match=r"momentum_buffer: .*: Muon keeps whole tensors"):
        catalog_of(changed(muon))


def test_a_folder_of_checkpoints_without_latest(stock: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    shutil.copytree(stock, tmp_path / "run" / "my tag-1")
    with pytest.raises(CheckpointError, match=r"no file latest.* Fix: name one of my tag-1 in it"):
        open_checkpoint(tmp_path / "run")


def test_what_a_universal_conversion_lost_is_told(stock: Path, tmp_path: Path) -> None:
    made = convert(catalog_of(stock), tmp_path / "universal", WAYS["universal"])
    content = torch.load(made.root / MODEL, weights_only=False)
    content["buffer_names"].append("1.seen")
    torch.save(content, made.root / MODEL)
    assert open_checkpoint(made.root).facts["left_behind"] == [
        "buffer 1.seen: the conversion to universal lost it"
    ]
    (made.root / "tmp").mkdir()
    with pytest.raises(CheckpointError, match="or told to keep this folder"):
        open_checkpoint(made.root)


def test_weights_in_a_pytorch_model_bin(tmp_path: Path) -> None:
    """As zero_to_fp32 and save_16bit_model write them, in one file or several."""
    state = {"a.weight": torch.randn(3, 4).t(), "b": torch.randn(5).bfloat16(), "count": torch.arange(3)}
    folder = tmp_path / "model"
    folder.mkdir()
    torch.save(state, folder / "pytorch_model.bin")
    (folder / "adapter_model.safetensors").touch()
    catalog = open_checkpoint(folder)
    assert {entry.name: entry.role for entry in catalog.entries}["count"] == "buffer"
    assert "adapter beside the model" in catalog.facts["left_behind"][0]
    assert len(catalog.checksums) == 3
    made = convert(catalog, tmp_path / "dcp", WAYS["dcp"])
    for name, tensor in state.items():
        assert torch.equal(read_entry(made, made.by_key[name, "weight"]), tensor)
    (folder / "pytorch_model.bin").rename(folder / "part.bin")
    index = folder / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(state, "part.bin")}))
    assert [entry.key for entry in open_checkpoint(folder).entries] == [
        entry.key for entry in catalog.entries
    ]
    for weight_map, problem in [
        ({"lost": "part.bin"}, r"tensor lost: the file does not have it"),
        ({"b": "../part.bin"}, "leads out of the model's folder"),
        ({"b": "other.bin"}, r"other.bin: the file is missing"),
    ]:
        index.write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(CheckpointError, match=problem):
            open_checkpoint(folder)
