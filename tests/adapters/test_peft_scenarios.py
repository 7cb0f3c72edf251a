"""Folders of PEFT's by options of LoraConfig: trained on as PEFT does, and read by PEFT again, or refused."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import dsx
import ranks
from adapters.test_adapter_parity import GATHERED, STEPS, steps, train
from dsx.checkpoint.catalog import Catalog, model_fact
from dsx.checkpoint.formats.huggingface.weights import HfWeights
from dsx.checkpoint.merge import taken_apart
from dsx.config.adapter import SETTINGS, WEIGHTS, peft_settings
from dsx.errors import CheckpointError, ConfigError
from dsx.models.adapters import peft_specs
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
    "modules left out, in some layers": (
        "llama",
        {
            "target_modules": [*QV, "mlp.up_proj", "down_proj"],
            "exclude_modules": ["q_proj", "layers.1.mlp.up_proj"],
            "layers_to_transform": [1, 2],
        },
    ),
    "orthogonal, alpha a fraction": (
        "llama",
        {"target_modules": QV, "init_lora_weights": "orthogonal", "lora_alpha": 2.5},
    ),
}
"""What is trained on, by scenario: a family, and its LoraConfig."""

REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "all modules left out": ("llama", {"exclude_modules": ["q_proj", "v_proj"]}, "exclude_modules"),
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
    "a head's adapter": ("llama", {"target_modules": [*QV, "lm_head"]}, "dsx puts no adapter on lm_head"),
    "a tied head's": ("qwen2", {"target_modules": [*QV, "lm_head"]}, "dsx puts no adapter on lm_head"),
    "a norm's": ("llama", {"target_modules": [*QV, "norm"]}, "it is no linear"),
    "an embedding's adapter": ("llama", {"target_modules": ["embed_tokens"]}, "a table of the vocabulary"),
}
"""What is refused, by scenario: a family, its LoraConfig and what the message has."""


ASKS_NOTHING: dict[str, tuple[str, dict[str, Any]]] = {
    "names of other families": ("llama", {"target_modules": [*QV, "c_attn", "query_key_value"]}),
    "modules to save of other families": ("llama", {"modules_to_save": ["norm", "wte", "score"]}),
    "modules left out that are none": ("llama", {"exclude_modules": ["lm_head", "up_proj"]}),
    "an expression that leaves out none": ("llama", {"exclude_modules": r".*\.mlp\..*"}),
    "all layers": ("llama", {"layers_to_transform": [0, 1, 2, 3]}),
    "all layers, by their pattern": (
        "gpt2",
        {"target_modules": ["c_attn"], "layers_to_transform": [0, 1, 2, 3, 9], "layers_pattern": ["h"]},
    ),
    "a layer, and whole names": (
        "llama",
        {"target_modules": ["model.layers.1.self_attn.q_proj"], "layers_to_transform": 0},
    ),
    "modules left out": ("llama", {"exclude_modules": ["layers.0.self_attn.q_proj", "up_proj"]}),
    "modules left out by an expression, and layers": (
        "llama",
        {"exclude_modules": r".*\.3\..*v_proj", "layers_to_transform": [1, 3]},
    ),
    "one of fused heads left out": (
        "qwen2",
        {"target_modules": [*QV, "k_proj"], "exclude_modules": ["k_proj"]},
    ),
    "the same rank": ("llama", {"rank_pattern": {"q_proj": 4, r".*\.mlp\..*": 2}}),
    "the same alpha": ("llama", {"alpha_pattern": {"zzz": 3, "layers.0.self_attn.(q|v)_proj": 12}}),
    "the first pattern of the file counts": ("llama", {"alpha_pattern": {".*q_proj": 12, "q_proj": 3}}),
}
"""What sounds like an exception and is none, or leaves targets out: a family, and its LoraConfig."""

EXCEPTED: dict[str, dict[str, Any]] = {
    "a pattern that names no layers": {"layers_to_transform": [0, 1, 2, 3], "layers_pattern": "h"},
    "one rank": {"rank_pattern": {"q_proj": 4, "layers.2.self_attn.v_proj": 5}},
    "one alpha": {"alpha_pattern": {"up_proj": 3, r"model\.layers\.1\..*": 3}},
}
"""Exceptions of single modules, by scenario."""


@dataclass(frozen=True)
class Seen:
    """Losses, gradient norms, and the folder that was saved."""

    losses: list[float]
    norms: list[float]
    folder: Path


def settings(options: dict[str, Any]) -> LoraConfig:
    return LoraConfig(**{"task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 12, "target_modules": QV, **options})


def whole(base: Path, adapter: Path, *, trained: bool = False, dtype: torch.dtype = torch.float32) -> Any:
    """The model that PEFT reads."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
    return PeftModel.from_pretrained(model, adapter, is_trainable=trained)


