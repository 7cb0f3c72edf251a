"""Cutting by simulated step against every cut there is, and a searched order beside a bound."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise

import pytest
from profiles import cost, gpt2, random_layers

from dsx.errors import LayoutError
from dsx.parallel.partition import balanced
from dsx.planner.layout import Space
from dsx.planner.order_search import made_up, search_order
from dsx.planner.partition_search import SimulatedPipeline, shortest_cut
from dsx.planner.profile import action_costs, stage_costs
from dsx.schedules.builders import build
from dsx.schedules.program import Program
from dsx.schedules.schedule import Op, Schedule
from dsx.schedules.simulate import Costs, simulate, validate


def pipeline(layers, name, p, v, m, **more) -> SimulatedPipeline:
    program = Program(name=name)
    return SimulatedPipeline(
        layers=layers, program=program, num_ranks=p, num_chunks=v, num_micro_batches=m, **more
    )


def every_cut(task: SimulatedPipeline):
    n = len(task.layers)
    for inner in combinations(range(1, n), task.num_stages - 1):
        yield task.judge((0, *inner, n))


@pytest.mark.parametrize(
    ("name", "p", "v"),
    [("gpipe", 3, 1), ("1f1b", 2, 1), ("1f1b", 4, 1), ("interleaved", 2, 2), ("zb_h1", 3, 1), ("zbv", 2, 2)],
)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("most_exhaustive", [0, 64])
def test_the_shortest_of_all_cuts(name, p, v, seed, most_exhaustive):
    """By trying all and, with that switched off, by moving layers."""
    task = pipeline(random_layers(8, seed), name, p, v, 2 * p, transfer_seconds=0.1)
    shortest = min(cut.step_seconds for cut in every_cut(task))
    found = shortest_cut(task, most_exhaustive=most_exhaustive)
    assert found.step_seconds == pytest.approx(shortest, rel=1e-9)


@pytest.mark.parametrize(("name", "v"), [("1f1b", 1), ("interleaved", 2), ("interleaved_zb", 2), ("zbv", 2)])
@pytest.mark.parametrize("seed", range(3))
def test_never_worse_than_the_least_largest_stage(name, v, seed):
    layers = random_layers(20, 100 + seed)
    task = pipeline(layers, name, 4, v, 6, transfer_seconds=0.2)
    bounds = balanced([layer.seconds for layer in layers], 4 * v)
    for work in (0, 5_000, 200_000):
        assert shortest_cut(task, most_actions=work).step_seconds <= task.judge(bounds).step_seconds


def test_the_same_every_time():
    task = pipeline(random_layers(20, 5), "zbv", 4, 2, 8)
    assert shortest_cut(task, most_actions=50_000) == shortest_cut(task, most_actions=50_000)


def test_what_it_says_is_what_the_simulator_says():
    """The schedule is the engine's: built by the program that goes with the cut."""
    task = pipeline(gpt2(1024), "interleaved_zb", 4, 2, 8, transfer_seconds=0.01)
    cut = shortest_cut(task, most_actions=50_000)
    assert cut.program.build(4, 2, 8) == cut.schedule
    costs = action_costs(stage_costs(task.layers, cut.stage_map.bounds), task.transfer_seconds)
    timeline = simulate(cut.schedule, costs)
    assert (cut.step_seconds, cut.bubble) == (timeline.seconds, timeline.bubble)
    assert cut.program.options.costs == costs


def test_v_placement_goes_with_the_schedule():
    cut = shortest_cut(pipeline(gpt2(1024), "zbv", 2, 2, 4), most_actions=20_000)
    assert cut.stage_map.placement == "v"
    assert cut.stage_map.stages_of(0) == (0, 3)


# DESIGN 9: FLOP-weighted GPT-2 (124M) at p = 4, step over the balanced ideal m / p x (all layers), backward
# twice the forward. Its sequence length and m are not said; 2048 tokens and m = 16 give its figures for
# type: (1.859), parameters (1.643) and min-max (1.199) to within 0.2%, so that is the model set up here.
SEQUENCE, M = 2048, 16


def over_ideal(task: SimulatedPipeline, seconds: float) -> float:
    return seconds / (sum(layer.seconds for layer in task.layers) / task.num_ranks * task.num_micro_batches)


