"""An island that comes late goes on with the learning rate that the others have."""

from __future__ import annotations

import pytest
import torch
from deepspeed.runtime import lr_schedules

from dsx.errors import RunError
from dsx.islands.outer import set_schedule

SCHEDULES = {
    "WarmupLR": lambda o: lr_schedules.WarmupLR(o, warmup_num_steps=4),
    "WarmupDecayLR": lambda o: lr_schedules.WarmupDecayLR(o, total_num_steps=9, warmup_num_steps=4),
    "WarmupCosineLR": lambda o: lr_schedules.WarmupCosineLR(o, total_num_steps=9, warmup_num_steps=4),
    "OneCycle": lambda o: lr_schedules.OneCycle(o, 0.001, 0.01, cycle_first_step_size=4),
    "LRRangeTest": lambda o: lr_schedules.LRRangeTest(o, lr_range_test_step_size=2),
    "torch": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 9),
}


def made(name):
    parameters = [torch.nn.Parameter(torch.ones(1)) for _ in range(2)]
    optimizer = torch.optim.AdamW([{"params": [p], "lr": 0.01} for p in parameters])
    return optimizer, SCHEDULES[name](optimizer)


def rates(optimizer, scheduler, steps):
    """Of every group in each of the next steps."""
    found = []
    for _ in range(steps):
        found.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        scheduler.step()
    return found


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_rates_of_a_late_island_are_those_of_the_others(name):
    (there, theirs), (late, its) = made(name), made(name)
    rates(there, theirs, 5)
    set_schedule(its, late, theirs.state_dict())
    assert rates(late, its, 4) == rates(there, theirs, 4)


def test_another_kind_of_schedule_is_named():
    (late, its), (_, other) = made("WarmupLR"), made("torch")
    with pytest.raises(RunError, match="scheduler WarmupLR: the other islands have another one"):
        set_schedule(its, late, other.state_dict())
