"""``dsx.adapter``: what is refused, with the fix, and what it adds, beside PEFT's folders and parameters."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from all_families.tiny import tiny_config
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

import dsx
from dsx.checkpoint.catalog import Catalog, Entry
from dsx.checkpoint.claims import model_of
from dsx.checkpoint.formats.huggingface.weights import HfWeights
from dsx.checkpoint.run.state import require_same_model
from dsx.config.adapter import WEIGHTS
from dsx.errors import CheckpointError, ConfigError
from dsx.hub.read import hub_model
from dsx.models.adapters import ALL_LINEAR, peft_specs
from dsx.models.params import param_specs
from dsx.models.presets import find_preset
from dsx.models.spec import Adapter, PresetFamily
from often import often
from parity import dsx_run, oracle


def resolved(adapter: dict[str, Any], family: str = "llama", world_size: int = 1, **model: Any) -> Any:
    config = dsx_run.config(dsx_run.Case(family=family, adapter=tuple(adapter.items())), None)
    config["dsx"]["model"] |= model
    return dsx.load_config(config, world_size=world_size)


MISTAKES = {
    "llama": [
        ({"targets": ["q_prj"]}, "dsx.adapter.targets[0]", 'write "q_proj"'),
        ({"targets": "v_proj"}, "dsx.adapter.targets", 'write ["v_proj"]'),
        ({"targets": ".*qproj"}, "dsx.adapter.targets", "whole name of no linear"),
        ({"targets": "(q_proj"}, "dsx.adapter.targets", "no regular expression"),
        ({"targets": ".*(q_proj|head)"}, "dsx.adapter.targets", 'put "lm_head" into dsx.adapter.train_also'),
        ({"targets": ["v_proj", "embed_tokens"]}, "dsx.adapter.targets[1]", "dsx.adapter.train_also"),
        ({"targets": ["lm_head"]}, "dsx.adapter.targets[0]", "a table of the vocabulary"),
        ({"targets": ["input_layernorm"]}, "dsx.adapter.targets[0]", "it is no linear"),
        ({"targets": []}, "dsx.adapter.targets", "no such linear"),
        ({"train_also": ["lm_heads"]}, "dsx.adapter.train_also[0]", 'write "lm_head"'),
        ({"train_also": ["k_proj"]}, "dsx.adapter.train_also", "one matrix in dsx's modules"),
        ({"train_also": ["self_attn", "mlp"]}, "dsx.adapter.targets", "those that train_also names"),
        ({"target_parameters": ["experts.up"]}, "dsx.adapter.target_parameters[0]", "leave it out"),
        ({"rank": 0}, "dsx.adapter.rank", "at least 1"),
        ({"dropout": 1.0}, "dsx.adapter.dropout", ""),
        ({"type": "qlora"}, "dsx.adapter.type", '"lora"'),
        ({"r": 8}, "dsx.adapter.r", "unknown key"),
        ({"quantization": "fp4"}, "dsx.adapter.quantization", '"nf4"'),
        ({"quantization": "nf4"}, "dsx.adapter.quantization", "are 24 numbers long, no multiple of the 64"),
        ({"path": "nowhere"}, "dsx.adapter.path", "adapter_config.json"),
    ],
    "qwen2_moe": [
        ({"target_parameters": ["experts.gate_up"]}, "dsx.adapter.target_parameters[0]", "gate_up_proj"),
        (
            {"target_parameters": ["experts.down_proj"], "dropout": 0.1},
            "dsx.adapter.dropout",
            "one of the two",
        ),
        ({"target_parameters": ["experts.down_proj"], "type": "dora"}, "dsx.adapter.type", "one of the two"),
        ({"targets": ["experts"]}, "dsx.adapter.targets[0]", "it is no linear"),
    ],
}


@pytest.mark.parametrize(
    ("family", "adapter", "where", "said"),
    [(family, *mistake) for family, mistakes in MISTAKES.items() for mistake in mistakes],
)
def test_a_mistake_is_named_with_its_fix(family: str, adapter: dict[str, Any], where: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolved(adapter, family=family)
    assert caught.value.where.startswith(where)
    assert said in str(caught.value)


def test_modules_of_transformers_are_named_apart() -> None:
    run = resolved({"train_also": ["k_proj"]}, implementation="transformers")
    assert {spec.hf[0] for spec in run.param_specs if spec.trained and not spec.adapts} == {
        f"model.layers.{block}.self_attn.k_proj.weight" for block in range(4)
    }


def test_linears_called_conv1d_are_adapted_in_their_own_orientation() -> None:
    run = resolved({"rank": 4}, family="gpt2", implementation="transformers")
    shapes = {spec.hf[0].partition(".h.0.")[2]: spec.shape for spec in run.param_specs if spec.adapts}
    width = run.model.hidden_size
    assert shapes["attn.c_attn.lora_A.weight"] == (4, width)
    assert shapes["attn.c_attn.lora_B.weight"] == (3 * width, 4)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of PEFT's."""
    folder = tmp_path_factory.mktemp("peft")
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**oracle.LLAMA))
    settings = LoraConfig(
        r=3, lora_alpha=5, use_rslora=True, use_dora=True, target_modules=["q_proj", "up_proj"]
    )
    get_peft_model(model, settings).save_pretrained(folder)
    return folder


