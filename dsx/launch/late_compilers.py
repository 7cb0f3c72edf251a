"""Keeps torch's compilers out of a start that compiles nothing.

torch's optimizers import ``torch._dynamo`` to say of a few functions that they are not to be compiled. And
DeepSpeed's ZeRO imports its Muon to ask whether an optimizer is one: that module has three functions
compiled, for which torch imports its inductor when the module is imported. Together they are two of the four
seconds of processor time that a rank takes to its first step. Until something compiles there is nothing to be
kept out of a graph, and a stand-in answers; whatever else is asked of ``torch._dynamo`` loads it.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

_DYNAMO = "torch._dynamo"


class LateDynamo(ModuleType):
    """What ``import torch._dynamo`` gives until an attribute beyond these is asked for."""

    def __init__(self) -> None:
        super().__init__(_DYNAMO)
        spec = importlib.util.find_spec(_DYNAMO)
        assert spec is not None, "it is a part of torch"
        self.__spec__, self.__file__ = spec, spec.origin

    @staticmethod
    def graph_break(msg: str = "") -> None:
        """Outside of a graph, as torch's own, nothing."""

    def disable(self, fn: Any = None, *args: Any, **options: Any) -> Any:
        """``fn``, which torch's own ``disable`` is asked to keep out of graphs once there can be any."""
        if fn is None:
            return self._loaded().disable(fn, *args, **options)
        kept_out: Callable[..., Any] | None = None

        @functools.wraps(fn)
        def call(*values: Any, **named: Any) -> Any:
            nonlocal kept_out
            if kept_out is None:
                if sys.modules.get(_DYNAMO) is self:
                    return fn(*values, **named)
                kept_out = self._loaded().disable(fn, *args, **options)
            return kept_out(*values, **named)

        return call

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loaded(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("__") or sys.modules.get(_DYNAMO) is self:
            super().__setattr__(name, value)
        else:  # a submodule that was just imported
            setattr(self._loaded(), name, value)

    def _loaded(self) -> Any:
        """Torch's own module. One thread takes the stand-in away; others wait for the import."""
        if sys.modules.get(_DYNAMO) is self:
            sys.modules.pop(_DYNAMO, None)
        return importlib.import_module(_DYNAMO)


def load_compilers_late() -> None:
    """Put the stand-in into place, unless torch's compilers are there already.

    Called when there is a process group, because torch asks ``torch._dynamo`` for more when it makes one.
    """
    if _DYNAMO in sys.modules:
        return
    sys.modules[_DYNAMO] = LateDynamo()
    _import_muon()


def _import_muon() -> None:
    """Import DeepSpeed's Muon so that what it compiles is compiled at its first call."""
    from deepspeed.runtime import compiler

    now = compiler.compile
    compiler.compile = _compiled_late
    try:
        importlib.import_module("deepspeed.runtime.zero.muon.original_muon")
    finally:
        compiler.compile = now


def _compiled_late(*args: Any, **options: Any) -> Any:
    """``deepspeed.runtime.compiler.compile``, a decorator factory, at the first call of what it decorates."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.cache
        def compiled() -> Callable[..., Any]:
            from deepspeed.runtime import compiler

            made: Callable[..., Any] = compiler.compile(*args, **options)(function)
            return made

        @functools.wraps(function)
        def call(*values: Any, **named: Any) -> Any:
            return compiled()(*values, **named)

        return call

    return decorate
