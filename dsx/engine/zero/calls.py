"""Forwards and backwards of a DeepSpeedEngine, without what a step of a pipeline does not need.

``DeepSpeedEngine.forward`` and ``backward`` look through some forty settings and hook every output, once per
chunk and micro-batch. On a CPU that is 0.1 to 0.3 ms a call, a third of what an action costs beyond its
computation. Where those settings are off, :class:`DirectCalls` does what remains.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from dsx.engine.executor import Calls
from dsx.engine.p2p import Tensors
from dsx.engine.zero.norm import LossScale

_EPILOGUE = "overlapping_partition_gradients_reduce_epilogue"


@contextmanager
def changed(changes: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """Inside the block, attributes of classes or modules are others: (whose, name, what takes its place)."""
    with ExitStack() as undo:
        for owner, name, value in changes:
            before = vars(owner)
            undo.callback(
                *((setattr, owner, name, before[name]) if name in before else (delattr, owner, name))
            )
            setattr(owner, name, value)
        yield


class GradientHooks:
    """Skips ZeRO's handling of gradients where there are none.

    The input part of a split backward gives weights no gradient. torch calls a parameter's post-accumulate
    hook all the same (2.13; older ones do not), and DeepSpeed's takes ``parameter.grad`` for granted. After
    such a backward ZeRO-2's epilogue fails for want of a bucket; it would otherwise add a partition of zeros.

    Args:
        optimizer: DeepSpeed's ZeRO optimizer.
        handler: Its method that a hook calls with the parameter whose gradient has come.
        prepare: Does what the epilogue needs and ``handler`` would have done.
    """

    def __init__(self, optimizer: Any, handler: str, prepare: Callable[[], None] | None = None) -> None:
        self._optimizer, self._prepare = optimizer, prepare
        self._handle, self._run_epilogue = getattr(optimizer, handler), getattr(optimizer, _EPILOGUE)
        self._came = False
        setattr(optimizer, handler, self._on_gradient)
        setattr(optimizer, _EPILOGUE, self._epilogue)

    def before_backward(self) -> None:
        """No gradient has come yet."""
        self._came = False

    def _on_gradient(self, parameter: nn.Parameter, *arguments: Any) -> None:
        if parameter.grad is not None:
            self._came = True
            self._handle(parameter, *arguments)

    def _epilogue(self) -> None:
        if not self._came:
            if not self._optimizer.is_gradient_accumulation_boundary():
                return
            if self._prepare is not None:
                self._prepare()
        self._run_epilogue()


class Backwards:
    """What has to be done before each backward.

    Args:
        engine: The DeepSpeedEngine, which is told when the last backward of a step comes.
        prepare: Called before each backward; the work of ZeRO's adapter there.

    Attributes:
        at_boundary: Whether the last backward, or the optimizer's step, is under way.
    """

    def __init__(self, engine: Any, prepare: Callable[[], None]) -> None:
        self._engine, self._managed = engine, bool(engine.managed_gradient_accumulation())
        self._prepare = prepare
        self._told: bool | None = None
        self.at_boundary = False

    def begin(self, *, boundary: bool) -> None:
        """Before a backward; at the last one DeepSpeed reduces what it has not (ZeRO-0 and 1)."""
        self._prepare()
        if self._managed and boundary is not self._told:
            self._engine.set_gradient_accumulation_boundary(boundary)
            self._told = boundary
        self.at_boundary = boundary


class _Seed(torch.autograd.Function):
    """A scalar whose gradient with respect to a stage's outputs is what the next stage sent back.

    The value is never computed from the outputs, so that their memory may be gone, and the gradient is passed
    on unscaled whatever multiplies the scalar, so that loss scaling happens once, at the loss.
    """

    @staticmethod
    def forward(ctx: Any, gradients: Tensors, *outputs: torch.Tensor) -> torch.Tensor:
        del outputs
        ctx.gradients = gradients
        return torch.zeros((), device=gradients[0].device)

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> Any:
        del upstream
        return (None, *ctx.gradients)


def _roots(outputs: Tensors, gradients: Tensors) -> Tensors:
    """What a backward starts from, with gradients of its own.

    Given gradients beside it, torch compares their shapes with SymPy (torch/autograd/__init__.py,
    _make_grads), whose import takes each rank a second of processor time in its first step.
    """
    return (_Seed.apply(gradients, *outputs),) if gradients else outputs


class EngineCalls:
    """DeepSpeed's own calls, which ZeRO-3 needs, and models that are measured, compiled or cast."""

    hooked = True

    def __init__(self, engine: Any, backwards: Backwards, loss_scale: LossScale) -> None:
        self._engine, self._backwards, self._scale = engine, backwards, loss_scale
        self.forward = engine
        if engine.flops_profiler_enabled():
            _profile_whole_steps(engine)

    def backward(self, outputs: Tensors, gradients: Tensors, *, boundary: bool, is_loss: bool) -> None:
        """``engine.backward``; the prologue comes with the outputs of ``engine.forward``."""
        self._backwards.begin(boundary=boundary)
        scalar = _roots(outputs, gradients)[0]
        if is_loss:
            scalar = self._scale.scaled_without_zero(scalar)
        self._engine.backward(scalar, scale_wrt_gas=is_loss)

    def announce(self, loss: torch.Tensor) -> None:
        """Have DeepSpeed notice the start of the backward of a ``loss`` that its forward did not return.

        It hooks the outputs of its own forward alone (runtime/engine.py, register_output_backward_hooks).
        Without this, ZeRO would see gradients outside of any backward, and BF16_Optimizer without immediate
        updates would add the previous backward's gradients once more.
        """
        loss.register_hook(lambda _: self._engine._backward_prologue())  # noqa: SLF001


