"""Stock checkpoints that are incomplete, mixed, damaged or made to do harm: refused with file and tensor."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint import stock_checkpoints
from checkpoint.stock_checkpoints import Stock
from dsx.checkpoint.catalog import Catalog
from dsx.checkpoint.formats.deepspeed.cut import Rules
from dsx.checkpoint.formats.deepspeed.order import assign, stage_names
from dsx.checkpoint.formats.deepspeed.reader import catalog_of
from dsx.errors import CheckpointError


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Checkpoints by ZeRO stage."""
    folder = tmp_path_factory.mktemp("stock")
    return {zero: stock_checkpoints.save(Stock(zero=zero), folder / str(zero))[0] for zero in (1, 3)}


def change(path: Path, name: str, edit: Callable[[dict[str, Any]], object]) -> None:
    content = torch.load(path / name, weights_only=False)
    edit(content)
    torch.save(content, path / name)


OPTIMIZER = "zero_pp_rank_1_mp_rank_00_optim_states.pt"
MODEL = "mp_rank_00_model_states.pt"


def test_missing_and_surplus_files(saved: dict[int, Path], tmp_path: Path) -> None:
    for zero, name, problem in [
        (1, OPTIMIZER, "optim_states file of model-parallel rank 0, data-parallel rank 1 is missing"),
        (1, MODEL, "it has no mp_rank_00_model_states.pt"),
        (
            3,
            "zero_pp_rank_1_mp_rank_00_model_states.pt",
            "model_states file .* data-parallel rank 1 is missing",
        ),
    ]:
        path = tmp_path / f"{zero}{name}"
        shutil.copytree(saved[zero], path)
        (path / name).unlink()
        with pytest.raises(CheckpointError, match=problem):
            catalog_of(path)
    path = tmp_path / "surplus"
    shutil.copytree(saved[1], path)
    shutil.copy(path / OPTIMIZER, path / OPTIMIZER.replace("rank_1", "rank_2"))
    with pytest.raises(CheckpointError, match=r"rank_2.*has no model-parallel rank 0, data-parallel rank 2"):
        catalog_of(path)
    (path / OPTIMIZER.replace("rank_1", "rank_2")).rename(path / f"bf16_{OPTIMIZER}")
    with pytest.raises(CheckpointError, match="of the same rank: two checkpoints lie in one folder"):
        catalog_of(path)
    with pytest.raises(CheckpointError, match="give the folder of one tag"):
        catalog_of(tmp_path / "nothing")


def test_files_that_contradict_each_other(saved: dict[int, Path], tmp_path: Path) -> None:
    def swapped(content: dict[str, Any]) -> None:
        shapes = content["param_shapes"][0]
        content["param_shapes"][0] = type(shapes)(reversed(shapes.items()))

    def shorter(content: dict[str, Any]) -> None:
        flats = content["optimizer_state_dict"]["single_partition_of_fp32_groups"]
        flats[0] = flats[0][:-1].clone()

    def other_state(content: dict[str, Any]) -> None:
        states = content["optimizer_state_dict"]["base_optimizer_state"]["state"]
        states[0]["exp_avg"] = states[0]["exp_avg"][:-9].clone()

    def no_shapes(content: dict[str, Any]) -> None:
        content["param_shapes"] = None
        content["module"].pop("norm.bias")

    for name, edit, problem in [
        (MODEL, swapped, r"tensor .*: param_slice_mappings has it at"),
        (
            MODEL,
            lambda c: c["param_shapes"][1].pop("norm.bias"),
            "has 6 parameters, 5 by param_shapes",
        ),
        (MODEL, lambda c: c["module"].clear() or c.update(module=None), "it holds no module"),
        (MODEL, no_shapes, "tensor norm.bias: no file has its weight"),
        (OPTIMIZER, shorter, "optimizer group 0: it has 125 elements with padding, the first rank 126"),
        (OPTIMIZER, other_state, r"tensor .*, exp_avg: its elements .* do not lie in a flat buffer"),
        (OPTIMIZER, lambda c: c.clear(), "it has no optimizer_state_dict"),
    ]:
        path = tmp_path / "changed"
        shutil.copytree(saved[1], path)
        change(path, name, edit)
        with pytest.raises(CheckpointError, match=problem):
            catalog_of(path)
        shutil.rmtree(path)


def test_sub_groups_that_are_swapped_out(saved: dict[int, Path], tmp_path: Path) -> None:
    path = tmp_path / "nvme"
    shutil.copytree(saved[3], path)

    def empty(content: dict[str, Any]) -> None:
        content["optimizer_state_dict"]["fp32_flat_groups"][0] = torch.empty(0)

    change(path, OPTIMIZER, empty)
    with pytest.raises(CheckpointError, match=r"sub-group 0: it has 0 elements, .* swapped out to NVMe"):
        catalog_of(path)
    (path / "offloaded_tensors").mkdir()
    with pytest.raises(CheckpointError, match="swapped out to NVMe, in files without names"):
        catalog_of(path)
    (path / "offloaded_tensors").rmdir()
    (path / "layer_0_expert_3_mp_rank_01_model_states.pt").touch()
    with pytest.raises(CheckpointError, match="an expert's file, which dsx reads of AutoEP alone"):
        catalog_of(path)
    (path / "layer_0_expert_3_mp_rank_01_model_states.pt").unlink()
    change(path, f"zero_pp_rank_0_{MODEL}", lambda content: content.update(ds_autoep_layers=[]))
    with pytest.raises(CheckpointError, match="ds_autoep_layers: of AutoEP"):
        catalog_of(path)


