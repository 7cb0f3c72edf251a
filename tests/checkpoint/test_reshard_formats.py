"""Hugging Face folders and stock checkpoints through ``dsx reshard``, against transformers."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
import transformers
from safetensors.torch import load_file

import made
from checkpoint import stock_checkpoints
from checkpoint.stock_checkpoints import Stock
from dsx.checkpoint.execute import ConversionOptions
from dsx.checkpoint.formats import native
from dsx.checkpoint.layouts import TargetDegrees, layout_like
from dsx.checkpoint.open import open_checkpoint
from dsx.checkpoint.read import DamagedError, compare
from dsx.checkpoint.reshard import WantedTarget, prepare

COMMAND = ("reshard",)


@pytest.fixture(params=["gpt2", "llama", "qwen3", "gpt_neox"])
def model(request, tmp_path):
    """A model folder that transformers saved, in several files."""
    torch.manual_seed(5)
    config = transformers.AutoConfig.for_model(**made.CONFIGS[request.param])
    found = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    found.save_pretrained(tmp_path / "model", max_shard_size="10KB")
    return request.param, found, tmp_path / "model"


def test_a_model_folder_to_any_layout_and_back_is_what_transformers_saved(dsx, model, tmp_path):
    family, live, folder = model
    for number, to in enumerate(["tp=2,pp=2,chunks=2,dp=2,zero=1", "tp=1,pp=3,dp=3,zero=3"]):
        there, back = tmp_path / f"dsx{number}", tmp_path / f"hf{number}"
        assert dsx(folder, there, "--to", to)[0] == 0
        names = {entry.name for entry in open_checkpoint(there).entries}
        assert names == {spec.name for spec in made.layout(family).params}
        assert dsx(there, back, "--to", "hf")[0] == 0
        again = transformers.AutoModelForCausalLM.from_pretrained(back)
        assert again.dtype == torch.bfloat16
        for name, tensor in live.state_dict().items():
            assert torch.equal(again.state_dict()[name], tensor), name
        folder = back


def test_a_run_exported_with_a_config_given_by_hand(dsx, tmp_path):
    layout = made.layout("llama", tp=2, dp=2, zero=3)
    bits = made.random_bits(layout.params, made.BF16, seed=9)
    made.reshard(made.plain(tmp_path / "p", layout.params, made.BF16, bits=bits), tmp_path / "run", layout)
    code, _, err = dsx(tmp_path / "run", tmp_path / "hf", "--to", "hf")
    assert code == 2
    assert "give --hf-config FILE" in err
    (tmp_path / "config.json").write_text(json.dumps(made.CONFIGS["llama"]))
    code, out, err = dsx(
        tmp_path / "run", tmp_path / "hf", "--to", "hf", "--hf-config", tmp_path / "config.json"
    )
    assert (code, err) == (0, "")
    assert "exp_avg, exp_avg_sq and counters stay behind" in out
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    whole = bits["1.attention.qkv.weight", "weight"]
    assert (made.bits_of(tensors["model.layers.0.self_attn.k_proj.weight"]) == whole[16:24]).all()
    wanted = made.bits_of(tensors["model.layers.0.mlp.up_proj.weight"])
    assert (wanted == bits["1.mlp.gate_up.weight", "weight"][20:]).all()


def test_what_ranks_wrote_is_checked_under_other_names_too(tmp_path):
    """A run's own checksums are of stretches of fused tensors; the export reads their parts."""
    layout = made.layout("llama", tp=2)
    made.reshard(made.plain(tmp_path / "p", layout.params, made.BF16), tmp_path / "run", layout)
    catalog = replace(native.catalog_of(tmp_path / "run"), tile_digests={})
    wanted = WantedTarget(format="hf", hf_config=made.CONFIGS["llama"])
    assert prepare(catalog, tmp_path / "good", wanted).run(ConversionOptions()).sums_checked > 0
    entry = catalog.by_key["2.mlp.gate_up.weight", "weight"]
    piece = entry.pieces[-1]
    file = tmp_path / "run" / piece.file
    data = bytearray(file.read_bytes())
    data[piece.offset + 7] ^= 1
    file.write_bytes(data)
    with pytest.raises(DamagedError, match=r"2.mlp.gate_up.weight, weight|mlp.(gate|up)_proj"):
        prepare(catalog, tmp_path / "bad", wanted).run(ConversionOptions())
    assert not list(tmp_path.glob("bad*"))


