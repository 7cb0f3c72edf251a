"""Where DeepSpeed keeps the master weights: each is the weight it stands for, and weights follow it."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import deepspeed
import pytest
import torch

import ranks
from dsx.engine.zero.master_shards import MasterShard, master_shards, refresh_weights
from often import often
from parity import dsx_run
from parity.dsx_run import Case

FP32_SUMS = ("data_types", {"grad_accum_dtype": "fp32"})
CASES = [
    Case(dp=2, zero=0),
    Case(dp=2, zero=0, bf16=True),
    Case(dp=2, pp=2, zero=1, accumulation=2, family="gpt2"),
    Case(dp=2, zero=1, bf16=True, zero_keys=(("round_robin_gradients", True),)),
    Case(dp=2, zero=1, bf16=True, extra=(FP32_SUMS,)),
    Case(dp=2, zero=2, bf16=True, zero_keys=(("parameter_alignment", True),)),
    Case(dp=2, tp=2, zero=2),
    Case(dp=2, zero=3, zero_keys=(("sub_group_size", 5000),)),
    Case(dp=2, zero=3, bf16=True, zero_keys=(("stage3_param_persistence_threshold", 300),)),
]


def compare(engine: Any) -> tuple[list[float], int]:
    """Largest difference between master and weight, by span; and elements held."""
    worst, count = [], 0
    for kept in master_shards(engine.deepspeed_engine):
        flat = kept.master.detach().view(-1)
        for span in kept.spans:
            gathered = nullcontext()
            if hasattr(span.parameter, "ds_id"):
                gathered = deepspeed.zero.GatheredParameters([span.parameter])
            with gathered:
                weight = span.parameter.detach().view(-1)[span.start : span.stop]
                part = flat[span.offset : span.offset + span.stop - span.start]
                worst.append((part.to(weight.dtype) - weight).abs().max().item())
            count += span.stop - span.start
    return worst, count


def look(rank: int, world_size: int, case: Case) -> dict[str, Any]:
    engine, _ = dsx_run.build(case, None)
    dsx_run.losses_of(engine, case, range(2))
    trained, count = compare(engine)
    kept = master_shards(engine.deepspeed_engine)
    moments = [sorted(one.moments()) for one in kept]
    numbers = [one.numbers() for one in kept]
    for one in kept:
        one.master.data.mul_(0.5).add_(1.0)
    refresh_weights(engine.deepspeed_engine)
    changed, _ = compare(engine)
    loss = engine.train_batch(dsx_run.batches(case, 2, engine.groups.dp_rank)).item()
    total = sum(getattr(p, "ds_numel", p.numel()) for p in engine.module.parameters())
    return {
        "trained": max(trained),
        "changed": max(changed),
        "count": count,
        "total": total,
        "moments": moments,
        "steps": {step for one in numbers for step in one.values()},
        "names": {name for one in numbers for name in one},
        "finite": math.isfinite(loss),
        "at": (engine.groups.pp_rank, engine.groups.tp_rank),
    }


@pytest.mark.parametrize("case", often(CASES, 2), ids=str)
def test_masters_are_the_weights(case: Case) -> None:
    found = ranks.run(look, case.world_size, case)
    for fact in found:
        assert (fact["trained"], fact["changed"], fact["finite"]) == (0, 0, True)
        assert all(names == ["exp_avg", "exp_avg_sq"] for names in fact["moments"])
        assert (fact["names"], fact["steps"]) == ({"step"}, {2.0})
    for place in {fact["at"] for fact in found}:
        replicas = [fact for fact in found if fact["at"] == place]
        held_in_all = sum(fact["count"] for fact in replicas)
        assert held_in_all == replicas[0]["total"] * (len(replicas) if case.zero == 0 else 1)


@pytest.mark.parametrize(
    ("kind", "setting", "states"),
    [
        (torch.optim.AdamW, "capturable", ("step",)),
        (torch.optim.AdamW, "fused", ("step",)),
        (torch.optim.NAdam, "capturable", ("step", "mu_product")),
        (torch.optim.ASGD, "capturable", ("step", "eta", "mu")),
    ],
)
def test_numbers_of_a_state_are_where_their_optimizer_reads_them(
    kind: Any, setting: str, states: tuple[str, ...]
) -> None:
    """As torch's own optimizer puts it when it loads a state: beside the weights for kernels that read it."""
    weight = torch.nn.Parameter(torch.ones(4, device="meta"))
    optimizer = kind([weight])
    kept = MasterShard(master=weight, group=0, spans=(), optimizer=optimizer)
    moments = {name: torch.zeros(4) for name in ("exp_avg", "exp_avg_sq")}
    for on in (False, True):
        optimizer.param_groups[0][setting] = on
        saved = {**{name: torch.tensor(3.0) for name in states}, **moments}
        optimizer.load_state_dict({**optimizer.state_dict(), "state": {0: saved}})
        there = [optimizer.state[weight][name].device for name in states]
        optimizer.state.clear()
        kept.make(sorted(moments), dict.fromkeys(states, 3.0))
        assert [optimizer.state[weight][name].device for name in states] == there
        assert (there[0].type == "meta") == on
