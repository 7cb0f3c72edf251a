"""What real DeepSpeed engines do with wrong configs, beside what the doctor says: one launch of two ranks.

The numbers are those of the design's list of checks (section 12). A launch also shows what is silent: there
``Outcome.error`` is empty.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import NamedTuple

import pytest
import real_engines
import torch

import ranks
from dsx.config.wording import dotted
from dsx.doctor import examine
from often import often


class Judged(NamedTuple):
    """What is said of an experiment.

    Attributes:
        number: In the list; 0 if it is not of that.
        check: The doctor's.
        key: What it is about.
        error: DeepSpeed's; empty if it says nothing.
        message: Words of it.
        may_be: Severities that are honest.
    """

    number: int
    check: str
    key: str
    error: str = ""
    message: str = ""
    may_be: AbstractSet[str] = frozenset({"error"})


CASES = {
    "clipping auto": Judged(3, "auto", "gradient_clipping", "TypeError", "'>' not supported"),
    "quoted learning rate": Judged(5, "quoted", "optimizer.params.lr", "TypeError", "'<=' not supported"),
    "pipeline under ZeRO-2": Judged(
        8, "pipeline-zero", "zero_optimization.stage", "AssertionError", "incompatible with pipeline"
    ),
    "pipeline block without stages": Judged(9, "pipeline-block", "pipeline", may_be={"error", "warning"}),
    "AutoTP with a pipeline": Judged(10, "autotp", "tensor_parallel.autotp_size", "AssertionError"),
    "AutoTP over 3 of 2 ranks": Judged(10, "degree", "tensor_parallel.autotp_size", "AssertionError"),
    "clipping left out": Judged(11, "clipping-default", "gradient_clipping", may_be={"note"}),
    "pipeline in fp32 without ZeRO": Judged(
        12, "clipping-fp32-pipeline", "gradient_clipping", may_be={"error", "warning"}
    ),
    "max_grad_norm": Judged(
        13, "max-grad-norm", "optimizer.params.max_grad_norm", "ValueError", "not supported as an optimizer"
    ),
    "offload_param below stage 3": Judged(14, "offload-stage", "zero_optimization.offload_param.device"),
    "offload_optimizer at stage 0": Judged(14, "offload-stage", "zero_optimization.offload_optimizer.device"),
    "client AdamW with offload": Judged(
        15,
        "offload-torch-adam",
        "zero_optimization.offload_optimizer",
        "ZeRORuntimeException",
        "client provided optimizer",
        may_be={"note"},
    ),
    "SGD under ZeRO": Judged(15, "optimizer-untested", "optimizer.type", "AssertionError", "untested ZeRO"),
    "two optimizers": Judged(22, "client-optimizer", "optimizer", may_be={"error", "warning"}),
    "Adam": Judged(22, "adam-is-adamw", "optimizer.type", may_be={"note", "warning"}),
    "unknown optimizer parameter": Judged(
        22, "unknown-key", "optimizer.params.weight_decy", "TypeError", "weight_decy"
    ),
    "unknown scheduler parameter": Judged(
        23, "unknown-key", "scheduler.params.warmup_steps", "TypeError", "warmup_steps"
    ),
    "unknown scheduler": Judged(23, "not-a-choice", "scheduler.type", "AssertionError", "WarmupCosine"),
    "torch's scheduler": Judged(23, "scheduler", "scheduler.type", "TypeError", "is not an Optimizer"),
    "scheduler without params": Judged(23, "scheduler", "scheduler.params", "TypeError", "must be a mapping"),
    "OneBitAdam": Judged(24, "removed", "optimizer.type", "AssertionError", "not a supported"),
    "steps_per_print 0": Judged(26, "out-of-range", "steps_per_print", "ZeroDivisionError", "modulo"),
    # Not in the list, which is older.
    "quoted steps_per_print": Judged(0, "quoted", "steps_per_print", "TypeError", "unsupported operand"),
    "quoted clipping": Judged(0, "quoted", "gradient_clipping", "TypeError", "'>' not supported"),
    "quoted warm-up": Judged(
        0, "quoted", "scheduler.params.warmup_num_steps", "ValueError", "must be a positive integer"
    ),
    "optimizer in another spelling": Judged(
        0, "optimizer-name", "optimizer.type", "AssertionError", "not a supported"
    ),
    "dtype in another spelling": Judged(
        0, "not-a-choice", "data_types.grad_accum_dtype", "ValueError", "FP32"
    ),
    "clamped hpz": Judged(0, "degree", "zero_optimization.zero_hpz_partition_size", may_be={"warning"}),
    "tp_size without autotp_size": Judged(0, "autotp", "tensor_parallel.tensor_parallel.tp_size"),
    "profiler with timers off": Judged(0, "profiler-timers", "wall_clock_breakdown", may_be={"warning"}),
    "former name of bf16": Judged(0, "deprecated", "bfloat16", may_be={"note"}),
    "torch's Adam with offload": Judged(
        0, "offload-torch-adam", "optimizer.params.torch_adam", may_be={"note"}
    ),
    "fp16 without ZeRO": Judged(0, "loss-scale", "fp16.enabled", may_be={"warning"}),
    "fp16 Adam without ZeRO": Judged(0, "loss-scale", "fp16.enabled", may_be={"warning"}),
    "Infinity of Python's": Judged(0, "syntax", "steps_per_print", may_be={"warning"}),
    "schedule without an optimizer": Judged(0, "scheduler", "scheduler", may_be={"note"}),
    "fixed scale": Judged(0, "loss-scale", "fp16.loss_scale"),
    # What does not go together (checks/together.py).
    "Muon at ZeRO-3": Judged(
        0, "conflict", "zero_optimization.reduce_scatter", "ValueError", "Muon and reduce scatter"
    ),
    "ZenFlow without offload": Judged(
        0, "conflict", "zero_optimization.zenflow", "ValueError", "must be used with cpu offload"
    ),
    "ZenFlow offload without overlap": Judged(
        0,
        "conflict",
        "zero_optimization.zenflow.offload",
        "AssertionError",
        "should be used with overlap_comm",
    ),
    "torch's Adam for 16-bit master weights": Judged(
        0, "conflict", "bf16.bf16_master_weights_and_grads", "AssertionError", "Offload with DeepSpeedCPUAdam"
    ),
    "no norm for ZenFlow": Judged(
        0, "conflict", "zero_optimization.compute_grad_norm", "ValueError", "does not support ZenFlow"
    ),
    "no norm in bf16 with fp32 sums": Judged(
        0, "conflict", "zero_optimization.compute_grad_norm", "ValueError", "FP32 gradient accumulation"
    ),
    "own accumulation under DeepCompile": Judged(
        0, "conflict", "managed_gradient_accumulation", "AssertionError", "not supported with DeepCompile"
    ),
    "two sizes of AutoTP": Judged(
        0, "conflict", "tensor_parallel.tp.tp_size", "ValueError", "does not match"
    ),
}
CLIENT = {"client AdamW with offload", "two optimizers"}
PIPELINES = {"pipeline under ZeRO-2", "AutoTP with a pipeline", "pipeline in fp32 without ZeRO"}


@pytest.fixture(scope="module")
def outcomes():
    return ranks.run(real_engines.everything, 2, timeout=240)


def test_every_experiment_is_judged():
    assert set(CASES) | {"fixed scale that fits"} == set(real_engines.CONFIGS)


@pytest.mark.parametrize("name", CASES)
def test_deepspeed_and_the_doctor(outcomes, name):
    due, theirs = CASES[name], outcomes[0][name]
    assert theirs.error == due.error
    assert due.message in theirs.message
    report = examine(
        real_engines.CONFIGS[name],
        world_size=2,
        pipeline=2 if name in PIPELINES else 1,
        client_optimizer=name in CLIENT,
    )
    found = {(finding.check, ".".join(map(str, finding.path))): finding for finding in report.findings}
    assert (due.check, due.key) in found, sorted(found)
    assert found[due.check, due.key].severity in due.may_be


def adam_step(gradient):
    """The norm of torch's step of 4 weights, after the one with which DeepSpeed makes the states."""
    weights = torch.zeros(4, requires_grad=True)
    adam = torch.optim.AdamW([weights], lr=0.1, eps=1.0, weight_decay=0)
    for value in (0.0, gradient):
        weights.grad = torch.full((4,), value)
        adam.step()
    return weights.norm().item()


