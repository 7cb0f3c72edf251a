"""A step's gradients from the last backward to the update: what is alike for all of DeepSpeed's wrappers.

Above all they are reduced over data parallelism in DeepSpeed's place, as dsx.parallel.reduction decides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from dsx.engine.chunks import Tie
from dsx.engine.executor import StepHooks
from dsx.engine.zero.messages import empty, end_sum, start_sum
from dsx.engine.zero.norm import LossScale, NormScope, Refuses
from dsx.engine.zero.replica_check import Parts
from dsx.errors import ModelError
from dsx.parallel.reduction import GradientPiece, Interval, by_owner
from dsx.schedules.schedule import Schedule


class GradientStore(Protocol):
    """Where an optimizer accumulates gradients, and where it wants the averaged ones.

    Attributes:
        in_place: Whether gradients stay in the store's memory and averages go back there. Otherwise the store
            lets go of what is taken, and, without owners, nothing is put before all has been taken.
    """

    in_place: bool

    def take(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """The gradient accumulated in this step; None if there is none."""

    def put(self, parameter: nn.Parameter, start: int, *parts: torch.Tensor) -> None:
        """The average over data-parallel ranks, flat, of :meth:`take`'s dtype or the wire's.

        ``start`` is the first of the elements that are put: not 0 in place, or of an owner's. The first of
        ``parts``, which add up to them, may be overwritten. An owner's alone may be more than one.
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

        ZeRO-1 and 2 with ``reduce_scatter`` always multiply before the sum.
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
    """Gradients that are being summed, end to end in one tensor.

    Attributes:
        pieces: Those whose averages this rank gets, as they lie in ``mine``.
        mine: Their sum, once ``works`` are done and ``received`` is added.
        received: The same elements of each of the other ranks, where they are sent whole.
    """

    pieces: Sequence[GradientPiece[nn.Parameter]]
    mine: torch.Tensor
    works: Sequence[Any]
    received: Sequence[torch.Tensor] = ()


