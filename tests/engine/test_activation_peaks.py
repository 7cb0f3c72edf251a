"""Predicted activation memory against a count of what autograd really keeps in a training step."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

import ranks
from dsx.nn.split import WeightGradients
from dsx.planner.partition_search import peak_bytes
from dsx.planner.profile import stage_costs
from parity import dsx_run
from parity.dsx_run import Case

CASES = [
    Case(family="gpt2", pp=2, zero=1, accumulation=4, schedule="1f1b"),
    Case(family="llama", pp=2, zero=1, accumulation=4, schedule="zb_h1"),
    Case(family="gpt2", pp=2, chunks=2, zero=1, accumulation=4, schedule="interleaved_zb"),
    Case(family="llama", pp=2, chunks=2, zero=1, accumulation=4, schedule="zbv", recompute="selective"),
    Case(family="gpt2", pp=2, chunks=2, zero=1, accumulation=4, schedule="looped_bfs", recompute="full"),
]


class Kept:
    """A saved tensor; counts its storage while it lives."""

    def __init__(self, tensor: torch.Tensor, live: Counter[tuple[int, int]]) -> None:
        storage = tensor.untyped_storage()
        self.tensor, self._live, self._key = tensor, live, (storage.data_ptr(), storage.nbytes())
        live[self._key] += 1

    def __del__(self) -> None:
        self._live[self._key] -= 1
        if not self._live[self._key]:
            del self._live[self._key]


def peaks(rank: int, world_size: int, cases: list[Case]) -> list[tuple[int, int]]:
    """Per case, this rank's (counted, predicted) peak in bytes."""
    return [_peak(case) for case in cases]


def _peak(case: Case) -> tuple[int, int]:
    from dsx.planner.profiler import measure_model

    engine, config = dsx_run.build(case, None)
    fast = config.dsx.model_copy(update={"profile_micro_batches": 1})
    profile = measure_model(replace(config, dsx=fast), engine.groups)
    schedule = config.program.build(case.pp, case.chunks, case.accumulation)
    costs = stage_costs(profile.layers[config.dsx.recompute], config.stage_map.bounds)
    # Recomputed tensors are kept where no hook sees them.
    predicted = peak_bytes(schedule, replace(costs, working_bytes=(0,) * schedule.num_stages))

    own = {p.untyped_storage().data_ptr() for p in engine.pipeline.chunks.parameters()}
    live: Counter[tuple[int, int]] = Counter()
    peak = 0

    split = engine.pipeline.split or WeightGradients()

    def look() -> None:
        nonlocal peak
        peak = max(peak, sum(nbytes for _, nbytes in live) + split.kept_bytes())

    def pack(tensor: torch.Tensor) -> Any:
        if tensor.untyped_storage().data_ptr() in own:
            return tensor
        kept = Kept(tensor, live)
        look()
        return kept

    def unpack(kept: Any) -> torch.Tensor:
        return kept.tensor if isinstance(kept, Kept) else kept

    accumulate = split.accumulate
    split.accumulate = lambda key: (look(), accumulate(key))[1]  # type: ignore[method-assign]
    with saved_tensors_hooks(pack, unpack):
        engine.train_batch(dsx_run.batches(case, 0, engine.groups.dp_rank))
    assert not live, "a step keeps nothing"
    return peak, predicted[engine.groups.pp_rank]


def test_peak_of_a_real_step() -> None:
    for seen in ranks.run(peaks, 2, CASES):
        for case, (counted, predicted) in zip(CASES, seen, strict=True):
            # Token ids are views of one tensor here, and one tensor each where they are measured.
            assert counted == pytest.approx(predicted, rel=0.01), str(case)
