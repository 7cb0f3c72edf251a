"""What real DeepSpeed engines do with wrong configs, beside what the doctor says: one launch of two ranks.

The numbers are those of the design's list of checks (section 12). A launch also shows what is silent: there
``Outcome.error`` is empty.
"""

from __future__ import annotations

import pytest
import real_engines
import torch

import ranks
from dsx.config.wording import dotted
from dsx.doctor import examine
from often import often

# Name -> (number in the list, the doctor's check, its key, severities that are honest, DeepSpeed's error,
# words of its message). An empty error: DeepSpeed says nothing.
CASES = {
    "clipping auto": (3, "auto", "gradient_clipping", {"error"}, "TypeError", "'>' not supported"),
    "quoted learning rate": (
        5,
        "quoted",
        "optimizer.params.lr",
        {"error"},
        "TypeError",
        "'<=' not supported",
    ),
    "pipeline under ZeRO-2": (
        8,
        "pipeline-zero",
        "zero_optimization.stage",
        {"error"},
        "AssertionError",
        "incompatible with pipeline",
    ),
    "pipeline block without stages": (9, "pipeline-block", "pipeline", {"error", "warning"}, "", ""),
    "AutoTP with a pipeline": (10, "autotp", "tensor_parallel.autotp_size", {"error"}, "AssertionError", ""),
    "AutoTP over 3 of 2 ranks": (
        10,
        "degree",
        "tensor_parallel.autotp_size",
        {"error"},
        "AssertionError",
        "",
    ),
    "clipping left out": (11, "clipping-default", "gradient_clipping", {"note"}, "", ""),
    "pipeline in fp32 without ZeRO": (
        12,
        "clipping-fp32-pipeline",
        "gradient_clipping",
        {"error", "warning"},
        "",
        "",
    ),
    "max_grad_norm": (
        13,
        "max-grad-norm",
        "optimizer.params.max_grad_norm",
        {"error"},
        "ValueError",
        "not supported as an optimizer",
    ),
    "offload_param below stage 3": (
        14,
        "offload-stage",
        "zero_optimization.offload_param.device",
        {"error"},
        "",
        "",
    ),
    "offload_optimizer at stage 0": (
        14,
        "offload-stage",
        "zero_optimization.offload_optimizer.device",
        {"error"},
        "",
        "",
    ),
    "client AdamW with offload": (
        15,
        "offload-torch-adam",
        "zero_optimization.offload_optimizer",
        {"note"},
        "ZeRORuntimeException",
        "client provided optimizer",
    ),
    "SGD under ZeRO": (
        15,
        "optimizer-untested",
        "optimizer.type",
        {"error"},
        "AssertionError",
        "untested ZeRO",
    ),
    "two optimizers": (22, "client-optimizer", "optimizer", {"error", "warning"}, "", ""),
    "Adam": (22, "adam-is-adamw", "optimizer.type", {"note", "warning"}, "", ""),
    "unknown optimizer parameter": (
        22,
        "unknown-key",
        "optimizer.params.weight_decy",
        {"error"},
        "TypeError",
        "weight_decy",
    ),
    "unknown scheduler parameter": (
        23,
        "unknown-key",
        "scheduler.params.warmup_steps",
        {"error"},
        "TypeError",
        "warmup_steps",
    ),
    "unknown scheduler": (23, "not-a-choice", "scheduler.type", {"error"}, "AssertionError", "WarmupCosine"),
    "torch's scheduler": (23, "scheduler", "scheduler.type", {"error"}, "TypeError", "is not an Optimizer"),
    "scheduler without params": (
        23,
        "scheduler",
        "scheduler.params",
        {"error"},
        "TypeError",
        "must be a mapping",
    ),
    "OneBitAdam": (24, "removed", "optimizer.type", {"error"}, "AssertionError", "not a supported"),
    "steps_per_print 0": (26, "out-of-range", "steps_per_print", {"error"}, "ZeroDivisionError", "modulo"),
    # Not in the list, which is older.
    "quoted steps_per_print": (0, "quoted", "steps_per_print", {"error"}, "TypeError", "unsupported operand"),
    "quoted clipping": (0, "quoted", "gradient_clipping", {"error"}, "TypeError", "'>' not supported"),
    "quoted warm-up": (
        0,
        "quoted",
        "scheduler.params.warmup_num_steps",
        {"error"},
        "ValueError",
        "must be a positive integer",
    ),
    "optimizer in another spelling": (
        0,
        "optimizer-name",
        "optimizer.type",
        {"error"},
        "AssertionError",
        "not a supported",
    ),
    "dtype in another spelling": (
        0,
        "not-a-choice",
        "data_types.grad_accum_dtype",
        {"error"},
        "ValueError",
        "FP32",
    ),
    "clamped hpz": (0, "degree", "zero_optimization.zero_hpz_partition_size", {"warning"}, "", ""),
    "tp_size without autotp_size": (
        0,
        "autotp",
        "tensor_parallel.tensor_parallel.tp_size",
        {"error"},
        "",
        "",
    ),
    "profiler with timers off": (0, "profiler-timers", "wall_clock_breakdown", {"warning"}, "", ""),
    "former name of bf16": (0, "deprecated", "bfloat16", {"note"}, "", ""),
    "torch's Adam with offload": (0, "offload-torch-adam", "optimizer.params.torch_adam", {"note"}, "", ""),
    "fp16 without ZeRO": (0, "loss-scale", "fp16.enabled", {"warning"}, "", ""),
    "fp16 Adam without ZeRO": (0, "loss-scale", "fp16.enabled", {"warning"}, "", ""),
    "Infinity of Python's": (0, "syntax", "steps_per_print", {"warning"}, "", ""),
    "schedule without an optimizer": (0, "scheduler", "scheduler", {"note"}, "", ""),
    "fixed scale": (0, "loss-scale", "fp16.loss_scale", {"error"}, "", ""),
    # What does not go together (checks/together.py).
    **{
        name: (0, "conflict", key, {"error"}, error, message)
        for name, key, error, message in (
            (
                "Muon at ZeRO-3",
                "zero_optimization.reduce_scatter",
                "ValueError",
                "Muon and reduce scatter",
            ),
            (
                "ZenFlow without offload",
                "zero_optimization.zenflow",
                "ValueError",
                "must be used with cpu offload",
            ),
            (
                "ZenFlow offload without overlap",
                "zero_optimization.zenflow.offload",
                "AssertionError",
                "should be used with overlap_comm",
            ),
            (
                "torch's Adam for 16-bit master weights",
                "bf16.bf16_master_weights_and_grads",
                "AssertionError",
                "Offload with DeepSpeedCPUAdam",
            ),
            (
                "no norm for ZenFlow",
                "zero_optimization.compute_grad_norm",
                "ValueError",
                "does not support ZenFlow",
            ),
            (
                "no norm in bf16 with fp32 sums",
                "zero_optimization.compute_grad_norm",
                "ValueError",
                "FP32 gradient accumulation",
            ),
            (
                "own accumulation under DeepCompile",
                "managed_gradient_accumulation",
                "AssertionError",
                "not supported with DeepCompile",
            ),
            ("two sizes of AutoTP", "tensor_parallel.tp.tp_size", "ValueError", "does not match"),
        )
    },
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
    _, check, key, severities, error, message = CASES[name]
    theirs = outcomes[0][name]
    assert theirs.error == error
    assert message in theirs.message
    report = examine(
        real_engines.CONFIGS[name],
        world_size=2,
        pipeline=2 if name in PIPELINES else 1,
        client_optimizer=name in CLIENT,
    )
    found = {(finding.check, ".".join(map(str, finding.path))): finding for finding in report.findings}
    assert (check, key) in found, sorted(found)
    assert found[check, key].severity in severities


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