def with_peft(
    base: Path, options: dict[str, Any], folder: Path, rows: int, dtype: torch.dtype = torch.float32
) -> Seen:
    """Make an adapter away from its start, save it, and train what PEFT reads of it."""
    torch.manual_seed(23)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=dtype), settings(options))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name or "modules_to_save" in name:
                parameter.add_(0.05 * torch.randn_like(parameter))
    model.save_pretrained(folder / "start")
    model = whole(base, folder / "start", trained=True, dtype=dtype)
    losses, norms = steps(model, rows)
    model.save_pretrained(folder / "end")
    return Seen(losses, norms, folder / "end")


def with_dsx(rank: int, world_size: int, jobs: list[tuple[Case, Path, Path]]) -> list[Any]:
    return [train(rank, world_size, *job) for job in jobs]


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("bases")
    families = {family for family, *_ in (*TRAINED.values(), *REFUSED.values(), *ASKS_NOTHING.values())}
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
    assert (caught.value.path, caught.value.value) == (("dsx", "adapter", "path"), str(tmp_path))
    assert said in str(caught.value)
    assert "another model" not in str(caught.value)


def resolved(base: Path, adapter: Path, family: str = "llama") -> Any:
    """The run that goes on from a folder."""
    case = Case(family=family, adapter=(("path", str(adapter)),))
    return dsx.load_config(dsx_run.config(case, base), world_size=1)


@pytest.mark.parametrize("name", ASKS_NOTHING)
def test_what_asks_for_nothing_is_what_peft_makes_of_it(
    bases: dict[str, Path], name: str, tmp_path: Path
) -> None:
    """The same tensors, and the same factor on each."""
    family, options = ASKS_NOTHING[name]
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(bases[family]), settings(options))
    model.save_pretrained(tmp_path)
    run = resolved(bases[family], tmp_path, family)
    with HfWeights(tmp_path, file=WEIGHTS) as weights:
        weights.check(peft_specs(run.param_specs))
    made = run.model.adapter
    read = whole(bases[family], tmp_path)  # a folder has the patterns in another order
    factors = {module.scaling["default"] for module in read.modules() if isinstance(module, LoraLayer)}
    assert factors == {made.alpha / made.rank}


@pytest.mark.parametrize("name", EXCEPTED)
def test_an_exception_of_one_module_is_refused(bases: dict[str, Path], name: str, tmp_path: Path) -> None:
    """What PEFT makes of it differs from what it makes of the same options without it."""
    made = []
    for options in (EXCEPTED[name], {}):
        try:
            model = get_peft_model(AutoModelForCausalLM.from_pretrained(bases["llama"]), settings(options))
        except ValueError:  # no module is left
            made.append({})
            continue
        linears = (each for each in model.named_modules() if isinstance(each[1], LoraLayer))
        made.append({name: (each.r["default"], each.scaling["default"]) for name, each in linears})
    assert made[0] != made[1]
    settings(EXCEPTED[name]).save_pretrained(tmp_path)
    (tmp_path / WEIGHTS).write_bytes(b"")
    with pytest.raises(ConfigError, match=next(iter(EXCEPTED[name]))):
        resolved(bases["llama"], tmp_path)


def test_numbers_in_quotes_are_numbers(bases: dict[str, Path], tmp_path: Path) -> None:
    settings({}).save_pretrained(tmp_path)
    (tmp_path / WEIGHTS).write_bytes(b"")
    file = tmp_path / SETTINGS
    file.write_text(json.dumps(json.loads(file.read_text()) | {"r": "4", "lora_alpha": "12"}))
    made = resolved(bases["llama"], tmp_path).model.adapter
    assert (made.rank, made.alpha) == (4, 12)


def test_weights_as_old_releases_write_them_are_converted_by_the_command_that_is_given(
    bases: dict[str, Path], tmp_path: Path
) -> None:
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(bases["llama"]), settings({}))
    model.save_pretrained(tmp_path, safe_serialization=False)
    with pytest.raises(ConfigError, match=r"adapter_model\.bin") as caught:
        resolved(bases["llama"], tmp_path)
    words = shlex.split(str(caught.value).partition(" Fix: ")[2])
    exec(words[words.index("-c") + 1], {})
    with HfWeights(tmp_path, file=WEIGHTS) as weights:
        weights.check(peft_specs(resolved(bases["llama"], tmp_path).param_specs))


