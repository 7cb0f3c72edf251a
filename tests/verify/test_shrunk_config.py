"""A config made small keeps what decides how ranks cooperate, and can be resolved."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from dsx.config.resolve import RunConfig, resolve
from dsx.errors import DsxError
from dsx.hub.model_structure import hf_config_of
from dsx.hub.shrunk import shrunk
from dsx.models.spec import HubModel
from dsx.verify.reference import Transformers
from dsx.verify.shrunk import trial
from often import often

CONFIGS = Path(__file__).parents[2] / "configs"


def small(config: RunConfig, **options: Any) -> tuple[RunConfig, tuple[str, ...]]:
    made = trial(config, **options)
    return resolve(made.content, world_size=config.mesh.size), made.changes


@pytest.mark.parametrize(
    ("name", "world_size"),
    [(path.name, size) for path in sorted(CONFIGS.glob("*.json")) for size in (1, 2, 8, 64)],
)
def test_shipped_configs_keep_their_structure(name: str, world_size: int) -> None:
    given = json.loads((CONFIGS / name).read_text())
    if given["dsx"]["model"].get("path"):
        pytest.skip("needs a model folder")
    one_island = ["dsx.outer=null"] if given["dsx"].get("outer") else []  # as dsx verify has it
    try:
        config = resolve(CONFIGS / name, world_size=world_size, overrides=one_island)
    except Exception:  # noqa: BLE001 (not a size of this config)
        pytest.skip("the config is not for so many ranks")
    made, changes = small(config)
    assert changes
    assert made.mesh == config.mesh
    for key in ("chunks", "program", "zero_stage"):
        assert getattr(made, key) == getattr(config, key), key
    assert made.dsx.parallel.sequence_parallel == config.dsx.parallel.sequence_parallel
    assert made.dsx.recompute in (config.dsx.recompute, "none")
    was, now = config.model, made.model
    if isinstance(was, HubModel):
        for key in ("family", "tied_embeddings", "whole"):
            assert getattr(now, key) == getattr(was, key), key
        assert {*now.kinds} == {*was.kinds}
    else:
        for key in ("family", "tied_embeddings", "attention_bias", "mlp_bias", "norm", "activation"):
            assert getattr(now, key) == getattr(was, key), key
        assert now.num_heads / now.num_kv_heads == was.num_heads / was.num_kv_heads
    assert (now.query_size == now.hidden_size) == (was.query_size == was.hidden_size)
    assert made.num_parameters < 20_000_000
    assert made.num_parameters <= config.num_parameters
    assert made.precision == "fp32"
    blocks = lambda c: [  # noqa: E731
        sum(0 < i < c.stage_map.num_layers - 2 for i in c.stage_map.layers(s))
        for s in range(c.stage_map.num_stages)
    ]
    assert [n > 0 for n in blocks(made)] == [n > 0 for n in blocks(config)], "stages with blocks have blocks"
    pp = config.mesh.pp
    assert made.accumulation % pp == config.accumulation % pp or made.accumulation == config.accumulation


def test_uneven_stages_odd_vocabularies_and_dropout_stay() -> None:
    content = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 35,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "csv_monitor": {"enabled": True},
        "dsx": {
            "model": {"family": "gpt2", "preset": "gpt2", "overrides": {"vocab_size": 50257}},
            "parallel": {"tensor": 2, "pipeline": 2, "chunks": 2},
            "partition": {"method": [6, 3, 2, 5]},
            "data": {"sequence_length": 1024, "tokenizer": "bytes"},
            "train": {"steps": 1, "output": "unused"},
        },
    }
    config = resolve(content, world_size=8)
    made, changes = small(config)
    assert [len(made.stage_map.layers(s)) for s in range(4)] == [4, 1, 1, 3]
    assert made.model.vocab_size % 2 == 1
    assert made.accumulation == 5, "35 and 5 leave the same rest over the pipeline"
    drops = ("resid_pdrop", "embd_pdrop", "attn_pdrop")
    assert [made.hf_config[key] for key in drops] == [0.0] * 3
    assert "csv_monitor" not in made.deepspeed
    assert made.deepspeed["optimizer"]["params"]["torch_adam"] is True
    assert any("dropout" in change for change in changes)
    masks = trial(config).dropout
    assert masks is not None
    dropping = resolve(masks, world_size=8).hf_config
    assert [dropping[key] for key in drops] == [config.hf_config[key] for key in drops] == [0.1] * 3
    kept, _ = small(config, full=True, keep_precision=True)
    assert (kept.num_parameters, kept.precision) == (config.num_parameters, "bf16")
    assert kept.accumulation == 35
    assert kept.stage_map == config.stage_map


def random_model(draw: random.Random) -> dict[str, Any]:
    """A Hugging Face config of a family of dsx's own, with what makes sizes awkward."""
    family = draw.choice(["llama", "mistral", "qwen2", "qwen3"])
    heads, head_dim = draw.choice([1, 2, 3, 4, 6, 12, 25, 40, 72]), draw.choice([2, 4, 6, 8, 10, 64, 80, 128])
    layers, general = draw.choice([2, 4, 5, 28]), draw.random() < 0.3
    vocabulary, tied = draw.choice([257, 258, 1000, 50257, 151936]), draw.random() < 0.5
    common = {"model_type": family, "vocab_size": vocabulary, "tie_word_embeddings": tied}
    common |= {
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "hidden_size": heads * head_dim,
        "max_position_embeddings": draw.choice([256, 2048]),
        "intermediate_size": heads * draw.choice([8, 24, 360]),
    }
    common["num_key_value_heads"] = draw.choice([n for n in range(1, heads + 1) if heads % n == 0])
    if draw.random() < 0.5 or family == "qwen3":
        common |= {"head_dim": head_dim, "hidden_size": heads * draw.choice([2, 5, 16, 48])}
    if family == "mistral":
        common["sliding_window"] = draw.choice([None, 64, 4096])
    if family in ("qwen2", "qwen3") and general:
        common |= {"use_sliding_window": True, "sliding_window": draw.choice([64, 4096])}
        kinds = [draw.choice(["full_attention", "sliding_attention"]) for _ in range(layers)]
        some = {"layer_types": kinds}, {"max_window_layers": draw.choice([0, 1, 3])}
        common |= draw.choice(some)
    common["rope_scaling"] = draw.choice([None, {"rope_type": "yarn", "factor": 4.0}])
    return common


