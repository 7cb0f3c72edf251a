"""Checks that need the model, the mesh and DeepSpeed's keys together, one small function each."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsx.config.batch import ACCUMULATION, Batch
from dsx.config.deepspeed_checks import zero_stage
from dsx.config.problems import at
from dsx.config.schema import DsxConfig
from dsx.config.zero_checks import zero_problems
from dsx.errors import ConfigError
from dsx.spec.mesh import Mesh
from dsx.spec.model import ModelSpec

# Their update of an element depends on the whole matrix, of which a tensor-parallel rank has a part.
_WHOLE_MATRIX_OPTIMIZERS = {"lamb", "muon"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What the checks look at."""

    deepspeed: dict[str, Any]
    dsx: DsxConfig
    model: ModelSpec
    mesh: Mesh
    chunks: int
    batch: Batch


def run_problems(facts: Facts) -> list[ConfigError]:
    """Everything wrong with the combination."""
    return [problem for check in CHECKS for problem in check(facts)]


def check_positions(facts: Facts) -> Iterator[ConfigError]:
    """A sequence fits the model's positions."""
    length, most = facts.dsx.data.sequence_length, facts.model.max_positions
    if length > most:
        key = at("dsx.data.sequence_length", length)
        yield ConfigError(key, f"the model has {most} positions", f"use at most {most}")


def check_evaluation(facts: Facts) -> Iterator[ConfigError]:
    """There is text to evaluate on."""
    every = facts.dsx.train.eval_every
    if every and not facts.dsx.data.held_out:
        yield ConfigError(
            at("dsx.train.eval_every", every),
            "dsx.data.held_out = 0 keeps no text for evaluation",
            "set dsx.data.held_out to 0.05, or eval_every to 0",
        )


def check_roll_back(facts: Facts) -> Iterator[ConfigError]:
    """There are checkpoints to roll back to."""
    key = facts.dsx.faults.rolls_back
    if key is not None and facts.dsx.train.save_every == 0:
        yield ConfigError(
            at(f"dsx.faults.{key}", "roll_back"),
            "dsx.train.save_every = 0 saves nothing before the end",
            "set dsx.train.save_every, or another policy: stop",
        )


def check_resume(facts: Facts) -> Iterator[ConfigError]:
    """What is neither of the two words is a folder."""
    resume = facts.dsx.train.resume
    if resume not in ("auto", "never") and not Path(resume).is_dir():
        yield ConfigError(
            at("dsx.train.resume", resume),
            "there is no such folder",
            'give the output folder of a run or one of its checkpoints, "auto" or "never"',
        )


def check_output(facts: Facts) -> Iterator[ConfigError]:
    """The only name in braces is the layout."""
    output = facts.dsx.train.output
    if re.search(r"[{}]", output.replace("{layout}", "")):
        key = at("dsx.train.output", output)
        yield ConfigError(key, "braces stand for a name that is not known", "use {layout}, or no braces")


def check_whole_matrix_optimizer(facts: Facts) -> Iterator[ConfigError]:
    """Optimizers that need whole matrices do not meet tensor parallelism."""
    kind = facts.deepspeed["optimizer"]["type"]
    if kind.lower() in _WHOLE_MATRIX_OPTIMIZERS and facts.mesh.tp > 1:
        yield ConfigError(
            at("optimizer.type", kind),
            f"its update needs whole matrices, which dsx.parallel.tensor = {facts.mesh.tp} cuts",
            'use "AdamW", or dsx.parallel.tensor = 1',
        )


def check_secondary_partition(facts: Facts) -> Iterator[ConfigError]:
    """ZeRO++ groups ranks by world rank (deepspeed/utils/groups.py, _create_zero_param_parallel_group)."""
    size = facts.deepspeed.get("zero_optimization", {}).get("zero_hpz_partition_size", 1)
    if size > 1 and facts.mesh.dp != facts.mesh.size:
        yield ConfigError(
            at("zero_optimization.zero_hpz_partition_size", size),
            "DeepSpeed would group ranks of different tensor and pipeline coordinates",
            "use 1, or tensor and pipeline degrees of 1",
        )


def check_zero(facts: Facts) -> Iterator[ConfigError]:
    """What ``dsx.zero`` says fits the ZeRO stage."""
    yield from zero_problems(facts.dsx.zero, zero_stage(facts.deepspeed))


CHECKS = (
    check_positions,
    check_evaluation,
    check_output,
    check_roll_back,
    check_resume,
    check_whole_matrix_optimizer,
    check_secondary_partition,
    check_zero,
)


def run_notes(facts: Facts) -> Iterator[str]:
    """What the user did not write but should know."""
    if "gradient_clipping" not in facts.deepspeed:
        yield "gradient_clipping: 1.0, DeepSpeed 0.19.8's default (0 turns it off)"
    pp, micro_batches = facts.mesh.pp, facts.batch.accumulation
    if pp > 1 and micro_batches < pp:
        yield (
            f"{at(ACCUMULATION, micro_batches)} feeds a pipeline of {pp}: some ranks always wait; "
            f"use at least {pp}, better several times that"
        )
    if pp > 1 and facts.mesh.dp > 1 and zero_stage(facts.deepspeed) == 3:
        yield (
            f"ZeRO-3 under a pipeline gathers a parameter up to 2 x {micro_batches} times a step (each "
            "micro-batch, forward and backward); what fits into dsx.zero.keep_gathered_bytes stays gathered, "
            "and stage 1 gathers once"
        )
    if pp * facts.chunks > facts.model.num_layers:
        yield (
            f"pipeline {pp} x chunks {facts.chunks} stages, {facts.model.num_layers} blocks: "
            "some stages hold none"
        )
    params = facts.deepspeed.get("scheduler", {}).get("params", {})
    total, steps = params.get("total_num_steps"), facts.dsx.train.steps
    if isinstance(total, int) and total < steps:
        yield (
            f"{at('scheduler.params.total_num_steps', total)} ends before dsx.train.steps = {steps}: "
            "the learning rate stays at its floor after that"
        )
