"""Schedules with divided backward: at the floor of the bubble, in 1F1B's memory, for any m."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsx.errors import ScheduleError
from dsx.schedules.builders import Options, build
from dsx.schedules.interleaved import alternate, by_group, groups, interleaved, interleaved_zb
from dsx.schedules.schedule import Action, Op, Schedule
from dsx.schedules.simulate import Costs, peak_activations, simulate, validate
from dsx.schedules.weight_fill import fill, run_ahead

SETTINGS = settings(max_examples=60, deadline=None, derandomize=True, database=None)


@st.composite
def sizes(draw):
    """(ranks, chunks, micro-batches) from the number of ranks on."""
    num_ranks = draw(st.integers(1, 8))
    return num_ranks, draw(st.integers(1, 4)), draw(st.integers(num_ranks, 4 * num_ranks))


@SETTINGS
@given(sizes())
def test_interleaved_zb_reaches_the_floor_at_the_memory_of_its_warm_up(size):
    """DESIGN section 9: with a synchronous optimizer no schedule of v chunks is below (p - 1) / (3 v m)."""
    p, v, m = size
    schedule = interleaved_zb(p, v, m)
    assert simulate(schedule).bubble == pytest.approx((p - 1) / (3 * v * m), abs=1e-9)
    group = len(groups(p, m, None)[0])
    assert max(peak_activations(schedule)) == min(m * v, p + (v - 1) * group)


@SETTINGS
@given(sizes())
def test_zb_h1_and_zbv_keep_the_memory_of_1f1b(size):
    """arXiv:2401.10241: p activations of a rank's layers; a third and a sixth of 1F1B's bubble."""
    p, _, m = size
    h1, zbv = build("zb_h1", p, 1, m), build("zbv", p, 2, m)
    assert simulate(h1).bubble == pytest.approx((p - 1) / (3 * m), abs=1e-9)
    assert simulate(zbv).bubble == pytest.approx((p - 1) / (6 * m), abs=1e-9)
    assert max(peak_activations(h1)) <= p
    assert max(peak_activations(zbv)) <= 2 * p


@SETTINGS
@given(sizes())
def test_v_half_and_v_min_keep_a_half_and_a_third_of_1f1b(size):
    """arXiv:2405.15362: (p + 2) // 2 and (p + 4) // 3 micro-batches, bubbles of p / 2m and 2p / 3m."""
    p, _, m = size
    for name, most, bubble in (
        ("v_half", (p + 2) // 2, p / (2 * m)),
        ("v_min", (p + 4) // 3, 2 * p / (3 * m)),
    ):
        schedule = build(name, p, 2, m)
        assert max(peak_activations(schedule)) <= 2 * most
        assert simulate(schedule).bubble <= bubble
        assert simulate(schedule).bubble <= simulate(build("1f1b", p, 1, m)).bubble + 0.5 / m


@SETTINGS
@given(sizes(), st.floats(0.5, 2), st.floats(0.5, 2), st.floats(0, 0.5))
def test_running_ahead_costs_no_memory_and_leaves_a_schedule_that_runs(size, first, second, wire):
    p, v, m = size
    costs = Costs(backward_input_seconds=first, backward_weight_seconds=second, transfer_seconds=wire)
    for schedule in (build("1f1b", p, 1, m), build("interleaved_zb", p, v, m), build("v_half", p, 2, m)):
        bound = max(peak_activations(schedule))
        ahead = run_ahead(schedule, [bound] * p, costs)
        validate(ahead)
        assert max(peak_activations(ahead)) <= bound


@SETTINGS
@given(
    st.sampled_from([("interleaved", "interleaved_zb"), ("1f1b", "zb_h1")]),
    st.integers(1, 6),
    st.integers(1, 3),
    st.integers(1, 18),
    st.floats(0.5, 2),
    st.floats(0.5, 2),
    st.floats(0, 0.5),
)
def test_dividing_the_backward_never_slows_a_schedule_down(names, p, v, m, first, second, wire):
    """For unequal parts and time on the wire, filled for those costs, with 1F1B's warm-up."""
    v = 1 if names[0] == "1f1b" else v
    costs = Costs(backward_input_seconds=first, backward_weight_seconds=second, transfer_seconds=wire)
    whole = build(names[0], p, v, m)
    options = Options(costs=costs, warmup_per_rank=2 if v > 1 or names[0] == "interleaved" else None)
    divided = build(names[1], p, v, m, options)
    validate(divided)
    assert simulate(divided, costs).seconds <= simulate(whole, costs).seconds + 1e-9
    assert max(peak_activations(divided)) <= max(peak_activations(whole))


def test_costs_place_the_weight_gradients():
    """Long weight gradients do not fit every wait: filled for their length the step is shorter."""
    costs = Costs(forward_seconds=1.0, backward_input_seconds=1.0, backward_weight_seconds=1.8)
    plain = build("interleaved_zb", 4, 2, 8, Options(most_live=12))
    fitted = build("interleaved_zb", 4, 2, 8, Options(most_live=12, costs=costs))
    assert plain.rows != fitted.rows
    assert simulate(fitted, costs).seconds < simulate(plain, costs).seconds


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_every_group_size_and_warm_up_runs_or_is_refused_with_the_legal_ones(num_ranks):
    for v, m, warmup in itertools.product((1, 2, 3), range(1, 3 * num_ranks + 2), range(4)):
        least = -(-warmup * (num_ranks - 1) // 2)
        for size in range(1, m + 1):
            options = {"group_size": size, "warmup_per_rank": warmup}
            if v == 1 or m < 2 * size or size >= least:
                validate(interleaved(num_ranks, v, m, **options))
            elif min(map(len, groups(num_ranks, m, size))) < least:
                with pytest.raises(ScheduleError, match=f"use group_size {least} or more"):
                    interleaved(num_ranks, v, m, **options)


def test_refused_groups_can_deadlock():
    """What the refusal is for: rank 0 waits for the last rank, which waits for rank 0."""
    p, v, m = 4, 2, 8
    parts = groups(p, m, 1)
    rows = tuple(
        alternate(
            by_group(r, p, range(v), parts),
            by_group(r, p, range(v - 1, -1, -1), parts),
            warmup=2 * (p - 1 - r) + len(parts[0]),
        )
        for r in range(p)
    )
    with pytest.raises(ScheduleError, match="deadlocks"):
        validate(Schedule("small groups", p, v, m, rows))


def test_larger_groups_hide_the_wire():
    """A wire of half a chunk's forward: groups of 2p and a warm-up of 3 hide what groups of p cannot."""
    costs = Costs(transfer_seconds=0.5)
    usual = simulate(interleaved(4, 2, 16), costs).seconds
    assert simulate(interleaved(4, 2, 16, group_size=8, warmup_per_rank=3), costs).seconds < usual


def test_a_bound_on_activations_is_kept_or_exceeded_only_by_the_forwards():
    order = build("1f1b", 4, 1, 8)
    rows = tuple(
        tuple(Action(a.stage, Op.BACKWARD_INPUT if a.op is Op.BACKWARD else a.op, a.micro_batch) for a in row)
        for row in order.rows
    )
    divided = Schedule("bounded", 4, 1, 8, rows)
    for bound in (4, 5, 8):
        assert max(peak_activations(fill(divided, [bound] * 4))) <= bound
    assert peak_activations(fill(divided, [1] * 4)) == peak_activations(order)
    with pytest.raises(ScheduleError, match="deadlocks"):
        fill(Schedule("reversed", 4, 1, 8, tuple(row[::-1] for row in rows)), [8] * 4)
