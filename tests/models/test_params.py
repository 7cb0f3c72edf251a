"""Parameters against transformers' own models, built on the meta device, and configs that must be refused."""

from __future__ import annotations

import dataclasses
import math
from typing import get_args

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from dsx.checkpoint.claims import model_of
from dsx.errors import LayoutError, ModelError
from dsx.models.hf_config import model_spec
from dsx.models.params import layer_kinds, num_parameters, param_specs, vocabulary_rows
from dsx.models.spec import Family, Rope
from dsx.nn.attention import inverse_frequencies
from dsx.parallel.mesh import Mesh
from tiny_configs import tiny

LLAMA_3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_type": "llama3",
}
ODD = {"vocabulary": 97, "width": 32, "ffn": 50, "heads": 4}
CONFIGS = {
    "gpt2-default": GPT2Config(),
    "gpt2-odd": tiny("gpt2", vocabulary=1009, width=60, heads=6, layers=3, ffn=101, n_positions=77),
    "gpt2-untied": tiny("gpt2", vocabulary=31, width=8, heads=2, layers=1, tie_word_embeddings=False),
    "llama-default": LlamaConfig(),
    "llama-gqa": tiny(
        "llama", vocabulary=1009, width=48, heads=6, layers=3, ffn=100, kv_heads=2, head_dim=10
    ),
    "llama-biases": tiny("llama", **ODD, layers=2, kv_heads=1, attention_bias=True, mlp_bias=True),
    "llama-tied": tiny("llama", **ODD, layers=2, tie_word_embeddings=True),
    "mistral-default": MistralConfig(),
    "qwen2-default": Qwen2Config(),
    "qwen3-default": Qwen3Config(),
    "qwen3-odd": tiny(
        "qwen3",
        **ODD | {"width": 30},
        layers=3,
        kv_heads=2,
        head_dim=6,
        attention_bias=True,
        use_sliding_window=True,
        max_window_layers=2,
    ),
    "gpt_neox-default": GPTNeoXConfig(),
    "gpt_neox-odd": tiny("gpt_neox", **ODD, layers=2, attention_bias=False, tie_word_embeddings=True),
    "gemma2-default": Gemma2Config(),
    "gemma2-odd": tiny(
        "gemma2", **ODD, layers=3, kv_heads=1, head_dim=6, attention_bias=True, tie_word_embeddings=False
    ),
}


def _meta_parameters(config) -> dict[str, torch.nn.Parameter]:
    """Under the names in files."""
    head = {"lm_head.weight": "embed_out.weight"} if config.model_type == "gpt_neox" else {}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return {head.get(name, name): p for name, p in model.named_parameters()}


@pytest.mark.parametrize("name", CONFIGS)
def test_every_parameter_of_the_hugging_face_model_is_there_with_its_shape(name):
    theirs = {key: tuple(p.shape) for key, p in _meta_parameters(CONFIGS[name]).items()}
    model = model_of(CONFIGS[name].to_dict())
    specs = param_specs(model)

    ours = {}
    for spec in specs:
        for index, hf in enumerate(spec.hf):
            shape = list(spec.shape)
            if len(spec.hf) > 1:
                shape[spec.split] = spec.parts[index]
            ours[hf] = tuple(reversed(shape)) if spec.hf_transposed else tuple(shape)
    assert ours == theirs
    assert num_parameters(model) == sum(math.prod(shape) for shape in theirs.values())


@pytest.mark.parametrize("name", CONFIGS)
def test_layers_follow_the_layer_list(name):
    model = model_of(CONFIGS[name].to_dict())
    specs, kinds = param_specs(model), layer_kinds(model)
    first = 2 if model.family == "gpt2" else 1
    assert len(kinds) == model.num_layers + first + 2
    assert kinds.count("Block") == model.num_layers
    assert [spec.layer for spec in specs] == sorted(spec.layer for spec in specs)
    assert len({spec.name for spec in specs}) == len(specs)
    for spec in specs:
        layer, _, path = spec.name.partition(".")
        assert int(layer) == spec.layer
        # transformers numbers the same block: model.layers.N / transformer.h.N
        if kinds[spec.layer] == "Block":
            assert f".{spec.layer - first}." in spec.hf[0], path
    assert (specs[0].tie == "word") == model.tied_embeddings


