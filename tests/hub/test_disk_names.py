"""Names of transformers' models in files, against ``save_pretrained`` and ``from_pretrained``."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from dsx.checkpoint.formats.huggingface import weights as hf
from dsx.errors import CheckpointError, ModelError
from dsx.hub.disk_names import DiskForm, FolderNames, disk_forms
from dsx.hub.read import hub_model
from dsx.models.param import Init, ParamSpec
from dsx.models.transformers_settings import quiet_transformers

SIZES = {
    "vocab_size": 67,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "num_experts_per_tok": 2,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "moe_intermediate_size": 24,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
FAMILIES = {
    "llama": {"tie_word_embeddings": True},
    "mixtral": {"num_local_experts": 3},
    "qwen3_moe": {"num_experts": 3, "moe_intermediate_size": 24},
    "deepseek_v3": LATENT,
    "gpt_oss": {"num_local_experts": 3},
    "granitemoe": {"num_local_experts": 3},
    "phimoe": {"num_local_experts": 3},
    "jetmoe": {"num_local_experts": 3, "kv_channels": 8},
    "nemotron_h": {
        "layers_block_type": ["mamba", "moe"],
        "n_routed_experts": 3,
        "moe_intermediate_size": 24,
        "moe_shared_expert_intermediate_size": 24,
        "n_group": 1,
        "topk_group": 1,
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "ssm_state_size": 8,
        "n_groups": 2,
    },
    "hrm_text": {},
}
MORE_SIZES = {
    **LATENT,
    **dict.fromkeys(("num_experts", "num_local_experts", "moe_num_experts", "num_heads", "n_head"), 4),
    **dict.fromkeys(("moe_topk", "num_layers", "n_layer"), 2),
    **dict.fromkeys(("shared_expert_intermediate_size", "expert_ffn_hidden_size"), 24),
    **dict.fromkeys(("d_model", "n_embd"), 32),
    **dict.fromkeys(("state_size", "kv_channels"), 8),
    "n_groups": 1,
}
JOINED = ("hrm_text",)  # whose files hold several parameters in one tensor


def empty_model(config: Any) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def config_of(family: str, more: dict[str, Any] | None = None) -> Any:
    base = AutoConfig.for_model(family)
    sizes = {name: size for name, size in {**(more or {}), **SIZES}.items() if hasattr(base, name)}
    return AutoConfig.for_model(family, **{**sizes, **FAMILIES.get(family, {})})


def random_model(config: Any) -> Any:
    """A model in which no two elements are likely to be equal, buffers included."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            whole = torch.rand(tensor.shape) if tensor.is_floating_point() else torch.randint(2, tensor.shape)
            tensor.copy_(whole)
    return model


def specs_of(forms: dict[str, DiskForm], model: Any) -> list[ParamSpec]:
    state, init = model.state_dict(), Init(kind="zeros")
    return [
        ParamSpec(name=name, layer=0, shape=tuple(state[name].shape), init=init, **form.in_spec)
        for name, form in forms.items()
    ]


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    files = [load_file(path) for path in folder.glob("*.safetensors")]
    return {name: tensor for file in files for name, tensor in file.items()}


def prove(config: Any, folder: Path) -> dict[str, DiskForm]:
    """Compare names and bits with what transformers writes, and have it read what dsx writes."""
    model = random_model(config)
    forms, state = disk_forms(empty_model(config)), model.state_dict()
    model.save_pretrained(folder / "theirs")
    theirs = tensors_of(folder / "theirs")
    ours: dict[str, torch.Tensor] = {}
    for spec in specs_of(forms, model):
        ours |= hf.split(spec, state[spec.name])
    inexact = {name for name, form in forms.items() if not form.exact}
    assert inexact or ours.keys() == theirs.keys()
    for name in ours.keys() - inexact:
        assert torch.equal(ours[name], theirs[name]), name
    copies = {copy: name for name, form in forms.items() for copy in form.copies}
    assert forms.keys() | copies.keys() == state.keys()
    assert all(state[copy].data_ptr() == state[name].data_ptr() for copy, name in copies.items())
    assert {name for name, form in forms.items() if form.buffer} == {n for n, _ in model.named_buffers()} & {
        *state
    }

    (folder / "ours").mkdir()
    (folder / "ours" / "config.json").write_bytes((folder / "theirs" / "config.json").read_bytes())
    save_file(ours, folder / "ours" / "model.safetensors", metadata={"format": "pt"})
    with quiet_transformers():
        again, told = AutoModelForCausalLM.from_pretrained(folder / "ours", output_loading_info=True)
        known = AutoModelForCausalLM.from_pretrained(folder / "theirs").state_dict()
    assert not any(told.values()), told
    assert all(torch.equal(tensor, known[name]) for name, tensor in again.state_dict().items())
    return forms


