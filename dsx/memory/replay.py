"""A chunk of recorded layers (:mod:`dsx.memory.layer_record`) on the ledger, forward and backward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from dsx.memory.layer_record import Event, LayerRecord
from dsx.memory.ledger import Label, Leaf, Ledger, Message, Storage, Tensor, dropped


class Hooks(Protocol):
    """What happens before and after each module (ZeRO-3)."""

    def fetch(self, module: tuple[Leaf, ...], *, forward: bool) -> None:
        """Called before a module with these parameters of its own, maybe none, runs forward or backward."""

    def release(self, module: tuple[Leaf, ...], *, forward: bool) -> None:
        """Called after it, except after the backward of a module whose input wants no gradient."""


_TOKEN = Label("activations", "token", "4", "nn/split.py delivering")
_COPY = Label("activations", "copy of the input's gradient", "as the input", "torch accumulate_grad.h")


@dataclass(slots=True)
class _Shared:
    """What the layers of a chunk share while one of its backwards runs.

    Attributes:
        waits: How many more gradients a parameter gets before autograd hands on their sum: a table that the
            chunk uses as embedding and as head gets two.
        sums: The sum of such a parameter's gradients so far.
    """

    waits: dict[str, int] = field(default_factory=dict)
    sums: dict[str, Storage] = field(default_factory=dict)


class RecordedLayer:
    """One layer of a chunk with one micro-batch, from its forward to the end of its backward.

    Args:
        leaves: Its parameters by their names in the record.
        hooks: ZeRO-3's; None if parameters are always whole.
        last: Whether it is the model's last layer, whose outputs are the logits, or the loss.
    """

    def __init__(
        self,
        ledger: Ledger,
        record: LayerRecord,
        leaves: Mapping[str, Leaf],
        hooks: Hooks | None,
        *,
        last: bool = False,
    ) -> None:
        self.record, self._ledger, self._leaves, self._hooks = record, ledger, leaves, hooks
        ends = last and not record.num_labels
        self._logits = frozenset(record.output_ids) if ends else frozenset[int | str]()
        self._held: dict[int | str, Storage] = {}

    def forward(self, inputs: Message) -> Message:
        """The outputs; the inputs stay the caller's."""
        for place, storage in enumerate(inputs):
            self._held[f"x{place}"] = storage.hold()
        outputs: Message = []
        for event in self.record.memory("forward"):
            if event[0] == "out":
                outputs = [self._held[number].hold() for number in self.record.output_ids]
            else:
                self._do(event)
        return outputs

    def backward(
        self, gradients: Sequence[Storage | None], phase: str, shared: _Shared, *, copies: bool
    ) -> Message:
        """Gradients of the inputs that want one.

        Args:
            gradients: Gradients of the outputs, each held once for this layer, which lets go of it.
            phase: ``backward`` or ``backward_input``.
            shared: The chunk's shared state.
            copies: Whether the inputs are a stage's, which copies a gradient that somebody else holds.
        """
        for place, storage in enumerate(gradients):
            if storage is not None:
                self._held[f"d{place}"] = storage
        found: Message = []
        for event in self.record.memory(phase):
            if event[0] == "in":
                found = [self._handed(self._held[n], copies=copies) for n in event[1] if n is not None]
            elif event[0] == "grad":
                self._give(event[1], self._held[event[2]], shared)
            else:
                self._do(event)
        for place, form in enumerate(self.record.inputs[1:], start=1):
            # Positions, which the recorder gives to every pass and does not let go of.
            if not form.differentiable and f"x{place}" in self._held:
                self._held.pop(f"x{place}").drop()
        return found

    def begin_use(self, place: int) -> None:
        """Begin the communication of a waiting gradient."""
        for event in self.record.uses[place].begin:
            self._do(event)

    def finish_use(self, place: int) -> Storage:
        """Finish a waiting gradient, held once for the caller."""
        total: Storage | None = None
        for event in self.record.uses[place].finish:
            if event[0] == "grad":
                total = self._held[event[2]].hold()
            else:
                self._do(event)
        assert total is not None
        return total

    def leaf(self, name: str) -> Leaf:
        """A parameter by its name in the record."""
        return self._leaves[name]

    def _handed(self, storage: Storage, *, copies: bool) -> Storage:
        if copies and storage.holders > 1:
            return Storage(self._ledger, _COPY, storage.size_bytes).hold()
        return storage.hold()

    def _give(self, name: str, gradient: Storage, shared: _Shared) -> None:
        leaf = self._leaves[name]
        shared.waits[leaf.name] -= 1
        before = shared.sums.pop(leaf.name, None)
        if before is not None:
            # Autograd's sum: in place if nobody else holds the first (torch/csrc/autograd/input_buffer.cpp).
            gradient = (
                before if before.holders == 1 else Storage(self._ledger, gradient.label, before.size_bytes)
            )
        if shared.waits[leaf.name]:
            shared.sums[leaf.name] = gradient.hold()
        else:
            leaf.receive(Tensor(leaf.shape, leaf.width, gradient))
        if before is not None:
            before.drop()

    def _do(self, event: Event) -> None:
        kind, held = event[0], self._held  # comparisons, because this runs millions of times
        if kind == "+":
            _, number, size, label = event
            held[number] = self._new(number, size, label)
        elif kind == "-":
            held.pop(event[1]).drop()
        elif kind == "sum":
            _, number, size, label, first = event
            if held[first].holders == 1:
                held[first].overwrite()
            held[number] = self._new(number, size, label)
        elif kind == "fetch":
            if self._hooks is not None:
                self._hooks.fetch(tuple(self._leaves[name] for name in event[1]), forward=event[2])
        elif kind == "release":
            _, names, forward, kept = event
            for name, number in kept:
                self._keep(self._leaves[name], number)
            if self._hooks is not None:
                self._hooks.release(tuple(self._leaves[name] for name in names), forward=forward)

    def _new(self, number: int, size: int, label: int) -> Storage:
        what = self.record.labels[label]
        if number in self._logits:
            what = what._replace(category="logits", name="logits")
        return self._ledger.new(what, size)

    def _keep(self, leaf: Leaf, number: int) -> None:
        """Keep what was gathered for a parameter as long as a recomputation has it saved."""
        storage = leaf.storage
        self._held[number] = Storage(self._ledger, _TOKEN, 0).hold() if storage is None else storage.hold()


