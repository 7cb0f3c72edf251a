"""The engine behaves as DeepSpeed's PipelineEngine does, and says so where it cannot."""

from __future__ import annotations

import csv
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.monitor.config import TensorBoardConfig
from deepspeed.monitor.tensorboard import TensorBoardMonitor

import ranks
from dsx.engine.initialize import _named
from dsx.errors import ConfigError, DataError, ModelError
from engine import toy_pipeline as toy
from engine.toy_pipeline import Case

DATASET = [(torch.full((toy.WIDTH,), float(i)), torch.zeros(toy.WIDTH)) for i in range(12)]


def _stock(case: Case, **keys: Any) -> Any:
    import deepspeed
    from deepspeed.pipe import PipelineModule

    deepspeed.init_distributed()
    module = PipelineModule(
        layers=toy.layers(case.layers),
        num_stages=case.pp,
        loss_fn=toy.loss_fn,
        seed_layers=True,
        seed_fn=torch.manual_seed,
        partition_method="uniform",
    )
    return deepspeed.initialize(
        model=module, model_parameters=list(module.parameters()), config=toy.config(case), **keys
    )[0]


def _evaluations(rank: int, world_size: int, stock: bool) -> list[Any]:
    """eval_batch in every way that both know, between steps, all from one iterator per data set."""
    case = Case(pp=2, zero=1)
    made = _stock(case) if stock else toy.engine(case)
    dp, dp_rank = made.grid.get_data_parallel_world_size(), made.grid.get_data_parallel_rank()
    data = iter([batch for step in range(9) for batch in toy.batches(step, 2, dp, dp_rank)])
    calls: list[int] = []
    made.set_batch_fn(lambda batch: (calls.append(0), (batch[0] * 2, batch[1]))[1])
    # First of all: a loss before it would make stock DeepSpeed add outputs to losses.
    outputs = made.eval_batch(data, compute_loss=False, reduce_output=None, num_micro_batches=3)
    results: list[Any] = [made.train_batch(data).item(), made.eval_batch(data).item()]
    results.append(made.eval_batch(data, num_micro_batches=3).item())
    # One micro-batch: the only number whose outputs stock DeepSpeed returns whole.
    loss, logits = made.eval_batch(data, return_logits=True, num_micro_batches=1)
    results += [made.train_batch(data).item(), loss.item(), len(calls)]
    if made.is_last_stage():
        results += [output.tolist() for output in outputs]
        results.append((logits if stock else logits[0]).tolist())
    else:
        assert outputs is None
        assert logits is None
    each = made.eval_batch(data, reduce_output=None, bcast_loss=False) if not stock else None
    return [results, len(list(data)), each]


def test_evaluations_equal_stock_deepspeeds() -> None:
    """Losses, outputs, batch function, and the place of the iterator, which all ranks move alike."""
    stock, ours = ranks.run(_evaluations, 2, True), ranks.run(_evaluations, 2, False)
    for rank, (theirs, mine) in enumerate(zip(stock, ours, strict=True)):
        _assert_close(mine[0], theirs[0])
        assert mine[1] == theirs[1] - 2  # ours evaluated once more
        assert (mine[2] is None) == (rank == 0)
    assert all(loss.shape == () for loss in ours[1][2])


STEP_LR = {"type": "StepLR", "params": {"step_size": 2, "gamma": 0.5}}


def _rates(rank: int, world_size: int) -> list[list[float]]:
    """Learning rates of four steps, by how DeepSpeed wraps the optimizer."""
    rates = []
    for case in (Case(), Case(bf16=True), Case(zero=1), Case(zero=2, bf16=True), Case(zero=3)):
        made = toy.engine(replace(case, keys={"scheduler": STEP_LR}))
        rates.append([])
        for step in range(4):
            rates[-1] += made.get_lr()
            made.train_batch(toy.batches(step, case.micro_batches, 1, 0, case.dtype))
    return rates


def test_schedules_of_torch_by_name() -> None:
    """Stock DeepSpeed takes them in fp32 without ZeRO alone."""
    first = toy.ADAMW["lr"]
    for rates in ranks.run(_rates, 1)[0]:
        assert rates == pytest.approx([first, first, first / 2, first / 2])


def _assert_close(mine: Any, theirs: Any) -> None:
    if isinstance(mine, list):
        assert len(mine) == len(theirs)
        for a, b in zip(mine, theirs, strict=True):
            _assert_close(a, b)
    else:
        assert mine == pytest.approx(theirs, rel=1e-5, abs=1e-7)


