"""The head and its loss in chunks of tokens: estimates beside the engine itself, on paper."""

from __future__ import annotations

import json

import pytest

from dsx.config.resolve import resolve
from dsx.memory.estimate import estimate
from dsx.memory.job import job_of
from memory.test_paper import CONFIG, SCALARS, traced
from often import often

VOCABULARY = 'dsx.model.overrides={"vocab_size": 4096}'
TIED = 'dsx.model.overrides={"vocab_size": 4096, "tie_word_embeddings": true}'
GEMMA = ["dsx.model.family=gemma2", 'dsx.model.overrides={"vocab_size": 4000, "head_dim": 16}']

GRANITE = {
    "model_type": "granite",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "vocab_size": 4096,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "logits_scaling": 8.0,
    "max_position_embeddings": 512,
}

CASES = {
    "zero1_pipeline": (2, [VOCABULARY, "zero_optimization.stage=1"]),
    "zero3_bf16_tied": (1, [TIED, "zero_optimization.stage=3", "bf16.enabled=true"]),
    "zero2_bf16_divided": (
        2,
        [
            VOCABULARY,
            "zero_optimization.stage=2",
            "bf16.enabled=true",
            'dsx.schedule.name="zb_h1"',
            'dsx.zero.reduce="micro_batch"',
        ],
    ),
    "zero1_tensor_caps": (1, [*GEMMA, "zero_optimization.stage=1", "dsx.parallel.tensor=2"]),
    "zero3_divided": (2, [VOCABULARY, "zero_optimization.stage=3", 'dsx.schedule.name="zb_h1"']),
    "zero1_gpipe": (2, [VOCABULARY, "zero_optimization.stage=1", 'dsx.schedule.name="gpipe"']),
    "zero1_transformers": (
        2,
        [
            f"dsx.model={json.dumps({'implementation': 'transformers', 'config': GRANITE})}",
            "zero_optimization.stage=1",
        ],
    ),
    "zero1_frozen_head": (
        2,
        [VOCABULARY, 'dsx.train.freeze=["lm_head"]', "zero_optimization.stage=1", "bf16.enabled=true"],
    ),
}


@pytest.mark.parametrize("name", often(CASES, 4))
def test_estimates_are_what_the_engine_takes_on_paper(name: str) -> None:
    pipeline, sets = CASES[name]
    rank = pipeline - 1
    sets = [
        "gradient_accumulation_steps=4",
        "zero_optimization.reduce_bucket_size=50000",
        "dsx.parallel.tensor=1",
        f"dsx.parallel.pipeline={pipeline}",
        "dsx.loss.chunk_tokens=48",
        *sets,
    ]
    paper = traced(rank, 2, sets)
    found = estimate(job_of(resolve(CONFIG, world_size=2, overrides=sets), device="cpu"), rank)
    peaks = {phase.name: phase.peak_bytes for phase in found.phases}
    for phase in ("step 1", "step 2"):
        assert peaks[phase] == pytest.approx(paper["phases"][phase], rel=5e-4, abs=SCALARS), phase
    assert found.steady_bytes == pytest.approx(paper["steady"], abs=SCALARS)
