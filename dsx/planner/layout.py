"""A training task, one way to do it, and all ways on a number of GPUs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any, get_args

from dsx.errors import LayoutError
from dsx.models.flops import WIDTHS
from dsx.models.spec import ContextMethod, HubModel, MlpTiles, Recompute
from dsx.parallel.limits import LayoutRequest, divisors, possible, violations
from dsx.parallel.mesh import Mesh
from dsx.schedules.builders import NAMES
from dsx.schedules.program import Program

if TYPE_CHECKING:
    from dsx.planner.costs import Evidence
    from dsx.planner.layer_times import Machine
    from dsx.planner.profile import LayerCost

ADAPTERS, EXPERTS, SHARED = "adapters", "experts", "ranks that share sequences"
"""Kinds of layers (:meth:`PlannedLayers.kinds`), and of meshes."""

CHUNKS = (2, 3, 4, 6, 8)
"""Virtual stages per rank that "auto" tries where a schedule can have any number."""

Bounds = tuple[int, ...]
"""First layer of every virtual stage, then the number of layers."""


class PlannedLayers(ABC):
    """What the planner asks of the layers of a task; what it answers itself holds for any list of layers."""

    @property
    @abstractmethod
    def asked(self) -> LayoutRequest:
        """What limits the degrees: a number of layers, and the model where it is one of dsx's own."""

    @property
    @abstractmethod
    def num_layers(self) -> int:
        """Layers that may be shared out over stages: blocks of a model, all of a list."""

    sequence_length: int | None
    """Tokens of a sequence; None where samples are not known to be such."""

    @property
    def soon(self) -> PlannedLayers:
        """Layers whose times and memory are little below these and soon known; themselves if none are."""
        return self

    @property
    @abstractmethod
    def is_tied(self) -> bool:
        """Whether the last layer has parameters of another."""

    @abstractmethod
    def times(self, machine: Machine, layout: Candidate) -> tuple[LayerCost, ...]:
        """What every layer takes for one micro-batch."""

    @abstractmethod
    def elements(self, tensor: int, *, trained: bool = False) -> tuple[int, ...]:
        """Parameters of every layer on one of so many tensor-parallel ranks, or those that are trained.

        Tied ones count at each use.
        """

    def experts(self, tensor: int, *, trained: bool = False) -> tuple[int, ...]:
        """Those of :meth:`elements` that are of experts which ranks may share out: none that are known."""
        return tuple(0 for _ in self.elements(tensor, trained=trained))

    def shared_elements(self, tensor: int) -> int:
        """Those that the first and the last pipeline rank both hold and train."""
        return self.elements(tensor, trained=True)[-1] if self.is_tied else 0

    def kept_bytes(self, layout: Candidate) -> int:
        """What each block keeps of a micro-batch at least; nothing is known of layers that are no blocks."""
        del layout
        return 0

    def cuts_sequence(self, layout: Candidate) -> bool:
        """Whether tensors between stages are cut along the sequence."""
        del layout
        return False

    @abstractmethod
    def boundary_bytes(self, layout: Candidate) -> int:
        """The largest whole message between stages."""

    @property
    def unshared(self) -> str | None:
        """Why no ranks may share their sequences; None if they may."""
        return None if self.sequence_length else "samples are not known to be sequences"

    @abstractmethod
    def flops(self, samples: int) -> float:
        """FLOPs of forward and backward, recomputation aside."""

    @abstractmethod
    def kinds(self, layout: Candidate) -> tuple[str, ...]:
        """What tells them from the dense models that are trained whole, of which most runs are published."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What is trained, on what."""

    layers: PlannedLayers
    machine: Machine
    global_batch: int

    @property
    def width(self) -> int:
        return WIDTHS[self.machine.precision]

    @property
    def flops(self) -> float:
        """FLOPs of a step, by the convention of MFU."""
        return self.layers.flops(self.global_batch)

    def evidence(self, layout: Candidate) -> Evidence | str:
        """How far predictions of such a task are known to be off, or why nobody knows."""
        network, kinds = self.machine.network, [*self.layers.kinds(layout)]
        known, what = network.efficiency.evidence, "how far the steps may be off is not known"
        if known is None or known.stands_in:
            return known or what
        kinds += [self.machine.precision] if self.machine.precision == "fp32" else []
        kinds += ["one job over several sites"] if network.cluster.gpus_per_site else []
        kinds += [SHARED] if layout.mesh.cp > 1 else []
        if kinds == [ADAPTERS] and network.efficiency.adapters is not None:
            return network.efficiency.adapters
        if kinds == [SHARED] and network.efficiency.context is not None:
            return str(network.efficiency.context)
        if not kinds:
            return known
        why = f"none of the published runs that are compared has {' or '.join(kinds)}"
        return f"{what}: {why}"


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One way to train it.

    Attributes:
        micro_batch: Sequences per micro-batch.
        sequence_parallel: Whether activations are cut along the sequence.
        context_method: How attention sees the sequences that context-parallel ranks share.
        mlp_tiles: As ``dsx.mlp_tiles`` has it.
        zero_stage: 0 to 3.
        reduces_micro_batches: ZeRO-2: gradients are reduced after every backward (``dsx.zero.reduce``).
        bounds: Layers of the virtual stages; None: the cut whose longest stage is the shortest.
    """

    mesh: Mesh
    schedule: str = "1f1b"
    chunks: int = 1
    micro_batch: int = 1
    recompute: Recompute = "none"
    sequence_parallel: bool = True
    context_method: ContextMethod = "all_gather"
    mlp_tiles: MlpTiles = 1
    zero_stage: int = 1
    reduces_micro_batches: bool = False
    bounds: Bounds | None = None

    @cached_property
    def tensor(self) -> int:
        return self.mesh.tp

    @cached_property
    def pipeline(self) -> int:
        return self.mesh.pp

    @cached_property
    def data(self) -> int:
        """Ranks that read samples of their own."""
        return self.mesh.num_shares

    @cached_property
    def replicas(self) -> int:
        """Ranks that hold the same parameters: data x context."""
        return self.mesh.num_replicas

    @cached_property
    def timing(self) -> tuple[object, ...]:
        """What the layers' times, and what they keep, depend on."""
        context = self.mesh.cp, self.context_method
        again = self.recompute, self.mlp_tiles, self.mesh.ep
        return self.tensor, self.sequence_parallel, self.micro_batch, *again, *context

    @property
    def gpus(self) -> int:
        return self.mesh.size

    @property
    def program(self) -> Program:
        return Program(name=self.schedule)

    def micro_batches(self, global_batch: int) -> int:
        return global_batch // (self.data * self.micro_batch)

    @property
    def settings(self) -> dict[str, Any]:
        """The candidate as keys of a config, without the batch and the cut into stages."""
        shared = {"context": self.mesh.cp, "context_method": self.context_method} if self.mesh.cp > 1 else {}
        return {
            **{f"dsx.parallel.{key}": value for key, value in shared.items()},
            **({} if self.mesh.ep == 1 else {"dsx.parallel.expert": self.mesh.ep}),
            **({} if self.mlp_tiles == 1 else {"dsx.mlp_tiles": self.mlp_tiles}),
            "dsx.recompute": self.recompute,
            "train_micro_batch_size_per_gpu": self.micro_batch,
            "zero_optimization.stage": self.zero_stage,
            "dsx.parallel.tensor": self.tensor,
            "dsx.parallel.pipeline": self.pipeline,
            "dsx.parallel.chunks": self.chunks,
            "dsx.parallel.sequence_parallel": self.sequence_parallel,
            "dsx.schedule.name": self.schedule,
            "dsx.zero.reduce": "micro_batch" if self.reduces_micro_batches else "step",
        }

    @property
    def label(self) -> str:
        parts = self.mesh.words.split(" x ")
        if self.pipeline > 1:
            parts.append(self.schedule + (f" x {self.chunks}" if self.chunks > 1 else ""))
        parts.append(f"micro-batch {self.micro_batch}")
        each = " reducing each micro-batch" if self.reduces_micro_batches else ""
        parts.append(f"ZeRO-{self.zero_stage}{each}")
        if self.recompute != "none":
            parts.append(f"recompute {self.recompute}")
        if self.mlp_tiles != 1:
            parts.append("feed-forwards in tiles")
        if self.mesh.cp > 1:
            parts.append(self.context_method)
        if self.tensor > 1 and not self.sequence_parallel:
            parts.append("no sequence parallelism")
        return ", ".join(parts)


