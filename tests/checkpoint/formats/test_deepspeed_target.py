"""Checkpoints written for stock DeepSpeed: it loads them, holds the same state and trains on as before."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import made
from checkpoint import stock_checkpoints
from checkpoint.stock_checkpoints import Live, Stock, read_entry
from dsx.checkpoint.copy_plan import plan
from dsx.checkpoint.execute import ConversionOptions, execute
from dsx.checkpoint.formats.deepspeed.reader import catalog_of
from dsx.checkpoint.formats.deepspeed.target import StockLayout, target_of
from dsx.checkpoint.formats.torch_file import read_torch_file
from dsx.errors import CheckpointError
from often import often

SUB_GROUPS = (("sub_group_size", 40),)
ROUND_ROBIN = (("round_robin_gradients", True),)
ODD = (*ROUND_ROBIN, ("parameter_alignment", True))
FP32_SUMS = (("data_types", {"grad_accum_dtype": "fp32"}),)  # makes DeepSpeed use BF16_Optimizer
SAME = [
    Stock(zero=0),
    Stock(zero=0, bf16=True, groups=False),
    Stock(zero=1),
    Stock(zero=1, bf16=True, dp=3, zero_keys=ODD),
    Stock(zero=2, optimizer="SGD"),
    Stock(zero=2, bf16=True, dp=1),
    Stock(zero=3, zero_keys=SUB_GROUPS, dp=3),
    Stock(zero=3, bf16=True),
    Stock(zero=0, fp16=True, dp=1),
    Stock(zero=2, fp16=True),
    Stock(zero=1, bf16=True, dp=3, keys=FP32_SUMS),
    Stock(zero=1, pp=2),
    Stock(zero=1, pp=2, bf16=True, dp=1),
]
OTHER = [
    (Stock(zero=1), Stock(zero=3, dp=3, zero_keys=SUB_GROUPS)),
    (Stock(zero=3, dp=3, bf16=True), Stock(zero=1, fp16=True)),
    (Stock(zero=0), Stock(zero=2, bf16=True, dp=3)),
    (Stock(zero=2, optimizer="SGD", dp=1), Stock(zero=0, optimizer="SGD")),
    (Stock(zero=1, pp=2, dp=1, groups=False), Stock(zero=1, pp=4, dp=1, bf16=True, groups=False)),
    (Stock(zero=1, pp=2, dp=2), Stock(zero=0, pp=1, dp=2)),
]


# DeepSpeed's uniform cut of five layers (runtime/utils.py, partition_uniform).
BOUNDS = {0: (), 1: (0, 5), 2: (0, 3, 5), 4: (0, 2, 3, 4, 5)}


def layout_of(stock: Stock) -> StockLayout:
    return StockLayout(
        dp=stock.dp,
        zero_stage=stock.zero,
        precision=stock.precision,
        bounds=BOUNDS[stock.pp],
        tied=(("embed", (0, 4)),) if stock.pp else (),
    )


def convert(path: Path, target: Path, stock: Stock) -> Path:
    source = catalog_of(path)
    config = {**source.facts["deepspeed_config"], "zero_optimization": dict(stock.zero_keys)}
    source = replace(source, facts={**source.facts, "deepspeed_config": config})
    wanted = target_of(source, target / path.name, layout_of(stock))
    report = execute(source, wanted, plan(source, wanted.catalog), ConversionOptions(workers=1))
    assert report.notes == () or all("stays behind" in n or "is made from" in n for n in report.notes)
    for file in sorted(report.target.glob("*.pt")):
        made.check_storages(read_torch_file(report.target, file.name))
    return report.target


def test_the_sources_config_decides_where_things_lie(tmp_path: Path) -> None:
    """Optimizer state in another order than the config says would be loaded, and be wrong.

    Without alignment DeepSpeed's ``param_slice_mappings`` of round-robin groups have the wrong order.
    """
    stock = Stock(zero=2, bf16=True, zero_keys=ROUND_ROBIN)
    path, before, expected = stock_checkpoints.save(stock, tmp_path / "a")
    source = catalog_of(path)
    layout = StockLayout(dp=2, zero_stage=2, precision="bf16")
    target = target_of(source, tmp_path / "b" / path.name, layout)
    made = execute(source, target, plan(source, target.catalog), ConversionOptions(workers=1)).target
    for entry in source.entries:
        assert torch.equal(
            read_entry(catalog_of(made), catalog_of(made).by_key[entry.key]), read_entry(source, entry)
        )
    after, losses = stock_checkpoints.resume(stock, made)
    check_states(before[0], after[0], weights=False)
    assert losses == expected


def check_states(before: Live, after: Live, *, weights: bool) -> None:
    for state, tensors in before.states.items():
        if state == "weight" and not weights:
            continue
        wanted = after.states[state]
        for name, tensor in tensors.items():
            if name not in after.states["weight"]:
                continue  # on another stage
            if state == "master" and not wanted:  # an fp32 engine without ZeRO
                wanted = after.states["weight"]
            assert torch.equal(wanted[name].to(tensor.dtype), tensor), (state, name)


@pytest.mark.parametrize("stock", often(SAME, 2), ids=str)
def test_training_goes_on_bit_equal(stock: Stock, tmp_path: Path) -> None:
    path, before, expected = stock_checkpoints.save(stock, tmp_path / "a")
    made = convert(path, tmp_path / "b", stock)
    assert sorted(p.name for p in made.iterdir()) == sorted(p.name for p in path.glob("*.pt"))
    after, losses = stock_checkpoints.resume(stock, made)
    for one, other in zip(before, after, strict=True):
        check_states(one, other, weights=stock.dp == 1)
        assert (other.steps, other.scheduler, other.groups) == (one.steps, one.scheduler, one.groups)
    assert losses == expected


@pytest.mark.parametrize(("old", "new"), often(OTHER, 2), ids=str)
def test_another_layout_holds_the_same_state(old: Stock, new: Stock, tmp_path: Path) -> None:
    path, before, expected = stock_checkpoints.save(old, tmp_path / "a")
    made = convert(path, tmp_path / "b", new)
    after, losses = stock_checkpoints.resume(new, made)
    check_states(before[0], after[0], weights=False)
    assert (after[0].steps, after[0].scheduler) == (before[0].steps, before[0].scheduler)
    if (old.dp, old.precision, old.pp) == (new.dp, new.precision, new.pp):
        assert torch.allclose(torch.tensor(losses), torch.tensor(expected), rtol=1e-6)


def test_back_again_is_the_same_bytes(tmp_path: Path) -> None:
    """A -> B -> A: every file's tensors are bit-identical, structure included."""
    stock = Stock(zero=2, dp=2)
    path, *_ = stock_checkpoints.save(stock, tmp_path / "a")
    first = convert(path, tmp_path / "b", stock)
    other = convert(first, tmp_path / "c", replace(stock, zero=3, dp=3))
    second = convert(other, tmp_path / "d", stock)
    for file in first.iterdir():
        assert (second / file.name).read_bytes() == file.read_bytes()


