"""A head in chunks of tokens, frozen layers and adapters: estimates beside the engine itself, on paper."""

from __future__ import annotations

import json

import pytest

from dsx.config.resolve import resolve
from dsx.memory.estimate import estimate
from dsx.memory.job import job_of
from dsx.memory.layer_record import DeviceKind
from memory.test_paper import CONFIG, SCALARS
from meta_engine import programs
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
CHUNKED: dict[str, tuple[int, list[str]]] = {
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
"""Pipeline degree, and what is set."""

LOW = 'dsx.train.freeze=["embed_tokens", "layers\\\\.[01]\\\\.", "layers\\\\.2\\\\.mlp\\\\.down_proj"]'
HIGH = 'dsx.train.freeze=["lm_head", "model\\\\.norm", "layers\\\\.[23]\\\\."]'
ALL_BUT_ONE = 'dsx.train.freeze=["^(?!.*layers\\\\.3\\\\.self_attn\\\\.o_proj)"]'
WIDE = 'dsx.model.overrides={"intermediate_size": 384}'  # rows of whole blocks of nf4, on two ranks, too
FROZEN: dict[str, tuple[int, int, list[str]]] = {
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
        ['dsx.adapter={"type": "dora", "rank": 4, "quantization": "nf4"}', "bf16.enabled=true", WIDE],
    ),
    "zero2_bf16_nf4_double": (
        1,
        2,
        [
            'dsx.adapter={"rank": 4, "quantization": "nf4_double"}',
            "zero_optimization.stage=2",
            "bf16.enabled=true",
            WIDE,
        ],
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
            WIDE,
        ],
    ),
    "zero2_offload_above": (
        0,
        2,
        [HIGH, "zero_optimization.stage=2", 'zero_optimization.offload_optimizer={"device": "cpu"}'],
    ),
}
"""Rank, pipeline degree, and what is set."""


OFFLOADED: dict[str, tuple[int, int, DeviceKind, list[str]]] = {
    "gpipe": (1, 2, "cuda", ["zero_optimization.stage=1", 'dsx.schedule.name="gpipe"']),
    "zbv_bf16": (1, 2, "cuda", ['dsx.schedule.name="zbv"', "dsx.parallel.chunks=2", "bf16.enabled=true"]),
    "transformers": (1, 2, "cuda", [CHUNKED["zero1_transformers"][1][0], "zero_optimization.stage=1"]),
    "frozen_below": (0, 1, "cpu", [LOW, "zero_optimization.stage=1"]),
    "zero3": (0, 1, "cuda", ["zero_optimization.stage=3", "bf16.enabled=true"]),
    "1f1b": (0, 2, "cpu", ["zero_optimization.stage=1"]),
}
"""Rank, pipeline degree, device, and what is set."""


def compare(rank: int, sets: list[str], device: DeviceKind = "cpu") -> float:
    """Hold the estimate to the trace; bytes between steps."""
    paper = programs.traced(CONFIG, rank, 2, sets, device="cpu" if device == "cpu" else "paper")
    found = estimate(job_of(resolve(CONFIG, world_size=2, overrides=sets), device=device), rank)
    peaks = {phase.name: phase.peak_bytes for phase in found.phases}
    for phase in ("step 1", "step 2"):
        assert peaks[phase] == pytest.approx(paper.phases[phase], rel=5e-4, abs=SCALARS), phase
    assert found.steady_bytes == pytest.approx(paper.steady_bytes, rel=5e-6, abs=SCALARS)
    return found.steady_bytes


def common(pipeline: int) -> list[str]:
    return ["gradient_accumulation_steps=4", "dsx.parallel.tensor=1", f"dsx.parallel.pipeline={pipeline}"]


BUCKET = "zero_optimization.reduce_bucket_size=50000"


@pytest.mark.parametrize("name", often(CHUNKED, 4))
def test_a_head_in_chunks_takes_what_is_estimated(name: str) -> None:
    pipeline, sets = CHUNKED[name]
    compare(pipeline - 1, [*common(pipeline), BUCKET, "dsx.loss.chunk_tokens=48", *sets])


@pytest.mark.parametrize("name", often(FROZEN, 9))
def test_what_is_frozen_takes_its_weights_alone(name: str) -> None:
    rank, pipeline, sets = FROZEN[name]
    sets = [*common(pipeline), *[BUCKET] * ("zero_optimization.stage" in str(sets)), *sets]
    steady = compare(rank, sets)
    trained = [each for each in sets if "freeze" not in each and "adapter" not in each]
    whole = resolve(CONFIG, world_size=2, overrides=trained)
    assert steady < estimate(job_of(whole, device="cpu"), rank).steady_bytes


@pytest.mark.parametrize("name", often(OFFLOADED, 5))
def test_blocks_inputs_on_the_host_leave_what_is_estimated(name: str) -> None:
    rank, pipeline, device, sets = OFFLOADED[name]
    sets = [*common(pipeline), "gradient_accumulation_steps=6", *sets]
    compare(rank, [*sets, 'dsx.recompute="offload"'], device)
    found = estimate(
        job_of(resolve(CONFIG, world_size=2, overrides=[*sets, 'dsx.recompute="offload"'])), rank
    )
    assert any("on the host" in label.name for label, _ in found.host_lines)
