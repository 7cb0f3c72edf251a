"""Gradients over data parallelism: once per step, each chunk's as soon as its last backward is done.

DeepSpeed reduces in the backward that ends the step: the whole rank's gradients at once (ZeRO-0, 1) when
nothing is left to hide the communication behind, or after every micro-batch (ZeRO-2), m times the traffic.
Here a chunk's gradients leave as one asynchronous all-reduce (a few, if they are large) right after the last
action of that chunk, while the rank goes on with its other chunks. They are waited for before the step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from dsx.errors import ModelError


class GradientStore(Protocol):
    """Where an optimizer accumulates gradients, and where it wants the averaged ones."""

    def take(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """The gradient accumulated in this step, which the store forgets; None if there is none."""

    def put(self, parameter: nn.Parameter, gradient: torch.Tensor) -> None:
        """The average over data-parallel ranks, flat, of :meth:`take`'s dtype or the wire's."""

    def came_late(self, parameter: nn.Parameter) -> bool:
        """Whether a gradient has come since :meth:`take`."""


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
class _Bucket:
    """Gradients under way, end to end in one tensor."""

    parameters: Sequence[nn.Parameter]
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
        bucket_elements: A bucket is closed once it has as many elements.
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
        self._wire_dtype, self._bucket_elements = wire_dtype, bucket_elements
        self._names = {parameter: name for name, parameter in parameters.items() if parameter.numel()}
        self._users: dict[nn.Parameter, set[int]] = {parameter: set() for parameter in self._names}
        for stage, used in uses.items():
            for parameter in used:
                if parameter in self._users:
                    self._users[parameter].add(stage)
        self._done: set[int] = set()
        self._left: set[nn.Parameter] = set()
        self._flying: list[_Bucket] = []

    def chunk_done(self, stage: int) -> None:
        """All backwards of virtual stage ``stage`` in this step are done: start what is complete now."""
        self._done.add(stage)
        self._start([p for p, users in self._users.items() if users and users <= self._done])

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
        while self._flying:
            self._land(self._flying.pop(0))
        self._done.clear()
        self._left.clear()

    def _start(self, parameters: Sequence[nn.Parameter]) -> None:
        waiting: dict[torch.dtype, list[nn.Parameter]] = {}
        elements: dict[torch.dtype, int] = {}
        for parameter in parameters:
            if parameter in self._left:
                continue
            self._left.add(parameter)
            dtype = self._wire_dtype[parameter]
            waiting.setdefault(dtype, []).append(parameter)
            elements[dtype] = elements.get(dtype, 0) + parameter.numel()
            if self._alone or elements[dtype] >= self._bucket_elements:
                self._send(waiting.pop(dtype))
                elements[dtype] = 0
        for bucket in waiting.values():
            self._send(bucket)

    def _send(self, parameters: list[nn.Parameter]) -> None:
        dtype = self._wire_dtype[parameters[0]]
        if self._alone:
            gradient = self._store.take(parameters[0])
            flat = _zeros(parameters[0], dtype) if gradient is None else gradient.reshape(-1)
            self._flying.append(_Bucket(parameters, flat, None))
            return
        flat = torch.empty(sum(p.numel() for p in parameters), dtype=dtype, device=parameters[0].device)
        start = 0
        for parameter in parameters:
            piece = flat.narrow(0, start, parameter.numel())
            gradient = self._store.take(parameter)
            piece.zero_() if gradient is None else piece.copy_(gradient.reshape(-1))
            start += parameter.numel()
        if self._scale.before != 1.0:
            flat.mul_(self._scale.before)
        work = dist.all_reduce(flat, group=self._group, async_op=True)
        self._flying.append(_Bucket(parameters, flat, work))

    def _land(self, bucket: _Bucket) -> None:
        if bucket.work is not None:
            bucket.work.wait()
            if self._scale.after != 1.0:
                bucket.flat.mul_(self._scale.after)
        start = 0
        for parameter in bucket.parameters:
            self._store.put(parameter, bucket.flat.narrow(0, start, parameter.numel()))
            start += parameter.numel()


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
