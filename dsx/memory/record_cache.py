"""Records of a model's layers, and the cache in which they are kept.

Equal layers are recorded once. Records lie in a folder of the user's cache, by a hash of what they depend on:
the layer, its shapes and options, and the versions of torch and of dsx's own code. Without a record, torch is
loaded and the layer is recorded (:mod:`dsx.memory.record_request`).
"""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from fractions import Fraction
from functools import cached_property, lru_cache
from math import lcm, prod
from pathlib import Path
from typing import Any, Protocol

from dsx.kept import cache_folder, code_version, keep
from dsx.memory.layer_record import LOSS, LayerRecord, LayerRequest, Shape, TensorForm
from dsx.models.param import ParamSpec
from dsx.models.params import layer_adapters, layer_kinds, param_specs
from dsx.models.spec import HubModel, Model, ModelSpec


class LayerRecords(Protocol):
    """What the ledger asks of a model's layers, wherever they come from."""

    @property
    def remakes(self) -> bool:
        """Whether backwards recompute the rotary tables and masks that layers make of positions."""

    def offloads(self, index: int) -> bool:
        """Whether a layer is one of those whose inputs go to the host."""

    def layer(self, index: int, *, divided: bool, hooked: bool) -> LayerRecord:
        """The record of a layer of the layer list."""

    def loss(self) -> LayerRecord | None:
        """That of the loss; None if the last layer gives it."""

    def parameter(self, index: int, name: str) -> str:
        """Name of the parameter that a layer's record calls ``name``."""


@dataclass(frozen=True)
class ModelRecords:
    """Records of a model.

    Attributes:
        shape: The shape of a micro-batch.
        many: Whether the caller looks at many micro-batches of the same model.
    """

    shape: Shape
    many: bool = False
    _found: dict[tuple[object, ...], LayerRecord] = field(default_factory=dict, compare=False, repr=False)

    @property
    def remakes(self) -> bool:
        """With any recomputation of dsx's own modules; transformers' get them, and hold them as long."""
        return self.shape.recompute != "none" and not isinstance(self.shape.model, HubModel)

    def offloads(self, index: int) -> bool:
        """Blocks do, where the run says so."""
        return self.shape.recompute == "offload" and self._kinds[index] == "Block"

    def layer(self, index: int, *, divided: bool, hooked: bool) -> LayerRecord:
        kind = self._kinds[index]
        is_block = kind == "Block"
        own = self._own(index) if is_block else ()
        frozen, entered = self._frozen(index)
        told = self._told(index, divided=divided, hooked=hooked)
        key = kind, own, divided, hooked, frozen, entered, told
        if key not in self._found:
            shape = alone(self.shape if is_block else replace(self.shape, recompute="none"), index)
            request = LayerRequest(
                shape=shape,
                kind=kind,
                divided=divided,
                hooked=hooked,
                frozen=frozen,
                entered=entered,
                told=told,
            )
            self._found[key] = recorded_for_many(request) if self.many else recorded(request)
        return self._found[key]

    def _told(self, index: int, **how: bool) -> tuple[TensorForm, ...]:
        """What of pictures comes to a layer: all that the first gives, but for what blocks have added."""
        if not (index and self.shape.pictures):
            return ()
        beside = 1 + (isinstance(self.shape.model, HubModel) and self.shape.model.balance is not None)
        told = self.layer(0, **how).outputs[beside:]
        added = [form for form in told if form.is_added]
        gone = index - self._kinds.index("Block")
        return (*(form for form in told if not form.is_added), *added[gone:])

    def _own(self, index: int) -> tuple[Any, ...]:
        """What a block has of its own."""
        adapter = layer_adapters(self.shape.model)[index]
        if isinstance(self.shape.model, HubModel):
            return (self.shape.model.block_of(index), adapter)
        block = index - self._kinds.index("Block")
        return (*(values[block] for values in self._by_block), adapter)

    def _frozen(self, index: int) -> tuple[tuple[str, ...], bool]:
        """The parameters that a layer does not train, by their paths, and if its input wants a gradient."""
        held = 0 if self._shares_table(index) else index
        frozen = (
            spec.name.partition(".")[2] for spec in self._specs if spec.layer == held and not spec.trained
        )
        return tuple(frozen), any(spec.trained and spec.layer < index for spec in self._specs)

    @cached_property
    def _specs(self) -> tuple[ParamSpec, ...]:
        return param_specs(self.shape.model)

    def _shares_table(self, index: int) -> bool:
        """Whether a layer is the head, and its table the word embedding's."""
        return self.shape.model.tied_embeddings and index == self.num_layers - 1

    @cached_property
    def _kinds(self) -> tuple[str, ...]:
        return layer_kinds(self.shape.model)

    @cached_property
    def _by_block(self) -> tuple[tuple[Any, ...], ...]:
        """What the blocks of the model have each of their own."""
        assert isinstance(self.shape.model, ModelSpec)
        return tuple(getattr(self.shape.model, name) for name in _said_by_block(self.shape.model))

    @property
    def num_layers(self) -> int:
        return len(self._kinds)

    def loss(self) -> LayerRecord | None:
        """That of the loss; None if the head computes it."""
        if self.shape.loss_chunk:
            return None
        shape = replace(alone(self.shape, 0), recompute="none", sequence_parallel=False)
        return recorded(LayerRequest(shape=shape, kind=LOSS))

    def parameter(self, index: int, name: str) -> str:
        """Name of the parameter that a layer's record calls ``name``: a tied head's is the embedding's."""
        return f"{0 if self._shares_table(index) else index}.{name}"