class Harm:
    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self.command,)


def test_a_pickle_that_does_harm(saved: dict[int, Path], tmp_path: Path) -> None:
    for name in (MODEL, OPTIMIZER):
        path = tmp_path / name
        shutil.copytree(saved[1], path)
        change(path, name, lambda content: content.update(extra=Harm(f"touch {tmp_path}/ran")))
        with pytest.raises(CheckpointError, match=rf"{name}: it wants posix.system imported"):
            catalog_of(path)
    assert not (tmp_path / "ran").exists()


def test_client_state_that_is_no_plain_data(saved: dict[int, Path], tmp_path: Path) -> None:
    """Tensors of the user's stay behind and are named; a bomb is no way to fill the memory."""
    path = tmp_path / "client"
    shutil.copytree(saved[1], path)
    bomb: list[Any] = []
    for _ in range(40):
        bomb = [bomb, bomb]
    change(path, MODEL, lambda content: content.update(mine=torch.ones(3), bomb=bomb, more={"a": (1, 2)}))
    change(path, MODEL, lambda content: content["module"].update({"norm._extra_state": None}))
    facts = catalog_of(path).facts
    expected = ["module norm._extra_state", "mine", "bomb"]
    assert [line.split(":")[0] for line in facts["left_behind"]] == expected
    assert facts["client_state"].keys() == {"note", "seen", "more"}


def test_other_names(saved: dict[int, Path], tmp_path: Path) -> None:
    """The names of another model; DeepSpeed's own tools cannot rename a pipeline's tensors."""
    rules = tmp_path / "rules.json"

    def read(names: dict[str, str]) -> Catalog:
        rules.write_text(json.dumps({"names": names}))
        return catalog_of(saved[1], Rules.read(rules))

    plain = catalog_of(saved[1])
    catalog = read({r"blocks\.(\d+)\.(.*)": r"\1.\2", "embedding.weight": "tied_modules.e.weight"})
    names = [re.sub(r"^blocks\.", "", entry.name) for entry in plain.entries]
    assert [entry.name for entry in catalog.entries] == [
        "tied_modules.e.weight" if name == "embedding.weight" else name for name in names
    ]
    assert [entry.pieces for entry in catalog.entries] == [entry.pieces for entry in plain.entries]
    assert catalog.facts["param_groups"][0]["names"][:2] == ["tied_modules.e.weight", "0.up.weight"]
    with pytest.raises(CheckpointError, match=r"x: blocks.0.* and blocks.0.* would both be called so"):
        read({r"blocks\.0.*": "x"})
    with pytest.raises(CheckpointError, match="invalid group reference"):
        read({"norm.bias": r"\3"})


def test_names_of_numbered_states() -> None:
    names = {"a": (2, 3), "b": (3,), "c": (2, 3), "d": (3,)}
    matrices, vectors = [(2, 3), (2, 3)], [(3,), (3,)]
    assert assign(names, [matrices, vectors], "x") == [["a", "c"], ["b", "d"]]
    assert assign(names, [[(2, 3), (3,), (2, 3), (3,)]], "x") == [["a", "b", "c", "d"]]
    assert assign(names, [[None, (3,), (2, 3), None]], "x") == [["a", "b", "c", "d"]]
    assert assign(names, [[(4,)]], "x") is None
    with pytest.raises(CheckpointError, match=r"tensor a: .* may be of none, frozen or group 0"):
        assign(names, [[(2, 3)], vectors], "x")
    with pytest.raises(CheckpointError, match=r"tensor a: .* may be of group 0 or group 1"):
        assign(names, [[(2, 3), (3,)], [(2, 3), (3,)]], "x")
    assert assign(names, [[(2, 3), (3,), (2, 3)], [(3,)]], "x") == [["a", "b", "c"], ["d"]]
    groups = [["a", "b"], ["c", "d"]]
    assert assign(names, [[(2, 3), (3,)], [(2, 3), (3,)]], "x", groups) == groups
    many = {f"{n}.w": (4, 4) for n in range(3000)}
    assert assign(many, [[(4, 4)] * 3000], "x") == [list(many)]


def test_names_of_numbered_states_in_a_pipeline() -> None:
    layers = {"0.w": (5, 2), "1.w": (2, 2), "1.b": (2,), "2.w": (2, 2), "2.b": (2,)}
    block = [(2, 2), (2,)]
    plain = [[[(5, 2), *block]], [block]]
    expected = [[["0.w", "1.w", "1.b"]], [["2.w", "2.b"]]]
    assert stage_names(layers, plain, "x") == expected
    two, apart = {"0.w": (2, 2), "1.w": (2, 2)}, [[[(2, 2)]], [[(2, 2)]]]
    with pytest.raises(CheckpointError, match="more than one order"):  # or is 0 tied and 1 frozen?
        stage_names(two, apart, "x")
    assert stage_names(two, apart, "x", (), [[["a"]], [["b"]]]) == [[["0.w"]], [["1.w"]]]
    tied = [[[(5, 2), *block]], [[(5, 2), *block]]]
    assert stage_names(layers, tied, "x") == [[["0.w", "1.w", "1.b"]], [["0.w", "2.w", "2.b"]]]
    with pytest.raises(CheckpointError, match="more than one order"):  # one of the blocks is frozen
        stage_names(layers, [[[(5, 2)]], [block]], "x")
    with pytest.raises(CheckpointError, match="no order"):
        stage_names(layers, [[[(5, 2), (3,)]], [block]], "x")
