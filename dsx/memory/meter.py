"""Bytes alive on a device, counted operator by operator."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

CUDA_ROUNDING_BYTES = 512
"""CUDACachingAllocator.cpp, kMinBlockSize: every block is a multiple of it."""


ADD = torch.ops.aten.add.Tensor

_HOLDERS = 2
"""Of a storage that one tensor has: that tensor, and the Python object that is asked."""

_REFERENCES = 4
"""To a tensor that autograd alone has, as sys.getrefcount counts them in :func:`would_be_in_place`."""


def would_be_in_place(args: tuple[Any, ...]) -> bool:
    """Whether autograd, summing two gradients, would add to the first if nobody were looking.

    It does so if it alone holds the first, but never while a dispatch mode is active
    (torch/csrc/autograd/input_buffer.cpp, can_accumulate_inplace; ATen/TensorSubclassLikeUtils.h).
    """
    first, second = args[0], args[1]
    if torch._C._current_graph_task_id() < 0 or torch.is_grad_enabled():  # noqa: SLF001 (no public one)
        return False
    if not isinstance(second, torch.Tensor) or (first.shape, first.dtype) != (second.shape, second.dtype):
        return False
    storage = first.untyped_storage()
    whole = storage.nbytes() == first.numel() * first.element_size()
    holders = torch._C._storage_Use_Count(storage._cdata)  # noqa: SLF001
    return whole and holders == _HOLDERS and sys.getrefcount(first) <= _REFERENCES


class StorageMeter(TorchDispatchMode):
    """Counts every storage that an operator returns, from then until nobody holds it.

    Works on real tensors and on FakeTensors alike, whatever is done to ``Parameter.data``. What an operator
    allocates and frees inside itself (a library's workspace) is not seen.

    Args:
        device_type: Storages on this kind of device count.
        rounding_bytes: Each storage counts as a multiple of this.
        label: Gives what to remember of a new storage; :attr:`at_peak` then says what the peak consisted of.
    """

    def __init__(
        self, device_type: str, *, rounding_bytes: int = 1, label: Callable[[], str] | None = None
    ) -> None:
        super().__init__()
        self._device_type, self._rounding, self._label = device_type, rounding_bytes, label
        self._live: dict[int, tuple[int, str]] = {}
        self._phase = ""
        self.current_bytes = 0
        self.peak_bytes: dict[str, int] = {}
        self.at_peak: dict[str, dict[str, int]] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Peaks inside are noted under ``name``, that at its beginning included."""
        outer, self._phase = self._phase, name
        self._note()
        try:
            yield
        finally:
            self._phase = outer

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator and count what it returns."""
        del types
        replaced = args[0] if func is ADD and would_be_in_place(args) else None
        result = func(*args, **(kwargs or {}))
        if replaced is not None:
            key = replaced.untyped_storage()._cdata  # noqa: SLF001 (as in add)
            if key in self._live:
                self.current_bytes -= self._live[key][0]
                self._live[key] = (0, "")
            del replaced
        if func.is_view:  # of something counted, or of a workspace (gloo's reduce-scatter splits its own)
            return result
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.device.type == self._device_type:
                self.add(leaf)
        return result

    def add(self, tensor: torch.Tensor) -> None:
        """Count a tensor's storage, if it is not counted yet."""
        storage = tensor.untyped_storage()
        key = storage._cdata  # noqa: SLF001 (its address: two tensors on one storage have two Python objects)
        size = -(-storage.nbytes() // self._rounding) * self._rounding
        known = self._live.get(key)
        if known is None:
            if not size:
                return
            weakref.finalize(storage, self._gone, key)
            known = (0, self._label() if self._label is not None else "")
        if size != known[0]:
            self.current_bytes += size - known[0]
            self._live[key] = (size, known[1])
            self._note()

    def _gone(self, key: int) -> None:
        self.current_bytes -= self._live.pop(key)[0]

    def _note(self) -> None:
        if self.current_bytes <= self.peak_bytes.get(self._phase, -1):
            return
        self.peak_bytes[self._phase] = self.current_bytes
        if self._label is not None:
            totals: dict[str, int] = {}
            for size, label in self._live.values():
                totals[label] = totals.get(label, 0) + size
            self.at_peak[self._phase] = totals
