"""With fewer micro-batches a schedule's memory is the same, but for a loss of each that is left out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dsx.config.resolve import resolve
from dsx.memory import estimate as estimates
from dsx.memory.estimate import Job, enough_micro_batches, estimate
from dsx.memory.job import job_of
from dsx.memory.ledger import AboveError
from dsx.memory.walk import Walk
from dsx.schedules.program import Program
from dsx.schedules.schedule import lower
from often import often

_LOSS_BYTES = 512


def config(name: str, ranks: int, chunks: int, micro_batches: int, zero: int) -> dict:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": micro_batches,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": zero, "reduce_bucket_size": 50_000},
        "dsx": {
            "model": {"family": "gpt2", "preset": "tiny", "overrides": {"n_layer": 3 * ranks * chunks}},
            "parallel": {"tensor": 1, "pipeline": ranks, "chunks": chunks},
            "schedule": {"name": name},
            "data": {"sequence_length": 64},
            "train": {"steps": 1, "output": "runs/steady"},
        },
    }


def whole(job: Job, program: Program, ranks: int, chunks: int, micro_batches: int) -> Job:
    """The same with every micro-batch."""
    return replace(job, schedule=lower(program.build(ranks, chunks, micro_batches)), left_out=0)


@pytest.mark.parametrize("zero", often([3, 1], 2))
@pytest.mark.parametrize(
    ("name", "ranks", "chunks", "micro_batches"),
    [
        ("1f1b", 3, 1, 11),
        ("zb_h1", 3, 1, 11),
        ("interleaved", 2, 3, 18),
        ("interleaved", 3, 2, 21),
        ("interleaved", 3, 2, 20),
        ("interleaved_zb", 2, 2, 18),
        ("zbv", 3, 2, 20),
        ("dualpipev", 3, 2, 20),
        ("v_half", 3, 2, 20),
        ("v_min", 3, 2, 20),
        ("gpipe", 2, 1, 9),
    ],
)
def test_as_much_as_the_whole_step(name, ranks, chunks, micro_batches, zero):
    run = resolve(config(name, ranks, chunks, micro_batches, zero), world_size=2 * ranks)
    short = job_of(run)
    full = whole(short, run.program, ranks, chunks, micro_batches)
    assert (short.left_out == 0) == (name == "gpipe" or (name == "interleaved" and micro_batches == 20))
    for rank in range(0, 2 * ranks, 2):
        for ours, truth in zip(estimate(short, rank).phases, estimate(full, rank).phases, strict=True):
            assert 0 <= ours.peak_bytes - truth.peak_bytes <= _LOSS_BYTES * short.left_out


@pytest.mark.parametrize(
    ("name", "ranks", "chunks", "micro_batches"),
    [
        ("1f1b", 2, 1, 12),
        ("1f1b", 3, 1, 11),
        ("zb_h1", 3, 1, 11),
        ("interleaved", 3, 2, 21),
        ("interleaved_zb", 2, 2, 18),
        ("zbv", 3, 2, 20),
        ("dualpipev", 2, 2, 12),
        ("v_min", 3, 2, 20),
    ],
)
def test_as_much_where_receives_are_posted_ahead(name, ranks, chunks, micro_batches):
    """On a CPU; the last rank of a schedule of one chunk has the head alone."""
    content = config(name, ranks, chunks, micro_batches, 0)
    content["dsx"]["data"]["sequence_length"] = 256
    if chunks == 1:
        content["dsx"]["partition"] = {"method": [9, *[3] * (ranks - 2), 1]}
    run = resolve(content, world_size=ranks)
    short = job_of(run, device="cpu")
    full = whole(short, run.program, ranks, chunks, micro_batches)
    assert short.left_out
    for rank in range(ranks):
        ours, truth = estimate(short, rank).peak, estimate(full, rank).peak
        assert 0 <= ours.peak_bytes - truth.peak_bytes <= _LOSS_BYTES * short.left_out


def test_numbers():
    """What is left of a step of 512 micro-batches."""
    assert enough_micro_batches(Program(name="1f1b"), 64, 512) == 66
    assert enough_micro_batches(Program(name="interleaved"), 8, 512) == 24
    assert enough_micro_batches(Program(name="interleaved"), 8, 515) == 515
    assert enough_micro_batches(Program(name="gpipe"), 8, 512) == 512
    assert enough_micro_batches(Program(name="zbv"), 8, 5) == 5
    assert enough_micro_batches(Program(name="1f1b"), 64, 512, "cpu") == 68


@pytest.mark.parametrize("precision", often(["bf16", "fp32"], 2))
@pytest.mark.parametrize("zero", [0, 1, 2])
@pytest.mark.parametrize(
    ("name", "ranks", "chunks", "micro_batches"),
    [("1f1b", 1, 1, 5), ("gpipe", 2, 1, 5), ("zb_h1", 3, 1, 7), ("interleaved", 2, 3, 8), ("zbv", 3, 2, 9)],
)
def test_replayed_micro_batches_are_the_walked_ones(name, ranks, chunks, micro_batches, zero, precision):
    """Peaks, what they consist of, where they come, what stays: to the byte."""
    content = config(name, ranks, chunks, micro_batches, zero)
    content["bf16"] = {"enabled": precision == "bf16"}
    if precision == "bf16" and zero == 1:
        content["data_types"] = {"grad_accum_dtype": "fp32"}
    job = job_of(resolve(content, world_size=2 * ranks))
    for rank in range(0, 2 * ranks, 2):
        assert estimate(job, rank) == estimate(job, rank, replays=False)


@pytest.mark.parametrize(
    ("name", "chunks", "micro_batches", "zero", "walked"),
    [("1f1b", 1, 20, 3, 9), ("interleaved", 2, 36, 1, 10), ("zbv", 2, 13, 2, 12)],
)
def test_ranks_between_are_the_walked_ones(monkeypatch, name, chunks, micro_batches, zero, walked):
    """Twelve ranks, of which those with equal layers lie on a line: the same to the byte, most not walked."""
    seen = []

    def noted(job, rank, **kwargs):
        seen.append(rank)
        return estimate(job, rank, **kwargs)

    content = config(name, 12, chunks, micro_batches, zero)
    job = job_of(resolve(content, world_size=24))
    monkeypatch.setattr(estimates, "estimate", noted)
    found = estimates.estimate_run(job)
    assert len(seen) <= walked
    for role in found.roles:
        assert role.estimate == estimate(job, role.ranks[0])


def test_ranks_that_hold_more_and_less_in_turn_are_walked():
    """V-min's ranks repeat every three: the two ends and the middle say nothing about the others."""
    content = config("v_min", 14, 2, 17, 3)
    content["dsx"]["model"]["overrides"] = {"n_layer": 26}
    job = job_of(resolve(content, world_size=28))
    for role in estimates.estimate_run(job).roles:
        assert role.estimate == estimate(job, role.ranks[0])


