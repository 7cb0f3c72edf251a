"""Mistakes made on purpose in the ranks: ``dsx verify`` catches each and names it, and is quiet without."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import ranks
from dsx.verify import diagnosis
from dsx.verify.observation import Observations
from dsx.verify.run import Request, VerifyPlan, judge, of_one_island, prepare
from dsx.verify.subject import VerifyJob, scale_off
from often import often
from verify.mistakes import FAULTS

GPT2 = {"family": "gpt2", "preset": "tiny", "overrides": {"resid_pdrop": 0.1, "embd_pdrop": 0.1}}
BIASED = {
    "family": "llama",
    "preset": "tiny",
    "overrides": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
}
QWEN2 = {"family": "qwen2", "preset": "tiny", "implementation": "transformers"}
LLAMA = {"family": "llama", "preset": "tiny", "overrides": {"pad_token_id": 5}}


def config(model: dict[str, Any], zero: int, **parallel: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 3,
        "gradient_clipping": 0.1,
        "zero_optimization": {"stage": zero},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1, "torch_adam": True}},
        "dsx": {
            "model": model,
            "parallel": {"chunks": 1, **parallel},
            "data": {"sequence_length": 64},
            "train": {"steps": 1, "output": "unused"},
        },
    }


def chats(content: dict[str, Any], **block: Any) -> dict[str, Any]:
    """The same on packs of chats."""
    data = {"source": "chats.jsonl", "format": "chat", "tokenizer": "bytes", "sequence_length": 64}
    return {**content, "dsx": {**content["dsx"], "data": data, **block}}


LORA = {"rank": 8, "targets": ["q_proj", "v_proj", "layers.1.mlp.down_proj"], "train_also": ["norm"]}
FREEZE = {"steps": 1, "output": "unused", "freeze": ["embed", r"layers\.0\.", r"layers\.3\."]}
LAYOUTS = {
    "tensor x data": config(GPT2, 3, tensor=2, pipeline=1, sequence_parallel=False),
    "tensor x pipeline": config(BIASED, 0, tensor=2, pipeline=2),
    "GPT-2": config(GPT2, 0, tensor=2, pipeline=2),
    "GPT-2, data x pipeline": config(GPT2, 1, tensor=1, pipeline=2),
    "without biases": config(LLAMA, 0, tensor=2, pipeline=2),
    "bf16": {**config(BIASED, 1, tensor=1, pipeline=2), "bf16": {"enabled": True}},
    "fp16": {**config(BIASED, 1, tensor=1, pipeline=2), "fp16": {"enabled": True}},
    "ZeRO-3": config(QWEN2, 3, tensor=1, pipeline=1),
    "data x pipeline": config(BIASED, 1, tensor=1, pipeline=2),
    "data x pipeline, ZeRO-0": config(LLAMA, 0, tensor=1, pipeline=2),
    "LoRA": chats(config(LLAMA, 0, tensor=2, pipeline=2), adapter=LORA),
    "DoRA": chats(config(QWEN2, 3, tensor=1, pipeline=2), adapter={"type": "dora", "dropout": 0.1}),
    "frozen": chats(config(LLAMA, 1, tensor=1, pipeline=2), train=FREEZE),
}

# layout, mistake, cause that is to be named, first tensor, steps to train
CASES = [
    ("tensor x pipeline", "none", None, "", 2),
    ("tensor x pipeline", "norm gradients not all-reduced", diagnosis.TENSOR_NOT_SUMMED, "3.norm.weight", 1),
    (
        "tensor x pipeline",
        "norm gradients all-reduced twice",
        diagnosis.TENSOR_SUMMED_TWICE,
        "3.norm.weight",
        1,
    ),
    ("tensor x pipeline", "bias on each rank", diagnosis.BIAS_PER_RANK, "output of layer 1", 1),
    ("tensor x pipeline", "padding in the softmax", diagnosis.PADDING, "", 1),
    ("tensor x pipeline", "padding rows have gradients", diagnosis.PADDING, "0.word.weight", 1),
    ("tensor x pipeline", "ties twice", diagnosis.TIE_SUMMED_TWICE, "0.word.weight", 1),
    ("tensor x pipeline", "ties never", diagnosis.TIE_NOT_SUMMED, "0.word.weight", 1),
    ("tensor x pipeline", "ties averaged", diagnosis.TIE_NOT_SUMMED, "0.word.weight", 1),
    ("tensor x pipeline", "ties of one copy", diagnosis.TIE_NOT_SUMMED, "0.word.weight", 1),
    ("tensor x pipeline", "init by rank", diagnosis.INITIAL_WEIGHTS, "0.word.weight", 1),
    ("tensor x pipeline", "norm counts replicas", diagnosis.NORM_REPLICATED, "", 1),
    ("without biases", "norm counts replicas", diagnosis.NORM_REPLICATED, "", 1),  # it is off by 9e-5
    ("tensor x pipeline", "norm counts ties", diagnosis.NORM_TIED, "", 1),
    ("tensor x pipeline", "norm of stage 0", diagnosis.NORM_OF_ONE_STAGE, "", 1),
    ("tensor x pipeline", "norm of tensor rank 0", diagnosis.NORM_OF_ONE_TENSOR_RANK, "", 1),
    ("tensor x pipeline", "never clipped", diagnosis.CLIPPING, "", 1),
    ("tensor x pipeline", "micro-batches overwrite", diagnosis.MICRO_BATCH_OVERWRITTEN, "3.norm.weight", 1),
    ("tensor x pipeline", "first micro-batch twice", diagnosis.MICRO_BATCH_TWICE, "3.norm.weight", 1),
    ("tensor x pipeline", "last micro-batch heavier", diagnosis.LAST_MICRO_BATCH, "3.norm.weight", 1),
    ("tensor x pipeline", "loss not divided", diagnosis.MICRO_BATCHES_SUMMED, "3.norm.weight", 1),
    ("tensor x pipeline", "learning rate", diagnosis.LEARNING_RATE, "3.norm.weight", 1),
    ("tensor x pipeline", "weight decay", diagnosis.DECAY, "3.norm.weight", 1),
    ("data x pipeline", "none", None, "", 2),
    ("data x pipeline", "sum over data", diagnosis.DATA_SUMMED, "3.norm.weight", 1),
    ("data x pipeline", "divided twice", diagnosis.DIVIDED_TWICE, "3.norm.weight", 1),
    ("data x pipeline", "same data", diagnosis.SAME_DATA, "3.norm.weight", 1),
    ("data x pipeline", "a micro-batch read twice", diagnosis.DATA_ORDER, "3.norm.weight", 1),
    ("data x pipeline", "parts swapped", diagnosis.PARTITION_ORDER, "", 1),
    ("data x pipeline", "weights not gathered", diagnosis.NOT_GATHERED, "", 1),
    ("GPT-2, data x pipeline", "dropout alike", diagnosis.DROPOUT_DATA, "", 1),
    ("GPT-2, data x pipeline", "dropout not scaled", diagnosis.DROPOUT_SCALE, "", 1),
    ("tensor x data", "none", None, "", 1),
    ("GPT-2", "none", None, "", 1),
    ("GPT-2", "dropout alike on slices", diagnosis.DROPOUT_TENSOR, "", 1),
    ("bf16", "none", None, "", 2),
    ("bf16", "parts swapped", diagnosis.PARTITION_ORDER, "", 1),
    ("bf16", "sum over data", diagnosis.DATA_SUMMED, "3.norm.weight", 1),
    ("fp16", "none", None, "", 2),
    ("fp16", "loss scale not undone", diagnosis.SCALED, "3.norm.weight", 1),
    ("fp16", "loss scaled twice", diagnosis.NOT_FINITE, "", 1),
    ("fp16", "norm with the loss scale", diagnosis.NORM, "", 1),
    ("ZeRO-3", "none", None, "", 2),
    ("ZeRO-3", "ZeRO-3 sums", diagnosis.DATA_SUMMED, "", 1),
    ("ZeRO-3", "ZeRO-3's first share on all", diagnosis.UNKNOWN, "", 1),
    ("ZeRO-3", "ZeRO-3 overwrites", diagnosis.MICRO_BATCH_OVERWRITTEN, "", 1),
    ("ZeRO-3", "ZeRO-3 keeps what it gathered", diagnosis.FORWARD, "", 2),
    ("ZeRO-3", "weights not gathered", diagnosis.NOT_GATHERED, "", 1),
    ("tensor x data", "dropout by rank", diagnosis.DROPOUT_TENSOR, "", 1),
    ("data x pipeline, ZeRO-0", "not reduced over data", diagnosis.DATA_NOT_AVERAGED, "4.word.weight", 1),
    ("GPT-2, data x pipeline", "not reduced over data", diagnosis.DATA_NOT_AVERAGED, "", 1),
    ("data x pipeline, ZeRO-0", "padding token trained", diagnosis.UNKNOWN, "0.word.weight", 1),
    ("data x pipeline, ZeRO-0", "gradients not cleared", diagnosis.STALE, "4.word.weight", 2),
    ("data x pipeline, ZeRO-0", "replica moved", diagnosis.REPLICAS_DRIFT, "0.word.weight", 2),
    ("LoRA", "none", None, "", 2),
    ("LoRA", "one mask for a pack", diagnosis.DOCUMENTS, "output of layer 1", 1),
    ("LoRA", "no positions", diagnosis.JOINED, "output of layer 1", 1),
    ("LoRA", "each micro-batch's own mean", diagnosis.MEAN_OF_MEANS, "", 1),
    ("LoRA", "adapter gradients not summed", diagnosis.TENSOR_NOT_SUMMED, "2.mlp.down.lora_b", 1),
    ("LoRA", "frozen weights moved", diagnosis.FROZEN, "0.word.weight", 1),
    ("DoRA", "none", None, "", 1),
    ("frozen", "none", None, "", 1),
    ("frozen", "ignored labels counted", diagnosis.FORWARD, "", 1),
    ("frozen", "tokens counted per replica", diagnosis.MEAN_PER_REPLICA, "", 1),
    ("frozen", "frozen weights moved", diagnosis.FROZEN, "0.word.weight", 1),
]
WITH_CLIPPING = {"none", "never clipped"}
WITH_DROPOUT = {"none", "dropout by rank", "dropout alike", "dropout alike on slices", "dropout not scaled"}


def watch(rank: int, world_size: int, jobs: list[tuple[str, VerifyJob]]) -> list[Observations | None]:
    """What is seen under each mistake, on rank 0."""
    from dsx.launch import processes
    from dsx.parallel.groups import make_groups
    from dsx.verify.subject import observe_passes

    found = []
    for fault, job in jobs:
        groups = make_groups(job.mesh(), sequence_parallel=job.sequence_parallel)
        with FAULTS[fault]():
            processes.seed_generators(groups, job.seed)
            found.append(observe_passes(job, groups))
    return found


@pytest.fixture(scope="module")
def verdicts(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[str, str], Any]:
    """(layout, mistake) -> verdict, all mistakes of this run of the tests in one launch of four ranks."""
    asked = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    wanted = {(params["layout"], params["fault"]) for params in asked if {"layout", "fault"} <= {*params}}
    cases = [case for case in CASES if case[:2] in wanted]
    folder = tmp_path_factory.mktemp("configs")
    plans: dict[str, VerifyPlan] = {}
    for number, name in enumerate(dict.fromkeys(layout for layout, *_ in cases)):
        file = Path(folder / f"{number}.json")
        file.write_text(json.dumps(LAYOUTS[name]))
        plans[name] = prepare(Request(source=file, world_size=4, keep_precision=True))
    jobs = []
    for layout, fault, _, _, steps in cases:
        job = replace(plans[layout].job, steps=steps)
        if fault not in WITH_CLIPPING:
            job = replace(job, clipping=0.0)
        if fault not in WITH_DROPOUT:
            job = replace(job, dropout=None)
        jobs.append((fault, job))
    seen = ranks.run(watch, 4, jobs, timeout=300 + 10 * len(jobs))[0]
    return {
        (layout, fault): judge(plans[layout], found)
        for (layout, fault, *_), found in zip(cases, seen, strict=True)
    }


@pytest.mark.parametrize(("layout", "fault", "cause", "tensor", "steps"), often(CASES, 12), ids=str)
def test_each_mistake_is_named(
    verdicts: Any, layout: str, fault: str, cause: str | None, tensor: str, steps: int
) -> None:
    verdict = verdicts[layout, fault]
    if cause is None:
        assert verdict.equal, verdict.findings
        assert [row.step for row in verdict.rows] == [*range(1, steps + 1)] * 2, "without clipping, and with"
        assert verdict.masks == (9 if layout in ("GPT-2", "tensor x data") else 0)
        return
    first = verdict.findings[0]
    assert first.cause == cause, verdict.findings
    assert tensor in ("", first.tensor), first
    assert first.step in (0, 1, steps)


def test_how_dropout_scales_is_told_of_the_smallest_numbers_of_fp16_too():
    torch.manual_seed(0)
    given = (1e-6 * torch.randn(64, 64)).half()  # most are less than fp16's smallest normal number
    kept = torch.nn.functional.dropout(given, 0.1)
    assert scale_off(given, kept, 0.1) < 0.02 < float((kept / given)[kept != 0].mul(0.9).sub(1).abs().max())
    assert scale_off(given, given * (kept != 0), 0.1) == pytest.approx(0.1)
    assert scale_off(given, torch.zeros_like(given), 0.1) == 0.0


def test_of_islands_one_is_verified():
    """On its share of the ranks, as the job that it is."""
    source = Path(__file__).parents[2] / "configs/islands.json"
    one = of_one_island(Request(source=source, world_size=4, overrides=["dsx.outer.islands=4"]))
    assert (one.world_size, one.of_islands) == (1, 4)
    plan = prepare(one)
    assert plan.changes[0] == "dsx.outer: off, one of the 4 islands is compared"
    assert plan.job.world_size == 1
    alone = Request(source=source, world_size=4, overrides=["dsx.outer=null"])
    assert of_one_island(alone) is alone
