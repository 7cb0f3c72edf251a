"""Folders of PEFT's by options of LoraConfig: trained on as PEFT does, and read by PEFT again, or refused."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import dsx
import ranks
from adapters.test_adapter_parity import STEPS, steps, train
from dsx.checkpoint.catalog import Catalog, model_fact
from dsx.checkpoint.merge import taken_apart
from dsx.config.adapter import SETTINGS, WEIGHTS, peft_settings
from dsx.errors import CheckpointError, ConfigError
from often import often
from parity import dsx_run, oracle
from parity.dsx_run import Case

TIED = {"ensure_weight_tying": True}
QV = ["q_proj", "v_proj"]
TRAINED: dict[str, tuple[str, dict[str, Any]]] = {
    "pissa": ("llama", {"target_modules": "all-linear", "init_lora_weights": "pissa"}),
    "a regular expression, rslora": (
        "llama",
        {"target_modules": r".*\.[13]\..*(q|up)_proj", "use_rslora": True},
    ),
    "DoRA with one kv head": ("llama-one-head", {"target_modules": "all-linear", "use_dora": True}),
    "tied, embedding saved": ("qwen2", {"target_modules": QV, "modules_to_save": ["embed_tokens"], **TIED}),
    "gaussian, norms saved": (
        "qwen3",
        {"target_modules": QV, "init_lora_weights": "gaussian", "modules_to_save": ["norm"]},
    ),
    "pissa with DoRA": ("llama", {"target_modules": QV, "init_lora_weights": "pissa", "use_dora": True}),
    "pissa, Conv1D": ("gpt2", {"target_modules": ["c_attn", "c_proj"], "init_lora_weights": "pissa"}),
    "whole names, without a start": (
        "mistral",
        {"target_modules": ["model.layers.1.mlp.down_proj", "k_proj"], "init_lora_weights": False},
    ),
    "untied, head saved apart": ("llama", {"target_modules": QV, "modules_to_save": ["lm_head"]}),
    "olora": ("qwen2", {"target_modules": ["v_proj", "down_proj"], "init_lora_weights": "OLoRA"}),
    "eva's settings": ("llama", {"target_modules": ["o_proj"], "init_lora_weights": "eva"}),
    "tied, head saved": ("gemma2", {"target_modules": QV, "modules_to_save": ["lm_head"], **TIED}),
    "pissa, fused heads, rslora": (
        "gpt_neox",
        {"target_modules": "all-linear", "init_lora_weights": "pissa", "use_rslora": True},
    ),
    "GPT-2, DoRA": (
        "gpt2",
        {"target_modules": ["c_attn", "mlp.c_proj"], "fan_in_fan_out": True, "use_dora": True},
    ),
    "orthogonal, alpha a fraction": (
        "llama",
        {"target_modules": QV, "init_lora_weights": "orthogonal", "lora_alpha": 2.5},
    ),
}
"""What is trained on, by scenario: a family, and its LoraConfig."""

REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "modules left out": ("llama", {"exclude_modules": ["layers.0.self_attn.q_proj"]}, "exclude_modules"),
    "some layers": ("llama", {"layers_to_transform": [0]}, "layers_to_transform"),
    "ranks by module": ("llama", {"rank_pattern": {"q_proj": 2}}, "rank_pattern"),
    "alphas by module": ("llama", {"alpha_pattern": {"q_proj": 2}}, "alpha_pattern"),
    "all biases": ("llama", {"bias": "all"}, 'bias = "all"'),
    "biases of adapted modules": ("llama", {"bias": "lora_only"}, 'bias = "lora_only"'),
    "bias of B": ("llama", {"lora_bias": True}, "lora_bias"),
    "tokens": ("llama", {"trainable_token_indices": [1, 2]}, "trainable_token_indices"),
    "activated": ("llama", {"alora_invocation_tokens": [1]}, "alora_invocation_tokens"),
    "layers twice": ("llama", {"layer_replication": [(0, 2), (1, 3)]}, "layer_replication"),
    "QALoRA": ("llama", {"use_qalora": True}, "use_qalora"),
    "pissa by a random method": ("llama", {"init_lora_weights": "pissa_niter_4"}, "pissa_niter_4"),
    "corda": ("llama", {"init_lora_weights": "corda"}, 'init_lora_weights = "corda"'),
    "lora_ga": ("llama", {"init_lora_weights": "lora_ga"}, 'init_lora_weights = "lora_ga"'),
    "mica, which freezes B": ("llama", {"init_lora_weights": "mica"}, 'init_lora_weights = "mica"'),
    "olora of Conv1D": ("gpt2", {"target_modules": ["c_attn"], "init_lora_weights": "olora"}, "Conv1D"),
    "tied, trained apart": ("qwen2", {"modules_to_save": ["lm_head"]}, "ensure_weight_tying"),
    "tied, by a name that PEFT does not see": (
        "gpt2",
        {"target_modules": ["c_attn"], "modules_to_save": ["wte"], **TIED},
        "no name ends in embed_tokens or lm_head",
    ),
    "an embedding's adapter": ("llama", {"target_modules": ["embed_tokens"]}, "a table of the vocabulary"),
}
"""What is refused, by scenario: a family, its LoraConfig and what the message has."""


@dataclass(frozen=True)
class Seen:
    """Losses, gradient norms, and the folder that was saved."""

    losses: list[float]
    norms: list[float]
    folder: Path


def settings(options: dict[str, Any]) -> LoraConfig:
    return LoraConfig(**{"task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 12, "target_modules": QV, **options})


def whole(base: Path, adapter: Path, *, trained: bool = False) -> Any:
    """The model that PEFT reads."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    return PeftModel.from_pretrained(model, adapter, is_trainable=trained)


