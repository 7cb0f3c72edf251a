"""Live bytes by what they are for, and autograd over sizes: what operations allocate, save and free.

Autograd over sizes: what a program of tensor operations allocates, saves and frees, without a tensor.

A :class:`Tensor` here is a shape and a share in a :class:`Storage`; a storage is given back to its
:class:`Ledger` when the last share goes, which is torch's own rule. :func:`Tape.backward` runs nodes in the
order of torch's engine (torch/csrc/autograd/engine.cpp: the latest forward operation first, leaves before
all), sums gradients where it sums (input_buffer.cpp: in place if nobody else holds the first) and frees what
a node saved once it has run. :meth:`Tape.checkpoint` is torch.utils.checkpoint without reentry.

An action's memory depends on its kind, its virtual stage and whether its parameters have gradients yet. So
the first two micro-batches of every (kind, stage) are walked tensor by tensor, the second one noted, and all
others are a :class:`~dsx.memory.ledger.Delta`. What goes from rank to rank lives as long as the channel
holds it, whatever the micro-batch; that is followed one by one (:class:`Replay`).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from math import prod
from typing import NamedTuple

from dsx.schedules.schedule import TRANSFERS, Action, Op

__all__ = ["Label", "Leaf", "Ledger", "Storage", "Tape", "Tensor"]


class Label(NamedTuple):
    """What a line of the ledger says of its bytes.

    Attributes:
        category: parameters, gradients, optimizer, buckets, activations, logits, transfers or temporaries.
        name: Of the tensor.
        formula: Its elements and width, in the shape letters of its source.
        source: The file and function that allocates it.
    """

    category: str
    name: str
    formula: str
    source: str


class Ledger:
    """Live bytes by label, and the highest total since :meth:`start` with what it consisted of.

    Args:
        rounding_bytes: Every storage counts as a multiple of this (CUDACachingAllocator.cpp: 512).
    """

    def __init__(self, rounding_bytes: int = 1) -> None:
        self.rounding_bytes = rounding_bytes
        self.current_bytes = 0
        self.peak_bytes = 0
        self.live: dict[Label, int] = {}
        self._rising = True
        self._at_peak: dict[Label, int] = {}

    def rounded(self, size_bytes: int) -> int:
        """What a storage of this size takes."""
        return -(-size_bytes // self.rounding_bytes) * self.rounding_bytes

    def start(self) -> None:
        """Forget the peak: from now on the highest is sought anew."""
        self.peak_bytes, self._rising = self.current_bytes, True

    def take(self, label: Label, size_bytes: int) -> None:
        """Bytes that are live from now on."""
        self.current_bytes += size_bytes
        self.live[label] = self.live.get(label, 0) + size_bytes
        if self.current_bytes > self.peak_bytes:
            self.peak_bytes, self._rising = self.current_bytes, True

    def give(self, label: Label, size_bytes: int) -> None:
        """Bytes that no longer are."""
        if self._rising and self.current_bytes == self.peak_bytes:
            self._at_peak, self._rising = dict(self.live), False
        self.current_bytes -= size_bytes
        self.live[label] -= size_bytes

    @property
    def at_peak(self) -> dict[Label, int]:
        """Bytes by label at the highest total, zeros left out."""
        held = self.live if self._rising and self.current_bytes == self.peak_bytes else self._at_peak
        return {label: size for label, size in held.items() if size}

    def mark(self) -> Mark:
        """Where a stretch begins whose :class:`Delta` is wanted: see :meth:`since`."""
        if self._rising and self.current_bytes == self.peak_bytes:
            self._at_peak, self._rising = dict(self.live), False
        mark = Mark(self.current_bytes, self.peak_bytes, dict(self.live), self._at_peak)
        self.start()
        return mark

    def since(self, mark: Mark) -> Delta:
        """What has happened since ``mark``, to be done again by :meth:`again`."""
        summit, before = self.at_peak, mark.live
        delta = Delta(
            self.current_bytes - mark.current_bytes,
            self.peak_bytes - mark.current_bytes,
            _difference(self.live, before),
            _difference(summit, before),
        )
        if self.peak_bytes <= mark.peak_bytes:
            self.peak_bytes, self._at_peak, self._rising = mark.peak_bytes, mark.at_peak, False
        return delta

    def again(self, delta: Delta) -> None:
        """A stretch like one before, without its tensors."""
        live, top = self.live, self.current_bytes + delta.rise_bytes
        if top > self.peak_bytes:
            self.peak_bytes, self._rising = top, False
            self._at_peak = live | {label: live.get(label, 0) + size for label, size in delta.summit.items()}
        self.current_bytes += delta.net_bytes
        for label, size in delta.net.items():
            live[label] = live.get(label, 0) + size


class Mark(NamedTuple):
    """A ledger's state."""

    current_bytes: int
    peak_bytes: int
    live: dict[Label, int]
    at_peak: dict[Label, int]


