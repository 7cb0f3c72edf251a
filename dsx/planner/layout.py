"""What is trained, one way to train it, and all ways on so many GPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product

from dsx.errors import LayoutError
from dsx.models.flops import flops_per_token
from dsx.models.spec import ModelSpec, Recompute
from dsx.parallel.mesh import Mesh
from dsx.planner.choose import CHUNKS
from dsx.planner.layer_times import Machine
from dsx.schedules.builders import ScheduleName, default_chunks, placement_of
from dsx.schedules.program import Program


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What is trained, on what.

    Attributes:
        model: The architecture.
        machine: Hardware and software.
        global_batch: Sequences per step, over all GPUs.
        sequence_length: Tokens.
        vocab_multiple: To which each rank's vocabulary rows are padded.
    """

    model: ModelSpec
    machine: Machine
    global_batch: int
    sequence_length: int
    vocab_multiple: int = 64

    @property
    def width(self) -> int:
        """Bytes of a parameter."""
        return 2 if self.machine.precision == "bf16" else 4

    @property
    def flops(self) -> float:
        """Of a step, by the convention of MFU."""
        tokens = self.global_batch * self.sequence_length
        return tokens * flops_per_token(self.model, self.sequence_length)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedLayout:
    """One way to train it.

    Attributes:
        tensor: Tensor-parallel degree.
        pipeline: Pipeline degree.
        data: Data-parallel degree.
        schedule: Of the pipeline.
        chunks: Virtual stages per pipeline rank.
        micro_batch: Sequences per micro-batch.
        recompute: What backward computes again.
        sequence_parallel: Whether activations are cut along the sequence.
        zero_stage: 0 to 3.
        reduces_micro_batches: ZeRO-2: gradients are reduced after every backward (``dsx.zero.reduce``).
        bounds: Layers of the virtual stages; None: the cut whose longest stage is the shortest.
    """

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    schedule: str = "1f1b"
    chunks: int = 1
    micro_batch: int = 1
    recompute: Recompute = "none"
    sequence_parallel: bool = True
    zero_stage: int = 1
    reduces_micro_batches: bool = False
    bounds: tuple[int, ...] | None = None

    @property
    def gpus(self) -> int:
        """How many it takes."""
        return self.tensor * self.pipeline * self.data

    @property
    def mesh(self) -> Mesh:
        """Its mesh."""
        return Mesh.of(pp=self.pipeline, dp=self.data, tp=self.tensor)

    @property
    def program(self) -> Program:
        """Its schedule."""
        return Program(name=self.schedule)

    def micro_batches(self, global_batch: int) -> int:
        """Per step and data-parallel rank."""
        return global_batch // (self.data * self.micro_batch)

    @property
    def label(self) -> str:
        """In words."""
        parts = [f"tensor {self.tensor}", f"pipeline {self.pipeline}", f"data {self.data}"]
        if self.pipeline > 1:
            parts.append(self.schedule + (f" x {self.chunks}" if self.chunks > 1 else ""))
        parts.append(f"micro-batch {self.micro_batch}")
        each = " reducing each micro-batch" if self.reduces_micro_batches else ""
        parts.append(f"ZeRO-{self.zero_stage}{each}")
        if self.recompute != "none":
            parts.append(f"recompute {self.recompute}")
        if self.tensor > 1 and not self.sequence_parallel:
            parts.append("no sequence parallelism")
        return ", ".join(parts)


SCHEDULES: tuple[ScheduleName, ...] = ("1f1b", "interleaved", "zb_h1", "zbv", "interleaved_zb", "dualpipev")
"""Those worth trying: gpipe has 1f1b's bubble and looped_bfs interleaved's, with more memory."""

_LARGEST_MICRO_BATCH = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutSpace:
    """What may be chosen; one value is no choice.

    Attributes:
        gpus: How many there are, all of them used.
        tensor: Tensor-parallel degrees; None: those that divide a node.
        pipeline: Pipeline degrees; None: all.
        micro_batches: Sizes of micro-batches; None: up to 32.
        schedules: Pipeline schedules.
        recompute: Recompute modes.
        zero_stages: ZeRO stages; 2 is meant with a reduction per micro-batch, for otherwise it takes the time
            and the memory of 1 (docs/adr/0008).
    """

    gpus: int
    tensor: tuple[int, ...] | None = None
    pipeline: tuple[int, ...] | None = None
    micro_batches: tuple[int, ...] | None = None
    schedules: tuple[ScheduleName, ...] = SCHEDULES
    recompute: tuple[Recompute, ...] = ("none", "selective", "full")
    zero_stages: tuple[int, ...] = (0, 1, 2, 3)


