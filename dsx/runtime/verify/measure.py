"""Numbers of tensors: differences, factors, and what a gradient is a sum of."""

from __future__ import annotations

import torch
from torch import Tensor

from dsx.plan.parity.facts import Fit, Shares


def scale_of(tensor: Tensor) -> float:
    """Its largest absolute value."""
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def relative(a: Tensor, b: Tensor) -> float:
    """Largest difference over b's largest element; infinite for other shapes or a NaN."""
    if a.shape != b.shape:
        return float("inf")
    off = float((a - b).abs().max()) / max(scale_of(b), 1e-30) if a.numel() else 0.0
    return float("inf") if off != off else off  # noqa: PLR0124 (NaN)


def fit(seen: Tensor, wanted: Tensor) -> Fit:
    """The factor on ``wanted`` that comes nearest to ``seen``."""
    y, x = seen.double().flatten(), wanted.double().flatten()
    square = float(x @ x)
    factor = float(x @ y) / square if square else 0.0
    return Fit(factor, float((y - factor * x).abs().max()) / max(scale_of(y), 1e-30))


def shares_of(seen: Tensor, parts: Tensor, dp: int) -> tuple[Shares | None, float]:
    """How often each micro-batch's gradient is in ``seen``, by least squares, and what is left, relative.

    Args:
        seen: The layout's gradient.
        parts: [m x dp, ...] what each micro-batch should contribute, replica fastest.
        dp: Data-parallel degree.

    Returns:
        None where the tensor has too few elements to tell the contributions apart.
    """
    columns, y = parts.flatten(1).double(), seen.double().flatten()
    if y.numel() < 2 * len(columns):
        return None, 0.0
    solved = torch.linalg.lstsq(columns.t(), y.unsqueeze(1), driver="gelsd").solution.squeeze(1)
    left = float((y - solved @ columns).abs().max()) / max(scale_of(y), 1e-30)
    rows = solved.view(-1, dp).tolist()
    return tuple(tuple(row) for row in rows), left
