"""A schedule file is read, its placement found, and proved before use."""

from __future__ import annotations

import pytest

from dsx.errors import ScheduleError
from dsx.schedules.builders import NAMES, build, default_chunks, forward_only
from dsx.schedules.program import load
from dsx.schedules.schedule import lower


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("num_ranks", "num_micro_batches"), [(1, 2), (2, 1), (4, 9)])
def test_files_of_every_builder_say_their_placement_themselves(name, num_ranks, num_micro_batches):
    schedule = build(name, num_ranks, default_chunks(name), num_micro_batches)
    for form in (schedule, lower(schedule)):
        found = load(form.to_csv(), name=name)
        assert found.rows == form.rows
        assert [found.rank_of(s) for s in range(form.num_stages)] == [
            form.rank_of(s) for s in range(form.num_stages)
        ]


def test_evaluation_on_v_placement():
    schedule = forward_only(3, 4, 5, "v")
    assert load(schedule.to_csv(), name="forward_only") == schedule


def test_a_placement_that_the_rows_contradict_is_refused():
    with pytest.raises(ScheduleError, match="say the placement"):
        load("0F0,3F0,2F0\n1F0\n", name="mine.csv")
    with pytest.raises(ScheduleError, match=r"schedule mine.csv, rank 0: it lacks 3F0"):
        load(build("interleaved", 2, 2, 1).to_csv(), name="mine.csv", placement="v")


def test_what_cannot_be_read_is_named_by_row_and_cell():
    with pytest.raises(ScheduleError, match=r"schedule mine.csv, row 3, cell 2: '1BX' is no action"):
        load("0F0,0B0\n\n1F0,1BX,1B0\n", name="mine.csv")
    with pytest.raises(ScheduleError, match=r"row 2, cell 3: .*5,001 characters.* is no action"):
        load(f"\n0F0,,0B{'9' * 4999}\n", name="mine.csv")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("ranks", "micro_batches"), [(100_000, 100_000), (2, 10**12), (10**9, 1)])
def test_a_schedule_that_no_memory_holds_is_refused_before_it_is_made(name, ranks, micro_batches):
    chunks = default_chunks(name)
    product = f"{ranks * chunks * micro_batches:,} forwards"
    with pytest.raises(ScheduleError, match=product):
        build(name, ranks, chunks, micro_batches)
    with pytest.raises(ScheduleError, match="100,000,000,001 forwards"):
        load("0F0,0B100000000000\n", name="mine.csv")
