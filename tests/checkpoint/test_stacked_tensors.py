"""Tensors of three dims: cut in any of them, in every format, and as the stacked experts of model folders."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import made
from dsx.checkpoint.execute import ConversionOptions
from dsx.checkpoint.formats.deepspeed.module import as_model
from dsx.checkpoint.formats.huggingface import catalog as hf_catalog
from dsx.checkpoint.formats.huggingface import weights as hf
from dsx.checkpoint.layouts import TargetDegrees
from dsx.checkpoint.open import open_checkpoint
from dsx.checkpoint.read import compare, only_in, verify
from dsx.checkpoint.reshard import WantedTarget, prepare
from dsx.errors import CheckpointError, LayoutError
from dsx.models.param import Init, ParamSpec
from dsx.parallel.mesh import Mesh

CONFIG = {"model_type": "of nobody"}


def spec(path: str, shape: tuple[int, ...], layer: int = 1, **cut: Any) -> ParamSpec:
    hf_names = cut.pop("hf", (f"model.{layer}.{path}",))
    name = f"{layer}.{path}"
    return ParamSpec(name=name, layer=layer, shape=shape, init=Init(kind="zeros"), hf=hf_names, **cut)


def experts(count: int, *parts: str) -> tuple[str, ...]:
    return tuple(f"experts.{index}.{part}" for index in range(count) for part in parts)


SPECS = (
    spec("embedding", (10, 4), layer=0, split=0, pad_multiple=4),
    spec("gate_up", (3, 8, 6), split=1, parts=(4, 4), hf_stacked=True, hf=experts(3, "gate", "up")),
    spec(
        "turned",
        (3, 6, 8),
        split=2,
        parts=(6, 2),
        hf_stacked=True,
        hf_transposed=True,
        hf=experts(3, "a", "b"),
    ),
    spec("down", (3, 6, 4), split=2, hf_stacked=True, hf=experts(3, "down")),
    spec("fused", (2, 4, 6), split=1, parts=(2, 2), hf_stacked=True, hf=experts(2, "both")),
    spec("bias", (2, 6), split=1, hf_stacked=True, hf=experts(2, "bias")),
    spec("uncut", (2, 6, 3), hf_split=1, hf_parts=(4, 2), hf_stacked=True, hf=experts(2, "w1", "w3")),
    spec("other", (4, 6, 3), split=0, hf_split=2, hf_parts=(1, 2), hf=("left", "right")),
    spec("whole", (4, 6, 2), split=1, hf_transposed=True),
    spec("convolution", (8, 1, 3), split=0),
    spec("kernel", (2, 3, 2, 2)),
    spec("norm", (4,), layer=2),
)


def model_folder(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """A model folder of :data:`SPECS`: its tensors, and the model's, put together by torch."""
    draw = torch.Generator().manual_seed(3)

    def one(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=draw)

    stored: dict[str, torch.Tensor] = {}
    for name in experts(3, "gate", "up"):
        stored[name] = one(4, 6)
    for name in experts(3, "a", "b"):
        stored[name] = one(6 if name.endswith("a") else 2, 6)
    stored |= {name: one(6, 4) for name in experts(3, "down")}
    stored |= {name: one(4, 6) for name in experts(2, "both")}
    stored |= {name: one(6) for name in experts(2, "bias")}
    stored |= {name: one(4 if name.endswith("w1") else 2, 3) for name in experts(2, "w1", "w3")}
    stored |= {"left": one(4, 6, 1), "right": one(4, 6, 2), "model.1.whole": one(4, 2, 6)}
    stored |= {"model.0.embedding": one(10, 4), "model.1.convolution": one(8, 1, 3)}
    stored |= {"model.1.kernel": one(2, 3, 2, 2), "model.2.norm": one(4)}

    def stack(count: int, *parts: str, dim: int = 0, turned: bool = False) -> torch.Tensor:
        held = ([stored[f"experts.{index}.{part}"] for part in parts] for index in range(count))
        return torch.stack([torch.cat([p.t() if turned else p for p in each], dim) for each in held])

    model = {
        "0.embedding": stored["model.0.embedding"],
        "1.gate_up": stack(3, "gate", "up"),
        "1.turned": stack(3, "a", "b", dim=1, turned=True),
        "1.down": stack(3, "down"),
        "1.fused": stack(2, "both"),
        "1.bias": stack(2, "bias"),
        "1.uncut": stack(2, "w1", "w3"),
        "1.other": torch.cat([stored["left"], stored["right"]], 2),
        "1.whole": stored["model.1.whole"].permute(0, 2, 1),
        "1.convolution": stored["model.1.convolution"],
        "1.kernel": stored["model.1.kernel"],
        "2.norm": stored["model.2.norm"],
    }
    folder.mkdir()
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    return stored, model


def local(which: ParamSpec, whole: torch.Tensor, tp: int, rank: int) -> torch.Tensor:
    if which.split is None:
        return whole
    blocks = torch.split(whole, list(which.parts or (whole.shape[which.split],)), which.split)
    return torch.cat([block.chunk(tp, which.split)[rank] for block in blocks], which.split)


