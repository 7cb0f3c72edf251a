"""Predicted time of a training step of one layout, and what it consists of.

A step is the pipeline's schedule (:mod:`.pipeline`) on the layers' times (:mod:`.layer_times`), then the part
of the gradients' reduction that is not hidden, then the update and the gathering of what it changed.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import prod

from dsx.plan.cluster import Group
from dsx.plan.params import layer_kinds, param_specs
from dsx.plan.partition import balanced
from dsx.plan.planner.kernels import Shape
from dsx.plan.planner.layer_times import LayerTime, layer_times
from dsx.plan.planner.layout import Layout, Task
from dsx.plan.planner.pipeline import Pipeline, PipelineTime, least_seconds
from dsx.plan.planner.traffic import Wire, ZeroActions, update_bytes
from dsx.plan.simulate import Costs
from dsx.spec.schedule import Op
from dsx.spec.stages import StageMap

__all__ = ["Layout", "Predictor", "StepTime", "Task"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Seconds of a step: the parts add up to the whole. Parts within the schedule are means over ranks.

    Attributes:
        compute: Forward and backward.
        recompute: Forward done again, without its communication.
        tensor: Tensor-parallel communication that somebody waits for.
        transfers: Pipeline transfers that a rank cannot compute beside; others show as bubble.
        gathers: ZeRO-3's gathers, and reductions after each micro-batch, where they are longer than what they
            run beside.
        bubble: Waiting for other pipeline ranks.
        gradients: Reduction of gradients after everything else.
        update: The optimizer step.
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

    @property
    def seconds(self) -> float:
        """The whole step."""
        return sum(self.parts().values())

    def parts(self) -> dict[str, float]:
        """The parts by name."""
        return {
            "compute": self.compute,
            "recompute": self.recompute,
            "tensor-parallel communication": self.tensor,
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
        waits = self.tensor + self.transfers + self.gathers + self.gradients + self.parameters
        return waits / self.seconds


@dataclass(slots=True)
class Predictor:
    """Predicts layouts of one task; what several have in common is computed once."""

    task: Task
    _times: dict[object, tuple[LayerTime, ...]] = field(default_factory=dict)
    _bounds: dict[object, tuple[int, ...]] = field(default_factory=dict)
    _elements: dict[int, tuple[int, ...]] = field(default_factory=dict)
    _totals: dict[object, tuple[tuple[LayerTime, int], ...]] = field(default_factory=dict)
    _pipelines: dict[object, Pipeline] = field(default_factory=dict)
    _runs: dict[object, PipelineTime] = field(default_factory=dict)

    def shape(self, layout: Layout) -> Shape:
        """A micro-batch of the layout."""
        return Shape(
            model=self.task.model,
            tensor=layout.tensor,
            sequence_parallel=layout.sequence_parallel,
            micro_batch=layout.micro_batch,
            sequence_length=self.task.sequence_length,
            width=self.task.width,
            vocab_multiple=self.task.vocab_multiple,
        )

    def times(self, layout: Layout) -> tuple[LayerTime, ...]:
        """Of every layer."""
        key = _timing(layout)
        if key not in self._times:
            self._times[key] = layer_times(self.task.machine, self.shape(layout), layout.recompute)
        return self._times[key]

    def elements(self, tensor: int) -> tuple[int, ...]:
        """Parameters of every layer on one rank; a tied table counts again in the head."""
        if tensor not in self._elements:
            one = replace(self.task.model, num_layers=1)
            kinds = layer_kinds(one)
            counts = dict.fromkeys(kinds, 0)
            for spec in param_specs(one, pad_multiple=self.task.vocab_multiple):
                number = prod(spec.local_shape(tensor))
                counts[kinds[spec.layer]] += number
                if spec.tie is not None:
                    counts[kinds[-1]] += number
            self._elements[tensor] = tuple(counts[kind] for kind in layer_kinds(self.task.model))
        return self._elements[tensor]

    def stages(self, layout: Layout) -> StageMap:
        """Layers over virtual stages."""
        count = layout.pipeline * layout.chunks
        bounds = layout.bounds
        if bounds is None:
            key = (_timing(layout), count)
            if key not in self._bounds:
                self._bounds[key] = balanced([time.seconds for time in self.times(layout)], count)
            bounds = self._bounds[key]
        return StageMap(bounds, layout.pipeline, layout.program.placement)

    def costs(self, layout: Layout) -> Costs:
        """Of every virtual stage, for the simulator."""
        stages = self.stages(layout)
        totals = self._stage_totals(layout, stages.bounds)
        wire = Wire(self.task.machine, self.shape(layout), layout)
        zero = ZeroActions(self.task, layout)
        last = len(totals) - 1
        forward, whole, first, second = [], [], [], []
        for stage, (time, number) in enumerate(totals):
            layers = len(stages.layers(stage))
            into = stage > 0 and stages.rank_of(stage - 1) != stages.rank_of(stage)
            back = stage < last and stages.rank_of(stage + 1) != stages.rank_of(stage)
            received, returned = wire.action * into, wire.action * back
            forward.append(zero.forward(time.forward_seconds, number, layers) + received)
            whole.append(zero.backward(time.backward_seconds, number, layers) + returned)
            first.append(zero.backward(time.input_seconds, number, layers, reduces=False) + returned)
            second.append(zero.weights(time.weight_seconds, number))
        return Costs(
            forward_seconds=tuple(forward),
            backward_seconds=tuple(whole),
            backward_input_seconds=tuple(first),
            backward_weight_seconds=tuple(second),
            transfer_seconds=wire.delay,
        )

    def _stage_totals(self, layout: Layout, bounds: tuple[int, ...]) -> tuple[tuple[LayerTime, int], ...]:
        """Time and parameters of every virtual stage."""
        key = (_timing(layout), bounds)
        if key not in self._totals:
            times, elements = self.times(layout), self.elements(layout.tensor)
            self._totals[key] = tuple(
                (LayerTime.total(times[a:b]), sum(elements[a:b])) for a, b in pairwise(bounds)
            )
        return self._totals[key]

    def bound(self, layout: Layout) -> float:
        """Seconds that the prediction of a layout cannot be below."""
        costs = self.costs(layout)
        count = layout.micro_batches(self.task.global_batch)
        return least_seconds(layout.program, layout.pipeline, count, costs)

    def predict(self, layout: Layout) -> StepTime:
        """The layout's step.

        Raises:
            ScheduleError: The schedule has no such size.
            LayoutError: More virtual stages than layers.
        """
        count = layout.micro_batches(self.task.global_batch)
        pipeline, stages = self._pipeline(layout, count), self.stages(layout)
        ran = self._run(layout, pipeline)
        mean = _Mean.of(self, layout, ran, pipeline)
        ends = [self._end(layout, stages, ran, rank) for rank in range(layout.pipeline)]
        gradients = max(end[0] for end in ends)
        update, parameters = max((end[1:] for end in ends), key=sum)
        return StepTime(
            compute=mean.compute,
            recompute=mean.recompute,
            tensor=mean.tensor,
            transfers=mean.transfers,
            gathers=mean.gathers,
            bubble=ran.seconds - sum(ran.busy_seconds) / layout.pipeline,
            gradients=gradients,
            update=update,
            parameters=parameters,
            bubble_over_ideal=ran.bubble,
        )

    def _pipeline(self, layout: Layout, count: int) -> Pipeline:
        key = (layout.schedule, layout.pipeline, layout.chunks, count)
        if key not in self._pipelines:
            self._pipelines[key] = Pipeline(layout.program, layout.pipeline, layout.chunks, count)
        return self._pipelines[key]

    def _run(self, layout: Layout, pipeline: Pipeline) -> PipelineTime:
        key = (pipeline, self.costs(layout))
        if key not in self._runs:
            self._runs[key] = pipeline.run(key[1])
        return self._runs[key]

    def _end(
        self, layout: Layout, stages: StageMap, ran: PipelineTime, rank: int
    ) -> tuple[float, float, float]:
        """After the schedule, on one pipeline rank: reduction, update, gathering."""
        elements, task = self.elements(layout.tensor), self.task
        chunks = [
            (ran.left_seconds[s], sum(elements[layer] for layer in stages.layers(s)))
            for s in stages.stages_of(rank)
        ]
        number = sum(count for _, count in chunks)
        network, software = task.machine.network, task.machine.software
        group = Group(layout.data, layout.tensor)
        reduction = 0.0
        if layout.zero_stage < 3 and not layout.reduces_micro_batches:
            reduction = self._reduction(chunks, group)
            if software.gradients == "backward":
                last = max(self.costs(layout).by_op(stages.num_stages)[Op.BACKWARD])
                reduction = max(0.0, reduction - last)
        if task.model.tied_embeddings and layout.pipeline > 1:
            pair = Group(2, (layout.pipeline - 1) * layout.data * layout.tensor)
            reduction += network.seconds("all_reduce", elements[-1] * task.width, pair)
        own = number / (layout.data if layout.zero_stage else 1)
        update = task.machine.traffic(own * update_bytes(task.width))
        gathered = 0.0
        if layout.zero_stage in (1, 2):
            gathered = network.seconds("all_gather", number * task.width, group)
        return reduction, update, gathered

    def _reduction(self, chunks: list[tuple[float, int]], group: Group) -> float:
        """What of an all-reduce of all gradients is left after the schedule has ended."""
        network, software = self.task.machine.network, self.task.machine.software
        if software.gradients != "chunk":
            whole = sum(count for _, count in chunks)
            started = -min(left for left, _ in chunks) if software.gradients == "end" else 0.0
            return max(0.0, started + network.seconds("all_reduce", whole * self.task.width, group))
        now = -max(left for left, _ in chunks)
        for left, count in sorted(chunks, reverse=True):
            now = max(now, -left) + network.seconds("all_reduce", count * self.task.width, group)
        return max(0.0, now)


def _timing(layout: Layout) -> object:
    """What the layers' times depend on."""
    return layout.tensor, layout.sequence_parallel, layout.micro_batch, layout.recompute


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mean:
    """What the ranks' busy time consists of, per step and mean over ranks."""

    compute: float
    recompute: float
    tensor: float
    transfers: float
    gathers: float

    @classmethod
    def of(cls, predictor: Predictor, layout: Layout, ran: PipelineTime, pipeline: Pipeline) -> _Mean:
        total, ranks = LayerTime.total(predictor.times(layout)), layout.pipeline
        divided, stages = pipeline.divided_share, predictor.stages(layout)
        waits = total.forward_wait + total.again_wait + (1 - divided) * total.backward_wait
        waits += divided * (total.input_wait + total.weight_wait)
        each = pipeline.num_micro_batches / ranks
        compute = each * (total.forward + total.grad_input + total.grad_weight)
        recompute, tensor = each * total.again, each * waits
        wire = Wire(predictor.task.machine, predictor.shape(layout), layout)
        crossings = sum(a != b for a, b in pairwise(map(stages.rank_of, range(stages.num_stages))))
        transfers = each * 2 * crossings * wire.action
        rest = sum(ran.busy_seconds) / ranks - compute - recompute - tensor - transfers
        # What is left are gathers, or Python where actions are too short to hide it.
        gathers = rest if layout.zero_stage >= 2 else 0.0
        return cls(
            compute=compute + rest - gathers,
            recompute=recompute,
            tensor=tensor,
            transfers=transfers,
            gathers=gathers,
        )
