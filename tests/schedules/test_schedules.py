"""Every schedule is complete, free of deadlock and as fast and small as theory says, for any size."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsx.errors import ScheduleError
from dsx.schedules import builders
from dsx.schedules.builders import Options, build, forward_only, gpipe, interleaved, one_f_one_b, placement_of
from dsx.schedules.program import parse
from dsx.schedules.schedule import Action, Op, Schedule, lower, receive_order
from dsx.schedules.simulate import Costs, execution_order, peak_activations, simulate, validate

SETTINGS = settings(max_examples=80, deadline=None, derandomize=True, database=None)


@st.composite
def sizes(draw):
    """(ranks, chunks, micro-batches) with micro-batches up to four times the ranks."""
    num_ranks = draw(st.integers(1, 8))
    return num_ranks, draw(st.integers(1, 4)), draw(st.integers(1, 4 * num_ranks))


def legal_chunks(name, num_ranks, num_chunks):
    """``num_chunks``, or the number that the schedule insists on."""
    if placement_of(name) == "v":
        return 2
    return 1 if name in ("gpipe", "1f1b", "zb_h1") and num_ranks > 1 else num_chunks


@st.composite
def schedules(draw):
    num_ranks, num_chunks, num_micro_batches = draw(sizes())
    name = draw(st.sampled_from([*builders.NAMES, "forward_only"]))
    if name == "forward_only":
        return forward_only(num_ranks, num_chunks, num_micro_batches, draw(st.sampled_from(["loop", "v"])))
    schedule = build(name, num_ranks, legal_chunks(name, num_ranks, num_chunks), num_micro_batches)
    assert (schedule.name, schedule.placement) == (name, placement_of(name))
    return schedule


def _first_group(num_ranks: int, num_micro_batches: int) -> int:
    return -(-num_micro_batches // max(1, num_micro_batches // num_ranks))


@SETTINGS
@given(schedules())
def test_every_builder_is_complete_and_deadlock_free_with_and_without_transfers(schedule):
    validate(schedule)
    lowered = lower(schedule)
    validate(lowered)
    assert parse(lowered.to_csv(), name=schedule.name, placement=schedule.placement) == lowered


@SETTINGS
@given(schedules(), st.floats(0.1, 3), st.floats(0.1, 3), st.floats(0, 1))
def test_transfers_do_not_change_the_timeline(schedule, forward, backward, transfer):
    costs = Costs(forward_seconds=forward, backward_seconds=backward, transfer_seconds=transfer)
    assert simulate(schedule, costs) == simulate(lower(schedule), costs)


@SETTINGS
@given(sizes(), st.floats(0.5, 4))
def test_bubble_of_interleaved_is_exactly_the_paper_s_for_any_m_from_p_on(size, backward):
    p, v, m = size
    if m < p:
        return
    timeline = simulate(interleaved(p, v, m), Costs(backward_seconds=backward))
    assert timeline.bubble == pytest.approx((p - 1) / (v * m), abs=1e-9)


@pytest.mark.parametrize("builder", [gpipe, one_f_one_b])
@pytest.mark.parametrize(("p", "m"), [(1, 1), (2, 5), (4, 8), (8, 3), (8, 32)])
def test_bubble_of_gpipe_and_1f1b(builder, p, m):
    timeline = simulate(builder(p, 1, m))
    assert timeline.bubble == pytest.approx((p - 1) / m)


def test_bubbles_and_peaks_of_the_design():
    """DESIGN section 9: p=4, m=8, peak in stage activations (chunks divided by v)."""
    for schedule, bubble, peak in [
        (one_f_one_b(4, 1, 8), 0.375, 4),
        (interleaved(4, 2, 8), 0.1875, 5.5),
        (build("zb_h1", 4, 1, 8), 0.125, 4),
        (interleaved(4, 4, 8), 0.09375, 4.75),
        (build("zbv", 4, 2, 8), 0.0625, 4),
        (build("interleaved_zb", 4, 2, 8), 0.0625, 4),
        (build("v_half", 4, 2, 8), 5 / 48, 3),
        (build("v_min", 4, 2, 8), 11 / 48, 2),
    ]:
        assert simulate(schedule).bubble == pytest.approx(bubble)
        assert max(peak_activations(schedule)) / schedule.num_chunks == peak


@SETTINGS
@given(sizes())
def test_peak_activations(size):
    p, v, m = size
    g = _first_group(p, m)
    expected = tuple(min(m * v, 2 * (p - 1 - r) + (v - 1) * g + 1) for r in range(p))
    assert peak_activations(interleaved(p, v, m)) == expected
    assert peak_activations(one_f_one_b(p, 1, m)) == tuple(min(m, p - r) for r in range(p))
    assert peak_activations(gpipe(p, 1, m)) == (m,) * p
    assert set(peak_activations(forward_only(p, v, m))) == {1}
    assert peak_activations(build("looped_bfs", p, v, m)) == (m * v,) * p
    assert peak_activations(one_f_one_b(1, v, m)) == (v,)
    assert peak_activations(gpipe(1, v, m)) == (m * v,)


def test_smaller_groups_first_would_deadlock():
    """Why the larger groups go first: the same rows with the groups' order reversed cannot run."""
    p, v, groups = 4, 2, (range(4), range(4, 9))
    rows = []
    for rank in range(p):
        forwards = [(c * p + rank, m) for g in groups for c in range(v) for m in g]
        backwards = [(c * p + rank, m) for g in groups for c in reversed(range(v)) for m in g]
        warmup = 2 * (p - 1 - rank) + (v - 1) * len(groups[0])
        row = [Action(s, Op.FORWARD, m) for s, m in forwards[:warmup]]
        for i, (s, m) in enumerate(backwards):
            row += [Action(t, Op.FORWARD, n) for t, n in forwards[warmup + i : warmup + i + 1]]
            row.append(Action(s, Op.BACKWARD, m))
        rows.append(tuple(row))
    with pytest.raises(ScheduleError, match="deadlocks; waiting: rank 0 at"):
        validate(Schedule("reversed", p, v, 9, tuple(rows)))


