"""Options of families train like one process of transformers: a sample of `tools/families.py --options`."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest
import torch
from all_families import crew, options, tiny
from all_families.crew import Case
from transformers import AutoModelForCausalLM

from dsx.errors import ModelError
from dsx.hub.layers import HubHead, entries, loops_over_children
from dsx.hub.model_structure import hf_config_of, structure_of
from dsx.hub.read import hub_model
from dsx.nn.parallel import TensorParallel
from dsx.nn.parameters import Weights
from often import often

SAMPLE: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "tp2": [
        ("cohere", {"use_qk_norm": True}),
        ("gemma4_unified_text", {"per_layer_config": {"3": {"head_dim": 32, "num_key_value_heads": 1}}}),
        ("glm4_moe", {"use_qk_norm": True}),
        ("glm4_moe_lite", {"q_lora_rank": None}),
        ("llama", {"hidden_act": "xielu"}),
        ("mimo_v2_flash", {"num_key_value_heads": 1}),
        ("opt", {"activation_function": "xielu"}),
        ("phi", {"qk_layernorm": True}),
        ("stablelm", {"num_key_value_heads": 1, "qk_layernorm": True}),
    ],
    "tp4": [
        ("doge", {"is_moe": True}),
        ("llama", {"num_key_value_heads": 1}),
        ("stablelm", {"qk_layernorm": True}),
    ],
    "pp2": [("gemma4_unified_text", {"attention_k_eq_v": True}), ("olmo2", {"tie_word_embeddings": True})],
    "zero3": [("dbrx", {}), ("qwen3_moe", {"norm_topk_prob": True}), ("starcoder2", {"use_bias": False})],
}


@pytest.mark.parametrize("layout", often(SAMPLE, 4))
def test_options_train_like_transformers(layout: str) -> None:
    cases = [Case(family, str(changes), changes, layout) for family, changes in SAMPLE[layout]]
    for case, outcome in crew.outcomes(cases):
        assert outcome["result"] == "ok", json.dumps([case.family, case.changes, outcome], indent=1)


def test_a_wrong_plan_is_told_from_a_right_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison sees a gradient that the ranks do not sum."""
    case = Case("phi", "a plan that sums nothing", {"qk_layernorm": True}, "tp2")
    names = ("self_attn.q_layernorm", "self_attn.k_layernorm")
    wrong = {f"model.layers.*.{name}": None for name in names}
    ((_, outcome),) = crew.outcomes([case], plan=wrong)
    assert outcome["result"] == "different"
    assert "layernorm" in outcome["reason"]


