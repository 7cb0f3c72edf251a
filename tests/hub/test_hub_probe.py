"""Small models of any family, and what trying one shows: whether layers compose, and sequences can be cut."""

from __future__ import annotations

import inspect
import json
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from all_families import tiny
from torch import Tensor, nn
from transformers import AutoConfig
from transformers.integrations import hub_kernels
from transformers.integrations.hub_kernels import use_kernel_func_from_hub_with_fallback
from transformers.models.falcon_mamba import modeling_falcon_mamba

from dsx.config.resolve import resolve
from dsx.errors import ConfigError, ModelError
from dsx.hub.model_structure import BlockCall
from dsx.hub.read import hub_model
from dsx.hub.shrunk import random_model, shrunk
from dsx.models.transformers_settings import torch_forms
from dsx.verify import alone
from dsx.verify.alone import Probe, Small, probe, require_probed
from dsx.verify.shrunk import trial
from often import often

TINY = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2}


def published(family: str) -> dict[str, Any]:
    """The config that the family's class has by itself, which is that of a model of billions."""
    content: dict[str, Any] = json.loads(AutoConfig.for_model(family).to_json_string(use_diff=False))
    return content


FAMILIES = {  # family -> why documents of a pack are not kept apart
    "qwen3_next": "sees others",
    "gemma3_text": None,
    "granite": None,
    "falcon_h1": "sees others",
    "mixtral": None,
    "olmo2": None,
    "gpt_oss": None,
    "jamba": "sees others",
    "opt": None,
    "falcon_mamba": "not told positions",
}


@pytest.mark.parametrize(("family", "mixed"), often(FAMILIES.items(), 6))
def test_layers_give_what_transformers_gives_and_take_slices(family: str, mixed: str | None) -> None:
    found = probe(published(family))
    assert found.differs is None
    assert found.no_documents is None if mixed is None else mixed in str(found.no_documents)
    assert found.parameters < 2_000_000


def test_what_a_forward_does_to_looked_up_vectors_alone_is_done_to_them() -> None:
    told = {"embedding_multiplier": 5.65, "lm_head_multiplier": 0.04}  # as Falcon-H1 is published
    assert probe(published("falcon_h1") | told).differs is None


def test_a_small_config_keeps_kinds_of_layers_and_what_ranks_share() -> None:
    given = published("qwen3_next")
    small = hub_model(shrunk(given, tensor=4))
    assert len(set(small.alike)) == len(set(hub_model(given).alike)) == 2
    assert small.num_layers == 2
    assert small.uncut(4) is None
    experts = next(spec for spec in small.params if "experts.gate_up_proj" in spec.name)
    assert experts.shape[0] > json.loads(small.config)["num_experts_per_tok"]


@pytest.mark.parametrize(
    ("rope_key", "config"),
    [  # as published: Phi-4-mini, Phi-3.5-MoE and MiniCPM3
        ("rope_scaling", {"model_type": "phi3", "num_attention_heads": 24, "partial_rotary_factor": 0.75}),
        ("rope_parameters", {"model_type": "phimoe", "num_attention_heads": 24, "num_key_value_heads": 8}),
        ("rope_scaling", {"model_type": "minicpm3", "num_attention_heads": 24, "qk_rope_head_dim": 32}),
    ],
)
def test_a_small_config_has_as_many_rotary_factors_as_its_heads_have_pairs(
    rope_key: str, config: dict[str, Any]
) -> None:
    pairs = {"phi3": 48, "phimoe": 64, "minicpm3": 16}[config["model_type"]]
    factors = {key: [1.0 + n for n in range(pairs)] for key in ("short_factor", "long_factor")}
    given = {**config, "hidden_size": 3072, "max_position_embeddings": 8192}
    given["original_max_position_embeddings"] = 4096
    given[rope_key] = {"rope_type": "longrope", "rope_theta": 1e4, **factors}
    if rope_key == "rope_parameters":
        given[rope_key] |= {"original_max_position_embeddings": 4096, "factor": 2.0}
        given[rope_key] |= {"short_mscale": 1.2, "long_mscale": 1.2}
    small = shrunk(given)
    random_model(small)(input_ids=torch.zeros(1, 4, dtype=torch.int64), use_cache=False)
    kept = {"phi3": 6, "phimoe": 8, "minicpm3": 4}[config["model_type"]]
    assert [len(small[rope_key][key]) for key in factors] == [kept, kept]


def test_a_small_config_has_more_experts_than_groups_of_them() -> None:
    small = shrunk(published("bailing_hybrid"))
    assert small["num_experts"] // small["num_expert_group"] == 2


