"""Searched orders: proved to run, within memory, shorter than named ones, above the bound, repeatable."""

from __future__ import annotations

import itertools

import pytest

from dsx.errors import ScheduleError
from dsx.schedules.builders import build, default_chunks
from dsx.schedules.schedule import Action, Op, Schedule
from dsx.schedules.search import MemoryLimit, SchedulingProblem, search
from dsx.schedules.simulate import Costs, peak_activations, simulate, validate

UNEVEN = (1.0, 1.4) * 4


def costs(stages, wire=0.0):
    return Costs(
        forward_seconds=stages,
        backward_input_seconds=stages,
        backward_weight_seconds=stages,
        transfer_seconds=wire,
    )


def problem(stages, ranks, count, *, wire=0.0, most=None, placement="v"):
    ones = (1,) * len(stages)
    limit = MemoryLimit(most=most, kept=ones, pending=ones, working=(0,) * len(stages))
    return SchedulingProblem((ranks, len(stages) // ranks, count), placement, costs(stages, wire), limit)


@pytest.mark.parametrize("most", [4, 7, None])
def test_an_order_runs_in_its_memory_and_is_no_longer_than_what_it_started_from(most):
    given = problem(UNEVEN, 4, 6, most=most)
    starts = [build(name, 4, 2, 6) for name in ("zbv", "v_half", "v_min")]
    fit = [start for start in starts if most is None or max(peak_activations(start)) <= most]
    found = search(given, starts, most_actions=100_000)
    validate(found.schedule)
    assert simulate(found.schedule, costs(UNEVEN)).seconds == pytest.approx(found.seconds)
    assert max(peak_activations(found.schedule)) <= (most or 100)
    assert found.seconds <= min(simulate(start, costs(UNEVEN)).seconds for start in fit)
    assert found.bound <= found.seconds * (1 + 1e-9)
    assert search(given, starts, most_actions=100_000) == found


def test_room_between_the_named_schedules_is_used():
    """Between what V-half and what ZB-V keep no named schedule has anything to say."""
    stages = (1.0, 1.4) * 8
    named = min(
        simulate(schedule, costs(stages)).seconds
        for schedule in (build(name, 8, 2, 8) for name in ("v_half", "v_min"))
    )
    found = search(problem(stages, 8, 8, most=12), [build("v_half", 8, 2, 8)], most_actions=200_000)
    assert found.seconds * 1.05 < named


@pytest.mark.parametrize(("wire", "most"), [(0.0, None), (0.0, 2), (0.3, 3), (0.3, 2), (1.0, None)])
def test_the_bound_is_below_every_order_of_a_small_pipeline(wire, most):
    """Two ranks, one chunk each, two micro-batches: every order of every row that fits."""
    stages = (1.0, 1.7)
    given = problem(stages, 2, 2, wire=wire, most=most, placement="loop")
    rows = [
        [
            row
            for row in itertools.permutations(Action(s, op, m) for op in ("F", "I", "W") for m in (0, 1))
            if all(
                row.index(Action(s, a, m)) < row.index(Action(s, b, m))
                for a, b in ("FI", "IW")
                for m in (0, 1)
            )
        ]
        for s in (0, 1)
    ]
    shortest = float("inf")
    for pair in itertools.product(*rows):
        actions = tuple(tuple(Action(a.stage, Op(a.op), a.micro_batch) for a in row) for row in pair)
        schedule = Schedule("one", 2, 1, 2, actions)
        if most is None or max(peak_activations(schedule)) <= most:
            try:
                shortest = min(shortest, simulate(schedule, costs(stages, wire)).seconds)
            except ScheduleError:
                continue
    found = search(given, most_actions=20_000)
    assert given.bound() <= shortest * (1 + 1e-9)
    assert found.seconds == pytest.approx(shortest)


@pytest.mark.parametrize("name", ["1f1b", "interleaved_zb", "zbv"])
def test_equal_stages_have_nothing_to_gain_and_the_bound_says_so(name):
    """arXiv:2401.10241: these reach the floor of their chunks with an optimizer that waits for all ranks."""
    chunks = default_chunks(name)
    start = build("zb_h1" if name == "1f1b" else name, 4, chunks, 8)
    given = problem((1.0,) * 4 * chunks, 4, 8, most=4 * chunks, placement=start.placement)
    assert given.bound() == pytest.approx(simulate(start).seconds)


def test_too_little_room_is_refused():
    with pytest.raises(ScheduleError, match="allow more activations"):
        search(problem(UNEVEN, 4, 4, most=1), most_actions=1000)
