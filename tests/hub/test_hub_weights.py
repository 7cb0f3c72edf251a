"""Weights of a hub model into a run and out of it: folders, exports, checkpoints, both implementations."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

import dsx
import ranks
from dsx.checkpoint.execute import ConversionOptions
from dsx.checkpoint.layouts import TargetDegrees
from dsx.checkpoint.open import open_checkpoint
from dsx.checkpoint.reshard import WantedTarget, prepare
from dsx.checkpoint.run.export import export_weights
from dsx.errors import CheckpointError
from dsx.hub.shrunk import random_model
from dsx.models.transformers_settings import with_cap
from dsx.train.generation import load_transformers
from hub.test_hub_conversions import BIAS, CONFIG
from often import often
from parity import dsx_run, oracle
from parity.dsx_run import Case

CASE = Case(family="llama", tp=2, pp=2, zero=1, accumulation=2)


def config_of(folder: Path, case: Case = CASE, **model: Any) -> dict[str, Any]:
    settings = copy.deepcopy(dsx_run.config(case, folder))
    settings["dsx"]["model"] |= model
    return settings


def engine_of(settings: dict[str, Any], world_size: int) -> Any:
    from dsx.parallel.groups import make_groups
    from dsx.train.recipe import build_engine

    resolved = dsx.load_config(settings, world_size=world_size)
    groups = make_groups(resolved.mesh, sequence_parallel=resolved.dsx.parallel.sequence_parallel)
    return build_engine(resolved, groups)


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    files = [load_file(file) for file in folder.glob("*.safetensors")]
    return {name: tensor for file in files for name, tensor in file.items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def in_and_out(rank: int, world_size: int, folder: Path) -> None:
    """An export of what was read, a checkpoint after a step, an export of that."""
    engine = engine_of(config_of(folder / "model"), world_size)
    dsx.export_hf(engine, folder / "unchanged")
    export_weights(engine.pipeline, folder / "sharded", engine.run_config.hf_config, shard_bytes=20000)
    (folder / "not a folder").touch()
    with pytest.raises(CheckpointError, match=r"not a folder.*the system answers Not a directory"):
        export_weights(engine.pipeline, folder / "not a folder" / "in it", engine.run_config.hf_config)
    engine.train_batch(dsx_run.batches(CASE, 0, engine.groups.dp_rank))
    engine.save_checkpoint(str(folder / "run"))
    dsx.export_hf(engine, folder / "trained")
    again = engine_of(config_of(folder / "model"), world_size)
    again.load_checkpoint(str(folder / "run"))
    dsx.export_hf(again, folder / "resumed")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Latent attention, experts and a router's buffer, cut over two tensor ranks and two stages."""
    folder = tmp_path_factory.mktemp("runs")
    torch.manual_seed(0)
    config = AutoConfig.for_model(**CONFIG | {"vocab_size": 259, "tie_word_embeddings": False})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        model.get_buffer(BIAS).uniform_()
    model.save_pretrained(folder / "model")
    ranks.run(in_and_out, 4, folder)
    return folder


def test_a_folder_goes_in_and_out_bit_for_bit(runs: Path) -> None:
    known = tensors_in(runs / "model")
    assert "model.layers.1.mlp.experts.3.up_proj.weight" in known
    assert known[BIAS].dtype == torch.float32
    assert same(tensors_in(runs / "unchanged"), known)
    assert same(tensors_in(runs / "sharded"), known)
    sizes = [file.stat().st_size for file in (runs / "sharded").glob("*.safetensors")]
    assert len(sizes) > 6
    for name in ("unchanged", "sharded"):
        loaded, told = AutoModelForCausalLM.from_pretrained(runs / name, output_loading_info=True)
        assert not any(told.values())
        assert type(loaded).__name__ == "DeepseekV3ForCausalLM"
    trained = tensors_in(runs / "trained")
    assert trained.keys() == known.keys()
    assert torch.equal(trained[BIAS], known[BIAS])
    assert not torch.equal(
        *(held["model.layers.1.mlp.experts.3.up_proj.weight"] for held in (trained, known))
    )
    assert same(tensors_in(runs / "resumed"), trained)


