"""A searched order of actions beside the named schedules, for a profile's layers and a cap on activations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import inf

from dsx.planner.choose import Choice, Ranking, choose
from dsx.planner.layout import Space
from dsx.planner.partition_search import SimulatedPipeline, shortest_cut
from dsx.planner.profile import Conditions, LayerCost, Profile, stage_costs
from dsx.schedules.program import Program
from dsx.schedules.schedule import Op
from dsx.schedules.search import MemoryLimit, SchedulingProblem, search
from dsx.schedules.simulate import Costs

_CUTS = 3  # Cuts, each with where its stages lie, that the search begins with.
_SHARES = (0.6, 0.2, 0.2)  # Of the work, for each round of an order and a cut for it.
_CUT_ACTIONS = 1_000_000
_BETTER = 0.999
LAYER_BYTES = 1 << 20
"""What a layer keeps in :func:`made_up`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Searched:
    """What came of a search.

    Attributes:
        ranking: The named schedules, each with the best cut and options for it.
        found: The searched order, in the recompute mode and with the cut that it is for.
        bound_seconds: No order of this cut, with its stages on these ranks and within the cap, is shorter.
    """

    ranking: Ranking
    found: Choice
    costs: Costs
    bound_seconds: float

    @property
    def gain(self) -> float:
        """How much longer the best named schedule takes, less 1."""
        return self.ranking.chosen.cut.step_seconds / self.found.cut.step_seconds - 1

    @property
    def open_gain(self) -> float:
        """How much longer than any order can be the one that was found is at most."""
        return self.found.cut.step_seconds / self.bound_seconds - 1


def made_up(forwards: list[float], wire: float) -> Profile:
    """A profile of layers of these forwards, in ms: input and weight gradients take as long as a forward.

    Every layer keeps :data:`LAYER_BYTES` until its weight gradient is done. ``wire`` is a transfer's ms.
    """
    layers = [
        LayerCost(
            forward_seconds=forward / 1000,
            backward_seconds=2 * forward / 1000,
            backward_input_seconds=forward / 1000,
            backward_weight_seconds=forward / 1000,
            kept_bytes=LAYER_BYTES,
            pending_bytes=LAYER_BYTES,
        )
        for forward in forwards
    ]
    conditions = Conditions(
        model="layers",
        micro_batch_size=1,
        sequence_length=0,
        tensor=1,
        sequence_parallel=False,
        precision="any",
        device="paper",
        dsx="",
    )
    return Profile(
        conditions=conditions,
        layers={"none": tuple(layers)},
        latency_seconds=wire / 1000,
        bytes_per_second=1.0,
    )


def search_order(
    profile: Profile,
    *,
    num_ranks: int,
    num_micro_batches: int,
    space: Space,
    most_actions: int,
    progress: Callable[[int], None] = lambda _: None,
) -> Searched:
    """Search an order of actions, from the best named schedules and their cuts on.

    ``most_actions`` bounds the actions that are timed, over all cuts; ``progress`` is told of more of them.

    Raises:
        ScheduleError: No named schedule has this size, or none stays within the cap.
        LayoutError: No cut is possible.
    """
    ranking = choose(profile, num_ranks=num_ranks, num_micro_batches=num_micro_batches, space=space)
    groups: dict[object, list[Choice]] = {}
    for choice in (ranking.chosen, *ranking.others):
        if space.most_bytes is None or choice.peak_bytes <= space.most_bytes:
            stages = choice.cut.stage_map
            groups.setdefault((choice.recompute, stages), []).append(choice)
    best = sorted(groups.values(), key=lambda group: min(each.cut.step_seconds for each in group))[:_CUTS]
    each = most_actions // len(best)
    found = [
        searched
        for group in best
        for searched in _searches(profile, ranking, group, (num_ranks, num_micro_batches), each, progress)
    ]
    return min(found, key=lambda searched: searched.found.cut.step_seconds)


def _searches(
    profile: Profile,
    ranking: Ranking,
    group: list[Choice],
    sizes: tuple[int, int],
    most_actions: int,
    progress: Callable[[int], None],
) -> Iterator[Searched]:
    """Search an order for the cut that a group of choices has, then a cut for that order, and so on."""
    best = min(group, key=lambda choice: choice.cut.step_seconds)
    starts = [choice.cut.schedule for choice in group]
    for share in _SHARES:
        stages = best.cut.stage_map
        size = sizes[0], stages.num_chunks, sizes[1]
        program = best.cut.program
        pipeline = SimulatedPipeline.of(profile, best.recompute, program, size, ranking.most_bytes)
        each = stage_costs(pipeline.layers, stages.bounds)
        costs = pipeline.costs(each)
        limit = MemoryLimit(
            most=ranking.most_bytes,
            kept=[stage.kept_bytes for stage in each],
            pending=[stage.pending_bytes for stage in each],
            working=[stage.working_bytes for stage in each],
        )
        problem = SchedulingProblem(size, stages.placement, costs, limit)
        result = search(problem, starts, most_actions=int(share * most_actions), progress=progress)
        found = replace(pipeline, program=Program(name="searched", rows=result.schedule))
        # Whole backwards may be shorter than their parts, so that what there was can be the best still.
        cut = min(best.cut, found.judge(stages.bounds), key=lambda each: each.step_seconds)
        best = Choice(best.recompute, cut)
        bound = min(_least(problem, costs).bound(), cut.step_seconds)
        yield Searched(ranking=ranking, found=best, costs=costs, bound_seconds=bound)
        moved = shortest_cut(found, most_actions=_CUT_ACTIONS)
        if moved.step_seconds >= cut.step_seconds * _BETTER or max(moved.peak_bytes) > (
            ranking.most_bytes or inf
        ):
            return
        best, starts = Choice(best.recompute, moved), [moved.schedule]


def _least(problem: SchedulingProblem, costs: Costs) -> SchedulingProblem:
    """The problem whose parts of a backward are no longer, and keep no more, than what a whole one takes.

    A kernel may do a whole backward in less time than its two parts. An order with whole ones is one of this
    problem too, with waits, so that the problem's bound is below it.
    """
    by_op = costs.by_op(problem.stages)
    whole = by_op[Op.BACKWARD]
    first = tuple(map(min, by_op[Op.BACKWARD_INPUT], whole))
    rest = tuple(a - b for a, b in zip(whole, first, strict=True))
    second = tuple(map(min, by_op[Op.BACKWARD_WEIGHT], rest))
    seconds = replace(
        costs, backward_seconds=None, backward_input_seconds=first, backward_weight_seconds=second
    )
    pending = tuple(map(min, problem.limit.pending, problem.limit.kept))
    return SchedulingProblem(
        problem.size, problem.placement, seconds, replace(problem.limit, pending=pending)
    )
