"""Composite folders: their language model is trained as it is alone, and the tower rides along."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from all_families import parity, tiny
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import dsx
import ranks
from dsx.checkpoint.composite import composite_at
from dsx.checkpoint.execute import ConversionOptions
from dsx.checkpoint.open import open_checkpoint
from dsx.checkpoint.reshard import WantedTarget, prepare
from dsx.errors import CheckpointError, ModelError
from dsx.hub.composite import language_config
from dsx.hub.model_structure import hf_config_of
from hub.test_hub_weights import CASE, config_of, engine_of, same, tensors_in
from often import often
from parity import dsx_run

SOME = ["gemma3", "llama4", "qwen2_5_vl", "mistral3", "qwen3_vl", "internvl", "audioflamingo3"]
IMAGE = 258
ONCE = ConversionOptions(workers=1)


@pytest.mark.parametrize(("family", "layout"), often([(f, lay) for lay in ("tp-pp", "dp") for f in SOME], 14))
def test_text_trains_like_the_composite_class_with_its_tower_frozen(
    family: str, layout: str, tmp_path: Path
) -> None:
    """Losses, norms, every tensor of the export and its logits, at tp 2 x pp 2 and at ZeRO-3."""
    found = dict(parity.prove(family, [layout], folder=tmp_path, implementation="auto"))
    assert found.pop("").get("failed") is None
    assert found[layout]["result"] == "ok", json.dumps(found, indent=1)


def gemma3(folder: Path) -> Path:
    """Four tokens for an image of 64 x 64; the head tied; the tower in bf16."""
    config = tiny.tiny_composite("gemma3", vocab_size=260)
    config.vision_config.image_size, config.mm_tokens_per_image, config.image_token_index = 64, 4, IMAGE
    model = parity.random_model(config)
    model.model.vision_tower.to(torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="200KB")
    (folder / "preprocessor_config.json").write_text('{"do_resize": true}')
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


def of_images(folder: Path) -> torch.Tensor:
    """Logits of a text with an image, of a folder as its own class reads it."""
    model, told = AutoModelForImageTextToText.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not any(told.values())
    pixels = torch.randn(1, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    ids = torch.tensor([[5, 6, *[IMAGE] * 4, 7, 8, 9]])
    with torch.no_grad():
        return model.eval()(input_ids=ids, pixel_values=pixels, token_type_ids=(ids == IMAGE).int()).logits


def in_and_out(_rank: int, world_size: int, folder: Path) -> None:
    settings = config_of(folder / "model")
    engine = engine_of(settings, world_size)
    assert not any("vision" in name for name, _ in engine.pipeline.named_parameters())
    dsx.export_hf(engine, folder / "unchanged")
    engine.train_batch(dsx_run.batches(CASE, 0, engine.groups.dp_rank))
    engine.save_checkpoint(str(folder / "run"))
    dsx.export_hf(engine, folder / "trained")
    again = engine_of(settings, world_size)
    again.load_checkpoint(str(folder / "run"))
    dsx.export_hf(again, folder / "resumed")
    settings["dsx"]["adapter"] = {"rank": 4, "targets": "all-linear", "train_also": ["norm"]}
    tuned = engine_of(settings, world_size)
    for step in range(2):
        tuned.train_batch(dsx_run.batches(CASE, step, tuned.groups.dp_rank))
    tuned.save_checkpoint(str(folder / "tuned"))
    dsx.export_hf(tuned, folder / "peft")
    settings["dsx"]["adapter"] = {"path": str(folder / "peft")}
    dsx.export_hf(engine_of(settings, world_size), folder / "peft again")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Gemma 3 over two tensor ranks and two stages."""
    folder = tmp_path_factory.mktemp("runs")
    gemma3(folder / "model")
    ranks.run(in_and_out, 4, folder)
    return folder


def test_an_untrained_folder_comes_out_as_it_went_in(runs: Path) -> None:
    known = tensors_in(runs / "model")
    tower = {tensor.dtype for name, tensor in known.items() if "vision_tower" in name}
    assert tower == {torch.bfloat16}
    assert same(tensors_in(runs / "unchanged"), known)
    assert torch.equal(of_images(runs / "unchanged"), of_images(runs / "model"))
    index = json.loads((runs / "unchanged/model.safetensors.index.json").read_text())["weight_map"]
    assert index.keys() == known.keys()
    for file in ("preprocessor_config.json", "chat_template.jinja"):
        assert (runs / "unchanged" / file).read_bytes() == (runs / "model" / file).read_bytes()
    config = json.loads((runs / "unchanged/config.json").read_text())
    assert config["architectures"] == ["Gemma3ForConditionalGeneration"]
    assert config["mm_tokens_per_image"] == 4