def test_a_checkpoint_becomes_a_folder_and_a_folder_a_checkpoint(runs: Path, tmp_path: Path) -> None:
    trained, source = tensors_in(runs / "trained"), open_checkpoint(runs / "run" / "global_step1")
    prepare(source, tmp_path / "hf", WantedTarget(format="hf")).run(ConversionOptions(workers=1))
    assert same(tensors_in(tmp_path / "hf"), trained)
    degrees = TargetDegrees.parse("tp=2,dp=2,zero=3")
    prepare(open_checkpoint(tmp_path / "hf"), tmp_path / "dsx", WantedTarget(degrees=degrees)).run(
        ConversionOptions(workers=1)
    )
    held = {entry.name for entry in source.entries}
    assert {entry.name for entry in open_checkpoint(tmp_path / "dsx").entries} == held
    prepare(open_checkpoint(tmp_path / "dsx"), tmp_path / "again", WantedTarget(format="hf")).run(
        ConversionOptions(workers=1)
    )
    assert same(tensors_in(tmp_path / "again"), trained)
    model, _ = load_transformers(runs / "run", tokenizer="bytes")
    known = AutoModelForCausalLM.from_pretrained(runs / "trained").state_dict()
    assert all(torch.equal(tensor, known[name]) for name, tensor in model.state_dict().items())


def both_implementations(rank: int, world_size: int, family: str, folder: Path) -> None:
    """Each trains a step, saves, and goes on from the other's checkpoint."""
    case = Case(family=family, accumulation=2, zero=1, dp=2)
    for one, other in (("dsx", "transformers"), ("transformers", "dsx")):
        engine = engine_of(config_of(folder / "model", case, implementation=one), world_size)
        engine.train_batch(dsx_run.batches(case, 0, engine.groups.dp_rank))
        engine.save_checkpoint(str(folder / one))
        dsx.export_hf(engine, folder / f"{one} exported")
        again = engine_of(config_of(folder / "model", case, implementation=other), world_size)
        again.load_checkpoint(str(folder / one))
        dsx.export_hf(again, folder / f"{one} read by {other}")
        losses = [
            float(each.train_batch(dsx_run.batches(case, 1, each.groups.dp_rank))) for each in (engine, again)
        ]
        torch.testing.assert_close(*losses, rtol=0, atol=1e-5)
        for each, name in ((engine, "went on"), (again, "was gone on with")):
            dsx.export_hf(each, folder / f"{one} {name}")


@pytest.mark.parametrize("family", often(["llama", "mistral", "qwen3"], 3))
def test_both_implementations_of_a_family_read_each_others_checkpoints(family: str, tmp_path: Path) -> None:
    oracle.hf_model(family).save_pretrained(tmp_path / "model")
    ranks.run(both_implementations, 2, family, tmp_path)
    for one, other in (("dsx", "transformers"), ("transformers", "dsx")):
        exported = tensors_in(tmp_path / f"{one} exported")
        assert same(tensors_in(tmp_path / f"{one} read by {other}"), exported)
        ours, theirs = (tensors_in(tmp_path / f"{one} {name}") for name in ("went on", "was gone on with"))
        for name, tensor in ours.items():
            torch.testing.assert_close(theirs[name], tensor, rtol=0, atol=1e-5)


def test_scores_of_attention_are_capped_unless_the_config_names_another_attention() -> None:
    """Before transformers 5.18 Gemma 2 is given sdpa, which leaves the cap out."""
    config = oracle.hf_model("gemma2").config.to_dict() | {"attn_logit_softcapping": 0.02}
    ids = torch.arange(20).view(2, 10)
    with torch.no_grad():
        capped, plain = (
            random_model(config | change).eval()(input_ids=ids).logits
            for change in ({}, {"attn_logit_softcapping": None})
        )
    assert (capped - plain).abs().max() > 1e-3
    assert with_cap(AutoConfig.for_model("gemma2"))._attn_implementation == "eager"
    named = AutoConfig.for_model("gemma2", attn_implementation="sdpa")
    assert with_cap(named)._attn_implementation == "sdpa"