def test_resized_embeddings_are_named_and_the_fix_holds(bases: dict[str, Path], tmp_path: Path) -> None:
    """PEFT saves the tables of a model whose vocabulary is not that of its base's config."""
    model = AutoModelForCausalLM.from_pretrained(bases["llama"])
    model.resize_token_embeddings(model.config.vocab_size + 8)
    model = get_peft_model(model, settings({}))
    with pytest.warns(UserWarning, match="resized"):
        model.save_pretrained(tmp_path)
    with (
        HfWeights(tmp_path, file=WEIGHTS) as weights,
        pytest.raises(CheckpointError, match="this adapter's folder carries resized embeddings"),
    ):
        weights.check(peft_specs(resolved(bases["llama"], tmp_path).param_specs))
    with pytest.raises(CheckpointError, match="this adapter's folder carries resized embeddings"):
        dsx.load_transformers(tmp_path, tokenizer="bytes")
    model.save_pretrained(tmp_path / "again", save_embedding_layers=False)
    model.unload().save_pretrained(tmp_path / "base")
    run = resolved(tmp_path / "base", tmp_path / "again")
    with HfWeights(tmp_path / "again", file=WEIGHTS) as weights:
        weights.check(peft_specs(run.param_specs))


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


ZERO3 = Case(dp=2, zero=3, accumulation=1, zero_keys=GATHERED)
TENSOR, PIPELINE = Case(tp=2, zero=1, accumulation=2), Case(pp=2, chunks=2, zero=1, accumulation=2)
RESUMED = [
    ("pissa", ZERO3, TENSOR, False),
    ("olora", ZERO3, PIPELINE, False),
    ("olora", TENSOR, ZERO3, True),
    ("pissa", ZERO3, TENSOR, True),
]
"""``init_lora_weights``, where a run begins, where its second half goes on, and whether it is in bf16."""


def train_in_two(rank: int, world_size: int, halves: tuple[Case, Case], base: Path, folder: Path) -> Any:
    """Losses and norms of a run whose second half another engine trains from the first one's checkpoint."""
    from dsx.checkpoint.run.export import export_hf

    losses, norms = [], []
    for number, case in enumerate(halves):
        engine, _ = dsx_run.build(case, base)
        if number:
            engine.load_checkpoint(folder / "checkpoints")
        for step in range(number * STEPS // 2, (number + 1) * STEPS // 2):
            losses.append(float(engine.train_batch(dsx_run.batches(case, step, engine.groups.dp_rank))))
            norms.append(engine.get_global_grad_norm())
        engine.save_checkpoint(folder / "checkpoints")
    export_hf(engine, folder / "ours")
    return losses, norms


@pytest.mark.parametrize(("start", "first", "second", "bf16"), often(RESUMED, 2))
def test_a_start_that_changes_the_base_holds_at_zero3_in_bf16_and_resumed(
    bases: dict[str, Path], start: str, first: Case, second: Case, bf16: bool, tmp_path: Path
) -> None:
    """Beside PEFT with torch's AdamW; what dsx saves PEFT reads, saves again, and dsx reads that."""
    base, dtype = tmp_path / "base", torch.bfloat16 if bf16 else torch.float32
    AutoModelForCausalLM.from_pretrained(bases["llama"], dtype=dtype).save_pretrained(base)
    options = {"target_modules": "all-linear", "init_lora_weights": start}
    theirs = with_peft(base, options, tmp_path, first.rows, dtype)
    adapter = (("path", str(tmp_path / "start")),)
    halves = tuple(replace(case, adapter=adapter, bf16=bf16) for case in (first, second))
    losses, norms = ranks.run(train_in_two, 2, halves, base, tmp_path)[0]
    assert losses == pytest.approx(theirs.losses, rel=2e-2 if bf16 else 1e-5)
    assert norms == pytest.approx(theirs.norms, rel=1e-1 if bf16 else 3e-5)
    ids, ours = oracle.tokens(99, 2), whole(base, tmp_path / "ours")
    ours.save_pretrained(tmp_path / "again")
    with torch.no_grad():
        read = ours(ids).logits
        # A folder has what the run computed with, in its dtype, and a checkpoint what that was rounded from.
        for folder, bound in (("again", 1e-5), ("checkpoints", 3e-2 if bf16 else 1e-5)):
            merged, _ = dsx.load_transformers(tmp_path / folder, tokenizer="bytes", precision="fp32")
            assert (merged(ids).logits - read).norm() < bound * read.norm(), folder
        if not bf16:
            assert torch.allclose(read, whole(base, theirs.folder)(ids).logits, rtol=0, atol=1e-4)
    made, began = (resolved(base, tmp_path / each).model.adapter for each in ("again", "start"))
    assert made == began
