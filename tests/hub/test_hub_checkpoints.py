"""Weights and checkpoints of models made of transformers' modules: in, out, resumed, converted."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from all_families.tiny import tiny_config
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

import dsx as dsx_library
import made
import ranks
from dsx.checkpoint.catalog import model_fact
from dsx.checkpoint.formats.huggingface.catalog import with_names
from dsx.checkpoint.layouts import TargetDegrees, layout_like
from dsx.checkpoint.open import open_checkpoint
from dsx.checkpoint.read import compare, only_in
from dsx.checkpoint.reshard import WantedTarget, prepare
from dsx.hub.read import hub_model
from dsx.models import families
from dsx.nn.parallel import TensorParallel
from often import often
from parity import dsx_run
from parity.dsx_run import Case

SIZES = {
    "vocab_size": 261,
    "hidden_size": 16,
    "intermediate_size": 24,
    "moe_intermediate_size": 8,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 32,
    "initializer_range": 0.2,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
MODELS = {
    "qwen3_moe": SIZES | {"num_experts": 4, "num_experts_per_tok": 2, "tie_word_embeddings": True},
    # Beside experts it has a buffer that its files hold, the bias by which a token's experts are chosen.
    "glm4_moe": SIZES
    | {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
    "olmo2": SIZES,
    # Files have its linears' matrices transposed, and queries, keys and values in one.
    "gpt2": {
        "vocab_size": 261,
        "n_embd": 16,
        "n_layer": 3,
        "n_head": 4,
        "n_positions": 32,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    },
    # Blocks of two kinds with linears of the same names: queries, keys and values beside a convolution of all
    # three, and latent attention. At four ranks both are whole, as two heads of the first cannot be shared.
    "kimi_linear": SIZES
    | {
        "num_key_value_heads": 4,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "linear_num_heads": 2,
        "linear_head_dim": 6,
        **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim"), 8),
        "qk_rope_head_dim": 4,
    },
}
LAYOUTS = {
    "qwen3_moe": (Case(dp=4, ep=2, zero=1, accumulation=1), Case(tp=2, dp=2, ep=2, zero=3, accumulation=2)),
    "glm4_moe": (Case(dp=2, ep=2, zero=3, accumulation=2), Case(tp=2, pp=2, zero=1, accumulation=4)),
    "olmo2": (Case(pp=2, chunks=1, zero=2, accumulation=4), Case(tp=2, zero=0, accumulation=4)),
    "gpt2": (Case(tp=2, zero=1, accumulation=2), Case(dp=2, zero=3, accumulation=1)),
    "kimi_linear": (Case(tp=2, zero=1, accumulation=2), Case(tp=4, zero=2, accumulation=2)),
}
STEPS = 2


def model_in(folder: Path, family: str) -> Path:
    """A model folder that transformers has written, with nothing at the values of a fresh model."""
    torch.manual_seed(3)
    config = AutoConfig.for_model(family, **MODELS[family])
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.add_(0.1 * torch.randn_like(tensor))
    model.generation_config.do_sample, model.generation_config.top_k = True, 7
    model.save_pretrained(folder)
    return folder


def config_of(case: Case, folder: Path | str, **model: Any) -> dict[str, Any]:
    config = dsx_run.config(case, Path(folder))
    config["dsx"]["model"] |= model
    return config


def begun(case: Case, folder: Path | str, **model: Any) -> tuple[Any, Any]:
    import dsx
    from dsx.parallel.groups import make_groups
    from dsx.train.recipe import build_engine

    resolved = dsx.load_config(config_of(case, folder, **model), world_size=case.world_size)
    groups = make_groups(resolved.mesh, sequence_parallel=resolved.dsx.parallel.sequence_parallel)
    return build_engine(resolved, groups), resolved


def train(rank: int, world_size: int, case: Case, folder: str, out: str, **model: Any) -> list[float]:
    """An export as it was read, two steps, a checkpoint, an export, and the losses of two steps more."""
    import dsx

    engine, _ = begun(case, folder, **model)
    dsx.export_hf(engine, f"{out}/read")
    dsx_run.losses_of(engine, case, range(STEPS))
    engine.save_checkpoint(f"{out}/run", tag="saved", client_state={"tokenizer": "bytes"})
    dsx.export_hf(engine, f"{out}/trained")
    return dsx_run.losses_of(engine, case, range(STEPS, STEPS + 2))


def go_on(rank: int, world_size: int, case: Case, folder: str, out: str, **model: Any) -> list[float]:
    """What the checkpoint has, saved again at once, and the same two steps."""
    engine, _ = begun(case, folder, weights="random", **model)
    engine.load_checkpoint(f"{out}/run")
    engine.save_checkpoint(f"{out}/again", tag="saved")
    return dsx_run.losses_of(engine, case, range(STEPS, STEPS + 2))


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: one for file in sorted(folder.glob("*.safetensors")) for name, one in load_file(file).items()
    }


def loss_of(folder: Path, case: Case, step: int) -> float:
    """Of the next step's tokens, by transformers alone."""
    model, told = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(told[keys] for keys in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    rows = dsx_run.tokens(step, case.rows)
    with torch.no_grad():
        logits = model(rows[:, :-1], use_cache=False).logits
    return float(F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()))


