"""What is frozen takes its weights alone: estimates beside the engine itself, on paper."""

from __future__ import annotations

import pytest

from dsx.config.resolve import resolve
from dsx.memory.estimate import estimate
from dsx.memory.job import job_of
from memory.test_paper import CONFIG, SCALARS, traced
from often import often

LOW = 'dsx.train.freeze=["embed_tokens", "layers\\\\.[01]\\\\.", "layers\\\\.2\\\\.mlp\\\\.down_proj"]'
HIGH = 'dsx.train.freeze=["lm_head", "model\\\\.norm", "layers\\\\.[23]\\\\."]'
ALL_BUT_ONE = 'dsx.train.freeze=["^(?!.*layers\\\\.3\\\\.self_attn\\\\.o_proj)"]'

CASES = {
    "zero1_below": (0, 1, [LOW, "zero_optimization.stage=1"]),
    "zero2_bf16_first_rank_trains_nothing": (0, 2, [LOW, "zero_optimization.stage=2", "bf16.enabled=true"]),
    "zero3_below": (1, 1, [LOW, "zero_optimization.stage=3"]),
    "zero3_bf16_above": (0, 1, [HIGH, "zero_optimization.stage=3", "bf16.enabled=true"]),
    "zero0_bf16_last_rank_trains_nothing": (1, 2, [HIGH, "bf16.enabled=true"]),
    "zero3_first_rank_trains_nothing": (0, 2, [ALL_BUT_ONE, "zero_optimization.stage=3"]),
    "zero1_fp32_sums_divided": (
        1,
        2,
        [
            LOW,
            "zero_optimization.stage=1",
            "bf16.enabled=true",
            "data_types.grad_accum_dtype=fp32",
            'dsx.schedule.name="zb_h1"',
        ],
    ),
    "zero2_micro_batch_recomputed": (
        1,
        2,
        [LOW, "zero_optimization.stage=2", 'dsx.zero.reduce="micro_batch"', 'dsx.recompute="full"'],
    ),
    "zero1_tensor": (0, 1, [HIGH, "zero_optimization.stage=1", "dsx.parallel.tensor=2"]),
    "zero1_bf16_lora": (
        0,
        2,
        ['dsx.adapter={"type": "lora", "rank": 4}', "zero_optimization.stage=1", "bf16.enabled=true"],
    ),
    "zero3_dora_beside_its_head": (
        1,
        1,
        [
            'dsx.adapter={"type": "dora", "rank": 4, "targets": ["q_proj"], "train_also": ["lm_head"]}',
            "dsx.adapter.dropout=0.1",
            "zero_optimization.stage=3",
        ],
    ),
    "zero3_bf16_lora_recomputed": (
        0,
        1,
        [
            'dsx.adapter={"rank": 4}',
            "zero_optimization.stage=3",
            "bf16.enabled=true",
            'dsx.recompute="full"',
        ],
    ),
    "zero0_bf16_nf4": (
        1,
        2,
        ['dsx.adapter={"type": "dora", "rank": 4, "quantization": "nf4"}', "bf16.enabled=true"],
    ),
    "zero1_int8": (
        0,
        2,
        ['dsx.adapter={"rank": 4, "quantization": "int8"}', "zero_optimization.stage=1"],
    ),
    "zero1_nf4_tensor": (
        1,
        1,
        [
            'dsx.adapter={"rank": 4, "quantization": "nf4"}',
            "zero_optimization.stage=1",
            "dsx.parallel.tensor=2",
        ],
    ),
    "zero2_offload_above": (
        0,
        2,
        [HIGH, "zero_optimization.stage=2", 'zero_optimization.offload_optimizer={"device": "cpu"}'],
    ),
}


@pytest.mark.parametrize("name", often(CASES, 5))
def test_estimates_are_what_the_engine_takes_on_paper(name: str) -> None:
    rank, pipeline, sets = CASES[name]
    sets = [
        "gradient_accumulation_steps=4",
        *(["zero_optimization.reduce_bucket_size=50000"] if "zero_optimization.stage" in str(sets) else []),
        "dsx.parallel.tensor=1",
        f"dsx.parallel.pipeline={pipeline}",
        *sets,
    ]
    paper = traced(rank, 2, sets)
    config = resolve(CONFIG, world_size=2, overrides=sets)
    found = estimate(job_of(config, device="cpu"), rank)
    peaks = {phase.name: phase.peak_bytes for phase in found.phases}
    for phase in ("step 1", "step 2"):
        assert peaks[phase] == pytest.approx(paper["phases"][phase], rel=5e-4, abs=SCALARS), phase
    assert found.steady_bytes == pytest.approx(paper["steady"], abs=SCALARS)
    whole = resolve(
        CONFIG,
        world_size=2,
        overrides=[each for each in sets if "freeze" not in each and "adapter" not in each],
    )
    assert found.steady_bytes < estimate(job_of(whole, device="cpu"), rank).steady_bytes