def test_what_is_trained_is_the_text(runs: Path, tmp_path: Path) -> None:
    """The trainer's export, that of the resumed run, and the one that is made of the checkpoint."""
    known, trained = tensors_in(runs / "model"), tensors_in(runs / "trained")
    assert trained.keys() == known.keys()
    for name, tensor in known.items():
        assert torch.equal(trained[name], tensor) != ("language_model" in name), name
    assert same(tensors_in(runs / "resumed"), trained)
    prepare(open_checkpoint(runs / "run"), tmp_path / "hf", WantedTarget(format="hf")).run(ONCE)
    assert same(tensors_in(tmp_path / "hf"), trained)
    assert torch.equal(of_images(tmp_path / "hf"), of_images(runs / "trained"))
    assert (tmp_path / "hf/preprocessor_config.json").is_file()
    prepare(open_checkpoint(tmp_path / "hf"), tmp_path / "dsx", WantedTarget()).run(ONCE)
    prepare(open_checkpoint(tmp_path / "dsx"), tmp_path / "again", WantedTarget(format="hf")).run(ONCE)
    assert same(tensors_in(tmp_path / "again"), trained)
    prepare(open_checkpoint(tmp_path / "hf"), tmp_path / "copy", WantedTarget(format="hf")).run(ONCE)
    assert same(tensors_in(tmp_path / "copy"), trained)


def test_a_folder_that_has_gone_is_named(runs: Path, tmp_path: Path) -> None:
    moved = shutil.copytree(runs / "model", tmp_path / "moved")
    source = open_checkpoint(runs / "run")
    gone = {**source.facts["composite"], "path": str(tmp_path / "gone")}
    source = replace(source, facts={**source.facts, "composite": gone})
    with pytest.raises(CheckpointError, match=r"gone: the other parts of the model of .* --base"):
        prepare(source, tmp_path / "hf", WantedTarget(format="hf"))
    prepare(source, tmp_path / "hf", WantedTarget(format="hf", base=moved)).run(ONCE)
    assert same(tensors_in(tmp_path / "hf"), tensors_in(runs / "trained"))
    with pytest.raises(CheckpointError, match="the weights there are others"):
        prepare(source, tmp_path / "other", WantedTarget(format="hf", base=runs / "trained"))


def test_an_adapter_is_peft_s_of_the_composite_model(runs: Path, tmp_path: Path) -> None:
    """Read by PEFT it gives the logits of the merged folder, and no part of the tower is adapted."""
    base = AutoModelForImageTextToText.from_pretrained(runs / "model", dtype=torch.float32)
    tuned = PeftModel.from_pretrained(base, runs / "peft")
    names = [name for name, _ in tuned.named_parameters() if "lora_" in name]
    assert names
    assert all(".model.language_model.layers." in name for name in names)
    tuned.merge_and_unload().save_pretrained(tmp_path / "theirs")
    prepare(open_checkpoint(runs / "tuned"), tmp_path / "ours", WantedTarget(format="hf")).run(ONCE)
    theirs, ours = of_images(tmp_path / "theirs"), of_images(tmp_path / "ours")
    assert (ours - of_images(runs / "model")).abs().max() > 1e-3
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)
    prepare(open_checkpoint(runs / "tuned"), tmp_path / "peft", WantedTarget(format="peft")).run(ONCE)
    held = load_file(runs / "peft/adapter_model.safetensors")
    for folder in (tmp_path / "peft", runs / "peft again"):
        assert same(load_file(folder / "adapter_model.safetensors"), held)
        told = json.loads((folder / "adapter_config.json").read_text())
        assert set(told["target_modules"]) == set(
            json.loads((runs / "peft/adapter_config.json").read_text())["target_modules"]
        )


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
def test_older_and_newer_names_are_read_and_written_again(prefix: str, tmp_path: Path) -> None:
    """transformers' names in memory, and those of its files, each with a second copy of the tied head."""
    folder = gemma3(tmp_path / "model")
    known = tensors_in(folder)
    end = "embed_tokens.weight"
    start = next(name for name in known if name.endswith(end)).removesuffix(end)
    held = {name.replace(start, prefix): tensor for name, tensor in known.items()}
    held["lm_head.weight"] = held[f"{prefix}embed_tokens.weight"].clone()
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    save_file(held, folder / "model.safetensors")
    found = composite_at(folder)
    assert found is not None
    assert found.names["model.layers.1.mlp.up_proj.weight"] == f"{prefix}layers.1.mlp.up_proj.weight"
    text = {name for name in held if name.startswith(prefix)} | {"lm_head.weight"}
    assert {entry.name for entry in found.tower(())} == held.keys() - text