class Delta(NamedTuple):
    """What a stretch of operations does to a ledger.

    Attributes:
        net_bytes: More live bytes after it than before.
        rise_bytes: More at its highest.
        net: ``net_bytes`` by label.
        summit: ``rise_bytes`` by label.
    """

    net_bytes: int
    rise_bytes: int
    net: dict[Label, int]
    summit: dict[Label, int]


def _difference(after: dict[Label, int], before: dict[Label, int]) -> dict[Label, int]:
    more = {label: size - before.get(label, 0) for label, size in after.items()}
    more |= {label: -size for label, size in before.items() if label not in after}
    return {label: size for label, size in more.items() if size}


class Storage:
    """Bytes that live as long as a tensor holds them."""

    __slots__ = ("holders", "label", "ledger", "size_bytes")

    @classmethod
    def counted(cls, ledger: Ledger, label: Label, size_bytes: int) -> Storage:
        """One whose bytes are in the ledger already (:meth:`Ledger.again`); they are given back as ever."""
        storage = cls.__new__(cls)
        storage.ledger, storage.label, storage.size_bytes, storage.holders = ledger, label, size_bytes, 0
        return storage

    def __init__(self, ledger: Ledger, label: Label, size_bytes: int) -> None:
        self.ledger, self.label, self.size_bytes = ledger, label, ledger.rounded(size_bytes)
        self.holders = 0
        ledger.take(label, self.size_bytes)


Backward = Callable[..., "Sequence[Tensor | None]"]
"""``backward(saved, *gradients of the outputs)`` to one gradient for each input."""


class Tensor:
    """A view on a storage.

    Attributes:
        shape: Sizes.
        width: Bytes an element.
        storage: What it holds on to; None for one whose memory is counted elsewhere (a parameter).
        source: What its gradient goes to, and as which of its outputs; None without gradient.
    """

    __slots__ = ("shape", "source", "storage", "width")

    def __init__(
        self,
        shape: tuple[int, ...],
        width: int,
        storage: Storage | None,
        source: tuple[GradNode | Leaf, int] | None = None,
    ) -> None:
        self.shape, self.width, self.storage, self.source = shape, width, storage, source
        if storage is not None:
            storage.holders += 1

    def __del__(self) -> None:
        storage = self.storage
        if storage is not None:
            storage.holders -= 1
            if not storage.holders:
                storage.ledger.give(storage.label, storage.size_bytes)

    @property
    def numel(self) -> int:
        """Elements."""
        return prod(self.shape)

    def view(self, *shape: int) -> Tensor:
        """The same memory and gradient under another shape; () keeps the shape."""
        source = (self, 0) if isinstance(self, Leaf) else self.source
        return Tensor(shape or self.shape, self.width, self.storage, source)

    def detach(self) -> Tensor:
        """The same memory without a gradient."""
        return Tensor(self.shape, self.width, self.storage)

    def release(self) -> None:
        """Let go of the memory and stay a node's output (``tensor.data = ...``)."""
        self.__del__()
        self.storage = None

    def hold(self, other: Tensor) -> None:
        """Lie in the memory of ``other`` from now on (``tensor.data = other``)."""
        self.release()
        self.storage = other.storage
        if self.storage is not None:
            self.storage.holders += 1


class Leaf(Tensor):
    """A tensor whose gradient is kept: a parameter or a stage's input.

    Attributes:
        grad: What backwards have summed up.
        outputs: Places for gradients, as a node has them: one.
        accumulate: Takes each gradient as it comes; None sums them in :attr:`grad`, as torch does.
    """

    __slots__ = ("accumulate", "grad", "name")
    outputs = 1

    def __init__(
        self,
        name: str,
        shape: tuple[int, ...],
        width: int,
        *,
        storage: Storage | None = None,
        accumulate: Callable[[Leaf, Tensor], None] | None = None,
    ) -> None:
        super().__init__(shape, width, storage)
        self.source = None
        self.name, self.accumulate = name, accumulate
        self.grad: Tensor | None = None

    def receive(self, gradient: Tensor) -> None:
        """Take over a gradient, or add it (torch/csrc/autograd/functions/accumulate_grad.h)."""
        if self.accumulate is not None:
            self.accumulate(self, gradient)
        elif self.grad is None:
            self.grad = gradient