def test_what_is_silent(outcomes):
    """Where DeepSpeed says nothing: what it did instead of what is written."""
    saw = {name: outcome.saw for name, outcome in outcomes[0].items() if not outcome.error}
    # 9: stages are not made.
    assert saw["pipeline block without stages"]["engine"] == "DeepSpeedEngine"
    # 11: a gradient of norm 100 and a learning rate of 1 move the weights by 1.
    assert saw["clipping left out"]["update norm"] == pytest.approx(1.0, rel=1e-4)
    # 14
    assert not saw["offload_param below stage 3"]["offloads parameters"]
    assert saw["offload_param below stage 3"]["stage"] == 1
    assert not saw["offload_optimizer at stage 0"]["offloads states"]
    # 22: the script's SGD, not the JSON's AdamW; and Adam is AdamW.
    assert saw["two optimizers"]["is client's"]
    assert saw["two optimizers"]["optimizer"] == "SGD"
    assert saw["Adam"]["optimizer"] == "AdamW"

    # Of hpz 8 on 2 ranks 2 are left; of a tp_size alone nothing; "wall_clock_breakdown": false is overruled.
    assert saw["clamped hpz"]["ranks of hpz"] == 2
    assert saw["tp_size without autotp_size"]["AutoTP ranks"] <= 1
    assert saw["profiler with timers off"]["timers"] is True
    # The former name of bf16 is as good as the new one, and torch's Adam of a config steps with offload.
    assert saw["former name of bf16"]["dtype"] == "torch.bfloat16"
    assert saw["torch's Adam with offload"]["update norm"] > 0
    # A fixed scale that is too large skips the step without a word, another does not.
    assert saw["fixed scale"]["skipped steps"] == 1
    assert saw["fixed scale"]["update norm"] < 1e-3 < saw["fixed scale that fits"]["update norm"]
    assert saw["fixed scale that fits"]["skipped steps"] == 0
    # SGD moves the weights by 0.01 of a gradient of norm 100; without ZeRO by an eighth of that, which its
    # clipping to 20 does not see. Adam's step shrinks by its eps alone.
    assert saw["fp16 without ZeRO"]["update norm"] == pytest.approx(1 / 8, rel=1e-2)
    seen = saw["fp16 Adam without ZeRO"]["update norm"]
    assert seen == pytest.approx(adam_step(50.0 / 8), rel=1e-2)
    assert seen < 0.9 * adam_step(50.0)
    # An infinite norm clips nothing; a schedule alone is not made.
    assert saw["Infinity of Python's"]["update norm"] == pytest.approx(1, rel=1e-4)
    assert saw["schedule without an optimizer"] == {"schedule": None, "optimizer": None}


