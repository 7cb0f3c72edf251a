"""Models that are given with their weights: what of them is taken, and what is refused by name."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from torch import nn
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    LlamaForCausalLM,
    TrainingArguments,
)
from transformers.models.llama.modeling_llama import LlamaMLP

import dsx
from dsx.errors import ConfigError, DsxError, ModelError
from dsx.trainer.configure import GivenModel
from trainer import scripts_of_both as scripts

LLAMA = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}


def made(**values):
    torch.manual_seed(3)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **LLAMA, **values))


def attribute(path, name, value):
    return lambda whole: setattr(whole.get_submodule(path), name, value)


def cut(whole):
    whole.model.layers = whole.model.layers[:1]


def turned(whole):
    whole.model.layers = nn.ModuleList(reversed(whole.model.layers))


def shared(whole):
    first, second = whole.model.layers
    second.self_attn.q_proj.weight = first.self_attn.q_proj.weight


def rescaled(whole):
    whole.model.rotary_emb.inv_freq.mul_(2)


def own_attention(whole):
    AttentionInterface.register("mine", lambda *_: None)
    whole.config._attn_implementation = "mine"


CHANGES = {
    "hook": (
        lambda whole: whole.model.layers[0].mlp.register_forward_hook(lambda *_: None),
        "layers.0.mlp: it has a hook",
    ),
    "hook of a gradient": (
        lambda whole: whole.lm_head.weight.register_hook(lambda g: 2 * g),
        "lm_head.weight: it has a hook",
    ),
    "forward": (lambda whole: vars(whole.lm_head).update(forward=abs), "lm_head: it has a forward"),
    "mode that stays": (
        attribute("model.layers.0", "train", lambda mode=True: None),
        "layers.0: it has a train of its own",
    ),
    "loss": (lambda whole: setattr(whole, "loss_function", abs), "_loss_function: it is <built-in"),
    "tie": (lambda whole: setattr(whole.config, "tie_word_embeddings", True), "two tensors"),
    "number of a norm": (attribute("model.norm", "variance_epsilon", 1e-3), "variance_epsilon: it is 0.001"),
    "number of the config": (
        lambda whole: setattr(whole.config, "rms_norm_eps", 1e-3),
        "variance_epsilon: it is 1e-06, where the config makes 0.001",
    ),
    "scale": (attribute("model.layers.1.self_attn", "scaling", 1.0), "layers.1.self_attn.scaling: it is 1.0"),
    "number of a layer": (attribute("model.layers.1.self_attn", "layer_idx", 0), "layer_idx: it is 0"),
    "dropout": (attribute("model.layers.0.self_attn", "attention_dropout", 0.5), "dropout: it is 0.5"),
    "activation": (attribute("model.layers.0.mlp", "act_fn", nn.GELU()), "act_fn: it is a torch.nn.modules"),
    "module": (attribute("model.layers.0", "mlp", nn.Identity()), "layers.0.mlp: it is a torch.nn.modules"),
    "fewer layers": (cut, "model.layers.1: it is missing"),
    "layers in another order": (turned, "self_attn.layer_idx: it is 1, where the config makes 0"),
    "shared tensors": (shared, "layers.0.self_attn.q_proj.weight: it is one tensor with model.layers.1"),
    "buffer": (rescaled, "rotary_emb.inv_freq: its values are not those that are computed"),
    "buffers cast": (lambda whole: whole.bfloat16(), "rotary_emb.inv_freq: it was cast to torch.bfloat16"),
    "attention": (own_attention, 'attn_implementation = "mine" is a function of the program'),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_what_layers_of_the_config_would_not_have_is_refused(tmp_path, name):
    change, said = CHANGES[name]
    whole = made()
    change(whole)
    with pytest.raises(ModelError) as caught:
        GivenModel.of(whole, tmp_path)
    assert said in str(caught.value)


ADAPTED = {
    "scale": (lambda layer: layer.scaling.update(default=1.0), "q_proj.scaling: it is {'default': 1.0}"),
    "merged": (lambda layer: layer.merge(), "q_proj.merged_adapters: it is ['default']"),
    "off": (lambda layer: layer.enable_adapters(False), "a part of the adapter is frozen"),
    "dropout": (
        lambda layer: layer.lora_dropout.update({"default": nn.Dropout(0.5)}),
        "q_proj.lora_dropout.default: it is a torch.nn.modules.dropout.Dropout",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ADAPTED)
def test_what_the_settings_of_an_adapter_do_not_say_is_refused(tmp_path, name):
    change, said = ADAPTED[name]
    whole = scripts.with_adapter(made())
    change(whole.base_model.model.model.layers[1].self_attn.q_proj)
    with pytest.raises(ModelError) as caught:
        GivenModel.of(whole, tmp_path)
    assert said in str(caught.value)


def test_an_adapter_that_transformers_has_added_is_refused(tmp_path):
    from peft import LoraConfig

    whole = made()
    whole.add_adapter(LoraConfig(r=4, target_modules=["q_proj"]))
    with pytest.raises(ModelError, match="its adapter was added to the model itself"):
        GivenModel.of(whole, tmp_path)


def used(whole):
    ids = torch.arange(10)[None]
    whole(input_ids=ids, labels=ids).loss.backward()


TAKEN = {
    "evaluated": lambda whole: whole.eval(),
    "recomputed": lambda whole: whole.activation_checkpointing_enable(),
    "inputs with gradients": lambda whole: whole.enable_input_require_grads(),
    "used": used,
    "noted": lambda whole: setattr(whole, "comment", "a word that no class reads"),
    "eager": lambda whole: whole.set_attn_implementation("eager"),
    "longer vocabulary": lambda whole: whole.resize_token_embeddings(140),
    "adapted": scripts.with_adapter,
}


@pytest.mark.parametrize("name", TAKEN)
def test_what_changes_no_figure_is_taken(tmp_path, name):
    whole = made()
    changed = TAKEN[name](whole)
    given = GivenModel.of(changed if hasattr(changed, "peft_config") else whole, tmp_path)
    assert given.whole is whole


@pytest.mark.parametrize("start", [False, "gaussian", "olora", "pissa", "orthogonal"])
def test_adapters_of_any_start_are_taken(tmp_path, start):
    assert GivenModel.of(scripts.with_adapter(made(), start), tmp_path).adapter is not None


@pytest.mark.parametrize("tied", [False, True])
def test_adapters_of_a_longer_vocabulary_have_its_rows_or_are_refused(tmp_path, tied):
    """PEFT would write the model's own tables into the adapter's folder."""
    from peft import LoraConfig, get_peft_model

    def given(**more):
        made(tie_word_embeddings=tied).save_pretrained(tmp_path / "model")
        whole = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
        whole.resize_token_embeddings(140)
        lora = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], ensure_weight_tying=tied, **more)
        return get_peft_model(whole, lora)

    with pytest.raises(ModelError, match=r"lm_head.weight: its vocabulary was resized"):
        GivenModel.of(given(), tmp_path)
    whole = given(modules_to_save=["embed_tokens", "lm_head"])
    json = {"zero_optimization": {"stage": 0}, "dsx": {"parallel": {"tensor": 1, "pipeline": 1}}}
    args = TrainingArguments(str(tmp_path / "out"), deepspeed=json, use_cpu=True, report_to="none")
    trainer = dsx.Trainer(whole, args)
    assert trainer.get_num_trainable_parameters() == sum(
        each.numel() for each in whole.parameters() if each.requires_grad
    )
    with safe_open(tmp_path / "out/given_adapter/adapter_model.safetensors", "pt") as saved:
        tables = {name for name in saved.keys() if "lora" not in name}  # noqa: SIM118
        assert {saved.get_tensor(name).shape for name in tables} == {(140, 32)}
    assert tables <= {f"base_model.model.{name}.weight" for name in ("lm_head", "model.embed_tokens")}


def test_a_frozen_head_of_gpt_neox(tmp_path):
    """Files call it otherwise than transformers' module does."""
    sizes = {key: value for key, value in LLAMA.items() if key != "max_position_embeddings"}
    whole = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt_neox", **sizes))
    whole.get_output_embeddings().requires_grad_(False)
    json = {"zero_optimization": {"stage": 0}, "dsx": {"parallel": {"tensor": 1, "pipeline": 1}}}
    args = TrainingArguments(str(tmp_path), deepspeed=json, use_cpu=True, report_to="none")
    trained = sum(each.numel() for each in whole.parameters() if each.requires_grad)
    assert dsx.Trainer(whole, args).get_num_trainable_parameters() == trained


