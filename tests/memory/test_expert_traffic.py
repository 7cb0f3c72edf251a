"""Bytes of experts' all-to-alls in training, on real ranks, beside what plans and estimates reckon with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dsx
import ranks
from dsx.memory.job import job_of
from dsx.models.params import layer_kinds
from dsx.nn.experts import ExpertParallel
from often import often
from parity import dsx_run, oracle
from parity.dsx_run import Case

CASES = {
    "ep 2": Case(family="qwen2_moe", dp=2, ep=2),
    "ep 2, recomputed, ZeRO-3": Case(family="qwen2_moe", dp=2, ep=2, zero=3, recompute="full"),
    "ep 2 over cp 2": Case(family="qwen2_moe", cp=2, ep=2, zero=1),
    "ep 2 x pp 2, zero-bubble": Case(family="qwen2_moe", dp=2, ep=2, pp=2, zero=1, schedule="zb_h1"),
    "ep 4, bf16": Case(family="qwen2_moe", dp=4, ep=4, zero=1, bf16=True),
}


def travelled(rank: int, world_size: int, case: Case, folder: Path) -> tuple[list[int], int]:
    """Bytes of each all-to-all of a step in which all experts are equally busy, and how often a host waits.

    A host that waits elsewhere would stop the recorder, whose tensors have no values.
    """
    from dsx.hub import experts
    from dsx.nn import collectives

    over, send, sizes, waits = experts.over_ranks, collectives.dist.all_to_all_single, [], []

    def busy(hidden: Any, index: Any, weights: Any, **given: Any) -> Any:
        numbers = torch.arange(index.numel(), device=index.device).view_as(index) % given["experts"]
        return over(hidden, numbers, weights, **given)

    def counted(found: Any, x: Any, *how: Any, **named: Any) -> Any:
        sizes.append(x.numel() * x.element_size())
        return send(found, x, *how, **named)

    def read(self: Any, *told: Any) -> Any:
        waits.append(1)
        return splits(self, *told)

    with pytest.MonkeyPatch.context() as patch:
        splits = ExpertParallel.splits
        patch.setattr(experts, "over_ranks", busy)
        patch.setattr(ExpertParallel, "splits", read)
        engine, _ = dsx_run.build(case, folder)
        patch.setattr(dist, "all_to_all_single", counted)
        dsx_run.losses_of(engine, case, [0])
    return sizes, len(waits)


@pytest.mark.parametrize("name", often(CASES, 3))
def test_bytes_are_those_of_the_formula(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    folder = oracle.save_model("qwen2_moe", tmp_path / "model")
    config = dsx.load_config(dsx_run.config(case, folder), world_size=case.world_size)
    records = job_of(config, device="cpu").records
    first = layer_kinds(config.model).index("Block")
    record = records.layer(first, divided=False, hooked=False)
    events = [*record.forward, *record.backward]
    reckoned = sorted(each[3] for each in events if each[0] == "begin" and each[4:] == ("expert",))

    told, width = oracle.CONFIGS["qwen2_moe"], 2 if case.bf16 else 4
    tokens = dsx_run.MICRO_BATCH * 12 // case.cp
    rows = tokens * told["num_experts_per_tok"] * told["hidden_size"] * width
    times = 2 if case.recompute == "full" else 1
    formula = [8 * told["num_experts"]] * times + [rows] * (2 + 2 * times)
    assert reckoned == sorted(formula)

    passes = told["num_hidden_layers"] * case.accumulation // case.pp
    for sizes, waits in ranks.run(travelled, case.world_size, case, folder):
        assert sorted(sizes) == sorted(reckoned * passes)
        assert waits == times * passes
