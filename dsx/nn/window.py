"""The mask of sliding-window attention (Beltagy et al. 2020, arXiv:2004.05150; Mistral 7B, arXiv:2310.06825).

Shapes: S sequence.
"""

from __future__ import annotations

import torch
from torch import Tensor

_ALIGNMENT = 8
"""Elements to whose multiple rows are stored: else torch's memory-efficient kernel copies the mask each time
(aten/native/transformers/attention.cpp, preprocess_mask)."""


class Window:
    """Each token attends to the last ``size`` tokens, itself among them; one object serves all blocks.

    Args:
        size: Of the window.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._mask: Tensor | None = None

    def __repr__(self) -> str:
        return f"Window({self.size})"

    def mask(self, length: int, dtype: torch.dtype, device: torch.device) -> Tensor | None:
        """[S, S] to be added to the scores: 0, or -inf for keys ahead of the query or out of its window.

        None if the window holds the whole sequence: a causal mask, which kernels need no tensor for, does.
        The last one is kept.
        """
        if length <= self.size:
            return None
        kept = self._mask
        if kept is None or kept.shape[0] != length or (kept.dtype, kept.device) != (dtype, device):
            # Not as inference tensors, which a later training step could not save for backward.
            with torch.inference_mode(mode=False), torch.no_grad():
                self._mask = None
                stored = -(-length // _ALIGNMENT) * _ALIGNMENT
                ones = torch.ones(length, stored, dtype=dtype, device=device)
                # The logarithm of what is left is 0 inside and -inf outside: no second S x S tensor.
                kept = self._mask = ones.tril_().triu_(1 - self.size).log_()[:, :length]
        return kept