def test_a_folder_supplies_what_it_was_made_with(saved: Path) -> None:
    adapter = resolved({"path": str(saved), "dropout": 0.25}).model.adapter
    assert isinstance(adapter.targets, tuple)
    assert set(adapter.targets) == {"q_proj", "up_proj"}
    expected = Adapter(type="dora", rank=3, alpha=5, rslora=True, dropout=0.25, targets=adapter.targets)
    assert adapter == expected


def test_an_adapter_of_another_model_is_said_to_be_one(saved: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        resolved({"path": str(saved)}, family="gpt2")
    assert (caught.value.path, caught.value.value) == (("dsx", "adapter", "path"), str(saved))
    assert "of another model" in caught.value.what
    assert "base_model_name_or_path" in caught.value.fix


def test_a_resolved_config_says_what_the_folder_supplied(saved: Path) -> None:
    run = resolved({"path": str(saved)})
    again = dsx.load_config(run.resolved(), world_size=1)
    assert again.dsx.adapter == run.dsx.adapter
    assert again.model.adapter == run.model.adapter
    assert again.num_trained < again.num_parameters == run.num_parameters


def test_keys_that_mean_the_same_agree_with_a_folder(saved: Path) -> None:
    assert resolved({"path": str(saved), "rank": 3, "targets": r".*\.(q|up)_proj"}).model.adapter.rank == 3


@pytest.mark.parametrize(
    ("key", "value"),
    [("rank", 4), ("type", "lora"), ("alpha", 8.0), ("rslora", False), ("targets", ["q_proj"])],
)
def test_keys_that_contradict_a_folder_are_refused(saved: Path, key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"the adapter in .* leave {key} out") as caught:
        resolved({"path": str(saved), key: value})
    assert caught.value.path == ("dsx", "adapter", key)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"peft_type": "IA3"}, "IA3"),
        ({"task_type": "SEQ_CLS"}, "SEQ_CLS"),
        ({"bias": "all"}, "bias"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern"),
        ({"layers_to_transform": [9]}, "layers_to_transform"),
        ({"r": -1}, "r = -1"),
        ({"target_modules": ["c_attn"]}, "no linear of the model's blocks"),
    ],
)
def test_a_folder_that_asks_for_what_dsx_does_not_compute(
    saved: Path, tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    told = json.loads((saved / "adapter_config.json").read_text()) | change
    (tmp_path / "adapter_config.json").write_text(json.dumps(told))
    with pytest.raises(ConfigError, match=said):
        resolved({"path": str(tmp_path)})


@pytest.mark.parametrize("wrong", ["lost", "shape", "other"])
def test_weights_that_are_not_the_adapters_are_refused(saved: Path, tmp_path: Path, wrong: str) -> None:
    tensors = load_file(saved / WEIGHTS)
    name = min(tensors)
    if wrong == "lost":
        del tensors[name]
    elif wrong == "shape":
        tensors[name] = torch.zeros(2, 2)
    else:
        tensors["base_model.model.lm_head.lora_A.weight"] = torch.zeros(3, 24)
    save_file(tensors, tmp_path / WEIGHTS, metadata={"format": "pt"})
    specs = peft_specs(resolved({"path": str(saved)}).param_specs)
    with HfWeights(tmp_path, file=WEIGHTS) as weights, pytest.raises(CheckpointError) as caught:
        weights.check(specs)
    assert ("lm_head" if wrong == "other" else name) in str(caught.value)


MOE = {
    "model_type": "qwen2_moe", "vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 24, "intermediate_size": 48,
    "num_experts": 4, "num_experts_per_tok": 2, "decoder_sparse_step": 1,
}  # fmt: skip


def peft_shapes(config: dict[str, Any], **settings: Any) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors that PEFT would save of a fresh adapter."""
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    state = get_peft_model_state_dict(get_peft_model(model, LoraConfig(**settings)))
    return {name: tuple(tensor.shape) for name, tensor in state.items()}


def our_shapes(model: Any, adapter: Adapter) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors that dsx's parameters are in PEFT's files."""
    found = {}
    for spec in peft_specs(param_specs(replace(model, adapter=adapter))):
        for name, box in spec.hf_boxes:
            shape = [stop - start for start, stop in box]
            found[name] = tuple(reversed(shape) if spec.hf_transposed else shape)
    return found


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gpt2", "gpt_neox", "gemma2"])
@pytest.mark.parametrize("use_dora", [False, True])
def test_an_adapter_on_every_linear_has_the_tensors_that_peft_saves(
    family: PresetFamily, use_dora: bool
) -> None:
    config = dict(find_preset(family, "tiny").config)
    adapter = Adapter(type="dora" if use_dora else "lora", rank=4)
    theirs = peft_shapes(config, r=4, target_modules="all-linear", use_dora=use_dora)
    assert our_shapes(model_of(config), adapter) == theirs
    assert our_shapes(hub_model(config), adapter) == theirs


@pytest.mark.parametrize(
    ("targets", "also"),
    [
        (("q_proj", "v_proj"), ("embed_tokens", "lm_head")),
        (("model.layers.1.mlp.down_proj", "k_proj"), ("norm",)),
        (r".*\.1\..*(o|up)_proj", ()),
        (("up_proj", "q_proj"), ("mlp",)),
    ],
)
def test_targets_name_the_modules_that_they_name_in_peft(
    targets: str | tuple[str, ...], also: tuple[str, ...]
) -> None:
    config = dict(find_preset("qwen2", "tiny").config) | {"tie_word_embeddings": False}
    modules = targets if isinstance(targets, str) else list(targets)
    theirs = peft_shapes(config, r=2, target_modules=modules, modules_to_save=list(also))
    adapter = Adapter(rank=2, targets=targets, train_also=also)
    for model in (model_of(config), hub_model(config)):
        assert our_shapes(model, adapter) == theirs


def test_routers_and_experts_are_no_linears_and_those_beside_them_are() -> None:
    theirs = peft_shapes(MOE, r=2, target_modules="all-linear")
    assert our_shapes(hub_model(MOE), Adapter(rank=2)) == theirs


@pytest.mark.parametrize("parameters", [("experts.gate_up_proj", "down_proj"), ("mlp.experts.gate_up_proj",)])
def test_experts_get_the_tensors_that_peft_saves(parameters: tuple[str, ...]) -> None:
    theirs = peft_shapes(MOE, r=2, target_modules=["q_proj"], target_parameters=list(parameters))
    assert (
        our_shapes(hub_model(MOE), Adapter(rank=2, targets=("q_proj",), target_parameters=parameters))
        == theirs
    )


# What PEFT makes of an adapter on linears on which dsx puts none: it refuses, never computes with it, or does
# so without the kernels that pass by it on GPUs.
LEFT_OUT = {
    "mamba": {"out_proj": "refused", "dt_proj": "unused"},
    "falcon_mamba": {"out_proj": "refused", "dt_proj": "unused"},
    "jamba": {"dt_proj": "unused"},
    "mamba2": {"out_proj": "refused"},
    "nemotron_h": {"out_proj": "refused"},
    "bamba": {"out_proj": "used"},
    "granitemoehybrid": {"out_proj": "used"},
}


def made_by_peft(family: str, targets: list[str]) -> dict[str, str]:
    """For each target, whether PEFT refuses an adapter on it, does not compute with it, or uses it."""
    torch.manual_seed(0)
    found = {}
    for target in targets:
        model = AutoModelForCausalLM.from_config(tiny_config(family))
        try:
            adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["in_proj", target]))
        except ValueError:
            found[target] = "refused"
            continue
        adapted(torch.arange(48).view(2, 24)).logits.sum().backward()
        factors = [each for name, each in adapted.named_parameters() if f"{target}.lora_B." in name]
        found[target] = "unused" if all(each.grad is None for each in factors) else "used"
    return found


