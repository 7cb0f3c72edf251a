"""The backward of a layer in two parts: input gradients now, weight gradients later.

A zero-bubble schedule (Qi et al. 2023, arXiv:2401.10241, section 2) sends a stage's input gradient on before
it computes weight gradients, which nobody waits for. Here the first part is an ordinary backward inside
:meth:`WeightGradients.deferring`: every dsx module built with the same :class:`WeightGradients` keeps what
its weight gradient needs in place of computing it. The second part is an ordinary backward of the scalar that
:meth:`WeightGradients.delivering` gives. Gradients reach the parameters through autograd, so that ``p.grad``,
post-accumulate hooks and with them ZeRO work as ever.

Parameters get all their gradients in the second part. The cheap ones (biases, norms) are computed in the
first part and kept, so that ZeRO-2 and ZeRO-3 reduce once per micro-batch, and never while another stage
waits.

While rows travel to experts of other ranks, the first part computes some of what waits (:meth:`meanwhile`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dsx.errors import ScheduleError
from dsx.nn.parallel import uncompiled
from dsx.schedules.hiding import Fillers

Key: TypeAlias = tuple[int, int]
"""(virtual stage, micro-batch)."""

Finish: TypeAlias = "Callable[[Tensor | None], Tensor]"
"""The gradient, a tensor that nobody else holds; or what is given, with the gradient added in place."""

Start: TypeAlias = Callable[..., Finish]
"""Takes the kept tensors, starts the communication that the gradient needs, and returns how to finish it."""


@dataclass(slots=True)
class WeightUse:
    """One use of a parameter in one micro-batch, whose gradient is computed in two steps."""

    start: Start
    tensors: tuple[Tensor, ...]
    started: Finish | None = None

    def begin(self) -> None:
        """Start the communication that the gradient needs; what was kept goes, but for what that holds."""
        if self.started is None:
            self.started, self.tensors = self.start(*self.tensors), ()

    def finish(self, total: Tensor | None = None) -> Tensor:
        """See :data:`Finish`."""
        self.begin()
        assert self.started is not None
        finish, self.started = self.started, None
        return finish(total)


@dataclass(slots=True)
class _Kept:
    """All uses of one parameter in one micro-batch."""

    parameter: Tensor
    shape: torch.Size
    uses: list[WeightUse] = field(default_factory=list)
    total: Tensor | None = None  # of uses that were computed ahead, unless the parameter has it

    @property
    def waits(self) -> bool:
        """Whether the parameter is to get something."""
        return bool(self.uses) or self.total is not None


class WeightGradients:
    """Weight gradients of this rank's chunks that wait for their turn.

    One object per engine, passed to every module (:func:`dsx.models.families.layers`) and to whoever runs the
    schedule. Without :meth:`deferring` the modules' backward is undivided, to the last bit.

    It is not tied to a thread, because on CUDA autograd runs a backward in a thread of its own.

    Attributes:
        divides: Whether any backward will be deferred. Where none will, compiled blocks are whole graphs.
    """

    def __init__(self) -> None:
        self.divides = True
        self._key: Key | None = None
        self._kept: dict[Key, dict[int, _Kept]] = {}
        self._fillers, self._direct = Fillers[_Kept](), False

    def __deepcopy__(self, memo: dict[int, Any]) -> WeightGradients:
        """Itself: the gradients of a copied module are asked for here too."""
        return self

    @property
    def active(self) -> bool:
        """Whether a backward that defers is running."""
        return self._key is not None

    def takes(self, parameter: Tensor) -> bool:
        """Whether a gradient is to be kept: one that DeepSpeed reduces with all of a leaf's comes at once.

        It does so when the gradient of the leaf's input is there, and makes zeros of what has not come
        (stage3.py, reduce_leaf_module_grads).
        """
        return self.active and not hasattr(parameter, "ds_z3_leaf_module")

    def has(self, key: Key) -> bool:
        """Whether anything is kept for ``key``."""
        return key in self._kept

    def kept_bytes(self) -> int:
        """The bytes that everything kept holds on to; what is shared counts once."""
        storages = {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
            for kept in self._kept.values()
            for parameter in kept.values()
            for tensors in (*(use.tensors for use in parameter.uses), (parameter.total,))
            for tensor in tensors
            if tensor is not None
        }
        return sum(storages.values())

    @contextmanager
    def deferring(self, key: Key, *, direct: bool = False) -> Iterator[None]:
        """Backwards inside compute input gradients and keep the rest under ``key``.

        Args:
            key: Of what is kept.
            direct: Whether what is computed :meth:`meanwhile` may go to parameters at once, as with
                :meth:`accumulate`; otherwise it is kept for :meth:`delivering`.

        Raises:
            ScheduleError: Another such block is active, or ``key`` has gradients waiting.
        """
        if self._key is not None or key in self._kept:
            raise ScheduleError(
                f"input backward of virtual stage {key[0]}, micro-batch {key[1]}",
                "its weight gradients are still waiting" if key in self._kept else "another one is running",
                "run every micro-batch's weight backward after its input backward, once",
            )
        self._key, self._direct, self._fillers = key, direct, Fillers()
        try:
            yield
        finally:
            self._key, self._fillers = None, Fillers()

    @contextmanager
    def undivided(self) -> Iterator[None]:
        """Inside :meth:`deferring`, compute whole backwards after all."""
        key, self._key = self._key, None
        try:
            yield
        finally:
            self._key = key

    def keep(self, parameter: Tensor, shape: torch.Size, start: Start, *tensors: Tensor) -> None:
        """Called by a module's backward while :attr:`active`: a gradient to compute later.

        Args:
            parameter: A leaf that gets the gradient.
            shape: Of the gradient. (Not taken from ``parameter``, which ZeRO-3 may have emptied.)
            start: Called later as ``start(*tensors)``; returns what finishes the gradient. It may start
                communication: it is called while the gradient before is being computed, in the same order
                on every rank.
            tensors: What to keep.
        """
        assert self._key is not None
        kept = self._kept.setdefault(self._key, {})
        entry = kept.setdefault(id(parameter), _Kept(parameter, shape))
        entry.uses.append(WeightUse(start, tensors))

    def block(self) -> None:
        """A block that exchanges rows begins its backward: what is kept by now is for :meth:`meanwhile`."""
        if self._key is not None:
            waiting = self._kept.get(self._key, {}).values()
            self._fillers.block(entry for entry in waiting if entry.uses)

    def meanwhile(self) -> None:
        """Called while rows of a block travel: computes the share of what waits that belongs to them.

        Which one that is follows from counts (:class:`dsx.schedules.hiding.Fillers`), which are the same on
        all ranks of a stage: so is the order of their collectives, and of each gradient's sum.
        """
        entries = self._fillers.exchange()
        delivery = _Delivery(entries)
        # A forward that is computed again may be under autocast, which no second part is.
        with torch.no_grad(), ExitStack() as stack:
            for kind in {entry.parameter.device.type for entry in entries}:
                stack.enter_context(torch.autocast(kind, enabled=False))
            for index, entry in enumerate(entries):
                parameter = entry.parameter
                if self._direct and not _is_hooked(parameter):
                    parameter.grad = delivery.gradient(index, parameter.grad)
                else:
                    entry.total = delivery.gradient(index)

    @contextmanager
    def delivering(self, key: Key) -> Iterator[Tensor | None]:
        """A scalar whose backward, inside this block, gives the parameters what is kept for ``key``.

        None if nothing is kept: the layers are not dsx's, or their parameters need no gradient. The scalar's
        value is 0 and its incoming gradient is ignored, as the kept gradients are scaled already. Parameters
        get their gradients one by one, in the order of an undivided backward, each freed of what it needed
        before the next one is computed. Nothing stays kept after the block.
        """
        entries = [entry for entry in self._kept.pop(key, {}).values() if entry.waits]
        if not entries:
            yield None
            return
        with _gathered_shapes(entries):
            delivery = _Delivery(entries)
            token = torch.zeros((), device=entries[0].parameter.device)
            # Autograd runs the last link first, and accumulates each link's gradient before the next link.
            for index in reversed(range(len(entries))):
                token = _Link.apply(token, entries[index].parameter, index, delivery)
            yield token

    def taken(self, key: Key) -> list[tuple[Tensor, list[WeightUse]]]:
        """What is kept for ``key``, in the order of delivery; whoever takes it computes the gradients."""
        return [(entry.parameter, entry.uses) for entry in self._kept.pop(key, {}).values()]

    def accumulate(self, key: Key) -> None:
        """Do what :meth:`delivering` and its backward do, without autograd.

        Each gradient is taken over as ``p.grad``, or added to it, as autograd does. Where a
        parameter has hooks, everything stays kept for :meth:`delivering`, whose backward runs them.
        """
        entries = [entry for entry in self._kept.get(key, {}).values() if entry.waits]
        if any(_is_hooked(entry.parameter) for entry in entries):
            return
        self._kept.pop(key, None)
        delivery = _Delivery(entries)
        with torch.no_grad():
            for index, entry in enumerate(entries):
                entry.parameter.grad = delivery.gradient(index, entry.parameter.grad)


def _is_hooked(parameter: Tensor) -> bool:
    hooks = ("_backward_hooks", "_post_accumulate_grad_hooks")
    return any(getattr(parameter, name, None) for name in hooks)


class _Delivery:
    """Computes gradients in the order of their parameters, each one's communication started a step ahead."""

    def __init__(self, entries: list[_Kept]) -> None:
        self._entries, self._uses = entries, [entry.uses for entry in entries]

    def gradient(self, index: int, total: Tensor | None = None) -> Tensor:
        """Gradient of parameter ``index``, the sum over its uses, added to ``total`` if that is given."""
        uses, entry = self._uses[index], self._entries[index]
        if total is None:
            total, entry.total = entry.total, None
        for number, use in enumerate(uses):
            use.begin()
            self._begin_next(index, number)
            total = use.finish(total)
        assert total is not None
        uses.clear()
        return total

    def _begin_next(self, index: int, number: int) -> None:
        later = chain(self._uses[index][number + 1 :], *islice(self._uses, index + 1, None))
        for use in islice(later, 1):
            use.begin()