class GradNode:
    """One operation of the graph."""

    __slots__ = ("backward", "edges", "frame", "number", "outputs", "saved")

    def __init__(
        self,
        number: int,
        edges: tuple[tuple[GradNode | Leaf, int] | None, ...],
        saved: tuple[Tensor, ...],
        backward: Backward,
        frame: tuple[_Frame, int] | None,
    ) -> None:
        self.number, self.edges, self.saved, self.backward = number, edges, saved, backward
        self.frame, self.outputs = frame, 0

    def run(self, gradients: list[Tensor | None]) -> Sequence[Tensor | None]:
        """Gradients of the inputs; what was saved is gone afterwards."""
        saved = self.saved if self.frame is None else self.frame[0].take(self.frame[1])
        try:
            return self.backward(saved, *gradients)
        finally:
            self.saved, self.frame = (), None


class _Stop(Exception):  # noqa: N818 (it is none)
    """A recomputation has all it needs."""


class _Frame:
    """One checkpointed run: how to run it again and, once that is done, what its nodes save."""

    def __init__(self, tape: Tape, run: Callable[[], object]) -> None:
        self.tape, self.run = tape, run
        self.count = self.last = 0
        self.again: dict[int, tuple[Tensor, ...]] = {}
        self.done = False

    def note(self, saved: tuple[Tensor, ...]) -> int:
        """A node of the first run: its place."""
        place = self.count
        self.count += 1
        if saved:
            self.last = place
        return place

    def keep(self, saved: tuple[Tensor, ...]) -> None:
        """A node of the second run. Raises _Stop after the last that saves anything."""
        place = self.count
        self.count += 1
        if saved:
            # Of a parameter too, a copy that shares its memory: what ZeRO-3 gathered for it stays.
            self.again[place] = tuple(t.detach() for t in saved)
        if place == self.last:
            raise _Stop

    def take(self, place: int) -> tuple[Tensor, ...]:
        """What node ``place`` saved; runs everything again when first asked."""
        if not self.done:
            self.done, self.count = True, 0
            self.tape.recompute(self)
        return self.again.pop(place, ())


class Tape:
    """Runs operations and remembers how their gradients are computed."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self._number = 0
        self._frame: _Frame | None = None
        self._again = False

    def new(self, label: Label, width: int, *shape: int) -> Tensor:
        """A tensor in fresh memory."""
        return Tensor(shape, width, Storage(self.ledger, label, prod(shape) * width))

    def scratch(self, label: Label, size_bytes: int) -> Tensor:
        """Fresh memory of so many bytes, for as long as the result is held."""
        return self.new(label, 1, size_bytes)

    def record(
        self,
        inputs: Sequence[Tensor | None],
        outputs: Sequence[Tensor],
        backward: Backward,
        saved: Sequence[Tensor | None] = (),
    ) -> None:
        """Make ``outputs`` the results of an operation on ``inputs``, if any of those has a gradient."""
        edges = tuple(_edge(t) for t in inputs)
        if not any(edges):
            return
        kept = tuple(t if isinstance(t, Leaf) else t.detach() for t in saved if t is not None)
        frame = None
        if self._frame is not None:
            if self._again:
                self._frame.keep(kept)
            else:
                # Who saves nothing does not keep the run's input alive either.
                place = self._frame.note(kept)
                frame, kept = ((self._frame, place) if kept else None), ()
        self._number += 1
        node = GradNode(self._number, edges, kept, backward, frame)
        node.outputs = len(outputs)
        for index, output in enumerate(outputs):
            output.source = (node, index)

    def checkpoint(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """``function(x)``, of which only ``x`` is kept for backward."""
        outer = self._frame
        self._frame = _Frame(self, lambda: function(x))
        try:
            return function(x)
        finally:
            self._frame = outer

    def recompute(self, frame: _Frame) -> None:
        """Run a checkpointed function again for what its nodes save."""
        outer, self._frame, self._again = (self._frame, self._again), frame, True
        try:
            frame.run()
        except _Stop:
            pass
        finally:
            self._frame, self._again = outer

    def backward(self, root: Tensor, gradient: Tensor) -> None:
        """Send ``gradient`` from ``root`` to every leaf that it depends on."""
        assert root.source is not None
        start, index = root.source
        assert isinstance(start, GradNode)
        waits = _dependencies(start)
        buffers: dict[GradNode | Leaf, list[Tensor | None]] = {}
        ready = [(-start.number, start)]
        buffers[start] = [None] * start.outputs
        buffers[start][index] = gradient
        del gradient
        while ready:
            node = heapq.heappop(ready)[1]
            gradients = buffers.pop(node)
            results = list(node.run(gradients))
            del gradients
            for place, edge in enumerate(node.edges):
                result, results[place] = results[place], None
                if edge is None:
                    continue
                target, output = edge
                buffer = buffers.setdefault(target, [None] * target.outputs)
                if result is not None:
                    buffer[output] = self._sum(buffer[output], result)
                del result, buffer
                waits[target] -= 1
                if waits[target]:
                    continue
                if isinstance(target, Leaf):
                    # Leaves have the highest priority of all: nothing runs in between.
                    (total,) = buffers.pop(target)
                    if total is not None:
                        target.receive(total)
                    del total
                else:
                    heapq.heappush(ready, (-target.number, target))

    def _sum(self, first: Tensor | None, second: Tensor) -> Tensor:
        """As torch's input buffer: in place if the buffer alone holds the first gradient."""
        if first is None:
            return Tensor(second.shape, second.width, second.storage)
        assert first.storage is not None
        if first.storage.holders == 1:
            return first
        formula = first.storage.label.formula
        return self.new(
            Label("activations", "sum of gradients", formula, "torch input_buffer.cpp"),
            first.width,
            *first.shape,
        )