@pytest.mark.parametrize("family", often(LEFT_OUT, 2))
def test_linears_whose_adapter_would_not_be_used_get_none(family: str) -> None:
    config = json.loads(tiny_config(family).to_json_string(use_diff=False)) | {"vocab_size": 257}

    def adapted(targets: Any) -> set[str]:
        held = resolved({"targets": targets}, config=config).param_specs
        return {spec.hf[0].split(".")[-3] for spec in held if spec.adapts}

    mixers = {"in_proj", "x_proj", "dt_proj", "out_proj"} & {
        name.rpartition(".")[2]
        for name, module in AutoModelForCausalLM.from_config(tiny_config(family)).named_modules()
        if isinstance(module, torch.nn.Linear)
    }
    used = mixers - LEFT_OUT[family].keys()
    held = resolved({"targets": ["in_proj"], "quantization": "int8"}, config=config).param_specs
    assert used == mixers & {spec.hf[0].split(".")[-2] for spec in held if spec.quantized != "none"}
    assert made_by_peft(family, sorted(mixers)) == dict.fromkeys(used, "used") | LEFT_OUT[family]
    assert adapted(ALL_LINEAR) & mixers == used
    for target in LEFT_OUT[family]:
        with pytest.raises(ConfigError, match=r"dsx\.adapter\.targets.* past any adapter"):
            adapted(["in_proj", target])
        with pytest.raises(ConfigError, match=r"dsx\.adapter\.targets.* past any adapter"):
            adapted(f".*(in_proj|{target})")
        with pytest.raises(ConfigError) as caught:
            adapted([target.replace("_", "")])
        assert f'"{target}"' not in caught.value.fix


