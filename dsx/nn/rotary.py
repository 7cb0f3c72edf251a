"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864), in transformers' half-split convention.

Shapes: B micro-batch, S sequence, D head_dim, R the part of it that is rotated.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dsx.spec.model import Rope


def inverse_frequencies(rope: Rope, size: int) -> Tensor:
    """Angle per position of each pair of ``size`` elements: float32 [R/2].

    As transformers computes them (modeling_rope_utils.py: _compute_linear_scaling_rope_parameters,
    _compute_llama3_parameters and _compute_yarn_parameters; modeling_llama.py:
    compute_default_rope_parameters).
    """
    frequency = 1.0 / (rope.theta ** (torch.arange(0, size, 2, dtype=torch.float32) / size))
    if rope.kind == "default":
        return frequency
    if rope.kind == "linear":
        return frequency / rope.factor
    keep = _llama3_keep(rope, frequency) if rope.kind == "llama3" else _yarn_keep(rope, size)
    return (1 - keep) * frequency / rope.factor + keep * frequency


def _llama3_keep(rope: Rope, frequency: Tensor) -> Tensor:
    """Long waves are stretched by ``factor``, short ones kept, those between interpolated: [R/2] in 0..1."""
    wavelength = 2 * math.pi / frequency
    span = rope.high_frequency_factor - rope.low_frequency_factor
    keep = (rope.original_positions / wavelength - rope.low_frequency_factor) / span
    return keep.clamp(0.0, 1.0)


def _yarn_keep(rope: Rope, size: int) -> Tensor:
    """The same by turns over the original positions, linear in the pair (arXiv:2309.00071, section 3.2)."""

    def pair(turns: float) -> float:
        """The pair that makes so many turns."""
        return size * math.log(rope.original_positions / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair(rope.beta_fast), pair(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    span = high - low if high != low else 0.001  # transformers' way out of a division by zero
    return 1 - ((torch.arange(size // 2, dtype=torch.float32) - low) / span).clamp(0.0, 1.0)


class Rotary:
    """Rotates queries and keys; one object serves all blocks of a rank.

    Args:
        rope: Its settings.
        size: Elements of each head that are rotated, R: ``ModelSpec.rotary_size``.
    """

    def __init__(self, rope: Rope, size: int) -> None:
        self.rope, self.size = rope, size
        self._frequency = inverse_frequencies(rope, size)
        self._tables: tuple[Tensor, Tensor] | None = None

    def __repr__(self) -> str:
        return f"Rotary({self.rope})"

    def __call__(self, x: Tensor) -> Tensor:
        """Turn each head by its position, counted from 0: [B, S, ..., D] to the same."""
        if self.size == x.shape[-1]:
            return self._turn(x)
        # One split, whose backward joins the two gradients: two slices' would each fill a whole one.
        turning, rest = x.split((self.size, x.shape[-1] - self.size), dim=-1)
        return torch.cat((self._turn(turning), rest), dim=-1)

    def _turn(self, x: Tensor) -> Tensor:
        heads = (1,) * (x.dim() - 3)
        cos, sin = (t.unflatten(0, (-1, *heads)) for t in self.tables(x.shape[1], x.dtype, x.device))
        left, right = x.chunk(2, dim=-1)
        half_turned = torch.cat((-right, left), dim=-1)
        y: Tensor = x * cos + half_turned * sin
        return y

    def tables(self, length: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
        """Cosine and sine [S, R] of positions 0 .. length-1, computed in float32; the last ones are kept."""
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
            angle_SR = torch.cat((angle, angle), dim=-1)
            scale = self.rope.attention_factor
            self._tables = ((angle_SR.cos() * scale).to(dtype), (angle_SR.sin() * scale).to(dtype))
        return self._tables