def sent(schedule):
    """(kind, source, destination) -> (stage that receives, micro-batch) of each message, as they are sent."""
    found = {}
    for source, row in enumerate(schedule.rows):
        for action in row:
            if action.op in (Op.SEND_F, Op.SEND_B):
                stage = action.stage + (1 if action.op is Op.SEND_F else -1)
                key = (action.op[-1], source, schedule.rank_of(stage))
                found[key] = (*found.get(key, ()), (stage, action.micro_batch))
    return found


@SETTINGS
@given(schedules())
def test_every_message_of_a_channel_is_received_once_and_in_sending_order(schedule):
    lowered = lower(schedule)
    found = sent(lowered)
    received = 0
    for (kind, source, rank), messages in found.items():
        assert receive_order(lowered, rank, kind, source) == messages
        # Nothing overtakes: the builders' receivers use messages in the order in which they were sent.
        op = Op.RECV_F if kind == "F" else Op.RECV_B
        step = -1 if kind == "F" else 1
        row = [
            (a.stage, a.micro_batch)
            for a in lowered.rows[rank]
            if a.op is op and schedule.rank_of(a.stage + step) == source
        ]
        if schedule.name != "forward_only" or schedule.placement == "loop":
            assert tuple(row) == messages
        assert sorted(row) == sorted(messages)
        received += len(row)
    assert received == sum(a.op in (Op.RECV_F, Op.RECV_B) for row in lowered.rows for a in row)
    for rank, source, kind in itertools.product(range(schedule.num_ranks), range(schedule.num_ranks), "FB"):
        assert receive_order(lowered, rank, kind, source) == found.get((kind, source, rank), ())


def test_chunks_on_one_rank_need_no_transfer():
    schedule = build("interleaved", 1, 3, 2)
    assert lower(schedule) == schedule
    assert sent(schedule) == {}


def test_neighbours_on_one_rank_need_no_transfer():
    """V placement: the last rank hands stage p - 1 to stage p itself."""
    row = " ".join(map(str, lower(build("zbv", 2, 2, 1)).rows[1]))
    assert row == "1RECV_F0 1F0 2F0 2SEND_F0 2RECV_B0 2I0 1I0 1SEND_B0 2W0 1W0"


def test_transfers_touch_their_compute_action():
    row = lower(build("1f1b", 3, 1, 1)).rows[1]
    assert [str(a) for a in row] == ["1RECV_F0", "1F0", "1SEND_F0", "1RECV_B0", "1B0", "1SEND_B0"]
    row = lower(build("zb_h1", 3, 1, 1)).rows[1]
    assert [str(a) for a in row] == ["1RECV_F0", "1F0", "1SEND_F0", "1RECV_B0", "1I0", "1SEND_B0", "1W0"]