SLOW = pytest.param("kimi_linear", marks=pytest.mark.slow)


@pytest.fixture(scope="module", params=[*often(["qwen3_moe", "glm4_moe", "olmo2", "gpt2"], 2), SLOW])
def trained(request, tmp_path_factory) -> tuple[str, Path, list[float]]:
    """A family, the folder with all that came of it, and the losses after the checkpoint."""
    family = request.param
    folder = tmp_path_factory.mktemp(family)
    case = LAYOUTS[family][0]
    model_in(folder / "model", family)
    return family, folder, ranks.run(train, case.world_size, case, str(folder / "model"), str(folder))[0]


def test_a_folder_goes_in_and_comes_out(trained):
    family, folder, losses = trained
    source, read = tensors(folder / "model"), tensors(folder / "read")
    assert source.keys() == read.keys()
    assert all(torch.equal(one, read[name]) for name, one in source.items())
    before, after = (json.loads((folder / at / "config.json").read_text()) for at in ("model", "trained"))
    assert before | {"dtype": "float32"} == after
    assert "generation_config.json" in {file.name for file in (folder / "trained").iterdir()}
    moved = tensors(folder / "trained")
    buffers = {name for name in source if name.endswith("e_score_correction_bias")}
    assert buffers == {name for name, one in source.items() if torch.equal(one, moved[name])}
    assert loss_of(folder / "trained", LAYOUTS[family][0], STEPS) == pytest.approx(losses[0], rel=1e-5)


def test_a_run_goes_on_in_another_layout(trained):
    family, folder, losses = trained
    case = LAYOUTS[family][1]
    found = ranks.run(go_on, case.world_size, case, str(folder / "model"), str(folder))[0]
    assert found == pytest.approx(losses, rel=2e-5)
    one, two = open_checkpoint(folder / "run"), open_checkpoint(folder / "again")
    assert not only_in(one, two)
    assert not only_in(two, one)
    assert all(same.equal for same in compare(one, two))
    assert {entry.state for entry in two.entries} == {"weight", "exp_avg", "exp_avg_sq"}


def same(one: Path, two: Path) -> bool:
    """Whether two checkpoints hold the same tensors, bit for bit."""
    a, b = open_checkpoint(one), open_checkpoint(two)
    return not (only_in(a, b) or only_in(b, a)) and all(each.equal for each in compare(a, b))


@pytest.mark.parametrize("style", ["universal", "dcp", "deepspeed", "hf"])
def test_conversions_and_back(dsx, trained, tmp_path, style):
    """Through a format under Hugging Face's names in memory, experts fused, or in files, experts apart."""
    family, folder, _ = trained
    native, config = folder / "run" / "saved", tmp_path / "config.json"
    names = () if style == "hf" else ("--names", "hf")
    code, _, err = dsx("reshard", native, tmp_path / "there", "--to", style, *names)
    assert (code, err) == (0, "")
    case = LAYOUTS[family][1]
    config.write_text(json.dumps(config_of(case, folder / "model")))
    back = ("reshard", tmp_path / "there", tmp_path / "back", config, "--gpus", case.world_size)
    code, _, err = dsx(*back)
    assert (code, err) == (0, "")
    if style != "hf":
        assert same(tmp_path / "back", native)
        return
    found, expected = tensors(tmp_path / "there"), tensors(folder / "trained")
    assert found.keys() == expected.keys()
    assert all(torch.equal(one, expected[name]) for name, one in found.items())
    code, out, _ = dsx("diff", tmp_path / "back", native)
    assert code == 1
    count = len({entry.name for entry in open_checkpoint(native).entries})
    assert f"{count} of {count} tensors' states are equal" in out  # but a folder has no moments


def test_commands(dsx, trained, tmp_path):
    family, folder, _ = trained
    native = folder / "run" / "saved"
    code, out, _ = dsx("inspect", native)
    assert code == 0
    assert ".block." in out
    shared = "ep=4," if any(spec.experts == 0 for spec in open_checkpoint(native).specs) else ""
    assert bool(shared) == (family not in ("olmo2", "gpt2"))
    code, out, err = dsx("reshard", native, tmp_path / "other", "--to", f"tp=2,pp=2,dp=4,{shared}zero=2")
    assert (code, err) == (0, "")
    assert same(tmp_path / "other", native)
    texts = []
    for source in (folder / "run", folder / "trained"):
        model, tokenizer = dsx_library.load_transformers(source, tokenizer="bytes")
        texts.append(dsx_library.generate(model, tokenizer, "ab", tokens=5, temperature=0))
    assert texts[0] == texts[1]