def test_a_stock_run_goes_through_dsx_and_stock_deepspeed_goes_on_with_it(dsx, tmp_path):
    """Stock ZeRO-1 -> dsx -> stock ZeRO-3 at another degree: the same states, and training goes on."""
    saved, wanted = Stock(zero=1, bf16=True), Stock(zero=3, dp=3, bf16=True)
    path, lives, _ = stock_checkpoints.save(saved, tmp_path / "stock")
    code, _, err = dsx(path, tmp_path / "dsx" / "x", "--to", "dp=4,zero=2")
    assert (code, err) == (0, "")
    out = tmp_path / "again" / path.name
    code, _, err = dsx(tmp_path / "dsx", out, "--to", "dp=3,zero=3", "--format", "deepspeed")
    assert (code, err) == (0, "")
    assert (out.parent / "latest").read_text() == path.name
    loaded, after = stock_checkpoints.resume(wanted, out)
    for state, tensors in lives[0].states.items():
        for name, tensor in tensors.items():
            if not name.endswith(".seen"):
                assert torch.equal(loaded[0].states[state][name], tensor), (name, state)
    assert all(torch.isfinite(torch.tensor(after[0])))


def test_universal_and_back_keeps_every_state_and_fact(dsx, tmp_path):
    path, _, _ = stock_checkpoints.save(Stock(zero=2, bf16=True), tmp_path / "stock")
    code, _, err = dsx(path, tmp_path / "universal", "--to", "universal")
    assert (code, err) == (0, "")
    assert dsx(tmp_path / "universal", tmp_path / "dsx", "--to", "dp=3,zero=3")[0] == 0
    assert dsx(tmp_path / "dsx", tmp_path / "back", "--to", "deepspeed")[0] == 0
    stock, back = open_checkpoint(path), open_checkpoint(tmp_path / "back")
    found = list(compare(stock, back))
    assert len(found) > 40
    assert all(one.equal for one in found)
    assert back.facts["step"] == stock.facts["step"] == 3
    assert back.facts["lr_scheduler"] == stock.facts["lr_scheduler"]
    assert [g["lr"] for g in back.facts["param_groups"]] == [g["lr"] for g in stock.facts["param_groups"]]


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["--to", "deepspeed", "--tensor", "2"], "how tensor parallelism of degree 2 cuts it"),
        (["--to", "deepspeed", "--chunks", "2"], "pipelines have one stage per rank"),
        (["--to", "deepspeed", "--pipeline", "2"], "the model has 1 layers"),
        (["--to", "universal", "--tensor", "2"], "universal files hold whole tensors"),
        (["--to", "dsx", "--partition", "uniform"], "they are of DeepSpeed's PipelineModule"),
        (["--to", "deepspeed", "--tied", "a=0,1"], "there is no pipeline"),
        (["--to", "deepspeed", "--pipeline", "2", "--partition", "2,x"], "how many layers each of 2 stages"),
        (["--to", "universal", "--zero", "0"], "DeepSpeed loads universal checkpoints with ZeRO alone"),
        (["--names", "hf"], "it is not known what model"),
        (["--to", "tp=2"], "does not say how tensor parallelism of degree 2 cuts"),
    ],
)
def test_what_cannot_be_written_is_said(dsx, tmp_path, arguments, what):
    specs = [replace(spec, name=f"x.{spec.name}") for spec in made.layout("qwen2").params]
    source = made.plain(tmp_path / "p", specs, made.FP32)
    source = replace(source, specs=())
    made.reshard(source, tmp_path / "run", layout_like(source, TargetDegrees()))
    code, _, err = dsx(tmp_path / "run", tmp_path / "out", *arguments)
    assert (code, what in err) == (2, True), err
    assert not (tmp_path / "out").exists()
