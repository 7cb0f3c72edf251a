"""Predicted time of a training step of one layout, and what it consists of.

A step is the pipeline's schedule on the layers' times (:mod:`dsx.planner.layer_times`),
then the part of the gradients' reduction that is not hidden, then the update and the gathering of what it
changed.

A schedule's step from dsx's simulator, with a short simulation standing in for a long one.

Once a pipeline is full, each further round of micro-batches takes as long as the one before. So two short
simulations tell the length of a round, and the rest is counting; tests/planner/test_planner_model.py
compares with simulations at full length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from dsx.parallel.partition import balanced
from dsx.parallel.reduction import elements_of_a_bucket
from dsx.parallel.stages import StageMap
from dsx.planner.cluster import Group
from dsx.planner.costs import Kind
from dsx.planner.layout import Candidate, Task
from dsx.planner.profile import LayerCost, hidden
from dsx.schedules.program import Program
from dsx.schedules.schedule import Op, Schedule
from dsx.schedules.simulate import Costs, TimedOrder, Timeline

__all__ = ["Candidate", "Predictor", "StepTime", "Task"]


MOST_ACTIONS = 8_000
"""Computations that are simulated one by one whatever the schedule."""

_ROUNDS = ((4, 6), (3, 4), (2, 3))
"""Micro-batches per rank of the two short simulations: the longest that stay below twice MOST_ACTIONS."""


@dataclass(frozen=True)
class PipelineStep:
    """A schedule of some size."""

    program: Program
    num_ranks: int
    num_chunks: int
    num_micro_batches: int

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Micro-batches to simulate: all of them, or two numbers that leave the same remainder."""
        p, m = self.num_ranks, self.num_micro_batches
        each = p * self.num_chunks * (3 if self.program.divides else 2)
        if each * m <= MOST_ACTIONS or self.program.rows is not None:
            return (m,)
        choices = [tuple(rounds * p + m % p for rounds in pair) for pair in _ROUNDS]
        few = [short for short in choices if each * short[-1] <= 2 * MOST_ACTIONS] or choices[-1:]
        return few[0] if few[0][-1] < m else (m,)

    @cached_property
    def schedules(self) -> tuple[Schedule, ...]:
        return tuple(self.program.build(self.num_ranks, self.num_chunks, m) for m in self.lengths)

    @cached_property
    def _orders(self) -> tuple[TimedOrder, ...]:
        return tuple(map(TimedOrder, self.schedules))

    @cached_property
    def divided_share(self) -> float:
        """Part of all backwards that are divided, 0 to 1: some schedules leave some of them whole."""
        counts = []
        for schedule in self.schedules:
            ops = [action.op for row in schedule.rows for action in row]
            counts.append((float(ops.count(Op.BACKWARD_INPUT)), float(ops.count(Op.BACKWARD))))
        divided, whole = counts[0] if len(counts) == 1 else self._further(*counts)
        return divided / (divided + whole)

    def run(self, costs: Costs) -> PipelineTime:
        timelines = [order.timeline(costs) for order in self._orders]
        figures = [
            (timeline.seconds, *timeline.busy_seconds, *_left(schedule, timeline))
            for schedule, timeline in zip(self.schedules, timelines, strict=True)
        ]
        seconds, *rest = figures[-1] if len(figures) == 1 else self._further(*figures)
        return PipelineTime(seconds, tuple(rest[: self.num_ranks]), tuple(rest[self.num_ranks :]))

    def _further(self, before: tuple[float, ...], now: tuple[float, ...]) -> tuple[float, ...]:
        """Figures of two simulations, continued in a straight line."""
        first, second = self.lengths
        steps = (self.num_micro_batches - second) / (second - first)
        return tuple(b + steps * (b - a) for a, b in zip(before, now, strict=True))


@dataclass(frozen=True, slots=True)
class PipelineTime:
    """All actions of a step.

    Attributes:
        seconds: From the first to the last.
        busy_seconds: Computing, per rank.
        left_seconds: Per virtual stage, from its last action to the end.
    """

    seconds: float
    busy_seconds: tuple[float, ...]
    left_seconds: tuple[float, ...]

    @property
    def bubble(self) -> float:
        """Idle time over ideal time, as :attr:`dsx.schedules.simulate.Timeline.bubble`."""
        return self.seconds * len(self.busy_seconds) / sum(self.busy_seconds) - 1.0


