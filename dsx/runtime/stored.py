"""What of a run's tensors this rank stores in a checkpoint, and wants back from one of any layout."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from dsx.checkpoint.catalog import Catalog
from dsx.checkpoint.group_numbers import numbers_in
from dsx.checkpoint.pieces import Part, local_parts
from dsx.checkpoint.reader import Reader
from dsx.errors import CheckpointError
from dsx.runtime.arrays import as_numpy
from dsx.runtime.zero_adapters.held import Span, held, trained_parameters
from dsx.spec.param import Init, ParamSpec

if TYPE_CHECKING:
    from dsx.runtime.engine import PipelineEngine

MASTER, WEIGHT = "master", "weight"
Role = Literal["trained", "frozen", "buffer"]


@dataclass(frozen=True, slots=True)
class Content:
    """One state of one logical tensor in a flat tensor.

    Attributes:
        spec: The logical tensor.
        state: master, weight, exp_avg, ...
        role: What it is to training.
        parts: Boxes of it, and where they lie.
    """

    spec: ParamSpec
    state: str
    role: Role
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Stored:
    """A flat tensor and what it holds; elements of no part are padding.

    Attributes:
        values: One dim, the run's own memory.
        contents: What it holds.
        computes_as_master: The weights that the model computes with are as wide as their masters.
    """

    values: torch.Tensor
    contents: tuple[Content, ...]
    computes_as_master: bool = False

    @property
    def dtype(self) -> str:
        """As torch names it."""
        return str(self.values.dtype).removeprefix("torch.")


class Names:
    """Logical tensors of a rank's parameters and buffers.

    Tensor-parallel ranks hold the same of what a layer that is not dsx's does not mark as cut
    (``tensor_model_parallel``). What it does mark is cut in an unknown way: each rank's is a tensor of its
    own, which only the same tensor-parallel degree can load.
    """

    def __init__(self, engine: PipelineEngine) -> None:
        self._groups = engine.groups
        self._names: dict[int, str] = {}
        for name, parameter in engine.pipeline.chunks.named_parameters():
            self._names.setdefault(id(parameter), name)

    def of(self, parameter: nn.Parameter) -> ParamSpec:
        """The logical tensor of a parameter."""
        spec = getattr(parameter, "dsx_spec", None)
        if isinstance(spec, ParamSpec):
            return spec
        shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
        return self.local(self._names[id(parameter)], shape, parameter)

    def local(self, name: str, shape: tuple[int, ...], tensor: torch.Tensor) -> ParamSpec:
        """A tensor that is whole as it is."""
        cut = self._groups.mesh.tp > 1 and getattr(tensor, "tensor_model_parallel", False)
        here = f"{name}@tp{self._groups.tp_rank}" if cut else name
        return ParamSpec(name=here, layer=0, shape=shape, init=Init(kind="zeros"), hf=(here,))

    def parts(self, spec: ParamSpec, start: int, stop: int, offset: int) -> tuple[Part, ...]:
        """Elements ``start`` to ``stop`` of a local tensor that lie at ``offset`` of a flat one."""
        tp = (self._groups.mesh.tp, self._groups.tp_rank) if spec.split is not None else (1, 0)
        shift = offset - start
        return tuple(
            Part(part.start, part.shape, part.strides, part.flat + shift)
            for part in local_parts(spec, *tp, start, stop)
        )


def names_here(engine: PipelineEngine) -> list[str]:
    """This rank's tensors in the order of the model."""
    names = Names(engine)
    return [names.of(parameter).name for parameter in engine.pipeline.chunks.parameters()]


def stored_here(engine: PipelineEngine, *, everything: bool = False) -> Iterator[Stored]:
    """This rank's share of the checkpoint: every element of every state is some rank's, once.

    Args:
        engine: The run.
        everything: Also what another rank stores: what this rank must get back.
    """
    groups, names = engine.groups, Names(engine)
    optimizer, partitioned = held(engine.deepspeed_engine), engine.zero_optimization_stage() > 0
    turn = 0
    for kept in optimizer:
        states = {MASTER: kept.master.detach().view(-1), **kept.moments()}
        mine: list[tuple[Span, ParamSpec]] = []
        for span in kept.spans:
            spec = names.of(span.parameter)
            turn += 1
            if everything or _is_writer(span.parameter, spec, turn, groups, partitioned=partitioned):
                mine.append((span, spec))
        for state, values in states.items():
            contents = tuple(
                Content(spec, state, "trained", names.parts(spec, span.start, span.stop, span.offset))
                for span, spec in mine
            )
            if contents:
                same = all(span.parameter.dtype == kept.master.dtype for span in kept.spans)
                yield Stored(values, contents, same)
    yield from _untrained(engine, names, everything)


