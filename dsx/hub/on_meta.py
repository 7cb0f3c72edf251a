"""Modules that are built with their parameters on the meta device."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


class _LargeOnMeta(TorchFunctionMode):
    """Puts large tensors that are made without values on the meta device, before they take memory.

    Stacks of experts' matrices are made of zeros (Llama 4); tables and masks, which buffers need, have fewer
    dimensions.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.empty, torch.zeros) and kwargs.get("device") is None:
            made = func(*args, **{**kwargs, "device": "meta"})
            if made.numel() > _MOST_KEPT and (func is torch.empty or made.dim() > _TABLE):
                return made
        return func(*args, **kwargs)


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Inside the block, modules get their parameters on the meta device, and buffers with values."""
    register = nn.Module.register_parameter

    def registered(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            value = parameter.detach()
            parameter = nn.Parameter(value.to("meta"), requires_grad=parameter.requires_grad)
            if value.numel() <= _MOST_KEPT:
                parameter.made_with = value  # type: ignore[attr-defined]  # read by made_with
        register(module, name, parameter)

    nn.Module.register_parameter = registered  # type: ignore[method-assign, assignment]  # in the block alone
    try:
        with _LargeOnMeta():
            yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


_MOST_KEPT = 1 << 16
_TABLE = 2


def made_with(parameter: nn.Parameter) -> Tensor | None:
    """What a small parameter's module made it with; None for a large one."""
    value: Tensor | None = getattr(parameter, "made_with", None)
    return value


def forget(parameter: nn.Parameter) -> None:
    """Let go of what a parameter's module made it with: its fresh values come from elsewhere."""
    vars(parameter).pop("made_with", None)


def put_plain_modules(model: nn.Module) -> None:
    """Put torch's modules in the place of transformers' that do the same; such linears are ``turned``."""
    from transformers.activations import FastGELUActivation, NewGELUActivation
    from transformers.pytorch_utils import Conv1D

    for path, module in list(model.named_modules()):
        if isinstance(module, Conv1D):  # a linear, which dsx cuts, adapts and defers as one
            linear: Any = nn.Linear(module.nx, module.nf, device="meta", dtype=module.weight.dtype)
            linear.turned = True
            model.set_submodule(path, linear)
        elif type(module).__name__ == "FalconLinear":  # rounds once more in low precision, before its bias
            module.__class__ = nn.Linear
        elif isinstance(module, NewGELUActivation | FastGELUActivation):  # torch has it in one operator
            model.set_submodule(path, nn.GELU(approximate="tanh"))


def copied(module: nn.Module, memo: dict[int, Any] | None = None) -> Any:
    """A copy of a module of the model, its parameters on the meta device those of the model.

    Buffers are copied by an operator, which tensors without storage have too.

    Args:
        module: Of the model.
        memo: What stands for objects inside, by their ids, as ``copy.deepcopy`` takes it.
    """
    memo = {} if memo is None else memo
    waiting = [module]
    while waiting:
        inner = waiting.pop()
        for value in (*vars(inner).values(), *inner._parameters.values(), *inner._buffers.values()):  # noqa: SLF001
            if isinstance(value, Tensor):
                memo.setdefault(id(value), value if value.is_meta else value.clone())
        waiting += [child for child in inner.children() if id(child) not in memo]
    return copy.deepcopy(module, memo)