def _profile_whole_steps(engine: Any) -> None:
    """Have DeepSpeed's profiler count every forward of its step.

    The profiler starts anew at each forward (runtime/engine.py, _forward_prologue), so that only the last of
    all chunks and micro-batches would be counted, and divided by the time of all of them, which the timers
    add up.
    """
    profiler, module = engine.flops_profiler, engine.module
    start_anew, counted = profiler.reset_profile, -1

    def start_once() -> None:
        nonlocal counted
        if counted != engine.global_steps:
            counted = engine.global_steps
            start_anew()
        # Its own hook for this is made inside one of the module's, too late for the forward under way: the
        # time would be that since 1970.
        module.__start_time__ = time.time()

    profiler.reset_profile = start_once


class _OwnCalls:
    """The module and torch's autograd, without the hooks that DeepSpeed has on the module."""

    def __init__(self, engine: Any, backwards: Backwards, loss_scale: LossScale) -> None:
        self._engine, self._backwards, self._scale = engine, backwards, loss_scale
        for hook in (engine.module_forward_pre_hook, engine.module_forward_post_hook):
            hook.remove()

    def announce(self, loss: torch.Tensor) -> None:
        """Nothing to do: what a backward needs is done for every loss."""

    def _begin(self, outputs: Tensors, gradients: Tensors, *, boundary: bool, is_loss: bool) -> Tensors:
        """What a backward starts from: of a loss its share of the step, times fp16's loss scale."""
        self._backwards.begin(boundary=boundary)
        if is_loss:
            outputs = (self._scale.scaled(outputs[0] / self._engine.gradient_accumulation_steps()),)
        return _roots(outputs, gradients)


class DirectCalls(_OwnCalls):
    """The module, and autograd between ZeRO's prologue and epilogue (runtime/engine.py, backward)."""

    hooked = True

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """DeepSpeed's forward without hooks on the outputs, because :meth:`backward` hooks the loss."""
        if self._engine.training_dataloader is None:
            self._engine.tput_timer.start()
        getattr(self._engine.optimizer, "clear_backward_seen_flag", lambda: None)()
        return self._engine.module(*args, **kwargs)

    def backward(self, outputs: Tensors, gradients: Tensors, *, boundary: bool, is_loss: bool) -> None:
        engine, outputs = self._engine, self._begin(outputs, gradients, boundary=boundary, is_loss=is_loss)
        _before_backward(outputs, engine._backward_prologue)  # noqa: SLF001
        engine._running_engine_backward = True  # noqa: SLF001
        try:
            torch.autograd.backward(outputs)
            engine._backward_epilogue()  # noqa: SLF001
        finally:
            engine._running_engine_backward = False  # noqa: SLF001


def _before_backward(outputs: Sequence[torch.Tensor], prologue: Callable[[], None]) -> None:
    """Have ``prologue`` run as the backward's first act; inside it, as it queues a callback with autograd."""
    waiting = [prologue]

    def once(gradient: torch.Tensor) -> None:
        del gradient
        if waiting:
            waiting.pop()()

    for output in outputs:
        output.register_hook(once)


class PlainCalls(_OwnCalls):
    """The module and autograd alone, for when dsx reduces the gradients and ZeRO has nothing to do.

    DeepSpeed's hooks on parameters count them anew in every backward, and prologue and epilogue keep the
    books of reductions that do not come.
    """

    hooked = False

    def __init__(self, engine: Any, backwards: Backwards, loss_scale: LossScale) -> None:
        super().__init__(engine, backwards, loss_scale)
        self.forward = engine.module
        for hook in getattr(engine.optimizer, "_grad_acc_hooks", ()):
            hook.remove()

    def backward(self, outputs: Tensors, gradients: Tensors, *, boundary: bool, is_loss: bool) -> None:
        torch.autograd.backward(self._begin(outputs, gradients, boundary=boundary, is_loss=is_loss))


def calls(engine: Any, backwards: Backwards, loss_scale: LossScale, *, reduced_here: bool) -> Calls:
    """The cheapest calls that are right for an engine.

    ``reduced_here``: DeepSpeed takes gradients only when a step begins, all at once.
    """
    needed = (
        engine.zero_optimization_partition_weights(),
        engine.flops_profiler_enabled(),
        engine.wall_clock_breakdown(),
        engine.memory_breakdown(),
        engine.random_ltd_enabled(),
        engine.torch_autocast_enabled(),
        engine.fp16_auto_cast(),
        engine.is_deepcompile_enabled(),
        engine._is_compiled_autograd_enabled,  # noqa: SLF001
        engine.autotuning_profile_model_info(),
        not engine.managed_gradient_accumulation(),
    )
    if any(needed):
        return EngineCalls(engine, backwards, loss_scale)
    return (PlainCalls if reduced_here else DirectCalls)(engine, backwards, loss_scale)