@pytest.mark.parametrize("seed", often(range(400), every=8))
def test_any_model_made_small_is_one_that_its_family_takes(seed: int) -> None:
    """transformers builds it from the config, with dsx's tensors."""
    draw = random.Random(seed)
    sizes = {"tensor": draw.choice([1, 2, 3]), "pipeline": draw.choice([1, 2])}
    content = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "dsx": {
            "model": {"config": random_model(draw), "vocab_multiple": draw.choice([1, 8, 64])},
            "parallel": sizes,
            "data": {"sequence_length": 240, "tokenizer": "bytes"},
            "train": {"steps": 1, "output": "unused"},
        },
    }
    try:
        config = resolve(content, world_size=2 * sizes["tensor"] * sizes["pipeline"])
    except DsxError:
        pytest.skip("not a config that can be trained so")
    made, _ = small(config)
    was, now = config.model, made.model
    reference = Transformers(made)
    assert {name: tuple(tensor.shape) for name, tensor in reference.weights().items()} == {
        spec.name: spec.shape for spec in made.param_specs
    }
    compare = [
        lambda m: (m.query_size > m.hidden_size) - (m.query_size < m.hidden_size),
        lambda m: m.num_heads // m.num_kv_heads,
        lambda m: set(m.windows) == {0} or not m.windows,
        lambda m: m.tied_embeddings,
    ]
    assert [same(now) for same in compare] == [same(was) for same in compare]
    assert made.mesh == config.mesh


def test_a_model_none_of_whose_blocks_has_a_window_gets_none() -> None:
    """Its config names a window, for blocks behind more than it has."""
    config = {
        "model_type": "qwen3",
        "num_hidden_layers": 2,
        "use_sliding_window": True,
        "sliding_window": 4096,
    }
    for without, windows in ((2, False), (9, False), (1, True)):
        made = hf_config_of(shrunk({**config, "max_window_layers": without}, layers=2))
        assert made.num_hidden_layers == 2
        assert ("sliding_attention" in made.layer_types) is windows


def test_what_is_frozen_and_adapted_stays_as_far_as_the_small_model_has_it() -> None:
    content = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "dsx": {
            "model": {"family": "llama", "preset": "tiny", "overrides": {"num_hidden_layers": 12}},
            "data": {"sequence_length": 64, "format": "chat", "source": "chats.jsonl"},
            "train": {
                "steps": 1,
                "output": "unused",
                "freeze": ["embed", r"layers\.(0|11)\.", r"layers\.9\."],
            },
        },
    }
    made, changes = small(resolve(content, world_size=2))
    assert made.dsx.train.freeze == ("embed", r"layers\.(0|11)\.")
    assert any("layers\\.9\\." in change for change in changes)
    assert made.dsx.data.keeps_apart
    adapter = {"rank": 16, "dropout": 0.1, "targets": ["q_proj", "layers.11.mlp.up_proj"]}
    adapted = {
        **content,
        "dsx": {**content["dsx"], "adapter": adapter, "train": {"steps": 1, "output": "unused"}},
    }
    config = resolve(adapted, world_size=2)
    made, changes = small(config)
    assert made.dsx.adapter is not None
    assert (made.dsx.adapter.rank, made.dsx.adapter.dropout) == (4, 0.0)
    assert list(made.dsx.adapter.targets) == ["mlp.up_proj", "self_attn.q_proj"]
    assert any("dsx.adapter.targets" in change for change in changes)
    adapted["dsx"]["adapter"] |= {"quantization": "int8"}
    assert small(resolve(adapted, world_size=2))[0].dsx.adapter.quantization == "none"
    kept, _ = small(config, full=True)
    assert kept.dsx.adapter is not None
    assert kept.param_specs == config.param_specs


def test_caps_are_low_enough_to_be_at_work_on_small_numbers() -> None:
    """Gemma 2's own are 50 and 30, which change a small model's logits by less than a layout's rounding."""
    content = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "dsx": {
            "model": {"family": "gemma2", "preset": "gemma-2-2b"},
            "data": {"source": "own", "sequence_length": 128},
            "train": {"steps": 1, "output": "unused"},
        },
    }
    made, _ = small(resolve(content, world_size=1))
    caps = [made.hf_config[key] for key in ("attn_logit_softcapping", "final_logit_softcapping")]
    assert caps == [1.0, 1.0]


def test_that_blocks_are_left_out_at_random_is_not_turned_off() -> None:
    """Dropout is, in a trial; without such a family's refusal the trial itself shows the difference."""
    from all_families.tiny import tiny_config

    from dsx.hub.shrunk import random_keys

    config = tiny_config("opt", {"layerdrop": 0.1, "dropout": 0.1}).to_dict()
    assert "dropout" in random_keys(config)
    assert "layerdrop" not in random_keys(config)