@pytest.mark.parametrize("name", ["1f1b", "zbv", "interleaved_zb"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"adapter": {"type": "lora", "rank": 4}, "recompute": "full"},
        {"zero": {"keep_gathered_bytes": 300_000}, "recompute": "full"},
        {"offload_optimizer": {"device": "cpu"}, "stage3_param_persistence_threshold": 0},
        {"offload_param": {"device": "cpu"}, "stage3_prefetch_bucket_size": 40_000},
    ],
    ids=str,
)
def test_too_large_under_zero3_is_known_by_the_second_step_alone(name, changes, monkeypatch):
    """Its peak is the whole estimate's to the byte, by one walk in place of two."""
    chunks = 1 if name == "1f1b" else 2
    written = config(name, 2, chunks, 4, 3)
    for key, value in changes.items():
        written["dsx" if key in ("adapter", "zero", "recompute") else "zero_optimization"][key] = value
    written["dsx"]["parallel"] |= {"tensor": 2, "sequence_parallel": False}
    written["dsx"]["parallel"] |= {"tensor": 2, "sequence_parallel": False}
    job, walked, run = job_of(resolve(written, world_size=8)), [], Walk.run
    monkeypatch.setattr(Walk, "run", lambda walk, note: (walked.append(walk.rank), run(walk, note)))
    for rank in (0, job.layout.mesh.rank(pp=1)):
        found = estimate(job, rank)
        later = found.phases[-1].peak_bytes
        assert found.peak.peak_bytes == later
        assert estimate(job, rank, most_bytes=later) == found
        walked.clear()
        with pytest.raises(AboveError) as above:
            estimate(job, rank, most_bytes=later - 1)
        assert (above.value.args, len(walked)) == ((later,), 1)
