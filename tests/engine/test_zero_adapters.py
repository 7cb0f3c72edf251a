"""Every ZeRO stage and its settings, ties, client optimizers and frozen layers, against torch alone."""

from __future__ import annotations

import inspect
import math
from functools import cache
from typing import Any

import pytest
import torch

import ranks
from dsx.errors import ConfigError, DataError, ModelError
from engine import toy_pipeline as toy
from engine.toy_pipeline import Case

CPU = {"device": "cpu"}
OFFLOAD = {"zero_force_ds_cpu_optimizer": False}

# Settings of one stage: all must give what torch gives, with chunks, ties, accumulation and dp.
SETTINGS: list[tuple[int, dict[str, Any], dict[str, Any]]] = [
    (0, {}, {"managed_gradient_accumulation": False}),
    (1, {"overlap_comm": True}, {}),
    (1, {"contiguous_gradients": False, "reduce_bucket_size": 50}, {}),
    (1, {"offload_optimizer": CPU}, OFFLOAD),
    (1, {"round_robin_gradients": True}, {"managed_gradient_accumulation": False}),
    (2, {"overlap_comm": True, "contiguous_gradients": False}, {}),
    (2, {"reduce_scatter": False, "round_robin_gradients": True}, {}),
    (2, {"reduce_bucket_size": 50, "parameter_alignment": True}, {}),
    (2, {"offload_optimizer": CPU}, {**OFFLOAD, "managed_gradient_accumulation": True}),
    (3, {"sub_group_size": 60, "contiguous_gradients": False}, {}),
    (3, {"stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 64}, {}),
    (3, {"stage3_max_live_parameters": 10, "stage3_param_persistence_threshold": 0}, {}),
    (3, {"offload_optimizer": CPU, "offload_param": CPU}, OFFLOAD),
    (3, {"overlap_comm": False, "reduce_scatter": False, "reduce_bucket_size": 50}, {}),
]


@cache
def expected(layers: str, micro_batches: int, prepare: str = "nothing") -> tuple[float, ...]:
    return tuple(toy.flat(toy.oracle(layers, micro_batches=micro_batches, prepare=prepare)))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_settings_of_zero_change_nothing(stage: int) -> None:
    cases = [
        Case(layers="tied", zero=zero, pp=2, chunks=2, zero_keys=zero_keys, keys=keys)
        for zero, zero_keys, keys in SETTINGS
        if zero == stage
    ]
    for case, losses in zip(cases, ranks.run(toy.train_all, 4, cases)[0], strict=True):
        assert toy.flat(losses) == pytest.approx(expected("tied", 4), rel=2e-5), case


def test_client_optimizers_parameter_groups_and_frozen_layers() -> None:
    """A tied weight is summed once whoever makes the groups, and what is frozen stays as it is."""
    ways = ["optimizer instance", "optimizer callable", "decay groups", "frozen tie"]
    cases = [Case(layers="tied", prepare=way, pp=2, zero=zero) for way in ways for zero in range(4)]
    cases += [Case(layers="tied", prepare="decay groups", pp=2, chunks=3, zero=2)]
    cases += [Case(prepare="frozen start", pp=2, chunks=2, zero=zero) for zero in range(4)]
    # One rank has nothing to train: what comes before the first trained layer, or after the last.
    cases += [Case(prepare=which, pp=2, zero=z) for which in ("frozen start", "frozen end") for z in range(4)]
    for case, losses in zip(cases, ranks.run(toy.train_all, 2, cases)[0], strict=True):
        want = expected(case.layers, 2, case.prepare)
        assert toy.flat(losses) == pytest.approx(want, rel=1e-5), case


def test_without_a_norm_tied_gradients_are_still_summed() -> None:
    """zero_optimization.compute_grad_norm = false skips the norm that used to sum them."""
    keys = {"gradient_clipping": 0.0}
    for zero in (1, 2):
        off = Case(layers="tied", pp=2, zero=zero, keys=keys, zero_keys={"compute_grad_norm": False})
        on = Case(layers="tied", pp=2, zero=zero, keys=keys)
        without, with_norm = ranks.run(toy.train_all, 2, [off, on])[0]
        assert [loss for loss, _ in without] == [loss for loss, _ in with_norm]
        assert all(math.isnan(norm) for _, norm in without)


def _nan(rank: int, world_size: int, cases: list[Case]) -> list[list[Any]]:
    """A NaN in one rank's gradient at the second step: (norm finite, skipped steps, weights finite)."""
    results = []
    for case in cases:
        made, facts = toy.engine(case), []
        if rank == 1:
            parameter = next(made.module.parameters())
            parameter.register_hook(lambda g, made=made: g * (torch.nan if made.global_steps == 1 else 1))
        for step in range(3):
            made.train_batch(toy.batches(step, 2, dtype=case.dtype))
            weights = all(bool(torch.isfinite(p).all()) for p in made.module.parameters())
            facts.append((math.isfinite(made.get_global_grad_norm()), made.skipped_steps, weights))
        results.append(facts)
    return results


def test_all_ranks_skip_a_step_with_a_nan() -> None:
    fp32_sum = {"data_types": {"grad_accum_dtype": "fp32"}}
    cases = [Case(pp=2, zero=zero) for zero in (1, 2, 3)]
    cases += [Case(pp=2, zero=zero, bf16=True) for zero in (0, 1, 2, 3)]
    cases += [Case(pp=2, zero=1, bf16=True, keys=fp32_sum)]
    skipped = [(True, 0, True), (False, 1, True), (True, 1, True)]
    assert ranks.run(_nan, 2, cases) == [[skipped] * len(cases)] * 2
    # As with torch's own clipping: every weight becomes NaN, on every rank.
    spoilt = [(True, 0, True), (False, 0, False), (False, 0, False)]
    assert ranks.run(_nan, 2, [Case(pp=2, zero=0)]) == [[spoilt]] * 2


def _bf16_norms(rank: int, world_size: int) -> list[toy.Losses]:
    """BF16_Optimizer, with the tied head alone on the last rank: nothing of that rank enters the norm."""
    keys = {"data_types": {"grad_accum_dtype": "fp32"}}
    parts = {"partition_method": [5, 1] if world_size == 2 else [6]}
    case = Case(layers="tied", bf16=True, zero=1, pp=world_size, keys=keys, module=parts)
    made = toy.engine(case)
    assert type(made.optimizer).__name__ == "BF16_Optimizer"
    return toy.train(case, made)


def test_bf16_optimizer_with_a_rank_that_adds_nothing_to_the_norm() -> None:
    alone, cut = ranks.run(_bf16_norms, 1)[0], ranks.run(_bf16_norms, 2)[0]
    assert toy.flat(cut) == pytest.approx(toy.flat(alone), rel=1e-2)


def _first_bf16_update(rank: int, world_size: int, kind: str, parameters: dict[str, Any]) -> float:
    """Distance of the fp32 weights after one step of bf16 without ZeRO from torch's own."""
    optimizer = {"type": kind, "params": parameters}
    case = Case(bf16=True, keys={"optimizer": optimizer, "gradient_clipping": 0.0})
    made = toy.engine(case)
    whole = toy.Whole("plain").bfloat16().float()
    torch_parameters = {k: v for k, v in parameters.items() if k != "torch_adam"}
    peer = getattr(torch.optim, kind)(whole.parameters(), **torch_parameters)
    made.train_batch(toy.batches(0, 2, dtype=torch.bfloat16))
    for parameter in whole.parameters():
        parameter.grad = torch.zeros_like(parameter)
    half = toy.Whole("plain").bfloat16()
    for inputs, labels in toy.batches(0, 2, dtype=torch.bfloat16):
        (toy.loss_fn(half(inputs), labels) / 2).backward()
    for parameter, low in zip(whole.parameters(), half.parameters(), strict=True):
        parameter.grad = low.grad.float()
    peer.step()
    mine = [p for group in made.optimizer.fp32_groups for p in group]
    return max(float((a - b).detach().abs().max()) for a, b in zip(mine, whole.parameters(), strict=True))


@pytest.mark.parametrize(
    ("kind", "parameters"),
    [
        ("AdamW", {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.3, "torch_adam": True}),
        pytest.param(
            "Adagrad",
            {"lr": 1e-2, "weight_decay": 0.3},
            marks=pytest.mark.skipif(
                "full_like" not in inspect.getsource(torch.optim.Adagrad._init_group),
                reason="DeepSpeed's bf16 without ZeRO fails with this torch's Adagrad, in stock too",
            ),
        ),
    ],
)
def test_first_bf16_step_is_the_optimizers_first(kind: str, parameters: dict[str, Any]) -> None:
    """DeepSpeed steps once on zero gradients at construction; that must not count."""
    assert ranks.run(_first_bf16_update, 1, kind, parameters)[0] < 1e-7


def _refusals(rank: int, world_size: int) -> list[str]:
    tied = Case(layers="tied", pp=2, zero=1)
    muon = {"optimizer": {"type": "Muon", "params": {"lr": 1e-2, "torch_adam": True}}}
    attempts = [
        (ConfigError, lambda: toy.engine(_with(tied, keys=muon))),
        (ConfigError, lambda: _scheduler_of_old_groups(tied)),
        (ModelError, lambda: toy.engine(_with(Case(pp=2, zero=2), prepare="all frozen"))),
    ]
    texts = []
    for kind, attempt in attempts:
        with pytest.raises(kind) as caught:
            attempt()
        texts.append(str(caught.value))
    return texts


def _with(case: Case, **changes: Any) -> Case:
    from dataclasses import replace

    return replace(case, **changes)


def _scheduler_of_old_groups(case: Case) -> None:
    import dsx

    module = _module(case)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    dsx.initialize(model=module, config=toy.config(case), optimizer=optimizer, lr_scheduler=scheduler)


def _module(case: Case) -> Any:
    import dsx

    return dsx.PipelineModule(
        toy.layers(case.layers), num_stages=case.pp, loss_fn=toy.loss_fn, partition_method="uniform"
    )


def test_what_ties_and_frozen_ranks_cannot_do_is_refused_on_every_rank() -> None:
    words = ["Muon", "pass a callable", "every parameter is frozen"]
    for texts in ranks.run(_refusals, 2):
        for text, word in zip(texts, words, strict=True):
            assert word in text


def _disturbed(rank: int, world_size: int, cases: list[Case], disturb: str) -> list[toy.Losses]:
    """Training in which a program cuts a step off, or replaces every parameter's tensor by its copy."""
    found = []
    for case in cases:
        made, steps = toy.engine(case), []
        for step in range(case.steps):
            if disturb == "cut off" and step:
                one = next(toy.batches(9, case.micro_batches, dtype=case.dtype))
                with pytest.raises(DataError, match="it ended within the step"):
                    made.train_batch(iter([one]))
            elif disturb == "replace":
                for parameter in made.module.parameters():
                    parameter.data = parameter.data.clone()
            loss = made.train_batch(toy.batches(step, case.micro_batches, dtype=case.dtype)).item()
            steps.append((loss, made.get_global_grad_norm()))
        found.append(steps)
    return found


@pytest.mark.parametrize("disturb", ["cut off", "replace"])
def test_a_step_that_was_cut_off_and_tensors_that_were_replaced_leave_no_trace(disturb: str) -> None:
    fp32_sums = {"data_types": {"grad_accum_dtype": "fp32"}}
    stages = range(4) if disturb == "cut off" else range(3)  # at ZeRO-3 there is nothing to replace
    cases = [Case(zero=zero, micro_batches=2) for zero in stages]
    cases += [Case(zero=zero, micro_batches=2, bf16=True) for zero in (1, 2)]
    cases += [Case(zero=2, micro_batches=2, bf16=True, keys=fp32_sums)]
    if disturb == "cut off":
        cases += [
            Case(zero=1, micro_batches=2, bf16=True, keys=fp32_sums)
        ]  # BF16_Optimizer's weights stay replaced
        cases += [
            Case(zero=z, micro_batches=2, zero_keys={"offload_optimizer": CPU}, keys=OFFLOAD) for z in (1, 2)
        ]
    calm = ranks.run(toy.train_all, 1, cases)[0]
    for case, want, losses in zip(cases, calm, ranks.run(_disturbed, 1, cases, disturb)[0], strict=True):
        assert toy.flat(losses) == pytest.approx(toy.flat(want), rel=1e-6), case
