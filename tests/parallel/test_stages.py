"""Stage maps: every layer has one stage, every stage one rank."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsx.errors import LayoutError
from dsx.parallel.stages import StageMap
from dsx.schedules.schedule import Schedule


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(st.integers(1, 5), st.integers(1, 4), st.sampled_from(["loop", "v"]), st.data())
def test_layers_are_dealt_out_once(num_ranks, num_chunks, placement, data):
    size = num_ranks * num_chunks
    counts = data.draw(st.lists(st.integers(1, 4), min_size=size, max_size=size))
    stages = StageMap.of(tuple(counts), num_ranks, placement)
    assert (stages.num_stages, stages.num_chunks, stages.num_layers) == (size, num_chunks, sum(counts))
    dealt = [layer for rank in range(num_ranks) for layer in stages.layers_of(rank)]
    assert sorted(dealt) == list(range(stages.num_layers))
    schedule = Schedule("x", num_ranks, num_chunks, 1, (), placement)
    for stage in range(size):
        assert len(stages.layers(stage)) == counts[stage]
        assert all(stages.stage_of(layer) == stage for layer in stages.layers(stage))
        # The engine reads placement from both; they must agree.
        assert stages.rank_of(stage) == schedule.rank_of(stage)
        assert stages.stages_of(stages.rank_of(stage))[schedule.chunk_of(stage)] == stage
        assert schedule.stages_of(stages.rank_of(stage)) == stages.stages_of(stages.rank_of(stage))
        if stage % num_ranks:  # within a chunk, neighbouring stages lie on neighbouring ranks
            assert abs(stages.rank_of(stage) - stages.rank_of(stage - 1)) == 1
        elif stage and placement == "v":
            assert stages.rank_of(stage) == stages.rank_of(stage - 1)


def test_outside_is_refused():
    with pytest.raises(LayoutError, match="layer 4"):
        StageMap((0, 2, 4), 2).stage_of(4)
    with pytest.raises(LayoutError, match="do not divide over 2"):
        StageMap((0, 1, 2, 3), 2)
    with pytest.raises(LayoutError, match="pipeline ranks"):
        StageMap((0, 1), 0)