def load_stored(engine: PipelineEngine, catalog: Catalog) -> int:
    """Fill masters, moments, frozen weights and buffers from a checkpoint of any layout.

    Each rank reads what it holds, and nothing else. Weights are still to be made of the masters.

    Returns:
        Bytes of tensors that this rank read.

    Raises:
        CheckpointError: The checkpoint lacks a tensor, a state or a part of one, or is damaged.
    """
    groups = catalog.facts.get("param_groups") or ()
    numbers = {name: numbers_in(group, name) for group in groups for name in group.get("names", ())}
    moments = sorted({entry.state for entry in catalog.entries} - {MASTER, WEIGHT})
    names = Names(engine)
    for kept in held(engine.deepspeed_engine):
        found: dict[str, set[float]] = defaultdict(set)
        for span in kept.spans:
            for state, number in numbers.get(names.of(span.parameter).name, {}).items():
                found[state].add(number)
        kept.make(moments, {state: _one_of(catalog, state, values) for state, values in found.items()})
    with Reader.open(catalog) as reader, torch.no_grad():
        for stored in stored_here(engine, everything=True):
            for content in stored.contents:
                _fill(reader, stored, content)
        return reader.read_bytes


def _fill(reader: Reader, stored: Stored, content: Content) -> None:
    entry = reader.find(content.spec.name, content.state)
    where = f"{reader.catalog.root}: tensor {content.spec.name}, {content.state}"
    if entry is None:
        raise CheckpointError(
            where, "the checkpoint has no such tensor", "give the model that it was trained with (dsx.model)"
        )
    if entry.shape != content.spec.shape:
        raise CheckpointError(
            where,
            f"its shape is {entry.shape} there, {content.spec.shape} here",
            "give the model that the checkpoint was trained with (dsx.model), or another checkpoint",
        )
    on_host = stored.values.device.type == "cpu"
    low, high = extent(content.parts)
    view = stored.values[low:high]
    host = view if on_host else view.cpu()
    parts = tuple(Part(p.start, p.shape, p.strides, p.flat - low) for p in content.parts)
    reader.fill(entry, parts, as_numpy(host), stored.dtype)
    if not on_host:
        view.copy_(host)


def extent(parts: Sequence[Part]) -> tuple[int, int]:
    """First element of parts in their flat tensor, and the one after the last."""
    ends = [
        part.flat + sum((size - 1) * step for size, step in zip(part.shape, part.strides, strict=True)) + 1
        for part in parts
    ]
    return min((part.flat for part in parts), default=0), max(ends, default=0)


def _is_writer(
    parameter: nn.Parameter, spec: ParamSpec, turn: int, groups: Any, *, partitioned: bool
) -> bool:
    """Of the ranks that hold the same elements, the writers take turns, parameter by parameter."""
    if getattr(parameter, "ds_pipe_replicated", False):
        return False
    if not _is_cut(spec) and groups.mesh.tp > 1 and turn % groups.mesh.tp != groups.tp_rank:
        return False
    return partitioned or turn // groups.mesh.tp % groups.mesh.dp == groups.dp_rank


def _is_cut(spec: ParamSpec) -> bool:
    """Whether tensor-parallel ranks hold different parts of it."""
    return spec.split is not None or "@tp" in spec.name


def _untrained(engine: PipelineEngine, names: Names, everything: bool) -> Iterator[Stored]:
    """Frozen parameters, as ZeRO-3 has cut them, and buffers that a module's state dict has."""
    chunks, groups = engine.pipeline.chunks, engine.groups
    trained = {id(parameter) for parameter in trained_parameters(engine.deepspeed_engine)}
    frozen: Any
    for frozen in chunks.parameters():
        if id(frozen) in trained:
            continue
        spec = names.of(frozen)
        cut = hasattr(frozen, "ds_id")
        if not (everything or _is_writer(frozen, spec, 0, groups, partitioned=cut)):
            continue
        if cut:
            size = frozen.partition_numel()
            start, numel = groups.dp_rank * size, int(frozen.ds_numel)
            stop = min(start + size, numel)
            values = frozen.ds_tensor.detach().view(-1)
        else:
            start, stop, values = 0, frozen.numel(), frozen.detach().view(-1)
        if start < stop:
            yield Stored(values, (Content(spec, WEIGHT, "frozen", names.parts(spec, start, stop, 0)),))
    kept = chunks.state_dict(keep_vars=True)
    for name, buffer in chunks.named_buffers():
        spec = names.local(name, tuple(buffer.shape), buffer)
        mine = groups.dp_rank == 0 and (groups.tp_rank == 0 or _is_cut(spec))
        if name in kept and buffer.numel() and (everything or mine):
            parts = names.parts(spec, 0, buffer.numel(), 0)
            yield Stored(buffer.detach().view(-1), (Content(spec, WEIGHT, "buffer", parts),))


def _one_of(catalog: Catalog, state: str, values: set[float]) -> float:
    """What a buffer of several tensors keeps once; steps differ where some had no gradients at first."""
    if state != "step" and len(values) > 1:
        raise CheckpointError(
            f"{catalog.root}: {state} of the optimizer",
            f"tensors that ZeRO keeps in one buffer here have different ones: {sorted(values)}",
            "load it with ZeRO 0 or 3, or train those tensors in optimizer groups of their own",
        )
    return max(values)