def with_peft(base: Path, options: dict[str, Any], folder: Path, rows: int) -> Seen:
    """Make an adapter away from its start, save it, and train what PEFT reads of it."""
    torch.manual_seed(23)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), settings(options))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name or "modules_to_save" in name:
                parameter.add_(0.05 * torch.randn_like(parameter))
    model.save_pretrained(folder / "start")
    model = whole(base, folder / "start", trained=True)
    losses, norms = steps(model, rows)
    model.save_pretrained(folder / "end")
    return Seen(losses, norms, folder / "end")


def with_dsx(rank: int, world_size: int, jobs: list[tuple[Case, Path, Path]]) -> list[Any]:
    return [train(rank, world_size, *job) for job in jobs]


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("bases")
    families = {family for family, *_ in (*TRAINED.values(), *REFUSED.values())}
    return {family: oracle.save_model(family, folder / family) for family in sorted(families)}


@pytest.fixture(scope="module")
def pairs(
    request: pytest.FixtureRequest, bases: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Seen, Seen]]:
    """By scenario what PEFT and dsx made of it, all of dsx's in one launch of two tensor-parallel ranks."""
    asked = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    names = [name for name in TRAINED if any(params.get("trained") == name for params in asked)]
    theirs, jobs = {}, []
    for number, name in enumerate(names):
        family, options = TRAINED[name]
        folder = tmp_path_factory.mktemp(f"scenario{number}")
        case = Case(family=family, tp=2, accumulation=2)
        theirs[name] = with_peft(bases[family], options, folder, case.rows)
        case = Case(family=family, tp=2, accumulation=2, adapter=(("path", str(folder / "start")),))
        jobs.append((case, bases[family], folder / "ours"))
    results = ranks.run(with_dsx, 2, jobs)[0]
    return {
        name: (theirs[name], Seen(*result[:2], folder))
        for name, (_, _, folder), result in zip(names, jobs, results, strict=True)
    }


