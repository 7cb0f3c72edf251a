"""``verify``: run the layout, run the reference, compare."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from dsx.config import load
from dsx.config.batch import resolve_batch
from dsx.config.deepspeed import precision
from dsx.config.resolve import RunConfig, resolve
from dsx.errors import ConfigError, DsxError, LayoutError
from dsx.launch import entry
from dsx.launch.local_ranks import RankError, run_ranks, start_server
from dsx.launch.processes import agree, distributed, seed_generators
from dsx.parallel.groups import make_groups
from dsx.verify import diagnosis
from dsx.verify.compare import Bench, Tolerances, TrainingComparison, Weights, judge_masks, norm_of
from dsx.verify.diagnosis import ParityFinding, StepRow
from dsx.verify.observation import Observations
from dsx.verify.reference import Batch, ReferenceLayers, Transformers, Updates, family_layers, fresh_weights
from dsx.verify.shrunk import make_exact, make_visible, trial
from dsx.verify.subject import UserModel, VerifyJob, observe_passes, random_tokens, user_model
from dsx.waiting import Waiting

EXACT = Tolerances(value=1e-5, norm=2e-6, gradient=1e-4, update=5e-4, weight=1e-6, held=1e-6)
"""For float32: several times the rounding of many layouts, and a hundredth of the smallest mistake."""

ROUGH = Tolerances(value=5e-3, norm=5e-3, gradient=0.1, update=5e-4, weight=1e-6, held=2**-8)
"""For bf16, whose numbers have 8 bits, and fp16; the optimizer works in fp32 there, too."""

_PRELOAD = ("dsx.verify.subject",)
_SHOWN_LINES = 40
_CLIP_AT = 0.5
"""Clipping is tried at this part of the first step's norm, where the config's own would never clip."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What to verify, and how.

    Attributes:
        source: A DeepSpeed JSON, with a ``dsx`` block unless there is an ``entry``.
        overrides: ``key=value`` items over the config.
        full: Whether to keep all sizes.
        keep_precision: Whether to keep bf16 or fp16.
        tolerance: Tolerance of gradients, in place of the default.
        entry: A user's function in place of dsx's families.
        stock: Whether to run it under stock DeepSpeed.
        timeout_seconds: Time after which every rank must have ended.
        of_islands: Number of the run's islands, one of which is verified; 0 if it has none.
    """

    source: str | Path | Mapping[str, Any]
    world_size: int
    overrides: Sequence[str] = ()
    steps: int = 3
    full: bool = False
    keep_precision: bool = False
    tolerance: float | None = None
    entry: str | None = None
    stock: bool = False
    timeout_seconds: float = 600.0
    of_islands: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The result of a verification.

    Attributes:
        reference: What it was compared with.
        optimizer: What its updates were compared with.
        findings: What differs from one process; empty if nothing does.
        masks: Number of dropout masks that were compared.
        ranks_seconds: Wall time of the ranks.
        reference_seconds: Wall time of the reference and the comparison.
    """

    layout: str
    reference: str
    optimizer: str
    changes: tuple[str, ...]
    rows: tuple[StepRow, ...]
    findings: tuple[ParityFinding, ...]
    masks: int = 0
    ranks_seconds: float = 0.0
    reference_seconds: float = 0.0

    @property
    def equal(self) -> bool:
        """Whether the layout trains as one process does."""
        return not self.findings


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyPlan:
    """A request made ready."""

    job: VerifyJob
    bench: Bench
    changes: tuple[str, ...]
    layout: str