class GradientTransport:
    """Sums buckets of gradients over the data-parallel ranks.

    Without owners every rank gets every sum (an all-reduce). With them a rank gets those of its own
    intervals, for half of the bytes: each rank sends (N - 1) / N of a bucket (arXiv:1910.02054, section 7.1).

    Args:
        store: Has the gradients, and gets the averages.
        names: What errors call parameters.
        wire_dtype: The data type in which a parameter's gradient is sent.
        among: Those of ``group`` that have the same elements of a parameter. A bucket is of parameters for
            which they are the same.
        owners: The intervals of each parameter that a rank keeps the optimizer's state of; None without ZeRO.
    """

    def __init__(
        self,
        store: GradientStore,
        *,
        names: Mapping[nn.Parameter, str],
        group: dist.ProcessGroup,
        scale: Scale,
        wire_dtype: Callable[[nn.Parameter], torch.dtype],
        among: Callable[[nn.Parameter], dist.ProcessGroup],
        owners: Mapping[nn.Parameter, Sequence[Interval]] | None = None,
    ) -> None:
        self._store, self._names, self._group, self._scale = store, names, group, scale
        self._wire_dtype, self._owners, self._among = wire_dtype, owners, among
        self.in_place, self.apart = store.in_place, owners is not None
        self.alone = dist.get_world_size(group) == 1
        # On GPUs the stream waits.
        self.waits = not self.alone and any(parameter.device.type == "cpu" for parameter in names)

    def watch(
        self, parameters: Sequence[nn.Parameter], came: Callable[[nn.Parameter], None]
    ) -> Callable[[], None]:
        """By hooks that come after those of the store.

        A backward within one, as reentrant checkpointing runs it, may give a parameter part of its gradient.
        """
        backward = _next_backward()

        def told(parameter: nn.Parameter) -> None:
            if torch._C._current_graph_task_id() == backward:  # noqa: SLF001 (as torch.autograd.graph does)
                came(parameter)

        handles = []
        for parameter in parameters:
            if parameter.requires_grad:
                handles.append(parameter.register_post_accumulate_grad_hook(told))
            else:
                came(parameter)

        def end() -> None:
            for handle in handles:
                handle.remove()

        return end

    def leave(self, parameter: nn.Parameter) -> None:
        """The gradient stays where it is until it is sent; the store notes what comes after this."""
        self._store.take(parameter)

    def send(self, pieces: Sequence[GradientPiece[nn.Parameter]]) -> _Bucket:
        """Send a flat copy of a bucket; a single gradient that needs no sum is sent itself."""
        first = pieces[0].parameter
        dtype = self._wire_dtype(first)
        gradients = {piece.parameter: self._store.take(piece.parameter) for piece in pieces}
        if self.alone:
            gradient = gradients[first]
            if gradient is None:
                gradient = torch.zeros(first.numel(), dtype=dtype, device=first.device)
            return _Bucket(pieces, gradient.reshape(-1), ())
        flat = empty(sum(piece.length for piece in pieces), dtype, first.device)
        if self._owners is None:
            self._fill(flat, pieces, gradients)
            return _Bucket(pieces, flat, [dist.all_reduce(flat, group=self._among(first), async_op=True)])
        group = self._among(first)
        parts = by_owner(pieces, self._owners, dist.get_world_size(group))
        sizes = [sum(piece.length for piece in part) for part in parts]
        self._fill(flat, [piece for part in parts for piece in part], gradients)
        del gradients  # before what comes in has memory
        return self._send_to_owners(parts[dist.get_rank(group)], flat, sizes, group)

    def _fill(
        self,
        flat: torch.Tensor,
        pieces: Sequence[GradientPiece[nn.Parameter]],
        gradients: Mapping[nn.Parameter, torch.Tensor | None],
    ) -> None:
        scale = self._scale.before
        for piece, part in zip(pieces, flat.split([piece.length for piece in pieces]), strict=True):
            gradient = gradients[piece.parameter]
            if gradient is None:
                part.zero_()
                continue
            gradient = gradient.reshape(-1).narrow(0, piece.start, piece.length)
            if gradient.dtype == flat.dtype:
                torch.mul(gradient, scale, out=part)  # which reads and writes once
            else:
                part.copy_(gradient).mul_(scale)

    def _send_to_owners(
        self,
        pieces: Sequence[GradientPiece[nn.Parameter]],
        flat: torch.Tensor,
        sizes: Sequence[int],
        group: dist.ProcessGroup,
    ) -> _Bucket:
        """Start to sum a bucket that has ``sizes`` elements of each rank, in their order."""
        parts = flat.split(list(sizes))
        mine = parts[dist.get_rank(group)]
        if dist.get_world_size(group) == 1:  # of experts that no other rank has
            return _Bucket(pieces, mine.mul_(self._scale.after), ())
        if flat.device.type == "cpu":
            return _Bucket(pieces, mine, *start_sum(group, parts))
        works = [
            dist.reduce(part, dist.get_global_rank(group, rank), group=group, async_op=True)
            for rank, part in enumerate(parts)
            if len(part)
        ]
        return _Bucket(pieces, mine, works)

    def land(self, bucket: _Bucket) -> None:
        mine, received = bucket.mine, [*bucket.received]
        scales = bool(bucket.works) and self._scale.after != 1.0
        # What came last is added where the sum goes, without another copy.
        last = [] if scales else received[-1:]
        end_sum(mine, bucket.works, received[: len(received) - len(last)])
        if scales:
            mine.mul_(self._scale.after)
        lengths = [piece.length for piece in bucket.pieces]
        summands = (each.split(lengths) for each in (mine, *last))
        for piece, *parts in zip(bucket.pieces, *summands, strict=True):
            self._store.put(piece.parameter, piece.start, *parts)

    def lacking(self, parameters: Mapping[nn.Parameter, bool]) -> set[nn.Parameter]:
        """Those that are marked on any data-parallel rank."""
        marks = torch.tensor([*parameters.values()], dtype=torch.uint8, device=next(iter(parameters)).device)
        if not self.alone:
            dist.all_reduce(marks, op=dist.ReduceOp.MAX, group=self._group)
        return set(compress(parameters, marks.tolist()))

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
        self._store.complete()


def _next_backward() -> int:
    """The number that torch will give to the next backward that is no part of another."""
    numbers: list[int] = []
    with torch.enable_grad():
        root = torch.zeros((), requires_grad=True)
        copy = root.clone()
        copy.register_hook(lambda _: numbers.append(torch._C._current_graph_task_id()))  # noqa: SLF001
        torch.autograd.grad(copy, root)
    return numbers[0] + 1


