"""Checkpoints of a transformers model that stock DeepSpeed trains, through dsx's layouts and back."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

import ranks
from checkpoint.stock_checkpoints import engine_of_transformers, train_transformers
from dsx.checkpoint.catalog import Catalog
from dsx.checkpoint.copy_plan import plan
from dsx.checkpoint.execute import ConversionOptions, execute
from dsx.checkpoint.formats import native
from dsx.checkpoint.formats.deepspeed import reader
from dsx.checkpoint.formats.deepspeed import target as deepspeed_target
from dsx.checkpoint.formats.deepspeed.target import StockLayout
from dsx.checkpoint.formats.huggingface import catalog as hf_catalog
from dsx.checkpoint.formats.huggingface import weights as hf
from dsx.checkpoint.layouts import TargetDegrees, layout_like
from dsx.checkpoint.read import compare, only_in
from dsx.errors import CheckpointError
from dsx.hub.disk_names import FolderNames, disk_forms
from dsx.models.param import Init, ParamSpec
from dsx.parallel.mesh import Mesh

CONFIG = {
    "model_type": "deepseek_v3",
    "vocab_size": 67,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


def config_of() -> Any:
    config = AutoConfig.for_model(**CONFIG)
    config._experts_implementation = "eager"
    return config


def model_of() -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.1)
        model.get_buffer(BIAS).normal_()
    return model


def specs() -> list[ParamSpec]:
    """Every tensor of the model, its experts cut by features, in the model's own order."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config_of())
    found = []
    for name, form in disk_forms(model).items():
        block = re.match(r"model\.layers\.(\d+)\.", name)
        layer = int(block[1]) + 1 if block else 0 if "embed" in name else 3
        shape, cut = tuple(model.state_dict()[name].shape), {}
        if name.endswith("experts.gate_up_proj"):
            cut = {"split": 1, "parts": (shape[1] // 2,) * 2}
        elif name.endswith("experts.down_proj"):
            cut = {"split": 2}
        found.append(
            ParamSpec(
                name=f"{layer}.{name}",
                layer=layer,
                shape=shape,
                init=Init(kind="zeros"),
                hf_whole=name,
                hf_copies=form.copies,
                buffer=form.buffer,
                tie="embedding" if form.copies else None,
                **cut,
                **form.in_spec,
            )
        )
    return found


def begin(rank: int, world_size: int, folder: Path) -> list[float]:
    engine = engine_of_transformers(model_of(), zero=1)
    train_transformers(engine, rank, 0)
    engine.save_checkpoint(str(folder / "stock"))
    if rank == 0:
        engine.module.save_pretrained(folder / "saved")
    return train_transformers(engine, rank, 2)


def go_on(rank: int, world_size: int, folder: Path) -> list[float]:
    engine = engine_of_transformers(model_of(), zero=1)
    with torch.no_grad():
        engine.module.get_buffer(BIAS).zero_()
    path, _ = engine.load_checkpoint(str(folder), tag="global_step2")
    assert path is not None
    return train_transformers(engine, rank, 2)


def run(source: Catalog, target: Any) -> Path:
    return execute(source, target, plan(source, target.catalog), ConversionOptions(workers=1)).target


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """A stock engine after two steps, and the losses of two more."""
    folder = tmp_path_factory.mktemp("run")
    return folder, ranks.run(begin, 1, folder)


def test_a_stock_run_goes_through_dsx_and_on(stock: tuple[Path, list[Any]], tmp_path: Path) -> None:
    """Experts fused in the engine, apart in files; the router's buffer and every moment come along."""
    folder, expected = stock
    source = hf_catalog.as_dsx(reader.catalog_of(folder / "stock" / "global_step2"), specs())
    layout = layout_like(source, TargetDegrees.parse("dp=1,tp=2,zero=1"))
    again = native.catalog_of(run(source, native.target_of(source, tmp_path / "dsx", layout)))
    named = hf_catalog.as_hf(again, specs(), in_files=False)
    run(
        named,
        deepspeed_target.target_of(
            named, tmp_path / "back" / "global_step2", StockLayout(dp=1, zero_stage=1)
        ),
    )
    assert ranks.run(go_on, 1, tmp_path / "back") == expected

    named = hf_catalog.as_hf(again, specs())
    made = run(named, hf_catalog.target_of(named, tmp_path / "hf", CONFIG))
    theirs, ours = load_file(folder / "saved" / "model.safetensors"), load_file(made / "model.safetensors")
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())


def test_a_folder_and_the_same_in_another_precision(stock: tuple[Path, list[Any]], tmp_path: Path) -> None:
    source = hf_catalog.as_dsx(hf_catalog.catalog_of(stock[0] / "saved"), specs())
    assert {entry.name for entry in source.entries if entry.role == "buffer"} == {f"2.{BIAS}"}
    named = hf_catalog.as_hf(source, specs())
    made = run(named, hf_catalog.target_of(named, tmp_path / "hf", CONFIG, precision="bf16"))
    assert json.loads((made / "config.json").read_text())["dtype"] == "bfloat16"
    found = load_file(made / "model.safetensors")
    assert {name for name, tensor in found.items() if tensor.dtype == torch.float32} == {BIAS}
    again, told = AutoModelForCausalLM.from_pretrained(made, output_loading_info=True)
    assert not any(told.values())
    saved = AutoModelForCausalLM.from_pretrained(stock[0] / "saved").state_dict()
    assert all(
        torch.equal(tensor, saved[name].to(tensor.dtype)) for name, tensor in again.state_dict().items()
    )


def test_names_in_memory_in_a_folder(stock: tuple[Path, list[Any]], tmp_path: Path) -> None:
    """save_pretrained(save_original_format=False) leaves experts fused; a tied head may be stored as well."""
    model = AutoModelForCausalLM.from_pretrained(stock[0] / "saved")
    model.save_pretrained(tmp_path, save_original_format=False)
    source = hf_catalog.as_dsx(hf_catalog.catalog_of(stock[0] / "saved"), specs())
    other = hf_catalog.as_dsx(hf_catalog.catalog_of(tmp_path), specs())
    assert not only_in(source, other)
    assert all(one.equal for one in compare(source, other))
    with hf.HfWeights(tmp_path) as fused, hf.HfWeights(stock[0] / "saved") as apart:
        for spec in specs():
            for at in map(Mesh.of(tp=2).at, range(2)):
                assert torch.equal(fused.read(spec, at), apart.read(spec, at))
    tensors = load_file(tmp_path / "model.safetensors")
    for head in (tensors["model.embed_tokens.weight"].clone(), torch.zeros(67, 32)):
        save_file(
            tensors | {"lm_head.weight": head}, tmp_path / "model.safetensors", metadata={"format": "pt"}
        )
        copied = hf_catalog.catalog_of(tmp_path)
        if head.any():
            assert len(hf_catalog.as_dsx(copied, specs()).entries) == len(specs())
        else:
            with pytest.raises(
                CheckpointError, match=r"tensor lm_head.weight, weight: the model's config ties it"
            ):
                hf_catalog.as_dsx(copied, specs())


def test_ranks_read_a_folder_that_names_its_tensors_otherwise(
    stock: tuple[Path, list[Any]], tmp_path: Path
) -> None:
    """A bare model's folder, with the next layer's tensors, which the family's files may have."""
    saved = load_file(stock[0] / "saved" / "model.safetensors")
    bare = {name.removeprefix("model."): tensor for name, tensor in saved.items()}
    ignored = {"model.layers.61.shared_head.norm.weight": torch.zeros(3)}
    save_file(bare | ignored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config_of())
    names = FolderNames(model, disk_forms(model))
    with hf.HfWeights(tmp_path, names.of) as found, hf.HfWeights(stock[0] / "saved") as known:
        found.check(specs())
        assert all(torch.equal(found.read(spec), known.read(spec)) for spec in specs())