def test_without_optimizer(tmp_path: Path) -> None:
    path, *_ = stock_checkpoints.save(Stock(zero=1, dp=1), tmp_path)
    source = catalog_of(path)
    weights = replace(source, facts={}, entries=tuple(e for e in source.entries if e.state == "weight"))
    with pytest.raises(CheckpointError, match="no optimizer groups"):
        target_of(weights, tmp_path / "b", StockLayout(dp=1, zero_stage=1))
    with pytest.raises(CheckpointError, match=r"precision = fp8.*fp32, bf16 or fp16"):
        target_of(source, tmp_path / "b", StockLayout(dp=1, zero_stage=1, precision="fp8"))
    some = replace(source, entries=tuple(e for e in source.entries if e.key != ("norm.bias", "exp_avg")))
    with pytest.raises(
        CheckpointError,
        match=r"tensor norm.bias: it has no exp_avg, which others of its optimizer group have",
    ):
        target_of(some, tmp_path / "b", StockLayout(dp=1, zero_stage=1))
    groups = (("norm.bias", "norm.weigth"),)
    with pytest.raises(CheckpointError, match=r"tensor norm.weigth: the checkpoint does not have it"):
        target_of(source, tmp_path / "b", StockLayout(dp=1, zero_stage=1, groups=groups))


def test_pipelines_that_deepspeed_does_not_have(tmp_path: Path) -> None:
    path, *_ = stock_checkpoints.save(Stock(zero=1, pp=1, dp=1), tmp_path)
    source = catalog_of(path)
    good = StockLayout(dp=1, zero_stage=1, bounds=(0, 3, 5), tied=(("embed", (0, 4)),))
    for change, problem in [
        ({"zero_stage": 2}, "zero = 2, precision = fp32, in a pipeline"),
        ({"zero_stage": 0, "precision": "bf16"}, "zero = 0, precision = bf16, in a pipeline"),
        ({"bounds": (0, 3)}, r"tensor 3.weight: it is of none of the pipeline's 3 layers"),
        ({"tied": ()}, r"tensor tied_modules.embed.weight: it is of none"),
        (
            {"bounds": (0, 3, 4, 5)},
            "stage 1 of .* layers 3 to 3: it has no tensor of optimizer group 0",
        ),
    ]:
        with pytest.raises(CheckpointError, match=problem):
            target_of(source, tmp_path / "b", replace(good, **change))
