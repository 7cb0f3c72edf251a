"""The record of one layer's run on fake tensors: what it does to memory and computes, as pure data.

:mod:`dsx.memory.layer_recorder` runs a layer of each kind once, forward and backward, on tensors without
storage and notes every event in order. The ledger replays the events (:mod:`dsx.memory.walk`) and the
planner prices the operators among them (:mod:`dsx.planner.layer_times`), so that neither needs to know what a
layer consists of.

An event is a tuple that starts with its kind:

- ``("+", id, bytes, label)``: a storage is allocated. ``label`` is an index into the record's labels.
- ``("-", id)``: the layer lets go of a storage, which is freed unless something else holds it.
- ``("sum", id, bytes, label, first)``: autograd sums two gradients: in the place of ``first`` if nobody else
  holds that (torch/csrc/autograd/input_buffer.cpp), else in new memory.
- ``("many", id, bytes, label, count)``: ``count`` storages of so many bytes each, which go together too
  (:mod:`dsx.memory.record_loops`).
- ``("out",)``: the outputs are the caller's from here on.
- ``("in", [id or None, ...])``: the gradients of the inputs are the caller's from here on.
- ``("grad", parameter, id)``: a parameter gets its gradient.
- ``("fetch", [parameter, ...], forward)`` and
  ``("release", [parameter, ...], forward, [[parameter, id], ...])``: a module with these parameters of its
  own, maybe none, begins and ends, which is where ZeRO-3 gathers and lets go. What is kept of a gathered
  parameter beyond the end has an id from there on.
- ``("mm", m, n, k, count, width)``: ``count`` products of [m, k] and [k, n] matrices of ``width`` bytes an
  element.
- ``("sdpa", heads, queries, keys, size, masked, dropout)``: the forward of fused attention over ``heads``
  heads of all samples; ``("sdpa_backward", ...)`` its backward. True comes last where, without a mask, all
  queries see all keys.
- ``("op", name, bytes)``: any other kernel, with what it reads and writes; ``("flops", name, bytes, flops)``
  one whose arithmetic torch.utils.flop_counter knows.
- ``("begin", number, kind, bytes)`` and ``("wait", number)``: a collective over the tensor-parallel ranks, by
  the bytes of the whole tensor, of what a rank gives in an all-to-all, or of messages that it sends or
  receives, the larger of both; ``("begin", ..., "context")`` one over the context-parallel ranks, and
  ``("begin", ..., "expert")`` one over those that hold experts together.
- ``("exchange",)``: rows begin to travel to experts or back. In a divided backward weight gradients of other
  layers are computed meanwhile (:mod:`dsx.schedules.hiding`).

An operator with a number before it comes that many times: ``(510, "mm", ...)``.

An id is a number, ``"x0"`` for the storage of the first input, or ``"d0"`` for that of the gradient of the
first output.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from itertools import zip_longest
from math import prod
from operator import mul
from typing import Any, Literal, NamedTuple

from dsx.memory.ledger import Label
from dsx.models.spec import ContextMethod, Model, Recompute

Event = tuple[Any, ...]

LABELLED = frozenset(("+", "sum", "many"))
"""Kinds of events with a label."""

MEMORY = LABELLED | {"-", "out", "in", "grad", "fetch", "release", "exchange"}
"""Kinds of events that a ledger replays."""


DeviceKind = Literal["cuda", "cpu"]
"""Whose kernels run: torch takes others on a CPU, and its allocator rounds nothing up."""

LOSS = "Loss"
"""Kind of the loss, which follows the last layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One micro-batch of a model on one rank.

    Attributes:
        model: The architecture.
        tensor: Tensor-parallel degree.
        sequence_parallel: Whether activations between linears are cut along the sequence.
        micro_batch: Sequences.
        sequence_length: Tokens per sequence.
        context: Ranks that share each of them.
        context_method: How attention then sees them whole.
        mlp_tiles: Parts of a sequence that blocks' feed-forwards compute one after the other.
        expert: Ranks that hold the experts of a layer together.
        imbalance: Rows that come to this rank's experts, over those that its tokens send to any.
        width: Bytes of a parameter or an activation.
        vocab_multiple: Multiple to which each rank's vocabulary rows are padded.
        recompute: What blocks compute again.
        device: The device whose kernels run.
        documents: Whether documents of a pack are kept apart, for which positions travel along.
        loss_chunk: Tokens whose logits the head makes at a time, with the loss; 0 for all, and a loss apart.
        pictures: Ids and what goes with them in a micro-batch with pictures; none where there are none.
    """

    model: Model
    tensor: int
    sequence_parallel: bool
    micro_batch: int
    sequence_length: int
    width: int
    vocab_multiple: int = 64
    recompute: Recompute = "none"
    device: DeviceKind = "cuda"
    documents: bool = False
    loss_chunk: int = 0
    context: int = 1
    context_method: ContextMethod = "all_gather"
    mlp_tiles: int = 1
    expert: int = 1
    imbalance: float = 1.0
    pictures: tuple[PictureInput, ...] = ()

    @property
    def length(self) -> int:
        """Tokens of a sequence that the rank has."""
        return self.sequence_length // self.context

    @property
    def cuts_sequence(self) -> bool:
        """Whether sequence parallelism does anything."""
        return self.sequence_parallel and self.tensor > 1

    @property
    def boundary_bytes(self) -> int:
        """A whole tensor between blocks."""
        return self.micro_batch * self.length * prod(self.model.stream) * self.width


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRequest:
    """A layer to be recorded.

    Attributes:
        shape: The micro-batch, of a model that is the layer's own block alone.
        kind: One of :func:`dsx.models.params.layer_kinds`, or :data:`LOSS`.
        divided: Whether its backward is recorded in two parts too.
        hooked: Whether ZeRO-3 gathers its parameters.
        frozen: Those of its parameters, by their paths in it, that are not trained.
        entered: Whether its input wants a gradient, where it is no token.
        told: Of pictures, the forms of what comes to it beside hidden states.

    A head that makes the logits of some tokens at a time has the loss in its record.
    """

    shape: Shape
    kind: str
    divided: bool = False
    hooked: bool = False
    frozen: tuple[str, ...] = ()
    entered: bool = True
    told: tuple[TensorForm, ...] = ()


class TensorForm(NamedTuple):
    """A tensor between layers.

    Attributes:
        shape: Sizes.
        dtype: As torch writes it, without its name: ``bfloat16``.
        width: Bytes an element.
        differentiable: Whether it gets a gradient.
    """

    shape: tuple[int, ...]
    dtype: str
    width: int
    differentiable: bool

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def size_bytes(self) -> int:
        return self.numel * self.width

    @property
    def is_added(self) -> bool:
        """Of what is told of pictures: whether a block adds it (:class:`dsx.nn.documents.Told`)."""
        return "float" in self.dtype and len(self.shape) == _HIDDEN_DIMS

    def __str__(self) -> str:
        return f"{' x '.join(map(str, self.shape)) or '1'} {self.dtype}"


_HIDDEN_DIMS = 3


class PictureInput(NamedTuple):
    """A tensor that the first layer is given where a micro-batch has pictures.

    Attributes:
        name: As the family's forward calls it; empty for ids.
        form: Its form.
        values: Whole numbers as JSON, on which shapes depend; empty for others.
    """

    name: str
    form: TensorForm
    values: str = ""


class RecordedParameter(NamedTuple):
    """A parameter of a layer: its path inside the layer's module, its shape on one rank and its width."""

    name: str
    shape: tuple[int, ...]
    width: int
    trains: bool