def test_design_figures_of_other_methods():
    """That the model is set up as DESIGN's was."""
    layers = gpt2(SEQUENCE)
    task = pipeline(layers, "1f1b", 4, 1, M)
    blocks = [int(2 <= i < 14) for i in range(16)]
    table, block = 50257 * 768, 12 * 768**2 + 13 * 768
    parameters = [table, 1024 * 768, *[block] * 12, 2 * 768, table]
    for weights, wanted in ((blocks, 1.859), (parameters, 1.643), ([x.seconds for x in layers], 1.199)):
        cut = task.judge(balanced(weights, 4))
        assert over_ideal(task, cut.step_seconds) == pytest.approx(wanted, rel=2e-3)


@pytest.mark.parametrize(
    ("name", "v", "design", "optimum"), [("1f1b", 1, 1.199, 1.1973), ("interleaved", 2, 1.400, 1.4010)]
)
def test_design_figures_of_the_search(name, v, design, optimum):
    """Ours are the optimum of all 455 and 6435 cuts (tried once, optimum in the table), and DESIGN's."""
    task = pipeline(gpt2(SEQUENCE), name, 4, v, M)
    found = over_ideal(task, shortest_cut(task).step_seconds)
    assert found == pytest.approx(optimum, abs=1e-4)
    assert found <= design * 1.001


def test_the_cap_comes_first():
    """The quickest cut needs more than the cap; the one found is the quickest of those within."""
    layers = [replace(x, boundary_bytes=0) for x in random_layers(8, 11)]
    free = pipeline(layers, "1f1b", 3, 1, 6)
    cap = max(shortest_cut(free).peak_bytes) - 1
    capped = replace(free, most_bytes=cap)
    within = [cut for cut in every_cut(free) if max(cut.peak_bytes) <= cap]
    assert within
    for most_exhaustive in (0, 64):
        found = shortest_cut(capped, most_exhaustive=most_exhaustive)
        assert max(found.peak_bytes) <= cap
        assert found.step_seconds == pytest.approx(min(cut.step_seconds for cut in within))


def test_a_cap_that_nothing_meets_gives_the_nearest():
    task = pipeline(random_layers(7, 3), "gpipe", 2, 1, 3, most_bytes=1)
    least = min(max(cut.peak_bytes) for cut in every_cut(task))
    assert max(shortest_cut(task).peak_bytes) == least


def test_a_schedule_written_by_hand():
    rows = build("1f1b", 2, 1, 3)
    layers = random_layers(6, 2)
    by_hand = SimulatedPipeline(
        layers=layers,
        program=Program(name="my.csv", rows=rows),
        num_ranks=2,
        num_chunks=1,
        num_micro_batches=3,
    )
    assert shortest_cut(by_hand).stage_map == shortest_cut(pipeline(layers, "1f1b", 2, 1, 3)).stage_map


def test_more_stages_than_layers():
    with pytest.raises(LayoutError, match="has 3 layers and every stage needs one"):
        shortest_cut(pipeline([cost(1.0)] * 3, "1f1b", 4, 1, 4))


def joined(schedule: Schedule, costs: Costs) -> Schedule:
    """With whole backwards where the two parts follow each other and the step gets no longer."""
    best = schedule
    for rank, row in enumerate(schedule.rows):
        for first, second in pairwise(row):
            if second == replace(first, op=Op.BACKWARD_WEIGHT):
                now = list(best.rows[rank])
                at = now.index(first)
                now[at : at + 2] = [replace(first, op=Op.BACKWARD)]
                rows = (*best.rows[:rank], tuple(now), *best.rows[rank + 1 :])
                tried = replace(best, rows=rows)
                if simulate(tried, costs).seconds <= simulate(best, costs).seconds:
                    best = tried
    validate(best)
    return best


def test_no_order_with_whole_backwards_is_below_the_bound():
    """A kernel may do a whole backward in less time than its parts: an order with some is shorter then."""
    equal = made_up([1.0] * 3, 0.0)
    layers = tuple(
        replace(
            layer,
            backward_input_seconds=1.2 * layer.backward_input_seconds,
            backward_weight_seconds=1.2 * layer.backward_weight_seconds,
        )
        for layer in equal.layers["none"]
    )
    searched = search_order(
        replace(equal, layers={"none": layers}),
        num_ranks=3,
        num_micro_batches=3,
        space=Space(names=("1f1b", "zb_h1"), chunks=(1,)),
        most_actions=5_000,
    )
    shorter = simulate(joined(searched.found.cut.schedule, searched.costs), searched.costs).seconds
    assert searched.bound_seconds <= shorter < searched.found.cut.step_seconds
