"""Runs go on from what ``dsx reshard`` makes of their checkpoints: dsx in any layout, and stock DeepSpeed."""

from __future__ import annotations

import json

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import ranks
from dsx.checkpoint.open import open_checkpoint
from dsx.checkpoint.read import compare
from often import often
from parity import dsx_run, oracle
from parity.dsx_run import Case

COMMAND = ("reshard",)
STEPS = 10


def begin(rank: int, world_size: int, case: Case, folder: str) -> list[float]:
    """Two steps, a save, and the rest of the run without any interruption."""
    engine, _ = dsx_run.build(case, None)
    dsx_run.losses_of(engine, case, range(2))
    engine.save_checkpoint(folder, tag="saved")
    return dsx_run.losses_of(engine, case, range(2, 2 + STEPS))


def go_on(rank: int, world_size: int, case: Case, folder: str, again: str) -> list[float]:
    engine, _ = dsx_run.build(case, None)
    engine.load_checkpoint(folder)
    assert engine.global_steps == 2
    engine.save_checkpoint(again, tag="again")
    return dsx_run.losses_of(engine, case, range(2, 2 + STEPS))


def stock_engine(family: str, zero: int, world_size: int):
    """The Hugging Face model under stock DeepSpeed."""
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo")
    config = dsx_run.config(Case(family=family, dp=world_size, zero=zero, accumulation=2), None)
    del config["dsx"]
    engine, *_ = deepspeed.initialize(model=oracle.hf_model(family), config=config)
    return engine


def train_stock(engine, family: str, rank: int, world_size: int, first: int, count: int) -> list[float]:
    case, losses = Case(family=family, dp=world_size, accumulation=2), []
    for step in range(first, first + count):
        parts = []
        for inputs, labels in dsx_run.batches(case, step, rank):
            loss = F.cross_entropy(engine(input_ids=inputs).logits.flatten(0, 1), labels.flatten())
            engine.backward(loss)
            engine.step()
            parts.append(loss.detach())
        mean = torch.stack(parts).mean()
        dist.all_reduce(mean)
        losses.append(mean.item() / world_size)
    return losses


def begin_stock(rank: int, world_size: int, family: str, zero: int, folder: str) -> list[float]:
    """Two steps, a save, the rest of the run."""
    engine = stock_engine(family, zero, world_size)
    train_stock(engine, family, rank, world_size, 0, 2)
    engine.save_checkpoint(folder, tag="saved")
    return train_stock(engine, family, rank, world_size, 2, STEPS)


def go_on_stock(rank: int, world_size: int, family: str, zero: int, folder: str) -> list[float]:
    engine = stock_engine(family, zero, world_size)
    path, _ = engine.load_checkpoint(folder)
    assert path is not None
    assert engine.global_steps == 2
    return train_stock(engine, family, rank, world_size, 2, STEPS)


@pytest.mark.parametrize(("family", "zero"), often([("llama", 1), ("gpt2", 2), ("llama", 3)], 3))
def test_a_dsx_run_goes_on_in_stock_deepspeed(dsx, tmp_path, family, zero):
    before = Case(family=family, tp=2, pp=2, chunks=2, zero=3 if zero == 1 else 1, accumulation=4)
    expected = ranks.run(begin, before.world_size, before, str(tmp_path / "run"))[0]
    to = ("--to", "deepspeed", "--names", "hf", "--data", 2, "--zero", zero)
    code, _, err = dsx(tmp_path / "run", tmp_path / "other" / "saved", *to)
    assert (code, err) == (0, "")
    found = ranks.run(go_on_stock, 2, family, zero, str(tmp_path / "other"))[0]
    assert found == pytest.approx(expected, rel=2e-5)


@pytest.mark.parametrize(("family", "zero"), often([("llama", 1), ("gpt2", 3)], 2))
def test_a_stock_run_goes_on_in_dsx(dsx, tmp_path, family, zero):
    """From ZeRO under stock DeepSpeed, by Hugging Face's names, to tensor parallelism and a pipeline."""
    after = Case(family=family, tp=2, pp=2, zero=2 if zero == 1 else 1, accumulation=4)
    expected = ranks.run(begin_stock, 2, family, zero, str(tmp_path / "run"))[0]
    config = tmp_path / "config.json"
    config.write_text(json.dumps(dsx_run.config(after, None)))
    folder = tmp_path / "other"
    code, _, err = dsx(tmp_path / "run", folder / "saved", config, "--gpus", 4)
    assert (code, err) == (0, "")
    found = ranks.run(go_on, after.world_size, after, str(folder), str(tmp_path / "again"))[0]
    assert found == pytest.approx(expected, rel=2e-5)


@pytest.mark.parametrize(
    ("before", "after"),
    often(
        [
            (
                Case(family="gpt2", pp=2, zero=3, accumulation=4),
                Case(family="gpt2", tp=2, dp=2, zero=2, accumulation=2),
            ),
            (
                Case(family="llama", dp=2, zero=1, accumulation=2),
                Case(family="llama", tp=2, pp=2, chunks=2, zero=3, accumulation=4),
            ),
        ],
        2,
    ),
    ids=str,
)
def test_a_run_goes_on_in_another_layout(dsx, tmp_path, before, after):
    expected = ranks.run(begin, before.world_size, before, str(tmp_path / "run"))[0]
    to = f"tp={after.tp},pp={after.pp},chunks={after.chunks},dp={after.dp},zero={after.zero}"
    code, out, err = dsx(tmp_path / "run", tmp_path / "other" / "saved", "--to", to)
    assert (code, err) == (0, "")
    assert "nothing" not in out.rpartition("checked")[2]
    assert "stays behind" not in out
    again = tmp_path / "again"
    found = ranks.run(go_on, after.world_size, after, str(tmp_path / "other"), str(again))[0]
    assert found == pytest.approx(expected, rel=2e-5)
    # What the engine held after loading is what the first one had saved, moments and all.
    same = list(compare(open_checkpoint(tmp_path / "run"), open_checkpoint(again)))
    assert {one.state for one in same} == {"weight", "exp_avg", "exp_avg_sq"}
    assert all(one.equal for one in same)
