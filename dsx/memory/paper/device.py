"""A device that computes nothing, for DeepSpeed and torch: ``paper`` stands for a GPU, ``cpu`` for itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Literal
from unittest import mock

import torch
import torch.nn.functional as F
from deepspeed.accelerator import set_accelerator
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from deepspeed.ops.op_builder.builder import OpBuilder
from deepspeed.ops.op_builder.cpu.no_impl import NotImplementedBuilder
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.function import once_differentiable
from torch.optim import optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import (
    _DummyBackendModule,
    _setup_privateuseone_for_python_backend,
)
from torch.utils.weak import WeakTensorKeyDictionary

Device = Literal["paper", "cpu"]

_ONE_KERNEL = ("silu_backward",)
"""Operators of a gradient and an input that torch composes of others where a device has no kernel."""


class _Kernels:
    """Compiled code of DeepSpeed's that works in place: any function of it does nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_args, **_kwargs: None


class _Builder:
    """Builds nothing."""

    def load(self, verbose: bool = True) -> _Kernels:
        """At once."""
        del verbose
        return _Kernels()

    def is_compatible(self, verbose: bool = False) -> bool:
        """Always."""
        del verbose
        return True


class PaperAccelerator(CPU_Accelerator):
    """What DeepSpeed asks of a GPU, as far as it changes what is allocated; all else does nothing."""

    def __init__(self, kernels: torch.library.Library) -> None:
        super().__init__()
        self.free_bytes: Callable[[], int] = lambda: 1 << 60
        """How much memory is left; enough."""
        self._kernels = kernels  # registered as long as it lives
        self._name = "paper"
        self._communication_backend_name = "fake"

    def device_name(self, device_index: int | None = None) -> str:
        """``paper`` or ``paper:0``."""
        return "paper" if device_index is None else f"paper:{device_index}"

    def device(self, device_index: int | None = None) -> torch.device:
        """The one device."""
        del device_index
        return torch.device("paper", 0)

    def current_device(self) -> int:
        """Always 0."""
        return 0

    def current_device_name(self) -> str:
        """``paper:0``."""
        return "paper:0"

    def device_count(self) -> int:
        """One."""
        return 1

    def set_device(self, device_index: int) -> None:
        """Nothing to set."""

    def is_available(self) -> bool:
        """Always there."""
        return True

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        """Whether it lives here."""
        return tensor.device.type == "paper"

    def pin_memory(self, tensor: torch.Tensor, align_bytes: int = 1) -> torch.Tensor:
        """A copy, as pinning is."""
        del align_bytes
        return tensor.clone()

    def get_op_builder(self, class_name: str) -> type[_Builder]:
        """A GPU has them all."""
        del class_name
        return _Builder

    def create_op_builder(self, class_name: str) -> _Builder | None:
        """A GPU has them all, but for CPUs' collectives through shared memory."""
        return None if class_name == "ShareMemCommBuilder" else _Builder()

    def available_memory(self, device_index: int | None = None) -> int:
        """Where it is less than a flat buffer's size, ZeRO-1 and 2 flatten on the host."""
        del device_index
        return self.free_bytes()

    def memory_allocated(self, device_index: int | None = None) -> int:
        """Unknown here, and printed alone."""
        del device_index
        return 0