def meshes(task: Task, space: LayoutSpace) -> Iterator[PlannedLayout]:
    """One layout per mesh: tensor, pipeline and data degree.

    Raises:
        LayoutError: A degree that is asked for and cannot be, or a batch that no mesh can share out.
    """
    degrees = list(_degrees(task, space))
    shared = [(tp, pp, dp) for tp, pp, dp in degrees if task.global_batch % dp == 0]
    if not shared:
        sizes = sorted({dp for _, _, dp in degrees})
        raise LayoutError(
            f"global batch {task.global_batch} on {space.gpus} GPUs",
            f"it divides by none of the data-parallel degrees that are possible ({_some(sizes)})",
            f"use a multiple of {sizes[0]}",
        )
    for tp, pp, dp in shared:
        yield PlannedLayout(tensor=tp, pipeline=pp, data=dp)


def tensor_objection(task: Task, tp: int) -> str | None:
    """Why the model cannot be cut over ``tp`` ranks; None if it can."""
    model = task.model
    sizes = {
        "attention heads": model.num_heads,
        "key/value heads": model.num_kv_heads,
        "MLP width": model.ffn_size,
    }
    bad = [f"{name} = {size}" for name, size in sizes.items() if size % tp]
    return f"{', '.join(bad)}: not divisible by it" if bad else None


def variants(task: Task, space: LayoutSpace, mesh: PlannedLayout) -> Iterator[PlannedLayout]:
    """Layouts of a mesh with everything but their schedule."""
    share = task.global_batch // mesh.data
    sizes = space.micro_batches or tuple(range(1, _LARGEST_MICRO_BATCH + 1))
    stages = space.zero_stages
    if mesh.data == 1:
        stages = tuple(stage for stage in stages if stage < 2) or stages  # There is nothing to cut.
    can_cut = mesh.tensor > 1 and task.sequence_length % mesh.tensor == 0
    for size, mode, zero in product(sizes, space.recompute, stages):
        if share % size:
            continue
        layout = replace(
            mesh,
            micro_batch=size,
            recompute=mode,
            zero_stage=zero,
            reduces_micro_batches=zero == 2,
            sequence_parallel=can_cut,
        )
        yield layout
        if can_cut:
            yield replace(layout, sequence_parallel=False)


def scheduled(task: Task, space: LayoutSpace, layout: PlannedLayout) -> Iterator[PlannedLayout]:
    """The same with every schedule that it can have."""
    if layout.pipeline == 1:
        yield replace(layout, schedule="1f1b", chunks=1)
        return
    for name in space.schedules:
        if default_chunks(name) == 1:
            chunks: Iterable[int] = (1,)
        else:
            chunks = (2,) if placement_of(name) == "v" else CHUNKS
        for count in chunks:
            if layout.pipeline * count <= task.model.num_layers:
                yield replace(layout, schedule=name, chunks=count)


def _degrees(task: Task, space: LayoutSpace) -> Iterator[tuple[int, int, int]]:
    node = task.machine.network.cluster.gpus_per_node
    found = False
    for tp in _asked("tensor", space.tensor, space.gpus, lambda n: tensor_objection(task, n)):
        if space.tensor is None and (tp > node or node % tp):
            continue
        for pp in _asked("pipeline", space.pipeline, space.gpus, lambda n: _pipeline_objection(task, n)):
            if space.gpus % (tp * pp) == 0:
                found = True
                yield tp, pp, space.gpus // (tp * pp)
    if not found:
        raise LayoutError(
            f"tensor {space.tensor} x pipeline {space.pipeline}",
            f"their product does not divide {space.gpus} GPUs",
            "leave one of them open",
        )


def _pipeline_objection(task: Task, pp: int) -> str | None:
    layers = task.model.num_layers
    return f"the model has {layers} blocks, fewer than stages" if pp > layers else None


def _asked(
    name: str, wanted: tuple[int, ...] | None, gpus: int, objection: Callable[[int], str | None]
) -> list[int]:
    """Legal degrees; those asked for must be legal."""
    divisors = [n for n in range(1, gpus + 1) if gpus % n == 0]
    legal = [n for n in divisors if objection(n) is None]
    for degree in wanted or ():
        why = f"{gpus} GPUs do not divide by it" if degree not in divisors else objection(degree)
        if why is not None:
            raise LayoutError(f"{name} = {degree}", why, f"use one of {_some(legal)}")
    return legal if wanted is None else list(wanted)


def _some(numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:12]))
    return shown + (", ..." if len(numbers) > 12 else "")