def refusal(family: str, **outer: Any) -> str:
    config = json.loads(json.dumps(tiny.tiny_composite(family).to_dict())) | outer
    with pytest.raises(ModelError) as told:
        language_config(config)
    return str(told.value)


def test_sound_beside_text_is_of_a_class_for_sequences_to_sequences() -> None:
    assert (
        language_config(json.loads(tiny.tiny_composite("audioflamingo3").to_json_string()))["model_type"]
        == "qwen2"
    )


def test_numbers_of_parts_that_are_no_family_are_read_as_their_classes_want_them() -> None:
    """DeepSpeed reads the 0.0 of a JSON as 0, which transformers' class of the part refuses."""
    config = json.loads(tiny.tiny_composite("fun_asr_nano").to_json_string())
    config["adaptor_config"] |= {"hidden_dropout": 0, "layer_norm_eps": 1}
    adaptor = hf_config_of(config).adaptor_config
    assert type(adaptor.hidden_dropout) is float
    config = json.loads(tiny.tiny_composite("florence2").to_json_string())
    config["vision_config"] |= {"model_type": "florence2", "mlp_ratio": 4}  # the whole's name
    assert type(hf_config_of(config).vision_config.mlp_ratio) is float


def test_what_is_more_than_text_is_refused_with_its_reason() -> None:
    assert "shared_kv_states, which later blocks get too" in refusal("gemma3n")
    assert "composite class computes something else of text" in refusal("cohere2_vision")


def test_the_outer_config_decides_about_ties() -> None:
    config = json.loads(json.dumps(tiny.tiny_composite("qwen2_vl").to_dict()))
    for tied in (True, False):
        said = {**config, "tie_word_embeddings": tied}
        found = language_config(said)
        model = CONFIG_MAPPING["qwen2_vl"].from_dict(said)
        whole = AutoModelForImageTextToText.from_config(model)
        shared = whole.get_output_embeddings().weight is whole.get_input_embeddings().weight
        assert found["tie_word_embeddings"] is shared


def test_a_quantised_folder_comes_out_plain_and_whole(tmp_path: Path) -> None:
    """Text in fp8 beside a plain tower, as published: the same logits of an image as of its plain weights."""
    folder = gemma3(tmp_path / "model")
    known, held = tensors_in(folder), {}
    for name, tensor in known.items():
        if name.endswith("proj.weight") and "language_model" in name:
            rows, columns = (-(-extent // 16) for extent in tensor.shape)
            numbers = tensor.to(torch.float8_e4m3fn)
            known[name] = numbers.float().mul(2.0).to(torch.bfloat16)
            held |= {name: numbers, f"{name}_scale_inv": torch.full((rows, columns), 2.0)}
        else:
            held[name] = tensor
    config = json.loads((folder / "config.json").read_text())
    (shutil.copytree(folder, tmp_path / "quantised") / "config.json").write_text(
        json.dumps(config | {"quantization_config": {"quant_method": "fp8", "weight_block_size": [16, 16]}})
    )
    for place, tensors in (("model", known), ("quantised", held)):
        for file in (tmp_path / place).glob("*.safetensors*"):
            file.unlink()
        save_file(tensors, tmp_path / place / "model.safetensors")
    source = open_checkpoint(tmp_path / "quantised")
    prepare(source, tmp_path / "dsx", WantedTarget(format="dsx")).run(ONCE)
    for at, one in enumerate((source, open_checkpoint(tmp_path / "dsx"))):
        prepare(one, tmp_path / f"plain{at}", WantedTarget(format="hf", precision="bf16")).run(ONCE)
        assert "quantization_config" not in json.loads((tmp_path / f"plain{at}/config.json").read_text())
        assert same(
            {name: tensor.to(torch.bfloat16) for name, tensor in tensors_in(tmp_path / f"plain{at}").items()},
            {name: tensor.to(torch.bfloat16) for name, tensor in known.items()},
        )
    torch.testing.assert_close(of_images(tmp_path / "plain1"), of_images(folder), rtol=0, atol=2e-2)
