"""Partitions against exhaustive search and against DeepSpeed's own; stage maps of them."""

from __future__ import annotations

import itertools

import pytest
from deepspeed.runtime.utils import partition_balanced, partition_uniform
from hypothesis import given, settings
from hypothesis import strategies as st

from dsx.errors import LayoutError
from dsx.parallel.partition import balanced, partition
from dsx.parallel.stages import StageMap
from dsx.schedules.schedule import Schedule

SETTINGS = settings(max_examples=150, deadline=None, derandomize=True, database=None)


DIGITS = st.integers(0, 9)


@st.composite
def problems(draw, values=DIGITS, longest=10):
    weights = draw(st.lists(values, min_size=1, max_size=longest))
    return weights, draw(st.integers(1, len(weights)))


def _parts(weights, bounds):
    return [sum(weights[start:stop]) for start, stop in itertools.pairwise(bounds)]


@SETTINGS
@given(problems())
def test_no_cut_is_better(problem):
    weights, num_stages = problem
    n = len(weights)
    cuts = [(0, *inner, n) for inner in itertools.combinations(range(1, n), num_stages - 1)]
    best = min((max(_parts(weights, cut)), sum(x * x for x in _parts(weights, cut))) for cut in cuts)
    ours = _parts(weights, balanced(weights, num_stages))
    assert (max(ours), sum(x * x for x in ours)) == best


@SETTINGS
@given(problems(st.floats(0, 1e9), longest=24))
def test_the_heaviest_stage_is_never_heavier_than_deepspeed_s(problem):
    weights, num_stages = problem
    ours, theirs = balanced(weights, num_stages), partition_balanced(weights, num_stages)
    assert max(_parts(weights, ours)) <= max(_parts(weights, theirs)) * (1 + 1e-9)
    assert all(start < stop for start, stop in itertools.pairwise(ours))


def test_deepspeed_s_heaviest_stage_can_be_heavier():
    """Why the balance is ours: DeepSpeed minimises largest minus smallest."""
    weights = [0, 0, 2, 4, 8, 9, 4, 5, 1, 7]
    assert max(_parts(weights, balanced(weights, 4))) == 13
    assert max(_parts(weights, partition_balanced(weights, 4))) == 14


@SETTINGS
@given(st.integers(1, 40).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n))))
def test_uniform_is_deepspeed_s(size):
    num_layers, num_stages = size
    stages = partition("uniform", num_stages, 1, parameters=[0] * num_layers, names=["x"] * num_layers)
    assert list(stages.bounds) == partition_uniform(num_layers, num_stages)


def test_a_large_model_is_cut_at_once():
    """128 equal blocks, a heavy head: 64 stages need blocks of at most 2 each, wherever the head sits."""
    weights = [0.0, *[1.0] * 128, 0.0, 0.9]
    bounds = balanced(weights, 65)
    assert max(_parts(weights, bounds)) == 2.0


NAMES = ["WordEmbedding", *["Block"] * 6, "FinalNorm", "Head"]
PARAMETERS = [50, *[10] * 6, 1, 50]


@pytest.mark.parametrize(
    ("method", "bounds"),
    [
        ("uniform", (0, 3, 5, 7, 9)),
        ("parameters", (0, 1, 4, 8, 9)),
        ([1, 3, 3, 2], (0, 1, 4, 7, 9)),
    ],
)
def test_methods(method, bounds):
    assert partition(method, 4, 2, parameters=PARAMETERS, names=NAMES) == StageMap(bounds, 2)


def test_flops_balances_costs():
    costs = [0.0, *[10.0] * 6, 0.0, 5.0]
    stages = partition("flops", 3, 3, parameters=PARAMETERS, costs=costs, names=NAMES)
    assert _parts(costs, stages.bounds) == [20.0, 20.0, 25.0]


def test_type_matches_as_deepspeed_does():
    """deepspeed/runtime/pipe/module.py, _find_layer_type: re.search, ignoring case."""
    names = ["Embedding", "GPTBlock", "GPTBlock", "GPTBlock", "GPTBlock", "Norm"]
    for pattern in ("type:gptblock", "type:Block$", "type:^gpt"):
        stages = partition(pattern, 2, 2, parameters=[0] * 6, names=names)
        assert [sum("Block" in names[i] for i in stages.layers(s)) for s in (0, 1)] == [2, 2]


@pytest.mark.parametrize(
    ("method", "stages", "ranks", "said"),
    [
        ("uniform", 10, 5, "the model has 9 layers"),
        ("uniform", 10, 5, "at most 1 chunks"),
        ("uniform", 12, 12, "pipeline degrees 1 to 9"),
        ("uniform", 3, 2, "pipeline degree 2"),
        ("uniform", 0, 1, "0 virtual stages"),
        ("speed", 2, 2, "type:<regex>"),
        ("time", 2, 2, "profile_layers"),
        ("profile", 2, 2, "profile_layers"),
        ("flops", 2, 2, "costs are not known"),
        ("type:[", 2, 2, "not a regular expression"),
        ("type:conv", 2, 2, "Block, FinalNorm, Head, WordEmbedding"),
        ([4, 4], 2, 2, "add up to 9"),
        ([9, 0], 2, 2, "at least 1"),
        ([3, 3, 3], 2, 2, "2 counts"),
    ],
)
def test_impossible_partitions_say_what_is_possible(method, stages, ranks, said):
    with pytest.raises(LayoutError) as error:
        partition(method, stages, ranks, parameters=PARAMETERS, names=NAMES)
    assert said in str(error.value)


def test_weights_must_be_one_per_layer():
    with pytest.raises(LayoutError, match="2 weights for 9 layers"):
        partition("parameters", 2, 2, parameters=[1, 2], names=NAMES)


@pytest.mark.parametrize("bounds", [(), (0,), (0, 0), (1, 2), (0, 2, 2), (0, 3, 2)])
def test_stages_without_layers_are_refused(bounds):
    with pytest.raises(LayoutError, match="at least one layer"):
        StageMap(bounds, 1)


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