@pytest.mark.parametrize("name", ["gpt2-odd", "llama-gqa"])
def test_init_matches_the_spread_of_a_fresh_hugging_face_model(name):
    """GPT-2 scales its residual projections (modeling_gpt2.py, _init_weights); Llama scales none."""
    torch.manual_seed(0)
    theirs = dict(AutoModelForCausalLM.from_config(CONFIGS[name]).named_parameters())
    for spec in param_specs(model_of(CONFIGS[name].to_dict())):
        values = torch.cat([theirs[hf].detach().flatten() for hf in spec.hf])
        if spec.init.kind == "normal":
            # The sample's std deviates by about std / sqrt(2 n); 5 of those.
            assert values.std().item() == pytest.approx(spec.init.std, rel=5 / math.sqrt(2 * len(values)))
        else:
            assert torch.equal(values, torch.full_like(values, float(spec.init.kind == "ones")))


def test_vocabulary_padding_is_not_counted():
    model = model_spec(CONFIGS["llama-gqa"].to_dict())
    table = param_specs(model, pad_multiple=64)[0]
    assert table.shape == (1009, 48)
    assert table.local_shape(Mesh.of(tp=2).at()) == (512, 48)
    odd = param_specs(model, pad_multiple=1)[0]
    assert [odd.local_shape(Mesh.of(tp=tp).at()) for tp in (1, 2, 1009)] == [(1009, 48), (505, 48), (1, 48)]
    assert [vocabulary_rows(model, tp, pad_multiple=1) for tp in (1, 2, 1009)] == [1009, 505, 1]
    assert vocabulary_rows(model, 2, pad_multiple=64) == 512
    assert odd.boxes(Mesh.of(tp=2).at(1)) == (((505, 1009), (0, 48)),)
    with pytest.raises(LayoutError, match=r"a block of 48 on dim 0.*does not divide by tp = 5"):
        dataclasses.replace(odd, shape=(48, 48), pad_multiple=None).local_shape(Mesh.of(tp=5).at())
    with pytest.raises(LayoutError, match="only a tensor cut as one block is padded"):
        dataclasses.replace(odd, parts=(1000, 9))


@pytest.mark.parametrize(
    ("keys", "rope"),
    [
        ({}, Rope(theta=10000.0)),
        ({"rope_theta": 5e5}, Rope(theta=5e5)),
        ({"rope_scaling": None, "rope_theta": 7.0}, Rope(theta=7.0)),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, Rope(kind="linear", factor=2.0)),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 3e4}}, Rope(theta=3e4)),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 3e4}},
            Rope(theta=3e4, kind="linear", factor=4.0),
        ),
        (
            {"rope_scaling": LLAMA_3, "rope_theta": 5e5},
            Rope(theta=5e5, kind="llama3", factor=8.0, original_positions=32),
        ),
        (
            {"rope_parameters": LLAMA_3 | {"rope_theta": 5e5}},
            Rope(theta=5e5, kind="llama3", factor=8.0, original_positions=32),
        ),
    ],
)
def test_rope_is_read_as_transformers_reads_it(keys, rope):
    model = model_spec({"model_type": "llama", "max_position_embeddings": 64} | keys)
    assert model.rope == rope
    # transformers' own reading of the same file (it edits its arguments, hence the copies).
    copied = {key: dict(value) if isinstance(value, dict) else value for key, value in keys.items()}
    theirs = LlamaConfig.from_dict({"model_type": "llama", "max_position_embeddings": 64} | copied)
    assert theirs.rope_parameters["rope_theta"] == model.rope.theta
    assert theirs.rope_parameters["rope_type"] == model.rope.kind
    assert theirs.rope_parameters.get("factor", 1.0) == model.rope.factor
    if model.rope.kind == "llama3":
        assert theirs.rope_parameters["low_freq_factor"] == model.rope.low_frequency_factor
        assert theirs.rope_parameters["high_freq_factor"] == model.rope.high_frequency_factor
        assert theirs.rope_parameters["original_max_position_embeddings"] == model.rope.original_positions


