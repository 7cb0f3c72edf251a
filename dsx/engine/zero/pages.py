"""Memory that each step makes anew, in large pages where that is on a CPU."""

from __future__ import annotations

import ctypes
import mmap

import torch

_LARGE = 1 << 21
"""Bytes of a large page of x86-64 and of arm64 with small pages of 4 KiB."""


def empty(elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """``torch.empty`` of a flat tensor.

    The allocator gives a large tensor's memory back to Linux, which hands it out again page by page as it is
    touched. That costs several times as much as to write it, unless pages are large, which Linux has to be
    asked for (madvise(2), MADV_HUGEPAGE). Where it has none, nothing changes.
    """
    made = torch.empty(elements, dtype=dtype, device=device)
    advice = getattr(mmap, "MADV_HUGEPAGE", None)  # Linux's alone
    if advice is not None and made.device.type == "cpu":
        first = -(-made.data_ptr() // _LARGE) * _LARGE
        whole = (made.data_ptr() + made.nbytes - first) // _LARGE * _LARGE
        if whole > 0:
            ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(whole), advice)
    return made
