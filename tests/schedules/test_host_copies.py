"""When inputs that are on the host come back, by schedules of every kind."""

from __future__ import annotations

import pytest

from dsx.schedules.builders import build
from dsx.schedules.host_copies import host_plan
from dsx.schedules.schedule import TRANSFERS, Op, Schedule, lower
from dsx.schedules.simulate import simulate
from dsx.schedules.timeline import svg
from schedules.test_timeline import SCHEDULES


@pytest.mark.parametrize("schedule", [*SCHEDULES, build("gpipe", 3, 1, 5), build("zb_h1", 3, 1, 6)])
def test_every_input_is_there_before_its_backward_and_was_gone_before(schedule: Schedule) -> None:
    """It comes after its forward, beside one computation of the rank and no more."""
    lowered = lower(schedule)
    for rank, row in enumerate(lowered.rows):
        plan = host_plan(lowered, rank)
        places = {(each.op, each.stage, each.micro_batch): place for place, each in enumerate(row)}
        backs = [each for each in row if each.op in (Op.BACKWARD, Op.BACKWARD_INPUT)]
        came = {key: at for at, keys in plan.returns.items() for key in keys}
        assert set(came) == {(b.stage, b.micro_batch) for b in backs if b.stage not in plan.stays}
        for back in backs:
            forward = places[Op.FORWARD, back.stage, back.micro_batch]
            until = places[back.op, back.stage, back.micro_batch]
            between = [each for each in row[forward + 1 : until] if each.op not in TRANSFERS]
            if back.stage in plan.stays:
                assert not between
                continue
            at = came[back.stage, back.micro_batch]
            beside = [each for each in row[at:until] if each.op not in TRANSFERS]
            assert forward < at <= until
            assert len(beside) == min(1, len(between))


def test_a_picture_has_a_foot_for_each_and_says_whose_it_is() -> None:
    schedule = build("1f1b", 4, 1, 6)
    timeline = simulate(schedule)
    plain, marked = (svg(schedule, timeline, offloads=offloads) for offloads in (False, True))
    count = sum(len(host_plan(schedule, rank).returns) for rank in range(4))
    assert marked.count('height="4"') == marked.count("from the host comes the last input") == count == 18
    assert "host" not in plain