SCHEDULES = ("1f1b", "interleaved", "zb_h1", "zbv", "interleaved_zb", "dualpipev", "v_half", "v_min")
"""Those worth predicting: gpipe has 1f1b's bubble and looped_bfs interleaved's, with more memory."""

_LARGEST_MICRO_BATCH = 32

LONG = 32_768
"""Tokens from which a plan tries context-parallel ranks unasked.

Every rank gets all keys and values of a sequence: the more tokens it has, the more arithmetic of attention is
beside each byte of them, and the less fits without. For Llama 2 7B on H100s NVIDIA has published speedups of
1.00 up to 16,384 tokens, of 1.03 at 32,768, and 1.07, 1.31, 1.40, 5.28 and 20.23 at twice as many each
(docs.nvidia.com, NeMo Framework 24.12, "Long Sequence Performance").
"""

_LEAST_PART = 2048
"""Tokens that a rank has at least of a sequence where nobody asks for a degree."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """What may be chosen; one value is no choice.

    Attributes:
        gpus: How many there are, all of them used.
        tensor: Tensor-parallel degrees; None: those that divide a node.
        pipeline: Pipeline degrees; None: all.
        context: Context-parallel degrees; None: all that leave a rank enough of a sequence.
        methods: How attention may see sequences that ranks share.
        expert: Expert-parallel degrees; None: all.
        micro_batches: Sizes of micro-batches; None: up to 32.
        zero_stages: ZeRO stages; 2 is meant with a reduction per micro-batch, for otherwise it takes the time
            and the memory of 1 (docs/adr/0008).
        chunks: Virtual stages per rank; None: those that each schedule can have, of :data:`CHUNKS`.
        group_size: As :class:`~dsx.schedules.builders.Options`; None: whatever is best.
        warmup_per_rank: The same.
        most_live: The same; None is the schedule's default.
        rows: A schedule written by hand, in place of all of these.
        mlp_tiles: Ways to compute feed-forwards, as ``dsx.mlp_tiles`` has them; each further one is tried
            where nothing fits with the one before.
        cut: Bounds for a number of virtual stages (raises LayoutError for one that it cannot); None searches
            for the shortest step.
        most_bytes: Most activation bytes per rank; None for any.
    """

    gpus: int = 1
    tensor: tuple[int, ...] | None = None
    pipeline: tuple[int, ...] | None = None
    context: tuple[int, ...] | None = (1,)
    methods: tuple[ContextMethod, ...] = get_args(ContextMethod)
    expert: tuple[int, ...] | None = (1,)
    micro_batches: tuple[int, ...] | None = None
    zero_stages: tuple[int, ...] = (0, 1, 2, 3)
    names: tuple[str, ...] = NAMES
    chunks: tuple[int, ...] | None = None
    group_size: int | None = None
    warmup_per_rank: int | None = None
    most_live: int | None = None
    rows: Program | None = None
    recompute: tuple[Recompute, ...] = ("none",)
    mlp_tiles: tuple[MlpTiles, ...] = (1,)
    cut: Callable[[int], Bounds] | None = None
    most_bytes: int | None = None

    @classmethod
    def of(cls, gpus: int, **fixed: Any) -> Space:
        """Everything that is worth predicting on so many GPUs, within what is ``fixed``."""
        open_ones: dict[str, Any] = {"names": SCHEDULES, "recompute": ("none", "selective", "full")}
        return cls(gpus=gpus, **(open_ones | fixed))

    def pipelines(self, num_ranks: int, num_layers: int) -> Iterator[tuple[str, int]]:
        """Schedules with chunks; chunks that are not asked for leave every stage one of ``num_layers``."""
        layers = num_layers if self.chunks is None else None
        for name in self.names:
            asked = LayoutRequest(schedule=name, pipeline=num_ranks, layers=layers)
            tried = (1,) if num_ranks == 1 else self.chunks or (1, *CHUNKS)
            for chunks in possible(asked, "chunks", tried):
                if self.chunks is None or chunks in self.chunks:
                    yield name, chunks


def meshes(task: Task, space: Space) -> Iterator[Candidate]:
    """One candidate per mesh: tensor, pipeline, context, data and expert degree.

    Raises:
        LayoutError: A degree that is asked for and cannot be, or a batch that no mesh can share out.
    """
    found = list(_meshes(task, space))
    shared = [mesh for mesh in found if task.global_batch % mesh.num_shares == 0]
    if not shared:
        sizes = sorted({mesh.num_shares for mesh in found})
        raise LayoutError(
            f"global batch {task.global_batch} on {space.gpus} GPUs",
            f"it divides by none of the data-parallel degrees that are possible ({_some(sizes)})",
            f"use a multiple of {sizes[0]}",
        )
    for mesh in shared:
        yield Candidate(mesh=mesh)


def _meshes(task: Task, space: Space) -> Iterator[Mesh]:
    node, found = task.machine.network.cluster.gpus_per_node, False
    asked = replace(task.layers.asked, ranks=space.gpus, ranks_do="{} GPUs do")
    if "all_gather" not in space.methods:
        asked = replace(asked, context_method=space.methods[0])
    contexts = _degrees(replace(asked, tensor=1), "context", space.context)
    if space.context is None:
        contexts = [each for each in contexts if each == 1 or (asked.row or 0) // each >= _LEAST_PART]
    alone = replace(asked, tensor=1, pipeline=1)
    experts = [1] if space.expert == (1,) else _degrees(alone, "expert", space.expert)
    for tensor in _degrees(asked, "tensor", space.tensor):
        if space.tensor is None and (tensor > node or node % tensor):
            continue
        pipelines = _degrees(asked, "pipeline", space.pipeline)
        for pipeline in possible(replace(asked, tensor=tensor), "pipeline", pipelines):
            for context in possible(replace(asked, tensor=tensor, pipeline=pipeline), "context", contexts):
                laid = replace(asked, tensor=tensor, pipeline=pipeline, context=context)
                for expert in possible(laid, "expert", experts):
                    found = True
                    yield Mesh.over(space.gpus, pp=pipeline, tp=tensor, cp=context, ep=expert)
    if not found:
        wanted = {"tensor": space.tensor, "pipeline": space.pipeline, "context": space.context}
        given: dict[str, Any] = {
            key: each[0] for key, each in (wanted | {"expert": space.expert}).items() if each is not None
        }
        optional = ("context", "expert")
        named = [f"{key} {degree}" for key, degree in given.items() if key not in optional or degree > 1]
        broken = next(violations(replace(asked, **given)), None)
        if broken is None or space.gpus % prod(given[key] for key in wanted if key in given):
            why, fix = f"their product does not divide {space.gpus} GPUs", "leave one of them open"
        else:
            why, fix = broken.why, broken.fix
        raise LayoutError(" x ".join(named), why, fix)


def _degrees(asked: LayoutRequest, key: str, wanted: tuple[int, ...] | None) -> list[int]:
    """Legal degrees; those asked for must be legal."""
    legal = possible(asked, key, divisors(asked.ranks or 1))
    for degree in wanted or ():
        field: dict[str, Any] = {key: degree}
        for each in violations(replace(asked, **field)):
            raise LayoutError(f"{key} = {degree}", each.why, f"use one of {_some(legal)}")
    return legal if wanted is None else list(wanted)


def _some(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:12])) + (", ..." if len(numbers) > 12 else "")


def variants(task: Task, space: Space, layout: Candidate) -> Iterator[Candidate]:
    """Candidates of a mesh with everything but their schedule, and the first way to compute feed-forwards."""
    batch = LayoutRequest(global_batch=task.global_batch, data=layout.data)
    sizes = possible(batch, "micro_batch", space.micro_batches or range(1, _LARGEST_MICRO_BATCH + 1))
    stages = space.zero_stages
    if layout.mesh.num_replicas == 1:
        stages = tuple(stage for stage in stages if stage < 2) or stages  # There is nothing to cut.
    if layout.mesh.ep > 1:
        stages = tuple(stage for stage in stages if stage != 2) or stages  # It is 1 where dsx reduces.
    length, context, model = task.layers.sequence_length, layout.mesh.cp, task.layers.asked.model
    sequence = LayoutRequest(sequence_length=length, context=context)
    shared = LayoutRequest(model=model, tensor=layout.tensor, context=context)
    methods: tuple[ContextMethod, ...] = ("all_gather",)
    if context > 1:
        methods = tuple(possible(shared, "context_method", space.methods))
    may_cut = layout.tensor > 1 and not (isinstance(model, HubModel) and model.no_sequence)
    cuts = (True, False) if may_cut and possible(sequence, "tensor", [layout.tensor]) else (False,)
    for size, mode, zero, cut, method in product(sizes, space.recompute, stages, cuts, methods):
        yield replace(
            layout,
            micro_batch=size,
            recompute=mode,
            zero_stage=zero,
            reduces_micro_batches=zero == 2 and layout.mesh.ep == 1,  # DeepSpeed's knows no experts
            sequence_parallel=cut,
            context_method=method,
            mlp_tiles=space.mlp_tiles[0],
        )


def scheduled(task: Task, space: Space, layout: Candidate) -> Iterator[Candidate]:
    """The same candidate with every schedule that it can have."""
    if layout.pipeline == 1:
        yield replace(layout, schedule="1f1b", chunks=1)
        return
    for name, chunks in space.pipelines(layout.pipeline, task.layers.num_layers):
        yield replace(layout, schedule=name, chunks=chunks)