def _left(schedule: Schedule, timeline: Timeline) -> tuple[float, ...]:
    ends = [0.0] * schedule.num_stages
    for row in timeline.spans:
        for action, _, end in row:
            ends[action.stage] = max(ends[action.stage], end)
    return tuple(timeline.seconds - end for end in ends)


def least_seconds(program: Program, num_ranks: int, num_micro_batches: int, costs: Costs) -> float:
    """A bound that no simulation of the schedule is below.

    A rank starts when a first micro-batch has come through the stages before its own, and has all its work
    still to do. If backwards are whole, a last one then goes back through those stages.
    """
    seconds = costs.forward_seconds
    by_op = costs.by_op(num_stages := len(seconds) if isinstance(seconds, tuple) else 1)
    forward, backward = by_op[Op.FORWARD], by_op[Op.BACKWARD]
    if program.divides:  # Some of them leave some backwards whole.
        parts = zip(by_op[Op.BACKWARD_INPUT], by_op[Op.BACKWARD_WEIGHT], strict=True)
        divided = (first + second for first, second in parts)
        backward = tuple(map(min, backward, divided))
    busy = [0.0] * num_ranks
    for stage in range(num_stages):
        chunk, place = divmod(stage, num_ranks)
        mirrored = program.placement == "v" and chunk % 2
        busy[num_ranks - 1 - place if mirrored else place] += forward[stage] + backward[stage]
    least = come = 0.0
    for rank in range(num_ranks):
        least = max(least, come + num_micro_batches * busy[rank])
        come += forward[rank] + (0.0 if program.divides else backward[rank])
    return least


_FP32_BYTES = 4


