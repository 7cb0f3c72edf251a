"""What real DeepSpeed engines do with wrong configs, beside what the doctor says: one launch of two ranks.

The numbers are those of the design's list of checks (section 12). A launch also shows what is silent: there
``Outcome.error`` is empty.
"""

from __future__ import annotations

import pytest
import real_engines
import torch
from evidence import ENGINES, TIMED

import ranks
from dsx.config.wording import dotted
from dsx.doctor import examine
from often import often


@pytest.fixture(scope="module")
def outcomes():
    return ranks.run(real_engines.everything, 2, timeout=240)


@pytest.mark.parametrize("name", [name for name, case in ENGINES.items() if case.check])
def test_deepspeed_and_the_doctor(outcomes, name):
    due, theirs = ENGINES[name], outcomes[0][name]
    assert theirs.error == due.error
    assert due.words in theirs.message
    report = examine(
        due.config,
        world_size=2,
        pipeline=2 if due.made == "pipeline" else 1,
        client_optimizer=due.made.startswith("client"),
    )
    found = {(finding.check, ".".join(map(str, finding.path))): finding for finding in report.findings}
    assert (due.check, due.key) in found, sorted(found)
    assert found[due.check, due.key].severity in due.may_be.split(" or ")


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


@pytest.mark.parametrize("name", often(TIMED, 3))
def test_timers_of_a_pipeline(name):
    """The first stage fails at its first backward; with the other ranks it would wait for ever."""
    with pytest.raises(ranks.RankError, match="timer has already been started"):
        ranks.run(real_engines.timed_pipeline, 2, name, timeout=120)
    config = TIMED[name]
    for pipeline in (2, None):
        found = examine(
            config | ({} if pipeline else {"pipeline": {"partition": "uniform"}}), pipeline=pipeline
        )
        assert [f.check for f in found.errors if dotted(f.path) == name] == ["pipeline-timers"]
    assert not [f for f in examine(config, pipeline=1).findings if f.check == "pipeline-timers"]


def test_fp32_pipeline_clips_by_one_stage(outcomes):
    """12: with SGD of learning rate 1, both stages' updates together must have the norm clipped to."""
    total = sum(rank["pipeline in fp32 without ZeRO"].saw["update squared"] for rank in outcomes)
    limit = ENGINES["pipeline in fp32 without ZeRO"].config["gradient_clipping"]
    assert outcomes[0]["pipeline in fp32 without ZeRO"].saw["update squared"] == pytest.approx(
        limit**2, rel=1e-3
    )
    assert total > 2 * limit**2  # 0.87 where 0.25 is meant


def test_steps_per_print_0_kills_one_rank_only(outcomes):
    """26: the others go on, into collectives that will never end."""
    assert outcomes[0]["steps_per_print 0"].error == "ZeroDivisionError"
    assert outcomes[1]["steps_per_print 0"].error == ""
