"""Optimizer states in stock checkpoints that are one number: ``step``, NAdam's ``mu_product``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dsx.checkpoint.formats.torch_file import TorchFile
from dsx.checkpoint.formats.unpickle import TensorRef


def numbers_of(state: Mapping[str, Any], group: Mapping[str, Any], file: TorchFile) -> dict[str, float]:
    """The states of one parameter that are one number for all of it.

    Args:
        state: Of the parameter.
        group: Its optimizer group, where FusedAdam has the ``step``.
        file: What both were read from.
    """
    found = {"step": group.get("step")}
    found |= {str(key): value for key, value in state.items() if _is_number(value)}
    return {key: number for key, value in found.items() if (number := number_of(value, file)) is not None}


def number_of(value: Any, file: TorchFile) -> float | None:
    """A number that a file has as such or as a tensor; None if there is none."""
    if isinstance(value, TensorRef):
        return file.value(value)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _is_number(value: Any) -> bool:
    """Whether a state is one number: torch's optimizers have them as tensors without dims."""
    return not value.shape if isinstance(value, TensorRef) else type(value) in (int, float)
