"""Tensor plans of families of which transformers has none: what is found, and what becomes of it.

That ranks train right by them, tests/verify/test_proof.py and test_families.py hold to transformers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from all_families.tiny import tiny_config
from torch import Tensor, nn

from dsx.hub.derived_plan import DerivedPlan, derived_plan
from dsx.hub.read import cut_alike, derived_patterns, hub_model
from dsx.hub.tensor_plan import BlockPlan

Json = dict[str, Any]


def config_of(family: str, **options: Any) -> Json:
    content: Json = json.loads(json.dumps(tiny_config(family, options).to_dict()))
    return {**content, "model_type": family}


def found_for(family: str, **options: Any) -> Any:
    return derived_plan(json.dumps(config_of(family, **options), sort_keys=True))


def test_sinks_and_stacked_experts_are_cut_and_a_bias_behind_the_sum_is_shared() -> None:
    found = found_for("gpt_oss")
    assert found.styles == {
        **dict.fromkeys((f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "sinks")), "colwise"),
        "self_attn.o_proj": "rowwise",
        "mlp.experts": "moe_tp_experts",
        "mlp.experts.gate_up_proj": "rowwise",  # stored with inputs before outputs
        "mlp.experts.gate_up_proj_bias": "rowwise",
        "mlp.experts.down_proj": "colwise",
        "mlp.experts.down_proj_bias": "summand",
    }
    assert found.no_sequence is None


@pytest.mark.parametrize(
    ("family", "options", "counts", "by_head"),
    [
        ("bloom", {}, ("num_heads",), {"self_attention": ("alibi",)}),
        ("mpt", {}, ("n_heads",), {"attn": ("position_bias",)}),
        ("persimmon", {}, ("num_heads",), {}),
    ],
)
def test_what_counts_heads_and_what_is_given_by_head_is_found(
    family: str, options: Json, counts: tuple[str, ...], by_head: Json
) -> None:
    found = found_for(family, **options)
    assert (tuple(path.rpartition(".")[2] for path in found.counts), found.by_head) == (counts, by_head)
    model = hub_model(config_of(family, **options))
    assert model.heads == (4, 4)
    assert "cannot be shared" in str(model.uncut(8))  # widths divide by it, heads do not


def test_norms_of_heads_are_summed_and_linears_without_a_region_give_all_outputs() -> None:
    styles = found_for("persimmon").styles
    summed = {path for path, style in styles.items() if style == "replicated_with_grad_allreduce"}
    assert summed == {"self_attn.q_layernorm", "self_attn.k_layernorm"}
    styles = found_for("mamba").styles  # its own code multiplies by dt_proj's matrix
    assert styles == {"mixer.in_proj": "colwise_gather_output"}


def test_a_mixer_is_cut_by_heads_and_groups_in_the_parts_that_its_code_splits() -> None:
    found = found_for("mamba2")
    assert found.styles == {
        "mixer.in_proj": "segments:own,own,own,own,own",
        "mixer.conv1d": "as_evaluated",  # fused kernels read out_proj
        "mixer.conv1d.weight": "segments:own,own,own",
        "mixer.conv1d.bias": "segments:own,own,own",
        **dict.fromkeys((f"mixer.{name}" for name in ("A_log", "D", "dt_bias", "norm.weight")), "colwise"),
        "mixer.out_proj": "rowwise",
    }
    counts = ("num_heads", "n_groups", "intermediate_size", "conv_dim")
    assert found.counts == tuple(f"mixer.{name}" for name in counts)
    model = hub_model(config_of("mamba2"))
    assert (model.uncut(2), model.mixer_heads) == (None, 2)
    assert "groups of recurrent mixers = 2: they cannot be shared by it" in str(model.uncut(4))
    assert hub_model(config_of("mamba2"), derived_patterns(model)).params == model.params
    one = found_for("bamba", mamba_n_groups=1)
    assert one.styles["mamba.in_proj"] == "segments:own,own,all,all,own"
    assert one.styles["mamba.norm"] == "mean_over_ranks"


def test_kinds_of_blocks_with_linears_of_the_same_names_agree_on_one_plan() -> None:
    """Latent attention beside a delta rule: what is of low rank is whole on every rank."""
    found = found_for("kimi_linear")
    own = {name.removeprefix("self_attn."): style for name, style in found.styles.items() if "attn" in name}
    names = ("q_proj", "k_proj", "v_proj", "b_proj", "g_b_proj", "q_b_proj", "kv_b_proj")
    gate = ("f_b_proj", "dt_bias", "A_log")
    assert own == {
        **dict.fromkeys((*names, *(f"forget_gate.{name}" for name in gate)), "colwise"),
        "conv1d.weight": "segments:own,own,own",
        "kv_a_proj_with_mqa": "mla_kv_a_proj",  # the gradient of what is rotated, all heads share, alone
        "o_norm": "replicated_with_grad_allreduce",
        "o_proj": "rowwise",
    }
    model = hub_model(config_of("kimi_linear"))
    assert (model.heads, model.mixer_heads, model.uncut(8)) == ((4, 4), 4, None)
    alone = hub_model(config_of("kimi_linear", num_attention_heads=1, num_key_value_heads=1))
    assert (alone.mixer_heads, alone.uncut(2)) == (0, None)  # attention with one head is not cut, nor they


@pytest.mark.parametrize(
    ("family", "options"),
    [
        *((family, {}) for family in ("bamba", "falcon_h1", "qwen3_next", "olmo_hybrid")),
        ("kimi_linear", {"linear_num_heads": 2}),  # and so is attention that is cut by the same names
    ],
)
def test_a_mixer_whose_heads_ranks_cannot_share_is_whole_on_each(family: str, options: Json) -> None:
    """As with null for each of its entries, which is what ranks build; at other degrees it is cut."""
    model = hub_model(config_of(family, **options))
    assert (model.mixer_heads, model.uncut(2), model.uncut(4)) == (2, None, None)
    four = model.for_tensor(4)
    whole = hub_model(config_of(family, **options), dict.fromkeys(model.mixers[0]))
    assert (whole.mixer_heads, four.tensor_plan) == (0, whole.tensor_plan)
    assert four.heads == whole.heads
    assert four.params == whole.for_tensor(4).params
    assert not any("linear_attn" in name for name, _ in model.pair_projections)
    assert model.for_tensor(2).whole == model.whole
    assert four.whole == whole.for_tensor(4).whole != model.whole


@pytest.mark.parametrize(
    ("family", "taken"),
    [("qwen3_next", "linear_attn.in_proj_ba"), ("bailing_hybrid", "self_attn.k_proj")],
)
def test_a_mixer_of_which_an_entry_is_taken_back_is_whole(family: str, taken: str) -> None:
    """Ranks cannot run the others of its entries without it."""
    config = config_of(family)
    model = hub_model(config)
    changed = hub_model(config, {f"model.layers.*.{taken}": None})
    whole = hub_model(config, dict.fromkeys(model.mixers[0]))
    assert changed.params == whole.params != model.params
    assert changed.uncut(2) is None


def test_flat_lists_of_tokens_and_parameters_that_are_handed_on_refuse_sequence_parallelism() -> None:
    assert "a flat list of tokens" in found_for("opt").no_sequence
    assert "parameters that modules in them hand on" in found_for("gpt_neox_japanese").no_sequence
    assert "hand on" in str(hub_model(config_of("gpt_neox_japanese")).no_sequence)


def test_a_plan_that_is_kept_is_the_same_and_entries_of_it_can_be_taken_back() -> None:
    config = config_of("gptj")
    model = hub_model(config)
    kept = hub_model(config, derived_patterns(model))
    assert kept.params == model.params
    assert {spec.name.partition(".block.")[2] for spec in model.params if spec.split is not None} >= {
        "attn.q_proj.weight",
        "mlp.fc_in.bias",
        "mlp.fc_out.weight",
    }
    names = [name for name in derived_patterns(model) if ".attn." in name]
    changed = hub_model(config, dict.fromkeys(names))
    cut = {spec.name.partition(".block.")[2] for spec in changed.params if spec.split is not None}
    assert {name for name in cut if name} == {"mlp.fc_in.weight", "mlp.fc_in.bias", "mlp.fc_out.weight"}
    assert changed.heads is None


def test_arguments_by_head_are_cut_with_samples_before_them_or_without() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            vars(self)["heads of all ranks"] = 4

        def forward(self, *, a: Tensor, b: Tensor, c: Tensor, d: None) -> Any:
            return a, b, c, d

    block = nn.ModuleDict({"attn": Attention()})
    plan = BlockPlan({}, by_head={"attn": ("a", "b", "d")})
    plan.give_own_heads(block, ranks=2, rank=1)
    a, b = torch.randn(3, 4, 1, 5), torch.randn(12, 1, 5)
    own_a, own_b, c, d = block["attn"](a=a, b=b, c=a, d=None)
    assert torch.equal(own_a, a[:, 2:])
    assert torch.equal(own_b, b.view(3, 4, 1, 5)[:, 2:].reshape(6, 1, 5))
    assert (c is a, d) == (True, None)


def test_a_plan_is_derived_once_on_a_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    derived_plan.cache_clear()
    found = found_for("bloom")
    derived_plan.cache_clear()
    monkeypatch.setattr("dsx.hub.derived_plan.random_model", lambda _: 1 / 0)
    assert found.by_head
    assert found_for("bloom") == found
    (kept,) = tmp_path.rglob("*.json")
    kept.write_text("{}")
    derived_plan.cache_clear()
    assert found_for("bloom") == DerivedPlan()
    assert kept.read_text() == "{}"  # what failed is not kept
    derived_plan.cache_clear()


def test_models_that_are_cut_otherwise_are_told_apart() -> None:
    """As the proof's small model has to be cut as the run's."""
    config = config_of("opt")
    whole = "model.decoder.layers.*.fc1"
    assert cut_alike(hub_model(config), hub_model({**config, "num_hidden_layers": 1}))
    assert not cut_alike(hub_model(config), hub_model(config, {whole: None}))


def test_what_no_small_model_shows_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    derived_plan.cache_clear()
    monkeypatch.setattr("dsx.hub.derived_plan.random_model", lambda _: 1 / 0)
    told = hub_model(config_of("biogpt", hidden_dropout_prob=0.125)).uncut(2)
    assert "no tensor plan for biogpt, and a small model of it shows none" in str(told)
    derived_plan.cache_clear()


def test_linears_called_conv1d_are_cut_and_patterns_that_would_say_two_things_say_none() -> None:
    assert found_for("openai-gpt").styles["attn.c_attn"] == "qkv_colwise"
    styles = found_for("ctrl").styles
    assert styles["multi_head_attention.dense"] == "rowwise"
    assert "ffn.*" not in styles
