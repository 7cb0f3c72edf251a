"""The paper device as DeepSpeed's accelerator, and what the engine needs besides to run without storage."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from deepspeed.accelerator import set_accelerator
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from deepspeed.ops.op_builder.builder import OpBuilder
from deepspeed.ops.op_builder.cpu.no_impl import NotImplementedBuilder
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import optimizer

from dsx.memory import device


class _Kernels:
    """Compiled code of DeepSpeed's that works in place: any function of it does nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_args, **_kwargs: None


class _Builder:
    def load(self, verbose: bool = True) -> _Kernels:
        del verbose
        return _Kernels()

    def is_compatible(self, verbose: bool = False) -> bool:
        del verbose
        return True


class PaperAccelerator(CPU_Accelerator):
    """What DeepSpeed asks of a GPU, as far as it changes what is allocated; all else does nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.free_bytes: Callable[[], int] = lambda: 1 << 60
        """How much memory is left; enough."""
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

    def is_fp16_supported(self) -> bool:
        """A GPU has it."""
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


def install() -> PaperAccelerator:
    """Make ``paper`` a device of torch and the accelerator of DeepSpeed, for the rest of this process."""
    device.install()
    accelerator = PaperAccelerator()
    set_accelerator(accelerator)
    # Some names are bound to the CPU's builders when DeepSpeed is imported.
    NotImplementedBuilder.load = _Builder.load
    return accelerator


@contextmanager
def engine_without_storage(*, knows: bool = False) -> Iterator[None]:
    """:func:`dsx.memory.device.without_storage` for a whole engine: builds, conversions and updates."""
    with ExitStack() as stack:
        stack.enter_context(device.swapped(nn.Module, "_apply", _apply))
        stack.enter_context(device.swapped(OpBuilder, "load", _Builder.load))
        # Else torch takes FakeTensors for tensors of a kind that its many-at-a-time updates cannot do.
        kinds = [torch.Tensor, nn.Parameter, FakeTensor]
        stack.enter_context(device.swapped(optimizer, "_foreach_supported_types", kinds))
        stack.enter_context(device.without_storage(knows=knows))
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