@pytest.mark.parametrize(
    ("mistake", "said"),
    [
        ([], "layers.1.mlp.down_proj.weight: the model does not train it, and it would be trained"),
        (["layers.1"], "layers.1.input_layernorm.weight: the model trains it, and it would be frozen"),
    ],
)
def test_a_run_of_other_parameters_than_the_given_model_trains_is_refused(
    tmp_path, monkeypatch, mistake, said
):
    whole = made()
    whole.get_submodule("model.layers.1.mlp.down_proj").requires_grad_(False)
    block = {"parallel": {"tensor": 1, "pipeline": 1}, "train": {"freeze": ["embed_tokens"]}}
    json = {"zero_optimization": {"stage": 0}, "dsx": block}
    args = TrainingArguments(str(tmp_path), deepspeed=json, use_cpu=True, report_to="none")
    dsx.Trainer(whole, args)  # what the JSON freezes is no difference
    monkeypatch.setattr("dsx.trainer.configure._frozen", lambda _: mistake)
    with pytest.raises(ModelError, match=said):
        dsx.Trainer(whole, args)


def test_a_config_or_folder_of_which_no_model_is_made(tmp_path):
    whole, config = made(), made().config
    whole.config.pad_token_id = config.pad_token_id = LLAMA["vocab_size"]
    for given in (whole, config):
        with pytest.raises(ModelError, match=r"makes no model of its config.*resize_token_embeddings"):
            GivenModel.of(given, tmp_path)
    with pytest.raises(ConfigError, match=r"transformers reads no config there.*the folder of a model"):
        GivenModel.of(tmp_path, tmp_path)
    scripts.with_adapter(made()).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r'it is the folder of an adapter.*"adapter": {"path"'):
        GivenModel.of(tmp_path, tmp_path)


