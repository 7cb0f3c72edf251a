"""Orders of the builders against stock DeepSpeed, torch.distributed.pipelining and reviewed files."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from deepspeed.runtime.pipe.schedule import BackwardPass, ForwardPass, TrainSchedule
from torch.distributed.pipelining import schedules as torch_schedules
from torch.distributed.pipelining._utils import generate_stage_to_rank_mapping

from dsx.parallel.stages import StageMap
from dsx.schedules.builders import Options, build, gpipe, interleaved, one_f_one_b
from dsx.schedules.program import load, parse
from dsx.schedules.schedule import Action, Op, Schedule, lower
from dsx.schedules.simulate import Costs, peak_activations, simulate, validate

GOLDEN = Path(__file__).parent / "schedules"


def _deepspeed_1f1b(num_ranks: int, num_micro_batches: int) -> str:
    lines = []
    for rank in range(num_ranks):
        counts = {ForwardPass: 0, BackwardPass: 0}
        cells = []
        for commands in TrainSchedule(num_micro_batches, num_ranks, rank).steps():
            for command in commands:
                if type(command) in counts:
                    # DeepSpeed names buffers, not micro-batches; each kind runs micro-batches in order.
                    letter = "F" if isinstance(command, ForwardPass) else "B"
                    cells.append(f"{rank}{letter}{counts[type(command)]}")
                    counts[type(command)] += 1
        lines.append(",".join(cells) + "\n")
    return "".join(lines)


def _torch_csv(rows: list[list[object]]) -> str:
    """Compute actions only: torch also writes idle slots (None) and gradient reductions."""
    kept = [[str(a) for a in row if a is not None and str(a).find("REDUCE") < 0] for row in rows]
    return "".join(",".join(row) + "\n" for row in kept)


def _torch_interleaved(num_ranks: int, num_chunks: int, num_micro_batches: int) -> str:
    """torch's order without stages or process groups: its own method on an object with its numbers set."""
    schedule = object.__new__(torch_schedules.ScheduleInterleaved1F1B)
    schedule.pp_group_size = num_ranks
    schedule.n_local_stages = num_chunks
    schedule._n_microbatches = num_micro_batches
    schedule.number_of_rounds = max(1, num_micro_batches // num_ranks)
    schedule.microbatches_per_round = num_micro_batches // schedule.number_of_rounds
    assert num_micro_batches % schedule.number_of_rounds == 0, "torch refuses this one"
    return _torch_csv([schedule._calculate_single_rank_operations(rank) for rank in range(num_ranks)])


def _torch_gpipe(num_ranks: int, num_micro_batches: int) -> str:
    schedule = object.__new__(torch_schedules.ScheduleGPipe)
    schedule._num_stages = num_ranks
    schedule._n_microbatches = num_micro_batches
    order = schedule._get_pipeline_order()
    return _torch_csv([order[rank] for rank in range(num_ranks)])


@pytest.mark.parametrize("num_ranks", range(1, 9))
def test_1f1b_is_deepspeed_s_train_schedule(num_ranks):
    for num_micro_batches in range(1, 4 * num_ranks + 1):
        ours = one_f_one_b(num_ranks, 1, num_micro_batches).to_csv()
        assert ours == _deepspeed_1f1b(num_ranks, num_micro_batches)


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("num_chunks", [1, 2, 3, 4])
def test_interleaved_is_torch_s_order(num_ranks, num_chunks):
    for multiple in range(1, 5):
        ours = interleaved(num_ranks, num_chunks, multiple * num_ranks).to_csv()
        assert ours == _torch_interleaved(num_ranks, num_chunks, multiple * num_ranks)


@pytest.mark.parametrize(
    ("num_ranks", "num_micro_batches"), [(4, 1), (4, 2), (4, 3), (8, 5), (4, 10), (3, 8), (4, 15), (5, 14)]
)
def test_interleaved_is_torch_s_order_where_torch_takes_an_uneven_number(num_ranks, num_micro_batches):
    for num_chunks in (2, 3):
        ours = interleaved(num_ranks, num_chunks, num_micro_batches).to_csv()
        assert ours == _torch_interleaved(num_ranks, num_chunks, num_micro_batches)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
def test_gpipe_is_torch_s_order(num_ranks):
    for num_micro_batches in (1, 2, 7, 16):
        assert gpipe(num_ranks, 1, num_micro_batches).to_csv() == _torch_gpipe(num_ranks, num_micro_batches)


def _torch_looped(cls: type, num_ranks: int, num_chunks: int, num_micro_batches: int) -> str:
    """As :func:`_torch_interleaved`, for torch's other schedules; overlapped pairs as their two actions."""
    schedule = object.__new__(cls)
    schedule.pp_group_size, schedule.n_local_stages = num_ranks, num_chunks
    schedule.num_stages = schedule._num_stages = num_ranks * num_chunks
    schedule._stages, schedule._n_microbatches = [None] * num_chunks, num_micro_batches
    schedule.number_of_rounds = max(1, num_micro_batches // num_ranks)
    schedule.microbatches_per_round = num_micro_batches // schedule.number_of_rounds
    rows = [schedule._calculate_single_rank_operations(rank) for rank in range(num_ranks)]
    return _torch_csv([[part for a in row if a for part in (a.sub_actions or (a,))] for row in rows])


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8])
def test_looped_bfs_is_torch_s_order(num_ranks):
    for num_chunks in (1, 2, 3):
        for num_micro_batches in (1, num_ranks, 2 * num_ranks + 1):
            size = (num_ranks, num_chunks, num_micro_batches)
            theirs = _torch_looped(torch_schedules.ScheduleLoopedBFS, *size)
            assert build("looped_bfs", *size).to_csv() == theirs