class BrokenHead(Case):
    """A case in whose ranks no head runs: the last stage alone has one."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _with_broken_head, (self.family, self.layout)


def _with_broken_head(family: str, layout: str) -> Case:
    del HubHead.forward
    return Case(family, "", {}, layout)


def test_a_rank_that_fails_alone_is_heard_and_the_next_cases_go_on() -> None:
    found = [
        each for _, each in crew.outcomes([BrokenHead("arcee", "", {}, "pp2"), Case("llama", "", {}, "pp2")])
    ]
    assert [outcome["result"] for outcome in found] == ["refused", "ok"]
    assert "its layers one after another are not what transformers computes" in found[0]["reason"]


def test_options_of_one_program_run_once() -> None:
    changes = {"": {}, "size": {"head_dim": None}, "bias": {"attention_bias": True}}
    cases = [Case("llama", option, own, "tp2") for option, own in changes.items()]
    none = {"per_layer_config": {"3": {"intermediate_size": 48}}}  # transformers' Llama has no such layers
    known = {case.key: found for case, found in crew.outcomes([*cases, Case("llama", "none", none, "tp2")])}
    assert crew.settled(known).keys() == {("llama", "none", layout) for layout in ("tp4", "pp2", "zero3")}
    known["llama", "", "pp2"] = {"result": "ok", "print": known["llama", "", "tp2"]["print"]}
    known["llama", "", "tp4"] = {"result": "different", "print": known["llama", "", "tp2"]["print"]}
    same = {key: one["as"] for key, one in crew.settled(known).items() if one["result"] == "same"}
    assert same == {("llama", "size", "pp2"): ""}


def test_every_option_comes_to_every_layout() -> None:
    every = [crew.cases(family) for family in ("llama", "bloom")]
    turns = [crew.rotated(every, turn) for turn in range(len(crew.LAYOUTS))]
    assert all(len(turn) == sum(map(len, every)) for turn in turns)
    keys = {case.key for turn in turns for case in turn}
    assert keys == {
        (case.family, case.option, name) for cases in every for case in cases for name in crew.LAYOUTS
    }


def test_values_that_torchs_own_modules_give_are_there_after_a_fresh_start() -> None:
    """A PReLU's slope, which no family's code gives."""
    config = json.loads(tiny.tiny_config("phi", {"hidden_act": "prelu"}).to_json_string())
    model = hub_model(config)
    theirs = AutoModelForCausalLM.from_config(hf_config_of(config))
    specs = {spec.name.partition(".")[2]: spec for spec in model.params if spec.layer == 1}
    weights = Weights(specs=specs, tp=TensorParallel(), dtype=torch.float32, device="cpu", seed=0)
    _, make, *_ = entries(
        model, lambda _: weights, "cpu", "none", lambda layer, *given, **_: partial(layer, *given)
    )
    slope = make().get_parameter("block.mlp.activation_fn.weight")
    assert torch.equal(slope, theirs.get_parameter("model.layers.0.mlp.activation_fn.weight"))


def test_reading_a_family_moves_no_random_generator() -> None:
    """One rank alone reads the small model of a proof: ranks would drop out apart after it."""
    config = tiny.tiny_config("gpt2", {"embd_pdrop": 0.5, "n_embd": 48})
    before = torch.get_rng_state()
    structure_of(config.to_json_string())
    assert torch.equal(torch.get_rng_state(), before)


class _ManyExperts(torch.nn.Module):
    """As code that comes with models has it: a list of experts, of which those with tokens run."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(3))
        self.act = torch.nn.SiLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in range(3):
            expert = self.experts[number]
            if bool(x[number].sum() > 0):
                x = self.act(expert(x))
        return x


@pytest.mark.parametrize(
    ("family", "changes", "found"),
    [
        ("dbrx", {}, ["DbrxExperts"]),
        ("mixtral", {"hidden_act": "xielu"}, ["MixtralExperts"]),
        ("mixtral", {}, []),
        ("bloom", {}, []),
    ],
)
def test_modules_that_run_others_as_the_data_says_are_gathered_whole(
    family: str, changes: dict[str, Any], found: list[str]
) -> None:
    """Else replicas gather in different orders under ZeRO-3."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny.tiny_config(family, changes))
    block = next(module for module in model.modules() if isinstance(module, torch.nn.ModuleList))[0]
    assert [type(each).__name__ for each in block.modules() if loops_over_children(each)] == found
    assert loops_over_children(_ManyExperts())


def test_options_are_found_in_config_classes_and_their_code() -> None:
    found = {
        family: [option.changes for option in options.options_of(family)] for family in ("stablelm", "bloom")
    }
    for changes in ({"qk_layernorm": True}, {"num_key_value_heads": 1}, {"use_parallel_residual": True}):
        assert changes in found["stablelm"]
    assert {"hidden_act": "xielu"} in found["stablelm"]
    assert {"tie_word_embeddings": True} in found["stablelm"]
    assert {"apply_residual_connection_post_layernorm": True} in found["bloom"]
    assert not [each for each in found["stablelm"] if "hidden_dropout" in each or "use_cache" in each]


def test_a_part_of_no_size_is_refused_by_name() -> None:
    config = json.loads(tiny.tiny_config("hy_v3", {"num_experts": 0}).to_json_string())
    with pytest.raises(ModelError, match="no numbers at all"):
        hub_model(config)