@pytest.mark.parametrize("tp", [1, 2])
def test_ranks_read_their_slices_of_a_folder(tp: int, tmp_path: Path) -> None:
    _, model = model_folder(tmp_path / "hf")
    with hf.HfWeights(tmp_path / "hf") as weights:
        weights.check(SPECS)
        for which, rank in itertools.product(SPECS, range(tp)):
            at = Mesh.of(tp=tp).at(rank)
            found = weights.read(which, at)
            assert found.shape == which.local_shape(at)
            if which.pad_multiple is None:
                assert torch.equal(found, local(which, model[which.name], tp, rank)), which.name


def test_whole_tensors_part_into_those_of_the_folder(tmp_path: Path) -> None:
    stored, model = model_folder(tmp_path / "hf")
    found = {name: one for which in SPECS for name, one in hf.split(which, model[which.name]).items()}
    assert found.keys() == stored.keys()
    assert all(
        torch.equal(found[name], tensor) and found[name].is_contiguous() for name, tensor in stored.items()
    )


def test_a_folder_through_layouts_and_back(tmp_path: Path) -> None:
    stored, _ = model_folder(tmp_path / "hf")
    catalog = hf_catalog.as_dsx(hf_catalog.catalog_of(tmp_path / "hf"), SPECS)
    for number, layout in enumerate(("tp=2,dp=2,zero=3", "tp=1,pp=3", "tp=2,zero=1")):
        wanted = WantedTarget(degrees=TargetDegrees.parse(layout))
        prepare(catalog, tmp_path / str(number), wanted).run(ConversionOptions(workers=1))
        catalog = open_checkpoint(tmp_path / str(number))
        assert sorted(catalog.specs, key=lambda one: one.name) == sorted(SPECS, key=lambda one: one.name)
    wanted = WantedTarget(format="hf", hf_config=CONFIG)
    prepare(catalog, tmp_path / "back", wanted).run(ConversionOptions(workers=1))
    found = load_file(tmp_path / "back" / "model.safetensors")
    assert found.keys() == stored.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in stored.items())


@pytest.mark.parametrize(
    ("kind", "degrees"),
    [
        ("dsx", "dp=3,zero=3"),
        ("deepspeed", "tp=2,dp=2,zero=1"),
        ("universal", "dp=2,zero=2"),
        ("dcp", "dp=3"),
    ],
)
def test_every_state_through_every_format(kind: str, degrees: str, tmp_path: Path) -> None:
    """tp 1 -> tp 2 -> the format -> tp 1: weights, masters and moments keep every bit."""
    groups = [{"names": [one.name for one in SPECS], "step": 4, "lr": 0.5}]
    facts = {"step": 4, "precision": "fp32", "param_groups": groups, "hf_config": CONFIG}
    first = catalog = made.plain(tmp_path / "plain", SPECS, made.FP32, facts=facts)
    way = [
        WantedTarget(degrees=TargetDegrees.parse("tp=1")),
        WantedTarget(degrees=TargetDegrees.parse("tp=2,pp=2,dp=2,zero=2")),
        WantedTarget(
            format=kind, degrees=TargetDegrees.parse(degrees), names="hf" if kind == "dcp" else None
        ),
        WantedTarget(degrees=TargetDegrees.parse("tp=1"), names="dsx" if kind == "dsx" else None),
    ]
    for number, wanted in enumerate(way):
        prepare(catalog, tmp_path / str(number), wanted).run(ConversionOptions(workers=1))
        catalog = open_checkpoint(tmp_path / str(number))
        assert not list(verify(catalog))
    catalog = as_model(catalog, SPECS)
    assert all(one.equal for one in compare(first, catalog))
    assert not only_in(first, catalog)


def test_a_folder_that_lacks_an_expert_or_has_one_of_another_shape(tmp_path: Path) -> None:
    stored, _ = model_folder(tmp_path / "hf")
    for number, (name, what) in enumerate(
        [("experts.2.down", "it is missing"), ("experts.1.up", r"the model needs float32 \(4, 6\)")]
    ):
        wrong = {**stored, name: torch.zeros(3, 6)}
        if "missing" in what:
            del wrong[name]
        folder = tmp_path / str(number)
        folder.mkdir()
        save_file(wrong, folder / "model.safetensors", metadata={"format": "pt"})
        with hf.HfWeights(folder) as weights, pytest.raises(CheckpointError, match=f"{name}.*{what}"):
            weights.check(SPECS)


@pytest.mark.parametrize(
    ("shape", "cut"),
    [
        ((3, 8, 6), {"hf_stacked": True, "hf": experts(2, "gate")}),
        ((3, 8, 6), {"hf_stacked": True, "split": 1, "parts": (4, 4), "hf": experts(2, "gate", "up")}),
        ((3, 8, 6), {"hf_stacked": True, "split": 0, "parts": (1, 2), "hf": experts(3, "gate", "up")}),
        ((3, 8), {"hf_stacked": True, "hf_transposed": True, "hf": experts(3, "gate")}),
        ((8,), {"hf_transposed": True}),
        ((8, 6), {"hf_split": 2, "hf_parts": (4, 4), "hf": ("a", "b")}),
        ((8, 6), {"hf_split": 0, "hf_parts": (4, 5), "hf": ("a", "b")}),
        ((8, 6), {"hf": ("a", "b")}),
    ],
)
def test_names_that_do_not_fit_the_tensor(shape: tuple[int, ...], cut: dict[str, Any]) -> None:
    with pytest.raises(LayoutError, match="fix the spec"):
        spec("wrong", shape, **cut)
