"""Gradients over data parallelism: once per step, each chunk's as soon as its last backward is done.

DeepSpeed reduces in the backward that ends the step: the whole rank's gradients at once (ZeRO-0, 1) when
nothing is left to hide the communication behind, or after every micro-batch (ZeRO-2), m times the traffic.
Here a chunk's gradients leave as one asynchronous all-reduce (a few, if they are large) right after the last
action of that chunk, while the rank goes on with its other chunks. They are waited for before the step.

A bucket takes the place of the gradients that it was filled from, so that all buckets may be under way at
once. Where gradients stay in place, buckets come on top of them: then they are cut to size, and
:data:`AT_ONCE` of them are under way at most; the next leaves before one of the actions that follow.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from dsx.errors import ModelError

AT_ONCE = 2
"""Buckets under way where gradients stay in place: one is summed while the next is filled."""


class GradientStore(Protocol):
    """Where an optimizer accumulates gradients, and where it wants the averaged ones.

    Attributes:
        in_place: Gradients stay in the store's memory, and averages go back there. Else the store lets go of
            what is taken, and nothing is put before all has been taken.
    """

    in_place: bool

    def take(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """The gradient accumulated in this step; None if there is none."""

    def put(self, parameter: nn.Parameter, gradient: torch.Tensor, start: int = 0) -> None:
        """The average over data-parallel ranks, flat, of :meth:`take`'s dtype or the wire's.

        Args:
            parameter: Whose it is.
            gradient: All of it, or, in place, some elements.
            start: The first of them.
        """

    def came_late(self, parameter: nn.Parameter) -> bool:
        """Whether a gradient has come since :meth:`take`."""

    def complete(self) -> None:
        """All averages of the step have been put."""


@dataclass(frozen=True, slots=True)
class Scale:
    """What a sum over the ranks is multiplied with to be an average, before and after the summation."""

    before: float
    after: float

    @classmethod
    def of(cls, engine: Any, size: int, *, always_before: bool) -> Scale:
        """As DeepSpeed does it (runtime/engine.py, allreduce_bucket; stage_1_and_2.py, average_tensor).

        Args:
            engine: The DeepSpeedEngine.
            size: Data-parallel degree.
            always_before: ZeRO-1 and 2 with ``reduce_scatter`` take no other way.
        """
        if not engine.gradient_average:
            return cls(1.0, 1.0)
        if always_before or not engine.postscale_gradients():
            return cls(1.0 / size, 1.0)
        factor = engine.gradient_predivide_factor()
        return cls(1.0 / factor, factor / size)


@dataclass(frozen=True, slots=True)
class _Piece:
    """Elements of a parameter's gradient."""

    parameter: nn.Parameter
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class _Bucket:
    """Gradients under way, end to end in one tensor."""

    pieces: Sequence[_Piece]
    flat: torch.Tensor
    work: dist.Work | None