def verify(request: Request) -> Verdict | None:
    """Train the layout beside one process.

    It starts its own ranks, on GPUs if the machine has one for each, otherwise on gloo. Launched by
    ``deepspeed`` or ``torchrun``, it is one of the ranks itself: rank 0 gives the verdict, the others None.

    Raises:
        DsxError: The config or model cannot run; a rank failed or missed the deadline.
    """
    began = time.perf_counter()
    request = of_one_island(request)
    launched = entry.world_size() > 1
    if launched and entry.world_size() != request.world_size:
        raise LayoutError(
            f"--gpus {request.world_size}",
            f"the launcher started {entry.world_size()} ranks",
            "give both the same number",
        )
    if not request.full:
        torch.set_num_threads(1)  # threads cost more than they give on operations of microseconds
    use_gpus = torch.cuda.is_available() and (launched or torch.cuda.device_count() >= request.world_size)
    if launched:
        return _launched(request, use_gpus=use_gpus)
    start_server(_PRELOAD, use_gpus=use_gpus)  # imports while this process prepares
    with Waiting("training in one process"):
        plan = prepare(request, on_cpu=not use_gpus)
    prepared = time.perf_counter()
    with Waiting(f"training {request.steps} steps on {request.world_size} ranks"):
        try:
            found: Observations = run_ranks(
                spawned,
                request.world_size,
                plan.job,
                timeout_seconds=request.timeout_seconds,
                use_gpus=use_gpus,
                threads=max(1, entry.usable_cores() // request.world_size),
                preload=_PRELOAD,
            )[0]
        except RankError as failed:
            raise _explained(failed, request) from None
    ran = time.perf_counter()
    with Waiting("comparing with one process"):
        verdict = judge(plan, found)
    compared = time.perf_counter() - ran + prepared - began
    return replace(verdict, ranks_seconds=ran - prepared, reference_seconds=compared)


def of_one_island(request: Request) -> Request:
    """The request, about one island if its config is of several (``dsx.outer``): each is a whole job."""
    content = load.content_of(request.source, request.overrides)
    if request.entry is not None or not (content.get("dsx") or {}).get("outer"):
        return request
    islands = resolve(request.source, world_size=request.world_size, overrides=request.overrides).islands
    assert islands is not None, "its config has them"
    alone = [*request.overrides, "dsx.outer=null"]
    return replace(request, world_size=islands.ranks, overrides=alone, of_islands=islands.count)


def _explained(failed: RankError, request: Request) -> DsxError:
    """A rank's own error, or one that says how the rank ended."""
    if isinstance(failed.error, DsxError):
        return failed.error
    said = failed.said.rstrip()
    where = f"rank {failed.rank} of {request.world_size}"
    if failed.kind == "late":
        what = f"they had not ended after {request.timeout_seconds:g} s; where each was\n{said}\n"
        fix = "ranks may wait for each other in different orders; or give more time: --timeout"
        return DsxError(f"ranks from {failed.rank} on of {request.world_size}", what, fix)
    if failed.kind == "died":
        last = "\n".join(said.splitlines()[-_SHOWN_LINES:])
        return DsxError(where, f"it ended without a word\n{last}\n", "free memory, or verify a smaller model")
    return DsxError(where, f"it failed\n{said}\n", "mend what it names; the other ranks were ended")


def spawned(rank: int, _world_size: int, job: VerifyJob) -> Observations | None:
    """What a rank that :func:`verify` has started does."""
    # Python 3.11 fails with a KeyError when a collection amid an import runs a finalizer that imports.
    gc.freeze()
    gc.disable()
    get_accelerator().set_device(rank)
    deepspeed.init_distributed(dist_backend=dist.get_backend(), verbose=False)
    groups = make_groups(job.mesh(), sequence_parallel=job.sequence_parallel)
    seed_generators(groups, job.seed)
    return observe_passes(job, groups)


def _launched(request: Request, *, use_gpus: bool) -> Verdict | None:
    job = _job(request, on_cpu=not use_gpus)[0]
    with distributed(job.mesh(), sequence_parallel=job.sequence_parallel, seed=job.seed) as groups:
        plans: list[VerifyPlan] = []

        def prepared() -> VerifyJob:
            """Prepare on rank 0, which has the reference; the others need the clipping that it chooses."""
            plans.append(prepare(request, on_cpu=not use_gpus))
            return plans[0].job

        began = time.perf_counter()
        job = agree(prepared)
        prepared_at = time.perf_counter()
        found = observe_passes(job, groups)
        ran = time.perf_counter()
        if found is None:
            return None
        verdict = judge(plans[0], found)
        compared = time.perf_counter() - ran + prepared_at - began
        return replace(verdict, ranks_seconds=ran - prepared_at, reference_seconds=compared)


def prepare(request: Request, *, on_cpu: bool = True) -> VerifyPlan:
    """The ranks' job, and the bench to compare on, with a clipping that is sure to be at work."""
    job, config, model, changes = _job(request, on_cpu=on_cpu)
    if config is not None:
        plan = replace(family_plan(job, config, layers=True), changes=changes)
    else:
        plan = replace(user_plan(job, model), changes=changes)
    clipping = float(job.content.get("gradient_clipping", 1.0))
    if clipping > 0.0:
        clipping, said = _clipping(plan.bench, clipping)
        plan = replace(plan, job=replace(job, clipping=clipping), changes=(*plan.changes, *said))
    tolerances = EXACT if precision(job.content) == "fp32" else ROUGH
    if request.tolerance is not None:
        tolerances = replace(tolerances, gradient=request.tolerance)
    return replace(plan, bench=replace(plan.bench, tolerances=tolerances))


def judge(plan: VerifyPlan, found: Observations) -> Verdict:
    """Compare the ranks' results with the bench's reference."""
    rows: list[StepRow] = []
    findings: list[ParityFinding] = []
    for seen in found.passes:
        comparison = TrainingComparison(seen, plan.bench)
        findings += comparison.findings()
        rows += comparison.rows
        if findings:
            break  # the pass with clipping would only say the same in other words
    findings += judge_masks(found.masks, found.passes[0].mesh)
    return Verdict(
        layout=plan.layout,
        reference=plan.bench.reference.title,
        optimizer=plan.bench.updates().title,
        changes=plan.changes,
        rows=tuple(rows),
        findings=tuple(findings),
        masks=len({name for masks in found.masks for name in masks}),
    )


def _job(
    request: Request, *, on_cpu: bool
) -> tuple[VerifyJob, RunConfig | None, UserModel | None, tuple[str, ...]]:
    size, steps = request.world_size, request.steps
    if request.entry is not None:
        content = load.content_of(request.source, request.overrides)
        job, changes = user_job(content, size, request.entry, keep=request.keep_precision, on_cpu=on_cpu)
        job, model = replace(job, steps=steps, stock=request.stock), user_model(request.entry)
        if size % model.num_stages:
            raise LayoutError(
                f"--gpus {size}",
                f"{request.entry} gives num_stages = {model.num_stages}, which does not divide it",
                f"use a multiple of {model.num_stages}",
            )
        return job, None, model, changes
    config = resolve(request.source, world_size=size, overrides=request.overrides)
    small = trial(config, full=request.full, keep_precision=request.keep_precision, on_cpu=on_cpu)
    job = VerifyJob(content=small.content, world_size=size, steps=steps, clipping=0.0, dropout=small.dropout)
    alone = (f"dsx.outer: off, one of the {request.of_islands} islands is compared",) * bool(
        request.of_islands
    )
    return job, job.config(), None, alone + small.changes


def user_job(
    content: dict[str, Any], size: int, entry: str | Callable[[], Any], *, keep: bool, on_cpu: bool
) -> tuple[VerifyJob, tuple[str, ...]]:
    """The job of ``size`` ranks for two steps of a user's own layers, and what it changes of the JSON.

    ``keep``: whether to keep bf16 or fp16.

    Raises:
        ConfigError: The config has no optimizer.
    """
    content.pop("dsx", None)
    if not isinstance(content.get("optimizer"), dict):
        fix = 'add {"type": "AdamW", "params": {"lr": 1e-3}}'
        raise ConfigError("optimizer", "the config has none", fix)
    changes = make_exact(content, on_cpu=on_cpu, keep_precision=keep) + make_visible(content)
    return VerifyJob(content=content, world_size=size, steps=2, clipping=0.0, entry=entry), tuple(changes)


def family_plan(job: VerifyJob, config: RunConfig, *, layers: bool = False) -> VerifyPlan:
    """The bench for the small model of a config.

    With ``layers`` dsx's layers are made in one process too: they tell which layer's output differs first,
    and whether the weights are those that the layout should have been built with.
    """
    reference, own = Transformers(config), family_layers(config) if layers else None
    mesh, m = config.mesh, config.accumulation
    width = mesh.tp * config.dsx.model.vocab_multiple
    padded = -(-config.model.vocab_size // width) * width - config.model.vocab_size

    numbers = [job.number(index, share, mesh) for index in range(m) for share in range(mesh.num_shares)]

    def batches(step: int) -> list[Batch]:
        made = {number: random_tokens(config, step, number) for number in set(numbers)}
        return [made[number] for number in numbers]

    def suppose(weights: Weights, given: Sequence[Batch]) -> Mapping[str, float]:
        found = {}
        losses = partial(reference.supposed_losses, weights)
        plain = losses(given)
        if mesh.tp > 1:
            found[diagnosis.BIAS_PER_RANK] = _token_mean(losses(given, bias_factor=mesh.tp))
        if padded:
            found[diagnosis.PADDING] = _token_mean(losses(given, padded_columns=padded))
        if mesh.num_shares > 1:
            found[diagnosis.SAME_DATA] = _token_mean(plain[:: mesh.num_shares])
            found[diagnosis.MEAN_PER_REPLICA] = _mean_of_means(plain.view(m, mesh.num_shares, 2).sum(0))
        if config.dsx.data.keeps_apart:
            found[diagnosis.JOINED] = _token_mean(losses(given, joined="wholly"))
            if reference.takes_positions:
                found[diagnosis.DOCUMENTS] = _token_mean(losses(given, joined="attention"))
        return found | {diagnosis.MEAN_OF_MEANS: _mean_of_means(plain)}

    is_known = config.weights is None and config.precision == "fp32"
    bench = Bench(
        reference=reference,
        batches=batches,
        updates=lambda: Updates(config.deepspeed),
        tolerances=EXACT,
        suppose=suppose,
        layers=own,
        built=fresh_weights(config, own) if is_known else None,
    )
    return VerifyPlan(job=job, bench=bench, changes=(), layout=_layout(config))


def _token_mean(losses: Tensor) -> float:
    """Of sums and numbers of tokens, [n, 2]."""
    total, count = losses.sum(0).tolist()
    return float(total / max(count, 1))


def _mean_of_means(losses: Tensor) -> float:
    return float((losses[:, 0] / losses[:, 1].clamp(min=1)).mean())


def user_plan(job: VerifyJob, model: UserModel | None) -> VerifyPlan:
    """The bench for a user's own layers."""
    assert model is not None
    assert job.entry is not None
    arguments = model.arguments
    # A second set of layers, because a module given as such is the layout's own.
    reference = _in_one_process(job.entry, arguments)
    mesh = job.mesh()
    batch = resolve_batch(job.content, mesh.num_shares)

    def batches(step: int) -> list[Batch]:
        return [
            model.batch(step, index, batch.micro) for index in range(batch.accumulation * mesh.num_shares)
        ]

    def suppose(weights: Weights, given: Sequence[Batch]) -> Mapping[str, float]:
        if mesh.num_shares == 1:
            return {}
        return {diagnosis.SAME_DATA: reference.evaluate(weights, given[:: mesh.num_shares]).loss}

    # Built modules have the weights of whoever built them.
    modules = any(isinstance(layer, torch.nn.Module) for layer in arguments["layers"])
    bench = Bench(
        reference=reference,
        batches=batches,
        updates=lambda: Updates(job.content),
        tolerances=EXACT,
        suppose=suppose,
        built=reference.weights() if arguments.get("seed_layers") and not modules else None,
    )
    zero = job.content.get("zero_optimization", {}).get("stage", 0)
    engine = "stock DeepSpeed" if job.stock else "dsx"
    layout = (
        f"{engine}, {mesh.words} = {mesh.size} ranks, ZeRO-{zero}, "
        f"{batch.accumulation} micro-batches of {batch.micro}"
    )
    return VerifyPlan(job=job, bench=bench, changes=(), layout=layout)


def _in_one_process(name: str | Callable[[], Any], arguments: Mapping[str, Any]) -> ReferenceLayers:
    """The user's layers, built as PipelineModule builds them."""
    from deepspeed.runtime.utils import set_random_seed

    layers = user_model(name).arguments["layers"]
    seed_fn = arguments.get("seed_fn") or set_random_seed
    base = arguments.get("base_seed", 1234) if arguments.get("seed_layers") else None
    return ReferenceLayers(
        layers,
        arguments.get("loss_fn"),
        "the same layers called in order, one process, fp32",
        before=None if base is None else lambda index: seed_fn(base + index),
    )


def _clipping(bench: Bench, clipping: float) -> tuple[float, tuple[str, ...]]:
    """A clipping that is at work in the first step: the config's own, or below the step's norm."""
    weights = bench.built if bench.built is not None else bench.reference.weights()
    gradients = bench.reference.evaluate(weights, bench.batches(0)).gradients
    norm = norm_of(gradients)
    if clipping < norm or not math.isfinite(norm):
        return clipping, ()
    return _CLIP_AT * norm, (f"gradient_clipping: {clipping:g} -> {_CLIP_AT * norm:.4g}, so that it clips",)


def _layout(config: RunConfig) -> str:
    mesh = config.mesh
    words = f"{mesh.words} = {mesh.size} ranks"
    if config.dsx.parallel.sequence_parallel and mesh.tp > 1:
        words += ", sequence parallel"
    return (
        f"dsx, {words}, chunks {config.chunks}, "
        f"{config.schedule_name}, ZeRO-{config.zero_stage}, {config.precision}, recompute "
        f"{config.dsx.recompute}, {config.accumulation} micro-batches of {config.micro_batch_size}"
    )