class Wire:
    """Pipeline transfers: what an action takes longer for one, and the delay until it has arrived.

    Attributes:
        action: The first.
        delay: The second.
        across: How long a micro-batch keeps the link between two sites busy in one direction.
    """

    def __init__(self, task: Task, layout: Candidate) -> None:
        self.action = self.delay = self.across = 0.0
        if layout.pipeline == 1:
            return
        machine, layers = task.machine, task.layers
        network, software = machine.network, machine.software
        cuts, whole = layers.cuts_sequence(layout), layers.boundary_bytes(layout)
        shares = layout.tensor if cuts or software.shards_transfers else 1
        leaves = layout.gpus > network.cluster.gpus_per_node
        seconds = network.transfer_seconds(whole / shares, leaves_node=leaves)
        if network.cluster.gpus_per_site:  # pipeline ranks are the outermost, so that some are on each side
            self.across = network.crossing_seconds(whole / shares, layout.gpus // layout.pipeline)
            seconds = self.across
        if shares > 1 and not cuts:
            self.action = network.seconds("all_gather", whole, Group(layout.tensor))
        if software.hides_transfers and machine.hides:
            self.delay = seconds
        else:
            self.action += seconds


class Held(NamedTuple):
    """Parameters on a rank: those of experts that it shares out with others, and all others."""

    plain: float
    experts: float = 0.0

    @property
    def total(self) -> float:
        return self.plain + self.experts

    def times(self, share: float) -> Held:
        return Held(share * self.plain, share * self.experts)

    def parts(self, layout: Candidate) -> float:
        """What each rank has of them, where those with the same divide them among themselves."""
        return self.plain / layout.replicas + self.experts / layout.mesh.replicas(experts=True)

    def seconds(self, kind: Kind, width: int, task: Task, layout: Candidate, share: float = 1.0) -> float:
        """A collective over all of them, of experts over their own replicas; ``share`` as the network's."""
        network, mesh = task.machine.network, layout.mesh
        seconds = network.seconds(kind, self.plain * width, Group(layout.replicas, layout.tensor), share)
        if not self.experts:
            return seconds
        among = Group(mesh.replicas(experts=True), layout.tensor * mesh.ep)
        return seconds + network.seconds(kind, self.experts * width, among, share)


@dataclass(frozen=True, slots=True)
class StageTotal:
    """A virtual stage: its layers' time, their parameters on a rank, those that are trained, their number."""

    cost: LayerCost
    elements: Held
    trained: Held
    layers: int


class ZeroActions:
    """Actions of a chunk with what ZeRO communicates during them.

    Stage 3 gathers parameters for each forward and each backward and reduces gradients after each backward,
    beside computation (docs/adr/0009). Stage 2 with a reduction per micro-batch waits for it (docs/adr/0008).
    """

    def __init__(self, task: Task, layout: Candidate) -> None:
        self._task, self._layout, self._machine = task, layout, task.machine
        self._share = task.machine.software.gather_share
        self._stage, self._each = layout.zero_stage, layout.reduces_micro_batches
        self._layers = task.machine.network.efficiency.gather_seconds if layout.zero_stage == 3 else 0.0
        self._action = task.machine.network.efficiency.action_seconds

    def forward(self, stage: StageTotal) -> float:
        return self._beside(stage.cost.forward_seconds, self._gather(stage.elements), self._hooks(stage))

    def backward(self, stage: StageTotal) -> float:
        beside = self._gather(stage.elements) + self._reduce(stage.trained)
        seconds = self._beside(stage.cost.backward_seconds, beside, 2 * self._hooks(stage))
        return seconds + self._reduce_after(stage.trained)

    def inputs(self, stage: StageTotal) -> float:
        return self._beside(
            stage.cost.backward_input_seconds, self._gather(stage.elements), 2 * self._hooks(stage)
        )

    def weights(self, stage: StageTotal) -> float:
        beside = self._beside(stage.cost.backward_weight_seconds, self._reduce(stage.trained), 0.0)
        return beside + self._reduce_after(stage.trained)

    def _hooks(self, stage: StageTotal) -> float:
        return stage.layers * self._layers

    def _beside(self, seconds: float, wire: float, hooks: float) -> float:
        return self._machine.host(self._machine.beside(seconds, wire), self._action + hooks)

    def _gather(self, elements: Held) -> float:
        return self._collective("all_gather", elements, self._share) if self._stage == 3 else 0.0

    def _reduce(self, elements: Held) -> float:
        return self._collective("reduce_scatter", elements, self._share) if self._stage == 3 else 0.0

    def _reduce_after(self, elements: Held) -> float:
        return self._collective("all_reduce", elements) if self._each and self._stage == 2 else 0.0

    def _collective(self, kind: Kind, elements: Held, share: float = 1.0) -> float:
        return elements.seconds(kind, self._task.width, self._task, self._layout, share)


def update_bytes(width: int) -> int:
    """Memory traffic of an AdamW step per parameter.

    Gradient read, written in fp32, read for the norm and for clipping, written; parameter and two moments
    read and written; in bf16 the new parameter copied.
    """
    gradient = width + 4 * _FP32_BYTES
    return gradient + (3 + 1 + 3) * _FP32_BYTES + (0 if width == _FP32_BYTES else _FP32_BYTES + width)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Seconds of a step: the parts add up to the whole. Parts within the schedule are means over ranks.

    Attributes:
        recompute: Forward done again, without its communication.
        tensor: Tensor-parallel communication that somebody waits for.
        context: The same of ranks that share sequences: keys and values, or heads.
        expert: The same of ranks that hold experts together: rows to them, and back.
        hidden: Such communication besides, which weight gradients hide: no part of the step.
        host: Copies of activations to the host and back that computing does not hide.
        transfers: Pipeline transfers that a rank cannot compute beside; others show as bubble.
        gathers: ZeRO-3's gathers, and reductions after each micro-batch, where they are longer than what they
            run beside.
        bubble: Waiting for other pipeline ranks.
        gradients: Reduction of gradients after everything else.
        parameters: Gathering what ZeRO-1 and 2 have updated.
        bubble_over_ideal: Idle over ideal time, with equal ranks the usual figure of a schedule.
    """

    compute: float
    recompute: float
    tensor: float
    transfers: float
    gathers: float
    bubble: float
    gradients: float
    update: float
    parameters: float
    bubble_over_ideal: float
    context: float = 0.0
    expert: float = 0.0
    hidden: float = 0.0
    host: float = 0.0

    @property
    def seconds(self) -> float:
        return sum(self.parts().values())

    def parts(self) -> dict[str, float]:
        return {
            "compute": self.compute,
            "recompute": self.recompute,
            "tensor-parallel communication": self.tensor,
            **({"context communication": self.context} if self.context else {}),
            **({"expert communication": self.expert} if self.expert else {}),
            **({"copies to the host": self.host} if self.host else {}),
            "transfers": self.transfers,
            "ZeRO gathers": self.gathers,
            "bubble": self.bubble,
            "gradient reduction": self.gradients,
            "optimizer": self.update,
            "parameter gathering": self.parameters,
        }

    @property
    def communication_share(self) -> float:
        """Part of the step that communication alone takes, 0 to 1."""
        waits = self.tensor + self.context + self.expert + self.transfers + self.gathers
        return (waits + self.gradients + self.parameters) / self.seconds


@dataclass(slots=True)
class Predictor:
    """Predicts layouts of one task; what several have in common is computed once."""

    task: Task
    _times: dict[object, tuple[LayerCost, ...]] = field(default_factory=dict)
    _bounds: dict[object, tuple[int, ...]] = field(default_factory=dict)
    _elements: dict[tuple[int, bool], tuple[int, ...]] = field(default_factory=dict)
    _held: dict[object, list[Held]] = field(default_factory=dict)
    _totals: dict[object, tuple[StageTotal, ...]] = field(default_factory=dict)
    _pipelines: dict[object, PipelineStep] = field(default_factory=dict)
    _runs: dict[object, PipelineTime] = field(default_factory=dict)

    def times(self, layout: Candidate) -> tuple[LayerCost, ...]:
        key = layout.timing
        if key not in self._times:
            self._times[key] = self.task.layers.times(self.task.machine, layout)
        return self._times[key]

    def elements(self, tensor: int, *, trained: bool = False) -> tuple[int, ...]:
        """Parameters of every layer on a rank, or those that are trained; a tied table's in the head, too."""
        key = tensor, trained
        if key not in self._elements:
            self._elements[key] = self.task.layers.elements(tensor, trained=trained)
        return self._elements[key]

    def held(self, layout: Candidate, *, trained: bool = False) -> list[Held]:
        """The same of a layout, whose ranks may share experts out."""
        key = layout.tensor, layout.mesh.ep, trained
        if key not in self._held:
            every = self.elements(layout.tensor, trained=trained)
            ranks = layout.mesh.ep
            shared = (
                self.task.layers.experts(layout.tensor, trained=trained) if ranks > 1 else (0,) * len(every)
            )
            self._held[key] = [
                Held(whole - experts, experts / ranks) for whole, experts in zip(every, shared, strict=True)
            ]
        return self._held[key]

    def stages(self, layout: Candidate) -> StageMap:
        count = layout.pipeline * layout.chunks
        bounds = layout.bounds
        if bounds is None:
            key = (layout.timing, count)
            if key not in self._bounds:
                self._bounds[key] = balanced([time.seconds for time in self.times(layout)], count)
            bounds = self._bounds[key]
        return StageMap(bounds, layout.pipeline, layout.program.placement)

    def costs(self, layout: Candidate) -> Costs:
        """Of every virtual stage, for the simulator."""
        stages = self.stages(layout)
        totals = self._stage_totals(layout, stages.bounds)
        wire = Wire(self.task, layout)
        zero = ZeroActions(self.task, layout)
        last = len(totals) - 1
        forward, whole, first, second = [], [], [], []
        there, back_again = [], []
        for stage, total in enumerate(totals):
            goes_back = bool(total.cost.backward_seconds)
            rows = total.cost.expert_back_wait * goes_back
            there.append(total.cost.expert_wait - total.cost.expert_back_wait)
            back_again.append(rows)
            into = stage > 0 and stages.rank_of(stage - 1) != stages.rank_of(stage)
            back = stage < last and stages.rank_of(stage + 1) != stages.rank_of(stage)
            received, returned = wire.action * into, wire.action * back
            forward.append(zero.forward(total) + received - there[-1])
            # Nothing goes back below the lowest trained layer.
            whole.append(zero.backward(total) + returned - rows if goes_back else 0.0)
            first.append(zero.inputs(total) + returned - rows if goes_back else 0.0)
            second.append(zero.weights(total) if total.trained.total else 0.0)
        return Costs(
            forward_seconds=tuple(forward),
            backward_seconds=tuple(whole),
            backward_input_seconds=tuple(first),
            backward_weight_seconds=tuple(second),
            transfer_seconds=wire.delay,
            exchange_seconds=tuple(there),
            backward_exchange_seconds=tuple(back_again),
            hidden_seconds=tuple(each for each, _ in self.hides(layout)),
            ahead_seconds=tuple(each for _, each in self.hides(layout)),
        )

    def hides(self, layout: Candidate) -> list[tuple[float, float]]:
        """Of every virtual stage; see :func:`dsx.planner.profile.hidden`."""
        times, bounds = self.times(layout), self.stages(layout).bounds
        return [hidden(times[a:b]) if layout.program.divides else (0.0, 0.0) for a, b in pairwise(bounds)]

    def _stage_totals(self, layout: Candidate, bounds: tuple[int, ...]) -> tuple[StageTotal, ...]:
        key = (layout.timing, bounds)
        if key not in self._totals:
            times, held, trained = self.times(layout), self.held(layout), self.held(layout, trained=True)
            self._totals[key] = tuple(
                StageTotal(LayerCost.total(times[a:b]), total(held[a:b]), total(trained[a:b]), b - a)
                for a, b in pairwise(bounds)
            )
        return self._totals[key]

    def bound(self, layout: Candidate) -> float:
        """Seconds that the prediction of a layout cannot be below."""
        costs = self.costs(layout)
        count = layout.micro_batches(self.task.global_batch)
        return least_seconds(layout.program, layout.pipeline, count, costs)

    def crossing(self, layout: Candidate) -> tuple[float, float]:
        """Seconds that a step of one run over several sites keeps the link between them busy, at least.

        Returns:
            What may run beside all computation, and what cannot.
        """
        network, task = self.task.machine.network, self.task
        if not network.cluster.gpus_per_site:
            return 0.0, 0.0
        group, count = Group(layout.replicas, layout.tensor), layout.micro_batches(self.task.global_batch)
        # Each micro-batch crosses once or more, and its gradient in the other direction.
        beside, after = count * Wire(self.task, layout).across, 0.0
        if layout.pipeline > 1:
            after += self._tied_seconds(layout)
        if network.sites(group) == 1:
            return beside, after
        held, trained = (
            total(self.held(layout, trained=only)).times(1 / layout.pipeline) for only in (False, True)
        )
        if layout.zero_stage == 3:
            given = task.width, task, layout, task.machine.software.gather_share
            gathers = total([held, trained]).seconds("all_gather", *given)
            reduction = trained.seconds("reduce_scatter", *given)
            return max(beside, count * (gathers + reduction)), after
        reduction = trained.seconds(_reduces(layout), task.width, task, layout)
        if layout.reduces_micro_batches:
            after += count * reduction
        else:
            beside = max(beside, reduction)
        if layout.zero_stage:
            after += trained.seconds("all_gather", task.width, task, layout)
        return beside, after

    def predict(self, layout: Candidate) -> StepTime:
        """The layout's step.

        Raises:
            ScheduleError: The schedule has no such size.
            LayoutError: More virtual stages than layers.
        """
        count = layout.micro_batches(self.task.global_batch)
        pipeline, stages = self._pipeline(layout, count), self.stages(layout)
        ran = self._run(layout, pipeline)
        backwards = self.costs(layout).by_op(stages.num_stages)[Op.BACKWARD]
        ends = [self._end(layout, stages, ran, backwards, rank) for rank in range(layout.pipeline)]
        gradients = max(end[0] for end in ends)
        update, parameters = max((end[1:] for end in ends), key=sum)
        return StepTime(
            **_busy_parts(self, layout, ran, pipeline),
            bubble=ran.seconds
            - sum(ran.busy_seconds) / layout.pipeline
            + self._jam(layout, stages, ran, count),
            gradients=gradients,
            update=update,
            parameters=parameters,
            bubble_over_ideal=ran.bubble,
        )

    def _jam(self, layout: Candidate, stages: StageMap, ran: PipelineTime, count: int) -> float:
        """By how much a step is longer because messages queue at a link between sites."""
        across = Wire(self.task, layout).across
        if not across:
            return 0.0
        each, cluster = layout.gpus // layout.pipeline, self.task.machine.network.cluster
        sites = [stages.rank_of(s) * each // cluster.gpus_per_site for s in range(stages.num_stages)]
        return max(0.0, count * sum(a != b for a, b in pairwise(sites)) * across - ran.seconds)

    def _pipeline(self, layout: Candidate, count: int) -> PipelineStep:
        key = (layout.schedule, layout.pipeline, layout.chunks, count)
        if key not in self._pipelines:
            self._pipelines[key] = PipelineStep(layout.program, layout.pipeline, layout.chunks, count)
        return self._pipelines[key]

    def _run(self, layout: Candidate, pipeline: PipelineStep) -> PipelineTime:
        key = (pipeline, self.costs(layout))
        if key not in self._runs:
            self._runs[key] = pipeline.run(key[1])
        return self._runs[key]

    def _end(
        self,
        layout: Candidate,
        stages: StageMap,
        ran: PipelineTime,
        backwards: Sequence[float],
        rank: int,
    ) -> tuple[float, float, float]:
        """After the schedule, on one pipeline rank: reduction, update, gathering."""
        elements, task = self.held(layout, trained=True), self.task
        whole = not layout.program.divides
        chunks = [
            (
                ran.left_seconds[s],
                backwards[s] * whole,
                total([elements[layer] for layer in stages.layers(s)]),
            )
            for s in stages.stages_of(rank)
        ]
        number, software = total([count for *_, count in chunks]), task.machine.software
        reduction = 0.0
        if layout.zero_stage < 3 and not layout.reduces_micro_batches:
            reduction = self._reduction(chunks, layout)
            if software.gradients == "backward":
                reduction = max(0.0, reduction - max(backwards))
        if layout.pipeline > 1:
            reduction += self._tied_seconds(layout)
        own = number.parts(layout) if layout.zero_stage else number.total
        update = task.machine.traffic(own * update_bytes(task.width))
        gathered = 0.0
        if layout.zero_stage in (1, 2):
            gathered = number.seconds("all_gather", task.width, task, layout)
        return reduction, update, gathered

    def _tied_seconds(self, layout: Candidate) -> float:
        """Summing the gradients of what the first and the last pipeline rank both hold."""
        shared = self.task.layers.shared_elements(layout.tensor)
        pair = Group(2, (layout.pipeline - 1) * layout.replicas * layout.tensor)
        network = self.task.machine.network
        return network.seconds("all_reduce", shared * self.task.width, pair) if shared else 0.0

    def _reduction(self, chunks: list[tuple[float, float, Held]], layout: Candidate) -> float:
        """What is left of the reduction of all gradients after the schedule has ended.

        Args:
            chunks: For each, what is left after its last action, how long the last backward is in which its
                gradients leave (0 if it is split), and their number of elements.
            layout: Of which the ranks with the same parameters sum them.
        """
        network, software = self.task.machine.network, self.task.machine.software

        def seconds(of: Held) -> float:
            return of.seconds(_reduces(layout), self.task.width, self.task, layout)

        if software.gradients != "chunk":
            whole = total([count for *_, count in chunks])
            started = -min(left for left, *_ in chunks) if software.gradients == "end" else 0.0
            return max(0.0, started + seconds(whole))
        now = -max(left + backward for left, backward, _ in chunks)
        for left, backward, count in sorted(chunks, reverse=True):
            # Bucket after bucket as gradients come, the last of them when the backward is over.
            number = round(count.total)
            hides = number and not network.cluster.is_host
            buckets = -(-number // elements_of_a_bucket(number, number)) if hides else 1
            first = -left - backward * (buckets - 1) / buckets
            now = max(now, first) + seconds(count)
            now = max(now, -left + seconds(count.times(1 / buckets)))
        return max(0.0, now)


def total(held: Sequence[Held]) -> Held:
    """Of several layers."""
    return Held(sum(each.plain for each in held), sum(each.experts for each in held))


def _reduces(layout: Candidate) -> Kind:
    """How gradients are summed: for the rank that updates them, or for all, as DeepSpeed does it itself."""
    return "reduce_scatter" if layout.zero_stage and not layout.reduces_micro_batches else "all_reduce"


def _busy_parts(
    predictor: Predictor, layout: Candidate, ran: PipelineTime, pipeline: PipelineStep
) -> dict[str, float]:
    """What the ranks' busy time consists of, as fields of :class:`StepTime`: means over ranks."""
    every, ranks = LayerCost.total(predictor.times(layout)), layout.pipeline
    divided, stages = pipeline.divided_share, predictor.stages(layout)
    waits = every.forward_wait + every.again_wait + (1 - divided) * every.backward_wait
    waits += divided * (every.input_wait + every.weight_wait)
    each = pipeline.num_micro_batches / ranks
    compute = each * every.computing_seconds
    recompute, context = each * every.again_seconds, each * every.context_wait
    expert, host = each * every.expert_wait, each * every.host_wait
    tensor = each * waits - context - expert - host
    behind = each * sum(seconds for seconds, _ in predictor.hides(layout))
    expert -= behind
    wire = Wire(predictor.task, layout)
    crossings = sum(a != b for a, b in pairwise(map(stages.rank_of, range(stages.num_stages))))
    transfers = each * 2 * crossings * wire.action
    told = compute + recompute + tensor + context + expert + host + transfers
    rest = sum(ran.busy_seconds) / ranks - told
    # What is left are gathers, or Python where actions are too short to hide it.
    gathers = rest if layout.zero_stage >= 2 else 0.0
    return {
        "compute": compute + rest - gathers,
        "recompute": recompute,
        "tensor": tensor,
        "context": context,
        "expert": expert,
        "hidden": behind,
        "host": host,
        "transfers": transfers,
        "gathers": gathers,
    }