def test_llama3_rope_without_original_positions_takes_the_model_s():
    scaling = {k: v for k, v in LLAMA_3.items() if k != "original_max_position_embeddings"}
    config = {"model_type": "llama", "max_position_embeddings": 64, "rope_scaling": scaling}
    assert model_spec(config).rope.original_positions == 64
    assert model_spec(config | {"original_max_position_embeddings": 16}).rope.original_positions == 16


@pytest.mark.parametrize("family", [LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config])
def test_an_empty_config_means_the_same_model_as_in_transformers(family):
    assert model_spec({"model_type": family.model_type}) == model_spec(family().to_dict())


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"attention_factor": 1.25, "beta_fast": 16.0, "beta_slow": 2.0},
        {"mscale": 0.7, "mscale_all_dim": 1.2, "truncate": False},
        {"original_max_position_embeddings": None, "factor": 1.0},
    ],
)
def test_yarn_is_that_of_transformers(more):
    """Frequencies to the last bit but one, and the factor of cosine and sine."""
    config = Qwen3Config(rope_parameters={k: v for k, v in (YARN | more).items() if v} | {"rope_theta": 1e6})
    frequencies, factor = ROPE_INIT_FUNCTIONS["yarn"](config)
    model = model_spec(config.to_dict())
    assert model.rope.attention_factor == pytest.approx(factor, rel=1e-12)
    ours = inverse_frequencies(model.rope, model.rotary_size)
    torch.testing.assert_close(ours, frequencies, rtol=3e-7, atol=0)
    assert ours.shape == (model.head_dim // 2,)


@pytest.mark.parametrize(
    ("keys", "windows"),
    [
        ({"model_type": "mistral"}, (4096,) * 4),
        ({"model_type": "mistral", "sliding_window": None}, ()),
        ({"model_type": "qwen2", "sliding_window": 8}, ()),
        ({"model_type": "qwen2", "use_sliding_window": True}, ()),
        ({"model_type": "qwen2", "use_sliding_window": True, "sliding_window": None}, ()),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3},
            (0, 0, 0, 8),
        ),
        (
            {
                "model_type": "qwen3",
                "use_sliding_window": True,
                "sliding_window": 8,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            (8, 0, 8, 0),
        ),
    ],
)
def test_windows_are_read_as_transformers_reads_them(keys, windows):
    model = model_spec(keys | {"num_hidden_layers": 4})
    assert model.windows == windows
    classes = {"mistral": MistralConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
    theirs = classes[keys["model_type"]].from_dict(keys | {"num_hidden_layers": 4})
    kinds = getattr(theirs, "layer_types", ["sliding_attention"] * 4)
    windowed = [theirs.sliding_window or 0 if kind == "sliding_attention" else 0 for kind in kinds]
    assert tuple(windowed) == (windows or (0,) * 4)
    # Where the whole sequence is in the window, there is none.
    assert [model.window(block, 8) for block in range(4)] == [w if w < 8 else 0 for w in windowed]
    assert [model.window(block, 9) for block in range(4)] == [w if w < 9 else 0 for w in windowed]


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("gelu", "gelu"),
        ("gelu_new", "gelu_new"),
        ("gelu_pytorch_tanh", "gelu_new"),
        ("swish", "silu"),
        ("silu", "silu"),
        ("relu", "relu"),
        ("gelu_fast", "gelu_new"),
    ],
)
def test_activation_names(name, ours):
    assert model_spec({"model_type": "llama", "hidden_act": name}).activation == ours