@pytest.mark.parametrize("trained", often(TRAINED, 3))
def test_a_folder_is_trained_on_as_peft_does_and_read_again(
    pairs: dict[str, tuple[Seen, Seen]], bases: dict[str, Path], trained: str
) -> None:
    theirs, ours = pairs[trained]
    assert len(ours.losses) == STEPS
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-5)
    assert ours.norms == pytest.approx(theirs.norms, rel=1e-5)
    made, expected = load_file(ours.folder / WEIGHTS), load_file(theirs.folder / WEIGHTS)
    assert made.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.allclose(made[name], tensor, rtol=0, atol=3e-5), name
    base, ids = bases[TRAINED[trained][0]], oracle.tokens(99, 2)
    with torch.no_grad():
        read, again = (whole(base, each.folder)(ids).logits for each in (ours, theirs))
        merged, _ = dsx.load_transformers(ours.folder, tokenizer="bytes")
        assert torch.allclose(read, again, rtol=0, atol=1e-4)
        assert torch.allclose(merged(ids).logits, again, rtol=0, atol=1e-4)


@pytest.mark.parametrize("refused", REFUSED)
def test_what_dsx_does_not_compute_is_refused_by_name(
    bases: dict[str, Path], refused: str, tmp_path: Path
) -> None:
    family, options, said = REFUSED[refused]
    settings(options).save_pretrained(tmp_path)
    (tmp_path / WEIGHTS).write_bytes(b"")
    case = Case(family=family, adapter=(("path", str(tmp_path)),))
    with pytest.raises(ConfigError) as caught:
        dsx.load_config(dsx_run.config(case, bases[family]), world_size=1)
    assert caught.value.where == f'dsx.adapter.path = "{tmp_path}"'
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"some_new_option": 0.5}, "some_new_option"),
        ({"some_new_option": 0}, "some_new_option"),
        ({"some_new_option": "off"}, "some_new_option"),
        ({"init_lora_weights": "Pissa-like"}, "Pissa-like"),
        ({"init_lora_weights": "loftq", "loftq_config": {"loftq_bits": 4}}, "loftq"),
        ({"init_lora_weights": 1}, "init_lora_weights = 1"),
    ],
)
def test_what_nobody_knows_is_refused(
    bases: dict[str, Path], change: dict[str, Any], said: str, tmp_path: Path
) -> None:
    settings({}).save_pretrained(tmp_path)
    (tmp_path / WEIGHTS).write_bytes(b"")
    file = tmp_path / SETTINGS
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    case = Case(adapter=(("path", str(tmp_path)),))
    with pytest.raises(ConfigError, match=said):
        dsx.load_config(dsx_run.config(case, bases["llama"]), world_size=1)


def test_what_is_saved_of_tied_tables_is_tied_in_peft(bases: dict[str, Path]) -> None:
    """Whose list of their names lacks GPT-2's."""
    adapter = (("targets", ["c_attn"]), ("train_also", ["wte"]))
    case = Case(family="gpt2", adapter=adapter)
    run = dsx.load_config(dsx_run.config(case, bases["gpt2"]), world_size=1)
    model = AutoModelForCausalLM.from_pretrained(bases["gpt2"])
    told = peft_settings(run.param_specs, run.model, None) | {"inference_mode": False}
    whole = get_peft_model(model, LoraConfig(**told))
    table, head = (each.weight for each in (whole.get_input_embeddings(), whole.get_output_embeddings()))
    assert table.requires_grad
    assert head is table


def test_a_start_that_changes_the_base_is_not_merged_by_reshard(
    bases: dict[str, Path], tmp_path: Path
) -> None:
    settings({"init_lora_weights": "pissa"}).save_pretrained(tmp_path)
    (tmp_path / WEIGHTS).write_bytes(b"")
    case = Case(adapter=(("path", str(tmp_path)),))
    run = dsx.load_config(dsx_run.config(case, bases["llama"]), world_size=1)
    source = Catalog(root=tmp_path, format="dsx", entries=(), facts={"model": model_fact(run.model)})
    with pytest.raises(CheckpointError, match=r"began with pissa.*--to peft"):
        taken_apart(source)