def test_sizes_that_single_layers_have_of_their_own_are_made_small_where_these_layers_go() -> None:
    given = published("dots3_note_text")
    own = given["per_layer_config"]["02"]
    given["mlp_layer_types"][:6] = ["dense"] * 6
    given["layer_types"][:7] = ["indexed_attention"] * 7
    given["per_layer_config"] = {n: own for n, kind in enumerate(given["layer_types"]) if "sliding" in kind}
    given = json.loads(json.dumps(given))
    small = shrunk(given)
    assert small["layer_types"] == ["indexed_attention", "indexed_attention", "sliding_attention"]
    assert small["mlp_layer_types"] == ["dense", "sparse", "sparse"]
    assert [*small["per_layer_config"]] == ["2"]
    assert all(small["per_layer_config"]["2"][key] < value for key, value in own.items())
    assert probe(given).differs is None


def test_streams_beside_the_hidden_states_are_cut_with_them_and_tokens_are_not_handed_on() -> None:
    """DeepSeek-V4's hyper-connections give three tensors of the sequence; its hash routers read tokens."""
    routed, hashed = (
        tiny.tiny_config("deepseek_v4", {"mlp_layer_types": [k] * 4}) for k in ("moe", "hash_moe")
    )
    with pytest.raises(ModelError, match="block 0 uses input_ids, the tokens themselves"):
        hub_model(json.loads(hashed.to_json_string()))
    found = probe(json.loads(routed.to_json_string()))
    assert found.differs is found.no_sequence is None


def test_a_config_without_a_number_that_its_blocks_need_is_refused_by_its_key() -> None:
    given = published("deepseek_v2")
    assert given["num_experts_per_tok"] is None
    with pytest.raises(
        ModelError, match=r"does not run its blocks.*null, one of these: .*num_experts_per_tok"
    ):
        hub_model(given)
    small = {**TINY, "num_key_value_heads": 4, "kv_lora_rank": 8, "q_lora_rank": 8}
    whole = random_model({"model_type": "deepseek_v2", **small})
    with pytest.raises(TypeError, match="NoneType"):
        whole(input_ids=torch.zeros(1, 4, dtype=torch.int64))
    assert shrunk({**given, "num_experts_per_tok": 6})["n_routed_experts"] == 4


def test_a_model_of_no_blocks_is_refused() -> None:
    with pytest.raises(ModelError, match="no list of blocks, or one of no blocks"):
        hub_model({**TINY, "model_type": "olmo2", "num_hidden_layers": 0})


def test_a_config_that_is_small_stays_as_it_is() -> None:
    config = {"model_type": "olmo2", **TINY}
    assert shrunk(config) == config


def test_a_trial_of_any_family_has_the_stages_of_the_run(tmp_path: Path) -> None:
    content = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "dsx": {
            "model": {"config": {"model_type": "jamba"}},
            "parallel": {"tensor": 2, "pipeline": 2, "chunks": 2},
            "data": {"source": "own", "sequence_length": 512},
            "train": {"steps": 1, "output": str(tmp_path)},
        },
    }
    config = resolve(content, world_size=4)
    made = trial(config)
    small = resolve(made.content, world_size=4)
    assert (small.mesh, small.chunks, small.schedule_name) == (config.mesh, 2, config.schedule_name)
    assert small.num_parameters < 2_000_000 < config.num_parameters
    assert len(set(small.model.alike)) == len(set(config.model.alike))
    assert all(len(small.stage_map.layers(stage)) for stage in range(4))


def test_a_model_that_does_more_than_its_layers_differs() -> None:
    small = Small({"model_type": "olmo2", **TINY}, {}, documents="joined")
    assert small.difference() is None
    head = small.whole.lm_head
    hook = head.register_forward_hook(lambda _module, _given, gave: 1.001 * gave)
    assert str(small.difference()).startswith("the loss differs by")
    hook.remove()
    head.weight.register_hook(lambda gradient: 1.001 * gradient)
    assert str(small.difference()).startswith("the gradient of lm_head.weight differs by")


def test_what_does_not_compose_is_refused_by_name_and_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    model = hub_model({"model_type": "olmo2", **TINY})
    found = Probe(differs="the logits differ", no_sequence=None, no_documents=None, blocks=1, parameters=1)
    monkeypatch.setattr(alone, "probe", lambda *_: found)
    with pytest.raises(ModelError, match=r"olmo2.*what transformers computes: the logits differ"):
        require_probed(model, sequence=False, documents=False)
    monkeypatch.setattr(alone, "probe", probe)
    with pytest.raises(ModelError, match="the logits differ"):
        require_probed(model, sequence=False, documents=False)
    (kept,) = tmp_path.rglob("*.json")
    kept.write_text("{")  # as a full disk leaves it
    require_probed(model, sequence=True, documents=False)
    assert json.loads(kept.read_text())["differs"] is None


