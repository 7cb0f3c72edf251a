"""A rank's estimate is what the real engine holds on paper: every phase, and between steps."""

from __future__ import annotations

import pytest
import torch

from dsx.config.resolve import resolve
from dsx.memory.estimate import estimate
from dsx.memory.job import job_of
from meta_engine import programs
from often import often

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_clipping": 1.0,
    "zero_allow_untested_optimizer": True,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.1, "torch_adam": True}},
    "dsx": {
        "model": {"family": "gpt2", "preset": "tiny"},
        "parallel": {"tensor": 1, "pipeline": 1},
        "data": {"sequence_length": 64},
        "train": {"steps": 2, "output": "runs/paper"},
    },
}

CASES = {
    "zero1_summed_in_fp32": (
        4,
        [
            "zero_optimization.stage=1",
            "bf16.enabled=true",
            "zero_optimization.reduce_bucket_size=20000",
            "data_types.grad_accum_dtype=fp32",
            "dsx.parallel.pipeline=2",
            "dsx.parallel.chunks=2",
            "dsx.schedule.name=interleaved_zb",
            "dsx.recompute=full",
        ],
    ),
    "zero1_fp32": (
        4,
        ["zero_optimization.stage=1", "dsx.parallel.pipeline=2", "gradient_clipping=1.0"],
    ),
    "zero0_bf16_fused_tied": (
        4,
        [
            "zero_optimization.stage=0",
            "bf16.enabled=true",
            "optimizer.params.torch_adam=false",
            "dsx.parallel.pipeline=2",
        ],
    ),
    "zero2_per_micro_batch_interleaved": (
        4,
        [
            "zero_optimization.stage=2",
            "zero_optimization.reduce_bucket_size=20000",
            "dsx.zero.reduce=micro_batch",
            "bf16.enabled=true",
            "dsx.parallel.pipeline=2",
            "dsx.parallel.chunks=2",
            "dsx.schedule.name=interleaved",
            "optimizer.type=SGD",
            'optimizer.params={"lr": 0.001, "momentum": 0.9}',
        ],
    ),
    "zero1_windows_and_head_norms": (
        4,
        [
            "zero_optimization.stage=1",
            "bf16.enabled=true",
            "dsx.model.family=qwen3",
            'dsx.model.overrides={"use_sliding_window": true, "sliding_window": 20, "max_window_layers": 3}',
            "dsx.parallel.tensor=2",
            "dsx.parallel.pipeline=2",
        ],
    ),
    "zero2_divided_backward": (
        4,
        [
            "zero_optimization.stage=2",
            "bf16.enabled=true",
            "data_types.grad_accum_dtype=fp32",
            "dsx.parallel.pipeline=2",
            "dsx.schedule.name=zb_h1",
        ],
    ),
    "zero2_per_micro_batch_summed_in_fp32": (
        4,
        [
            "zero_optimization.stage=2",
            "zero_optimization.reduce_bucket_size=5000",
            "dsx.zero.reduce=micro_batch",
            "bf16.enabled=true",
            "data_types.grad_accum_dtype=fp32",
        ],
    ),
    "zero2_per_micro_batch_sent_in_fp32": (
        4,
        [
            "zero_optimization.stage=2",
            "zero_optimization.reduce_bucket_size=200000",
            "dsx.zero.reduce=micro_batch",
            "bf16.enabled=true",
            "communication_data_type=fp32",
        ],
    ),
    "zero1_fp16_summed_in_fp32": (
        4,
        [
            "zero_optimization.stage=1",
            "zero_optimization.reduce_bucket_size=20000",
            "fp16.enabled=true",
            "data_types.grad_accum_dtype=fp32",
            "dsx.parallel.pipeline=2",
        ],
    ),
    "zero0_fp16_fused": (
        2,
        ["zero_optimization.stage=0", "fp16.enabled=true", "optimizer.params.torch_adam=false"],
    ),
    "zero2_fp16": (
        4,
        ["zero_optimization.stage=2", "fp16.enabled=true", "dsx.parallel.tensor=2"],
    ),
}