def alone(shape: Shape, index: int) -> Shape:
    """The same of a model with one block, that of layer ``index`` if it is one.

    What a ModelSpec says block by block, it says as a tuple of that length. Whether its input goes to the
    host meanwhile is nothing that a block knows (:mod:`dsx.memory.walk`).
    """
    kinds = layer_kinds(shape.model)
    if shape.recompute == "offload":
        shape = replace(shape, recompute="full")
    # A chunk of more tokens than there are is all of them.
    chunk = min(shape.loss_chunk, shape.micro_batch * shape.length)
    shape = replace(shape, loss_chunk=chunk if kinds[index] == "Head" else 0)
    if kinds[index] != "Block":
        shape = replace(shape, expert=1, imbalance=1.0)
    model: Model = replace(shape.model, freeze=(), adapter=layer_adapters(shape.model)[index])
    if isinstance(model, HubModel):
        block = model.block_of(index) if kinds[index] == "Block" else None
        if not index:
            return replace(shape, model=replace(model, block=block))
        model = replace(model, block=block, pictures="read" if shape.pictures else "")
        return replace(shape, model=model, pictures=())
    first = index - kinds.index("Block") if kinds[index] == "Block" else 0
    own: dict[str, Any] = {name: getattr(model, name)[first : first + 1] for name in _said_by_block(model)}
    short = replace(model, **own, num_layers=1)
    if short.windows and not short.window(0, shape.sequence_length):
        short = replace(short, windows=())
    return replace(shape, model=short)


def _said_by_block(model: ModelSpec) -> list[str]:
    """Fields of a model that are tuples of a value for each block."""
    values = {each.name: getattr(model, each.name) for each in fields(model) if each.name != "freeze"}
    return [
        name for name, value in values.items() if isinstance(value, tuple) and len(value) == model.num_layers
    ]


@lru_cache(maxsize=4096)
def recorded(request: LayerRequest) -> LayerRecord:
    """The layer's record: from the cache, between two others, or from a run on tensors without storage."""
    place = _place(request)
    with suppress(OSError, KeyError, TypeError, ValueError):
        return LayerRecord.from_json(place.read_text())
    others = [*_bases(request)]
    if (
        others != [request]
        and all(_place(other).exists() for other in others)
        and (found := _scaled(request))
    ):
        return found
    if _loops(request) and (found := _by_short_ones(request)):
        keep(place, found.to_json())
        return found
    collects = gc.isenabled()
    gc.disable()  # while torch is loaded, a quarter of the time would go there
    try:
        from dsx.memory.record_request import record_request

        gc.freeze()  # what was loaded is not looked through when the recorder collects
        record = record_request(request)
    finally:
        gc.unfreeze()
        if collects:
            gc.enable()
    keep(place, record.to_json())
    return record


def recorded_for_many(request: LayerRequest) -> LayerRecord:
    """The same for callers that look at many sizes: two micro-batches and three expert degrees give all."""
    return _scaled(request) or recorded(request)


def _scaled(request: LayerRequest) -> LayerRecord | None:
    """The record by those of other sizes; None if they say nothing of it."""
    found = _between(request) if _ends(request) else None
    return found or (_among(request) if _together(request) else None)


def _bases(request: LayerRequest) -> Iterator[LayerRequest]:
    """Requests that are recorded for this one where many sizes are looked at."""
    others = _ends(request) or _together(request)
    for other in others:
        yield from _bases(other)
    if not others:
        yield request


LARGE_MICRO_BATCH = 1021
_ENDS = (11, LARGE_MICRO_BATCH)
"""Micro-batches between which records are scaled: primes, so that they equal no other size of a layer."""


def _ends(request: LayerRequest) -> tuple[LayerRequest, ...]:
    """Requests for the same layer with a small and a large micro-batch; none where they say nothing.

    With a single sequence some tensors have another form, and the loss does more steps with more tokens.
    """
    size = request.shape.micro_batch
    if request.told or request.shape.pictures:
        return ()  # how many pictures there are, and where, decides
    if request.kind == LOSS or request.shape.loss_chunk or size in (1, *_ENDS) or size > _ENDS[1]:
        return ()
    return tuple(replace(request, shape=replace(request.shape, micro_batch=end)) for end in _ENDS)


