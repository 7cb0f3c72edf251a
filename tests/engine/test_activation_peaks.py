"""Predicted activation memory against a count of what autograd really keeps in a training step."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

import dsx
import ranks
from dsx.models.spec import ModelSpec
from dsx.nn.split import WeightGradients
from dsx.parallel.groups import make_groups
from dsx.planner.partition_search import peak_bytes
from dsx.planner.profile import stage_costs
from dsx.schedules.builders import default_chunks
from dsx.train.recipe import build_engine
from parity import dsx_run
from parity.dsx_run import Case
from parity.oracle import CONFIGS

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
    # Rotary tables are the same in all blocks and micro-batches, so that a profile has them in none.
    model, tables = config.model, 0
    if isinstance(model, ModelSpec) and model.rope and config.dsx.recompute == "none":
        tables = 2 * config.sequence_length * model.rotary_size * torch.float32.itemsize
    # Recomputed tensors are kept where no hook sees them.
    layers = profile.layers[config.dsx.recompute]
    stages = [replace(each, working_bytes=0) for each in stage_costs(layers, config.stage_map.bounds)]
    return _counted(engine, case), peak_bytes(schedule, stages)[engine.groups.pp_rank] + tables


def _counted(engine: Any, case: Case) -> int:
    """The most bytes that a step keeps on this rank."""
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
    return peak


def deep(rank: int, world_size: int, schedules: list[str]) -> list[int]:
    """Per schedule, the most bytes that a step of 2 p micro-batches keeps on this rank."""
    found = []
    for name in schedules:
        case = Case(pp=world_size, chunks=default_chunks(name), accumulation=2 * world_size, schedule=name)
        config = dsx_run.config(case, None)
        sizes = {
            "num_hidden_layers": 4 * world_size,
            "hidden_size": 96,
            "head_dim": 24,
            "intermediate_size": 256,
        }
        config["dsx"]["model"]["config"] = CONFIGS["llama"] | sizes
        resolved = dsx.load_config(config, world_size=world_size)
        inner = {len(resolved.stage_map.layers(stage)) for stage in range(1, world_size - 1)}
        assert inner == {4 // case.chunks}
        found.append(_counted(build_engine(resolved, make_groups(resolved.mesh)), case))
    return found


@pytest.mark.parametrize("num_ranks", [4, pytest.param(8, marks=pytest.mark.slow)])
def test_v_half_and_v_min_keep_what_theory_says_on_real_ranks(num_ranks: int) -> None:
    """arXiv:2405.15362: p // 2 + 1 and (p + 4) // 3 micro-batches on every rank; 1F1B keeps p on one."""
    schedules = {"1f1b": num_ranks, "v_half": num_ranks // 2 + 1, "v_min": (num_ranks + 4) // 3}
    peaks = ranks.run(deep, num_ranks, list(schedules))
    for place, kept in enumerate(schedules.values()):
        # The first rank also keeps token ids, and in a V what the head and the loss need.
        most = max(rank[place] for rank in peaks) / max(rank[0] for rank in peaks)
        assert most == pytest.approx(kept / num_ranks, rel=0.05)
    assert all(rank[place] > 0.95 * peaks[0][place] for rank in peaks for place in (1, 2)), "not balanced"


def test_peak_of_a_real_step() -> None:
    for seen in ranks.run(peaks, 2, CASES):
        for case, (counted, predicted) in zip(CASES, seen, strict=True):
            # Token ids are views of one tensor here, and one tensor each where they are measured.
            assert counted == pytest.approx(predicted, rel=0.01), str(case)
