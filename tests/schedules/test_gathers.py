"""Which parameters stay gathered: within the budget, and with the fewest gathers where that is known."""

from __future__ import annotations

from itertools import combinations

import pytest

from dsx.schedules.builders import build, forward_only
from dsx.schedules.gathers import GATHERED, GatherPlan, gather_plan
from dsx.schedules.schedule import Action, lower

SCHEDULES = [
    ("gpipe", 2, 1, 4),
    ("1f1b", 4, 1, 6),
    ("interleaved", 2, 3, 4),
    ("looped_bfs", 2, 2, 4),
    ("interleaved_zb", 2, 2, 5),
    ("zbv", 3, 2, 5),
    ("dualpipev", 2, 2, 4),
]


def rows(
    name: str, ranks: int, chunks: int, micro_batches: int
) -> list[tuple[tuple[Action, ...], tuple[int, ...]]]:
    schedule = lower(build(name, ranks, chunks, micro_batches))
    return [(row, schedule.stages_of(rank)) for rank, row in enumerate(schedule.rows)]


def walk(row: tuple[Action, ...], plan: GatherPlan, sizes: dict[int, int]) -> tuple[dict[int, int], int]:
    """Gathers per stage and most memory, by doing what the plan says, one action after the other."""
    gathered: set[int] = set()
    gathers, peak = dict.fromkeys(sizes, 0), 0
    for action, kept in zip(row, plan.kept, strict=True):
        before = set(gathered)
        if action.op in GATHERED:
            gathers[action.stage] += action.stage not in gathered
            gathered.add(action.stage)
        assert kept <= gathered, f"{action}: {kept} are to stay, and only {gathered} are there"
        gathered = set(kept)
        peak = max(peak, sum(sizes[stage] for stage in before | gathered))
    assert not gathered, "weights change with the step"
    return gathers, peak


@pytest.mark.parametrize("case", SCHEDULES, ids=lambda case: case[0])
def test_never_above_the_budget_and_as_said(case: tuple[str, int, int, int]) -> None:
    for row, stages in rows(*case):
        for sizes in (dict.fromkeys(stages, 10), {stage: 3 + 7 * i for i, stage in enumerate(stages)}):
            uses = {s: sum(a.op in GATHERED and a.stage == s for a in row) for s in stages}
            before = None
            for budget in (0, 5, 10, 17, 25, 1000):
                plan = gather_plan(row, sizes, budget)
                gathers, peak = walk(row, plan, sizes)
                assert gathers == plan.gathers
                assert peak == plan.peak_bytes <= budget
                traffic = sum(gathers[stage] * sizes[stage] for stage in stages)
                assert budget or gathers == uses
                assert before is None or traffic <= before
                before = traffic
            assert set(gathers.values()) == {1}


def _fewest(row: tuple[Action, ...], budget: int) -> int:
    """Gathers of the best of all plans, every chunk one byte."""
    uses = [(i, a.stage) for i, a in enumerate(row) if a.op in GATHERED]
    latest: dict[int, int] = {}
    gaps = []
    for position, stage in uses:
        if stage in latest:
            gaps.append((latest[stage], position, stage))
        latest[stage] = position
    for count in range(len(gaps), -1, -1):
        for chosen in combinations(gaps, count):
            most = max((len({s for b, e, s in chosen if b <= at <= e}) for at in range(len(row))), default=0)
            if most <= budget:
                return len(uses) - count
    raise AssertionError


@pytest.mark.parametrize(
    "case", [("1f1b", 2, 1, 3), ("interleaved", 2, 2, 2), ("zbv", 2, 2, 2), ("looped_bfs", 2, 3, 1)], ids=str
)
@pytest.mark.parametrize("budget", [1, 2])
def test_the_fewest_gathers_for_chunks_of_one_size(case: tuple[str, int, int, int], budget: int) -> None:
    for row, stages in rows(*case):
        plan = gather_plan(row, dict.fromkeys(stages, 1), budget)
        assert sum(plan.gathers.values()) == _fewest(row, budget)


def test_no_gap_that_is_left_would_fit() -> None:
    sizes = {0: 5, 2: 3, 4: 2}
    for row, _ in rows("interleaved", 2, 3, 4)[:1]:
        for budget in range(11):
            plan = gather_plan(row, sizes, budget)
            for position, action in enumerate(row):
                later = [
                    i
                    for i, a in enumerate(row)
                    if i > position and a.stage == action.stage and a.op in GATHERED
                ]
                if action.op not in GATHERED or not later or action.stage in plan.kept[position]:
                    continue
                during = [
                    sum(sizes[s] for s in plan.kept[i] | (plan.kept[i - 1] if i else set()) | {action.stage})
                    for i in range(position, later[0] + 1)
                ]
                assert max(during) > budget


def test_an_evaluation_keeps_the_chunk_that_goes_on() -> None:
    row = lower(forward_only(2, 1, 5, "loop")).rows[0]
    assert gather_plan(row, {0: 8}, 8).gathers == {0: 1}
    assert gather_plan(row, {0: 8}, 7).gathers == {0: 5}
    assert gather_plan((), {}, 8).peak_bytes == 0
