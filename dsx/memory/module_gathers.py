"""Layers recorded under ZeRO-3: each module's parameters are gathered before it, and let go after it.

The functions around a module are of the same shape as those of deepspeed/runtime/zero/parameter_offload.py,
and hold as much. Which parameters a run really gathers when is :mod:`dsx.memory.stage3`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from dsx.memory.device import swapped

GATHERED = "w"
"""Name of the memory that a parameter is gathered into, which is not the layer's."""


class Notes(Protocol):
    """What is asked of :class:`dsx.memory.layer_recorder.LayerRecorder`."""

    def emit(self, *event: Any) -> None:
        """Note an event."""

    def paused(self) -> AbstractContextManager[None]:
        """Inside, nothing is noted and no new storage counts."""

    def external(self, tensor: Tensor, name: str) -> None:
        """Follow a storage of the caller's under a name of its own."""

    def renumbered(self, key: int) -> int | None:
        """A number for a storage that was followed under a name; None if it is gone."""


class _ModuleHook(torch.autograd.Function):
    """Identity, whose backward tells that a module's begins, or has ended (zero/parameter_offload.py)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tell: Callable[[], None]) -> Tensor:
        ctx.tell = tell
        return x.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None]:
        ctx.tell()
        return dx, None


class _Parameters(dict[str, Any]):
    """A module's parameters, which tells of those that are read by name (parameter_offload.py)."""

    __slots__ = ("_told",)

    def __init__(self, held: Mapping[str, Any], told: Callable[[nn.Parameter], None]) -> None:
        super().__init__(held)
        self._told = told

    def __getitem__(self, name: str) -> Any:
        found = super().__getitem__(name)
        if found is not None:
            self._told(found)
        return found