class _Answers(TorchDispatchMode):
    """Values where there are none, so that programs that branch on data go their usual way.

    A number is 1, a whole number 0. "All of them" and "at most" are true and any other question false: ids
    are in range, tensors equal, rounding errors small, and nothing overflows.
    """

    def __init__(self) -> None:
        super().__init__()
        self._true: Any = WeakTensorKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer what needs values; pass on all else."""
        del types
        if func is torch.ops.aten._local_scalar_dense.default:  # noqa: SLF001 (an operator)
            if args[0].dtype == torch.bool:
                return args[0] in self._true
            return 1.0 if args[0].dtype.is_floating_point else 0
        if func is torch.ops.aten.equal.default:
            return True
        result = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.all.default, torch.ops.aten.le.Tensor):
            self._true[result] = True
        return result


class _Module(_DummyBackendModule):
    """``torch.paper``, as torch.utils.checkpoint and torch.amp ask it."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        """Without them torch.amp refuses the device, even where it is off."""
        return [torch.bfloat16, torch.float16]


def install() -> PaperAccelerator:
    """Make ``paper`` a device of torch and the accelerator of DeepSpeed, for the rest of this process."""
    _setup_privateuseone_for_python_backend(rename="paper", backend_module=_Module())
    kernels = torch.library.Library("aten", "IMPL")
    for operator in _ONE_KERNEL:
        kernels.impl(operator, lambda _, x: torch.empty_like(x), "PrivateUse1")
    accelerator = PaperAccelerator(kernels)
    set_accelerator(accelerator)
    # Some names are bound to the CPU's builders when DeepSpeed is imported.
    mock.patch.object(NotImplementedBuilder, "load", _Builder.load).start()
    return accelerator


@contextmanager
def without_storage() -> Iterator[None]:
    """Inside, every new tensor is a FakeTensor, and modules convert those in place."""
    with ExitStack() as stack:
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        stack.enter_context(mock.patch.object(nn.Module, "_apply", _apply))
        stack.enter_context(mock.patch("dsx.nn.dropout._scale", _scale))
        stack.enter_context(mock.patch.object(OpBuilder, "load", _Builder.load))
        stack.enter_context(
            mock.patch.object(F, "scaled_dot_product_attention", _attention(F.scaled_dot_product_attention))
        )
        # Else torch takes FakeTensors for tensors of a kind that its many-at-a-time updates cannot do.
        kinds = [torch.Tensor, nn.Parameter, FakeTensor]
        stack.enter_context(mock.patch.object(optimizer, "_foreach_supported_types", kinds))
        stack.enter_context(mock.patch.object(F, "rms_norm", _rms_norm(F.rms_norm)))
        stack.enter_context(mock.patch.object(torch, "tensor", _tensor(torch.tensor)))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(_Answers())
        yield


def _apply(
    module: nn.Module, function: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True
) -> nn.Module:
    """nn.Module._apply, which cannot swap FakeTensors, whose mode refers to them weakly."""
    del recurse
    for inner in module.modules():
        for parameter in inner.parameters(recurse=False):
            with torch.no_grad():
                converted = function(parameter)
            if (converted.dtype, converted.device) != (parameter.dtype, parameter.device):
                parameter.data = converted
        for name, buffer in inner.named_buffers(recurse=False):
            setattr(inner, name, function(buffer))
    return module


def _tensor(usual: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """torch.tensor, which puts numbers on the device itself, past every mode."""

    def tensor(data: Any, *, device: Any = None, **options: Any) -> torch.Tensor:
        if device is None or torch.device(device).type != "paper":
            return usual(data, device=device, **options)
        gradient = options.pop("requires_grad", False)
        made = usual(data, **options)
        return torch.empty(made.shape, dtype=made.dtype, device=device, requires_grad=gradient)

    return tensor


def _scale(like: torch.Tensor, probability: float, seed: int) -> torch.Tensor:
    """dsx.nn.dropout's, without the generator that a device without numbers has not got."""
    del seed
    keep = torch.empty_like(like, memory_format=torch.contiguous_format)
    return keep.bernoulli_(1 - probability).div_(1 - probability)


class _FusedRmsNorm(torch.autograd.Function):
    """What aten::_fused_rms_norm allocates and saves on CUDA (layer_norm_kernel.cu)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        copy = x.contiguous()
        y = torch.empty_like(copy)
        statistics = x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
        ctx.save_for_backward(x, weight, statistics)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        del dy
        x, weight, _ = ctx.saved_tensors
        copy = x.contiguous()
        return torch.empty_like(copy), torch.empty_like(weight)


def _rms_norm(usual: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def norm(x: torch.Tensor, shape: Any, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        if x.device.type != "paper":
            return usual(x, shape, weight, epsilon)
        y: torch.Tensor = _FusedRmsNorm.apply(x, weight)
        return y

    return norm


def _attention(usual: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The fused kernels that torch takes on CUDA (sdp_utils.cpp): flash for half precision without a mask."""

    def attend(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        attn_mask: torch.Tensor | None,
        dropout_p: float,
        is_causal: bool,
        enable_gqa: bool,
    ) -> torch.Tensor:
        if query.device.type != "paper":
            return usual(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa=enable_gqa)
        if query.dtype != torch.float32 and attn_mask is None:
            flash = torch.ops.aten._scaled_dot_product_flash_attention  # noqa: SLF001 (what torch dispatches to)
            return flash(query, key, value, dropout_p, is_causal)[0]  # type: ignore[no-any-return]
        groups = query.shape[1] // key.shape[1]
        if groups > 1:
            key, value = (t.repeat_interleave(groups, dim=1) for t in (key, value))
        if attn_mask is not None:
            attn_mask = attn_mask.expand(*query.shape[:2], -1, -1)
        efficient = torch.ops.aten._scaled_dot_product_efficient_attention  # noqa: SLF001
        grads = torch.is_grad_enabled()
        return efficient(query, key, value, attn_mask, grads, dropout_p, is_causal)[0]  # type: ignore[no-any-return]

    return attend