class Kept(NamedTuple):
    """A storage that the first forward makes and that stays, a table of positions or a mask.

    Attributes:
        owner: What holds it. Layers with equal owners share it; an empty owner is the layer itself.
        label: The label of its line.
        size_bytes: Its bytes.
        remade: Whether it is made anew for each micro-batch, of the positions in its documents.
    """

    owner: str
    label: Label
    size_bytes: int
    remade: bool = False


class RecordedUse(NamedTuple):
    """One use of a parameter whose gradient waits in a divided backward (:mod:`dsx.nn.split`).

    Attributes:
        parameter: The parameter.
        begin: Events when its communication starts.
        finish: Events of computing it, which end with its ``grad``.
    """

    parameter: str
    begin: tuple[Event, ...]
    finish: tuple[Event, ...]


@dataclass(frozen=True)
class LayerRecord:
    """One layer, on one rank, with one micro-batch.

    Attributes:
        inputs: The inputs' forms.
        num_labels: How many of them, the last ones, are labels.
        outputs: The outputs' forms.
        output_ids: Storages of the outputs: an input's if it is handed on.
        parameters: Its parameters, in its module's order.
        buffer_bytes: What its registered buffers take.
        kept: What its first forward leaves behind.
        labels: The labels of the events.
        forward: Events of a forward.
        backward: Events of a whole backward.
        backward_input: Events of the first part of a divided backward; None if nothing can wait.
        weights: The second part, use by use.
    """

    inputs: tuple[TensorForm, ...]
    outputs: tuple[TensorForm, ...]
    output_ids: tuple[int | str, ...]
    parameters: tuple[RecordedParameter, ...]
    buffer_bytes: int
    kept: tuple[Kept, ...]
    labels: tuple[Label, ...]
    forward: tuple[Event, ...]
    backward: tuple[Event, ...]
    backward_input: tuple[Event, ...] | None = None
    weights: tuple[RecordedUse, ...] = ()
    num_labels: int = 0
    _memory: dict[str, tuple[Event, ...]] = field(default_factory=dict, repr=False, compare=False)
    _operators: dict[str, tuple[tuple[Event, int], ...]] = field(
        default_factory=dict, repr=False, compare=False
    )
    _gives: dict[str, tuple[str, ...]] = field(default_factory=dict, repr=False, compare=False)

    def memory(self, phase: str) -> tuple[Event, ...]:
        """The events of a phase that a ledger replays, with labels in place of their numbers."""
        if phase not in self._memory:
            events: Sequence[Event] | None = getattr(self, phase)
            self._memory[phase] = self._replayed(self.backward if events is None else events)
        return self._memory[phase]

    def _replayed(self, events: Sequence[Event]) -> tuple[Event, ...]:
        return tuple(
            (*event[:3], self.labels[event[3]], *event[4:]) if event[0] in LABELLED else event
            for event in events
            if event[0] in MEMORY
        )

    def operators(self, phase: str) -> tuple[tuple[Event, int], ...]:
        """Operators and collectives of a phase with their counts; see :func:`counted`."""
        if phase not in self._operators:
            self._operators[phase] = counted(getattr(self, phase))
        return self._operators[phase]

    @property
    def goes_back(self) -> bool:
        """Whether there is a backward: an output wants a gradient."""
        return any(form.differentiable for form in self.outputs)

    @property
    def stream(self) -> tuple[TensorForm, ...]:
        """What the layer before gives: the inputs without labels."""
        return self.inputs[: len(self.inputs) - self.num_labels]

    @property
    def labels_taken(self) -> tuple[TensorForm, ...]:
        """The labels among the inputs."""
        return self.inputs[len(self.inputs) - self.num_labels :]

    def gives(self, phase: str) -> tuple[str, ...]:
        """The parameters that get gradients in a phase of the backward, one for each gradient."""
        if phase not in self._gives:
            self._gives[phase] = tuple(event[1] for event in self.memory(phase) if event[0] == "grad")
        return self._gives[phase]

    @cached_property
    def uses(self) -> tuple[RecordedUse, ...]:
        """:attr:`weights` with what a ledger replays."""
        return tuple(
            RecordedUse(use.parameter, self._replayed(use.begin), self._replayed(use.finish))
            for use in self.weights
        )

    @cached_property
    def kept_bytes(self) -> int:
        """What is kept for the backward when a forward is over, inputs and outputs included if they are."""
        live: dict[int | str, int] = {f"x{place}": form.size_bytes for place, form in enumerate(self.inputs)}
        for event in self.forward:
            if event[0] == "+":
                live[event[1]] = event[2]
            elif event[0] == "many":
                live[event[1]] = event[2] * event[4]
            elif event[0] == "-":
                live.pop(event[1], None)
        return sum(live.values())

    @classmethod
    def between(
        cls, records: Sequence[LayerRecord], weights: tuple[Sequence[int], int]
    ) -> LayerRecord | None:
        """The record of a layer in another size: every number is a sum of others', by weights and a divisor.

        None if they differ in more than sizes, or a sum is no integer.
        """
        names = [each.name for each in fields(cls) if each.init and not each.name.startswith("_")]
        try:
            found = {name: _between([getattr(each, name) for each in records], weights) for name in names}
        except ValueError:
            return None
        return cls(**found)

    def to_json(self) -> str:
        content = {each.name: getattr(self, each.name) for each in fields(self) if each.compare}
        return json.dumps(content, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> LayerRecord:
        """What :meth:`to_json` wrote. Raises KeyError, TypeError or ValueError for other text."""
        content: Mapping[str, Any] = json.loads(text)
        return cls(
            inputs=tuple(_forms(content["inputs"])),
            outputs=tuple(_forms(content["outputs"])),
            output_ids=tuple(content["output_ids"]),
            parameters=tuple(RecordedParameter(n, tuple(s), w, t) for n, s, w, t in content["parameters"]),
            buffer_bytes=content["buffer_bytes"],
            kept=tuple(Kept(owner, Label(*label), *rest) for owner, label, *rest in content["kept"]),
            labels=tuple(Label(*label) for label in content["labels"]),
            forward=_events(content["forward"]),
            backward=_events(content["backward"]),
            backward_input=None if content["backward_input"] is None else _events(content["backward_input"]),
            weights=tuple(RecordedUse(name, _events(b), _events(f)) for name, b, f in content["weights"]),
            num_labels=content["num_labels"],
        )


def _between(values: Sequence[Any], weights: tuple[Sequence[int], int]) -> Any:
    """A weighted sum of values, of texts word by word. Raises ValueError if they are unlike."""
    one = values[0]
    if all(other == one for other in values):
        return one
    kind, shares = type(one), weights[0]
    if any(type(other) is not kind for other in values):
        raise ValueError("they differ in more than sizes")
    if kind is int:
        found, rest = divmod(sum(map(mul, values, shares)), weights[1])
        if not rest:
            return found
    elif kind is str:
        words = zip_longest(*(value.split() for value in values), fillvalue="")
        numbers = ([int(word) if word.isdigit() else word for word in several] for several in words)
        return " ".join(str(_between(several, weights)) for several in numbers)
    elif isinstance(one, tuple | list) and len({len(value) for value in values}) == 1:
        each = [_between(several, weights) for several in zip(*values, strict=True)]
        return kind(each) if kind in (tuple, list) else kind(*each)
    raise ValueError("they differ in more than sizes")


def counted(events: Iterable[Event]) -> tuple[tuple[Event, int], ...]:
    """Operators and collectives in order; equal operators between two collectives are counted."""
    found: list[tuple[Event, int]] = []
    since: dict[Event, int] = {}
    for event in events:
        if event[0] in ("begin", "wait"):
            found += since.items()
            found.append((event, 1))
            since = {}
        elif event[0] not in MEMORY:
            times, operator = (event[0], event[1:]) if isinstance(event[0], int) else (1, event)
            since[operator] = since.get(operator, 0) + times
    return (*found, *since.items())


def _forms(rows: Sequence[Sequence[Any]]) -> Iterator[TensorForm]:
    return (TensorForm(tuple(shape), dtype, width, grad) for shape, dtype, width, grad in rows)


def _events(rows: Sequence[Sequence[Any]]) -> tuple[Event, ...]:
    return tuple(tuple(row) for row in rows)