def test_wire_time_and_uneven_stages_by_hand():
    """Two ranks, one micro-batch: every action waits for the one before it."""
    costs = Costs(forward_seconds=(1.0, 3.0), backward_seconds=(2.0, 5.0), transfer_seconds=0.5)
    spans = simulate(build("1f1b", 2, 1, 1), costs).spans
    assert [(str(a), start, end) for a, start, end in spans[0]] == [("0F0", 0.0, 1.0), ("0B0", 10.0, 12.0)]
    assert [(str(a), start, end) for a, start, end in spans[1]] == [("1F0", 1.5, 4.5), ("1B0", 4.5, 9.5)]
    timeline = simulate(build("1f1b", 2, 1, 1), costs)
    assert timeline.seconds == 12.0
    assert timeline.busy_seconds == (3.0, 8.0)
    assert timeline.bubble == pytest.approx(24 / 11 - 1)


def test_costs_of_a_divided_backward():
    """The parts make up the whole unless all three are given; whatever is missing follows."""
    ops = (Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)

    def parts(**given):
        found = Costs(**given).by_op(1)
        return tuple(found[op][0] for op in ops)

    assert parts() == (2, 1, 1)
    assert parts(backward_seconds=3) == (3, 1.5, 1.5)
    assert parts(backward_seconds=3, backward_input_seconds=1) == (3, 1, 2)
    assert parts(backward_seconds=3, backward_weight_seconds=1) == (3, 2, 1)
    assert parts(backward_input_seconds=0.5) == (1.5, 0.5, 1)
    assert parts(backward_weight_seconds=0.25) == (1.25, 1, 0.25)
    both = {"backward_input_seconds": 2, "backward_weight_seconds": 2}
    assert parts(backward_seconds=3.5, **both) == (3.5, 2, 2)
    with pytest.raises(ScheduleError, match="costs of W: -1 seconds"):
        parts(backward_seconds=3, backward_input_seconds=4)


def test_wire_time_hurts_chunks():
    """DESIGN section 9: v is not free. With a wire of half a chunk's forward, v=4 loses what v=2 gains."""
    seconds = {}
    for v in (1, 2, 4):
        costs = Costs(forward_seconds=1 / v, backward_seconds=2 / v, transfer_seconds=0.25)
        seconds[v] = simulate(build("interleaved", 4, v, 8), costs).seconds
    free = {
        v: simulate(
            build("interleaved", 4, v, 8), Costs(forward_seconds=1 / v, backward_seconds=2 / v)
        ).seconds
        for v in seconds
    }
    assert free[4] < free[2] < free[1]
    assert seconds[4] - free[4] > seconds[2] - free[2]


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda rows: rows[1:], "1 rows for 2 ranks"),
        (lambda rows: (rows[0][1:], rows[1]), "rank 0: it lacks 0F0"),
        (lambda rows: ((*rows[0], rows[0][0]), rows[1]), "repeats 0F0"),
        (lambda rows: (rows[1], rows[0]), "rank 0: it lacks"),
        (lambda rows: (tuple(reversed(rows[0])), rows[1]), "deadlocks"),
    ],
)
@pytest.mark.parametrize("lowered", [False, True])
def test_broken_schedules_are_refused(edit, said, lowered):
    schedule = build("1f1b", 2, 1, 3)
    if lowered:
        schedule = lower(schedule)
    with pytest.raises(ScheduleError, match=said):
        validate(replace(schedule, rows=edit(schedule.rows)))


def _edited(name, rank, edit, *, lowered=False):
    """A built schedule with one row changed."""
    schedule = build(name, 2, 2 if name == "zbv" else 1, 2)
    schedule = lower(schedule) if lowered else schedule
    row = edit([str(action) for action in schedule.rows[rank]])
    rows = [*schedule.rows]
    rows[rank] = tuple(map(Action.parse, row))
    return replace(schedule, rows=tuple(rows))