@pytest.mark.parametrize("num_ranks", range(1, 9))
def test_dualpipev_is_torch_s_order(num_ranks):
    for num_micro_batches in (2 * num_ranks, 2 * num_ranks + 1, 3 * num_ranks, 4 * num_ranks):
        size = (num_ranks, 2, num_micro_batches)
        theirs = _torch_looped(torch_schedules.ScheduleDualPipeV, *size)
        assert build("dualpipev", *size).to_csv() == theirs


@pytest.mark.parametrize(
    ("name", "cls", "num_chunks"),
    [
        ("interleaved_zb", torch_schedules.ScheduleInterleavedZeroBubble, 2),
        ("interleaved_zb", torch_schedules.ScheduleInterleavedZeroBubble, 3),
        ("zb_h1", torch_schedules.ScheduleInterleavedZeroBubble, 1),
        ("zbv", torch_schedules.ScheduleZBVZeroBubble, 2),
    ],
)
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("parts", [(1.0, 1.0), (1.2, 0.8), (0.8, 1.2)])
def test_zero_bubble_schedules_are_nowhere_behind_torch_s(name, cls, num_chunks, num_ranks, parts):
    """Same forwards and input gradients; our weight gradients cost no more time and no more memory."""
    costs = Costs(backward_input_seconds=parts[0], backward_weight_seconds=parts[1])
    for num_micro_batches in {1, num_ranks - 1, num_ranks, 2 * num_ranks, 4 * num_ranks} - {0}:
        size = (num_ranks, num_chunks, num_micro_batches)
        ours = build(name, *size, Options(costs=costs))
        theirs = parse(_torch_looped(cls, *size), name="torch", placement=ours.placement)
        validate(theirs)
        assert [_without_weights(row) for row in ours.rows] == [_without_weights(row) for row in theirs.rows]
        assert simulate(ours, costs).seconds <= simulate(theirs, costs).seconds + 1e-9
        assert max(peak_activations(ours)) <= max(peak_activations(theirs))


def _without_weights(row: tuple[Action, ...]) -> list[Action]:
    return [action for action in row if action.op is not Op.BACKWARD_WEIGHT]


GOLDEN_FILES: dict[str, Schedule] = {
    "gpipe_p3_m4.csv": build("gpipe", 3, 1, 4),
    "1f1b_p4_m6.csv": build("1f1b", 4, 1, 6),
    "interleaved_p4_v2_m9.csv": build("interleaved", 4, 2, 9),  # which torch and Megatron refuse
    "interleaved_p2_v2_m3_lowered.csv": lower(build("interleaved", 2, 2, 3)),
    "looped_bfs_p2_v2_m3.csv": build("looped_bfs", 2, 2, 3),
    "zb_h1_p4_m6.csv": build("zb_h1", 4, 1, 6),
    "interleaved_zb_p4_v2_m9.csv": build("interleaved_zb", 4, 2, 9),
    "zbv_p4_m8.csv": build("zbv", 4, 2, 8),
    "v_half_p4_m8.csv": build("v_half", 4, 2, 8),
    "v_min_p4_m8.csv": build("v_min", 4, 2, 8),
    "dualpipev_p2_m5_lowered.csv": lower(build("dualpipev", 2, 2, 5)),
}


@pytest.mark.parametrize("name", GOLDEN_FILES)
def test_reviewed_orders_have_not_changed(name):
    text = (GOLDEN / name).read_text()
    assert GOLDEN_FILES[name].to_csv() == text
    assert load(text, name=GOLDEN_FILES[name].name) == GOLDEN_FILES[name]


def test_csv_speaks_torch_s_language():
    """torch reads every action that we write, and we read what it writes."""
    for row in (*lower(build("interleaved", 4, 2, 9)).rows, *lower(build("dualpipev", 2, 2, 5)).rows):
        for action in row:
            theirs = torch_schedules._Action.from_str(str(action))
            assert (theirs.stage_index, theirs.microbatch_index) == (action.stage, action.micro_batch)
            assert str(theirs) == str(action)
    assert parse(_torch_interleaved(3, 2, 6), name="interleaved") == build("interleaved", 3, 2, 6)


@pytest.mark.parametrize(
    "schedule",
    [
        build("interleaved", 4, 2, 8),
        build("interleaved_zb", 4, 2, 8),
        build("zbv", 4, 2, 8),
        build("dualpipev", 4, 2, 8),
    ],
    ids=lambda schedule: schedule.name,
)
def test_receives_and_sends_are_those_that_torch_adds(schedule):
    """What torch adds to the same order (schedules.py, _add_send_recv), and torch's check of it."""
    rows = {
        rank: [torch_schedules._Action.from_str(str(a)) for a in row]
        for rank, row in enumerate(schedule.rows)
    }
    torch_schedules._validate_schedule(rows, 4, 8, 8)
    theirs = torch_schedules._add_send_recv(rows, schedule.rank_of, 8)
    lowered = lower(schedule)
    for rank, row in enumerate(lowered.rows):
        assert sorted(map(str, theirs[rank])) == sorted(map(str, row))


def test_placement_is_torch_s():
    for num_ranks, num_chunks, style in itertools.product((1, 2, 3, 4), (1, 2, 3, 4), ("loop", "v")):
        theirs = generate_stage_to_rank_mapping(num_ranks, num_ranks * num_chunks, style=style)
        stages = StageMap.of((1,) * (num_ranks * num_chunks), num_ranks, style)
        assert {stage: stages.rank_of(stage) for stage in range(stages.num_stages)} == theirs
