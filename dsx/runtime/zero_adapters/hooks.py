"""DeepSpeed's gradient hooks and epilogue, under a backward that gives some parameters nothing, or all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

_EPILOGUE = "overlapping_partition_gradients_reduce_epilogue"


class GradientHooks:
    """Skips what ZeRO does with gradients where there are none.

    The input part of a split backward gives weights no gradient. torch calls a parameter's post-accumulate
    hook all the same (2.13; older ones do not), and DeepSpeed's takes ``parameter.grad`` for granted. After
    such a backward ZeRO-2's epilogue fails for want of a bucket; it would otherwise add a partition of zeros.

    Args:
        optimizer: DeepSpeed's ZeRO optimizer.
        handler: Its method that a hook calls with the parameter whose gradient has come.
        prepare: What the epilogue needs that ``handler`` would have done.
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