EARLIER = (
    (r"(\d+)\.base\.wpe\.(\w+)", r"\1.position.\2"),
    (r"(\d+)\.base\.ln_f\.(\w+)", r"\1.norm.\2"),
    (r"(\d+)\.block\.ln_(\d)\.(\w+)", r"\1.norm_\2.\3"),
    (r"(\d+)\.block\.attn\.c_attn\.(\w+)", r"\1.attention.qkv.\2"),
    (r"(\d+)\.block\.attn\.c_proj\.(\w+)", r"\1.attention.out.\2"),
    (r"(\d+)\.block\.mlp\.c_fc\.(\w+)", r"\1.mlp.up.\2"),
    (r"(\d+)\.block\.mlp\.c_proj\.(\w+)", r"\1.mlp.down.\2"),
)
"""What tensors of GPT-2 were called when dsx had modules of its own for it."""


@pytest.mark.parametrize("trained", ["gpt2"], indirect=True)
def test_checkpoints_of_modules_that_dsx_once_had(dsx, trained, tmp_path):
    """They are gone on with, and converted as their manifests say."""
    _, folder, losses = trained
    source = open_checkpoint(folder / "run")
    layout = layout_like(source, TargetDegrees.parse("dp=1,tp=1,zero=1"))
    names = with_names(source, EARLIER, "").entries
    known = dict(zip((e.name for e in source.entries), (e.name for e in names), strict=True))
    specs = tuple(replace(spec, name=known[spec.name], hf_whole="", hf_copies=()) for spec in source.specs)
    facts = {**with_names(source, EARLIER, "").facts, "model": {"family": "gpt2", "rope": None}}
    earlier = replace(source, entries=names, specs=specs, facts=facts, tile_elements=0, tile_digests={})
    made.reshard(earlier, tmp_path / "run" / "saved", replace(layout, params=specs))
    (tmp_path / "run" / "latest").write_text("saved")
    assert "2.attention.qkv.weight" in open_checkpoint(tmp_path / "run").by_name
    code, _, err = dsx("reshard", tmp_path / "run", tmp_path / "there", "--to", "hf")
    assert (code, err) == (0, "")
    found, expected = tensors(tmp_path / "there"), tensors(folder / "trained")
    assert found.keys() == expected.keys()
    assert all(torch.equal(one, expected[name]) for name, one in found.items())
    case = LAYOUTS["gpt2"][1]
    gone_on = ranks.run(go_on, case.world_size, case, str(folder / "model"), str(tmp_path))[0]
    assert gone_on == pytest.approx(losses, rel=2e-5)


# What a family makes in the model's data type, what it makes in float32, and what it says to keep in float32.
@pytest.mark.parametrize("family", ["minimax", "lfm2_moe", "glm4_moe", "falcon_h1"])
def test_buffers_have_the_dtype_that_from_pretrained_gives_them(family, tmp_path):
    config = tiny_config(family)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).model.layers[3]
    layers = families.layers(hub_model(config.to_dict()), TensorParallel(), dtype=torch.bfloat16)
    block = layers[4].build()
    ours = {name.removeprefix("block."): buffer.dtype for name, buffer in block.named_buffers()}
    assert ours == {name: buffer.dtype for name, buffer in theirs.named_buffers()}
    wide = family in ("lfm2_moe", "glm4_moe")
    assert {*ours.values()} == {torch.float32 if wide else torch.bfloat16}


def test_positions_that_are_no_weights_have_the_dtype_that_from_pretrained_gives_them(tmp_path):
    config = tiny_config("xglm")
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).model.embed_positions
    layers = families.layers(hub_model(config.to_dict()), TensorParallel(), dtype=torch.bfloat16)
    x = torch.ones(2, 6, config.d_model, dtype=torch.bfloat16)
    y = layers[1].build()(x)
    assert torch.equal(y, x + theirs(torch.arange(6).expand(2, 6)))
    assert layers[2].build()(y).dtype is torch.bfloat16


def test_a_stock_engine_finds_its_optimizer_groups_by_position(tmp_path):
    """OPT's own module has the last norm before the blocks, and the layer list after them."""
    sizes = {
        "vocab_size": 40,
        "hidden_size": 8,
        "ffn_dim": 12,
        "num_hidden_layers": 2,
        "word_embed_proj_dim": 8,
    }
    config = AutoConfig.for_model("opt", **sizes, num_attention_heads=2, max_position_embeddings=16)
    with torch.device("meta"):
        order = [name for name, _ in AutoModelForCausalLM.from_config(config).named_parameters()]
    model = hub_model(config.to_dict())
    facts = {
        "model": model_fact(model),
        "hf_config": config.to_dict(),
        "precision": "fp32",
        "param_groups": [{"names": [spec.name for spec in model.params], "step": 1, "lr": 0.5}],
    }
    source = made.plain(tmp_path / "plain", model.params, made.FP32, facts=facts)
    target = prepare(source, tmp_path / "there", WantedTarget(format="deepspeed", names="hf")).target
    assert list(target.catalog.facts["param_groups"][0]["names"]) == order
