"""Cut layers into virtual stages so that the simulated step is shortest.

The least largest stage does not give the shortest step: with several chunks a rank's sum counts, and while
the pipeline fills and drains every stage counts, in its own place. So the search only starts from the cut
with the least largest stage (:func:`dsx.parallel.partition.balanced`), and compares simulated steps of the
run's own schedule with the layers' own times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, pairwise, starmap
from math import comb
from typing import Self

from dsx.models.spec import Recompute
from dsx.parallel.partition import balanced, partition
from dsx.parallel.stages import StageMap
from dsx.planner.layout import Bounds
from dsx.planner.profile import LayerCost, Profile, action_costs, stage_costs
from dsx.schedules.program import Program
from dsx.schedules.schedule import Schedule
from dsx.schedules.simulate import Costs, TimedOrder, peaks, simulate


def peak_bytes(schedule: Schedule, stages: Sequence[LayerCost]) -> tuple[int, ...]:
    """The most bytes that each rank's activations take, of all of its virtual stages together.

    Transfer buffers, a few boundary tensors, are not counted.
    """
    return peaks(
        schedule,
        kept=[stage.kept_bytes for stage in stages],
        pending=[stage.pending_bytes for stage in stages],
        working=[stage.working_bytes for stage in stages],
    )


Key = tuple[int, float, float, Bounds]
"""(bytes above the cap, seconds, sum of squares of stages' seconds, bounds): less is better."""

_BETTER = 1 - 1e-9
_REFILLS = 4
# Building and simulating a schedule takes so many times what replaying it does; more with weight gradients to
# place (dsx.schedules.weight_fill).
_REBUILD, _REFILL = 10, 50


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCut:
    """A cut of layers for a pipeline, and what the simulator says of it.

    Attributes:
        program: The schedule, its weight gradients placed for this cut's times.
        schedule: The same for the step's micro-batches.
        step_seconds: Simulated step: all forwards and backwards, without the optimizer.
        bubble: Idle time over ideal time.
        peak_bytes: Most activations alive, per pipeline rank.
    """

    stage_map: StageMap
    program: Program
    schedule: Schedule = field(repr=False)
    step_seconds: float
    bubble: float
    peak_bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedPipeline:
    """What a cut is judged by."""

    layers: Sequence[LayerCost]
    program: Program
    num_ranks: int
    num_chunks: int
    num_micro_batches: int
    transfer_seconds: float = 0.0
    most_bytes: int | None = None

    @classmethod
    def of(
        cls,
        profile: Profile,
        recompute: Recompute,
        program: Program,
        size: tuple[int, int, int],
        most_bytes: int | None,
    ) -> Self:
        """The pipeline of ``size`` (ranks, chunks, micro-batches) of a profiled model."""
        num_ranks, num_chunks, num_micro_batches = size
        return cls(
            layers=profile.layers[recompute],
            program=program,
            num_ranks=num_ranks,
            num_chunks=num_chunks,
            num_micro_batches=num_micro_batches,
            transfer_seconds=profile.transfer_seconds(recompute) if num_ranks > 1 else 0.0,
            most_bytes=most_bytes,
        )

    @property
    def num_stages(self) -> int:
        return self.num_ranks * self.num_chunks

    def balanced(self) -> Bounds:
        """The cut with the least largest stage time. Raises LayoutError for more stages than layers."""
        seconds = [layer.seconds for layer in self.layers]
        names = [""] * len(seconds)
        return partition(
            "flops", self.num_stages, self.num_ranks, parameters=(), costs=seconds, names=names
        ).bounds

    def costs(self, stages: Sequence[LayerCost]) -> Costs:
        return action_costs(stages, self.transfer_seconds)

    def judge(self, bounds: Bounds) -> LayerCut:
        """Build the schedule for this cut's times, and simulate it.

        Raises:
            LayoutError: Bounds that are none.
            ScheduleError: The schedule cannot have this size.
        """
        stages, program = stage_costs(self.layers, bounds), self.program
        costs = self.costs(stages)
        if program.rows is None:
            program = replace(program, options=replace(program.options, costs=costs))
        schedule = program.build(self.num_ranks, self.num_chunks, self.num_micro_batches)
        timeline = simulate(schedule, costs)
        return LayerCut(
            stage_map=StageMap(bounds, self.num_ranks, program.placement),
            program=program,
            schedule=schedule,
            step_seconds=timeline.seconds,
            bubble=timeline.bubble,
            peak_bytes=peak_bytes(schedule, stages),
        )

    def key(self, cut: LayerCut) -> Key:
        return self.key_for(cut.stage_map.bounds, cut.step_seconds, max(cut.peak_bytes))

    def key_for(self, bounds: Bounds, seconds: float, most: int) -> Key:
        """The same from a step's length and the most activation bytes of a rank."""
        over = 0 if self.most_bytes is None else max(0, most - self.most_bytes)
        times = [sum(layer.seconds for layer in self.layers[start:stop]) for start, stop in pairwise(bounds)]
        return over, seconds, sum(time * time for time in times), bounds


def shortest_cut(
    pipeline: SimulatedPipeline, *, most_exhaustive: int = 64, most_actions: int = 4_000_000
) -> LayerCut:
    """The cut with the shortest simulated step within the memory cap; if none is within, the nearest to it.

    With at most ``most_exhaustive`` possible cuts all are tried. Otherwise layers are moved from stage to
    stage, one at a time and with the stages between shifted along, as long as the step gets shorter, from
    several starts. Deterministic; never worse than the cut with the least largest stage.

    Args:
        pipeline: The layers and the schedule.
        most_exhaustive: Number of cuts up to which all are tried.
        most_actions: Bound on the actions that are simulated in all, about half a microsecond each. A cut
            that is begun is finished, so that at least one is judged.

    Raises:
        LayoutError: More stages than layers.
        ScheduleError: The schedule cannot have this size.
    """
    num_layers, num_stages = len(pipeline.layers), pipeline.num_stages
    if comb(num_layers - 1, num_stages - 1) <= most_exhaustive:
        every = combinations(range(1, num_layers), num_stages - 1)
        cuts = (pipeline.judge((0, *inner, num_layers)) for inner in every)
        return min((pipeline.judge(pipeline.balanced()), *cuts), key=pipeline.key)
    work = _Search(pipeline, most_actions // 2)
    best = work.judge(pipeline.balanced())
    for start in _starts(pipeline):
        if work.left <= 0:
            break
        best = work.better(best, work.descend(work.judge(start)))
    if pipeline.program.divides:
        work.left = most_actions - most_actions // 2
        best = work.polish(best)
    return best


def _starts(pipeline: SimulatedPipeline) -> Iterator[Bounds]:
    """Starts that differ enough to end in different places."""
    n, stages = len(pipeline.layers), pipeline.num_stages
    seen = set()
    mean = sum(layer.seconds for layer in pipeline.layers) / n
    for weights in (
        [layer.seconds for layer in pipeline.layers],
        [layer.forward_seconds for layer in pipeline.layers],
        # Every layer towards the mean: a heavy last layer shares its stage.
        [layer.seconds + mean for layer in pipeline.layers],
        [1.0] * n,
    ):
        bounds = balanced(weights, stages)
        if bounds not in seen:
            seen.add(bounds)
            yield bounds


class _Search:
    """Walks downhill, within a number of simulated actions."""

    def __init__(self, pipeline: SimulatedPipeline, left: int) -> None:
        self.left = left
        self._pipeline = pipeline
        self._judged: dict[Bounds, LayerCut] = {}
        self._stages: dict[tuple[int, int], LayerCost] = {}

    def judge(self, bounds: Bounds) -> LayerCut:
        """Judge a cut exactly, each cut once."""
        if bounds not in self._judged:
            cut = self._judged[bounds] = self._pipeline.judge(bounds)
            self.left -= self._work(cut)
        return self._judged[bounds]

    def better(self, one: LayerCut, other: LayerCut) -> LayerCut:
        """The better of two, the first if they are alike."""
        return other if _less(self._pipeline.key(other), self._pipeline.key(one)) else one

    def descend(self, cut: LayerCut) -> LayerCut:
        """Walk from ``cut`` until no move helps, with the order of actions that ``cut`` has.

        If that order depends on the times, it is made anew for the cut that was found, and the search
        continues from there.
        """
        for _ in range(_REFILLS if self._pipeline.program.divides else 1):
            order = TimedOrder(cut.schedule)
            key = self._key_of(cut.schedule, order)
            bounds = self._walk(key, order.num_actions, cut.stage_map.bounds)
            if bounds == cut.stage_map.bounds:
                break
            found = self.better(cut, self.judge(bounds))
            if found is cut or self.left <= 0:
                return found
            cut = found
        return cut

    def _key_of(self, schedule: Schedule, order: TimedOrder) -> Callable[[Bounds], Key]:
        """Judges cuts by an order of actions."""
        pipeline = self._pipeline

        def key(bounds: Bounds) -> Key:
            stages = [*starmap(self._stage, pairwise(bounds))]
            most = 0 if pipeline.most_bytes is None else max(peak_bytes(schedule, stages))
            return pipeline.key_for(bounds, order.seconds(pipeline.costs(stages)), most)

        return key

    def _stage(self, start: int, stop: int) -> LayerCost:
        """What layers take together, each stretch of them added up once."""
        if (start, stop) not in self._stages:
            self._stages[start, stop] = LayerCost.total(self._pipeline.layers[start:stop])
        return self._stages[start, stop]

    def polish(self, cut: LayerCut) -> LayerCut:
        """Walk downhill, placing weight gradients anew for every cut: exact, and many times the work."""

        def key(bounds: Bounds) -> Key:
            return self._pipeline.key(self.judge(bounds))

        if self.left < 2 * self._work(cut):
            return cut
        return self.better(cut, self.judge(self._walk(key, 0, cut.stage_map.bounds)))

    def _walk(self, key: Callable[[Bounds], Key], work: int, bounds: Bounds) -> Bounds:
        """Take moves that make ``key`` less, for ``work`` actions each, until none does."""
        best, improved = key(bounds), True
        while improved:
            improved = False
            for candidate in _moves(bounds):
                self.left -= work
                if self.left <= 0:
                    return bounds
                found = key(candidate)
                if _less(found, best):
                    bounds, best, improved = candidate, found, True
                    break
        return bounds

    def _work(self, cut: LayerCut) -> int:
        factor = _REFILL if self._pipeline.program.divides else _REBUILD
        return factor * sum(map(len, cut.schedule.rows))


def _moves(bounds: Bounds) -> Iterator[Bounds]:
    """Cuts near ``bounds``: layers go from one stage to another, the stages between are shifted along."""
    inner = range(1, len(bounds) - 1)
    for layers in (1, 2, 3):
        for width in range(1, len(bounds) - 1):
            for first in inner[: len(inner) - width + 1]:
                for step in (-layers, layers):
                    moved = [b + step * (first <= i < first + width) for i, b in enumerate(bounds)]
                    if all(a < b for a, b in pairwise(moved)):
                        yield tuple(moved)


def _less(one: Key, other: Key) -> bool:
    """Whether ``one`` is better by more than rounding."""
    if one[0] != other[0]:
        return one[0] < other[0]
    if one[1] < other[1] * _BETTER or other[1] < one[1] * _BETTER:
        return one[1] < other[1]
    return one[2] < other[2] * _BETTER