def reducible(engine: Any) -> bool:
    """Whether dsx reduces in DeepSpeed's place.

    It does not where DeepSpeed does more with gradients than to average them: ZenFlow, sparse embeddings,
    Ulysses' sequence parallelism, DeepCompile, Muon (which needs whole matrices on several ranks). There they
    are reduced in the step's last backward, or, at ZeRO-2, after each micro-batch.
    """
    modules = engine.module.modules()
    sparse = (nn.Embedding, nn.EmbeddingBag)
    return not (
        engine.zenflow
        or any(isinstance(module, sparse) and module.sparse for module in modules)
        or engine.sequence_parallel_size > 1
        or engine.is_deepcompile_enabled()
        or any(getattr(parameter, "use_muon", False) for parameter in engine.module.parameters())
    )


class ZeroAdapter:
    """What the engine asks of DeepSpeed's optimizer wrapper. There is one kind for each of them.

    A kind knows where its wrapper has the gradients, and calls :meth:`sum_ties` and :meth:`take_norm` once a
    step, when they are final and have not been used yet.

    Args:
        ties: Tied weights with copies on other pipeline ranks.
        loss_scale: What the loss is multiplied by, and what has become of the last step.
        clipping: Largest gradient norm where DeepSpeed does not clip; 0 leaves gradients as they are.

    Attributes:
        hooks: What the executor calls as a step proceeds; replaced before :meth:`attach` unless DeepSpeed
            reduces gradients.
        needs_backward: Whether the wrapper has a part in each backward even where dsx reduces gradients.
    """

    in_place = needs_backward = False
    hooks: Reduction

    def __init__(
        self, engine: Any, scope: NormScope, ties: Sequence[Tie], loss_scale: LossScale, clipping: float
    ) -> None:
        self._engine, self._optimizer, self._device = engine, engine.optimizer, engine.device
        self._scope, self._ties, self.loss_scale, self._clipping = scope, ties, loss_scale, clipping
        self.hooks = LeftToDeepSpeed()
        self._refuses: Refuses | None = None
        self._norm = torch.zeros(())
        self._fresh = True  # the next backward is a step's first

    def attach(self) -> None:
        """Replace what the wrapper does wrongly for a part of a pipeline; once, before the first step.

        Raises:
            ConfigError: The optimizer cannot have the tied weights.
        """

    @property
    def reduced_here(self) -> bool:
        """Whether dsx reduces gradients, so that DeepSpeed need not know of them before the step."""
        return self.hooks.by_dsx and not self.needs_backward

    def before_backward(self) -> None:
        """Called before each backward."""

    def forget(self) -> None:
        """Let go of the gradients of a step that an error has cut off; before the next one."""
        self._fresh = True
        for parameter in self._engine.module.parameters():
            parameter.grad = None
            if hasattr(parameter, "grad_accum"):
                parameter.grad_accum = None
        for bucket in getattr(self._optimizer, "ipg_buckets", {}).values():
            getattr(bucket, "clear_params", bucket.clear)()

    def before_step(self, refuses: Refuses | None = None) -> None:
        """Called once all backwards of a step are done, before DeepSpeed's ``step``.

        Args:
            refuses: Asked, alike on every rank, with the gradient norm before the weights are updated; if it
                is true the step is not applied, and DeepSpeed counts it as skipped.
        """
        self._refuses, self._fresh = refuses, True
        self.hooks.finish()

    def complete(self) -> None:
        """Called when all averages of the step have been put."""

    def sum_ties(self, gradients: Iterable[tuple[Tie, torch.Tensor]]) -> None:
        """Sum this rank's (parts of) gradients of tied weights with those of the other copies, in place."""
        for tie, gradient in gradients:
            # By way of the device when they live elsewhere (offload).
            staged = gradient if gradient.device.type == self._device.type else gradient.to(self._device)
            dist.all_reduce(staged, group=tie.group)
            if staged is not gradient:
                gradient.copy_(staged)

    def take_norm(self, parts: Parts, *, partitioned: bool) -> torch.Tensor:
        """The norm of all ranks' gradients as they are, with the loss scale; decides about the step."""
        scaled = self._scope.norm(parts, partitioned=partitioned, device=self._device)
        self._norm = self.loss_scale.judge(scaled, self._refuses)
        return scaled

    @property
    def norm(self) -> torch.Tensor | float:
        """Norm of the last step's gradient over the whole model, before clipping and without the loss scale.

        It is infinite or NaN if a gradient was (every rank then skips the step, except in fp32 without ZeRO,
        where the NaN enters the weights as in torch; in fp16 it is infinite), and NaN if DeepSpeed was told
        not to compute it.
        """
        return self._norm