class RecordedChunk:
    """One micro-batch in the layers of one virtual stage.

    Args:
        layers: The layers in order, followed by the loss after the model's last layer.
        saves: Whether backward has saved what the layers share that is made of a micro-batch's positions.
    """

    def __init__(
        self, ledger: Ledger, layers: Sequence[RecordedLayer], hooks: Hooks | None, *, saves: bool
    ) -> None:
        self._ledger, self.layers, self._hooks, self._saves = ledger, layers, hooks, saves
        self._made: Message = []

    def forward(self, inputs: Message, labels: Message) -> Message:
        """The outputs. The inputs stay the caller's; so do the labels, which go to who computes the loss."""
        if self._hooks is not None:
            self._hooks.fetch((), forward=True)
        if self._saves:
            made = dict.fromkeys(kept for layer in self.layers for kept in layer.record.kept if kept.remade)
            self._made = [Storage(self._ledger, kept.label, kept.size_bytes).hold() for kept in made]
        value = [storage.hold() for storage in inputs]
        for layer in self.layers:
            given = value + labels if layer.record.num_labels else value
            outputs = layer.forward(given)
            dropped(value)
            value = outputs
        if self._hooks is not None:
            self._hooks.release((), forward=True)
        return value

    def backward(self, gradients: Message, *, first: bool, divided: bool) -> Message:
        """Gradients of the inputs that want one.

        Args:
            gradients: Gradients of the outputs that have one; they stay the caller's.
            first: Whether the inputs are the model's, which want none.
            divided: Whether weight gradients wait for :meth:`weights`.
        """
        if self._hooks is not None:
            self._hooks.fetch((), forward=False)
        phase = "backward_input" if divided else "backward"
        shared = _Shared()
        for layer in self.layers:
            for event in layer.record.memory(phase):
                if event[0] == "grad":
                    name = layer.leaf(event[1]).name
                    shared.waits[name] = shared.waits.get(name, 0) + 1
        found = [storage.hold() for storage in gradients]
        for place in reversed(range(len(self.layers))):
            layer = self.layers[place]
            due = iter(found)
            given = [next(due, None) if form.differentiable else None for form in layer.record.outputs]
            found = layer.backward(given, phase, shared, copies=not place)
        dropped(self._made)
        if self._hooks is not None and not first:
            self._hooks.release((), forward=False)
        return found

    def weights(self) -> None:
        """The second part of a divided backward (:meth:`dsx.nn.split.WeightGradients.delivering`).

        Parameter by parameter, each use's communication begun during the one before.
        """
        queue: dict[str, list[tuple[RecordedLayer, int]]] = {}
        leaves: dict[str, Leaf] = {}
        for layer in reversed(self.layers):
            for place, use in enumerate(layer.record.uses):
                leaf = layer.leaf(use.parameter)
                leaves[leaf.name] = leaf
                queue.setdefault(leaf.name, []).append((layer, place))
        if not queue:
            return
        token = Storage(self._ledger, _TOKEN, 4).hold()
        uses = [(name, *use) for name, several in queue.items() for use in several]
        begun = 0
        total: Storage | None = None
        for number, (name, layer, place) in enumerate(uses):
            while begun < min(number + 2, len(uses)):
                uses[begun][1].begin_use(uses[begun][2])
                begun += 1
            gradient = layer.finish_use(place)
            if total is None:
                total = gradient
            else:
                gradient.drop()
            if number + 1 == len(uses) or uses[number + 1][0] != name:
                leaf = leaves[name]
                leaf.receive(Tensor(leaf.shape, leaf.width, total))
                total.drop()
                total = None
        token.drop()
