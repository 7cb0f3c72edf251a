"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864), in transformers' half-split convention.

Shapes: B micro-batch, S sequence, N heads, D head_dim.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dsx.spec.model import Rope


def inverse_frequencies(rope: Rope, head_dim: int) -> Tensor:
    """Angle per position of each pair of elements: float32 [D/2].

    As transformers computes them (modeling_rope_utils.py: _compute_linear_scaling_rope_parameters and
    _compute_llama3_parameters; modeling_llama.py: compute_default_rope_parameters).
    """
    frequency = 1.0 / (rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))
    if rope.kind == "default":
        return frequency
    if rope.kind == "linear":
        return frequency / rope.factor
    # llama3: long waves are stretched by `factor`, short ones kept, those between interpolated.
    wavelength = 2 * math.pi / frequency
    span = rope.high_frequency_factor - rope.low_frequency_factor
    keep = (rope.original_positions / wavelength - rope.low_frequency_factor) / span
    keep = keep.clamp(0.0, 1.0)
    return (1 - keep) * frequency / rope.factor + keep * frequency


class Rotary:
    """Rotates queries and keys; one object serves all blocks of a rank.

    Args:
        rope: Its settings.
        head_dim: Size of one head.
    """

    def __init__(self, rope: Rope, head_dim: int) -> None:
        self.rope = rope
        self._frequency = inverse_frequencies(rope, head_dim)
        self._tables: tuple[Tensor, Tensor] | None = None

    def __repr__(self) -> str:
        return f"Rotary({self.rope})"

    def __call__(self, x_BSND: Tensor) -> Tensor:
        """Turn each head by its position, counted from 0: [B, S, N, D] to the same."""
        cos_SD, sin_SD = self.tables(x_BSND.shape[1], x_BSND.dtype, x_BSND.device)
        left, right = x_BSND.chunk(2, dim=-1)
        half_turned = torch.cat((-right, left), dim=-1)
        return x_BSND * cos_SD[:, None] + half_turned * sin_SD[:, None]

    def tables(self, length: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
        """Cosine and sine [S, D] of positions 0 .. length-1, computed in float32; the last ones are kept."""
        kept = self._tables
        if (
            kept is not None
            and kept[0].shape[0] == length
            and (kept[0].dtype, kept[0].device) == (dtype, device)
        ):
            return kept
        # Not as inference tensors, which a later training step could not save for backward.
        with torch.inference_mode(mode=False), torch.no_grad():
            position_S = torch.arange(length, dtype=torch.float32, device=device)
            angle = position_S[:, None] * self._frequency.to(device)
            angle_SD = torch.cat((angle, angle), dim=-1)
            self._tables = (angle_SD.cos().to(dtype), angle_SD.sin().to(dtype))
        return self._tables