class ModuleGathers:
    """Gathers each module's parameters and lets go of them, as ZeRO-3 does, and notes both.

    A parameter that is read while no module that runs has it, as mixers read the weight of a convolution that
    they do not call, is from then on also one of the innermost module that runs. That is learned in a first
    forward, as in DeepSpeed, in which parameters stay where they are until :meth:`begin`.
    """

    def __init__(self, recorder: Notes, layer: nn.Module, owner: nn.Module, names: Mapping[int, str]) -> None:
        self._recorder, self._names, self._owner, self._learns = recorder, names, owner, True
        self._shapes = {id(p): (p.shape, p.dtype, p.device) for p in owner.parameters()}
        self._users: dict[int, set[int]] = {key: set() for key in self._shapes}
        self._read_elsewhere: dict[nn.Module, list[nn.Parameter]] = {}
        self._remaining: dict[int, int] = {}
        self._running: list[nn.Module] = []
        self._backward: list[nn.Module] = []
        whole = [module for module in layer.modules() if _gathered_whole(module)]
        for parameter in (each for module in whole for each in module.parameters()):
            parameter.ds_z3_leaf_module = None  # type: ignore[attr-defined] # whose gradients no linear puts off
        inside = {inner for module in whole for inner in module.modules() if inner is not module}
        modules = dict.fromkeys((*layer.modules(), *owner.modules()))
        self._hooked = [module for module in modules if module not in inside]
        for module in modules:
            module._parameters = _Parameters(module._parameters, self._read)  # noqa: SLF001 (no public one)
        for module in self._hooked:
            module.register_forward_pre_hook(lambda module, _: self.fetch(module, forward=True))
            module.register_forward_hook(self._ended)

    def begin(self) -> None:
        """After the first forward: let go of all parameters, and gather them from now on."""
        self._learns = False
        for module in self._hooked:
            module.register_forward_hook(self._after)
            module.register_forward_pre_hook(self._before)
        for parameter in self._owner.parameters():
            self._empty(parameter)

    def _read(self, parameter: nn.Parameter) -> None:
        if self._running and self._users.get(id(parameter)) == set():
            module = self._running[-1]
            self._read_elsewhere.setdefault(module, []).append(parameter)
            self._gather(parameter, module)

    def _ended(self, module: nn.Module, _: Any, output: Any) -> None:
        self.release(module, forward=True)
        for one in output if isinstance(output, tuple | list) else [output]:
            self._read(one)  # a parameter that it returns is used by who has called it

    def _after(self, module: nn.Module, _: Any, output: Any) -> Any:
        return _mapped(output, lambda y: _ModuleHook.apply(y, partial(self.fetch, module, forward=False)))

    def _before(self, module: nn.Module, inputs: Any) -> Any:
        self._remaining[id(module)] = 0

        def ends() -> None:
            self._remaining[id(module)] -= 1
            if not self._remaining[id(module)]:
                self.release(module, forward=False)

        def one(x: Tensor) -> Tensor:
            self._remaining[id(module)] += x.requires_grad
            y: Tensor = _ModuleHook.apply(x, ends)
            return y

        return _mapped(inputs, one)

    def own(self, module: nn.Module) -> list[nn.Parameter]:
        """Its own or its tied one's, all below one that is gathered whole, and those that it reads."""
        tied = getattr(module, "tied_module", None)
        own = module.parameters(_gathered_whole(module)) if tied is None else tied.parameters()
        return [*own, *self._read_elsewhere.get(module, ())]

    def fetch(self, module: nn.Module, *, forward: bool) -> None:
        """Before a module's forward or backward."""
        held = self.own(module)
        self._recorder.emit("fetch", [self._names[id(p)] for p in held], forward)
        for parameter in held:
            self._gather(parameter, module)
        (self._running if forward else self._backward).append(module)

    def _gather(self, parameter: nn.Parameter, module: nn.Module) -> None:
        if not self._users[id(parameter)] and not self._learns:
            shape, dtype, device = self._shapes[id(parameter)]
            with self._recorder.paused():
                parameter.data = torch.empty(shape, dtype=dtype, device=device)
                self._recorder.external(parameter, GATHERED)
        self._users[id(parameter)].add(id(module))

    def release(self, module: nn.Module, *, forward: bool) -> None:
        """After it."""
        held = self.own(module)
        kept: list[list[Any]] = []
        for parameter in held:
            self._users[id(parameter)].discard(id(module))
            if not self._users[id(parameter)] and not self._learns:
                number = self._empty(parameter)
                if number is not None:
                    kept.append([self._names[id(parameter)], number])
        self._recorder.emit("release", [self._names[id(p)] for p in held], forward, kept)
        if forward:
            self._running.remove(module)
        # A module whose output nobody uses has an end without a beginning.
        elif module in self._backward:
            self._backward.remove(module)

    def rest(self) -> None:
        """After a backward: of modules whose inputs get no gradient nobody has told the end."""
        with self._recorder.paused():
            for module in list(self._backward):
                self.release(module, forward=False)

    def _empty(self, parameter: nn.Parameter) -> int | str | None:
        """Let go of a parameter's memory; the id of what somebody has saved of it."""
        recorder = self._recorder
        with recorder.paused():
            before = parameter.untyped_storage()
            key = before._cdata  # noqa: SLF001 (as in StorageMeter.add)
            del before
            _, dtype, device = self._shapes[id(parameter)]
            parameter.data = torch.empty(0, dtype=dtype, device=device)
            return recorder.renumbered(key)


def linear_of_zero3(layer: nn.Module) -> AbstractContextManager[None]:
    """Inside, torch's linear is what DeepSpeed puts in its place, where a layer's modules may call it.

    That one saves its input, of a frozen parameter too, and the parameter (deepspeed/runtime/zero/linear.py),
    where torch's saves a view, which would keep what was gathered.
    """
    for parameter in layer.parameters():
        # By these linears know ZeRO-3's parameters, DeepSpeed's linear in backward, too.
        parameter.ds_id = parameter.ds_status = None  # type: ignore[attr-defined]
    if all(type(each).__module__.startswith("dsx.") for each in layer.modules()):  # whose linears do not
        return nullcontext()
    from deepspeed.runtime.zero.linear import zero3_linear_wrap

    return swapped(nn.functional, "linear", zero3_linear_wrap)


def _gathered_whole(module: nn.Module) -> bool:
    """Whether DeepSpeed puts no hooks on what is inside (deepspeed/utils/z3_leaf_module.py)."""
    return getattr(module, "_z3_leaf", False)


def _mapped(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, tuple):
        found = tuple(_mapped(each, function) for each in value)
        return value._make(found) if hasattr(value, "_make") else found
    if isinstance(value, list):
        return [_mapped(each, function) for each in value]
    return value