@pytest.mark.parametrize("family", ["gpt2", "gemma2", "mixtral", "qwen3"])
def test_models_of_a_folder_are_what_their_config_makes(tmp_path, family):
    sizes = scripts.FAMILIES["gpt2"] if family == "gpt2" else LLAMA | {"head_dim": 8}
    AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes)).save_pretrained(tmp_path)
    for dtype in (torch.float32, torch.bfloat16):
        GivenModel.of(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype), tmp_path)


@pytest.mark.parametrize("kind", ["target_modules", "modules_to_save"])
def test_a_table_that_is_adapted_keeps_its_padding_row(tmp_path, kind):
    from peft import LoraConfig, get_peft_model

    settings = {"target_modules": ["q_proj"], kind: ["embed_tokens"]}
    given = GivenModel.of(get_peft_model(made(pad_token_id=5), LoraConfig(r=4, **settings)), tmp_path)
    assert given.block["config"]["pad_token_id"] == 5
    assert given.says == {}


@pytest.mark.parametrize(("made_with", "later"), [(None, 5), (5, None), (5, 7)])
def test_the_padding_row_is_that_of_the_models_own_table(tmp_path, made_with, later):
    """pad_token_id is often set later, which leaves the table as it is."""
    whole = made(pad_token_id=made_with)
    whole.config.pad_token_id = later
    given = GivenModel.of(whole, tmp_path)
    assert given.block["config"]["pad_token_id"] == made_with
    assert given.says == {"pad_token_id": later}
    assert given.hf_config.pad_token_id == later


def test_a_class_whose_forward_was_replaced_is_refused(tmp_path, monkeypatch):
    """By dsx's own layers, which would not have it; those of transformers have it."""
    json = {"zero_optimization": {"stage": 1}, "dsx": {"parallel": {"tensor": 1, "pipeline": 1}}}
    args = TrainingArguments(output_dir=str(tmp_path), deepspeed=json, use_cpu=True, report_to="none")
    dsx.Trainer(made(), args)
    usual = LlamaMLP.forward

    def patched(self, x):
        return usual(self, x)

    monkeypatch.setattr(LlamaMLP, "forward", patched)
    with pytest.raises(ModelError, match=r"LlamaMLP.forward: .* has replaced it"):
        dsx.Trainer(made(), args)
    json["dsx"]["model"] = {"implementation": "transformers"}
    dsx.Trainer(made(), args)


def test_a_model_less_exact_than_the_run_is_refused(tmp_path):
    json = {"zero_optimization": {"stage": 1}, "dsx": {"parallel": {"tensor": 1, "pipeline": 1}}}
    whole = made()
    whole.save_pretrained(tmp_path / "model")
    half = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.bfloat16)

    def given(model, **values):
        args = TrainingArguments(str(tmp_path), deepspeed=json, use_cpu=True, report_to="none", **values)
        return dsx.Trainer(model, args).config.precision

    with pytest.raises(
        ModelError, match=r"embed_tokens.weight: it is bfloat16, and the run computes in fp32"
    ):
        given(half)
    assert (given(half, bf16=True), given(whole, bf16=True), given(whole)) == ("bf16", "bf16", "fp32")


def test_a_class_of_the_programs_own_is_refused(tmp_path):
    whole = made()
    whole.__class__ = type("LlamaForCausalLM", (LlamaForCausalLM,), {})
    with pytest.raises(ModelError, match="its class is one of test_trainer_given"):
        GivenModel.of(whole, tmp_path)


def test_models_that_cannot_be(tmp_path):
    base = AutoModel.from_config(made().config)
    meta, parts = made().to("meta"), made()
    parts.lm_head.weight.device_mesh = "as of torch's DTensor"
    for given, said in (
        (base, "dsx trains causal language models"),
        (meta, "meta device"),
        (parts, "transformers has cut its tensors over ranks"),
        (SimpleNamespace(), "no model of transformers"),
        (str(tmp_path / "nothing.here/at/all"), "there is no such folder"),
        (AutoConfig.for_model("t5"), "causal language models"),
    ):
        with pytest.raises(DsxError) as caught:
            GivenModel.of(given, tmp_path)
        assert said in str(caught.value)


def test_what_a_given_model_trains_beside_or_not_of_its_adapter_is_refused(tmp_path):
    def given(pattern, trained):
        whole = scripts.with_adapter(made())
        for name, parameter in whole.named_parameters():
            if pattern in name:
                parameter.requires_grad_(trained)
        with pytest.raises(ModelError) as caught:
            GivenModel.of(whole, tmp_path)
        return str(caught.value)

    assert "input_layernorm.weight: it is trained beside the adapter" in given("0.input_layernorm", True)
    assert "a part of the adapter is frozen" in given("1.self_attn.q_proj.lora_A", False)
