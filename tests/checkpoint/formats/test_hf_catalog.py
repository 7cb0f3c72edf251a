"""Hugging Face folders as catalogs, and renaming, against transformers, safetensors and stock DeepSpeed."""

from __future__ import annotations

import json
import re
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import ranks
from checkpoint.stock_checkpoints import engine_of_transformers, read_entry, train_transformers
from dsx.checkpoint import claims
from dsx.checkpoint.catalog import Catalog, check_files
from dsx.checkpoint.copy_plan import plan
from dsx.checkpoint.execute import ConversionOptions, execute
from dsx.checkpoint.formats import native as dsx_native
from dsx.checkpoint.formats.deepspeed import reader
from dsx.checkpoint.formats.deepspeed import target as deepspeed_target
from dsx.checkpoint.formats.deepspeed.target import StockLayout
from dsx.checkpoint.formats.huggingface import catalog as hf_catalog
from dsx.checkpoint.formats.huggingface import names as hf_names
from dsx.checkpoint.formats.huggingface import weights as hf
from dsx.checkpoint.layouts import TargetDegrees, layout_like
from dsx.checkpoint.read import DamagedError, verify
from dsx.errors import CheckpointError
from dsx.models.params import param_specs
from tiny_configs import tiny

SIZES = {"vocabulary": 67, "width": 24, "heads": 4, "layers": 2, "bos_token_id": 0, "eos_token_id": 0}
WIDE = SIZES | {"width": 32, "ffn": 40}
CONFIGS = {
    "llama": tiny("llama", **SIZES, ffn=40, kv_heads=2, attention_bias=True),
    "llama-tied": tiny("llama", **SIZES | {"layers": 1}, ffn=40, tie_word_embeddings=True),
    "gpt2": tiny("gpt2", **SIZES, n_positions=32),
    "qwen3": tiny("qwen3", **SIZES, ffn=40, kv_heads=2, head_dim=8, attention_bias=True),
    "gpt_neox": tiny("gpt_neox", **WIDE),
    "gpt_neox-tied": tiny("gpt_neox", **WIDE | {"layers": 1}, tie_word_embeddings=True),
}
NAMES = pytest.mark.parametrize("name", CONFIGS)


def model_of(name: str) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name], dtype=torch.float32)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.1)
    return model.eval()


def specs_of(name: str) -> Any:
    return param_specs(
        claims.model_of(json.loads(CONFIGS[name].to_json_string(use_diff=False))), pad_multiple=8
    )


def run(source: Catalog, target: Any) -> Path:
    return execute(source, target, plan(source, target.catalog), ConversionOptions(workers=1)).target


@NAMES
@pytest.mark.parametrize("shard", ["5GB", "10KB"])
def test_folder_of_transformers(name: str, shard: str, tmp_path: Path) -> None:
    model_of(name).save_pretrained(tmp_path, max_shard_size=shard)
    files = {path.name: load_file(path) for path in tmp_path.glob("*.safetensors")}
    assert (len(files) > 1) == (shard == "10KB")
    catalog = hf_catalog.catalog_of(tmp_path)
    check_files(catalog)
    expected = {key: tensor for tensors in files.values() for key, tensor in tensors.items()}
    assert {entry.name for entry in catalog.entries} == expected.keys()
    assert all(torch.equal(read_entry(catalog, entry), expected[entry.name]) for entry in catalog.entries)

    specs = specs_of(name)
    named = hf_catalog.as_dsx(catalog, specs)
    assert hf_catalog.as_dsx(named, specs) == named
    with hf.HfWeights(tmp_path) as weights:
        for spec in specs:
            found = read_entry(named, named.by_key[spec.name, "weight"])
            assert torch.equal(found, weights.read(spec)[: spec.shape[0]])
    back = hf_catalog.as_hf(named, specs)
    assert {entry.name for entry in back.entries} == expected.keys()
    for entry in back.entries:
        assert torch.equal(read_entry(back, entry), expected[entry.name])