@pytest.mark.parametrize("name", often(real_engines.TIMED, 3))
def test_timers_of_a_pipeline(name):
    """The first stage fails at its first backward; with the other ranks it would wait for ever."""
    with pytest.raises(ranks.RankError, match="timer has already been started"):
        ranks.run(real_engines.timed_pipeline, 2, name, timeout=120)
    config = real_engines.TIMED[name]
    for pipeline in (2, None):
        found = examine(
            config | ({} if pipeline else {"pipeline": {"partition": "uniform"}}), pipeline=pipeline
        )
        assert [f.check for f in found.errors if dotted(f.path) == name] == ["pipeline-timers"]
    assert not [f for f in examine(config, pipeline=1).findings if f.check == "pipeline-timers"]


def test_fp32_pipeline_clips_by_one_stage(outcomes):
    """12: with SGD of learning rate 1, both stages' updates together must have the norm clipped to."""
    total = sum(rank["pipeline in fp32 without ZeRO"].saw["update squared"] for rank in outcomes)
    limit = real_engines.CONFIGS["pipeline in fp32 without ZeRO"]["gradient_clipping"]
    assert outcomes[0]["pipeline in fp32 without ZeRO"].saw["update squared"] == pytest.approx(
        limit**2, rel=1e-3
    )
    assert total > 2 * limit**2  # 0.87 where 0.25 is meant


def test_steps_per_print_0_kills_one_rank_only(outcomes):
    """26: the others go on, into collectives that will never end."""
    assert outcomes[0]["steps_per_print 0"].error == "ZeroDivisionError"
    assert outcomes[1]["steps_per_print 0"].error == ""
