"""A searched order for a profile's layers, beside a bound that no order is below."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from dsx.planner.layout import Space
from dsx.planner.order_search import made_up, search_order
from dsx.schedules.schedule import Op, Schedule
from dsx.schedules.simulate import Costs, simulate, validate


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