@pytest.mark.parametrize("family", FAMILIES)
def test_names_and_values_are_those_of_save_pretrained(family: str, tmp_path: Path) -> None:
    forms = prove(config_of(family), tmp_path)
    assert all(form.exact for form in forms.values()) == (family not in JOINED)
    folder = tmp_path / ("ours" if family in JOINED else "theirs")
    held = tensors_of(folder)
    assert FolderNames(empty_model(config_of(family)), forms).of(held, folder) == {
        name: name for name in held
    }
    model = random_model(config_of(family))
    with hf.HfWeights(folder) as weights:
        for spec in specs_of(forms, model):
            if model.state_dict()[spec.name].is_floating_point():
                assert torch.equal(weights.read(spec), model.state_dict()[spec.name]), spec.name


@pytest.mark.slow
def test_every_family_that_can_be_made_small(tmp_path: Path) -> None:
    """The others are made of several models, or of sizes that have to fit each other."""
    proven, inexact = [], set()
    for family in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        try:
            config = config_of(family, MORE_SIZES)
            small = sum(parameter.numel() for parameter in empty_model(config).parameters()) < 3e7
        except Exception:  # noqa: BLE001 - whatever keeps transformers from making it of these sizes
            continue
        if small and not config.sub_configs:
            forms = prove(config, tmp_path / family)
            proven.append(family)
            inexact |= {family for form in forms.values() if not form.exact}
            shutil.rmtree(tmp_path / family)
    assert len(proven) >= 140
    assert inexact == {"hrm_text", "inkling2_text"}


def test_what_the_forms_say() -> None:
    forms = disk_forms(empty_model(config_of("mixtral")))
    assert forms["model.layers.1.mlp.experts.gate_up_proj"] == DiskForm(
        names=tuple(
            f"model.layers.1.block_sparse_moe.experts.{expert}.{part}.weight"
            for expert in range(3)
            for part in ("w1", "w3")
        ),
        stacked=True,
        split=1,
        parts=(48, 48),
    )
    assert forms["model.layers.1.self_attn.q_proj.weight"] == DiskForm(
        names=("model.layers.1.self_attn.q_proj.weight",)
    )
    tied = disk_forms(empty_model(config_of("llama")))
    assert tied["model.embed_tokens.weight"].copies == ("lm_head.weight",)
    biased = disk_forms(empty_model(config_of("deepseek_v3")))
    assert biased["model.layers.1.mlp.gate.e_score_correction_bias"].buffer


def test_folders_of_others_have_other_names(tmp_path: Path) -> None:
    """A bare model's, one inside a larger model's, those that no model reads, and names in memory."""
    config = AutoConfig.for_model("qwen3_5_moe_text", **SIZES, num_experts=2, moe_intermediate_size=24)
    empty = empty_model(config)
    forms = disk_forms(empty)
    names = FolderNames(empty, forms)
    own = [name for form in forms.values() for name in form.names]
    inner = {name.replace("model.", "model.language_model.", 1): name for name in own}
    ignored = {"model.visual.blocks.0.weight": None, "mtp.fc.weight": None}
    unknown = {"model.layers.0.extra.weight": "model.layers.0.extra.weight"}
    held = inner | ignored | unknown
    assert "model.language_model.layers.0.mlp.experts.1.up_proj.weight" in held
    assert names.of(held, tmp_path) == held
    bare = {name.removeprefix("model."): name for name in own if name.startswith("model.")}
    assert names.of(bare, tmp_path) == bare
    whole = {name: name for name in forms}
    assert names.of(whole, tmp_path) == whole


@pytest.mark.parametrize(
    ("family", "told", "message"),
    [
        ("roberta", {"tie_word_embeddings": False}, "model_type = .roberta.: lm_head.bias is in none of"),
        ("roberta", {"is_decoder": False}, "is_decoder = False: its attention looks at the tokens that"),
        ("big_bird", {}, "attention_type = 'block_sparse': its forward has another for short sequences"),
    ],
)
def test_what_makes_no_causal_model_of_layers_is_refused_by_name(family, told, message) -> None:
    """A bias that no forward uses, an encoder, and attention that sees all in long sequences alone."""
    sizes = {"vocab_size": 67, "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2}
    config = AutoConfig.for_model(family, **{"is_decoder": True, **sizes, **told})
    with pytest.raises(ModelError, match=message):
        hub_model(config.to_dict())


def test_files_in_a_form_that_is_not_read(tmp_path: Path) -> None:
    config = config_of("hrm_text")
    model, empty = random_model(config), empty_model(config)
    names = FolderNames(empty, disk_forms(empty))
    model.save_pretrained(tmp_path / "joined")
    with pytest.raises(
        CheckpointError, match=r"joined: tensor model.*it is missing.*save_original_format=False"
    ):
        names.of(tensors_of(tmp_path / "joined"), tmp_path / "joined")
    model.save_pretrained(tmp_path / "apart", save_original_format=False)
    held = tensors_of(tmp_path / "apart")
    assert names.of(held, tmp_path / "apart") == {name: name for name in held}