class _Link(torch.autograd.Function):
    """Identity on ``token``, in whose backward one parameter gets its gradient."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, parameter: Tensor, index: int, delivery: _Delivery) -> Tensor:
        del parameter
        ctx.index, ctx.delivery = index, delivery
        return token.view_as(token)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, Tensor, None, None]:
        needs_token = ctx.needs_input_grad[0]
        return upstream if needs_token else None, ctx.delivery.gradient(ctx.index), None, None


@contextmanager
def _gathered_shapes(entries: list[_Kept]) -> Iterator[None]:
    """Give emptied parameters their whole shape inside the block, without memory.

    ZeRO-3 empties a parameter after use. Autograd checks a gradient's shape against its parameter's, and
    needs no contents: gathering the parameters once more would cost their whole size in communication.
    """
    emptied = [(entry.parameter, entry.parameter.data, entry.shape) for entry in entries]
    emptied = [item for item in emptied if item[1].shape != item[2]]
    for parameter, data, shape in emptied:
        parameter.data = data.new_empty(1).expand(shape)
    try:
        yield
    finally:
        for parameter, data, _ in emptied:
            parameter.data = data


class _Block(torch.autograd.Function):
    """Identity on a block's output, whose backward says that the block's begins."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, split: WeightGradients) -> Tensor:
        ctx.split = split
        return x.detach()  # no view, so that the output's memory can be let go of

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        ctx.split.block()
        return upstream, None


