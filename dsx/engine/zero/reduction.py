"""Reduces gradients over data parallelism in DeepSpeed's place, as dsx.parallel.reduction decides."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from dsx.engine.executor import StepHooks
from dsx.errors import ModelError
from dsx.parallel.reduction import GradientPiece
from dsx.schedules.schedule import Schedule


class GradientStore(Protocol):
    """Where an optimizer accumulates gradients, and where it wants the averaged ones.

    Attributes:
        in_place: Whether gradients stay in the store's memory and averages go back there. Otherwise the store
            lets go of what is taken, and nothing is put before all has been taken.
    """

    in_place: bool

    def take(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """The gradient accumulated in this step; None if there is none."""

    def put(self, parameter: nn.Parameter, gradient: torch.Tensor, start: int = 0) -> None:
        """The average over data-parallel ranks, flat, of :meth:`take`'s dtype or the wire's.

        Args:
            parameter: The parameter.
            gradient: The whole average or, in place, some elements of it.
            start: The first of these elements.
        """

    def came_late(self, parameter: nn.Parameter) -> bool:
        """Whether a gradient has come since :meth:`take`."""

    def complete(self) -> None:
        """Called when all averages of the step have been put."""


@dataclass(frozen=True, slots=True)
class Scale:
    """The factors that make a sum over the ranks an average, before and after the summation."""

    before: float
    after: float

    @classmethod
    def of(cls, engine: Any, size: int, *, always_before: bool) -> Scale:
        """The factors of DeepSpeed (runtime/engine.py, allreduce_bucket; stage_1_and_2.py, average_tensor).

        Args:
            engine: The DeepSpeedEngine.
            size: Data-parallel degree.
            always_before: Whether to multiply before, as ZeRO-1 and 2 with ``reduce_scatter`` always do.
        """
        if not engine.gradient_average:
            return cls(1.0, 1.0)
        if always_before or not engine.postscale_gradients():
            return cls(1.0 / size, 1.0)
        factor = engine.gradient_predivide_factor()
        return cls(1.0 / factor, factor / size)


class Reduction(StepHooks, Protocol):
    """Who reduces gradients over data parallelism.

    Attributes:
        by_dsx: Whether dsx does it instead of DeepSpeed.
    """

    by_dsx: bool

    def finish(self) -> None:
        """Make all gradients averages, before the update."""


class LeftToDeepSpeed:
    """Leaves it to DeepSpeed, which reduces in a step's last backward or after each micro-batch."""

    by_dsx = False

    def begin(self, schedule: Schedule) -> None:
        """Nothing to do."""

    def before_action(self, position: int) -> None:
        """Nothing to do."""

    def chunk_done(self, stage: int) -> None:
        """Nothing to do."""

    def finish(self) -> None:
        """Nothing to do."""


@dataclass(frozen=True, slots=True)
class _Bucket:
    """Gradients that are being reduced, end to end in one tensor."""

    pieces: Sequence[GradientPiece[nn.Parameter]]
    flat: torch.Tensor
    work: dist.Work | None


class GradientTransport:
    """All-reduces buckets of gradients."""

    def __init__(
        self,
        store: GradientStore,
        *,
        names: Mapping[nn.Parameter, str],
        group: dist.ProcessGroup,
        scale: Scale,
        wire_dtype: Callable[[nn.Parameter], torch.dtype],
    ) -> None:
        self._store, self._names, self._group, self._scale = store, names, group, scale
        self._wire_dtype = wire_dtype
        self.in_place, self.alone = store.in_place, dist.get_world_size(group) == 1

    def leave(self, parameter: nn.Parameter) -> None:
        """The gradient stays where it is until it is sent; the store notes what comes after this."""
        self._store.take(parameter)

    def send(self, pieces: Sequence[GradientPiece[nn.Parameter]]) -> _Bucket:
        """Send a flat copy of a bucket; a single gradient that needs no sum is sent itself."""
        first = pieces[0].parameter
        dtype = self._wire_dtype(first)
        if self.alone:
            gradient = self._store.take(first)
            if gradient is None:
                gradient = torch.zeros(first.numel(), dtype=dtype, device=first.device)
            return _Bucket(pieces, gradient.reshape(-1), None)
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
        return _Bucket(pieces, flat, dist.all_reduce(flat, group=self._group, async_op=True))

    def land(self, bucket: _Bucket) -> None:
        """Put the averages into the store."""
        if bucket.work is not None:
            bucket.work.wait()
            if self._scale.after != 1.0:
                bucket.flat.mul_(self._scale.after)
        start = 0
        for piece in bucket.pieces:
            self._store.put(piece.parameter, bucket.flat.narrow(0, start, piece.length), piece.start)
            start += piece.length

    def all_left(self) -> None:
        """Raises ModelError if a parameter got a gradient after its reduction had begun."""
        late = [name for parameter, name in self._names.items() if self._store.came_late(parameter)]
        if late:
            raise ModelError(
                f"parameter {late[0]!r}",
                "layers of a chunk that does not own it use it, so that a gradient came after its reduction",
                "build the layers that share it as TiedLayerSpec of one key",
            )

    def complete(self) -> None:
        """Tell the store that it has all averages."""
        self._store.complete()


def reducible(engine: Any) -> bool:
    """Whether dsx reduces in DeepSpeed's place.

    It does not where DeepSpeed does more with gradients than to average them: offload (they go to the host
    one by one), ZenFlow, sparse embeddings, Ulysses' sequence parallelism, DeepCompile, Muon (which needs
    whole matrices on several ranks). There they are reduced in the step's last backward, or, at ZeRO-2 and
    with offload, after each micro-batch.
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
