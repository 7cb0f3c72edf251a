"""What ranks that hold the experts of a layer together keep and take, against the tensors of real ranks."""

from __future__ import annotations

import pytest
import torch

import ranks
from dsx.config.resolve import resolve
from dsx.memory.estimate import estimate
from dsx.memory.job import job_of
from often import often

EXPERTS, EACH, LENGTH = 8, 2, 128

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "zero_force_ds_cpu_optimizer": False,
    "zero_optimization": {"reduce_bucket_size": 100_000},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "dsx": {
        "model": {
            "config": {
                "model_type": "qwen3_moe",
                "hidden_size": 128,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": 32,
                "intermediate_size": 256,
                "moe_intermediate_size": 96,
                "num_experts": EXPERTS,
                "num_experts_per_tok": EACH,
                "num_hidden_layers": 3,
                "vocab_size": 300,
                "max_position_embeddings": 512,
            },
        },
        "parallel": {"expert": 2, "tensor": 1, "pipeline": 1},
        "data": {"sequence_length": LENGTH},
        "train": {"steps": 2, "output": "runs/experts"},
        "memory_check": "off",
    },
}


def counted(rank, world_size, sets, to):
    """Peaks of this rank's phases where every token goes to the first ``to`` experts, one as often as all."""
    from dsx.hub import experts
    from meta_engine.run import measure

    over = experts.over_ranks

    def told(hidden, index, weights, **given):
        numbers = torch.arange(index.numel(), device=index.device).view_as(index) % to
        return over(hidden, numbers, weights, **given)

    experts.over_ranks = told
    try:
        return measure(resolve(CONFIG, world_size=world_size, overrides=sets)).phases
    finally:
        experts.over_ranks = over


def compare(sets, world_size, to=EXPERTS, imbalance=1.0):
    """(phase, what is estimated of rank 0, the least peak of the ranks that are like it).

    Not of each of them, because gloo's threads let go of what they have sent whenever they get to run.
    """
    config = resolve(CONFIG, world_size=world_size, overrides=sets)
    job = job_of(config, device="cpu", imbalance=imbalance)
    first = range(world_size // config.mesh.pp)
    alike = first if to == EXPERTS else first[:: config.mesh.ep]
    real = ranks.run(counted, world_size, sets, to)
    phases = {phase.name: phase.peak_bytes for phase in estimate(job, 0).phases}
    names = "engine", "step 1", "step 2"
    return [(name, phases[name], min(real[rank][name] for rank in alike)) for name in names]


CASES = {
    f"ZeRO-{stage}, {precision}, dp {dp}": (
        [f"zero_optimization.stage={stage}", f"bf16.enabled={str(precision == 'bf16').lower()}"],
        dp,
    )
    for stage in range(4)
    for precision in ("fp32", "bf16")
    for dp in (2, 4)
}


@pytest.mark.parametrize("name", often(CASES, 12))
def test_peaks_are_those_that_are_estimated(name):
    sets, world_size = CASES[name]
    for phase, estimated, real in compare(sets, world_size):
        assert estimated == pytest.approx(real, rel=0.001), phase


_DEEP = ["dsx.parallel.pipeline=2", "dsx.model.config.num_hidden_layers=6", "gradient_accumulation_steps=4"]
MORE = {
    "recomputed, ZeRO-2": ["zero_optimization.stage=2", "dsx.recompute=full", "bf16.enabled=true"],
    "cut by tensor ranks": ["zero_optimization.stage=1", "dsx.parallel.tensor=2"],
    "zero bubble": [
        "zero_optimization.stage=1",
        "dsx.parallel.pipeline=2",
        "dsx.schedule.name=zb_h1",
        "dsx.partition.method=uniform",
    ],
    "rows hidden, ZeRO-3": [*_DEEP, "zero_optimization.stage=3", "dsx.schedule.name=zb_h1"],
    "rows hidden, recomputed": [
        *_DEEP,
        "zero_optimization.stage=1",
        "dsx.recompute=full",
        "dsx.parallel.chunks=2",
        "dsx.schedule.name=zbv",
    ],
    "rows hidden, DualPipeV": [
        *_DEEP,
        "zero_optimization.stage=2",
        "dsx.parallel.chunks=2",
        "dsx.schedule.name=dualpipev",
    ],
    "all ranks, offloaded": [
        "zero_optimization.stage=3",
        "dsx.parallel.expert=4",
        "zero_optimization.offload_optimizer.device=cpu",
    ],
}


@pytest.mark.parametrize("name", often(MORE, 7))
def test_so_are_those_of_other_layouts(name):
    for phase, estimated, real in compare(MORE[name], 4):
        assert estimated == pytest.approx(real, rel=0.001), phase


@pytest.mark.parametrize("stage", often((1, 0), 2))
def test_busy_experts_take_what_their_imbalance_says(stage):
    """Where all tokens go to the experts of the first of two ranks, twice as many rows come to it."""
    sets = [f"zero_optimization.stage={stage}"]
    found, balanced = compare(sets, 2, EXPERTS // 2, 2.0), compare(sets, 2)
    for (phase, estimated, real), (_, less, _) in zip(found, balanced, strict=True):
        assert estimated == pytest.approx(real, rel=0.001), phase
        assert estimated > 1.05 * less or phase == "engine"
