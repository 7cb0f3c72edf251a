"""A measured step against its simulation, computed by hand."""

from __future__ import annotations

import pytest

from dsx.schedules.builders import NAMES, build, default_chunks
from dsx.schedules.schedule import TRANSFERS, Action, Op
from dsx.schedules.simulate import Costs
from dsx.schedules.trace import compare
from traced import BY_HAND, by_hand, on_paper


def _found(comparison):
    return {str(ran.action): ran for row in comparison.actions for ran in row}


def test_costs_are_medians_of_the_step_itself():
    comparison = compare(by_hand())
    costs = comparison.costs
    assert costs.forward_seconds == pytest.approx((0.010, 0.010))
    assert costs.backward_seconds == pytest.approx((0.020, 0.0225))  # 1B0 takes 20, 1B1 25
    # 1RECV_F0, 0RECV_B0 and 0RECV_B1 waited from before what they waited for; 1RECV_F1 came later.
    assert comparison.num_transfers == 3
    assert costs.transfer_seconds == pytest.approx(0.001)


def test_step_bubble_and_excess():
    # On paper: rank 1 F0 11-21, B0 21-43.5, F1 to 53.5, B1 to 76; rank 0 B0 44.5-64.5, B1 77-97.
    comparison = compare(by_hand())
    assert comparison.measured.seconds == pytest.approx(0.100)
    assert comparison.simulated.seconds == pytest.approx(0.097)
    assert comparison.ideal_seconds == pytest.approx(0.095)  # two transfers are on its path
    assert comparison.excess == pytest.approx(3 / 97)
    assert comparison.measured.bubble == pytest.approx(2 * 100 / (60 + 65) - 1)
    assert comparison.simulated.bubble == pytest.approx(2 * 97 / (60 + 65) - 1)


def test_errors_of_actions_and_what_they_waited_for():
    comparison = compare(by_hand())
    found = _found(comparison)
    late = found["1B1"]
    assert (late.rank, late.waited_for, late.held_up_by) == (1, Action(1, Op.FORWARD, 1), None)
    assert late.gap == pytest.approx(0.003)
    assert late.duration_error == pytest.approx(0.0025)
    assert late.lost == pytest.approx(0.0055)
    assert late.start_error == pytest.approx(0.0005)
    last = found["0B1"]  # late by 3, and none of it is its own
    assert last.waited_for == Action(1, Op.BACKWARD, 1)
    assert last.start_error == pytest.approx(0.003)
    assert (last.gap, last.lost) == pytest.approx((0.0, 0.0), abs=1e-12)
    assert found["0F0"].waited_for is None
    assert found["1B0"].lost == pytest.approx(-0.0025)
    assert [str(ran.action) for ran in comparison.worst(1)] == ["1B1"]
    assert len(comparison.worst(100)) == 8


def test_a_send_that_holds_up_the_next_action_is_named():
    rank0 = list(BY_HAND[0])
    rank0[1:4] = [("0SEND_F0", 10, 12), ("0F1", 12, 20), ("0SEND_F1", 20, 20)]
    held = _found(compare(by_hand((tuple(rank0), BY_HAND[1]))))["0F1"]
    assert held.gap == pytest.approx(0.002)
    assert held.held_up_by == Action(0, Op.SEND_F, 0)
    assert held.waited_for == Action(0, Op.FORWARD, 0)


def test_no_transfer_that_anybody_waited_for_is_free():
    rank1 = list(BY_HAND[1])
    rank1[0] = ("1RECV_F0", 10.5, 11)  # came after what it wanted
    rank0 = list(BY_HAND[0])
    rank0[4], rank0[6] = ("0RECV_B0", 41.5, 42), ("0RECV_B1", 79.5, 80)
    comparison = compare(by_hand((tuple(rank0), tuple(rank1))))
    assert (comparison.num_transfers, comparison.costs.transfer_seconds) == (0, 0.0)
    assert comparison.simulated.seconds == comparison.ideal_seconds == pytest.approx(0.095)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("wire", [0.0, 0.4])
def test_a_step_that_runs_as_simulated_has_no_error(name, wire):
    schedule = build(name, 3, default_chunks(name), 6)
    stages = range(schedule.num_stages)
    costs = Costs(
        forward_seconds=tuple(1.0 + 0.1 * s for s in stages),
        backward_input_seconds=tuple(1.5 + 0.05 * s for s in stages),
        backward_weight_seconds=tuple(0.5 + 0.02 * s for s in stages),
        transfer_seconds=wire,
    )
    comparison = compare(on_paper(schedule, costs))
    assert comparison.excess == pytest.approx(0.0, abs=1e-12)
    assert comparison.costs.transfer_seconds == pytest.approx(wire)
    ran = [executed for row in comparison.actions for executed in row]
    assert len(ran) == sum(a.op not in TRANSFERS for row in schedule.rows for a in row)
    for executed in ran:
        assert executed.start_error == pytest.approx(0.0, abs=1e-9)
        assert executed.duration_error == pytest.approx(0.0, abs=1e-9)
        assert executed.lost == pytest.approx(0.0, abs=1e-9)
        assert executed.held_up_by is None
