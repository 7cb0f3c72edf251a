"""Schedules given as rows or with options, and layers that do not divide their backward."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

import ranks
from dsx.schedules.builders import Options, build
from dsx.schedules.program import Program
from dsx.schedules.simulate import simulate
from engine import toy_pipeline as toy
from engine.toy_pipeline import Case

BY_HAND = """\
0F0,0F1,2F0,2F1,2B1,2B0,0B1,0B0,0F2,2F2,2B2,0B2
1F0,1F1,3F0,3F1,3B1,3B0,1B1,1B0,1F2,3F2,3B2,1B2
"""


def test_a_schedule_written_by_hand_trains_as_in_one_process() -> None:
    program = Program.read(BY_HAND, name="mine.csv")
    case = Case(pp=2, chunks=2, micro_batches=3, module={"schedule": program})
    losses = ranks.run(toy.train_all, 2, [case])[0][0]
    assert toy.flat(losses) == pytest.approx(toy.flat(toy.oracle("plain", micro_batches=3)), rel=1e-5)


def test_four_ranks_nine_micro_batches() -> None:
    """What Megatron and torch refuse runs, with the bubble of the formula: (p - 1) / (v m)."""
    assert simulate(build("interleaved", 4, 2, 9)).bubble == pytest.approx(3 / (2 * 9), abs=1e-12)
    options = Options(group_size=5, warmup_per_rank=1)
    cases = [
        Case(layers="eight", pp=4, chunks=2, micro_batches=9, module={"schedule": schedule})
        for schedule in ("interleaved", Program(name="interleaved_zb", options=options))
    ]
    expected = toy.flat(toy.oracle("eight", micro_batches=9))
    for losses in ranks.run(toy.train_all, 4, cases)[0]:
        assert toy.flat(losses) == pytest.approx(expected, rel=1e-5)


def _warned(rank: int, world_size: int) -> tuple[list[str], list[Any]]:
    case = Case(pp=2, chunks=2, micro_batches=4, module={"schedule": "zbv"})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        losses = toy.train(case)
    return [str(w.message) for w in caught if "divides the backward" in str(w.message)], losses


def test_undivided_layers_under_a_divided_schedule_are_said_once() -> None:
    (first, losses), (second, _) = ranks.run(_warned, 2)
    assert len(first) == 1
    assert "schedule zbv" in first[0]
    assert second == []
    assert toy.flat(losses) == pytest.approx(toy.flat(toy.oracle("plain", micro_batches=4)), rel=1e-5)