def _interleaved(rank: int, world_size: int, cases: list[Case], evaluate: bool) -> list[toy.Losses]:
    results = []
    for case in cases:
        made, losses = toy.engine(case), []
        for step in range(3):
            if evaluate:
                made.eval_batch(toy.batches(50 + step, 3), num_micro_batches=3)
                made.eval_batch(toy.batches(60 + step, 2), compute_loss=False)
            loss = made.train_batch(toy.batches(step, 2)).item()
            losses.append((loss, made.get_global_grad_norm()))
        results.append(losses)
    return results


def test_evaluation_changes_no_training() -> None:
    cases = [Case(layers="tied", pp=2, chunks=chunks, zero=zero) for zero, chunks in ((0, 2), (2, 1), (3, 3))]
    without = ranks.run(_interleaved, 2, cases, False)
    assert ranks.run(_interleaved, 2, cases, True) == without


def _dataset(rank: int, world_size: int, stock: bool) -> tuple[list[Any], float]:
    """First elements of the samples that a step reads from ``training_data``, and its loss.

    Read in this process: a DataLoader's workers take seconds to start here.
    """
    from deepspeed.runtime import dataloader

    real = dataloader.DataLoader
    dataloader.DataLoader = lambda *args, **keys: real(*args, **(keys | {"num_workers": 0}))
    seen: list[Any] = []
    case = Case(pp=2, micro_batches=4)  # 16 samples of 12: the loader starts anew
    made = (_stock if stock else toy.engine)(case, training_data=DATASET)

    def note(batch: Any) -> Any:
        seen.append(batch[0][:, 0].tolist())
        return batch

    made.set_batch_fn(note)
    return seen, made.train_batch().item()


def test_training_data_is_read_as_by_stock_deepspeed() -> None:
    """In order, split over data-parallel ranks alone, and at the end from the start again."""
    stock, ours = ranks.run(_dataset, 4, True), ranks.run(_dataset, 4, False)
    assert [seen for seen, _ in ours] == [seen for seen, _ in stock]
    assert ours[0][0] == ours[2][0] != ours[1][0] == ours[3][0]  # ranks 0 and 2 are one pipeline
    assert ours[0][1] == pytest.approx(stock[0][1], rel=1e-5)


def _monitored(rank: int, world_size: int, folder: str, stock: bool) -> None:
    monitor = {"csv_monitor": {"enabled": True, "output_path": folder, "job_name": "run"}}
    case = Case(pp=2, zero=1, keys=monitor)
    made = _stock(case) if stock else toy.engine(case)
    for step in range(2):
        made.train_batch(toy.batches(step, 2))
    made.eval_batch(toy.batches(7, 2))


def test_monitors_get_what_stock_deepspeed_writes(tmp_path: Path) -> None:
    tables = []
    for name in ("stock", "ours"):
        ranks.run(_monitored, 2, f"{tmp_path}/{name}/", name == "stock")
        files = sorted((tmp_path / name).rglob("*.csv"))
        tables.append({file.name: list(csv.reader(file.open())) for file in files})
    assert tables[0].keys() == tables[1].keys() >= {"Train_Samples_train_loss.csv"}
    for name, rows in tables[0].items():
        assert [row[0] for row in tables[1][name]] == [row[0] for row in rows], name
        for mine, theirs in zip(tables[1][name][1:], rows[1:], strict=True):
            assert float(mine[1]) == pytest.approx(float(theirs[1]), rel=1e-5), name


def _resized(rank: int, world_size: int, cases: list[Case]) -> list[Any]:
    results = []
    for case in cases:
        made, losses = toy.engine(case), []
        for step, count in enumerate((2, 5, 1, 1)):
            made.set_train_batch_size(count * toy.ROWS)
            assert made.gradient_accumulation_steps() == made.micro_batches == count
            losses.append(made.train_batch(toy.batches(step, count)).item())
        with pytest.raises(ConfigError, match="not a multiple of 2"):
            made.set_train_batch_size(7)
        results.append((losses, made.global_samples, made.global_steps, made.train_batch_size()))
    return results


def test_batch_size_may_change_during_a_run() -> None:
    offload = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    offload["zero_force_ds_cpu_optimizer"] = False
    cases = [Case(layers="tied", pp=2, chunks=2, zero=zero) for zero in (0, 1, 3)]
    cases += [Case(layers="tied", pp=2, chunks=2, keys=offload)]
    results = ranks.run(_resized, 2, cases)[0]
    for losses, samples, steps, batch in results:
        assert losses == pytest.approx(results[0][0], rel=1e-5)
        assert (samples, steps, batch) == (18, 4, 2)