def block_ends(x: Tensor, split: WeightGradients) -> Tensor:
    """The output of a block that exchanges rows, unchanged; see :meth:`WeightGradients.block`."""
    y: Tensor = uncompiled(_Block.apply, x, split)
    return y


class _Later(torch.autograd.Function):
    """Identity on parameters whose gradients, small and already computed, are delivered with the weights'."""

    @staticmethod
    def forward(ctx: Any, split: WeightGradients, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.split, ctx.parameters, ctx.shapes = split, parameters, [each.shape for each in parameters]
        return tuple(each.view_as(each) for each in parameters)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        if not ctx.split.takes(ctx.parameters[0]):
            return None, *gradients
        for parameter, shape, gradient, needed in zip(
            ctx.parameters, ctx.shapes, gradients, ctx.needs_input_grad[1:], strict=True
        ):
            if needed:
                ctx.split.keep(parameter, shape, _as_it_is, gradient)
        return (None,) * (len(gradients) + 1)


def _as_it_is(gradient: Tensor) -> Finish:
    return lambda total: gradient.clone() if total is None else total.add_(gradient)


def late(parameter: Tensor, split: WeightGradients | None) -> Tensor:
    """``parameter`` for use in a forward; when the backward is split, its gradient comes with the weights'.

    For small parameters (biases, norms), whose gradient costs little to compute and to keep.
    """
    return late_together(split, parameter)[0]


def late_together(split: WeightGradients | None, *parameters: Tensor) -> tuple[Tensor, ...]:
    """:func:`late` of several parameters that a forward uses together."""
    if split is None or not split.divides or not all(each.is_leaf for each in parameters):
        return parameters
    views: tuple[Tensor, ...] = uncompiled(_Later.apply, split, *parameters)
    return views
