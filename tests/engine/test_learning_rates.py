"""Every step's learning rate is what the schedule makes of a plain torch optimizer; so are the weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime import lr_schedules

import ranks
from dsx.errors import ConfigError
from engine import toy_pipeline as toy
from engine.toy_pipeline import Case
from often import often

STEPS = 6
# By name in DeepSpeed's JSON, with what each takes; all but AdamW are torch's own classes.
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "Adagrad": {"lr": 0.1, "lr_decay": 0.01, "initial_accumulator_value": 0.1},
    "AdamW": {"lr": 1e-2, "eps": 1e-5},
    "SGD": {"lr": 0.1, "momentum": 0.9},
    "RMSprop": {"lr": 1e-2, "momentum": 0.5},
    "NAdam": {"lr": 1e-2, "eps": 1e-5},
    "Adadelta": {"lr": 0.5},
}
# Kinds of schedule: by name in the JSON, as a callable, and as an object of the client's optimizer.
SCHEDULES: dict[str, dict[str, Any]] = {
    "StepLR": {"step_size": 2, "gamma": 0.5},
    "WarmupLR": {"warmup_max_lr": 0.1, "warmup_num_steps": 4, "warmup_type": "linear"},
    "OneCycleLR": {"max_lr": 0.1, "total_steps": 8, "cycle_momentum": False},
    "MultiStepLR": {"milestones": [1, 3], "gamma": 0.3},
    "OneCycle": {"cycle_min_lr": 1e-3, "cycle_max_lr": 0.1, "cycle_first_step_size": 3,
                 "cycle_momentum": False},
    "CosineAnnealingWarmRestarts": {"T_0": 3},
    "callable": {},
    "object": {},
}  # fmt: skip
CASES = [
    (optimizer, schedule, zero) for zero in (3, 1, 2, 0) for schedule in SCHEDULES for optimizer in OPTIMIZERS
]


def _schedule(kind: str, optimizer: Any) -> Any:
    if kind in ("callable", "object"):
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    home = lr_schedules if hasattr(lr_schedules, kind) else torch.optim.lr_scheduler
    return getattr(home, kind)(optimizer, **SCHEDULES[kind])


def _groups(module: Any) -> list[dict[str, Any]]:
    """Two, with settings of their own: of a pipeline rank, or of the whole model."""
    named = list(module.named_parameters())
    return [
        {"params": [p for name, p in named if name.endswith("weight")], "weight_decay": 0.2},
        {"params": [p for name, p in named if name.endswith("bias")], "lr": 0.05},
    ]


def _peer(case: tuple[str, str, int]) -> tuple[list[list[float]], dict[str, torch.Tensor]]:
    """Rates of each step, and the weights after the last, with torch alone."""
    name, schedule, _ = case
    whole = toy.Whole("plain")
    optimizer = getattr(torch.optim, name)(_groups(whole), **OPTIMIZERS[name])
    moved = _schedule(schedule, optimizer)
    rates = []
    for step in range(STEPS):
        rates.append([group["lr"] for group in optimizer.param_groups])
        optimizer.zero_grad()
        for inputs, labels in toy.batches(step, 2):
            (toy.loss_fn(whole(inputs), labels) / 2).backward()
        torch.nn.utils.clip_grad_norm_(whole.parameters(), toy.CLIPPING)
        optimizer.step()
        moved.step()
    return rates, {name: p.detach() for name, p in whole.named_parameters()}


def _ours(rank: int, world_size: int, case: tuple[str, str, int], pp: int, folder: str) -> Any:
    """The same through dsx; half way the run is stopped and goes on from its checkpoint in a new engine."""
    import deepspeed

    import dsx

    name, schedule, zero = case
    parameters = OPTIMIZERS[name] | ({"torch_adam": True} if name == "AdamW" else {})
    keys: dict[str, Any] = {
        "zero_allow_untested_optimizer": True,
        "optimizer": {"type": name, "params": parameters},
    }
    if schedule not in ("callable", "object"):
        keys["scheduler"] = {"type": schedule, "params": SCHEDULES[schedule]}
    config = toy.config(Case(zero=zero, micro_batches=2 * pp // world_size, keys=keys))
    deepspeed.init_distributed()

    def make() -> Any:
        module = dsx.PipelineModule(
            toy.layers("plain"), num_stages=pp, loss_fn=toy.loss_fn, seed_layers=True,
            seed_fn=torch.manual_seed, base_seed=toy.SEED, partition_method="uniform",
        )  # fmt: skip
        given: dict[str, Any] = {"model_parameters": _groups(module.chunks)}
        if schedule == "callable":
            given["lr_scheduler"] = lambda optimizer: _schedule(schedule, optimizer)
        if schedule == "object":
            optimizer = getattr(torch.optim, name)(_groups(module.chunks), **OPTIMIZERS[name])
            given = {"optimizer": optimizer, "lr_scheduler": _schedule(schedule, optimizer)}
        return dsx.initialize(model=module, config=config, **given)[0]

    made, rates = make(), []
    for step in range(STEPS):
        if step == STEPS // 2:
            made.save_checkpoint(folder)
            made = make()
            made.load_checkpoint(folder)
        rates.append(list(made.get_lr()))
        dp, dp_rank = made.groups.mesh.dp, made.groups.dp_rank
        made.train_batch(toy.batches(step, made.micro_batches, dp, dp_rank))
    with deepspeed.zero.GatheredParameters(list(made.module.parameters()), enabled=zero == 3):
        return rates, {name: p.detach().clone() for name, p in made.module.named_parameters()}


@pytest.mark.parametrize(("optimizer", "schedule", "zero"), often(CASES, every=41))
def test_rates_and_weights_are_those_of_plain_torch(
    optimizer: str, schedule: str, zero: int, tmp_path: Path
) -> None:
    """With two parameter groups, on a pipeline and on data-parallel ranks, over a restart."""
    case = (optimizer, schedule, zero)
    rates, weights = _peer(case)
    for pp in (2, 1):
        found: dict[str, torch.Tensor] = {}
        for theirs, part in ranks.run(_ours, 2, case, pp, str(tmp_path / str(pp))):
            assert theirs == [pytest.approx(step) for step in rates], (case, pp)
            found |= part
        assert found.keys() == weights.keys()
        for name, value in weights.items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6, msg=f"{case} {pp} {name}")


ADAGRAD = {"optimizer": {"type": "Adagrad", "params": {"lr": 1e-2}}}


def _tied(rank: int, world_size: int, zero: int, chunks: int) -> toy.Losses:
    return toy.train(Case(layers="tied", pp=world_size, chunks=chunks, zero=zero, keys=ADAGRAD))


@pytest.mark.parametrize(("zero", "chunks"), often([(1, 1), (3, 1), (2, 3)], every=3))
def test_adagrad_trains_tied_weights(zero: int, chunks: int) -> None:
    """A tied weight is a parameter group of its own under ZeRO-1 and 2."""
    alone = ranks.run(_tied, 1, 0, 1)[0]
    assert toy.flat(ranks.run(_tied, 2, zero, chunks)[0]) == pytest.approx(toy.flat(alone), rel=1e-5)


def _refusals(rank: int, world_size: int) -> list[str]:
    import dsx

    schedules = torch.optim.lr_scheduler

    def other(optimizer: Any) -> Any:
        del optimizer
        return schedules.StepLR(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0), 2)

    def with_empty_group() -> Any:
        module = dsx.PipelineModule(toy.layers("plain"), num_stages=1, loss_fn=toy.loss_fn)
        optimizer = torch.optim.AdamW([{"params": []}, {"params": module.parameters()}], lr=1e-2)
        schedule = schedules.LambdaLR(optimizer, [lambda step: 1.0, lambda step: 0.5])
        dsx.initialize(model=module, config=toy.config(Case()), optimizer=optimizer, lr_scheduler=schedule)

    named = [{"scheduler": {"type": kind}} for kind in ("ReduceLROnPlateau", "StepLr", "OneCycleLR")]
    attempts = [
        *(lambda keys=keys: toy.engine(Case(keys=keys)) for keys in named),
        lambda: toy.engine(Case(zero=2), lr_scheduler=schedules.ReduceLROnPlateau),
        lambda: toy.engine(Case(zero=1), lr_scheduler=other),
        lambda: toy.engine(Case(zero=1), lr_scheduler=other(None)),
        with_empty_group,
    ]
    texts = []
    for attempt in attempts:
        with pytest.raises(ConfigError) as caught:
            attempt()
        texts.append(str(caught.value))
    return texts


def test_schedules_that_would_not_reach_the_weights_are_refused() -> None:
    """DeepSpeed would give the plateau the batch size for a metric, at every step, without a word."""
    words = ["wants a metric", "know no such", "cannot be made", "wants a metric", *["another optimizer"] * 2]
    words.append("left out where")
    for text, word in zip(ranks.run(_refusals, 1)[0], words, strict=True):
        assert word in text


def test_both_optimizers_of_a_partly_offloaded_zero3_follow_the_schedule() -> None:
    """The second one steps what stays on a GPU; DeepSpeed's copy of the first group is frozen."""
    from types import SimpleNamespace

    from dsx.engine.zero.stage3 import share_groups

    weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    first = torch.optim.AdamW([{"params": [w], "weight_decay": at / 10} for at, w in enumerate(weights)])
    for group in first.param_groups:
        group["params"] = []  # as ZeRO-3 leaves them between steps
    second = torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))], lr=first.param_groups[0]["lr"])
    second.add_param_group(first.param_groups[1])
    share_groups(SimpleNamespace(optimizer=first, backup_optimizer=second))
    schedule = torch.optim.lr_scheduler.StepLR(first, 1, gamma=0.5)
    first.step()  # of nothing yet
    schedule.step()
    assert [group["lr"] for group in second.param_groups] == [5e-4, 5e-4]
    second.param_groups[1]["params"], weights[1].grad = [weights[1]], torch.ones(2)
    second.step()
    assert weights[1].tolist() == pytest.approx([1 * (1 - 5e-4 * 0.1) - 5e-4] * 2)