def test_matrices_the_other_way_round_are_turned(tmp_path: Path) -> None:
    """As checkpoints have them that were written when GPT-2 kept transformers' Conv1D."""
    model_of("gpt2").save_pretrained(tmp_path)
    specs, files = specs_of("gpt2"), hf_catalog.catalog_of(tmp_path)
    earlier = [
        replace(
            spec,
            hf_transposed=False,
            shape=spec.shape[::-1],
            split=None if spec.split is None else 1 - spec.split,
        )
        if spec.hf_transposed
        else spec
        for spec in specs
    ]
    before, now = (hf_catalog.as_dsx(files, of) for of in (earlier, specs))
    assert [hf_catalog.transposes(each, specs) for each in (before, now)] == [True, False]
    turned = hf_catalog.as_dsx(before, specs)
    for spec in specs:
        key = spec.name, "weight"
        assert torch.equal(read_entry(turned, turned.by_key[key]), read_entry(now, now.by_key[key]))


@NAMES
@pytest.mark.parametrize(("precision", "shard_bytes"), [(None, 5 << 30), ("bf16", 9000)])
def test_transformers_loads_what_is_written(
    name: str, precision: str | None, shard_bytes: int, tmp_path: Path
) -> None:
    model = model_of(name)
    model.save_pretrained(tmp_path / "a")
    specs = specs_of(name)
    source = hf_catalog.as_dsx(hf_catalog.catalog_of(tmp_path / "a"), specs)
    layout = layout_like(source, TargetDegrees.parse("dp=2,tp=2,zero=3"))
    native = run(source, dsx_native.target_of(source, tmp_path / "b", layout))
    source = hf_catalog.as_hf(dsx_native.catalog_of(native), specs)
    config = hf_names.read_config(tmp_path / "a")
    made = run(
        source,
        hf_catalog.target_of(source, tmp_path / "c", config, precision=precision, shard_bytes=shard_bytes),
    )
    assert (len(list(made.glob("*.safetensors"))) > 1) == (precision == "bf16")
    loaded = AutoModelForCausalLM.from_pretrained(made)
    wanted = torch.bfloat16 if precision else torch.float32
    for (key, found), expected in zip(loaded.named_parameters(), model.parameters(), strict=True):
        assert found.dtype == wanted
        assert torch.equal(found, expected.to(wanted)), key


@NAMES
def test_order_of_the_models_parameters(name: str) -> None:
    names = [hf_name for spec in specs_of(name) for hf_name in spec.hf]
    ours = [hf_name.replace("embed_out", "lm_head") for hf_name in hf_catalog.model_order(names)]
    assert ours == [key for key, _ in model_of(name).named_parameters()]


def begin(rank: int, world_size: int, name: str, zero: int, folder: Path) -> list[float]:
    engine = engine_of_transformers(model_of(name), zero)
    train_transformers(engine, rank, 0)
    engine.save_checkpoint(str(folder))
    return train_transformers(engine, rank, 2)


def go_on(rank: int, world_size: int, name: str, zero: int, folder: Path) -> list[float]:
    engine = engine_of_transformers(model_of(name), zero)
    path, _ = engine.load_checkpoint(str(folder), tag="global_step2")
    assert path is not None
    return train_transformers(engine, rank, 2)


@pytest.mark.parametrize(("name", "zero"), [("gpt2", 2), ("llama", 3), ("llama-tied", 1)])
def test_a_stock_run_through_dsx_and_back(name: str, zero: int, tmp_path: Path) -> None:
    """transformers under stock DeepSpeed -> dsx, tp 2, other ZeRO stage -> stock: bit-equal losses."""
    expected = ranks.run(begin, 2, name, zero, tmp_path / "a")
    specs = specs_of(name)
    source = hf_catalog.as_dsx(reader.catalog_of(tmp_path / "a" / "global_step2"), specs)
    layout = layout_like(source, TargetDegrees.parse("dp=1,tp=2,zero=1"))
    native = run(source, dsx_native.target_of(source, tmp_path / "b", layout))
    source = hf_catalog.as_hf(dsx_native.catalog_of(native), specs)
    stock = StockLayout(dp=2, zero_stage=zero)
    run(source, deepspeed_target.target_of(source, tmp_path / "c" / "global_step2", stock))
    assert ranks.run(go_on, 2, name, zero, tmp_path / "c") == expected


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama-tied", "gpt2", "gpt_neox-tied"])
def test_a_head_that_is_no_copy_of_the_embedding_it_is_tied_to(
    name: str, dtype: torch.dtype, file: str, tmp_path: Path
) -> None:
    """One bit of the head is enough to refuse it; the same bits are left out, which loses nothing."""
    model = model_of(name).to(dtype)
    model.save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    word = model.get_input_embeddings().weight.detach()
    head = "embed_out.weight" if name == "gpt_neox-tied" else "lm_head.weight"

    def named(values: torch.Tensor) -> Catalog:
        tensors = {**state, head: values}
        if file == "pytorch_model.bin":
            torch.save(tensors, tmp_path / file)
        else:
            save_file(tensors, tmp_path / file, metadata={"format": "pt"})
        return hf_catalog.as_dsx(hf_catalog.catalog_of(tmp_path), specs_of(name))

    assert {entry.name for entry in named(word.clone()).entries} == {spec.name for spec in specs_of(name)}
    trained = word.clone()
    trained.view(torch.uint8)[-1, -1] ^= 1
    with pytest.raises(CheckpointError, match=rf"tensor {head}, weight: .*ties it .*1 of [\d,]+ elements"):
        named(trained)
    with pytest.raises(CheckpointError, match=rf"tensor {head}, weight: .*ties it .*float64"):
        named(word.double())