def test_keys_that_blocks_write_into_a_shared_dict_are_refused_by_name() -> None:
    """A later stage would read those of another micro-batch."""
    sizes = {**TINY, "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}
    sizes |= {"head_dim": 8, "global_head_dim": 8, "model_type": "gemma4_unified_text"}
    hub_model({**sizes, "num_kv_shared_layers": 0})
    with pytest.raises(ModelError, match="block 0 writes into its argument shared_kv_states"):
        hub_model({**sizes, "num_kv_shared_layers": 2})


def test_a_sequence_that_cannot_be_cut_is_refused_where_it_would_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    model = hub_model({"model_type": "olmo2", **TINY})
    found = Probe(
        differs=None,
        no_sequence="block 0 mixes tokens",
        no_documents="a document sees others",
        blocks=1,
        parameters=1,
    )
    monkeypatch.setattr(alone, "probe", lambda *_: found)
    require_probed(model, sequence=False, documents=False)
    with pytest.raises(ConfigError, match=r"sequence_parallel.*block 0 mixes tokens"):
        require_probed(model, sequence=True, documents=False)
    with pytest.raises(ConfigError, match=r"dsx.data.documents = 'apart'.*sees others.*joined"):
        require_probed(model, sequence=False, documents=True)


def test_what_cannot_be_tried_is_let_through_but_not_cut_nor_kept_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    model = hub_model({"model_type": "olmo2", **TINY})
    sees = type(random_model({"model_type": "olmo2", **TINY}))

    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("expected a CUDA tensor")

    monkeypatch.setattr(sees, "forward", fails)
    require_probed(model, sequence=False, documents=False)
    with pytest.raises(ConfigError, match=r"sequence_parallel.*not known.*expected a CUDA tensor"):
        require_probed(model, sequence=True, documents=False)
    with pytest.raises(ConfigError, match=r"dsx.data.documents.*not known.*expected a CUDA tensor"):
        require_probed(model, sequence=False, documents=True)
    assert not [*tmp_path.rglob("*.json")]


def test_a_trial_computes_in_torch_whatever_kernels_are_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def on_gpus_only(*_: object, **__: object) -> None:
        raise RuntimeError("expected a CUDA tensor")

    package = ModuleType("conv1d_of_gpus")
    vars(package)["causal_conv1d_fn"] = on_gpus_only
    monkeypatch.setitem(sys.modules, package.__name__, package)
    chosen = use_kernel_func_from_hub_with_fallback("causal_conv1d_fn", package.__name__)
    in_torch = inspect.unwrap(modeling_falcon_mamba.causal_conv1d_fn)
    monkeypatch.setattr(modeling_falcon_mamba, "causal_conv1d_fn", chosen(in_torch))
    config = {"model_type": "falcon_mamba", "vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 1}
    with pytest.raises(RuntimeError, match="expected a CUDA tensor"):
        random_model(config)(input_ids=torch.zeros(1, 4, dtype=torch.int64), use_cache=False)
    assert probe(config).differs is None


class RunningSum(nn.Linear):
    """Mixes tokens, as attention does."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).cumsum(dim=1)


class Mixer(nn.Module):
    """A block with one module that mixes tokens, and, if asked, a mean over tokens beside it."""

    def __init__(self, *, beside: bool) -> None:
        super().__init__()
        self.mixer, self.beside = RunningSum(8, 8), beside

    def forward(self, hidden_states: Tensor) -> Tensor:
        if self.beside:
            hidden_states = hidden_states - hidden_states.mean(dim=1, keepdim=True)
        return hidden_states + self.mixer(hidden_states)


@pytest.mark.parametrize("beside", [False, True])
def test_slices_show_what_mixes_tokens_outside_of_modules(beside: bool) -> None:
    torch.manual_seed(1)
    block = Mixer(beside=beside)
    with torch.no_grad():
        told = alone._sliced(block, {"mixer": block.mixer}, BlockCall.of((torch.randn(2, 8, 8),), {}))
    assert (told is not None) == beside, told


def test_threads_that_compute_in_torch_leave_compilers_and_kernels_as_they_were() -> None:
    """The first to leave would put back what the last one then puts away for good."""
    compiled, asks, left = list[Any](), hub_kernels.is_torchdynamo_exporting, threading.Event()

    def backend(graph: Any, _: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    def inside() -> None:
        with torch_forms():
            left.wait()

    doubled = torch.compile(lambda x: x * 2, backend=backend)
    other = threading.Thread(target=inside)
    with torch_forms():
        other.start()
        other.join(0.2)  # long enough to come in, if it may
        assert doubled(torch.ones(2)).tolist() == [2, 2]
        assert (hub_kernels.is_torchdynamo_exporting(), compiled) == (True, [])
    left.set()
    other.join()
    assert doubled(torch.ones(2)).tolist() == [2, 2]
    assert (hub_kernels.is_torchdynamo_exporting, len(compiled)) == (asks, 1)
