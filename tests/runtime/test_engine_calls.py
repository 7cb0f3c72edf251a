"""Which calls a step makes, and that all three ways train alike."""

from __future__ import annotations

from typing import Any

import pytest

import ranks
from runtime import toy_pipeline as toy
from runtime.toy_pipeline import Case

CASES = {
    "PlainCalls": [
        Case(pp=2, chunks=2, zero=0),
        Case(pp=2, chunks=2, zero=1, layers="tied"),
        Case(pp=2, chunks=2, zero=2),
        Case(pp=2, chunks=2, zero=1, module={"schedule": "zbv"}),
        Case(pp=2, chunks=2, zero=1, layers="tuples", module={"partition_method": [1, 1, 1, 2]}),
        Case(pp=2, chunks=2, zero=1, bf16=True, keys={"data_types": {"grad_accum_dtype": "fp32"}}),
    ],
    "DirectCalls": [
        Case(pp=2, chunks=2, zero=1, keys={"data_types": {"grad_accum_dtype": "bf16"}}),
        Case(pp=2, chunks=2, zero=0, bf16=True),
    ],
    "EngineCalls": [
        Case(pp=2, chunks=2, zero=3),
        Case(pp=2, chunks=2, zero=1, keys={"wall_clock_breakdown": True}),
        Case(pp=2, chunks=2, zero=1, zero_keys={"offload_optimizer": {"device": "cpu"}}),
    ],
}


def _trained(rank: int, world_size: int, cases: list[Case]) -> list[tuple[str, Any, list[int]]]:
    found = []
    for case in cases:
        made = toy.engine(case)
        hooks = [len(p._post_accumulate_grad_hooks or ()) for p in made.module.parameters()]
        found.append((type(made._calls).__name__, toy.train(case, made), hooks))
    return found


@pytest.mark.parametrize("way", CASES)
def test_the_cheapest_right_way(way: str) -> None:
    cases = CASES[way]
    for case, (name, losses, hooks) in zip(cases, ranks.run(_trained, 2, cases)[0], strict=True):
        assert name == way, case
        if way == "PlainCalls":
            # BF16_Optimizer's gradients are added up by one of dsx's.
            assert set(hooks) == {int(case.bf16)}, "DeepSpeed still counts gradients"
        expected = toy.oracle(case.layers, micro_batches=2)
        exact = not (case.bf16 or case.keys.get("data_types"))
        assert toy.flat(losses) == pytest.approx(toy.flat(expected), rel=1e-5 if exact else 3e-2), case