@pytest.mark.parametrize("writer", ["reshard", "ranks"])
def test_every_flipped_bit_of_what_dsx_writes_is_found_and_named(writer: str, tmp_path: Path) -> None:
    """Safetensors has no checksums: dsx adds a CRC32 for each tensor. transformers drops it when it saves."""
    model_of("llama").save_pretrained(tmp_path / "a")
    source = hf_catalog.catalog_of(tmp_path / "a")
    config, out = hf_names.read_config(tmp_path / "a"), tmp_path / "b"
    if writer == "reshard":
        run(source, hf_catalog.target_of(source, out, config, shard_bytes=9000))
    else:
        tensors = load_file(tmp_path / "a" / "model.safetensors")
        hf.finish(out, config, hf.write_shard(out, 0, 1, tensors), specs_of("llama"))
    catalog = hf_catalog.catalog_of(out)
    sums = {(one.file, one.start): one.digest for one in catalog.checksums}
    expected = load_file(tmp_path / "a" / "model.safetensors")
    assert not list(verify(catalog))
    for number, entry in enumerate(catalog.entries):
        (piece,) = entry.pieces
        assert sums[piece.file, piece.offset] == f"{zlib.crc32(expected[entry.name].numpy().tobytes()):08x}"
        path = out / piece.file
        data = bytearray(path.read_bytes())
        at = piece.offset + number * 7919 % entry.num_bytes
        data[at] ^= 1 << number % 8
        path.write_bytes(data)
        (error,) = verify(catalog)
        assert (str(path) in error.where, entry.name in error.where) == (True, True)
        with pytest.raises(DamagedError, match=re.escape(entry.name)):
            run(catalog, hf_catalog.target_of(catalog, tmp_path / "c", config))
        assert not (tmp_path / "c").exists()
        data[at] ^= 1 << number % 8
        path.write_bytes(data)
    AutoModelForCausalLM.from_pretrained(out).save_pretrained(tmp_path / "again")
    assert hf_catalog.catalog_of(tmp_path / "again").checksums == ()


def test_damaged_folders(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="neither model"):
        hf_catalog.catalog_of(tmp_path)
    model_of("gpt2").save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    data = path.read_bytes()
    for length in (0, 7, 8, 100, len(data) - 1):
        path.write_bytes(data[:length])
        with pytest.raises(CheckpointError, match=r"model\.safetensors: not a readable safetensors file"):
            hf_catalog.catalog_of(tmp_path)
    path.write_bytes(data.replace(b'"dtype":"F32"', b'"dtype":"F33"', 1))
    with pytest.raises(CheckpointError, match="unknown variant `F33`"):
        hf_catalog.catalog_of(tmp_path)
    path.write_bytes(data)
    save_file(load_file(path, backend="pread"), path, metadata={"crc32/transformer.ln_f.bias": "xyz"})
    with pytest.raises(CheckpointError, match=r"tensor transformer.ln_f.bias: its CRC32 cannot be 'xyz'"):
        hf_catalog.catalog_of(tmp_path)
    path.write_bytes(data)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"lm_head.weight": "../model.safetensors"}}))
    with pytest.raises(CheckpointError, match="out of the model's folder"):
        hf_catalog.catalog_of(tmp_path)
    index.write_text(json.dumps({"weight_map": {"other": "model.safetensors"}}))
    with pytest.raises(CheckpointError, match="tensor other: the file does not have it"):
        hf_catalog.catalog_of(tmp_path)
