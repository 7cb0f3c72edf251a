"""Every layout that a plan names is loaded from the config that it writes, as that layout."""

import json
import random
from dataclasses import replace

import pytest
from all_families import tiny

import dsx
from dsx.planner.cluster import preset
from dsx.planner.inputs import PinnedChoices, plan_inputs, plan_search
from dsx.planner.predicted import layout_of
from often import often

OWN = {"family": "llama", "preset": "tiny"}
WIDE = OWN | {"overrides": {"intermediate_size": 384}}  # whole blocks of 64
LORA, JOINED = {"rank": 4, "alpha": 8}, {"documents": "joined"}
CASES = {
    "nf4": {"model": WIDE, "adapter": LORA | {"quantization": "nf4"}},
    "int8": {"model": OWN, "adapter": LORA | {"quantization": "int8"}},
    "kept": {"model": OWN, "zero": {"keep_gathered_bytes": 1 << 20}},
    "reduced": {"model": OWN, "zero": {"reduce": "micro_batch"}},
    **{name: {} for name in ("gpt2", "qwen3_moe", "llama4_text", "gpt_oss")},
    "granitemoehybrid": {"data": JOINED},
    "qwen3": {"model": {"implementation": "transformers"}, "adapter": LORA},
    "deepseek_v3": {"train": {"freeze": ["embed_tokens"]}},
    "qwen3_next": {"data": JOINED},
}


@pytest.mark.parametrize("name", often(CASES, 8))
def test_what_a_plan_names_is_loaded(name, tmp_path):
    draw, block = random.Random(name), {"model": {}, "data": {}, "train": {}} | CASES[name]
    if "preset" not in block["model"]:
        block["model"] = {"config": tiny.tiny_config(name).to_dict() | {"vocab_size": 257}} | block["model"]
    block["data"] = block["data"] | {"sequence_length": 16, "source": "python-stdlib", "tokenizer": "bytes"}
    block["train"] = block["train"] | {"steps": 2, "output": "runs/planned"}
    gpus, zero = draw.choice((4, 8)), draw.choice(({}, {"offload_optimizer": {"device": "cpu"}}))
    config = {
        "train_batch_size": 2 * gpus,
        "bf16": {"enabled": name != "gpt2"},
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": {"kept": 3, "reduced": 2}.get(name, 1)} | zero,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "dsx": block,
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    open_ones = dict.fromkeys(("model", "global_batch", "sequence_length"))
    inputs = plan_inputs(config=path, cluster=preset("H100"), gpus=gpus, **open_ones)
    tensor = 2 if name == "llama4_text" else None  # whose sequences are not cut
    search = plan_search(inputs, PinnedChoices(tensor=tensor, micro_batch=draw.choice((None, 1))))
    plan = search.run(3)
    named = [*plan.best, *plan.others, *plan.too_large]
    # Within less memory some of these are named by bounds of it alone.
    less = replace(search, cap_bytes=plan.best[0].peak_bytes - 1)
    named += filter(None, map(less.judge, [each.layout for each in named]))
    for ranked in named:
        path.write_text(json.dumps(inputs.config_of(ranked.layout, search.predictor)))
        loaded = layout_of(dsx.load_config(path, world_size=gpus))
        assert replace(loaded, bounds=None) == replace(ranked.layout, bounds=None), ranked.layout.label
    assert len(named) > 5
