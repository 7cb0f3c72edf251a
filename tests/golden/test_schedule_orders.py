"""Orders of the builders against stock DeepSpeed, torch.distributed.pipelining and reviewed files."""

from __future__ import annotations

from pathlib import Path

import pytest
from deepspeed.runtime.pipe.schedule import BackwardPass, ForwardPass, TrainSchedule
from torch.distributed.pipelining import schedules as torch_schedules

from dsx.plan.builders import build, gpipe, interleaved, one_f_one_b
from dsx.plan.schedule_csv import parse
from dsx.plan.transfers import lower
from dsx.spec.schedule import Schedule

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
        ours = one_f_one_b(num_ranks, num_micro_batches).to_csv()
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
        assert gpipe(num_ranks, num_micro_batches).to_csv() == _torch_gpipe(num_ranks, num_micro_batches)


GOLDEN_FILES: dict[str, Schedule] = {
    "gpipe_p3_m4.csv": build("gpipe", 3, 1, 4),
    "1f1b_p4_m6.csv": build("1f1b", 4, 1, 6),
    "interleaved_p4_v2_m9.csv": build("interleaved", 4, 2, 9),  # which torch and Megatron refuse
    "interleaved_p2_v2_m3_lowered.csv": lower(build("interleaved", 2, 2, 3)),
}


@pytest.mark.parametrize("name", GOLDEN_FILES)
def test_reviewed_orders_have_not_changed(name):
    text = (GOLDEN / name).read_text()
    assert GOLDEN_FILES[name].to_csv() == text
    assert parse(text, name=GOLDEN_FILES[name].name) == GOLDEN_FILES[name]


def test_csv_speaks_torch_s_language():
    """torch reads every action that we write, and we read what it writes."""
    for row in lower(build("interleaved", 4, 2, 9)).rows:
        for action in row:
            theirs = torch_schedules._Action.from_str(str(action))
            assert (theirs.stage_index, theirs.microbatch_index) == (action.stage, action.micro_batch)
            assert str(theirs) == str(action)
    assert parse(_torch_interleaved(3, 2, 6), name="interleaved") == build("interleaved", 3, 2, 6)


def test_receives_and_sends_are_those_that_torch_adds():
    """What torch adds to the same order (schedules.py, _add_send_recv)."""
    schedule = build("interleaved", 4, 2, 8)
    rows = {
        rank: [torch_schedules._Action.from_str(str(a)) for a in row]
        for rank, row in enumerate(schedule.rows)
    }
    theirs = torch_schedules._add_send_recv(rows, lambda stage: stage % 4, 8)
    lowered = lower(schedule)
    for rank, row in enumerate(lowered.rows):
        assert sorted(map(str, theirs[rank])) == sorted(map(str, row))