@pytest.mark.parametrize("family", ["mamba2", "jamba"])
def test_folders_with_adapters_that_would_not_be_trained(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    described = tiny_config(family)
    described.vocab_size = 257
    config = json.loads(described.to_json_string(use_diff=False))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(described)
    model.save_pretrained(tmp_path / "base")
    past = min(LEFT_OUT[family])
    settings = {"r": 2, "target_modules": "all-linear", "init_lora_weights": False}
    adapted = get_peft_model(model, LoraConfig(**settings, exclude_modules=[past]))
    adapted.save_pretrained(tmp_path / "without")
    held = resolved({"path": str(tmp_path / "without")}, config=config).param_specs
    assert {past in spec.hf[0] for spec in held if spec.adapts} == {False}
    # As folders are that dsx wrote when it had adapters where PEFT refuses them.
    monkeypatch.setattr("peft.tuners.tuners_utils._check_lora_target_modules_mamba", lambda *_: None)
    adapted = get_peft_model(adapted.unload(), LoraConfig(**settings)).eval()
    adapted.save_pretrained(tmp_path / "with")
    with pytest.raises(ConfigError, match=r"dsx\.adapter\.path.* past any adapter.*dsx reshard --to hf"):
        resolved({"path": str(tmp_path / "with")}, config=config)
    made, _ = dsx.load_transformers(tmp_path / "with", config=tmp_path / "base", tokenizer="bytes")
    ids = torch.arange(20)[None]
    expected = adapted.merge_and_unload()(ids).logits
    torch.testing.assert_close(made(ids).logits, expected, rtol=0, atol=1e-4)


def test_a_checkpoint_with_adapters_that_are_left_out_today_says_how_to_go_on() -> None:
    form = {"state": "weight", "shape": (2, 4), "dtype": "float32", "pieces": ()}
    held = Entry(name="1.block.mixer.out_proj.lora_a", **form)
    catalog = Catalog(root=Path("run"), format="dsx-2", entries=(held,))
    with pytest.raises(CheckpointError, match=r"out_proj\.lora_a .* alone.*dsx reshard --to hf"):
        require_same_model(catalog, {})
