"""The parameters of an adapter, beside those that PEFT makes on transformers' own model."""

from dataclasses import replace
from typing import Any

import pytest
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from transformers import AutoConfig, AutoModelForCausalLM

from dsx.hub.read import hub_model
from dsx.models.adapters import peft_specs
from dsx.models.hf_config import model_spec
from dsx.models.params import param_specs
from dsx.models.presets import find_preset
from dsx.models.spec import Adapter, Family

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
def test_an_adapter_on_every_linear_has_the_tensors_that_peft_saves(family: Family, use_dora: bool) -> None:
    config = dict(find_preset(family, "tiny").config)
    adapter = Adapter(type="dora" if use_dora else "lora", rank=4)
    theirs = peft_shapes(config, r=4, target_modules="all-linear", use_dora=use_dora)
    assert our_shapes(model_spec(config), adapter) == theirs
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
    for model in (model_spec(config), hub_model(config)):
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