def _attributes(rank: int, world_size: int, path: str) -> dict[str, Any]:
    import deepspeed

    import dsx

    deepspeed.init_distributed()
    module = dsx.PipelineModule(toy.layers("plain"), num_stages=2, loss_fn=toy.loss_fn)
    made, optimizer, loader, scheduler = dsx.initialize(
        args=Namespace(deepspeed_config=path, local_rank=rank),
        model=module,
        model_parameters=[p for p in module.parameters() if p.requires_grad],
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: 1 / (1 + step)
        ),
    )
    assert loader is None
    rates = []
    for step in range(2):
        made.train_batch(toy.batches(step, 2))
        rates.append(made.get_lr()[0])
    return {
        "steps": (made.global_steps, made.global_samples, made.skipped_steps),
        "rates": rates,
        "same": made.optimizer is optimizer and made.lr_scheduler is scheduler and made.module is module,
        "sizes": (made.train_batch_size(), made.train_micro_batch_size_per_gpu(), made.micro_batches),
        "place": (made.num_stages, made.stage_id, made.is_first_stage(), made.is_last_stage()),
        "stage": (made.zero_optimization_stage(), made.wall_clock_breakdown()),
        "data": made.needs_data(),
    }


def test_what_users_read_off_an_engine(tmp_path: Path) -> None:
    """Called as DeepSpeed's tutorials call it: ``args`` with the config's path."""
    import json

    path = tmp_path / "config.json"
    path.write_text(json.dumps(toy.config(Case(zero=2, keys={"wall_clock_breakdown": True}))))
    for rank, facts in enumerate(ranks.run(_attributes, 2, str(path))):
        assert facts == {
            "steps": (2, 8, 0),
            "rates": pytest.approx([toy.ADAMW["lr"] / 2, toy.ADAMW["lr"] / 3]),
            "same": True,
            "sizes": (4, 2, 2),
            "place": (2, rank, rank == 0, rank == 1),
            "stage": (2, True),
            "data": True,
        }


def _wrong_calls(rank: int, world_size: int) -> dict[str, str]:
    import deepspeed

    import dsx

    made = toy.engine(Case())
    net = torch.nn.Linear(2, 2)
    calls = {
        "no data": (DataError, made.train_batch),
        "short": (DataError, lambda: made.train_batch(toy.batches(0, 1))),
        "loader": (DataError, lambda: made.train_batch(list(toy.batches(0, 2)))),
        "single": (DataError, lambda: made.train_batch(iter([torch.zeros(2)] * 2))),
        "no grad": (ModelError, torch.no_grad()(lambda: made.train_batch(toy.batches(0, 2)))),
        "forward": (ModelError, lambda: made.forward(1)),
        "reduce": (ModelError, lambda: made.eval_batch(toy.batches(0, 2), reduce_output="sum")),
        "module": (ModelError, lambda: dsx.initialize(model=net, config={})),
        "no config": (ConfigError, lambda: dsx.initialize(model=made.pipeline)),
    }
    assert deepspeed.comm.is_initialized()
    texts = {}
    for name, (kind, call) in calls.items():
        with pytest.raises(kind) as caught:
            call()
        texts[name] = str(caught.value)
    made.train_batch(toy.batches(0, 2))  # and it still works
    return texts


def test_wrong_calls_are_explained() -> None:
    texts = ranks.run(_wrong_calls, 1)[0]
    words = {
        "no data": "data_iter = None",
        "short": "after 1 of 2 micro-batches",
        "loader": "batches = iter(loader)",
        "single": "not a pair",
        "no grad": "use eval_batch",
        "forward": "engine.forward()",
        "reduce": 'use "avg" or None',
        "module": "not a dsx.PipelineModule",
        "no config": "there is no config",
    }
    assert {name for name, word in words.items() if word not in texts[name]} == set()


def _different(rank: int, world_size: int) -> list[str]:
    """Settings and layers that ranks would wait for each other over."""
    from torch import nn

    import dsx

    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
    }
    out = []
    for change, layers in (({"gradient_accumulation_steps": 2 + rank}, 4), ({}, 4 + 2 * rank)):
        module = dsx.PipelineModule(
            [nn.Linear(2, 2) for _ in range(layers)], num_stages=world_size, loss_fn=nn.functional.mse_loss
        )
        with pytest.raises(ConfigError) as caught:
            dsx.initialize(model=module, config=config | change)
        out.append(str(caught.value))
    return out


def test_ranks_with_other_settings_or_layers_are_refused() -> None:
    (accumulation, layers), other = ranks.run(_different, 2)
    assert other == [accumulation, layers]
    assert accumulation.startswith("gradient_accumulation_steps of rank 1: it is 3 there and 2 on rank 0")
    assert layers.startswith("layers of rank 1")


def test_a_monitor_of_deepspeeds_that_cannot_start_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    named = r"^tensorboard\.enabled = true: this monitor of DeepSpeed's cannot start \(ModuleNotFoundError: "
    with pytest.raises(ConfigError, match=named), _named({}):
        TensorBoardMonitor(TensorBoardConfig(enabled=True))
    with pytest.raises(ZeroDivisionError), _named({}):
        _ = 1 / 0
