"""A resumed run is the uninterrupted run: bit-equal losses, weights and optimizer, RNG included."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import ranks
from dsx.errors import CheckpointError
from often import often
from parity import dsx_run
from parity.dsx_run import Case

CASES = [
    # NAdam keeps a product of its momenta, one number for each tensor.
    Case(dp=2, zero=0, extra=(("optimizer", {"type": "NAdam", "params": {"lr": 1e-3}}),)),
    Case(family="gpt2", pp=2, zero=1, accumulation=2),
    Case(family="gpt2", tp=2, dp=2, zero=2),
    Case(tp=2, pp=2, chunks=2, dp=2, zero=3, accumulation=2),
    Case(family="gpt2", pp=2, dp=2, zero=1, bf16=True),
    Case(pp=2, zero=0, bf16=True),
    Case(
        pp=2,
        chunks=2,
        zero=2,
        zero_keys=(("offload_optimizer", {"device": "cpu"}),),
        extra=(("zero_force_ds_cpu_optimizer", False),),
    ),
]
SCHEDULER = (
    "scheduler",
    {"type": "WarmupDecayLR", "params": {"warmup_max_lr": 3e-3, "warmup_num_steps": 3, "total_num_steps": 8}},
)


def steps(engine, case: Case, first: int, count: int) -> list[float]:
    losses = []
    for step in range(first, first + count):
        losses.append(engine.train_batch(dsx_run.batches(case, step, engine.groups.dp_rank)).item())
        losses.extend([engine.get_global_grad_norm(), engine.get_lr()[0], torch.rand(()).item()])
    return losses


def save_and_go_on(rank: int, world_size: int, case: Case, folder: str) -> list[float]:
    engine, _ = dsx_run.build(case, None)
    steps(engine, case, 0, 3)
    engine.save_checkpoint(folder, client_state={"data_cursor": 3 * case.rows})
    return steps(engine, case, 3, 3)


def load_and_go_on(rank: int, world_size: int, case: Case, folder: str) -> list[float]:
    engine, _ = dsx_run.build(case, None)
    path, client_state = engine.load_checkpoint(folder)
    assert path.name == "global_step3"
    for same in (path, os.path.relpath(path), path.parent.parent):  # itself, and a run's folder of them
        assert engine.load_checkpoint(same) == (path, client_state)
    assert client_state == {"data_cursor": 3 * case.rows}
    assert (engine.global_steps, engine.global_samples) == (3, 3 * case.rows)
    return steps(engine, case, 3, 3)


@pytest.mark.parametrize("case", often(CASES, 2), ids=str)
def test_resume_is_bit_equal(case: Case, tmp_path: Path) -> None:
    case = Case(
        **{**{f: getattr(case, f) for f in Case.__dataclass_fields__}, "extra": (*case.extra, SCHEDULER)}
    )
    going_on = ranks.run(save_and_go_on, case.world_size, case, str(tmp_path / "checkpoints"))
    resumed = ranks.run(load_and_go_on, case.world_size, case, str(tmp_path / "checkpoints"))
    assert resumed == going_on
    assert len({row[0] for row in going_on}) == 1, "every rank gets the same loss"


def test_another_model_or_optimizer_is_refused(tmp_path: Path) -> None:
    saved = Case(pp=2, zero=1, accumulation=2)
    ranks.run(save_and_go_on, 2, saved, str(tmp_path))
    other = ("optimizer", {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}})
    allowed = ("zero_allow_untested_optimizer", True)
    for case, words in (
        (Case(family="gpt2", pp=2, zero=1, accumulation=2), "another model"),
        (Case(dp=2, zero=1, accumulation=2, extra=(other, allowed)), "whose states are others"),
    ):
        with pytest.raises(ranks.RankError) as raised:
            ranks.run(load_and_go_on, 2, case, str(tmp_path))
        assert isinstance(raised.value.error, CheckpointError)
        assert words in str(raised.value.error)
