"""Dense folders as mixtures of experts: transformers' logits of both, and training with experts shared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

import ranks
from dsx.checkpoint.execute import ConversionOptions
from dsx.checkpoint.upcycle import prepare
from dsx.errors import CheckpointError, ConfigError, DsxError, ModelError
from dsx.hub.upcycle import Upcycling
from often import often
from parity import dsx_run
from parity.dsx_run import Case
from parity.oracle import LLAMA

SIZES = {key: value for key, value in LLAMA.items() if key not in ("model_type", "architectures", "head_dim")}


def dense_folder(family: str, folder: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    """A model of a dense family in several files, in which nothing is zero or one, and a tokenizer's file."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**{**SIZES, **changes}), dtype=dtype)
    for parameter in model.parameters():
        parameter.data.add_(0.05 * torch.randn(parameter.shape))
    model.save_pretrained(folder, max_shard_size="30KB")
    (folder / "tokenizer.json").write_text("{}")
    return folder


def upcycled(dense: Path, out: Path, family: str, **wanted: Any) -> Path:
    wanted = {"experts": 4, "top_k": 2, **wanted}
    prepare(dense, out, Upcycling(family=family, **wanted)).run(ConversionOptions(workers=1))
    return out


def logits(folder: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    with torch.no_grad():
        found: torch.Tensor = model(torch.arange(24).reshape(2, 12) * 7 % 261).logits
    return found.float()


@pytest.mark.parametrize(
    ("dense", "family", "changes", "wanted"),
    [
        ("llama", "mixtral", {}, {}),
        ("llama", "mixtral", {"tie_word_embeddings": True, "num_key_value_heads": 1}, {"top_k": 1}),
        ("mistral", "mixtral", {"sliding_window": 5}, {"granularity": 2}),
        ("qwen2", "qwen2_moe", {}, {"experts": 6, "top_k": 4, "granularity": 2}),  # beside a shared expert
        ("qwen3", "qwen3_moe", {"head_dim": 8}, {"experts": 8, "top_k": 4, "granularity": 2}),
        ("granite", "granitemoe", {"residual_multiplier": 0.5}, {}),  # stacked in its files
    ],
)
def test_the_mixture_has_the_dense_models_logits(
    dense: str, family: str, changes: dict[str, Any], wanted: dict[str, Any], tmp_path: Path
) -> None:
    folder = dense_folder(dense, tmp_path / "dense", **changes)
    out = upcycled(folder, tmp_path / "out", family, **wanted)
    expected, found = logits(folder), logits(out)
    assert expected.std() > 0.1
    assert torch.allclose(found, expected, atol=1e-5 * float(expected.abs().max()), rtol=0)
    assert (out / "tokenizer.json").read_text() == "{}"
    stored = load_file(out / "model.safetensors")
    routers = [
        each for name, each in stored.items() if name.endswith((".gate.weight", "router.layer.weight"))
    ]
    assert len(routers) == 4
    assert all(float(each.std()) > 0.01 for each in routers)


def test_a_seed_draws_the_same_routers_and_another_others(tmp_path: Path) -> None:
    dense = dense_folder("llama", tmp_path / "dense", torch.bfloat16)
    made = [
        load_file(upcycled(dense, tmp_path / name, "mixtral", seed=seed) / "model.safetensors")
        for name, seed in (("a", 1), ("b", 1), ("c", 2))
    ]
    name = "model.layers.1.block_sparse_moe.gate.weight"
    assert made[0][name].dtype == torch.bfloat16
    assert torch.equal(made[0][name], made[1][name])
    assert not torch.equal(made[0][name], made[2][name])
    assert not torch.equal(made[0][name], made[0][name.replace("layers.1", "layers.2")])


@pytest.mark.parametrize(
    ("dense", "changes", "wanted", "error", "words"),
    [
        ("llama", {}, {"family": "qwen3_moe"}, ModelError, "family = 'qwen3_moe'|q_norm"),
        ("llama", {}, {"family": "olmoe"}, ModelError, "olmoe|q_norm"),
        ("qwen3", {"head_dim": 8}, {"family": "mixtral"}, ModelError, "no gate, up and down"),
        ("llama", {"mlp_bias": True}, {"family": "mixtral"}, ModelError, "no gate, up and down"),
        ("llama", {"hidden_act": "gelu"}, {"family": "qwen2_moe"}, DsxError, "q_proj.bias|qwen2_moe"),
        ("llama", {}, {"family": "llama"}, ModelError, "does not say how many experts"),
        ("llama", {}, {"family": "nothing"}, ModelError, "nothing"),
        ("llama", {}, {"family": "mixtral", "granularity": 2, "top_k": 3}, ConfigError, "--top-k 3"),
        ("llama", {}, {"family": "mixtral", "granularity": 2, "experts": 5}, ConfigError, "--experts 5"),
        ("llama", {}, {"family": "mixtral", "top_k": 5}, ConfigError, "a layer has 4"),
        ("llama", {"intermediate_size": 41}, {"family": "mixtral", "granularity": 2}, ModelError, "= 41"),
    ],
)  # fmt: skip
def test_what_does_not_match_is_refused_before_anything_is_written(
    dense: str,
    changes: dict[str, Any],
    wanted: dict[str, Any],
    error: type[Exception],
    words: str,
    tmp_path: Path,
) -> None:
    folder = dense_folder(dense, tmp_path / "dense", **changes)
    with pytest.raises(error, match=words):
        upcycled(folder, tmp_path / "out", **wanted)
    assert [path.name for path in tmp_path.iterdir()] == ["dense"]


def test_an_incomplete_folder_and_a_target_that_exists(tmp_path: Path) -> None:
    folder = dense_folder("llama", tmp_path / "dense")
    with pytest.raises(CheckpointError, match="dense"):
        upcycled(folder, folder, "mixtral")
    next(folder.glob("model-00002*")).unlink()
    with pytest.raises(CheckpointError, match="model-00002"):
        upcycled(folder, tmp_path / "out", "mixtral")


def trained(rank: int, world_size: int, case: Case, folder: Path) -> list[float]:
    engine, _ = dsx_run.build(case, folder)
    return [float(loss) for loss in dsx_run.losses_of(engine, case, [0, 1, 2])]


@pytest.mark.parametrize("zero", often([3, 1], 2))
def test_it_trains_with_experts_shared_out_as_without(zero: int, tmp_path: Path) -> None:
    folder = dense_folder("llama", tmp_path / "dense")
    out = upcycled(folder, tmp_path / "out", "mixtral")
    shared, whole = (
        ranks.run(trained, 2, Case(family="mixtral", dp=2, ep=ep, zero=zero), out)[0] for ep in (2, 1)
    )
    assert shared == pytest.approx(whole, abs=1e-5)
    dense = ranks.run(trained, 2, Case(family="llama", dp=2, zero=zero), folder)[0]
    assert shared[0] == pytest.approx(dense[0], abs=1e-5)  # before its first step it is the dense model


def test_the_command(tmp_path: Path, dsx: Any) -> None:
    folder = dense_folder("qwen3", tmp_path / "dense", head_dim=8)
    code, out, _ = dsx("upcycle", folder, tmp_path / "out", "--experts", 4, "--format", "json")
    assert code == 0
    assert json.loads(out)["family"] == "qwen3_moe"
    assert torch.allclose(logits(tmp_path / "out"), logits(folder), atol=1e-4)
    code, out, err = dsx("upcycle", tmp_path / "out", tmp_path / "more")
    assert (code, out) == (2, "")
    assert "name one with --family" in err