def _edge(tensor: Tensor | None) -> tuple[GradNode | Leaf, int] | None:
    if isinstance(tensor, Leaf):
        return tensor, 0
    return None if tensor is None else tensor.source


def _dependencies(start: GradNode) -> dict[GradNode | Leaf, int]:
    """How many edges lead to each node and leaf that can be reached."""
    waits: dict[GradNode | Leaf, int] = {start: 0}
    stack = [start]
    while stack:
        for edge in stack.pop().edges:
            if edge is None:
                continue
            target = edge[0]
            if target not in waits:
                waits[target] = 0
                if isinstance(target, GradNode):
                    stack.append(target)
            waits[target] += 1
    return waits


Kind = tuple[Op, int]
"""What an action does and for which virtual stage."""


def walked(row: Sequence[Action]) -> frozenset[int]:
    """Micro-batches that are among the first two of some kind of computation in a rank's row."""
    seen: dict[Kind, list[int]] = {}
    for action in row:
        if action.op not in TRANSFERS:
            seen.setdefault((action.op, action.stage), []).append(action.micro_batch)
    return frozenset(micro_batch for found in seen.values() for micro_batch in found[:2])


class Replay:
    """What is known of a rank's actions.

    Args:
        ledger: Counts.
        row: The rank's, lowered.
    """

    def __init__(self, ledger: Ledger, row: Sequence[Action]) -> None:
        self.ledger, self.walked = ledger, walked(row)
        self._deltas: dict[Kind, Delta] = {}
        self._seen: dict[Kind, int] = {}
        self._sent: dict[tuple[str, int], Storage] = {}
        self._loss: Storage | None = None
        self._losses = 0

    def begin(self) -> None:
        """Before a step."""
        self._seen.clear()

    def wants(self, action: Action) -> bool:
        """Whether this one, walked now, is to be noted."""
        kind = (action.op, action.stage)
        self._seen[kind] = self._seen.get(kind, 0) + 1
        return kind not in self._deltas and self._seen[kind] == 2

    def note(self, action: Action, delta: Delta) -> None:
        """What it did."""
        self._deltas[action.op, action.stage] = delta

    def sends(self, kind: str, stage: int, tensor: Tensor) -> None:
        """Note what a walked action sends."""
        assert tensor.storage is not None
        self._sent[kind, stage] = tensor.storage

    def like_sent(self, kind: str, stage: int, like: Tensor) -> Tensor:
        """What another micro-batch sends; :meth:`again` has counted it."""
        known = self._sent[kind, stage]
        storage = Storage.counted(self.ledger, known.label, known.size_bytes)
        return Tensor(like.shape, like.width, storage)

    def again(self, action: Action) -> None:
        """A computation without its tensors."""
        self.ledger.again(self._deltas[action.op, action.stage])

    def keeps_loss(self, loss: Tensor | None) -> None:
        """A walked loss, or with None one more like it, is kept until the step is over."""
        if loss is None:
            self._losses += 1
        else:
            self._loss = loss.storage

    def end(self) -> None:
        """The step's losses go."""
        if self._loss is not None:
            self.ledger.give(self._loss.label, self._loss.size_bytes * self._losses)
        self._losses = 0


def leave(tensor: Tensor) -> None:
    """Drop a received tensor whose bytes an action's delta gives back."""
    assert tensor.storage is not None
    tensor.storage.holders += 1