def test_scalars_reach_the_spec():
    llama = model_spec(LlamaConfig(attention_dropout=0.125, rms_norm_eps=1e-4).to_dict())
    assert (llama.attention_dropout, llama.norm_epsilon) == (0.125, 1e-4)
    assert model_spec({"model_type": "llama", "attention_dropout": None}).attention_dropout == 0.0


REFUSED = [
    ({}, "model_type"),
    ({"model_type": "mixtral"}, "mixtral"),
    ({"model_type": "llama", "architectures": "LlamaForCausalLM"}, "architectures"),
    ({"model_type": "llama", "pretraining_tp": 2}, "pretraining_tp"),
    ({"model_type": "llama", "quantization_config": {"bits": 4}}, "quantization_config"),
    ({"model_type": "llama", "n_layer": 2}, "n_layer"),
    ({"model_type": "llama", "num_hidden_layer": 2}, "write num_hidden_layers"),
    ({"model_type": "llama", "hidden_size": "64"}, "'64'"),
    ({"model_type": "llama", "hidden_size": 0}, "hidden_size = 0"),
    ({"model_type": "llama", "hidden_size": True}, "hidden_size = True"),
    ({"model_type": "llama", "num_attention_heads": 6, "hidden_size": 48, "num_key_value_heads": 4}, "= 4"),
    ({"model_type": "llama", "head_dim": 5}, "head_dim = 5"),
    ({"model_type": "llama", "tie_word_embeddings": "no"}, "tie_word_embeddings"),
    ({"model_type": "llama", "rms_norm_eps": 0.0}, "rms_norm_eps"),
    ({"model_type": "llama", "rms_norm_eps": "1e-5"}, "rms_norm_eps"),
    ({"model_type": "llama", "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
    ({"model_type": "qwen2", "rope_scaling": {"rope_type": "yarn"}}, "rope_scaling.factor"),
    ({"model_type": "qwen2", "rope_scaling": YARN | {"beta_fast": 1}}, "beta_fast"),
    ({"model_type": "qwen2", "rope_scaling": YARN | {"truncate": 1}}, "truncate"),
    ({"model_type": "qwen2", "use_mrope": True}, "use_mrope"),
    ({"model_type": "qwen2", "attention_bias": True}, "attention_bias"),
    ({"model_type": "qwen3", "layer_types": ["full_attention"]}, "layer_types"),
    (
        {"model_type": "qwen3", "layer_types": ["sliding_attention"], "num_hidden_layers": 1},
        "use_sliding_window",
    ),
    ({"model_type": "qwen3", "max_window_layers": -1}, "max_window_layers"),
    ({"model_type": "qwen3", "head_dim": 7}, "head_dim = 7"),
    ({"model_type": "qwen3", "sliding_window": 4096.0, "use_sliding_window": True}, "sliding_window"),
    ({"model_type": "llama", "sliding_window": 4096}, "sliding_window"),
    ({"model_type": "mistral", "sliding_window": 0}, "sliding_window"),
    ({"model_type": "mistral", "mlp_bias": True}, "mlp_bias"),
    ({"model_type": "llama", "architectures": ["LlamaForQuestionAnswering"]}, "architectures"),
    ({"model_type": "llama", "rope_scaling": {"rope_type": "linear"}}, "rope_scaling.factor"),
    ({"model_type": "llama", "rope_scaling": 2.0}, "rope_scaling"),
    ({"model_type": "llama", "rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "rope_parameters"),
    ({"model_type": "llama", "rope_parameters": LLAMA_3 | {"high_freq_factor": 1.0}}, "high_freq_factor"),
    ({"model_type": "llama", "rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    ({"model_type": "llama", "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
]


@pytest.mark.parametrize(("config", "said"), REFUSED, ids=lambda value: str(value)[:60])
def test_what_would_silently_differ_is_refused(config, said):
    with pytest.raises(ModelError) as error:
        model_spec(config)
    assert said in str(error.value)
    assert "Fix:" in str(error.value)


def test_configs_written_by_transformers_4_are_accepted():
    """The keys of the hub's gpt2, Llama 3.1, Qwen2.5-0.5B and pythia-160m files."""
    gpt2 = {
        "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1,
        "bos_token_id": 50256, "embd_pdrop": 0.1, "eos_token_id": 50256, "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-05, "model_type": "gpt2", "n_ctx": 1024, "n_embd": 768, "n_head": 12,
        "n_layer": 12, "n_positions": 1024, "resid_pdrop": 0.1, "summary_activation": None,
        "summary_first_dropout": 0.1, "summary_proj_to_labels": True, "summary_type": "cls_index",
        "summary_use_proj": True, "task_specific_params": {}, "vocab_size": 50257,
    }  # fmt: skip
    assert num_parameters(model_of(gpt2)) == 124_439_808
    llama = {
        "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "bos_token_id": 128000, "eos_token_id": 128001, "hidden_act": "silu", "hidden_size": 4096,
        "initializer_range": 0.02, "intermediate_size": 14336, "max_position_embeddings": 131072,
        "mlp_bias": False, "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 32,
        "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
        "rope_scaling": LLAMA_3 | {"original_max_position_embeddings": 8192}, "rope_theta": 500000.0,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.43.0",
        "use_cache": True, "vocab_size": 128256,
    }  # fmt: skip
    assert num_parameters(model_spec(llama)) == 8_030_261_248
    qwen = {
        "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643,
        "eos_token_id": 151643, "hidden_act": "silu", "hidden_size": 896, "initializer_range": 0.02,
        "intermediate_size": 4864, "max_position_embeddings": 32768, "max_window_layers": 24,
        "model_type": "qwen2", "num_attention_heads": 14, "num_hidden_layers": 24, "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 32768,
        "tie_word_embeddings": True, "torch_dtype": "bfloat16", "transformers_version": "4.40.1",
        "use_cache": True, "use_mrope": False, "use_sliding_window": False, "vocab_size": 151936,
    }  # fmt: skip
    assert num_parameters(model_spec(qwen)) == 494_032_768
    pythia = {
        "architectures": ["GPTNeoXForCausalLM"], "bos_token_id": 0, "eos_token_id": 0, "hidden_act": "gelu",
        "hidden_size": 768, "initializer_range": 0.02, "intermediate_size": 3072, "layer_norm_eps": 1e-05,
        "max_position_embeddings": 2048, "model_type": "gpt_neox", "num_attention_heads": 12,
        "num_hidden_layers": 12, "rotary_emb_base": 10000, "rotary_pct": 0.25,
        "tie_word_embeddings": False, "torch_dtype": "float16", "transformers_version": "4.24.0",
        "use_cache": True, "use_parallel_residual": True, "vocab_size": 50304,
    }  # fmt: skip
    assert num_parameters(model_of(pythia)) == 162_322_944


def test_keys_of_other_families_that_ask_for_nothing_are_accepted():
    """Tools write them: ``"sliding_window": null`` in a Llama."""
    off = {"sliding_window": None, "use_sliding_window": False, "rope_scaling": None, "mlp_bias": False}
    for family in get_args(Family):
        assert model_spec({"model_type": family} | off) == model_spec(
            {"model_type": family} | ({"sliding_window": None} if family == "mistral" else {})
        )


def test_a_saved_config_of_transformers_is_accepted(tmp_path):
    """Every key that transformers writes by itself passes the misspelling check."""
    for config in CONFIGS.values():
        config.save_pretrained(tmp_path)
        again = type(config).from_pretrained(tmp_path)
        assert model_of(again.to_dict()) == model_of(config.to_dict())
