"""Every layout that a plan names is loaded from the config that it writes, as that layout."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

import pytest
from all_families import tiny

import dsx
from dsx.planner.cluster import preset
from dsx.planner.inputs import PinnedChoices, plan_inputs, plan_search
from dsx.planner.predicted import layout_of
from often import often

OWN = {"family": "llama", "preset": "tiny"}
WIDE = OWN | {"overrides": {"intermediate_size": 384}}  # whole blocks of 64
LORA = {"rank": 4, "alpha": 8}
FAMILIES = {
    "gpt2": {},
    "qwen3_moe": {},
    "llama4_text": {},
    "granitemoehybrid": {"data": {"documents": "joined"}},
    "qwen3": {"model": {"implementation": "transformers"}, "adapter": LORA},
    "deepseek_v3": {"train": {"freeze": ["embed_tokens"]}},
    "qwen3_next": {"data": {"documents": "joined"}},
    "gpt_oss": {},
}
BLOCKS: dict[str, dict[str, Any]] = {
    "own": {"model": OWN},
    "nf4": {"model": WIDE, "adapter": LORA | {"quantization": "nf4"}},
    "own lora": {"model": OWN, "adapter": LORA},
    "int8": {"model": OWN, "adapter": LORA | {"quantization": "int8"}},
    "kept": {"model": OWN, "zero": {"keep_gathered_bytes": 1 << 20}},
    "reduced": {"model": OWN, "zero": {"reduce": "micro_batch"}},
}


def written(name: str) -> dict[str, Any]:
    """The ``dsx`` block of a case, with settings that have nothing to do with it drawn at random."""
    block = dict(BLOCKS.get(name) or FAMILIES[name])
    if name in FAMILIES:
        config = tiny.tiny_config(name).to_dict()
        block["model"] = {"config": config | {"vocab_size": 257}} | block.get("model", {})
    sizes = {"sequence_length": 16, "source": "python-stdlib", "tokenizer": "bytes"}
    block["data"] = block.get("data", {}) | sizes
    block["train"] = block.get("train", {}) | {"steps": 2, "output": "runs/planned"}
    return block


@pytest.mark.parametrize("name", often([*BLOCKS, *FAMILIES], 2))
def test_what_a_plan_names_is_loaded(name, tmp_path):
    draw = random.Random(name)
    gpus, path = draw.choice((4, 8)), tmp_path / "config.json"
    zero = draw.choice(({}, {"offload_optimizer": {"device": "cpu"}}))
    config = {
        "train_batch_size": 2 * gpus,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": name not in ("own", "gpt2")},
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": {"kept": 3, "reduced": 2}.get(name, 1)} | zero,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "dsx": written(name),
    }
    path.write_text(json.dumps(config))
    given = {"model": None, "config": path, "global_batch": None, "sequence_length": None}
    inputs = plan_inputs(cluster=preset("H100"), gpus=gpus, **given)
    tensor = 2 if name == "llama4_text" else None  # whose sequences are not cut
    search = plan_search(inputs, PinnedChoices(tensor=tensor, micro_batch=draw.choice((None, 1))))
    plan = search.run(3)
    named = [*plan.best, *plan.others, *plan.too_large]
    # Within less memory some of these are named by bounds of it alone.
    less = replace(search, cap_bytes=plan.best[0].peak_bytes - 1)
    named += filter(None, map(less.judge, [each.layout for each in named]))
    for ranked in named:
        out = tmp_path / "planned.json"
        out.write_text(json.dumps(inputs.config_of(ranked.layout, search.predictor)))
        run = dsx.load_config(out, world_size=gpus)
        loaded = replace(layout_of(run), bounds=None)
        assert loaded == replace(ranked.layout, bounds=None), ranked.layout.label
    assert len(named) > 5