def traced(sets, rank, world):
    """Peaks of a rank, and the bytes of its optimizer's tensors."""
    from meta_engine import run

    made, initialize = [], run.initialize
    run.initialize = lambda **given: made.append(initialize(**given)) or made[-1]
    peaks = programs.trace_here(CONFIG, rank, world, sets, {})
    optimizer = made[0][0].deepspeed_engine.optimizer

    def size(*names):
        found = [tensor for name in names for tensor in getattr(optimizer, name, ())]
        return sum(tensor.numel() * tensor.element_size() for tensor in found)

    states = [t for state in optimizer.optimizer.state.values() for t in state.values() if torch.is_tensor(t)]
    return peaks, {
        "parameters": size("bit16_groups_flat", "bf16_groups_flat", "fp16_groups_flat"),
        "master weights": size(
            "single_partition_of_fp32_groups", "fp32_groups_flat_partition", "fp32_groups_flat"
        ),
        "moments": sum(t.numel() * t.element_size() for t in states if t.device.type == "paper"),
        "fp32 gradients": size("fp32_groups_gradients_flat"),
    }


_STATES = ("parameters", "optimizer", "gradients")

_SCALARS = 20 * 512
"""Losses' sums, norms and the like, 512 bytes each on a GPU, which the ledger leaves out."""


@pytest.mark.parametrize("name", often(CASES, 4))
def test_estimate_is_what_the_engine_holds(name):
    world, sets = CASES[name]
    sets = ["gradient_accumulation_steps=4", *sets]
    rank = world - 1
    peaks, states = programs.alone(traced, sets, rank, world)
    job = job_of(resolve(CONFIG, world_size=world, overrides=sets))
    found = estimate(job, rank)
    ours = {phase.name: phase.peak_bytes for phase in found.phases}
    assert ours == pytest.approx(peaks.phases, abs=_SCALARS)
    assert found.steady_bytes == pytest.approx(peaks.steady_bytes, abs=_SCALARS)
    # DeepSpeed's tensors, padding included, to the byte.
    exact = estimate(job, rank, rounding_bytes=1).phases[-1].lines
    for what, size in states.items():
        held = [n for label, n in exact if what in (label.category, label.name) and label.category in _STATES]
        assert sum(held) == size, what
    # A phase's lines are all of it.
    for phase in found.phases:
        assert sum(size for _, size in phase.lines) == phase.peak_bytes
        made = [label for label, _ in phase.lines if label.category in ("activations", "logits", "transfers")]
        assert all(label.formula and label.source for label in made)
        assert all(label.name for label, _ in phase.lines)


@pytest.mark.parametrize("bucket", [20_000, 500_000_000])
@pytest.mark.parametrize("degrees", [(1, 1), (2, 1), (2, 2)])
@pytest.mark.parametrize("dp", [1, 4])
def test_bf16_summed_in_fp32_takes_6_and_12_by_n_and_two_buckets(dp, degrees, bucket):
    pipeline, chunks = degrees
    sets = [
        "gradient_accumulation_steps=4",
        "zero_optimization.stage=1",
        "bf16.enabled=true",
        "data_types.grad_accum_dtype=fp32",
        f"zero_optimization.reduce_bucket_size={bucket}",
        f"dsx.parallel.pipeline={pipeline}",
        f"dsx.parallel.chunks={chunks}",
        f"dsx.schedule.name={'interleaved' if chunks > 1 else '1f1b'}",
    ]
    job = job_of(resolve(CONFIG, world_size=dp * pipeline, overrides=sets))
    for pp in range(pipeline):
        rank = job.layout.mesh.rank(pp=pp)
        found = estimate(job, rank, rounding_bytes=1)
        plan = job.layout.zero_plan(pp)
        padded = sum(buffer.numel for buffer in plan.buffers(0)) * dp
        largest = max(numel for group in plan.groups for _, numel in group)
        # Besides, transformers' modules are given the positions of 64 tokens and a scalar, which stay.
        given = {size for label, size in found.phases[-1].lines if label.name == "kept by BlockArguments"}
        assert given == {64 * 8, 2}
        assert found.steady_bytes == (6 + 12 / dp) * padded + sum(given)
        for phase in found.phases:
            held = {label.name: size for label, size in phase.lines if label.category == "buckets"}
            assert held.get("gradients under way", 0) <= 2 * 2 * bucket
            of = {label.name: size for label, size in phase.lines if label.category == "gradients"}
            # Besides them one gradient, with its bias's, on its way into the buffer.
            assert sum(of.values()) - of.get("fp32 gradients", 0) <= 2 * 1.1 * largest