class ChunkReduction:
    """Reduces every trainable parameter exactly once per step.

    A parameter that several chunks of this rank use (a tied weight) leaves after the last of them; one that
    no chunk claims (of the loss function) at the end. One without a gradient counts as zero, so that ranks
    agree on what they send whatever their micro-batches used.

    Args:
        store: Of the optimizer.
        parameters: Everything to reduce, by name.
        uses: Virtual stage -> parameters that its layers use.
        group: The data-parallel ranks.
        scale: Makes the sum an average.
        wire_dtype: What a parameter's gradient is summed in.
        bucket_elements: A bucket is closed once it has as many elements; 0 for the largest parameter's.
    """

    def __init__(
        self,
        store: GradientStore,
        *,
        parameters: Mapping[str, nn.Parameter],
        uses: Mapping[int, Iterable[nn.Parameter]],
        group: dist.ProcessGroup,
        scale: Scale,
        wire_dtype: Mapping[nn.Parameter, torch.dtype],
        bucket_elements: int,
    ) -> None:
        self._store, self._group, self._scale = store, group, scale
        self._alone = dist.get_world_size(group) == 1
        self._wire_dtype = wire_dtype
        self._names = {parameter: name for name, parameter in parameters.items() if parameter.numel()}
        self._bucket_elements = bucket_elements or max((p.numel() for p in self._names), default=1)
        self._users: dict[nn.Parameter, set[int]] = {parameter: set() for parameter in self._names}
        for stage, used in uses.items():
            for parameter in used:
                if parameter in self._users:
                    self._users[parameter].add(stage)
        self._done: set[int] = set()
        self._left: set[nn.Parameter] = set()
        self._waiting: deque[list[_Piece]] = deque()
        self._flying: deque[_Bucket] = deque()

    def chunk_done(self, stage: int) -> None:
        """All backwards of virtual stage ``stage`` in this step are done: start what is complete now."""
        self._done.add(stage)
        self._start([p for p, users in self._users.items() if users and users <= self._done])

    def advance(self) -> None:
        """Before an action: end the oldest reduction if others wait for its place, and send the next.

        On every data-parallel rank before the same action, whatever has arrived: collectives of one rank
        then come in one order.
        """
        if self._waiting:
            if self._is_full:
                self._land(self._flying.popleft())
            self._send(self._waiting.popleft())

    def finish(self) -> None:
        """Before the step: start the rest, wait, and hand the averages to the store.

        Raises:
            ModelError: A parameter got a gradient after its reduction had begun.
        """
        self._start(list(self._users))
        late = [self._names[parameter] for parameter in self._names if self._store.came_late(parameter)]
        if late:
            raise ModelError(
                f"parameter {late[0]!r}",
                "layers of a chunk that does not own it use it, so that a gradient came after its reduction",
                "build the layers that share it as TiedLayerSpec of one key",
            )
        while self._waiting:
            self.advance()
        while self._flying:
            self._land(self._flying.popleft())
        self._store.complete()
        self._done.clear()
        self._left.clear()

    def _start(self, parameters: Sequence[nn.Parameter]) -> None:
        """Those of ``parameters`` that have not left: fill buckets, and send as many as may be under way."""
        filling: dict[torch.dtype, list[_Piece]] = {}
        room: dict[torch.dtype, int] = {}
        for parameter in parameters:
            if parameter in self._left:
                continue
            self._left.add(parameter)
            if self._store.in_place:
                self._store.take(parameter)  # what comes while it waits is late, too
                if self._alone:
                    continue
            dtype = self._wire_dtype[parameter]
            for piece in self._cut(parameter, room.get(dtype, self._bucket_elements)):
                filling.setdefault(dtype, []).append(piece)
                room[dtype] = room.get(dtype, self._bucket_elements) - piece.length
                if self._alone or room[dtype] <= 0:
                    self._waiting.append(filling.pop(dtype))
                    room[dtype] = self._bucket_elements
        self._waiting.extend(filling.values())
        while self._waiting and not self._is_full:
            self._send(self._waiting.popleft())

    def _cut(self, parameter: nn.Parameter, room: int) -> Iterator[_Piece]:
        """All of ``parameter``; in place, as much as the bucket has room for, then buckets full of it."""
        start, numel = 0, parameter.numel()
        while start < numel:
            length = min(room, numel - start) if self._store.in_place else numel
            yield _Piece(parameter, start, length)
            start, room = start + length, self._bucket_elements

    @property
    def _is_full(self) -> bool:
        """Whether no more buckets may be under way."""
        return self._store.in_place and len(self._flying) >= AT_ONCE

    def _send(self, pieces: Sequence[_Piece]) -> None:
        first = pieces[0].parameter
        dtype = self._wire_dtype[first]
        if self._alone:
            gradient = self._store.take(first)
            flat = _zeros(first, dtype) if gradient is None else gradient.reshape(-1)
            self._flying.append(_Bucket(pieces, flat, None))
            return
        flat = torch.empty(sum(piece.length for piece in pieces), dtype=dtype, device=first.device)
        start = 0
        for piece in pieces:
            part = flat.narrow(0, start, piece.length)
            gradient = self._store.take(piece.parameter)
            if gradient is None:
                part.zero_()
            else:
                part.copy_(gradient.reshape(-1).narrow(0, piece.start, piece.length))
            start += piece.length
        if self._scale.before != 1.0:
            flat.mul_(self._scale.before)
        work = dist.all_reduce(flat, group=self._group, async_op=True)
        self._flying.append(_Bucket(pieces, flat, work))

    def _land(self, bucket: _Bucket) -> None:
        if bucket.work is not None:
            bucket.work.wait()
            if self._scale.after != 1.0:
                bucket.flat.mul_(self._scale.after)
        start = 0
        for piece in bucket.pieces:
            self._store.put(piece.parameter, bucket.flat.narrow(0, start, piece.length), piece.start)
            start += piece.length


def _zeros(parameter: nn.Parameter, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(parameter.numel(), dtype=dtype, device=parameter.device)


def reducible(engine: Any) -> bool:
    """Whether dsx reduces in DeepSpeed's place.

    Not where DeepSpeed does something else with gradients than to average them: offload (they go to the host
    one by one), ZenFlow, sparse embeddings, Ulysses' sequence parallelism, DeepCompile, Muon (which needs
    whole matrices on several ranks). Those are reduced in the step's last backward, or at ZeRO-2 and with
    offload after each micro-batch.
    """
    optimizer = engine.optimizer
    modules = engine.module.modules()
    sparse = (nn.Embedding, nn.EmbeddingBag)
    return not (
        not engine.managed_gradient_accumulation()
        or engine.zenflow
        or any(isinstance(module, sparse) and module.sparse for module in modules)
        or engine.sequence_parallel_size > 1
        or engine.is_deepcompile_enabled()
        or getattr(optimizer, "cpu_offload", False)
        or any(getattr(parameter, "use_muon", False) for parameter in engine.module.parameters())
    )