@lru_cache(maxsize=4096)
def _between(request: LayerRequest) -> LayerRecord | None:
    """The record by those of both ends; None if the layer does other things with another micro-batch."""
    low, high = map(recorded_for_many, _ends(request))
    here, (first, last) = request.shape.micro_batch, _ENDS
    return LayerRecord.between((low, high), ((last - here, here - first), last - first))


_TOGETHER = (2, 8, 32)
"""Expert degrees whose records give those of all others."""


def _together(request: LayerRequest) -> tuple[LayerRequest, ...]:
    """Requests for the same layer with its experts over these; none where they say nothing.

    Over one rank nothing travels, and rows that are not equally many for all ranks differ by degree.
    """
    shape, model = request.shape, request.shape.model
    counts = set(model.experts.values()) if isinstance(model, HubModel) else set()
    legal = counts and not any(count % degree for count in counts for degree in _TOGETHER)
    if not legal or shape.expert in (1, *_TOGETHER) or shape.imbalance > _TOGETHER[0]:
        return ()
    return tuple(replace(request, shape=replace(shape, expert=degree)) for degree in _TOGETHER)


@lru_cache(maxsize=4096)
def _among(request: LayerRequest) -> LayerRecord | None:
    """The record by those of three expert degrees; None if they do not give it.

    Of a degree e, a rank has 1 / e of the experts, and e times the rows for each. So e times a number is a
    polynomial of the second degree, of which Lagrange's form has these weights.
    """
    here, weights = request.shape.expert, []
    for one in _TOGETHER:
        others = [each for each in _TOGETHER if each != one]
        weights.append(
            Fraction(one * prod(here - each for each in others), here * prod(one - e for e in others))
        )
    common = lcm(*(weight.denominator for weight in weights))
    records = [*map(recorded, _together(request))]
    return LayerRecord.between(records, ([int(each * common) for each in weights], common))


def _short(request: LayerRequest, **changes: Any) -> list[LayerRequest]:
    """The same layer with few tokens on a rank, from which follows what it does with so many.

    They are a multiple of loops' chunks apart, of which experts have equal shares too.
    """
    shape = replace(request.shape, **changes)
    lengths = (request.shape.length % 256 + 256 * many for many in (5, 6, 7, 9))
    return [replace(request, shape=replace(shape, sequence_length=each * shape.context)) for each in lengths]


_PLAIN = dict[str, Any](
    tensor=1,
    sequence_parallel=False,
    micro_batch=1,
    recompute="none",
    mlp_tiles=1,
    context_method="all_gather",
    expert=1,
    imbalance=1.0,
)


def _loops(request: LayerRequest) -> bool:
    """Whether a layer is a long block of transformers' that goes through its sequence in a loop.

    One that attends is none: its masks may begin to differ at any length, with a window.
    """
    shape = request.shape
    is_long = shape.length >= 2 * _short(request)[-1].shape.length
    if request.kind != "Block" or not isinstance(shape.model, HubModel) or not is_long:
        return False
    one = replace(request, divided=False, hooked=False)
    few, many = map(recorded, _short(one, **_PLAIN, context=1)[:2])
    return len(few.forward) < len(many.forward) and not any(event[0] == "sdpa" for event in few.forward)


def _by_short_ones(request: LayerRequest) -> LayerRecord | None:
    """The record by those of short sequences; None if polynomials do not give it.

    Of the ranks of a context axis and its methods, as few are recorded as differ at the shortest.
    """
    shape, one = request.shape, replace(request, divided=False)
    method = {"context_method": shape.context_method}
    for context in sorted({min(shape.context, 2), shape.context}):
        other = replace(shape, context=context, context_method="all_gather")
        here, there = (_short(one, **_PLAIN | each)[0] for each in (method, {"context": context}))
        if other != shape and recorded(here) == recorded(there):
            length = shape.length * context
            return recorded(replace(request, shape=replace(other, sequence_length=length)))
    from dsx.memory.record_loops import fitted

    short = _short(request)
    with suppress(ValueError):
        return fitted([*map(_folded, short)], [each.shape.length for each in short], shape.length)
    return None


@lru_cache(maxsize=1024)
def _folded(request: LayerRequest) -> LayerRecord:
    from dsx.memory.record_loops import folded

    return folded(recorded(request))


def _place(request: LayerRequest) -> Path:
    return cache_folder("records") / code_version() / _name(request)


@lru_cache(maxsize=16384)
def _name(request: LayerRequest) -> str:
    return f"{hashlib.sha256(repr(request).encode()).hexdigest()[:32]}.json"