def _swap(first, second):
    def edit(row):
        i, j = row.index(first), row.index(second)
        row[i], row[j] = row[j], row[i]
        return row

    return edit


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda row: [a for a in row if a != "1W1"], "rank 1: it lacks 1W1"),
        (lambda row: [a for a in row if a != "1I0"], "rank 1: it lacks 1I0"),
        (lambda row: [*row, "1W0"], "rank 1: it repeats 1W0"),
        (lambda row: [*row, "1B0"], "does not own 1B0. Fix: divide this backward into 1I0 and its W, or"),
        (lambda row: [*row, "0W0"], "rank 1: it does not own 0W0"),
        (_swap("1I1", "1W1"), "rank 1 at 1W1 for 1I1, misordered: that comes later in this row"),
        (_swap("1F0", "1I0"), "rank 1 at 1I0 for 1F0, misordered"),
        (_swap("1F0", "1F1"), "rank 0 at 0I0 for 1I0; rank 1 at 1I0 for 1F0, misordered"),
    ],
)
def test_a_broken_divided_backward_is_refused_with_the_action_s_name(edit, said):
    with pytest.raises(ScheduleError) as error:
        validate(_edited("zb_h1", 1, edit))
    assert said in str(error.value)


def test_rows_of_the_other_placement_are_refused():
    schedule = build("zbv", 2, 2, 2)
    with pytest.raises(ScheduleError, match="rank 0: it lacks 2F0"):
        validate(replace(schedule, placement="loop"))


def test_a_missing_send_and_a_late_receive_are_refused():
    schedule = lower(build("1f1b", 2, 1, 2))
    without = tuple(a for a in schedule.rows[0] if str(a) != "0SEND_F1")
    with pytest.raises(ScheduleError, match="lacks 0SEND_F1"):
        validate(replace(schedule, rows=(without, schedule.rows[1])))
    row = list(schedule.rows[1])
    row[0], row[1] = row[1], row[0]
    assert str(row[0]) == "1F0"
    with pytest.raises(ScheduleError, match="rank 1 at 1F0 for 1RECV_F0"):
        validate(replace(schedule, rows=(schedule.rows[0], tuple(row))))


def test_long_reports_are_cut_short():
    schedule = build("gpipe", 16, 1, 4)
    with pytest.raises(ScheduleError, match="and 8 more"):
        list(execution_order(replace(schedule, rows=tuple(row[::-1] for row in schedule.rows))))


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: build("zigzag", 2, 1, 2), "zigzag"),
        (lambda: build("1f1b", 2, 2, 2), "chunks = 2"),
        (lambda: build("gpipe", 2, 2, 2), "chunks = 2"),
        (lambda: build("zb_h1", 2, 2, 2), "chunks = 2"),
        (lambda: build("zbv", 2, 3, 2), "zbv, chunks = 3"),
        (lambda: build("dualpipev", 2, 1, 2), "dualpipev, chunks = 1"),
        (lambda: build("zbv", 2, 2, 0), "micro-batches = 0"),
        (lambda: build("1f1b", 2, 1, 2, Options(group_size=2)), "use one of interleaved, interleaved_zb"),
        (lambda: build("zbv", 2, 2, 2, Options(most_live=3)), "use one of interleaved_zb, zb_h1"),
        (lambda: build("interleaved_zb", 4, 2, 8, Options(most_live=7)), "use 8 to 16"),
        (lambda: build("interleaved", 4, 2, 8, Options(group_size=0)), "group_size = 0"),
        (lambda: build("interleaved", 4, 2, 8, Options(warmup_per_rank=-1)), "warmup_per_rank = -1"),
        (lambda: build("interleaved", 4, 2, 8, Options(group_size=2)), "use group_size 3 or more"),
        (lambda: placement_of("zigzag"), "zigzag"),
        (lambda: build("interleaved", 0, 2, 2), "pipeline ranks = 0"),
        (lambda: build("interleaved", 2, 0, 2), "chunks = 0"),
        (lambda: forward_only(2, 2, 0), "micro-batches = 0"),
        (lambda: lower(lower(build("1f1b", 2, 1, 2))), "it has transfers already"),
        (lambda: simulate(build("1f1b", 2, 1, 2), Costs(forward_seconds=(1.0,))), "forward_seconds"),
        (lambda: parse("", name="x"), "no actions"),
        (lambda: parse("0F0,zero", name="x"), "zero"),
        (lambda: parse("0F0\n1F0,2F0", name="x"), "3 virtual stages"),
    ],
)
def test_wrong_calls_name_what_is_wrong(call, said):
    with pytest.raises(ScheduleError) as error:
        call()
    assert said in str(error.value)


def test_a_schedule_at_scale():
    """p=64, v=4, m=256: 131072 actions, about a second."""
    schedule = interleaved(64, 4, 256)
    assert simulate(schedule).bubble == pytest.approx(63 / (4 * 256))
    assert peak_activations(schedule)[0] == 2 * 63 + 3 * 64 + 1
